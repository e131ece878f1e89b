"""Server half of `scaffold`: partial sharing of all tensors, and a control variate beside (see `coterie.methods.scaffold`).

Left out (skip): as in `partial`; the control variate of a user whose answer was not waited for has moved at the user alone, so c is no
longer the mean of the c_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.families.partial import Variate, VariateMove
from coterie.methods.scaffold import Config
from coterie.wire.messages import Message
from coterie_server.families import partial
from coterie_server.families.partial import PartialSharing, State, extents, owners
from coterie_server.interface.half import Counts, Federation, Replies, Setting, StageHalf
from coterie_server.interface.merge import check_senders
from coterie_server.interface.wanted import Wanted


@dataclass(frozen=True)
class Scaffold(PartialSharing):
    """The server half for one stage."""

    async def init(self, federation: Federation) -> State:
        """x^0 from a user; c is zero."""
        start = await super().init(federation)
        return replace(start, variate=np.zeros_like(start.weights))

    def asked(self, state: State, chosen: Indices, number: int) -> list[Message]:
        """Line 4: communicate (x, c) to all i in S."""
        return [*super().asked(state, chosen, number), Variate(state.variate, users=chosen)]

    def returned(self, chosen: Indices) -> list[Wanted]:
        """Line 13: (Delta y_i, Delta c_i)."""
        return [*super().returned(chosen), Wanted(VariateMove, chosen, extents(self.tensors))]

    @np.errstate(over="ignore", invalid="ignore")  # it is found before it is sent
    def taken(self, state: State, replies: Replies, answered: Indices) -> State:
        """Lines 15 to 17: x + eta_g / |S| sum_i (y_i - x), c + 1/N sum_i (c_i^+ - c_i)."""
        new = super().taken(state, replies, answered)
        moves = replies.one_by_one(VariateMove)
        check_senders(VariateMove.kind, owners(moves), answered)
        total = np.zeros(state.variate.size)
        for move in moves:
            if move.weights.shape != (1, total.size):
                raise ProtocolError(f"{VariateMove.kind} came with shape {move.weights.shape}, wanted (1, {total.size})")
            total += move.weights[0]
        return replace(new, variate=(state.variate + total / self.n_rows.size).astype(state.variate.dtype))

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """The control variates travel with the models, both ways."""
        expected = dict(super().expected_vectors(figures))
        return {**expected, ("variate", "down"): expected["shared", "down"], ("variate", "up"): expected["shared", "up"]}


def set_up(config: Config, setting: Setting) -> Scaffold:
    """The server half for one stage. ConfigError when the shared part of the model has no tensors."""
    made = partial.set_up(config, setting)
    return Scaffold(config, setting, made.tensors, made.n_rows, made.n_test, made.are_personal, beta=config.server_lr)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """As `set_up`, for the engine."""
    return set_up(config, setting).as_half()


SERVER = replace(partial.SERVER, build=build)
