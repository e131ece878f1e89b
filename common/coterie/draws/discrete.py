"""Whole numbers of the discrete Gaussian distribution, drawn exactly: P(y) is proportional to exp(-y^2 / 2 s^2) for each whole number y.

Algorithms 1 to 3 of Canonne, Kamath and Steinke (2020), "The discrete Gaussian for differential privacy". They compare whole numbers alone,
so no rounding makes an outcome more or less likely than the formula says. Each step works on an array of numbers that are not settled
yet. The scale t of the Laplace numbers is s; Algorithm 3 prints floor(s) + 1, and is right with any t. How long a draw takes depends on the
numbers drawn.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.draws.secret import SecretNumbers

MAX_DEVIATION: Final = 1 << 21  # with which all products below are less than 2^63
_BLOCK: Final = 1 << 15  # numbers at a time, which stay in the processor's cache

Flags = NDArray[np.bool_]


def discrete_gaussian(numbers: SecretNumbers, n: int, deviation: int) -> Indices:
    """(n,) discrete Gaussian numbers with s = `deviation`, from 1 to 2^21."""
    if not 1 <= deviation <= MAX_DEVIATION:
        raise ValueError(f"the deviation of a discrete Gaussian is {deviation}, want 1 to {MAX_DEVIATION}")
    found = np.empty(n, dtype=np.int64)
    for start in range(0, n, _BLOCK):
        block = found[start : start + _BLOCK]
        pending = np.arange(block.size)
        while pending.size:
            drawn = _laplace(numbers, pending.size, deviation)
            kept = _exp(numbers, (np.abs(drawn) - deviation) ** 2, 2 * deviation**2)
            block[pending[kept]] = drawn[kept]
            pending = pending[~kept]
    return found


def _laplace(numbers: SecretNumbers, n: int, scale: int) -> Indices:
    """Algorithm 2: (n,) numbers x with P(x) proportional to exp(-|x| / scale)."""
    found = np.empty(n, dtype=np.int64)
    pending = np.arange(n)
    while pending.size:
        low = numbers.below(scale, pending.size)
        kept = _exp(numbers, low, scale)
        size = low[kept] + scale * _repeats(numbers, int(kept.sum()))
        is_negative = numbers.below(2, size.size) == 1
        counts = ~(is_negative & (size == 0))  # else zero would come twice as often
        found[pending[kept][counts]] = np.where(is_negative, -size, size)[counts]
        pending = np.concatenate([pending[~kept], pending[kept][~counts]])
    return found


def _repeats(numbers: SecretNumbers, n: int) -> Indices:
    """(n,) how often a coin of chance 1/e shows heads before it shows tails."""
    found, pending = np.zeros(n, dtype=np.int64), np.arange(n)
    while pending.size:
        pending = pending[_exp_of_part(numbers, np.ones(pending.size, dtype=np.int64), 1)]
        found[pending] += 1
    return found


def _exp(numbers: SecretNumbers, above: Indices, below: int) -> Flags:
    """Algorithm 1: (n,) coins, true with the chance exp(-above / below)."""
    times, rest = np.divmod(above, below)
    found = np.ones(above.size, dtype=np.bool_)
    pending = np.flatnonzero(times)
    while pending.size:
        hit = _exp_of_part(numbers, np.ones(pending.size, dtype=np.int64), 1)
        found[pending[~hit]] = False
        pending = pending[hit]
        times[pending] -= 1
        pending = pending[times[pending] > 0]
    left = np.flatnonzero(found)
    found[left] = _exp_of_part(numbers, rest[left], below)
    return found


def _exp_of_part(numbers: SecretNumbers, above: Indices, below: int) -> Flags:
    """The same where above <= below: the k-th coin has the chance above / (below k), and the first tails must have an odd k."""
    found = np.empty(above.size, dtype=np.bool_)
    pending, k = np.arange(above.size), 1
    while pending.size:
        goes_on = numbers.below(below * k, pending.size) < above[pending]
        found[pending[~goes_on]] = k % 2 == 1
        pending, k = pending[goes_on], k + 1
    return found
