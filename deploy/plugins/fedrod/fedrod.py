"""`fedrod`: Chen and Chao (2022), On bridging generic and personalized federated learning for image classification, Algorithm 1 (linear).

One network with two linear heads on one representation theta: a generic head psi, which is shared like theta, and a personal head phi_i,
which stays with its user. On each batch of user i, with z its features, N_c the user's rows of class c and g_G = psi(z), g_P = phi_i(z),

    theta, psi   go along the gradient of the balanced risk,      L_BR: cross entropy of g_G + gamma log N
    phi_i        goes along the gradient of the empirical risk,   L_ER: cross entropy of g_G + g_P,   theta and psi held fixed

The server averages theta and psi by rows. Users predict by g_G + g_P, or, with `judge: generic`, by g_G. phi_i starts at 0, where both are
the same. gamma = 0 is FedAvg with a personal head beside it. The paper's hypernetwork for phi_i is not built.

Heads are linear, so g_G + gamma log N is the head psi with gamma log N added to its bias, and g_G + g_P the head psi + phi_i: each gradient
is that of the network's own loss with another head. A class that the user does not have gets log 0: it is left out of the softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeFloat

from coterie.plugin import (
    Array,
    ConfigError,
    Context,
    Gradient,
    Gradients,
    JointTraining,
    LocalTraining,
    LocalUpdate,
    Moved,
    Numbers,
    Phase,
    Slope,
    Tensors,
    evaluated,
)

HEAD = ("head.weight", "head.bias")  # psi; phi_i has the same names among what its user keeps
PERSONAL = "personal"  # beside it: 1 where the user predicts by both heads, 0 where by the generic one


class Config(JointTraining):
    """Hyper-parameters."""

    name: Literal["fedrod"] = "fedrod"
    gamma: NonNegativeFloat = 1.0  # of the balanced softmax
    judge: Literal["personal", "generic"] = "personal"

    def settings(self) -> dict[str, Any]:
        """What users need to know beside the phases."""
        return {"gamma": self.gamma, "is_personal": self.judge == "personal"}


@dataclass(frozen=True)
class TwoHeads:
    """The gradient of L_BR; beside the model moves phi_i, by that of L_ER."""

    prior: Array  # (classes,) gamma log N
    own: Tensors  # phi_i
    n_batches = 1

    def on(self, slope: Slope, phase: Phase) -> Gradient:
        """At work on a slope."""
        return _TwoHeads(self, slope, phase)


class _TwoHeads:
    def __init__(self, rule: TwoHeads, slope: Slope, phase: Phase) -> None:
        self._slope, self._places = slope, [slope.names.index(name) for name in HEAD]
        self._prior = slope.array(rule.prior.astype(rule.own[HEAD[1]].dtype))
        self._own = [slope.array(rule.own[name]) for name in HEAD]
        self._optimizer = slope.optimizer(phase, self._own)

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        """Both gradients are of the model before the step."""
        slope, (weight, bias), w = self._slope, self._places, self._slope.values()
        slope.put([*w[:bias], w[bias] + self._prior, *w[bias + 1 :]])
        value, balanced = evaluated(slope, rows)
        both = list(w)
        both[weight], both[bias] = w[weight] + self._own[0], w[bias] + self._own[1]
        slope.put(both)
        _, empirical = evaluated(slope, rows)
        slope.put(w)
        self._optimizer.step([empirical[weight], empirical[bias]])
        return value, balanced

    def beside(self) -> dict[str, Numbers]:
        return dict(zip(HEAD, self._own, strict=True))


def start(model: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """phi_i = 0. ConfigError for a model whose head is no linear layer."""
    if not set(HEAD) <= model.keys() or sum(name.startswith("head") for name in model) != len(HEAD):
        raise ConfigError(f"fedrod needs a model whose head is one linear layer with a bias, but this one has {', '.join(model)}")
    return {**{name: np.zeros_like(model[name]) for name in HEAD}, PERSONAL: np.array(float(settings["is_personal"]))}


def update(context: Context) -> Moved:
    """theta and psi to return, phi_i to keep; the loss is L_BR."""
    (phase,), kept = context.phases, context.kept
    counts = np.bincount(context.target.astype(np.int64), minlength=kept[HEAD[1]].size)
    with np.errstate(divide="ignore"):
        prior = context.settings["gamma"] * np.log(counts) if context.settings["gamma"] else np.zeros(counts.size)
    fitted = context.fit(context.model, [replace(phase, rule=TwoHeads(prior, {name: kept[name] for name in HEAD}))])
    return Moved(fitted.tensors, {**kept, **fitted.beside}, fitted.loss)


def judged(model: Tensors, kept: Tensors, _: AbstractSet[str]) -> Tensors:
    """The network with the head psi + phi_i, or with psi."""
    return {**model, **{name: (model[name] + kept[PERSONAL] * kept[name]).astype(model[name].dtype) for name in HEAD}}


METHOD = LocalTraining(config=Config, is_personal=True)
UPDATE = LocalUpdate(update, start, judged)
