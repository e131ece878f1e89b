"""Which numbers of a vector are sent: all, the largest, or some that the seed draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coterie.arrays import Array, Indices
from coterie.compress.draws import Draws
from coterie.compress.numbers import Bytes
from coterie.errors import ProtocolError


def kept(fraction: float, d: int) -> int:
    """How many of d numbers this share is: at least one, if there is any."""
    return min(d, max(1, math.ceil(fraction * d)))


class Choice(Protocol):
    """Chooses k of d numbers of each row."""

    @property
    def fraction(self) -> float: ...

    @property
    def enlarges(self) -> bool:
        """Whether numbers are multiplied by d / k, so that the mean over draws is right."""
        ...

    def size(self, d: int) -> int:
        """Bytes of the places of a row."""
        ...

    def choose(self, x: Array, draws: Draws) -> tuple[Indices, Bytes]:
        """(n, k) ascending places in rows (n, d), and their bytes."""
        ...

    def places(self, aside: Bytes, d: int, draws: Draws) -> Indices:
        """(n, k) the places again. ProtocolError for bytes that are none."""
        ...


@dataclass(frozen=True)
class Largest:
    """Top-k: the numbers of largest absolute value. Their places are a bit for each number, or whole numbers where that is shorter."""

    fraction: float
    enlarges: bool = False

    def size(self, d: int) -> int:
        k = kept(self.fraction, d)
        return -(-min(d, k * _width(d)) // 8)

    def choose(self, x: Array, draws: Draws) -> tuple[Indices, Bytes]:
        del draws
        n, d = x.shape
        k = kept(self.fraction, d)
        places = np.sort(np.argpartition(-np.abs(x), k - 1, axis=1)[:, :k], axis=1).astype(np.int64)
        if self._is_listed(d, k):
            bits = (places[:, :, None] >> np.arange(_width(d)) & 1).astype(np.uint8).reshape(n, -1)
        else:
            bits = np.zeros((n, d), np.uint8)
            np.put_along_axis(bits, places, 1, axis=1)
        return places, np.packbits(bits, axis=1)

    def places(self, aside: Bytes, d: int, draws: Draws) -> Indices:
        del draws
        n, k = len(aside), kept(self.fraction, d)
        if self._is_listed(d, k):
            bits = np.unpackbits(aside, axis=1, count=k * _width(d)).reshape(n, k, _width(d))
            found: Indices = (bits.astype(np.int64) << np.arange(_width(d))).sum(axis=2)
            is_right = bool((np.diff(found, axis=1) > 0).all() and (found < d).all())
        else:
            bits = np.unpackbits(aside, axis=1, count=d)
            is_right = bool((bits.sum(axis=1, dtype=np.int64) == k).all())
            found = np.nonzero(bits)[1].reshape(n, k).astype(np.int64) if is_right else np.zeros((n, k), np.int64)
        if not is_right:
            raise ProtocolError(f"the places of compressed numbers are not {k} ascending numbers below {d}")
        return found

    def _is_listed(self, d: int, k: int) -> bool:
        return k * _width(d) < d


@dataclass(frozen=True)
class Drawn:
    """Rand-k: numbers at places that both ends draw, so that no place is sent."""

    fraction: float
    enlarges: bool = True

    def size(self, d: int) -> int:
        del d
        return 0

    def choose(self, x: Array, draws: Draws) -> tuple[Indices, Bytes]:
        return self.places(np.zeros((len(x), 0), np.uint8), x.shape[1], draws), np.zeros((len(x), 0), np.uint8)

    def places(self, aside: Bytes, d: int, draws: Draws) -> Indices:
        del aside
        return draws.places(d, kept(self.fraction, d))


def _width(d: int) -> int:
    """Bits of a place."""
    return max(1, (d - 1).bit_length())
