"""What a method gives to the room `partial` where its local update is more than phases of training on the model that is sent.

A method's client room `coterie_client.methods.NAME` has one object `UPDATE` of pure functions. What a user keeps are arrays by name, for
which there is no message; the room holds them between rounds, and writes them down with the user's private tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from coterie.registry import typed_part
from coterie_client.learning import Fitted, Phase, Tensors

CHOICE = "choice"  # among what a user keeps: which of several models is its own

Settings = Mapping[str, Any]  # of the method, from its `Config.settings`


class Fit(Protocol):
    """Trains a model on the rows of the user at hand; what is drawn is named by seed, user, round, stage and purpose."""

    def __call__(self, tensors: Tensors, phases: Sequence[Phase], purpose: str = "training") -> Fitted: ...


class Moved(NamedTuple):
    """What a local update leaves."""

    tensors: Tensors  # all of the model, of which the shared ones return to the server
    kept: Tensors  # what the user keeps now
    loss: float
    variate: Tensors = MappingProxyType({})  # what returns beside, of a method that sends a `Variate`, which is then among its settings


def _nothing(_: Tensors, __: Settings) -> Tensors:
    return {}


def _as_it_is(model: Tensors, _: Tensors, __: AbstractSet[str]) -> Tensors:
    return model


@dataclass(frozen=True)
class LocalUpdate:
    """The local update of one user."""

    # (model with the shared tensors as sent, what the user keeps, phases and settings of the method, fit)
    update: Callable[[Tensors, Tensors, Sequence[Phase], Settings, Fit], Moved]
    start: Callable[[Tensors, Settings], Tensors] = _nothing  # what users keep at first, given the model of the seed
    # (model, kept, names of the tensors that are moved by gradients) -> the model that the user judges by
    personal: Callable[[Tensors, Tensors, AbstractSet[str]], Tensors] = _as_it_is
    # Of several models, (models, kept, fit) -> what the user keeps, with its `CHOICE`; None: there is one model.
    choose: Callable[[Tensors, Tensors, Fit], Tensors] | None = None


def _phases_alone(model: Tensors, _: Tensors, phases: Sequence[Phase], __: Settings, fit: Fit) -> Moved:
    fitted = fit(model, phases)
    return Moved(fitted.tensors, {}, fitted.loss)


PHASES = LocalUpdate(_phases_alone)


def local_update(name: str) -> LocalUpdate:
    """The local update of a method, `PHASES` where it has none of its own."""
    return typed_part("coterie_client", name, "UPDATE", LocalUpdate) or PHASES


def own_model(model: Tensors, _: Settings) -> Tensors:
    """What users keep at first where it is a model of their own."""
    return model


def judge_own(_: Tensors, kept: Tensors, __: AbstractSet[str]) -> Tensors:
    """The model of their own."""
    return kept


def pulled(phases: Sequence[Phase], weight: float, anchor: Tensors) -> Sequence[Phase]:
    """The phases with weight/2 |w - anchor|^2 added to the loss; as they are where the weight is 0."""
    return [replace(phase, pull=(weight, anchor)) for phase in phases] if weight else phases
