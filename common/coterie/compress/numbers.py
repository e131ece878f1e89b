"""How the chosen numbers of vectors become bytes: in the payload type of the run, or in a few bits and a scale.

Writing may use sums and random numbers; reading is a product for each number, so every receiver gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.compress.draws import Draws
from coterie.compress.rotation import rotated, turned_back
from coterie.errors import ProtocolError
from coterie.experiment.compress import Quantize
from coterie.wire.precision import FLOAT64, native, written

Bytes = NDArray[np.uint8]
_SCALE = np.dtype("<f4")
# The values of Lloyd and Max for a normal number, by bits: Max (1960), table I. EDEN rounds to them.
_LEVELS = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


class Numbers(Protocol):
    """Writes rows of k numbers, each row by itself."""

    def sizes(self, k: int) -> tuple[int, int]:
        """Bytes of the numbers of a row, and of what is needed to read them."""
        ...

    def write(self, x: Array, draws: Draws) -> tuple[Bytes, Bytes]:
        """Rows (n, k) as bytes of the two `sizes`."""
        ...

    def read(self, values: Bytes, aside: Bytes, k: int, draws: Draws) -> Array:
        """(n, k) the rows again."""
        ...


@dataclass(frozen=True)
class Plain:
    """As they are, in the payload type."""

    dtype: np.dtype[Any]

    def sizes(self, k: int) -> tuple[int, int]:
        return k * self.dtype.itemsize, 0

    def write(self, x: Array, draws: Draws) -> tuple[Bytes, Bytes]:
        del draws
        return written(x, self.dtype).view(np.uint8).reshape(len(x), -1), np.zeros((len(x), 0), np.uint8)

    def read(self, values: Bytes, aside: Bytes, k: int, draws: Draws) -> Array:
        del aside, draws
        return np.array(native(np.ascontiguousarray(values).view(self.dtype).reshape(len(values), k), FLOAT64))


@dataclass(frozen=True)
class Few:
    """In a few bits, with a scale of 4 bytes for each row.

    QSGD (Alistarh et al., 2017, (4)): with b bits, s = 2^(b-1) - 1 levels on each side of 0, and the largest |x_j| instead of the norm, a
    number is scale * q / s for a whole number q from -s to s. Stochastic rounding makes it unbiased.

    EDEN (Vargaftik et al., 2022, algorithm 1), for rotated rows y that are not rounded at random, in at most 4 bits: each number of
    y sqrt(k) / |y| becomes the next of `_LEVELS`, c, and the scale is |y|^2 / <y, c>, with which the mean over rotations is right. With 1
    bit it is DRIVE (2021).
    """

    rule: Quantize

    def sizes(self, k: int) -> tuple[int, int]:
        return -(-k * self.rule.bits // 8), _SCALE.itemsize

    def write(self, x: Array, draws: Draws) -> tuple[Bytes, Bytes]:
        y = np.ascontiguousarray(x if self.rule.rotate is None else rotated(x, draws.signs(x.shape[1])))
        if self._is_eden:
            codes, scales = self._nearest(y)
        else:
            codes, scales = self._spread(y, draws)
        return _packed(codes, self.rule.bits), scales.view(np.uint8).reshape(len(x), -1)

    def read(self, values: Bytes, aside: Bytes, k: int, draws: Draws) -> Array:
        scales = np.ascontiguousarray(aside).view(_SCALE).astype(np.float64)  # (n, 1)
        codes, bits = _unpacked(values, self.rule.bits, k), self.rule.bits
        if self._is_eden:
            ends = np.array(_LEVELS[bits])
            y = np.concatenate([-ends[::-1], ends])[codes] * scales
        else:
            steps = (1 << (bits - 1)) - 1
            y = (codes.astype(np.float64) - steps) * (scales / steps)
        return y if self.rule.rotate is None else turned_back(y, draws.signs(k))

    @property
    def _is_eden(self) -> bool:
        return self.rule.rotate is not None and not self.rule.stochastic and self.rule.bits in _LEVELS

    def _spread(self, y: Array, draws: Draws) -> tuple[Bytes, NDArray[Any]]:
        steps = (1 << (self.rule.bits - 1)) - 1
        scales = _no_smaller(np.abs(y).max(axis=1, keepdims=True, initial=0.0))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            places = np.nan_to_num(y / scales.astype(np.float64), nan=0.0) * steps
        whole = np.floor(places + draws.uniform(y.shape[1])) if self.rule.stochastic else np.rint(places)
        return (np.clip(whole, -steps, steps) + steps).astype(np.uint8), scales

    def _nearest(self, y: Array) -> tuple[Bytes, NDArray[Any]]:
        ends = np.array(_LEVELS[self.rule.bits])
        levels = np.concatenate([-ends[::-1], ends])
        between = (levels[1:] + levels[:-1]) / 2
        codes, scales = np.empty(y.shape, np.uint8), np.zeros((len(y), 1), _SCALE)
        for row, one in enumerate(y):  # row by row: sums over one axis of several rows may run in another order
            length = np.sqrt(np.square(one).sum())
            unit = one * (np.sqrt(one.size) / length) if length > 0 else one
            codes[row] = np.searchsorted(between, unit)
            if length > 0:
                scales[row] = length * length / (one * levels[codes[row]]).sum()
        return codes, scales


def _no_smaller(x: Array) -> NDArray[Any]:
    """As numbers of 4 bytes that are at least as large."""
    with np.errstate(over="ignore"):
        found = x.astype(_SCALE)
    return np.where(found < x, np.nextafter(found, np.float32(np.inf)), found).astype(_SCALE)


def _packed(codes: Bytes, bits: int) -> Bytes:
    """(n, bytes) of codes (n, k): the first in the lowest bits of a byte."""
    if bits == 8:
        return codes
    each, (n, k) = 8 // bits, codes.shape
    whole = np.zeros((n, -(-k // each) * each), np.uint8)
    whole[:, :k] = codes
    shifts = (np.arange(each) * bits).astype(np.uint8)
    found: Bytes = np.bitwise_or.reduce(whole.reshape(n, -1, each) << shifts, axis=2)
    return found


def _unpacked(values: Bytes, bits: int, k: int) -> Bytes:
    if bits == 8:
        return values
    shifts, mask = (np.arange(8 // bits) * bits).astype(np.uint8), np.uint8((1 << bits) - 1)
    found: Bytes = ((values[:, :, None] >> shifts) & mask).reshape(len(values), -1)
    if found[:, k:].any():
        raise ProtocolError("compressed numbers end with bits that belong to none, wanted zeros")
    return found[:, :k]
