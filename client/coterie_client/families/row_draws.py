"""Draws the row of a user in an iteration: uniform, and fixed by the seed, the user's number in the whole run, and the iteration.

Each user has its own stream: SplitMix64, started at a word of `coterie.draws.streams`. Its state after t draws needs no earlier draws, so
users at different iterations are served at once, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.draws.streams import philox

Words = NDArray[np.uint64]

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
_GAMMA, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


def keys_of(seed: int, numbers: Indices) -> Words:
    """(n,) the start values of these users' streams."""
    return np.array([philox(seed, "row of user", number).random_raw() for number in numbers.tolist()], dtype=np.uint64)


def drawn_rows(keys: Words, iterations: Indices, n_rows: Indices) -> Indices:
    """(n,) a row below n_rows (n,) < 2^31 for each user and iteration (n,); each row's probability is within 2^-32 of 1/n_rows."""
    word = keys + (iterations.astype(np.uint64) + np.uint64(1)) * _GAMMA
    word = (word ^ (word >> _30)) * _MIX_1
    word = (word ^ (word >> _27)) * _MIX_2
    word ^= word >> _31
    rows: Indices = (((word >> _32) * n_rows.astype(np.uint64)) >> _32).astype(np.int64)
    return rows


def recorded_rows(coins: Sequence[Sequence[Sequence[int]]], numbers: Indices) -> Indices:
    """(iterations, n) the rows of these users in recorded coins."""
    return np.array([line[2] for line in coins], dtype=np.int64)[:, numbers]
