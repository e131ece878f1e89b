"""The payload type of a run, and numbers as they are sent and as the halves use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.wire.parts import BFLOAT16

AnyArray = NDArray[Any]
_FLOAT64 = np.dtype("<f8")
_FLOAT32 = np.dtype("<f4")


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
    weights: np.dtype[Any] = _FLOAT32
    model: np.dtype[Any] = _FLOAT32  # weights in the halves

    @staticmethod
    def of(name: str, *, is_convex: bool = False) -> Precision:
        """For the payload "float64", "float32", "float16" or "bfloat16". Weights of convex problems have the type of vectors."""
        if is_convex:
            dtype = np.dtype(name).newbyteorder("<")
            return Precision(dtype, dtype, _FLOAT64)
        if name == "bfloat16":
            return Precision(_FLOAT32, BFLOAT16)
        if name == "float16":
            return Precision(_FLOAT32, np.dtype("<f2"))
        return Precision(np.dtype(name).newbyteorder("<"))

    @staticmethod
    def of_run(experiment: Payload) -> Precision:
        return Precision.of(experiment.payload, is_convex=experiment.model is None)

    def rounded_weights(self, array: AnyArray) -> AnyArray:
        """Weights as the receiver will see them."""
        return array if self.weights == self.model else native(written(array, self.weights), self.model)

    def rounded(self, array: AnyArray) -> NDArray[np.float64]:
        """`array` as the receiver will see it. A half that continues with numbers it has sent must use this."""
        return array.astype(self.dtype).astype(np.float64) if self.dtype != _FLOAT64 else array


def written(array: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """The numbers in their wire type. Conversion to bfloat16 rounds half to even. Numbers that are too large become infinite."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):  # the parent refuses infinite numbers, and names their user
            return np.asarray(array, dtype=dtype, order="C")
    single = np.asarray(array, dtype=_FLOAT32, order="C")
    bits = single.view(np.uint32)
    upper = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    upper[np.isnan(single)] = 0x7FC0  # the carry could turn it into another number
    return upper.view(BFLOAT16)


def _narrow(array: AnyArray) -> NDArray[np.float32]:
    """Half-precision numbers as float32."""
    if array.dtype == BFLOAT16:
        return (array.view("<u2").astype(np.uint32) << np.uint32(16)).view(_FLOAT32)
    with np.errstate(invalid="ignore"):
        return array.astype(_FLOAT32)


def native(array: AnyArray, wanted: np.dtype[Any]) -> AnyArray:
    """Numbers in the type of the halves."""
    if array.dtype == BFLOAT16:
        array = _narrow(array)
    if array.dtype == wanted:
        return array
    with np.errstate(invalid="ignore"):  # signalling NaNs: the parent refuses them like quiet ones
        return array.astype(wanted)
