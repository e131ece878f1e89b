"""How many vectors methods for known clusters move when coins decide: for the coins of a seed, and how that varies over seeds.

The rules of the halves, here from the operations alone. A cluster's iteration is LOCAL, CLUSTER or GLOBAL. Without reuse of averages every
averaging iteration moves a model up for each user, and one average down. With reuse, models go up only for the first averaging iteration
after a local one, or after the start. A CLUSTER iteration at such a place sends bar_j down. A GLOBAL one that needs a new bar sends its
target down: one vector, or both averages if the next iteration averages too and could use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.families.schedule import CLUSTER, GLOBAL, LOCAL, Operations

NO_REUSE, REUSE_WITHIN, REUSE_ALL = 0, 1, 2  # of averages: none; bar_j; bar too


@dataclass(frozen=True)
class Moves:
    """For one cluster: how many vectors go up from each of its users, and down to each of its hosts."""

    up: float
    down: float


def needed(operations: Sequence[Operations], *, is_reusable: bool) -> NDArray[np.bool_]:
    """(n,) whether an iteration needs a new bar, given the operations (n,) of all clusters.

    With reuse, these are the first GLOBAL one, and those with a LOCAL iteration of some cluster since the GLOBAL one before.
    """
    is_global: NDArray[np.bool_] = operations[0] == GLOBAL
    if not is_reusable:
        return is_global
    n_local = np.cumsum(np.any([ops == LOCAL for ops in operations], axis=0))
    places = np.flatnonzero(is_global)
    found = np.zeros_like(is_global)
    found[places] = np.diff(n_local[places], prepend=-1) > 0
    return found


def moves(operations: Operations, needs_bar: NDArray[np.bool_], reuse: int) -> Moves:
    """What the averaging iterations of one cluster move."""
    averages = operations != LOCAL
    if reuse == NO_REUSE:
        return Moves(float(averages.sum()), float(averages.sum()))
    follows_local = np.concatenate([np.ones(1, dtype=np.bool_), operations[:-1] == LOCAL])
    uses_both = (operations == CLUSTER) | ((operations == GLOBAL) & (reuse == REUSE_ALL))
    then_used = np.concatenate([uses_both[1:], np.zeros(1, dtype=np.bool_)])
    down = (follows_local & (operations == CLUSTER)).sum() + needs_bar.sum() + (needs_bar & then_used).sum()
    return Moves(float((follows_local & averages).sum()), float(down))


# The states of an iteration: LOCAL; CLUSTER, while bar is out of date or not; GLOBAL, with a new bar or with the old one.
_LOCAL, _STALE_WITHIN, _FRESH_WITHIN, _NEEDED, _NEEDLESS = range(5)


def moves_over_coins(p0: float, p: float, others_average: float, reuse: int, n: int) -> tuple[Moves, Moves]:
    """Means and standard deviations of `moves` in n iterations of a cluster with p_j = `p`.

    `others_average` is the product of the p of all other clusters.
    """
    local, within = (1 - p0) * (1 - p), (1 - p0) * p
    steps = np.zeros((5, 5))
    for before in range(5):
        is_stale = before in (_LOCAL, _STALE_WITHIN) or reuse != REUSE_ALL
        steps[before, _LOCAL] = local
        steps[before, _STALE_WITHIN] = within if is_stale else within * (1 - others_average)
        steps[before, _FRESH_WITHIN] = within - steps[before, _STALE_WITHIN]
        steps[before, _NEEDED if is_stale else _NEEDLESS] = p0
    gains_up, gains_down = np.zeros((5, 5)), np.zeros((5, 5))
    if reuse == NO_REUSE:
        gains_up[:, 1:] = gains_down[:, 1:] = 1
    else:
        gains_up[_LOCAL, 1:] = 1
        gains_down[_LOCAL, [_STALE_WITHIN, _FRESH_WITHIN]] = 1
        gains_down[:, _NEEDED] += 1
        gains_down[_NEEDED, [_STALE_WITHIN, _FRESH_WITHIN]] += 1
        if reuse == REUSE_ALL:
            gains_down[_NEEDED, [_NEEDED, _NEEDLESS]] += 1
    up, down = (_counted(steps, gains, n) for gains in (gains_up, gains_down))
    return Moves(up[0], down[0]), Moves(up[1], down[1])


def needed_over_coins(p0: float, all_average: float, n: int, *, is_reusable: bool) -> tuple[float, float]:
    """Mean and standard deviation of the GLOBAL iterations that need a new bar, of n; `all_average` is the product of all p_j."""
    some_local = (1 - p0) * (1 - all_average) if is_reusable else 1.0
    stale, fresh = ([1 - p0, p0], [some_local, 1 - some_local]) if is_reusable else ([1 - p0, p0], [1 - p0, p0])
    gains = np.array([[0.0, 1.0], [0.0, 0.0 if is_reusable else 1.0]])
    return _counted(np.array([stale, fresh]), gains, n)


def _counted(steps: Array, gains: Array, n: int) -> tuple[float, float]:
    """Mean and standard deviation of the gains of n steps of a Markov chain (s, s) that starts in its first state.

    Powers of the generating matrix sum_ab steps_ab e^(gains_ab x), to the second order in x.
    """
    result = (np.eye(len(steps)), np.zeros_like(steps), np.zeros_like(steps))
    power = (steps, steps * gains, steps * gains**2 / 2)
    while n:
        if n % 2:
            result = _product(result, power)
        power, n = _product(power, power), n // 2
    mean, half_square = float(result[1][0].sum()), float(result[2][0].sum())
    return mean, max(2 * half_square - mean**2, 0.0) ** 0.5


Series = tuple[Array, Array, Array]


def _product(a: Series, b: Series) -> Series:
    return a[0] @ b[0], a[0] @ b[1] + a[1] @ b[0], a[0] @ b[2] + a[1] @ b[1] + a[2] @ b[0]
