"""The data's own random numbers: one stream per (seed, purpose, index), so that no user's data depends on another's.

Built on raw Philox words, whose stream NumPy guarantees, and not on `Generator` methods, whose results it may change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.streams import philox


@dataclass(frozen=True)
class Stream:
    """A named stream of random numbers; each call moves it on."""

    words: np.random.Philox

    def uniform(self, n: int) -> Array:
        """(n,) numbers uniform in [0, 1), multiples of 2**-53."""
        return (self.words.random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def order(self, n: int) -> Indices:
        """(n,) a random permutation of 0..n-1."""
        return np.argsort(self.words.random_raw(n), kind="stable").astype(np.int64)


def stream(seed: int, purpose: str, *index: int | str) -> Stream:
    """The stream of (seed, purpose, index)."""
    return Stream(philox(seed, purpose, *index))


def normal(draws: Stream, n: int) -> Array:
    """(n,) standard normal numbers, by Marsaglia's polar method: products of uniform numbers, and one logarithm."""
    kept = np.empty((0, 2))
    while 2 * len(kept) < n:
        square = 2.0 * draws.uniform(2 * max(n, 16)).reshape(-1, 2) - 1.0
        radius = np.square(square).sum(axis=1)
        kept = np.concatenate([kept, square[(radius > 0.0) & (radius < 1.0)]])
    radius = np.square(kept).sum(axis=1, keepdims=True)
    numbers: Array = (kept * np.sqrt(-2.0 * np.log(radius) / radius)).reshape(-1)[:n]
    return numbers
