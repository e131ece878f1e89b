"""Named random streams: the only source of randomness in a run.

A stream is fixed by the run's seed and by names (its purpose, its owner, the round). The order of calls, the host and the process do not
matter, so a simulated and a distributed run draw the same numbers. NumPy guarantees the raw words of Philox, from which a `Stream` makes
its numbers. It does not guarantee the results of a `Generator`'s methods.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices


def philox(seed: int, purpose: str, *index: int | str) -> np.random.Philox:
    """The raw words of one stream. JSON separates the parts of its name, SHA-256 the streams."""
    digest = hashlib.sha256(json.dumps([seed, purpose, *index]).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def generator(seed: int, purpose: str, *, member: str = "", round_number: int = 0) -> np.random.Generator:
    """NumPy's generator of a named stream."""
    return np.random.Generator(philox(seed, purpose, member, round_number))


@dataclass(frozen=True)
class Stream:
    """A named stream of random numbers. Each call advances it."""

    words: np.random.Philox

    def uniform(self, n: int) -> Array:
        """(n,) numbers uniform in [0, 1), multiples of 2**-53."""
        return (self.words.random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def order(self, n: int) -> Indices:
        """(n,) a random permutation of 0..n-1."""
        return np.argsort(self.words.random_raw(n), kind="stable").astype(np.int64)


def stream(seed: int, purpose: str, *index: int | str) -> Stream:
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
