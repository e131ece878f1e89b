"""The random numbers of compression, for each vector of a message: from the seed, the message, the round and the vector's owner.

Sender and receiver draw the same ones, on whatever host the owner lives. Never from a clock, and never from what was drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array
from coterie.draws.streams import Words, philox


@dataclass(frozen=True)
class Draws:
    """`names` are those of message, field, stage and round. Row r is for `owners[r]`: a number in the run, and which of its vectors."""

    seed: int
    names: tuple[int | str, ...]
    owners: Sequence[tuple[int, int]]

    def _words(self, purpose: str, n: int) -> Words:
        """(rows, n) raw words."""
        found = np.empty((len(self.owners), n), np.uint64)
        for row, owner in enumerate(self.owners):
            found[row] = philox(self.seed, "compress", purpose, *self.names, *owner).random_raw(n)
        return found

    def uniform(self, n: int) -> Array:
        """(rows, n) numbers in [0, 1), for rounding."""
        return (self._words("rounding", n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def signs(self, d: int) -> Array:
        """(rows, 2, d) of +1 and -1, for rotations."""
        return self._signs("rotation", 2 * d).reshape(len(self.owners), 2, d)

    def directions(self, n: int) -> Array:
        """(rows, n) of +1 and -1, for what begins anywhere."""
        return self._signs("directions", n)

    def _signs(self, purpose: str, n: int) -> Array:
        words = self._words(purpose, -(-n // 64)).astype("<u8")
        found: Array = 1.0 - 2.0 * np.unpackbits(words.view(np.uint8), axis=1, count=n, bitorder="little").astype(np.float64)
        return found

    def places(self, d: int, k: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """(rows, k) different numbers below d, ascending."""
        words = self._words("places", d)
        return np.sort(np.argpartition(words, k - 1, axis=1)[:, :k], axis=1).astype(np.int64)
