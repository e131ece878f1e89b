"""The payload type of a run, numbers as they are sent and as the halves use them, and numbers that are not finite but must be.

Hosts look for these before they send, and parents in what they receive. Some payload types are narrower than the numbers of the halves. So
a host also finds numbers that would become infinite on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.v1 import tensor_pb2
from coterie.wire.messages import Message, Rows, Spec, has_rows

AnyArray = NDArray[Any]
_ONE_THREAD = 10_000  # products of vectors with at most this many terms use one thread in OpenBLAS
FLOAT64, FLOAT32, INT64, INT32, UINT8 = (np.dtype(name) for name in ("<f8", "<f4", "<i8", "<i4", "u1"))
BFLOAT16 = np.dtype([("upper_half", "<u2")])  # numpy lacks this type
DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT64: FLOAT64,
    tensor_pb2.ELEMENT_TYPE_FLOAT32: FLOAT32,
    tensor_pb2.ELEMENT_TYPE_INT64: INT64,
    tensor_pb2.ELEMENT_TYPE_INT32: INT32,
    tensor_pb2.ELEMENT_TYPE_UINT8: UINT8,
    tensor_pb2.ELEMENT_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: BFLOAT16,
}


class Payload(Protocol):
    """The part of an experiment that sets the precision."""

    @property
    def payload(self) -> str: ...

    @property
    def model(self) -> object: ...


@dataclass(frozen=True)
class Precision:
    """The payload types of a run: float64 or float32 for vectors; float32 or half precision for weights of networks."""

    dtype: np.dtype[Any]
    weights: np.dtype[Any] = FLOAT32
    model: np.dtype[Any] = FLOAT32  # weights in the halves

    @staticmethod
    def of(name: str, *, is_convex: bool = False) -> Precision:
        """For the payload "float64", "float32", "float16" or "bfloat16". Weights of convex problems have the type of vectors."""
        if is_convex:
            dtype = np.dtype(name).newbyteorder("<")
            return Precision(dtype, dtype, FLOAT64)
        if name == "bfloat16":
            return Precision(FLOAT32, BFLOAT16)
        if name == "float16":
            return Precision(FLOAT32, np.dtype("<f2"))
        return Precision(np.dtype(name).newbyteorder("<"))

    @staticmethod
    def of_run(experiment: Payload) -> Precision:
        return Precision.of(experiment.payload, is_convex=experiment.model is None)

    def rounded_weights(self, array: AnyArray) -> AnyArray:
        """Weights as the receiver will see them."""
        return array if self.weights == self.model else native(written(array, self.weights), self.model)

    def rounded(self, array: AnyArray) -> NDArray[np.float64]:
        """`array` as the receiver will see it. A half that continues with numbers it has sent must use this."""
        return array.astype(self.dtype).astype(np.float64) if self.dtype != FLOAT64 else array


def written(array: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """The numbers in their wire type. Conversion to bfloat16 rounds half to even. Numbers that are too large become infinite."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):  # the parent refuses infinite numbers, and names their user
            return np.asarray(array, dtype=dtype, order="C")
    single = np.asarray(array, dtype=FLOAT32, order="C")
    bits = single.view(np.uint32)
    upper = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    upper[np.isnan(single)] = 0x7FC0  # the carry could turn it into another number
    return upper.view(BFLOAT16)


def native(array: AnyArray, wanted: np.dtype[Any]) -> AnyArray:
    """Numbers in the type of the halves."""
    if array.dtype == wanted:
        return array
    if array.dtype == BFLOAT16:  # numpy compares such types slowly
        array = (array.view("<u2").astype(np.uint32) << np.uint32(16)).view(FLOAT32)
    with np.errstate(invalid="ignore"):  # signalling NaNs: the parent refuses them like quiet ones
        return array.astype(wanted)


@dataclass(frozen=True)
class Bad:
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
    """Whether all entries are finite. A finite sum proves it, and is faster; it may also overflow.

    Of few entries the sum of squares is the fastest. For many, BLAS uses several threads: waiting for them takes long when cores are busy.
    """
    if array.size <= _ONE_THREAD:
        is_proven = math.isfinite(np.vdot(array, array))
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            is_proven = math.isfinite(array.sum())
    return is_proven or bool(np.isfinite(array).all())


def _fits(array: np.ndarray[Any, Any], spec: Spec, precision: Precision) -> bool:
    """Whether finite numbers stay finite on the wire."""
    narrowed = precision.rounded_weights if spec.is_weights else precision.rounded
    is_narrowed = precision.weights != precision.model if spec.is_weights else precision.dtype != np.float64 and not spec.is_exact
    if not is_narrowed or not array.size:
        return True
    with np.errstate(over="ignore"):
        return bool(np.isfinite(narrowed(np.abs(array).max().reshape(1))).all())
