"""Server half of `l2gd`: partial sharing of all tensors, and the coins of each round (see `coterie.methods.l2gd`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from coterie.arrays import Indices
from coterie.draws.streams import stream
from coterie.methods.l2gd import Coins, Config
from coterie_server.families import partial
from coterie_server.families.partial import PartialSharing, ServerUpdate, SharedState
from coterie_server.interface.half import Setting, StageHalf


def coins(p: float, setting: Setting, number: int) -> Indices:
    """(2,) how many zeros round `number` has, which a coin ends with probability p, and ones, which one ends with 1 - p."""
    uniform = stream(setting.seed, "coins", setting.stage, number).uniform(2)
    return np.array([_run(u, end) for u, end in zip(uniform.tolist(), (p, 1 - p), strict=True)], np.int64)


def _run(u: float, end: float) -> int:
    """The length of a run of coins of which each ends it with probability `end`: P(length > k) = (1 - end)^k, by inversion."""
    return 1 + math.floor(math.log1p(-u) / math.log1p(-end))


def asked(p: float, half: PartialSharing, state: SharedState, chosen: Indices, number: int) -> list[Coins]:  # noqa: ARG001
    """The coins go with the mean of the round before."""
    return [Coins(coins(p, half.setting, number), users=chosen)]


def figures(p: float, half: PartialSharing, number: int) -> Mapping[str, float]:
    """The coins."""
    n_steps, n_aggregations = coins(p, half.setting, number).tolist()
    return {"local_steps": float(n_steps), "aggregations": float(n_aggregations)}


def build(config: Config, setting: Setting) -> StageHalf[SharedState]:
    own = ServerUpdate(asked=functools.partial(asked, config.p), figures=functools.partial(figures, config.p))
    return replace(partial.set_up(config, setting), own=own).as_half()


SERVER = replace(partial.SERVER, build=build)
