"""The interface of local updates in the family `partial` that do more than train the received model in phases.

It is one value `UPDATE` in `coterie_client/methods/NAME.py`: a `LocalUpdate` of pure functions. A user keeps arrays by name, which no
message carries. The family holds them between rounds, and saves them with the user's private tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
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
    """The input of a local update: one user in one round. With `LocalUpdate.together` also k users, and arrays have a first axis of k."""

    round: int  #: of the stage, from 1; the same on all hosts and after a restart
    model: Tensors  #: the user's whole model: shared tensors as received, and private ones
    kept: Tensors  #: what the user keeps
    target: Array  #: (m,) the targets of the user's training rows
    shared: AbstractSet[str]  #: names of the shared tensors
    phases: Sequence[Phase]  #: of the method, from its `Config.phases`
    settings: Settings  #: of the method, from its `Config.settings`
    fit: Fit  #: trains a model on the user's rows
    #: From numbers (shared,), which are all shared float tensors in order as in a field of `Weights`, to those tensors by name that have
    #: gradients.
    named: Callable[[NDArray[Any]], Tensors]
    #: From tensors by name to (1, shared) numbers (of k users (k, shared)), with 0 for missing tensors: the inverse of `named`.
    packed: Callable[[Tensors], NDArray[Any]]
    messages: Mapping[type[Rows], Rows]  #: those in `LocalUpdate.down` that came with the model, with only the rows of these users

    def __getitem__(self, kind: type[M]) -> M:
        """A message that came with the model. ProtocolError if it did not."""
        if kind not in self.messages:
            raise ProtocolError(f"the parent has sent no {kind.kind} with the shared tensors, which the local update needs")
        return self.messages[kind]  # type: ignore[return-value]


class Moved(NamedTuple):
    """The result of a local update."""

    tensors: Tensors  #: the whole model, in the shapes of `Context.model`; its shared tensors return to the server
    kept: Tensors  #: what the user keeps now: names, shapes and types as `LocalUpdate.start` returned them
    loss: Any  #: the mean training loss, a float such as `Fitted.loss`
    messages: Sequence[Rows] = ()  #: one of each kind in `LocalUpdate.up`, with the row of this user


class Received(NamedTuple):
    """What a user does with shared tensors before it evaluates."""

    kept: Tensors  #: what the user keeps now; discarded after a trial
    messages: Sequence[Rows] = ()  #: one of each kind in `LocalUpdate.told`, with the row of this user


@dataclass(frozen=True)
class LocalUpdate:
    """The local update of one user."""

    update: Callable[[Context], Moved]  #: one round of one user
    start: Callable[[Tensors, Settings], Tensors] = lambda *_: {}  #: what users keep at first, given the initial model
    #: (model, kept, names of the tensors with gradients) -> the model that the user evaluates
    judged: Callable[[Tensors, Tensors, AbstractSet[str]], Tensors] = lambda model, *_: model
    #: What a user does with shared tensors that are delivered, or tried, before it evaluates; None: nothing.
    received: Callable[[Context], Received] | None = None
    #: Messages of the method, declared beside its METHOD, that come with the shared tensors of a round.
    down: tuple[type[Rows], ...] = ()
    #: Messages that return with the shared tensors of a round.
    up: tuple[type[Rows], ...] = ()
    #: Messages that answer the delivery of the final tensors.
    told: tuple[type[Rows], ...] = ()
    #: Whether the user returns what it keeps by this name, as a shared tensor or in a message. Nobody else may ever see the rest.
    returns: Callable[[str], bool] = lambda _: False
    #: Whether `update` and `judged` work for k users too, whose arrays have a first axis of k: they call `fit`, `named` and `packed`, and
    #: all else is elementwise. Users with convex losses then take their steps together, with the same bits, in a small part of the time.
    #: So do those of stacked networks with equally many rows, unless phases have a rule. A rule with arrays has `of_user` then.
    together: bool = False


def _phases_alone(context: Context) -> Moved:
    fitted = context.fit(context.model, context.phases)
    return Moved(fitted.tensors, {}, fitted.loss)


PHASES = LocalUpdate(_phases_alone, together=True)


def local_update(name: str) -> LocalUpdate:
    """The local update of a method, or `PHASES` if it has none."""
    return typed_part("coterie_client", name, "UPDATE", LocalUpdate) or PHASES


def of_each(number: Array, tensor: NDArray[Any]) -> NDArray[Any]:
    """A number that a user keeps, or (k,) those of several users, as a factor of their tensor, whose type the product has."""
    shaped = np.reshape(number, (*np.shape(number), *[1] * (tensor.ndim - np.ndim(number))))
    return shaped.astype(tensor.dtype) if tensor.dtype.kind == "f" else shaped


def own_model(model: Tensors, _: Settings) -> Tensors:
    """The initial model, for users that keep a model of their own."""
    return model


def judge_own(_: Tensors, kept: Tensors, __: AbstractSet[str]) -> Tensors:
    """The user's own model."""
    return kept


def pulled(phases: Sequence[Phase], weight: float, anchor: Tensors) -> Sequence[Phase]:
    """The phases with `weight/2 |w - anchor|^2` added to the loss, for the tensors in `anchor`. Unchanged if the weight is 0."""
    return [replace(phase, pull=(weight, anchor)) for phase in phases] if weight else phases
