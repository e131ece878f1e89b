"""Sums and means over users in member order, whose bits depend on neither hosts nor messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.wire.messages import Rows

_BLOCK = 1 << 18  # numbers that are averaged at once


def owners(messages: Sequence[Rows]) -> Indices:
    """The users of messages that name them."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(message.users for message in messages if message.users is not None)])


def in_order(rows: Sequence[NDArray[Any]], shares: Array) -> Array:
    """(size,) the sum of all rows (k, size) of the arrays times their shares, one after the other, in float64.

    Block by block, since the rows may be most of the memory. A sum along the first axis adds one row after the other; only where rows have
    one number, numpy would add in pairs.
    """
    size = rows[0].shape[1]
    total = np.zeros(size)
    for start in range(0, size, _BLOCK):
        block = slice(start, min(start + _BLOCK, size))
        width, done = block.stop - start, 0
        most = max(1, _BLOCK // width)
        for array in rows:
            for first in range(0, len(array), most):
                part = array[first : first + most, block]
                terms = np.empty((len(part) + 1, width))
                terms[0] = total[block]
                np.multiply(part, shares[done : done + len(part), None], out=terms[1:])
                total[block] = np.add.accumulate(terms, axis=0)[-1] if width == 1 else np.add.reduce(terms, axis=0)
                done += len(part)
    return total


@np.errstate(over="ignore")  # models may be diverging
def mean_of(values: Array, weights: Indices) -> float:
    """Their weighted mean."""
    return float((values * weights).sum() / weights.sum())
