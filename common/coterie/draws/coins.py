"""The coins of the loopless methods, from the shared seed: no message says what was drawn, and a run of steps is one instruction.

Iterations count from 0. A coin is fixed by the seed, by what it is for, and by its iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.draws.streams import generator

Flips = NDArray[np.bool_]
_BLOCK = 4096  # iterations whose coins are drawn together
_KEPT = 4  # blocks


class Coin(Protocol):
    """One coin, flipped once in each iteration."""

    def flips(self, start: int, stop: int) -> Flips:
        """(stop - start,) whether it shows 1."""


class DrawnCoin:
    """A coin that shows 1 with probability `p`."""

    def __init__(self, seed: int, name: str, p: float) -> None:
        self._seed, self._name, self._p = seed, name, p
        self._blocks: dict[int, Flips] = {}

    def flips(self, start: int, stop: int) -> Flips:
        """(stop - start,) whether it shows 1."""
        if self._p <= 0.0:
            return np.zeros(stop - start, dtype=np.bool_)
        numbers = range(start // _BLOCK, -(-stop // _BLOCK))
        drawn = np.concatenate([self._block(number) for number in numbers]) if numbers else np.zeros(0, dtype=np.bool_)
        offset = start - numbers.start * _BLOCK
        return drawn[offset : offset + stop - start]

    def _block(self, number: int) -> Flips:
        if number not in self._blocks:
            while len(self._blocks) >= _KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = generator(self._seed, self._name, round_number=number).random(_BLOCK) < self._p
        return self._blocks[number]


class RecordedCoin:
    """A coin whose flips are given; iterations beyond them are an IndexError."""

    def __init__(self, flips: Sequence[int | bool]) -> None:
        self._flips = np.array(flips, dtype=np.bool_)

    def flips(self, start: int, stop: int) -> Flips:
        """(stop - start,) whether it shows 1."""
        if stop > self._flips.size:
            raise IndexError(f"coins are recorded for {self._flips.size} iterations, wanted {stop}")
        return self._flips[start:stop]


def first(flips: Flips, start: int) -> int:
    """The iteration of the first 1, for flips that begin at iteration `start`; their end when there is none."""
    if not flips.size:
        return start
    at = int(flips.argmax())
    return start + (at if flips[at] else flips.size)
