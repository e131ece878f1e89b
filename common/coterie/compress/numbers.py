"""How the chosen numbers of vectors become bytes: in the payload type of the run, or in a few bits and a scale.

Writing may use sums and random numbers; reading is a product for each number, so every receiver gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.compress.draws import Draws
from coterie.compress.rotation import rotated, turned_back
from coterie.errors import ConfigError, ProtocolError
from coterie.experiment import plugins
from coterie.experiment.compress import Quantize
from coterie.findings import Finding
from coterie.user_code import user_code
from coterie.wire.precision import FLOAT64, native, written

Bytes = NDArray[np.uint8]
_FAULT = Finding("L4", place=plugins.PLACES["compressor"])
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


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """A way of your own to write numbers, as `federation.compress.up.by` names it. All is of rows, each written by itself.

    SIGNS = Compressor(sizes=sizes, write=write, read=read)
    """

    sizes: Callable[[int], tuple[int, int]]  #: of a row of k numbers: its bytes, and those that are needed to read them, such as a scale
    #: Given rows (n, k) and their random numbers: (n, bytes) uint8 of both `sizes`.
    write: Callable[[Array, Draws], tuple[Bytes, Bytes]]
    #: Given both, k and the same random numbers: rows (n, k), with the same bits on every machine.
    read: Callable[[Bytes, Bytes, int, Draws], Array]


def compressor(name: str) -> Compressor:
    """The compressor of a package's name or an import path, which is checked as it is used. ConfigError if it cannot be used."""
    found = plugins.loaded("compressor", name, Compressor)

    def write(x: Array, draws: Draws) -> tuple[Bytes, Bytes]:
        with user_code(f"compressor {name!r}", _FAULT, ConfigError):
            values, aside = found.write(x, draws)
        for part, size in zip((values, aside), found.sizes(x.shape[1]), strict=True):
            if part.dtype != np.uint8 or part.shape != (len(x), size):
                raise ConfigError(f"compressor {name!r} writes {part.dtype} of shape {part.shape}, want uint8 of {(len(x), size)}", _FAULT)
        return values, aside

    def read(values: Bytes, aside: Bytes, k: int, draws: Draws) -> Array:
        with user_code(f"compressor {name!r}", _FAULT, ConfigError):
            rows = np.asarray(found.read(values, aside, k, draws), dtype=np.float64)
        if rows.shape != (len(values), k):
            raise ConfigError(f"compressor {name!r} reads rows of shape {rows.shape}, want {(len(values), k)}", _FAULT)
        return rows

    return Compressor(sizes=found.sizes, write=write, read=read)


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
