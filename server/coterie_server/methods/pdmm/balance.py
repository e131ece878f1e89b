"""When PDMM's default rho changes, and by how much: residual balancing.

He, Yang and Wang, *Alternating direction method with self-adaptive penalty parameters for monotone variational inequalities* (2000); Boyd
and others, *Distributed optimization and statistical learning via the alternating direction method of multipliers* (2011), section 3.4.1,
(3.13): rho grows where the primal residual is ten times the dual one, and shrinks where it is the other way round. Here the two are the
relative ones that `stop.residual` is held to, since the larger of them is what a run waits for; the step is that of Wohlberg, *ADMM penalty
parameter selection by residual balancing* (2017), the root of their ratio, as a power of two and at most 8. The rounds that may change rho
lie ever further apart and come to an end, so the convergence of a constant rho is kept.

By experiment (`tests/benchmarks/bench_rho.py`: five losses, five sizes, four penalties, standardised and not) the rounds to residuals of
1e-5 are less than five times those of the best constant rho, and twice or less for nearly all; with the estimate alone they are hundreds of
times as many on some data.
"""

from __future__ import annotations

import math
from functools import lru_cache

from coterie.methods.pdmm import Config

_RATIO = 10.0  # of the residuals, up to which rho stays
_LARGEST = 3  # doublings at once
_FIRST, _FURTHER = 3, 1.3  # rounds to the first change; the next comes as many later, or that much
_RANGE = 100  # doublings from the estimate, which no problem in floating point needs


def is_due(config: Config, number: int) -> bool:
    """Whether rho may change after this round."""
    return config.is_balanced() and number in _rounds(config.balance_rounds)


def has_weight(config: Config, number: int) -> bool:
    """Whether users receive rho in this round."""
    return config.is_balanced() and number > _FIRST


@lru_cache(maxsize=8)
def _rounds(until: int) -> frozenset[int]:
    found, number = [], _FIRST
    while number <= until:
        found.append(number)
        number = max(number + _FIRST, int(_FURTHER * number))
    return frozenset(found)


def doublings(primal: float, dual: float) -> int:
    """By which power of two rho changes for these relative residuals."""
    if not (0 < primal < math.inf and 0 < dual < math.inf):
        return 0
    ratio = primal / dual
    if 1 / _RATIO < ratio < _RATIO:
        return 0
    return max(-_LARGEST, min(_LARGEST, round(math.log2(ratio) / 2)))


def balanced(rho: float, estimate: float, primal: float, dual: float) -> float:
    """rho after a round with these residuals."""
    new = math.ldexp(rho, doublings(primal, dual))
    return new if abs(math.log2(new / estimate)) <= _RANGE else rho
