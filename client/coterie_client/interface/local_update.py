"""The interface of local updates in the family `partial` that do more than train the received model in phases.

It is one value `UPDATE` in `coterie_client/methods/NAME.py`: a `LocalUpdate` of pure functions. A user keeps arrays by name, which no
message carries. The family holds them between rounds, and saves them with the user's private tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ProtocolError
from coterie.registry import typed_part
from coterie.wire.messages import Rows
from coterie_client.learning import Fitted, Phase, Tensors

Settings = Mapping[str, Any]  # of the method, from its `Config.settings`
M = TypeVar("M", bound=Rows)


class Fit(Protocol):
    """Trains a model on the user's rows. Draws are keyed by seed, user, round, stage and purpose."""

    def __call__(self, tensors: Tensors, phases: Sequence[Phase], purpose: str = "training") -> Fitted: ...


@dataclass(frozen=True)
class Context:
    """The input of a local update: one user in one round."""

    model: Tensors  # the user's whole model: shared tensors as received, and private ones
    kept: Tensors  # what the user keeps
    target: Array  # (m,) the targets of the user's training rows
    shared: AbstractSet[str]  # names of the shared tensors
    phases: Sequence[Phase]  # of the method, from its `Config.phases`
    settings: Settings
    fit: Fit
    # `named`: from numbers (shared,), which are all shared float tensors in order as in a field of `Weights`, to those tensors by name that
    # have gradients. `packed`: from tensors by name to (1, shared) numbers, with 0 for missing tensors.
    named: Callable[[NDArray[Any]], Tensors]
    packed: Callable[[Tensors], NDArray[Any]]
    messages: Mapping[type[Rows], Rows]  # those in `LocalUpdate.down` that came with the model, with only this user's row

    def __getitem__(self, kind: type[M]) -> M:
        """A message that came with the model. ProtocolError if it did not."""
        if kind not in self.messages:
            raise ProtocolError(f"the parent has sent no {kind.kind} with the shared tensors, which the local update needs")
        return self.messages[kind]  # type: ignore[return-value]


class Moved(NamedTuple):
    """The result of a local update."""

    tensors: Tensors  # the whole model; its shared tensors return to the server
    kept: Tensors  # what the user keeps now
    loss: float
    messages: Sequence[Rows] = ()  # one of each kind in `LocalUpdate.up`, with the row of this user


class Received(NamedTuple):
    """What a user does with shared tensors before it evaluates."""

    kept: Tensors  # what the user keeps now; discarded after a trial
    messages: Sequence[Rows] = ()  # one of each kind in `LocalUpdate.told`, with the row of this user


@dataclass(frozen=True)
class LocalUpdate:
    """The local update of one user."""

    update: Callable[[Context], Moved]
    start: Callable[[Tensors, Settings], Tensors] = lambda *_: {}  # what users keep at first, given the initial model
    # (model, kept, names of the tensors with gradients) -> the model that the user evaluates
    judged: Callable[[Tensors, Tensors, AbstractSet[str]], Tensors] = lambda model, *_: model
    # What a user does with shared tensors that are delivered, or tried, before it evaluates; None: nothing.
    received: Callable[[Context], Received] | None = None
    # The method's own messages, declared in its common module: `down` comes with the shared tensors of a round, `up` returns with them, and
    # `told` answers their delivery at the end.
    down: tuple[type[Rows], ...] = ()
    up: tuple[type[Rows], ...] = ()
    told: tuple[type[Rows], ...] = ()
    returns_kept: bool = False  # whether what a user keeps is what it returns, too: otherwise nobody else may ever see it


def _phases_alone(context: Context) -> Moved:
    fitted = context.fit(context.model, context.phases)
    return Moved(fitted.tensors, {}, fitted.loss)


PHASES = LocalUpdate(_phases_alone)


def local_update(name: str) -> LocalUpdate:
    """The local update of a method, or `PHASES` if it has none."""
    return typed_part("coterie_client", name, "UPDATE", LocalUpdate) or PHASES


def own_model(model: Tensors, _: Settings) -> Tensors:
    """The initial model, for users that keep a model of their own."""
    return model


def judge_own(_: Tensors, kept: Tensors, __: AbstractSet[str]) -> Tensors:
    """The user's own model."""
    return kept


def pulled(phases: Sequence[Phase], weight: float, anchor: Tensors) -> Sequence[Phase]:
    """The phases with weight/2 |w - anchor|^2 added to the loss, for the tensors in `anchor`. Unchanged if the weight is 0."""
    return [replace(phase, pull=(weight, anchor)) for phase in phases] if weight else phases
