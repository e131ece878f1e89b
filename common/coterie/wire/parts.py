"""Parts of a frame without their numbers: the bytes around the numbers, and the ledger entry of a part.

Most rounds send the same frames as the round before, with other numbers. `template_of` encodes the fixed bytes of a part once for each
kind, shape and element type. The sender inserts the numbers; the receiver books by the template.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coterie.arrays import Indices
from coterie.v1 import tensor_pb2
from coterie.wire.frames import (
    PART_KIND,
    PART_TENSORS,
    PART_USERS,
    TENSOR_DATA,
    chunk_frame_bytes,
    delimited_bytes,
    field_header,
)
from coterie.wire.messages import Message, Rows, Spec, has_rows

BFLOAT16 = np.dtype([("upper_half", "<u2")])  # numpy lacks this type

DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT64: np.dtype("<f8"),
    tensor_pb2.ELEMENT_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.ELEMENT_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.ELEMENT_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.ELEMENT_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.ELEMENT_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: BFLOAT16,
}
_FLOAT64, _FLOAT32, _INT64 = np.dtype("<f8"), np.dtype("<f4"), np.dtype("<i8")
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """The ledger's record of one part of one frame.

    `message_bytes` are protobuf bytes, `frames` gRPC messages, `users` the member indices served (None: all of the host's).
    """

    kind: str
    vectors: int
    scalars: int
    payload_bytes: int
    message_bytes: int
    frames: int
    users: Indices | None
    common: tuple[int, int] = (0, 0)  # vectors and scalars that are sent once, but count for each user

    def serving(self, users: Indices) -> Entry:
        """The entry for these users."""
        vectors, scalars = self.vectors, self.scalars
        if self.common[1]:
            vectors, scalars = (n + (users.size - 1) * common for n, common in zip((vectors, scalars), self.common, strict=True))
        return Entry(self.kind, vectors, scalars, self.payload_bytes, self.message_bytes, self.frames, users, self.common)


class Extent(NamedTuple):
    """A tensor's type and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_inline: bool = True  # else it follows in chunks

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Template:
    """One part of a frame. `fixed` holds the bytes before, between and after the inline tensors, in order (users first)."""

    cls: type[Message]
    fixed: tuple[bytes, ...]
    extents: tuple[Extent, ...]
    natives: tuple[np.dtype[Any], ...]  # types of the same tensors in the halves
    has_users: bool
    n_bytes: int  # in the frame
    entry: Entry  # its ledger entry, for all users


@functools.lru_cache(maxsize=1024)
def template_of(cls: Any, part_number: int, users: Extent | None, fields: tuple[Extent, ...]) -> Template:
    """The part of a message of this class (a declared `type[Message]`) whose users and fields have these extents."""
    named = [(PART_TENSORS, name, extent) for (name, _), extent in zip(cls.specs, fields, strict=True)]
    if users is not None:
        named.insert(0, (PART_USERS, "", users))
    pieces, size = [b""], 0
    for number, name, extent in named:
        text, n_inline = _tensor_text(name, extent), extent.n_bytes if extent.is_inline else 0
        header = field_header(number, len(text) + n_inline)
        size += len(header) + len(text) + n_inline
        pieces[-1] += header + text
        if extent.is_inline:
            pieces.append(b"")
    kind = cls.kind.encode()
    head = field_header(PART_KIND, len(kind)) + kind
    size += len(head)
    pieces[0] = field_header(part_number, size) + head + pieces[0]
    extents = tuple(extent for _, _, extent in named)
    size = delimited_bytes(size)
    natives = tuple(native_dtype(spec, extent.dtype) for (_, spec), extent in zip(cls.specs, fields, strict=True))
    if users is not None:
        natives = (_INT64, *natives)
    return Template(cls, tuple(pieces), extents, natives, users is not None, size, _entry(cls, size, fields, extents))


def native_dtype(spec: Spec, written: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a field in the halves: float64; for weights float32 unless written as float64; or int64."""
    if not spec.is_float:
        return _INT64
    return _FLOAT32 if spec.is_weights and written != _FLOAT64 else _FLOAT64


def _tensor_text(name: str, extent: Extent) -> bytes:
    """The encoded tensor up to its numbers."""
    code, n_bytes = _CODES[extent.dtype], extent.n_bytes
    tensor = tensor_pb2.Tensor(name=name, dtype=code, shape=extent.shape)  # type: ignore[arg-type]
    if not extent.is_inline:
        tensor.chunked_bytes = n_bytes
    return tensor.SerializeToString() + (field_header(TENSOR_DATA, n_bytes) if extent.is_inline and n_bytes else b"")


def _entry(cls: type[Message], size: int, fields: Sequence[Extent], extents: Sequence[Extent]) -> Entry:
    """The ledger entry. `size` is that of the part in its frame; `extents` include the users."""
    vectors = scalars = payload = frames = common_vectors = common_scalars = 0
    for (_, spec), extent in zip(cls.specs, fields, strict=True):
        n_vectors, n_scalars = spec.count(extent.shape)
        vectors, scalars = vectors + n_vectors, scalars + n_scalars
        if issubclass(cls, Rows) and not has_rows(spec):
            common_vectors, common_scalars = common_vectors + n_vectors, common_scalars + n_scalars
        payload += n_scalars * extent.dtype.itemsize
    for extent in extents:
        if not extent.is_inline:
            chunk_bytes, chunk_frames = chunk_frame_bytes(extent.n_bytes)
            size, frames = size + chunk_bytes, frames + chunk_frames
    return Entry(cls.kind, vectors, scalars, payload, size, frames, None, (common_vectors, common_scalars))
