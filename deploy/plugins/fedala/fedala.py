"""`fedala`: Zhang, Hua, Wang, Song, Xue, Ma and Guan (2023), FedALA: adaptive local aggregation for personalized federated learning.

All tensors travel, as in FedAvg, and in the same bytes. What is sent does not replace a user's model: before it trains, a user starts from

    hat Theta_i = Theta_i + (Theta - Theta_i) * [1, ..., 1; W_i]         (5)

where Theta came from the server, Theta_i is what the user returned last, and the weights W_i in [0, 1] are elementwise, of the upper p
layers alone: the lower layers are those of Theta. The user learns W_i on s % of its rows, with hat Theta_i for the model,

    W_i <- clip(W_i - eta grad_W L(hat Theta_i))                          (6)

until it converges when it first has a model of its own, and by one pass in each later round (Algorithm 1, lines 7 to 17). It then trains
hat Theta_i, and returns it. Users judge by hat Theta_i.

Deviations: users who are not drawn in a round keep Theta_i and W_i; a user judges with the W_i that it learnt last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from coterie.plugin import (
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

WEIGHT = "weight of "  # before a tensor's name: W_i of it; the name alone is Theta_i's
ROUNDS = "rounds"  # in which the user has trained


class Config(JointTraining):
    """Hyper-parameters."""

    name: Literal["fedala"] = "fedala"
    rows: Annotated[float, Field(gt=0, le=100)] = 80.0  # s, percent
    layers: PositiveInt = 1  # p
    rate: PositiveFloat = 1.0  # eta
    passes: PositiveInt = 50  # at most, where W_i is to converge
    window: Annotated[int, Field(ge=2)] = 10  # passes whose losses differ by less than `tolerance` once it has
    tolerance: PositiveFloat = 0.1  # standard deviation

    def settings(self) -> dict[str, Any]:
        """What users need to know beside the phases."""
        return self.model_dump(include={"rows", "layers", "rate", "passes", "window", "tolerance"})


@dataclass(frozen=True)
class Weighing:
    """(6): W_i moves, and the model, which holds Theta, stays."""

    own: Tensors  # Theta_i, of the upper layers
    weights: Tensors  # W_i
    rate: float
    n_batches = 1

    def on(self, slope: Slope, phase: Phase) -> Gradient:  # noqa: ARG002
        """At work on a slope."""
        return _Weighing(self, slope)


class _Weighing:
    def __init__(self, rule: Weighing, slope: Slope) -> None:
        self._slope, self._rate = slope, rule.rate
        self._own = {slope.names.index(name): slope.array(array) for name, array in rule.own.items()}
        self._weights = {slope.names.index(name): slope.array(array) for name, array in rule.weights.items()}

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        sent = self._slope.values()
        hat = list(sent)
        for place, own in self._own.items():
            hat[place] = own + (sent[place] - own) * self._weights[place]
        self._slope.put(hat)
        value, g = evaluated(self._slope, rows)
        self._slope.put(sent)
        for place, own in self._own.items():
            self._weights[place] = (self._weights[place] - self._rate * g[place] * (sent[place] - own)).clip(0, 1)
        return value, [0 * one for one in g]

    def beside(self) -> dict[str, Numbers]:
        return {f"{WEIGHT}{self._slope.names[place]}": array for place, array in self._weights.items()}


def upper(model: Tensors, n_layers: int) -> list[str]:
    """The float tensors of the last layers, a layer being what its tensors' names begin with."""
    floats = [name for name, array in model.items() if array.dtype.kind == "f"]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in floats))[-n_layers:]
    return [name for name in floats if name.rpartition(".")[0] in layers]


def start(model: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """Theta_i is the model of the seed, W_i = 1."""
    own = {name: model[name] for name in upper(model, settings["layers"])}
    return {**own, **{f"{WEIGHT}{name}": np.ones_like(array) for name, array in own.items()}, ROUNDS: np.array(0)}


def aggregated(model: Tensors, kept: Tensors, _: AbstractSet[str] = frozenset()) -> Tensors:
    """(5): hat Theta_i."""
    own = {name: kept[name] for name in kept if f"{WEIGHT}{name}" in kept}
    return {**model, **{name: array + (model[name] - array) * kept[f"{WEIGHT}{name}"] for name, array in own.items()}}


def learnt(context: Context) -> Tensors:
    """W_i, by a pass or, in the first round with a model of its own, by as many as it takes; as they are where Theta_i is Theta."""
    settings, kept = context.settings, context.kept
    weights = {name: kept[f"{WEIGHT}{name}"] for name in kept if f"{WEIGHT}{name}" in kept}
    own = {name: kept[name] for name in weights}
    if not kept[ROUNDS] or all(np.array_equal(context.model[name], own[name]) for name in own):
        return {f"{WEIGHT}{name}": array for name, array in weights.items()}
    (phase,) = context.phases
    n_rows = math.ceil(settings["rows"] / 100 * context.target.size)
    one_pass = replace(phase, epochs=None, updates=math.ceil(n_rows / (phase.batch_size or context.target.size)))
    losses: list[float] = []
    for number in range(settings["passes"] if kept[ROUNDS] == 1 else 1):
        rule = Weighing(own, weights, settings["rate"])
        fitted = context.fit(context.model, [replace(one_pass, rule=rule)], f"weights {number}")
        weights = {name: fitted.beside[f"{WEIGHT}{name}"] for name in weights}
        losses.append(fitted.loss)
        if len(losses) >= settings["window"] and np.std(losses[-settings["window"] :]) < settings["tolerance"]:
            break
    return {f"{WEIGHT}{name}": array for name, array in weights.items()}


def update(context: Context) -> Moved:
    """Algorithm 1, lines 7 to 18: W_i, hat Theta_i, and Theta_i, which is both returned and kept."""
    kept = {**context.kept, **learnt(context)}
    fitted = context.fit(aggregated(context.model, kept), context.phases)
    own = {name: fitted.tensors[name] for name in kept if f"{WEIGHT}{name}" in kept}
    return Moved(fitted.tensors, {**kept, **own, ROUNDS: kept[ROUNDS] + 1}, fitted.loss)


METHOD = LocalTraining(config=Config, is_personal=True)
UPDATE = LocalUpdate(update, start, aggregated, returns=lambda name: name != ROUNDS and not name.startswith(WEIGHT))  # Theta_i
