"""The codec: declared messages to frames of at most about 1 MiB and back, and what each frame was for.

Both sides count what passes here, each on its own: the sender from what it encodes, the receiver from what it decodes, and the
two books must agree. The dtype of payloads is decided here and nowhere else; received arrays are read-only views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.messages import Broadcast, Message, Rows, Spec, check_shapes, kind_class
from coterie.v1 import session_pb2, tensor_pb2

PROTOCOL_VERSION = 1
CHUNK_BYTES = 1 << 20
# A frame holds inline tensors of at most this many bytes together; larger ones follow in chunks.
INLINE_BYTES = 1 << 20
MAX_FRAME_BYTES = 8 << 20
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
        wrap = session_pb2.JoinResponse if self.is_task else session_pb2.JoinRequest
        for tail in self.tails:
            for start in range(0, len(tail), CHUNK_BYTES):
                chunk = session_pb2.Chunk(data=bytes(tail[start : start + CHUNK_BYTES]))
                yield wrap(chunk=chunk).SerializeToString()

    @property
    def n_bytes(self) -> int:
        return len(self.head) + sum(len(tail) for tail in self.tails)


def _varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)


def _delimited(size: int) -> int:
    """Bytes of a length-delimited field (number below 16) around `size` bytes."""
    return 1 + _varint_bytes(size) + size


def _chunk_frame_bytes(total: int) -> tuple[int, int]:
    """(protobuf bytes, frames) of the Chunk frames that carry `total` bytes."""
    full, rest = divmod(total, CHUNK_BYTES)
    n_bytes = full * _delimited(_delimited(CHUNK_BYTES))
    if rest:
        n_bytes += _delimited(_delimited(rest))
    return n_bytes, full + bool(rest)


def _put(tensor: tensor_pb2.Tensor, name: str, array: AnyArray, dtype: np.dtype[Any], tails: list[memoryview], budget: int) -> int:
    """Fills one tensor; returns the inline bytes it took from the frame's budget."""
    array = np.ascontiguousarray(array, dtype=dtype)
    tensor.name = name
    tensor.dtype = _CODES[dtype]  # type: ignore[assignment]
    tensor.shape.extend(array.shape)
    if array.nbytes <= budget:
        tensor.data = array.tobytes()
        return array.nbytes
    tensor.chunked_bytes = array.nbytes
    tails.append(array.reshape(-1).view(np.uint8).data)
    return 0


def _wire_dtype(spec: Spec, precision: Precision, array: AnyArray) -> np.dtype[Any]:
    if spec.is_float:
        return _FLOAT64 if spec.is_exact else precision.dtype
    small = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
    return _INT32 if small else np.dtype("<i8")


def _encode_parts(
    frame: session_pb2.Task | session_pb2.Reply, messages: Sequence[Message], precision: Precision
) -> tuple[list[memoryview], list[Entry]]:
    tails: list[memoryview] = []
    entries: list[Entry] = []
    budget = INLINE_BYTES
    for message in messages:
        if not message.kind or type(message) is not kind_class(message.kind):
            raise TypeError(f"{type(message).__name__} is not a declared message: what has no declaration is private")
        part = frame.parts.add()
        part.kind = message.kind
        users = message.users if isinstance(message, Rows) else None
        if users is not None:
            budget -= _put(part.users, "", users, _INT32, tails, budget)
        vectors = scalars = payload = 0
        first_tail = len(tails) - bool(users is not None and part.users.chunked_bytes)
        for name, spec in message.specs:
            array = getattr(message, name)
            dtype = _wire_dtype(spec, precision, array)
            budget -= _put(part.tensors.add(), name, array, dtype, tails, budget)
            n_vectors, n_scalars = spec.count(array)
            vectors, scalars = vectors + n_vectors, scalars + n_scalars
            payload += n_scalars * dtype.itemsize
        entries.append(_entry(part, vectors, scalars, payload, [len(tail) for tail in tails[first_tail:]], users))
    return tails, entries


def _entry(part: tensor_pb2.Part, vectors: int, scalars: int, payload: int, tails: Sequence[int], users: Indices | None) -> Entry:
    message_bytes, frames = _delimited(part.ByteSize()), 0
    for tail in tails:
        chunk_bytes, chunk_frames = _chunk_frame_bytes(tail)
        message_bytes, frames = message_bytes + chunk_bytes, frames + chunk_frames
    return Entry(part.kind, vectors, scalars, payload, message_bytes, frames, users)


def _envelope(head_bytes: int, inline: int) -> Entry:
    """What the first frame holds beside the parts: fences, flags, the oneof around it."""
    return Entry(ENVELOPE, 0, 0, 0, head_bytes - inline, 1, None)


def _inline_bytes(frame: session_pb2.Task | session_pb2.Reply) -> int:
    return sum(_delimited(part.ByteSize()) for part in frame.parts)


def encode(frame: session_pb2.Task | session_pb2.Reply, messages: Sequence[Message], precision: Precision) -> Encoded:
    """A task or reply with its header set, plus typed messages, as frames. TypeError for what is not declared."""
    tails, entries = _encode_parts(frame, messages, precision)
    return _finished(frame, tuple(tails), entries)


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
    tails: tuple[bytearray, ...]
    head_bytes: int

    def decode(self, n_own: int, dims: dict[str, int] | None = None) -> tuple[list[Message], list[Entry]]:
        """The typed messages and what the ledger books for them.

        `n_own` is the number of users of the host at the other or this end: the rows of a message without users. Arrays are read-only
        views. Raises ProtocolError for undeclared kinds, wrong dtypes, wrong shapes.
        """
        tails = iter(self.tails)
        messages: list[Message] = []
        entries: list[Entry] = []
        for part in self.frame.parts:
            message, entry = _decode_part(part, tails, n_own, dims or {})
            messages.append(message)
            entries.append(entry)
        entries.append(_envelope(self.head_bytes, _inline_bytes(self.frame)))
        return messages, entries


def _decode_part(part: tensor_pb2.Part, tails: Iterator[bytearray], n_own: int, dims: dict[str, int]) -> tuple[Message, Entry]:
    cls = kind_class(part.kind)
    chunked: list[int] = []
    users = _get(part.users, part.kind, tails, chunked).astype(np.int64) if part.HasField("users") else None
    if len(part.tensors) != len(cls.specs):
        raise ProtocolError(f"{part.kind} has {len(part.tensors)} tensors, wanted {len(cls.specs)}")
    arrays: dict[str, Any] = {}
    vectors = scalars = payload = 0
    for (name, spec), tensor in zip(cls.specs, part.tensors, strict=True):
        if tensor.name != name:
            raise ProtocolError(f"{part.kind} has field {tensor.name!r}, wanted {name!r}")
        array = _get(tensor, part.kind, tails, chunked)
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
    return message, _entry(part, vectors, scalars, payload, chunked, users)


def _get(tensor: tensor_pb2.Tensor, kind: str, tails: Iterator[bytearray], chunked: list[int]) -> AnyArray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ProtocolError(f"{kind}.{tensor.name} has element type {tensor.dtype}, which is unknown")
    data: bytes | bytearray = tensor.data
    if tensor.chunked_bytes:
        data = next(tails)
        chunked.append(len(data))
    count = 1
    for extent in tensor.shape:
        count *= extent
    if len(data) != count * dtype.itemsize:
        wanted = count * dtype.itemsize
        raise ProtocolError(f"{kind}.{tensor.name} brings {len(data)} bytes, wanted {wanted} for shape {list(tensor.shape)}")
    array = np.frombuffer(data, dtype=dtype).reshape(tuple(tensor.shape))
    array.flags.writeable = False
    return array


class Assembler:
    """Puts frames back together: feed it each frame's bytes in order, and it calls back with whole tasks or replies.

    Frames of other kinds (hello, heartbeat, ...) are returned as they are. One assembler serves one direction of one stream.
    """

    def __init__(self, outer: type[session_pb2.JoinRequest | session_pb2.JoinResponse]) -> None:
        self._outer = outer
        self._open: Received | None = None
        self._missing: list[tuple[bytearray, int]] = []  # buffers in order, with the position filled so far

    def feed(self, data: bytes) -> Received | Any | None:
        """A whole `Received`, another kind of frame, or None while chunks are missing. ProtocolError for what is malformed."""
        try:
            outer = self._outer.FromString(data)
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
        if any(size > MAX_TENSOR_BYTES for size in sizes):
            raise ProtocolError(f"a tensor of {max(sizes)} bytes was announced, wanted at most {MAX_TENSOR_BYTES}")
        received = Received(frame, tuple(bytearray(size) for size in sizes), len(data))
        if not sizes:
            return received
        self._open, self._missing = received, [(tail, 0) for tail in received.tails]
        return None

    def _chunk(self, data: bytes) -> Received | None:
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
]
