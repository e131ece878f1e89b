"""Sums that do not depend on their order: fixed-point numbers, added modulo 2^64. Pure functions of arrays.

A number x of at most 2^bound is x 2^f, rounded to a whole number; the sum is scaled back. Whole numbers add up to the same bits in any
order and any grouping. So hosts can add up their users, and aggregators their hosts.

f is as large as the bound and the total weight W of the users allow: W 2^(bound + f) <= 2^62. Where that leaves too few bits, a number has
two words: the lower one holds `low` more bits, from 0 to 2^low. Each word is added on its own. A sum has a spare bit for its sign, and one
more, since the upper word is rounded down.

Rounding moves each x by at most 2^-(f+1), so a sum by W times as much, and a weighted mean by no more than one x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.wire.messages import Spec
from coterie.wire.precision import FLOAT32, Precision

WIDTH = 62  # bits of a word of a sum, without the sign and a spare one
LOW_BITS = 32  # at most, of a lower word
# |x| <= 2^bound where nobody says more: parameters of networks, and any other numbers.
NETWORK_BOUND, BOUND = 16, 40
_FEWEST_BITS = 20  # of f, where nobody says a bound: fewer would be a coarser number than float32 has
_ONE_WORD_BITS = 24  # of f, with which one word is as fine as float32
_BLOCK = 1 << 14  # numbers that are converted at once
_MAX_BITS = 1000  # so that 2^f is a number


class Form(NamedTuple):
    """How a field is written: |x| <= 2^bound, f = `bits`, of which `low` are in a lower word (0: one word)."""

    bound: int
    bits: int
    low: int

    @property
    def words(self) -> int:
        return 2 if self.low else 1

    @property
    def error(self) -> float:
        """How far rounding moves a number."""
        return math.ldexp(0.5, -self.bits)


def form_of(spec: Spec, weight: int, precision: Precision, bound: float | None = None) -> Form:
    """The form of a field for users of this total weight (at least 1). `bound`: what the numbers do not exceed, if that is known.

    ValueError for weights of 2^60 or more, or a bound that is none, and where numbers would have less than 20 bits behind the point.
    """
    if not 1 <= weight < 1 << 60:
        raise ValueError(f"a total weight of {weight}, want 1 to 2^60")
    if bound is not None and not 0 <= bound < 2.0**WIDTH:
        raise ValueError(f"a bound of {bound}, want a number from 0 to 2^{WIDTH}")
    is_small = spec.is_weights and precision.model == FLOAT32
    most = (NETWORK_BOUND if is_small else BOUND) if bound is None else max(0, math.ceil(math.log2(bound or 1)))
    spare = WIDTH - (weight - 1).bit_length()
    if not spec.is_float:
        return Form(min(most, spare), 0, 0)
    low = 0 if is_small and spare - most >= _ONE_WORD_BITS else min(LOW_BITS, spare)
    bits = min(spare - most + low, _MAX_BITS)
    if bound is None and bits < _FEWEST_BITS:
        raise ValueError(f"a total weight of {weight:,} leaves numbers {bits} bits behind the point, want at least {_FEWEST_BITS}")
    return Form(most, bits, low)


def largest(rows: NDArray[np.generic]) -> float:
    """The largest absolute value, 0 of none."""
    return float(max(abs(float(rows.max())), abs(float(rows.min())))) if rows.size else 0.0


def sums_of(rows: NDArray[np.generic], weights: Indices | None, groups: Indices, form: Form) -> tuple[Indices, Indices]:
    """(k,) the groups found, ascending, and (k, words, ...) the sums over the rows (n, ...) of each group times their weights (n,).

    Rows must be finite, and within the bound of the form.
    """
    found, place = np.unique(groups, return_inverse=True)
    total = np.zeros((found.size, form.words, *rows.shape[1:]), dtype=np.int64)
    step = max(1, _BLOCK // max(1, rows[:1].size))
    for number in range(found.size):
        mine = np.flatnonzero(place == number) if found.size > 1 else np.arange(len(rows))
        for start in range(0, mine.size, step):
            block = mine[start : start + step]
            for word, terms in enumerate(_written(rows[block], form)):
                total[number, word] += terms.sum(axis=0) if weights is None else np.einsum("n...,n->...", terms, weights[block])
    return found, total


def _written(rows: NDArray[np.generic], form: Form) -> Iterator[Indices]:
    """The words of rows (n, ...), whole numbers of the same shape."""
    if rows.dtype.kind == "i":
        yield np.array(rows, dtype=np.int64)
        return
    scaled = np.multiply(rows, 2.0 ** (form.bits - form.low), dtype=np.float64)  # exact, as is every product below
    upper = np.floor(scaled) if form.low else np.rint(scaled)
    yield upper.astype(np.int64)
    if form.low:
        scaled -= upper
        scaled *= 2.0**form.low
        yield np.rint(scaled, out=scaled).astype(np.int64)


def added(parts: list[tuple[Indices, Indices]]) -> tuple[Indices, Indices]:
    """The sums of several parties, each (groups, sums) of the same form, modulo 2^64."""
    if len(parts) == 1:
        return parts[0]
    groups = np.unique(np.concatenate([found for found, _ in parts]))
    total = np.zeros((groups.size, *parts[0][1].shape[1:]), dtype=np.int64)
    for found, sums in parts:
        total[np.searchsorted(groups, found)] += sums
    return groups, total


def read(total: Indices, form: Form) -> Array:
    """(k, ...) the numbers of sums (k, words, ...)."""
    if not form.low:
        return np.ldexp(total[:, 0].astype(np.float64), -form.bits)
    high, low = total[:, 0] + (total[:, 1] >> form.low), total[:, 1] & ((1 << form.low) - 1)
    return np.ldexp(high.astype(np.float64), form.low - form.bits) + np.ldexp(low.astype(np.float64), -form.bits)
