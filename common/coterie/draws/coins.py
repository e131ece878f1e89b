"""The coins of the loopless methods, drawn from the shared seed. So no message carries them, and a run of steps is one instruction.

Iterations count from 0. A coin is fixed by the seed, by its purpose, and by its iteration.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.draws.streams import generator

Flips = NDArray[np.bool_]
_BLOCK = 4096  # iterations per draw
_KEPT = 4  # blocks


class DrawnCoin:
    """A coin that shows 1 with probability `p`."""

    def __init__(self, seed: int, name: str, p: float) -> None:
        self._seed, self._name, self._p = seed, name, p
        self._blocks: dict[int, Flips] = {}

    def flips(self, start: int, stop: int) -> Flips:
        """(stop - start,) whether it shows 1, in each iteration once."""
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
    """A coin with given flips. IndexError for iterations beyond them."""

    def __init__(self, flips: Sequence[int | bool]) -> None:
        self._flips = np.array(flips, dtype=np.bool_)

    def flips(self, start: int, stop: int) -> Flips:
        if stop > self._flips.size:
            raise IndexError(f"coins are recorded for {self._flips.size} iterations, wanted {stop}")
        return self._flips[start:stop]


Coin = DrawnCoin | RecordedCoin


def first(flips: Flips, start: int) -> int:
    """The iteration of the first 1, for flips that begin at iteration `start`; their end if there is none."""
    if not flips.size:
        return start
    at = int(flips.argmax())
    return start + (at if flips[at] else flips.size)
