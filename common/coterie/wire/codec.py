"""The codec converts declared messages to frames of at most about 1 MiB and back, and counts what each frame carries.

Sender and receiver count independently, one what it encodes and the other what it decodes, and the two books must agree. Only this module
decides the dtype of payloads. Received arrays are read-only views.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.frames import (
    CHUNK,
    CHUNK_BYTES,
    CHUNK_DATA,
    REPLY_PARTS,
    TASK_OR_REPLY,
    TASK_PARTS,
    Lifted,
    delimited_bytes,
    field_header,
)
from coterie.wire.messages import Broadcast, Message, PerCluster, Rows, Spec, check_extents, check_shapes, has_rows, kind_class
from coterie.wire.parts import BFLOAT16, DTYPES, Entry, Extent, Template, native_dtype, template_of
from coterie.wire.precision import Precision, native, written

PROTOCOL_VERSION = 1
# A frame holds inline tensors of at most this size together; larger ones follow in chunks.
INLINE_BYTES = 1 << 20
MAX_FRAME_BYTES = 8 << 20
MAX_AXES = 8
MAX_TENSOR_BYTES = 16 << 30
GRPC_FRAME_HEADER_BYTES = 5
ENVELOPE = "envelope"

AnyArray = NDArray[Any]

_MAX_SHOWN = 100  # characters of a peer's name
_FLOAT64 = np.dtype("<f8")
_FLOAT32 = np.dtype("<f4")
_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A task or reply ready to send: the first frame, the large tensors that follow in chunks, and the ledger entries."""

    head: bytes
    tails: tuple[memoryview, ...]
    entries: tuple[Entry, ...]
    is_task: bool

    def frames(self) -> Iterator[bytes]:
        """The frames in order. Chunks are cut on demand, so that a large message is never copied whole."""
        yield self.head
        for tail in self.tails:
            for start in range(0, len(tail), CHUNK_BYTES):
                data = tail[start : start + CHUNK_BYTES]
                inner = field_header(CHUNK_DATA, len(data))
                yield b"".join((field_header(CHUNK, len(inner) + len(data)), inner, data))

    @property
    def n_bytes(self) -> int:
        return len(self.head) + sum(len(tail) for tail in self.tails)


def _wire_dtype(spec: Spec, precision: Precision, array: AnyArray) -> np.dtype[Any]:
    if spec.is_weights:
        return precision.weights
    if spec.is_float:
        return _FLOAT64 if spec.is_exact else precision.dtype
    small = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
    return _INT32 if small else _INT64


def _laid_out(message: Message, part_number: int, precision: Precision, budget: int) -> tuple[Template, list[AnyArray]]:
    """The template of a message, and its arrays (users first) in wire types. `budget` bytes are left in the frame for inline tensors."""
    if not message.kind or type(message) is not kind_class(message.kind):
        raise TypeError(f"{type(message).__name__} is not a declared message: what has no declaration is private")
    cls: Any = type(message)  # mypy does not know that classes are hashable
    arrays: list[AnyArray] = []
    extents: list[Extent] = []
    is_rows = isinstance(message, Rows)
    users = message.users if isinstance(message, Rows) else None
    if users is not None:
        arrays.append(np.asarray(users, dtype=_INT32, order="C"))
    for name, spec in cls.specs:
        array = getattr(message, name)
        if users is None and is_rows and spec.is_float and not has_rows(spec):
            raise TypeError(f"{cls.kind}.{name} is common to its users, so the message must name them")
        arrays.append(written(array, _wire_dtype(spec, precision, array)))
    for array in arrays:
        is_inline = array.nbytes <= budget
        budget -= array.nbytes if is_inline else 0
        extents.append(Extent(array.dtype, array.shape, is_inline))
    if users is None:
        return template_of(cls, part_number, None, tuple(extents)), arrays
    return template_of(cls, part_number, extents[0], tuple(extents[1:])), arrays


@functools.lru_cache(maxsize=64)
def _envelope(n_bytes: int) -> Entry:
    """The entry of the first frame without its parts: fences, flags, and the enclosing oneof."""
    return Entry(ENVELOPE, 0, 0, 0, n_bytes, 1, None)


def encode(frame: session_pb2.Task | session_pb2.Reply, messages: Sequence[Message], precision: Precision) -> Encoded:
    """Frames of a task or reply with a complete header, and these messages. TypeError for undeclared messages.

    The bytes of a tensor are copied only once, into the frame.
    """
    is_task = isinstance(frame, session_pb2.Task)
    budget, inline = INLINE_BYTES, 0
    pieces: list[bytes | memoryview] = []
    tails: list[memoryview] = []
    entries: list[Entry] = []
    for message in messages:
        template, arrays = _laid_out(message, TASK_PARTS if is_task else REPLY_PARTS, precision, budget)
        fixed = iter(template.fixed)
        pieces.append(next(fixed))
        for extent, array in zip(template.extents, arrays, strict=True):
            if extent.is_inline:
                pieces += (array.data, next(fixed))
                budget -= array.nbytes
            else:
                tails.append(array.reshape(-1).view(np.uint8).data)
        inline += template.n_bytes
        users = message.users if isinstance(message, Rows) else None
        entries.append(template.entry if users is None else template.entry.serving(users))
    text = frame.SerializeToString()
    head = b"".join((field_header(TASK_OR_REPLY, len(text) + inline), text, *pieces))
    entries.append(_envelope(len(head) - inline))
    return Encoded(head, tuple(tails), tuple(entries), is_task)


def reheaded(frame: session_pb2.Task | session_pb2.Reply, sent: Encoded) -> Encoded:
    """The same message under a changed header, to be sent again to a returning host. `frame` has the same parts."""
    is_task = isinstance(frame, session_pb2.Task)
    outer = session_pb2.JoinResponse(task=frame) if is_task else session_pb2.JoinRequest(reply=frame)  # type: ignore[arg-type]
    head = outer.SerializeToString()
    entries = [entry for entry in sent.entries if entry.kind != ENVELOPE]
    entries.append(_envelope(len(head) - sum(delimited_bytes(part.ByteSize()) for part in frame.parts)))
    return Encoded(head, sent.tails, tuple(entries), is_task)


@dataclass(slots=True)
class Received:
    """A complete task or reply: its frame, the bytes of each chunked tensor, and the size of its first frame."""

    frame: session_pb2.Task | session_pb2.Reply
    tails: tuple[bytearray | memoryview, ...]
    head_bytes: int
    lifted: Lifted | None = None

    @property
    def n_bytes(self) -> int:
        return self.head_bytes + sum(len(tail) for tail in self.tails)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(part.kind for part in self.frame.parts)

    def decode(self, n_own: int, dims: dict[str, int] | None = None) -> tuple[list[Message], list[Entry]]:
        """The typed messages and their ledger entries.

        `n_own` is the number of users of the link's host, which is the number of rows of a message without users. Arrays are read-only
        views. Raises ProtocolError for undeclared kinds, wrong dtypes, wrong shapes.
        """
        dims = dims or {}
        tails = iter(self.tails)
        messages: list[Message] = []
        entries: list[Entry] = []
        inline = 0
        for place, part in enumerate(self.frame.parts):
            size = self.lifted.sizes.get(place) if self.lifted is not None else None
            size = delimited_bytes(part.ByteSize()) if size is None else size
            inline += size
            data = self.lifted.data.get(place, {}) if self.lifted is not None else {}
            message, template = _decode_part(part, self._part_number, data, tails, n_own, dims)
            messages.append(message)
            entries.append(_booked(template, message, size))
        entries.append(_envelope(self.head_bytes - inline))
        return messages, entries

    @property
    def _part_number(self) -> int:
        return TASK_PARTS if isinstance(self.frame, session_pb2.Task) else REPLY_PARTS


def _booked(template: Template, message: Message, size: int) -> Entry:
    """The ledger entry of a part with `size` bytes in its frame, which another implementation may encode differently."""
    users = message.users if isinstance(message, Rows) else None
    entry = template.entry if users is None else template.entry.serving(users)
    return entry if size == template.n_bytes else replace(entry, message_bytes=entry.message_bytes + size - template.n_bytes)


def _decode_part(
    part: tensor_pb2.Part,
    part_number: int,
    lifted: Mapping[int, memoryview],
    tails: Iterator[bytearray | memoryview],
    n_own: int,
    dims: dict[str, int],
) -> tuple[Message, Template]:
    cls: Any = kind_class(part.kind)
    users = users_extent = None
    if part.HasField("users"):
        users = _get_users(part, tails)
        users_extent = Extent(DTYPES[part.users.dtype], users.shape, not part.users.chunked_bytes)
    if len(part.tensors) != len(cls.specs):
        raise ProtocolError(f"{part.kind} has {len(part.tensors)} tensors, wanted {len(cls.specs)}")
    arrays: list[AnyArray] = []
    extents: list[Extent] = []
    for place, ((name, spec), tensor) in enumerate(zip(cls.specs, part.tensors, strict=True)):
        if tensor.name != name:
            raise ProtocolError(f"{part.kind} has field {_shown(tensor.name)!r}, wanted {name!r}")
        array = _get(tensor, part.kind, tails, lifted.get(place))
        if (array.dtype.kind == "f" or array.dtype == BFLOAT16) != spec.is_float:
            raise ProtocolError(f"{part.kind}.{name} has dtype {array.dtype}, wanted {'float' if spec.is_float else 'integer'}")
        extents.append(Extent(array.dtype, array.shape, not tensor.chunked_bytes))
        arrays.append(native(array, native_dtype(spec, array.dtype)))
    is_rows = issubclass(cls, Rows)
    if users is not None and not is_rows:
        raise ProtocolError(f"{part.kind} is a broadcast, but it names users")
    message: Message = cls(*arrays, users=users) if is_rows else cls(*arrays)
    _check_shapes(message, n_own, dims)
    return message, template_of(cls, part_number, users_extent, tuple(extents))


def _check_shapes(message: Message, n_own: int, dims: dict[str, int]) -> None:
    n_rows = None
    if isinstance(message, Rows):
        n_rows = n_own if message.users is None else message.users.size
    check_shapes(message, n_rows, dims)


def _aligned(array: AnyArray) -> AnyArray:
    """A read-only array, at an address that does not depend on the frame's layout."""
    if not array.flags.aligned:
        array = array.copy()  # sums over unaligned numbers run in another order, with other bits
    array.flags.writeable = False
    return array


def _get_users(part: tensor_pb2.Part, tails: Iterator[bytearray | memoryview]) -> Indices:
    users = _get(part.users, part.kind, tails)
    if users.dtype.kind != "i" or users.ndim != 1:
        raise ProtocolError(f"{part.kind} names its users by {users.dtype} of shape {users.shape}, wanted a list of integers")
    return users.astype(np.int64)


def _get(tensor: tensor_pb2.Tensor, kind: str, tails: Iterator[bytearray | memoryview], lifted: memoryview | None = None) -> AnyArray:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ProtocolError(f"{kind}.{_shown(tensor.name)} has element type {tensor.dtype}, which is unknown")
    data: bytes | bytearray | memoryview = tensor.data if lifted is None else lifted
    if tensor.chunked_bytes:
        data = next(tails)
    shape = _shape(tensor, kind, dtype, len(data))
    try:
        array = np.frombuffer(data, dtype=dtype).reshape(shape)
    except (ValueError, OverflowError) as error:  # an empty tensor may still claim any extent
        raise ProtocolError(f"{kind}.{_shown(tensor.name)} has shape {list(shape)}, which no array can have") from error
    return _aligned(array)


def _shape(tensor: tensor_pb2.Tensor, kind: str, dtype: np.dtype[Any], n_bytes: int) -> tuple[int, ...]:
    """The shape of a tensor that has this many bytes."""
    name = _shown(tensor.name)
    if len(tensor.shape) > MAX_AXES:
        raise ProtocolError(f"{kind}.{name} has {len(tensor.shape)} axes, wanted at most {MAX_AXES}")
    shape = tuple(tensor.shape)
    if any(extent > MAX_TENSOR_BYTES for extent in shape):
        raise ProtocolError(f"{kind}.{name} has an axis of {max(shape)}, wanted at most {MAX_TENSOR_BYTES}")
    wanted = math.prod(shape) * dtype.itemsize
    if n_bytes != wanted:
        raise ProtocolError(f"{kind}.{name} brings {n_bytes} bytes, wanted {wanted} for shape {list(shape)}")
    return shape


def _shown(name: str) -> str:
    return name[:_MAX_SHOWN]


def check_announced(frame: session_pb2.Task | session_pb2.Reply, n_own: int, dims: Mapping[str, int]) -> None:
    """ProtocolError if `Received.decode` would refuse the shapes in the first frame of a task or reply."""
    for part in frame.parts:
        cls = kind_class(part.kind)
        if len(part.tensors) != len(cls.specs):
            raise ProtocolError(f"{part.kind} has {len(part.tensors)} tensors, wanted {len(cls.specs)}")
        shapes = [_announced_shape(tensor, part.kind) for tensor in part.tensors]
        n_rows = (_announced_shape(part.users, part.kind) or (0,))[0] if part.HasField("users") else n_own
        check_extents(cls, shapes, n_rows if issubclass(cls, Rows) else None, dims)


def _announced_shape(tensor: tensor_pb2.Tensor, kind: str) -> tuple[int, ...]:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is not None and tensor.chunked_bytes:
        return _shape(tensor, kind, dtype, tensor.chunked_bytes)
    return tuple(tensor.shape[: MAX_AXES + 1])  # its bytes are already here


def select(message: Message, positions: Indices | slice | None, users: Indices | None) -> Message:
    """The rows of a `Rows` message at `positions`, owned by `users`. Broadcasts are unchanged."""
    if isinstance(message, Broadcast) or positions is None:
        return message
    arrays = {name: getattr(message, name)[positions] if has_rows(spec) else getattr(message, name) for name, spec in message.specs}
    return type(message)(users=users, **arrays)  # type: ignore[call-arg]


def select_clusters(message: PerCluster, clusters: Indices) -> PerCluster | None:
    """The rows of these clusters (ascending numbers); None if there are none."""
    kept = np.flatnonzero(np.isin(message.clusters, clusters))
    if kept.size == message.clusters.size:
        return message
    taken = {name: getattr(message, name)[kept] if "clusters" in spec.shape[:1] else getattr(message, name) for name, spec in message.specs}
    return type(message)(**taken) if kept.size else None
