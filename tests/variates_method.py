"""A method with control variates from public names alone: SCAFFOLD (Karimireddy et al., 2020), Algorithm 1, option II of line 12.

Messages of its own go down and up beside the model, the server keeps c, and users keep c_i. A test runs it as a package's module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.plugin import (
    LOCAL_UPDATE,
    Context,
    Counts,
    Indices,
    JointTraining,
    LocalTraining,
    LocalUpdate,
    Moved,
    PartialSharing,
    PlainSgd,
    Replies,
    Reveal,
    Rows,
    ServerUpdate,
    SharedState,
    Tensors,
    Wanted,
    Weights,
    declare,
)

C = "control variate"


class Config(JointTraining):
    """Hyper-parameters."""

    name: Literal["variates"] = "variates"
    optimizer: PlainSgd = PlainSgd()
    average: Literal["rows", "plain"] = "plain"
    server_lr: float = 1.0


@declare(method="variates", step="variate")
@dataclass(frozen=True)
class Variate(Rows):
    """c, for the users of a round."""

    c: Annotated[NDArray[Any], Weights("shared")]


@declare(method="variates", step="variate")
@dataclass(frozen=True)
class Move(Rows):
    """How far c_i has moved, of each user."""

    change: Annotated[NDArray[Any], Weights("rows", "shared")]


METHOD = LocalTraining(
    config=Config,
    models=frozenset({"convex", "network"}),
    reveals=(*LOCAL_UPDATE, Reveal("how far its control variate has moved", "the mean gradient of its round", ("variates/variate",))),
)


# ---- the server


def first(half: PartialSharing, weights: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
    """c = 0."""
    return {C: np.zeros_like(weights)}


def asked(half: PartialSharing, state: SharedState, chosen: Indices, number: int) -> Sequence[Variate]:
    """c goes with the model."""
    return [Variate(state.beside[C], users=chosen)]


def returned(half: PartialSharing, chosen: Indices) -> Sequence[Wanted]:
    """A change comes back with it."""
    return [half.wanted(Move, chosen)]


def taken(half: PartialSharing, state: SharedState, replies: Replies, answered: Indices) -> SharedState:
    """The mean of the models, and c + 1/N sum_i (c_i^+ - c_i)."""
    c = state.beside[C]
    total = np.sum([move.change[0].astype(float) for move in half.one_by_one(replies, Move, answered)], axis=0)
    return replace(half.averaged(state, replies, answered), beside={C: (c + total / half.n_rows.size).astype(c.dtype)})


def vectors(counts: Counts) -> Counts:
    """As many as models."""
    return {("variate", "down"): counts["shared", "down"], ("variate", "up"): counts["shared", "up"]}


SERVER = ServerUpdate(
    start=first, asked=asked, returned=returned, taken=taken, vectors=vectors, beta=lambda config: config.server_lr
).as_half()


# ---- the users


def start(model: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """c_i = 0."""
    return {name: np.zeros_like(array) for name, array in model.items()}


def update(context: Context) -> Moved:
    """Steps along g_i(y) - c_i + c, then c_i^+ = c_i - c + (x - y) / (K eta)."""
    (phase,), model, kept, c = context.phases, context.model, context.kept, context.named(context[Variate].c)
    fitted = context.fit(model, [replace(phase, shift={name: c[name] - kept[name] for name in c})])
    scale = 1 / (fitted.n_steps * phase.lr)
    moves = {name: scale * (model[name] - fitted.tensors[name]) - c[name] for name in c}
    own = {name: kept[name] + moves[name] if name in moves else kept[name] for name in kept}
    return Moved(fitted.tensors, own, fitted.loss, [Move(context.packed(moves))])


UPDATE = LocalUpdate(update, start=start, down=(Variate,), up=(Move,))
