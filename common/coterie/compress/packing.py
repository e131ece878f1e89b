"""Rows of numbers as bytes and back, by the keys of one direction: a choice of numbers, their bits, and bytes without repetitions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coterie.arrays import Array
from coterie.compress.choice import Choice, Drawn, Largest, kept
from coterie.compress.draws import Draws
from coterie.compress.factors import Factors
from coterie.compress.numbers import Bytes, Few, Numbers, Plain, compressor
from coterie.errors import ProtocolError
from coterie.experiment.compress import Thin

_ZLIB_LEVEL = 6
_EXTRA_BYTES = 1024  # that zlib may add to bytes that it cannot shorten, and a thousandth of them


class Sizes(NamedTuple):
    """Bytes of n rows: of their numbers, and of what is needed to read them. With `lossless` the first is the most before zlib."""

    values: int
    aside: int


@dataclass(frozen=True)
class Packing:
    """All that is done to a row, for numbers of this payload type."""

    choice: Choice | None
    numbers: Numbers
    deflates: bool
    itemsize: int  # of numbers that are not quantized; 1 for those that are
    factors: Factors | None = None  # of weights, instead of a choice

    @staticmethod
    def of(rule: Thin, dtype: np.dtype[Any], *, shrinks: bool = False, factors: Factors | None = None) -> Packing:
        """`shrinks`: numbers that are drawn stay as they are, so that less is lost than there was, as a memory of losses needs it."""
        choice: Choice | None = None
        if rule.top_k is not None:
            choice = Largest(rule.top_k)
        elif rule.rand_k is not None:
            choice = Drawn(rule.rand_k, enlarges=not shrinks)
        numbers: Numbers = Plain(dtype)
        if rule.by is not None:
            numbers = compressor(rule.by)
        elif rule.quantize is not None:
            numbers = Few(rule.quantize)
        return Packing(choice, numbers, rule.lossless is not None, dtype.itemsize if isinstance(numbers, Plain) else 1, factors)

    def sizes(self, n: int, d: int) -> Sizes:
        """Of n rows of d numbers."""
        if not n * d:
            return Sizes(0, 0)
        values, scales = self.numbers.sizes(self._kept(d))
        return Sizes(n * values, n * scales + self.places(n, d))

    def places(self, n: int, d: int) -> int:
        """Bytes of the places of the numbers, which are a part of what is needed to read them."""
        return 0 if self.choice is None or not d else n * self.choice.size(d)

    def pack(self, x: Array, draws: Draws) -> tuple[Bytes, Bytes]:
        """Rows (n, d) as their numbers, and as what is needed to read them."""
        if not x.size:
            return np.zeros(0, np.uint8), np.zeros(0, np.uint8)
        if self.factors is not None:
            x = self.factors.written(x, draws)
        places, listed = (None, np.zeros((len(x), 0), np.uint8)) if self.choice is None else self.choice.choose(x, draws)
        values, scales = self.numbers.write(x if places is None else np.take_along_axis(x, places, axis=1), draws)
        values = np.ascontiguousarray(values).reshape(-1)
        if self.deflates:  # bytes of equal weight side by side, which differ less
            values = np.frombuffer(zlib.compress(values.reshape(-1, self.itemsize).T.tobytes(), _ZLIB_LEVEL), np.uint8)
        return values, np.ascontiguousarray(np.concatenate([scales, listed], axis=1)).reshape(-1)

    def unpack(self, values: Bytes, aside: Bytes, n: int, d: int, draws: Draws) -> Array:
        """(n, d) the rows as every receiver gets them. ProtocolError for bytes that are none of so many rows."""
        sizes = self.sizes(n, d)
        if self.deflates and n * d:
            values = self._inflated(values, sizes.values)
        if (values.size, aside.size) != sizes:
            brought = f"{values.size} and {aside.size} bytes"
            raise ProtocolError(f"{n} compressed vectors of {d} numbers bring {brought}, wanted {sizes.values} and {sizes.aside}")
        if not n * d:
            return np.zeros((n, d))
        k = self._kept(d)
        _, n_scales = self.numbers.sizes(k)
        asides = aside.reshape(n, -1)
        found: Array = self.numbers.read(values.reshape(n, -1), asides[:, :n_scales], k, draws)
        if self.factors is not None:
            return self.factors.read(found, d)
        if self.choice is None:
            return found
        whole = np.zeros((n, d))
        np.put_along_axis(whole, self.choice.places(asides[:, n_scales:], d, draws), found, axis=1)
        return whole * (d / k) if self.choice.enlarges else whole

    def fits(self, values: int, aside: int, n: int, d: int) -> bool:
        """Whether bytes of these numbers can be those of so many rows; known before they arrive."""
        sizes = self.sizes(n, d)
        most = sizes.values + sizes.values // 1000 + _EXTRA_BYTES if self.deflates else sizes.values
        return aside == sizes.aside and (values <= most if self.deflates else values == sizes.values)

    def _kept(self, d: int) -> int:
        """How many numbers are written of d."""
        if self.factors is not None:
            return self.factors.kept(d)
        return d if self.choice is None else kept(self.choice.fraction, d)

    def _inflated(self, values: Bytes, size: int) -> Bytes:
        """The bytes before zlib, which are never more than `size`."""
        reader = zlib.decompressobj()
        try:
            found = reader.decompress(values.tobytes(), size)
            is_whole = len(found) == size and not reader.decompress(reader.unconsumed_tail, 1) and reader.eof and not reader.unused_data
        except zlib.error:
            is_whole = False
        if not is_whole:
            raise ProtocolError(f"{values.size} bytes of compressed numbers are not the {size} bytes that were compressed")
        return np.frombuffer(found, np.uint8).reshape(self.itemsize, -1).T.reshape(-1)
