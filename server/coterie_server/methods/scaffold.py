"""Server half of `scaffold`: partial sharing of all tensors and of a control variate (see `coterie.methods.scaffold`).

Left out (skip): as in `partial`. The control variate of a user left out has moved at the user alone, so c is no longer the mean of the c_i.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.families.partial import Single
from coterie.methods.scaffold import Variate, VariateMove
from coterie_server.families.averages import in_order
from coterie_server.families.partial import PartialSharing, ServerUpdate, SharedState
from coterie_server.families.robust import centre_of
from coterie_server.interface.half import Counts, Replies
from coterie_server.interface.wanted import Wanted

C = "control variate"


def start(_: PartialSharing, weights: Single) -> dict[str, Single]:
    """c is zero."""
    return {C: np.zeros_like(weights)}


def asked(_: PartialSharing, state: SharedState, chosen: Indices, __: int) -> list[Variate]:
    """Line 4: communicate (x, c) to all i in S."""
    return [Variate(state.beside[C], users=chosen)]


def returned(half: PartialSharing, chosen: Indices) -> list[Wanted]:
    """Line 13: (Delta y_i, Delta c_i)."""
    return [half.wanted(VariateMove, chosen)]


@np.errstate(over="ignore", invalid="ignore")  # `PartialSharing` checks the result
def taken(half: PartialSharing, state: SharedState, replies: Replies, answered: Indices) -> SharedState:
    """Lines 15 to 17: x + eta_g / |S| sum_i (y_i - x), c + 1/N sum_i (c_i^+ - c_i)."""
    new, c = half.averaged(state, replies, answered), state.beside[C]
    moves = [move.weights for move in half.in_runs(replies, VariateMove, answered)]
    if (wrong := next((move for move in moves if move.shape[1] != c.size), None)) is not None:
        raise ProtocolError(f"{VariateMove.kind} came with rows of {wrong.shape[1]} numbers, wanted {c.size}")
    rule = half.setting.robust
    total = in_order(moves, np.ones(answered.size)) if rule is None else answered.size * centre_of(rule, moves).values
    return replace(new, beside={**new.beside, C: (c + total / half.n_rows.size).astype(c.dtype)})


def vectors(counts: Counts) -> Counts:
    """The control variates travel with the models, both ways."""
    return {("variate", "down"): counts["shared", "down"], ("variate", "up"): counts["shared", "up"]}


OWN = ServerUpdate(start=start, asked=asked, returned=returned, taken=taken, vectors=vectors, beta=lambda config: config.server_lr)
SERVER = OWN.as_half()
