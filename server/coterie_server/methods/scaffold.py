"""Server half of `scaffold`: partial sharing of all tensors, and a control variate beside (see `coterie.methods.scaffold`).

Left out (skip): as in `partial`; the control variate of a user whose answer was not waited for has moved at the user alone, so c is no
longer the mean of the c_i.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.families.partial import Single
from coterie.methods.scaffold import Config, Variate, VariateMove
from coterie_server.families import partial
from coterie_server.families.partial import Own, PartialSharing, State, extents, owners
from coterie_server.interface.half import Counts, Replies, Setting, StageHalf
from coterie_server.interface.merge import check_senders
from coterie_server.interface.wanted import Wanted

C = "control variate"


def start(_: PartialSharing, weights: Single) -> dict[str, Single]:
    """c is zero."""
    return {C: np.zeros_like(weights)}


def asked(_: PartialSharing, state: State, chosen: Indices, __: int) -> list[Variate]:
    """Line 4: communicate (x, c) to all i in S."""
    return [Variate(state.beside[C], users=chosen)]


def returned(half: PartialSharing, chosen: Indices) -> list[Wanted]:
    """Line 13: (Delta y_i, Delta c_i)."""
    return [Wanted(VariateMove, chosen, extents(half.tensors))]


@np.errstate(over="ignore", invalid="ignore")  # it is found before it is sent
def taken(half: PartialSharing, state: State, replies: Replies, answered: Indices) -> State:
    """Lines 15 to 17: x + eta_g / |S| sum_i (y_i - x), c + 1/N sum_i (c_i^+ - c_i)."""
    new, c = half.averaged(state, replies, answered), state.beside[C]
    moves = replies.one_by_one(VariateMove)
    check_senders(VariateMove.kind, owners(moves), answered)
    total = np.zeros(c.size)
    for move in moves:
        if move.weights.shape != (1, total.size):
            raise ProtocolError(f"{VariateMove.kind} came with shape {move.weights.shape}, wanted (1, {total.size})")
        total += move.weights[0]
    return replace(new, beside={C: (c + total / half.n_rows.size).astype(c.dtype)})


def vectors(counts: Counts) -> Counts:
    """The control variates travel with the models, both ways."""
    return {("variate", "down"): counts["shared", "down"], ("variate", "up"): counts["shared", "up"]}


OWN = Own(start=start, asked=asked, returned=returned, taken=taken, vectors=vectors)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage. ConfigError when the shared part of the model has no tensors."""
    return replace(partial.set_up(config, setting), beta=config.server_lr, own=OWN).as_half()


SERVER = replace(partial.SERVER, build=build)
