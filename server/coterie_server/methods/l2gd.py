"""Server half of `l2gd`: partial sharing of all tensors, and the coins of each round (see `coterie.methods.l2gd`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from coterie.arrays import Indices
from coterie.draws.streams import stream
from coterie.families.partial import Coins
from coterie.methods.l2gd import Config
from coterie.wire.messages import Message
from coterie_server.families import partial
from coterie_server.families.partial import PartialSharing, State
from coterie_server.interface.half import Federation, Setting, StageHalf


@dataclass(frozen=True, kw_only=True)
class L2gd(PartialSharing):
    """The server half for one stage."""

    p: float

    def asked(self, state: State, chosen: Indices, number: int) -> list[Message]:
        """The mean of the round before, and the coins."""
        return [*super().asked(state, chosen, number), Coins(self.coins(number), users=chosen)]

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """With the coins among the figures."""
        state, figures = await super().round(state, federation, number)
        n_steps, n_aggregations = self.coins(number).tolist()
        return state, {**figures, "local_steps": float(n_steps), "aggregations": float(n_aggregations)}

    def coins(self, number: int) -> Indices:
        """(2,) how many zeros a round has, which a coin ends with probability p, and ones, which one ends with 1 - p."""
        uniform = stream(self.setting.seed, "coins", self.setting.stage, number).uniform(2)
        return np.array([_run(u, end) for u, end in zip(uniform.tolist(), (self.p, 1 - self.p), strict=True)], np.int64)


def _run(u: float, end: float) -> int:
    """The length of a run of coins of which each ends it with probability `end`: P(length > k) = (1 - end)^k, by inversion."""
    return 1 + math.floor(math.log1p(-u) / math.log1p(-end))


def set_up(config: Config, setting: Setting) -> L2gd:
    """The server half for one stage."""
    made = partial.set_up(config, setting)
    return L2gd(config, setting, made.tensors, made.n_rows, made.n_test, made.are_personal, p=config.p)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """As `set_up`, for the engine."""
    return set_up(config, setting).as_half()


SERVER = replace(partial.SERVER, build=build)
