"""The codec converts declared messages to frames of at most about 1 MiB and back, and counts what each frame carries.

Sender and receiver count independently, one what it encodes and the other what it decodes, and the two books must agree. Only this module
decides the dtype of payloads. Received arrays are read-only views.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.frames import (
    CHUNK,
    CHUNK_BYTES,
    CHUNK_DATA,
    CHUNK_TAG,
    PLAIN_BYTES,
    REPLY_PARTS,
    TASK_OR_REPLY,
    TASK_PARTS,
    Lifted,
    check_fields,
    chunk_data,
    delimited_bytes,
    field_header,
    lift,
)
from coterie.wire.messages import Broadcast, Message, PerCluster, Rows, Spec, check_extents, check_shapes, has_rows, kind_class
from coterie.wire.stencil import BFLOAT16, DTYPES, Entry, Extent, Plan, Plans, Stencil, native_dtype, stencil_of

PROTOCOL_VERSION = 1
# A frame holds inline tensors of at most this size together; larger ones follow in chunks.
INLINE_BYTES = 1 << 20
MAX_FRAME_BYTES = 8 << 20
MAX_AXES = 8
MAX_TENSOR_BYTES = 16 << 30
GRPC_FRAME_HEADER_BYTES = 5
ENVELOPE = "envelope"

AnyArray = NDArray[Any]
Announced = Callable[[session_pb2.Task | session_pb2.Reply], None]

_BUFFERS = 2  # kept for later tensors
_MAX_SHOWN = 100  # characters of a peer's name
_FLOAT64 = np.dtype("<f8")
_FLOAT32 = np.dtype("<f4")
_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")


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
        return array if self.weights == self.model else _native(_written(array, self.weights), self.model)

    def rounded(self, array: AnyArray) -> NDArray[np.float64]:
        """`array` as the receiver will see it. A half that continues with numbers it has sent must use this."""
        return array.astype(self.dtype).astype(np.float64) if self.dtype != _FLOAT64 else array


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


def _laid_out(message: Message, part_number: int, precision: Precision, budget: int) -> tuple[Stencil, list[AnyArray]]:
    """The stencil of a message, and its arrays (users first) in wire types. `budget` bytes are left in the frame for inline tensors."""
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
        arrays.append(_written(array, _wire_dtype(spec, precision, array)))
    for array in arrays:
        is_inline = array.nbytes <= budget
        budget -= array.nbytes if is_inline else 0
        extents.append(Extent(array.dtype, array.shape, is_inline))
    if users is None:
        return stencil_of(cls, part_number, None, tuple(extents)), arrays
    return stencil_of(cls, part_number, extents[0], tuple(extents[1:])), arrays


def _written(array: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
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
        stencil, arrays = _laid_out(message, TASK_PARTS if is_task else REPLY_PARTS, precision, budget)
        fixed = iter(stencil.fixed)
        pieces.append(next(fixed))
        for extent, array in zip(stencil.extents, arrays, strict=True):
            if extent.is_inline:
                pieces += (array.data, next(fixed))
                budget -= array.nbytes
            else:
                tails.append(array.reshape(-1).view(np.uint8).data)
        inline += stencil.n_bytes
        users = message.users if isinstance(message, Rows) else None
        entries.append(stencil.entry if users is None else stencil.entry.serving(users))
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
    """A complete task or reply: its frame, the bytes of each chunked tensor, and the size of its first frame.

    If the first frame fits a plan, `frame` has no parts.
    """

    frame: session_pb2.Task | session_pb2.Reply
    tails: tuple[bytearray | memoryview, ...]
    head_bytes: int
    lifted: Lifted | None = None
    data: bytes = b""  # the first frame, for `plan` or `plans`
    plan: Plan | None = None
    plans: Plans | None = None  # the plans that learn from this frame

    @property
    def n_bytes(self) -> int:
        return self.head_bytes + sum(len(tail) for tail in self.tails)

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.plan is not None:
            return self.plan.kinds
        return tuple(part.kind for part in self.frame.parts)

    def decode(self, n_own: int, dims: dict[str, int] | None = None) -> tuple[list[Message], list[Entry]]:
        """The typed messages and their ledger entries.

        `n_own` is the number of users of the link's host, which is the number of rows of a message without users. Arrays are read-only
        views. Raises ProtocolError for undeclared kinds, wrong dtypes, wrong shapes.
        """
        dims = dims or {}
        if self.plan is not None:
            return _decode_planned(self.data, self.plan, n_own, dims)
        tails = iter(self.tails)
        messages: list[Message] = []
        entries: list[Entry] = []
        stencils: list[Stencil] = []
        inline = 0
        for place, part in enumerate(self.frame.parts):
            size = self.lifted.sizes.get(place) if self.lifted is not None else None
            size = delimited_bytes(part.ByteSize()) if size is None else size
            inline += size
            data = self.lifted.data.get(place, {}) if self.lifted is not None else {}
            message, stencil = _decode_part(part, self._part_number, data, tails, n_own, dims)
            messages.append(message)
            entries.append(_booked(stencil, message, size))
            stencils.append(stencil)
        entries.append(_envelope(self.head_bytes - inline))
        if self.plans is not None:
            self.plans.learn(self.data, stencils, n_own, dims)
        return messages, entries

    @property
    def _part_number(self) -> int:
        return TASK_PARTS if isinstance(self.frame, session_pb2.Task) else REPLY_PARTS


def _booked(stencil: Stencil, message: Message, size: int) -> Entry:
    """The ledger entry of a part with `size` bytes in its frame, which another implementation may encode differently."""
    users = message.users if isinstance(message, Rows) else None
    entry = stencil.entry if users is None else stencil.entry.serving(users)
    return entry if size == stencil.n_bytes else replace(entry, message_bytes=entry.message_bytes + size - stencil.n_bytes)


def _decode_planned(data: bytes, plan: Plan, n_own: int, dims: dict[str, int]) -> tuple[list[Message], list[Entry]]:
    messages: list[Message] = []
    entries: list[Entry] = []
    is_checked = plan.n_own == n_own and plan.dims == dims
    for stencil, places in plan.parts:
        of_each = zip(places, stencil.extents, stencil.natives, strict=True)
        arrays = [_array_at(data, at, extent, native) for at, extent, native in of_each]
        if stencil.has_users:
            users, *fields = arrays
            message = stencil.cls(*fields, users=users)  # type: ignore[call-arg]
            entries.append(stencil.entry.serving(users))
        else:
            message = stencil.cls(*arrays)
            entries.append(stencil.entry)
        if not is_checked:
            _check_shapes(message, n_own, dims)
        messages.append(message)
    entries.append(_envelope(plan.header.stop))
    return messages, entries


def _array_at(data: bytes, at: int, extent: Extent, native: np.dtype[Any]) -> AnyArray:
    """As `_get` and `_native`: a read-only view of the frame if it is aligned and needs no conversion, else a copy."""
    array: AnyArray = np.ndarray(extent.shape, extent.dtype, data, at)
    if not array.flags.aligned:
        array = _aligned(array)
    return array if extent.dtype == native else _native(array, native)


def _decode_part(
    part: tensor_pb2.Part,
    part_number: int,
    lifted: Mapping[int, memoryview],
    tails: Iterator[bytearray | memoryview],
    n_own: int,
    dims: dict[str, int],
) -> tuple[Message, Stencil]:
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
        arrays.append(_native(array, native_dtype(spec, array.dtype)))
    is_rows = issubclass(cls, Rows)
    if users is not None and not is_rows:
        raise ProtocolError(f"{part.kind} is a broadcast, but it names users")
    message: Message = cls(*arrays, users=users) if is_rows else cls(*arrays)
    _check_shapes(message, n_own, dims)
    return message, stencil_of(cls, part_number, users_extent, tuple(extents))


def _check_shapes(message: Message, n_own: int, dims: dict[str, int]) -> None:
    n_rows = None
    if isinstance(message, Rows):
        n_rows = n_own if message.users is None else message.users.size
    check_shapes(message, n_rows, dims)


def _native(array: AnyArray, wanted: np.dtype[Any]) -> AnyArray:
    """Numbers in the type of the halves."""
    if array.dtype == BFLOAT16:
        array = _narrow(array)
    if array.dtype == wanted:
        return array
    with np.errstate(invalid="ignore"):  # signalling NaNs: the parent refuses them like quiet ones
        return array.astype(wanted)


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


def _references(buffers: Sequence[AnyArray]) -> list[int]:
    return [sys.getrefcount(buffer) for buffer in buffers]


_UNHELD = _references([np.empty(1, dtype=np.uint8)])[0]  # the reference count of a buffer that only the list holds, counted in the same way


class Assembler:
    """Reassembles frames. Feed it the bytes of each frame in order; it returns whole tasks and replies.

    Frames of other kinds (hello, heartbeat, ...) are returned unchanged. One assembler serves one direction of one stream.
    """

    def __init__(self, outer: type[session_pb2.JoinRequest | session_pb2.JoinResponse], announced: Announced | None = None) -> None:
        self._outer = outer
        self._announced = announced  # called with a task or reply before its large tensors are allocated; it may refuse them
        self._inner = session_pb2.Task if outer is session_pb2.JoinResponse else session_pb2.Reply
        self._plans = Plans()
        self._part_number = TASK_PARTS if outer is session_pb2.JoinResponse else REPLY_PARTS
        self._open: Received | None = None
        self._buffers: list[AnyArray] = []  # the latest ones, to be reused
        self._missing: list[tuple[bytearray | memoryview, int]] = []  # buffers in order, with the position filled so far

    def _buffer(self, size: int) -> AnyArray:
        """Memory for a tensor. It reuses an earlier buffer of the same size that is free, since fresh pages are expensive.

        Memory of numpy comes in larger pages than a bytearray.
        """
        for buffer, n_references in zip(self._buffers, _references(self._buffers), strict=True):
            if buffer.size == size and n_references == _UNHELD:
                return buffer
        self._buffers = [*self._buffers[1 - _BUFFERS :], np.empty(size, dtype=np.uint8)]
        return self._buffers[-1]

    def feed(self, data: bytes) -> Received | Any | None:
        """A whole `Received`, a frame of another kind, or None while chunks are missing. ProtocolError for malformed frames."""
        if data[:1] == CHUNK_TAG and (chunk := chunk_data(data)) is not None:
            return self._chunk(chunk)
        plan = self._plans.fitting(data) if not self._missing else None
        if plan is not None and (fences := self._fences(data[plan.header])) is not None:
            return Received(fences, (), len(data), None, data, plan)
        small, lifted = lift(data, self._part_number) if len(data) > PLAIN_BYTES else (data, None)
        if lifted is None and len(data) > PLAIN_BYTES:
            check_fields(data, self._part_number)
        try:
            outer = self._outer.FromString(small)
        except Exception as error:  # DecodeError is not typed
            raise ProtocolError(f"a frame of {len(data)} bytes is not a {self._outer.__name__}: {error}") from error
        which = outer.WhichOneof("frame")
        if which is None:
            raise ProtocolError(f"a frame of {len(data)} bytes has no kind that protocol {PROTOCOL_VERSION} knows")
        frame = getattr(outer, which)
        if which == "chunk":
            return self._chunk(frame.data)
        if which not in ("task", "reply"):
            return frame
        if self._missing:
            raise ProtocolError(f"a {which} came while {len(self._missing)} tensors of the one before were incomplete")
        sizes = [tensor.chunked_bytes for part in frame.parts for tensor in (part.users, *part.tensors) if tensor.chunked_bytes]
        if sizes and self._announced is not None:
            self._announced(frame)
        if sum(sizes) > MAX_TENSOR_BYTES:
            raise ProtocolError(f"tensors of {sum(sizes)} bytes were announced, wanted at most {MAX_TENSOR_BYTES}")
        try:
            tails = tuple(self._buffer(size).data for size in sizes)
        except MemoryError as error:
            raise ProtocolError(f"tensors of {sum(sizes)} bytes were announced, which do not fit into memory") from error
        received = Received(frame, tails, len(data), lifted, data, None, self._plans)
        if not sizes:
            return received
        self._open, self._missing = received, [(tail, 0) for tail in received.tails]
        return None

    def _fences(self, text: bytes) -> session_pb2.Task | session_pb2.Reply | None:
        """The header of a task or reply, without its parts; None if it is something else."""
        try:
            frame = self._inner.FromString(text)
        except DecodeError:
            return None
        return None if frame.parts else frame

    def _chunk(self, data: bytes | memoryview) -> Received | None:
        if not self._missing or self._open is None:
            raise ProtocolError(f"a chunk of {len(data)} bytes came, but no tensor is incomplete")
        buffer, start = self._missing[0]
        end = start + len(data)
        if end > len(buffer) or not data:
            raise ProtocolError(f"a chunk ends at byte {end} of a tensor of {len(buffer)} bytes")
        memoryview(buffer)[start:end] = data
        self._missing[0] = (buffer, end)
        if end == len(buffer):
            self._missing.pop(0)
        if self._missing:
            return None
        received, self._open = self._open, None
        return received


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


__all__ = [
    "ENVELOPE",
    "GRPC_FRAME_HEADER_BYTES",
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Assembler",
    "Encoded",
    "Entry",
    "Precision",
    "Received",
    "check_announced",
    "encode",
    "reheaded",
    "select",
    "select_clusters",
]
