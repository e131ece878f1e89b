"""The kind of each iteration in the methods for known clusters, from the shared coins, and how averages move between messages.

Coordinator, aggregators and users build the same schedule from the same parameters, so no message carries it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.coins import Coin, DrawnCoin, RecordedCoin, first

Operations = NDArray[np.int8]
LOCAL, CLUSTER, GLOBAL = 0, 1, 2
_LOOK_AHEAD = 4096  # iterations


class Schedule:
    def __init__(self, everyone: Coin, own: dict[int, Coin]) -> None:
        """`everyone` is xi_0, `own` the xi_j by the number of the cluster."""
        self._everyone, self._own = everyone, own

    def operations(self, cluster: int, start: int, stop: int) -> Operations:
        """(stop - start,) LOCAL, CLUSTER or GLOBAL for each iteration."""
        operations = self._own[cluster].flips(start, stop).astype(np.int8)
        operations[self._everyone.flips(start, stop)] = GLOBAL
        return operations

    def next_global(self, start: int, stop: int, *, is_stale: bool, is_reusable: bool) -> tuple[int, bool]:
        """(the first iteration from `start`, at most `stop`, that needs a new bar; whether bar is out of date there).

        Without reuse every global round needs one. With reuse, only those after a local step of some cluster since the last bar.
        """
        at = start
        while at < stop:
            end = min(at + _LOOK_AHEAD, stop)
            if not is_stale and is_reusable:
                at = first(self._some_local(at, end), at)
                if at == end:
                    continue
                is_stale = True
            at = first(self._everyone.flips(at, end), at)
            if at < end:
                return at, True
        return stop, is_stale

    def _some_local(self, start: int, stop: int) -> NDArray[np.bool_]:
        averages = self._everyone.flips(start, stop)
        all_average = np.ones(stop - start, dtype=np.bool_)
        for coin in self._own.values():
            all_average &= coin.flips(start, stop)
        return ~(averages | all_average)


@functools.lru_cache(maxsize=16)
def schedule_of(
    seed: int, p0: float, p: tuple[float, ...], clusters: tuple[int, ...], recorded: tuple[tuple[int, tuple[int, ...]], ...] | None
) -> Schedule:
    """The schedule of the clusters with these numbers and p_j; `recorded` replaces the coins."""
    if recorded is not None:
        own: dict[int, Coin] = {j: RecordedCoin([flips[1][j] for flips in recorded]) for j in clusters}
        return Schedule(RecordedCoin([flips[0] for flips in recorded]), own)
    drawn: dict[int, Coin] = {j: DrawnCoin(seed, f"coin of cluster {j}", pj) for j, pj in zip(clusters, p, strict=True)}
    return Schedule(DrawnCoin(seed, "coin of all", p0), drawn)


def schedule_by(seed: int, p0: float, p: Array, clusters: Indices, coins: Sequence[Sequence[Any]] | None) -> Schedule:
    """As `schedule_of`, from arrays (c,) of p_j and of the clusters' numbers, and recorded coins as parsed from JSON."""
    recorded = None if coins is None else tuple((int(line[0]), tuple(map(int, line[1]))) for line in coins)
    return schedule_of(seed, p0, tuple(p.tolist()), tuple(clusters.tolist()), recorded)


def combined(alpha: float, tau: float, bar_j: Array, bar: Array) -> Array:
    """The target of a global round, alpha_j bar + tau_j (1-alpha_j) bar_j. Aggregators and users share the formula, so bits agree."""
    return alpha * bar + tau * (1 - alpha) * bar_j


def moved(bar_j: Array, bar: Array, step: float, alpha: float) -> Array:
    """bar_j after a global round, if gamma is constant in the cluster; `step` is eta gamma / p_0."""
    return bar_j - (step * alpha) * (bar_j - bar)
