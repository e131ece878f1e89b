"""The codec: declared messages to frames of at most about 1 MiB and back, and what each frame was for.

Both sides count what passes here, each on its own: the sender from what it encodes, the receiver from what it decodes, and the
two books must agree. The dtype of payloads is decided here and nowhere else; received arrays are read-only views.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.frames import (
    CHUNK,
    CHUNK_BYTES,
    CHUNK_DATA,
    CHUNK_TAG,
    PART_KIND,
    PART_TENSORS,
    PART_USERS,
    PLAIN_BYTES,
    REPLY_PARTS,
    TASK_OR_REPLY,
    TASK_PARTS,
    TENSOR_DATA,
    Lifted,
    chunk_data,
    chunk_frame_bytes,
    delimited_bytes,
    field_header,
    lift,
)
from coterie.messages import Broadcast, Message, PerCluster, Rows, Spec, check_shapes, kind_class
from coterie.v1 import session_pb2, tensor_pb2

PROTOCOL_VERSION = 1
# A frame holds inline tensors of at most this many bytes together; larger ones follow in chunks.
INLINE_BYTES = 1 << 20
MAX_FRAME_BYTES = 8 << 20
MAX_AXES = 8
MAX_TENSOR_BYTES = 16 << 30
GRPC_FRAME_HEADER_BYTES = 5
ENVELOPE = "envelope"

AnyArray = NDArray[Any]

_DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT64: np.dtype("<f8"),
    tensor_pb2.ELEMENT_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.ELEMENT_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.ELEMENT_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.ELEMENT_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.ELEMENT_TYPE_FLOAT16: np.dtype("<f2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BUFFERS = 2  # kept for tensors to come
_FLOAT64 = np.dtype("<f8")
_INT32 = np.dtype("<i4")


@dataclass(frozen=True)
class Precision:
    """The payload type of a run's vectors: "float64" or "float32"."""

    dtype: np.dtype[Any]

    @staticmethod
    def of(name: str) -> Precision:
        return Precision(np.dtype(name).newbyteorder("<"))

    def rounded(self, array: AnyArray) -> NDArray[np.float64]:
        """`array` as the other side will see it: a half that goes on computing with what it has sent must use this."""
        return array.astype(self.dtype).astype(np.float64) if self.dtype != _FLOAT64 else array


@dataclass(frozen=True, slots=True)
class Entry:
    """What one part of one frame carried; the ledger's raw material.

    `message_bytes` are protobuf bytes, `frames` how many gRPC messages, `users` the member indices served (None: all of the host's).
    """

    kind: str
    vectors: int
    scalars: int
    payload_bytes: int
    message_bytes: int
    frames: int
    users: Indices | None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A task or reply ready to be sent: the first frame, the large tensors that follow in chunks, and its entries."""

    head: bytes
    tails: tuple[memoryview, ...]
    entries: tuple[Entry, ...]
    is_task: bool

    def frames(self) -> Iterator[bytes]:
        """The frames in order; chunks are cut when asked for, so that a large message is never held twice."""
        yield self.head
        for tail in self.tails:
            for start in range(0, len(tail), CHUNK_BYTES):
                data = tail[start : start + CHUNK_BYTES]
                inner = field_header(CHUNK_DATA, len(data))
                yield b"".join((field_header(CHUNK, len(inner) + len(data)), inner, data))

    @property
    def n_bytes(self) -> int:
        return len(self.head) + sum(len(tail) for tail in self.tails)


@functools.lru_cache(maxsize=4096)
def _tensor_text(name: str, code: int, shape: tuple[int, ...], chunked_bytes: int) -> bytes:
    """A tensor without its data: the same in every round."""
    tensor = tensor_pb2.Tensor(name=name, dtype=code, shape=shape, chunked_bytes=chunked_bytes)  # type: ignore[arg-type]
    return tensor.SerializeToString()


class _Writer:
    """Writes the parts of one frame by hand, so that the bytes of a tensor are copied once: into the frame."""

    def __init__(self, part_number: int) -> None:
        self._part_number = part_number
        self.pieces: list[bytes | memoryview] = []
        self.tails: list[memoryview] = []
        self.n_bytes = 0
        self._budget = INLINE_BYTES
        self._part: list[bytes | memoryview] = []
        self._part_bytes = 0

    def tensor(self, number: int, name: str, array: AnyArray, dtype: np.dtype[Any]) -> None:
        """Adds a tensor to the part that is open."""
        array = np.asarray(array, dtype=dtype, order="C")
        n_bytes = array.nbytes
        if n_bytes > self._budget:
            text = _tensor_text(name, _CODES[dtype], array.shape, n_bytes)
            self.tails.append(array.reshape(-1).view(np.uint8).data)
            self._add(field_header(number, len(text)), text)
            return
        self._budget -= n_bytes
        text = _tensor_text(name, _CODES[dtype], array.shape, 0)
        inner = field_header(TENSOR_DATA, n_bytes) if n_bytes else b""
        self._add(field_header(number, len(text) + len(inner) + n_bytes), text, inner)
        self._part.append(array.data)
        self._part_bytes += n_bytes

    def _add(self, *pieces: bytes) -> None:
        self._part += pieces
        self._part_bytes += sum(map(len, pieces))

    def close_part(self, kind: str) -> int:
        """Ends the part; returns its size in the frame."""
        text = kind.encode()
        head = field_header(PART_KIND, len(text)) + text
        size = self._part_bytes + len(head)
        self.pieces += (field_header(self._part_number, size), head, *self._part)
        self._part, self._part_bytes = [], 0
        self.n_bytes += delimited_bytes(size)
        return delimited_bytes(size)


def _wire_dtype(spec: Spec, precision: Precision, array: AnyArray) -> np.dtype[Any]:
    if spec.is_float:
        return _FLOAT64 if spec.is_exact else precision.dtype
    small = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
    return _INT32 if small else np.dtype("<i8")


def _encode_part(writer: _Writer, message: Message, precision: Precision) -> Entry:
    if not message.kind or type(message) is not kind_class(message.kind):
        raise TypeError(f"{type(message).__name__} is not a declared message: what has no declaration is private")
    first_tail = len(writer.tails)
    users = message.users if isinstance(message, Rows) else None
    if users is not None:
        writer.tensor(PART_USERS, "", users, _INT32)
    vectors = scalars = payload = 0
    for name, spec in message.specs:
        array = getattr(message, name)
        dtype = _wire_dtype(spec, precision, array)
        writer.tensor(PART_TENSORS, name, array, dtype)
        n_vectors, n_scalars = spec.count(array)
        vectors, scalars = vectors + n_vectors, scalars + n_scalars
        payload += n_scalars * dtype.itemsize
    size = writer.close_part(message.kind)
    return _entry(message.kind, size, vectors, scalars, payload, [len(tail) for tail in writer.tails[first_tail:]], users)


def _entry(kind: str, size: int, vectors: int, scalars: int, payload: int, tails: Sequence[int], users: Indices | None) -> Entry:
    """`size` is that of the part in its frame; `tails` are the sizes of its chunked tensors."""
    message_bytes, frames = size, 0
    for tail in tails:
        chunk_bytes, chunk_frames = chunk_frame_bytes(tail)
        message_bytes, frames = message_bytes + chunk_bytes, frames + chunk_frames
    return Entry(kind, vectors, scalars, payload, message_bytes, frames, users)


def _envelope(head_bytes: int, inline: int) -> Entry:
    """What the first frame holds beside the parts: fences, flags, the oneof around it."""
    return Entry(ENVELOPE, 0, 0, 0, head_bytes - inline, 1, None)


def _inline_bytes(frame: session_pb2.Task | session_pb2.Reply) -> int:
    return sum(delimited_bytes(part.ByteSize()) for part in frame.parts)


def encode(frame: session_pb2.Task | session_pb2.Reply, messages: Sequence[Message], precision: Precision) -> Encoded:
    """A task or reply with its header set, plus typed messages, as frames. TypeError for what is not declared."""
    is_task = isinstance(frame, session_pb2.Task)
    writer = _Writer(TASK_PARTS if is_task else REPLY_PARTS)
    entries = [_encode_part(writer, message, precision) for message in messages]
    text = frame.SerializeToString()
    head = b"".join((field_header(TASK_OR_REPLY, len(text) + writer.n_bytes), text, *writer.pieces))
    entries.append(_envelope(len(head), writer.n_bytes))
    return Encoded(head, tuple(writer.tails), tuple(entries), is_task)


def reheaded(frame: session_pb2.Task | session_pb2.Reply, sent: Encoded) -> Encoded:
    """The same message under a changed header (`frame` holds the same parts): what is sent again to a returning host."""
    return _finished(frame, sent.tails, [entry for entry in sent.entries if entry.kind != ENVELOPE])


def _finished(frame: session_pb2.Task | session_pb2.Reply, tails: tuple[memoryview, ...], entries: list[Entry]) -> Encoded:
    is_task = isinstance(frame, session_pb2.Task)
    outer = session_pb2.JoinResponse(task=frame) if is_task else session_pb2.JoinRequest(reply=frame)  # type: ignore[arg-type]
    head = outer.SerializeToString()
    entries.append(_envelope(len(head), _inline_bytes(frame)))
    return Encoded(head, tails, tuple(entries), is_task)


@dataclass(frozen=True, slots=True)
class Received:
    """A complete task or reply: its frame, the bytes of each chunked tensor, and the size of its first frame."""

    frame: session_pb2.Task | session_pb2.Reply
    tails: tuple[bytearray | memoryview, ...]
    head_bytes: int
    lifted: Lifted | None = None

    def decode(self, n_own: int, dims: dict[str, int] | None = None) -> tuple[list[Message], list[Entry]]:
        """The typed messages and what the ledger books for them.

        `n_own` is the number of users of the host at the other or this end: the rows of a message without users. Arrays are read-only
        views. Raises ProtocolError for undeclared kinds, wrong dtypes, wrong shapes.
        """
        tails = iter(self.tails)
        messages: list[Message] = []
        entries: list[Entry] = []
        inline = 0
        for place, part in enumerate(self.frame.parts):
            size = self.lifted.sizes.get(place) if self.lifted is not None else None
            size = delimited_bytes(part.ByteSize()) if size is None else size
            inline += size
            data = self.lifted.data.get(place, {}) if self.lifted is not None else {}
            message, entry = _decode_part(part, size, data, tails, n_own, dims or {})
            messages.append(message)
            entries.append(entry)
        entries.append(_envelope(self.head_bytes, inline))
        return messages, entries


def _decode_part(
    part: tensor_pb2.Part,
    size: int,
    lifted: Mapping[int, memoryview],
    tails: Iterator[bytearray | memoryview],
    n_own: int,
    dims: dict[str, int],
) -> tuple[Message, Entry]:
    cls = kind_class(part.kind)
    chunked: list[int] = []
    users = _get_users(part, tails, chunked) if part.HasField("users") else None
    if len(part.tensors) != len(cls.specs):
        raise ProtocolError(f"{part.kind} has {len(part.tensors)} tensors, wanted {len(cls.specs)}")
    arrays: dict[str, Any] = {}
    vectors = scalars = payload = 0
    for place, ((name, spec), tensor) in enumerate(zip(cls.specs, part.tensors, strict=True)):
        if tensor.name != name:
            raise ProtocolError(f"{part.kind} has field {tensor.name!r}, wanted {name!r}")
        array = _get(tensor, part.kind, tails, chunked, lifted.get(place))
        if (array.dtype.kind == "f") != spec.is_float:
            raise ProtocolError(f"{part.kind}.{name} has dtype {array.dtype}, wanted {'float' if spec.is_float else 'integer'}")
        n_vectors, n_scalars = spec.count(array)
        vectors, scalars, payload = vectors + n_vectors, scalars + n_scalars, payload + n_scalars * array.dtype.itemsize
        wanted = _FLOAT64 if spec.is_float else np.dtype(np.int64)
        arrays[name] = array if array.dtype == wanted else array.astype(wanted)
    is_rows = issubclass(cls, Rows)
    if users is not None and not is_rows:
        raise ProtocolError(f"{part.kind} is a broadcast, but it names users")
    message = cls(users=users, **arrays) if is_rows else cls(**arrays)  # type: ignore[call-arg]
    check_shapes(message, (n_own if users is None else users.size) if is_rows else None, dims)
    return message, _entry(part.kind, size, vectors, scalars, payload, chunked, users)


def _get_users(part: tensor_pb2.Part, tails: Iterator[bytearray | memoryview], chunked: list[int]) -> Indices:
    users = _get(part.users, part.kind, tails, chunked)
    if users.dtype.kind != "i" or users.ndim != 1:
        raise ProtocolError(f"{part.kind} names its users by {users.dtype} of shape {users.shape}, wanted a list of integers")
    return users.astype(np.int64)


def _get(
    tensor: tensor_pb2.Tensor, kind: str, tails: Iterator[bytearray | memoryview], chunked: list[int], lifted: memoryview | None = None
) -> AnyArray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ProtocolError(f"{kind}.{tensor.name} has element type {tensor.dtype}, which is unknown")
    data: bytes | bytearray | memoryview = tensor.data if lifted is None else lifted
    if tensor.chunked_bytes:
        data = next(tails)
        chunked.append(len(data))
    if len(tensor.shape) > MAX_AXES or any(extent > MAX_TENSOR_BYTES for extent in tensor.shape):
        raise ProtocolError(f"{kind}.{tensor.name} has {len(tensor.shape)} axes, the longest {max(tensor.shape)}, which no array here has")
    shape = tuple(tensor.shape)
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise ProtocolError(f"{kind}.{tensor.name} brings {len(data)} bytes, wanted {wanted} for shape {list(shape)}")
    try:
        array = np.frombuffer(data, dtype=dtype).reshape(shape)
    except (ValueError, OverflowError) as error:  # an empty tensor may still claim any extent
        raise ProtocolError(f"{kind}.{tensor.name} has shape {list(shape)}, which no array can have") from error
    if not array.flags.aligned:
        array = array.copy()  # sums over unaligned numbers run in another order, and bits would depend on the frame's layout
    array.flags.writeable = False
    return array


def _references(buffers: Sequence[AnyArray]) -> list[int]:
    return [sys.getrefcount(buffer) for buffer in buffers]


_UNHELD = _references([np.empty(1, dtype=np.uint8)])[0]  # the references to a buffer that only a list holds, as they are counted here


class Assembler:
    """Puts frames back together: feed it each frame's bytes in order, and it calls back with whole tasks or replies.

    Frames of other kinds (hello, heartbeat, ...) are returned as they are. One assembler serves one direction of one stream.
    """

    def __init__(self, outer: type[session_pb2.JoinRequest | session_pb2.JoinResponse]) -> None:
        self._outer = outer
        self._part_number = TASK_PARTS if outer is session_pb2.JoinResponse else REPLY_PARTS
        self._open: Received | None = None
        self._buffers: list[AnyArray] = []  # the latest, to be used again
        self._missing: list[tuple[bytearray | memoryview, int]] = []  # buffers in order, with the position filled so far

    def _buffer(self, size: int) -> AnyArray:
        """Memory for a tensor: that of an earlier one of the same size when nobody holds it any more, since fresh pages cost much.

        numpy's own comes in larger pages than a bytearray's.
        """
        for buffer, n_references in zip(self._buffers, _references(self._buffers), strict=True):
            if buffer.size == size and n_references == _UNHELD:
                return buffer
        self._buffers = [*self._buffers[1 - _BUFFERS :], np.empty(size, dtype=np.uint8)]
        return self._buffers[-1]

    def feed(self, data: bytes) -> Received | Any | None:
        """A whole `Received`, another kind of frame, or None while chunks are missing. ProtocolError for what is malformed."""
        if data[:1] == CHUNK_TAG and (chunk := chunk_data(data)) is not None:
            return self._chunk(chunk)
        small, lifted = lift(data, self._part_number) if len(data) > PLAIN_BYTES else (data, None)
        try:
            outer = self._outer.FromString(small)
        except Exception as error:  # protobuf's DecodeError type is not part of its typed interface
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
        if sum(sizes) > MAX_TENSOR_BYTES:
            raise ProtocolError(f"tensors of {sum(sizes)} bytes were announced, wanted at most {MAX_TENSOR_BYTES}")
        try:
            tails = tuple(self._buffer(size).data for size in sizes)
        except MemoryError as error:
            raise ProtocolError(f"tensors of {sum(sizes)} bytes were announced, which do not fit into memory") from error
        received = Received(frame, tails, len(data), lifted)
        if not sizes:
            return received
        self._open, self._missing = received, [(tail, 0) for tail in received.tails]
        return None

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
    """The rows of a `Rows` message at `positions`, owned by `users`; a broadcast stays whole."""
    if isinstance(message, Broadcast) or positions is None:
        return message
    arrays = {name: getattr(message, name)[positions] if has_rows(spec) else getattr(message, name) for name, spec in message.specs}
    return type(message)(users=users, **arrays)  # type: ignore[call-arg]


def select_clusters(message: PerCluster, clusters: Indices) -> PerCluster | None:
    """The rows of these clusters (ascending numbers); None when there are none."""
    kept = np.flatnonzero(np.isin(message.clusters, clusters))
    if kept.size == message.clusters.size:
        return message
    taken = {name: getattr(message, name)[kept] if _is_by_cluster(spec) else getattr(message, name) for name, spec in message.specs}
    return type(message)(**taken) if kept.size else None


def _is_by_cluster(spec: Spec) -> bool:
    return bool(spec.shape) and spec.shape[0] == "clusters"


def has_rows(spec: Spec) -> bool:
    """Whether the first axis of the field is the axis of owners."""
    return bool(spec.shape) and spec.shape[0] == "rows"


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
    "encode",
    "has_rows",
    "reheaded",
    "select",
    "select_clusters",
]
