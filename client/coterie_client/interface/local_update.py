"""What a method gives to the family `partial` where its local update is more than phases of training on the model that is sent.

It is one value `UPDATE` in `coterie_client/methods/NAME.py`, a `LocalUpdate` of pure functions. What a user keeps are arrays by name, for
which there is no message; the family holds them between rounds, and writes them down with the user's private tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from coterie.errors import ProtocolError
from coterie.registry import typed_part
from coterie.wire.messages import Rows
from coterie_client.learning import Fitted, Phase, Tensors

Settings = Mapping[str, Any]  # of the method, from its `Config.settings`
M = TypeVar("M", bound=Rows)


class Fit(Protocol):
    """Trains a model on the rows of the user at hand; what is drawn is named by seed, user, round, stage and purpose."""

    def __call__(self, tensors: Tensors, phases: Sequence[Phase], purpose: str = "training") -> Fitted: ...


@dataclass(frozen=True)
class Context:
    """What a local update knows: one user, in one round."""

    model: Tensors  # all of the user's model: the shared tensors as they were sent, its private ones
    kept: Tensors  # what the user keeps
    shared: AbstractSet[str]  # the names of the tensors that travel
    phases: Sequence[Phase]  # of the method, from its `Config.phases`
    settings: Settings
    fit: Fit
    # Numbers (shared,) like the shared float tensors one after the other, as in a field of `Weights`: by the names of those tensors that
    # gradients move; and from tensors by their names to (1, shared) numbers, 0 for those that are not given.
    named: Callable[[NDArray[Any]], Tensors]
    packed: Callable[[Tensors], NDArray[Any]]
    messages: Mapping[type[Rows], Rows]  # those of `LocalUpdate.down` that came with the model, this user's rows of them

    def __getitem__(self, kind: type[M]) -> M:
        """A message that came with the model. ProtocolError where it did not."""
        if kind not in self.messages:
            raise ProtocolError(f"the parent has sent no {kind.kind} with the shared tensors, which the local update needs")
        return self.messages[kind]  # type: ignore[return-value]


class Moved(NamedTuple):
    """What a local update leaves."""

    tensors: Tensors  # all of the model, of which the shared ones return to the server
    kept: Tensors  # what the user keeps now
    loss: float
    messages: Sequence[Rows] = ()  # one of each kind in `LocalUpdate.up`, with the row of this user


class Received(NamedTuple):
    """What a user makes of shared tensors before it judges."""

    kept: Tensors  # what the user keeps now; of a trial it is forgotten afterwards
    messages: Sequence[Rows] = ()  # one of each kind in `LocalUpdate.told`, with the row of this user


def _nothing(_: Tensors, __: Settings) -> Tensors:
    return {}


def _as_it_is(model: Tensors, _: Tensors, __: AbstractSet[str]) -> Tensors:
    return model


@dataclass(frozen=True)
class LocalUpdate:
    """The local update of one user."""

    update: Callable[[Context], Moved]
    start: Callable[[Tensors, Settings], Tensors] = _nothing  # what users keep at first, given the model of the seed
    # (model, kept, names of the tensors that are moved by gradients) -> the model that the user judges by
    judged: Callable[[Tensors, Tensors, AbstractSet[str]], Tensors] = _as_it_is
    # What is done with shared tensors that are delivered, or tried, before the user judges; None: nothing.
    received: Callable[[Context], Received] | None = None
    # The method's own messages, declared in its common module: `down` come with the shared tensors of a round, `up` return with them, and
    # `told` answers their delivery at the end.
    down: tuple[type[Rows], ...] = ()
    up: tuple[type[Rows], ...] = ()
    told: tuple[type[Rows], ...] = ()


def _phases_alone(context: Context) -> Moved:
    fitted = context.fit(context.model, context.phases)
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
    """The phases with weight/2 |w - anchor|^2 added to the loss, for the tensors in `anchor`; as they are where the weight is 0."""
    return [replace(phase, pull=(weight, anchor)) for phase in phases] if weight else phases
