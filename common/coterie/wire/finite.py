"""Finds numbers that are not finite but must be. Hosts ask before they send, and parents ask about what they receive.

Some payload types are narrower than the numbers of the halves. So a host also finds numbers that would become infinite on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.wire.messages import Message, Rows, Spec, has_rows
from coterie.wire.precision import Precision

_ONE_THREAD = 10_000  # products of vectors with at most this many terms use one thread in OpenBLAS


@dataclass(frozen=True)
class Bad:
    """The first number that is not finite."""

    field: str
    value: float
    row: int | None  # of the message, if its rows have owners


def first_bad(message: Message, precision: Precision | None = None) -> Bad | None:
    """The first number that its field does not allow; with `precision`, as it would be on the wire."""
    for name, spec in message.specs:
        array = getattr(message, name)
        if not spec.is_float or spec.allows == "nan":
            continue
        if spec.allows == "infinity":
            if not np.isnan(array).any():
                continue
            where = tuple(np.argwhere(np.isnan(array))[0])
        elif not is_finite(array):
            where = tuple(np.argwhere(~np.isfinite(array))[0])
        elif precision is not None and not _fits(array, spec, precision):
            where = tuple(np.unravel_index(np.argmax(np.abs(array)), array.shape))
            array = np.copysign(np.inf, array)
        else:
            continue
        row = int(where[0]) if isinstance(message, Rows) and has_rows(spec) else None
        return Bad(name, float(array[where]), row)
    return None


def is_finite(array: np.ndarray[Any, Any]) -> bool:
    """Whether all entries are finite. A finite sum of squares proves it, and is faster; the sum may also overflow.

    For many terms BLAS uses several threads, and waiting for them takes longer than the sum when cores are busy.
    """
    return (array.size <= _ONE_THREAD and math.isfinite(np.vdot(array, array))) or bool(np.isfinite(array).all())


def _fits(array: np.ndarray[Any, Any], spec: Spec, precision: Precision) -> bool:
    """Whether finite numbers stay finite on the wire."""
    narrowed = precision.rounded_weights if spec.is_weights else precision.rounded
    is_narrowed = precision.weights != precision.model if spec.is_weights else precision.dtype != np.float64 and not spec.is_exact
    if not is_narrowed or not array.size:
        return True
    with np.errstate(over="ignore"):
        return bool(np.isfinite(narrowed(np.abs(array).max().reshape(1))).all())
