"""Random rotations in d log d additions: signs, then a Walsh-Hadamard transform, as in DRIVE and EDEN (Vargaftik et al., 2021, 2022).

The transform is for powers of 2. For other d it turns the first 2^k numbers, and then the last 2^k, each after new signs. Both are
orthonormal, so nothing is padded.
"""

from __future__ import annotations

import numpy as np

from coterie.arrays import Array


def rotated(x: Array, signs: Array) -> Array:
    """(n, d) the rows turned by signs (n, 2, d) of +1 and -1."""
    d = x.shape[1]
    size = 1 << (d.bit_length() - 1)
    found = x * signs[:, 0]
    found[:, :size] = _transformed(found[:, :size])
    if size < d:
        found[:, d - size :] = _transformed(found[:, d - size :] * signs[:, 1, d - size :])
    return found


def turned_back(y: Array, signs: Array) -> Array:
    """(n, d) the inverse of `rotated`."""
    d = y.shape[1]
    size = 1 << (d.bit_length() - 1)
    found = y.copy()
    if size < d:
        found[:, d - size :] = _transformed(found[:, d - size :]) * signs[:, 1, d - size :]
    found[:, :size] = _transformed(found[:, :size])
    found *= signs[:, 0]
    return found


def _transformed(x: Array) -> Array:
    """(n, 2^k) the orthonormal Walsh-Hadamard transform, which is its own inverse. Only sums of two numbers: the same bits everywhere."""
    n, size = x.shape
    found, half = x, 1
    while half < size:
        pairs = found.reshape(n, size // (2 * half), 2, half)
        both = np.empty_like(pairs)
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=both[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=both[:, :, 1])
        found, half = both.reshape(n, size), 2 * half
    scaled: Array = found * (1.0 / np.sqrt(np.float64(size)))
    return scaled
