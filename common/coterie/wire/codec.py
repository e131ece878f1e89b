"""The codec converts declared messages to frames of at most about 480 KiB and back, and counts what each frame carries.

Sender and receiver count independently, one what it encodes and the other what it decodes, and the two books must agree. Only this module
decides the dtype of payloads. Received arrays are read-only views.
"""

import copy
import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.fields import (
    CHUNK_BYTES,
    REPLY_PARTS,
    TASK_OR_REPLY,
    TASK_PARTS,
    chunk_frame,
    chunk_frame_bytes,
    delimited_bytes,
    field_head,
)
from coterie.wire.messages import Message, Rows, Spec, check_extents, has_rows, kind_class
from coterie.wire.precision import BFLOAT16, DTYPES, FLOAT32, FLOAT64, INT32, INT64, UINT8, AnyArray, Precision, native, written

PROTOCOL_VERSION = 1
# A frame holds inline tensors of at most this size together; larger ones follow in chunks.
INLINE_BYTES = CHUNK_BYTES
MAX_FRAME_BYTES = 8 << 20
MAX_AXES = 8
MAX_TENSOR_BYTES = 16 << 30
GRPC_FRAME_HEADER_BYTES = 5
ENVELOPE = "envelope"


_MAX_SHOWN = 100  # characters of a peer's name
_CODES: dict[Any, Any] = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Encoded:
    """A task or reply ready to send: the first frame, the large tensors that follow in chunks, and the ledger entries.

    The other end holds the first `held` bytes of the tensors. `sent` has one number: up to which byte they were sent when this message was
    sent last, under whatever header.
    """

    head: bytes
    tails: tuple[memoryview, ...]
    entries: tuple[Entry, ...]
    is_task: bool
    held: int = 0
    sent: list[int] = field(default_factory=lambda: [0], compare=False)

    def frames(self) -> Iterator[bytes]:
        """The frames in order. Chunks are cut on demand, so that a large message is never copied whole."""
        yield self.head
        for end, piece in self._chunks():
            if end > self.held:
                self.sent[0] = end
                yield chunk_frame(piece)

    def _chunks(self) -> Iterator[tuple[int, memoryview]]:
        """Where each chunk ends among the bytes of all tensors, and the chunk."""
        end = 0
        for tail in self.tails:
            for start in range(0, len(tail), CHUNK_BYTES):
                piece = tail[start : start + CHUNK_BYTES]
                end += len(piece)
                yield end, piece

    def can_continue(self, held: int) -> bool:
        """Whether so many bytes are whole chunks, and not none."""
        return any(end == held for end, _ in self._chunks())

    @property
    def n_bytes(self) -> int:
        return len(self.head) + sum(len(tail) for tail in self.tails)


def _wire_dtype(spec: Spec, precision: Precision, array: AnyArray) -> np.dtype[Any]:
    if spec.is_weights:
        return precision.weights
    if spec.is_float:
        return FLOAT64 if spec.is_exact else precision.dtype
    if spec.is_fixed or spec.packs:
        return UINT8 if spec.packs else INT64
    small = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
    return INT32 if small else INT64


def _written(message: Message, precision: Precision) -> list[AnyArray]:
    """The fields of a message in wire types. TypeError for an undeclared message, or one that does not name the users it needs."""
    if not message.kind or type(message) is not kind_class(message.kind):
        raise TypeError(f"{type(message).__name__} is not a declared message: what has no declaration is private")
    arrays = []
    for name, spec in message.specs:
        array = getattr(message, name)
        if isinstance(message, Rows) and message.users is None and spec.is_float and not has_rows(spec):
            raise TypeError(f"{message.kind}.{name} is common to its users, so the message must name them")
        arrays.append(written(array, _wire_dtype(spec, precision, array)))
    return arrays


def _envelope(n_bytes: int) -> Entry:
    """The entry of the first frame without its parts: fences, flags, and the enclosing oneof."""
    return Entry(ENVELOPE, 0, 0, 0, n_bytes, 1, None)


def encode(frame: session_pb2.Task | session_pb2.Reply, messages: Sequence[Message], precision: Precision) -> Encoded:
    """Frames of a task or reply with a complete header, and these messages. TypeError for undeclared messages.

    The first frame has the bytes of protobuf, but is joined here: protobuf would copy each tensor three times.
    """
    budget, inline, is_task = INLINE_BYTES, 0, isinstance(frame, session_pb2.Task)
    header = frame.SerializeToString()
    pieces: list[Any] = [header]
    tails: list[memoryview] = []
    entries: list[Entry] = []
    for message in messages:
        cls: Any = type(message)
        arrays = _written(message, precision)
        users = message.users if isinstance(message, Rows) else None
        if users is not None:
            arrays.insert(0, np.asarray(users, dtype=INT32, order="C"))
        forms = []
        for array in arrays:
            is_cut = array.nbytes > budget
            forms.append((array.dtype, array.shape, is_cut))
            if is_cut:
                tails.append(array.reshape(-1).view(np.uint8).data)
            else:
                budget -= array.nbytes
        between, size, entry = _framed(cls, is_task, users is not None, tuple(forms), CHUNK_BYTES)
        for lead, array, (_, _, is_cut) in zip(between, arrays, forms, strict=False):
            pieces.append(lead)
            if not is_cut:
                pieces.append(array)
        pieces.append(between[-1])
        inline += size
        entries.append(entry if users is None else entry._replace(users=users))
    head = b"".join((field_head(TASK_OR_REPLY, len(header) + inline), *pieces))
    return Encoded(head, tuple(tails), (*entries, _envelope(len(head) - inline)), is_task)


@functools.lru_cache(maxsize=1024)
def _framed(
    cls: type[Message], is_task: bool, has_users: bool, forms: Sequence[tuple[np.dtype[Any], tuple[int, ...], bool]], chunk_bytes: int
) -> tuple[Sequence[bytes], int, Entry]:
    """What a part with arrays of these forms has in the first frame around their data: the bytes, one more than arrays. Its size and entry.

    A form is the type, the shape, and whether the array follows in chunks. The users, if the part names them, are the first array.
    """
    part, sizes = tensor_pb2.Part(kind=cls.kind), [math.prod(shape) * dtype.itemsize for dtype, shape, _ in forms]
    end = part.ByteSize()
    tensors = [part.users] if has_users else []
    tensors += [part.tensors.add(name=name) for name, _ in cls.specs]
    for tensor, size, (dtype, shape, is_cut) in zip(tensors, sizes, forms, strict=True):
        tensor.dtype, tensor.chunked_bytes, tensor.data = _CODES[dtype], size if is_cut else 0, b"" if is_cut else bytes(size)
        tensor.shape.extend(shape)
    whole = field_head(TASK_PARTS if is_task else REPLY_PARTS, part.ByteSize()) + part.SerializeToString()
    end += len(whole) - part.ByteSize()
    between, start = [], 0
    for tensor in tensors:  # the data is the last field of a tensor
        end += delimited_bytes(tensor.ByteSize())
        between.append(whole[start : end - len(tensor.data)])
        start = end
    own, cut = forms[has_users:], tuple(size for size, (_, _, is_cut) in zip(sizes, forms, strict=True) if is_cut)
    shapes, widths = tuple([shape for _, shape, _ in own]), tuple([dtype.itemsize for dtype, _, _ in own])
    n_users = forms[0][1][0] if has_users else 1
    return (*between, whole[start:]), len(whole), _booked(cls, len(whole), cut, chunk_bytes, shapes, widths, n_users)


def _enclosed(frame: session_pb2.Task | session_pb2.Reply) -> tuple[Any, Any]:
    """A copy of the frame in what is sent, and the copy itself."""
    outer: Any = session_pb2.JoinResponse(task=frame) if isinstance(frame, session_pb2.Task) else session_pb2.JoinRequest(reply=frame)
    return outer, outer.task if isinstance(frame, session_pb2.Task) else outer.reply


def reheaded(frame: session_pb2.Task | session_pb2.Reply, sent: Encoded) -> Encoded:
    """The same message under a changed header, to be sent again to a returning host. `frame` has the same parts."""
    head, inline = _enclosed(frame)[0].SerializeToString(), sum(delimited_bytes(part.ByteSize()) for part in frame.parts)
    entries = (*(entry for entry in sent.entries if entry.kind != ENVELOPE), _envelope(len(head) - inline))
    return Encoded(head, sent.tails, entries, sent.is_task, sent=sent.sent)


def continued(frame: session_pb2.Task | session_pb2.Reply, sent: Encoded, held: int) -> Encoded:
    """The message under a changed header: behind so many bytes that the other end holds, or as `reheaded` if these are no whole chunks."""
    if not sent.can_continue(held):
        return reheaded(frame, sent)
    short = copy.deepcopy(frame)
    short.ClearField("parts")
    if isinstance(short, session_pb2.Task):
        short.ClearField("stage_json")
    again = max(0, sent.sent[0] - held)
    short.continued.held, short.continued.again = held, again
    head = _enclosed(short)[0].SerializeToString()
    return Encoded(head, sent.tails, repeated(frame, sent.entries, len(head), held, again, CHUNK_BYTES), sent.is_task, held, sent.sent)


def repeated(
    frame: session_pb2.Task | session_pb2.Reply, entries: Sequence[Entry], head_bytes: int, held: int, again: int, chunk_bytes: int
) -> tuple[Entry, ...]:
    """What a message sends again that goes on behind `held` bytes: a short header, and so many bytes of chunks that had been sent before.

    `frame` and `entries` are those of the whole message. A piece of a tensor counts its scalars, but no vector.
    """
    found: list[Entry] = []
    end = 0
    for part, entry in zip(frame.parts, entries, strict=False):  # the last entry is the envelope
        size = frames = scalars = payload = 0
        specs = (None, *(spec for _, spec in kind_class(part.kind).specs))
        for spec, tensor in zip(specs, (part.users, *part.tensors), strict=True):
            start, end = end, end + tensor.chunked_bytes
            n_bytes = min(end, held + again) - max(start, held)
            if n_bytes > 0:
                more, chunk_frames = chunk_frame_bytes(n_bytes, chunk_bytes)
                size, frames = size + more, frames + chunk_frames
                if spec is not None and spec.is_payload:  # positions are none
                    payload += n_bytes
                    width = DTYPES[tensor.dtype].itemsize * (tensor.shape[1] if spec.is_fixed else 1)
                    scalars += 0 if spec.packs else n_bytes // width
        if frames:
            found.append(Entry(entry.kind, 0, scalars, payload, size, frames, entry.users))
    return (*found, _envelope(head_bytes))


def _booked(
    cls: type[Message],
    size: int,
    cut: Iterable[int],
    chunk_bytes: int,
    shapes: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    n_users: int,
) -> Entry:
    """The ledger entry, without users, of a part of `size` bytes whose fields have these shapes and bytes of a number on the wire.

    Tensors of `cut` bytes follow it in chunks. What is common to its users is sent once, but counts for each.
    """
    vectors = scalars = payload = frames = 0
    for (_, spec), shape, width in zip(cls.specs, shapes, widths, strict=True):
        n_vectors, n_scalars = spec.count(shape)
        times = 1 if has_rows(spec) else n_users
        payload += math.prod(shape) * width if spec.is_payload else 0
        vectors, scalars = vectors + times * n_vectors, scalars + times * n_scalars
    for n_bytes in cut:
        more, chunk_frames = chunk_frame_bytes(n_bytes, chunk_bytes)
        size, frames = size + more, frames + chunk_frames
    return Entry(cls.kind, vectors, scalars, payload, size, frames, None)


class Repeat(NamedTuple):
    """A message went on: how often it had been sent before, the bytes of its header, those held, and those that came again."""

    resent: int
    head_bytes: int
    held: int
    again: int


@dataclass(slots=True)
class Received:
    """A complete task or reply: its frame, the bytes of each chunked tensor, and the size of its first frame.

    A message that was cut came over several streams. Its frame has the newest fences, but says how often the message had been sent before
    the first of them. `unbooked` has what the ledger does not have yet: None for the message itself, then each time that it went on. Copies
    share it, so that everything is booked once. `chunk_bytes` is the length of the longest chunk: other versions may cut otherwise.
    """

    frame: session_pb2.Task | session_pb2.Reply
    tails: tuple[bytearray | memoryview, ...]
    head_bytes: int
    unbooked: deque[Repeat | None] = field(default_factory=lambda: deque([None]))
    chunk_bytes: int = CHUNK_BYTES

    @property
    def n_bytes(self) -> int:
        return self.head_bytes + sum(len(tail) for tail in self.tails)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple([part.kind for part in self.frame.parts])

    def sendings(self, entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], int]]:
        """The entries to be booked, and how often the message had been sent before: itself, once, and what was sent again since."""
        while self.unbooked:
            if (repeat := self.unbooked.popleft()) is None:
                yield entries, self.frame.resent
            else:
                yield repeated(self.frame, entries, *repeat[1:], self.chunk_bytes), repeat.resent

    def decode(self, n_own: int, dims: dict[str, int] | None = None) -> tuple[list[Message], list[Entry]]:
        """The typed messages and their ledger entries.

        `n_own` is the number of users of the link's host, which is the number of rows of a message without users. Arrays are read-only
        views. Raises ProtocolError for undeclared kinds, wrong dtypes, wrong shapes.
        """
        extents = tuple(dims.items()) if dims else ()
        tails = iter(self.tails)
        messages: list[Message] = []
        entries: list[Entry] = []
        inline = 0
        for part in self.frame.parts:
            inline += (size := delimited_bytes(part.ByteSize()))
            message, entry = _decode_part(part, size, tails, n_own, extents, self.chunk_bytes if self.tails else 0)
            messages.append(message)
            entries.append(entry)
        entries.append(_envelope(self.head_bytes - inline))
        return messages, entries


def _decode_part(
    part: tensor_pb2.Part,
    size: int,
    tails: Iterator[bytearray | memoryview],
    n_own: int,
    extents: Sequence[tuple[str, int]],
    chunk_bytes: int,
) -> tuple[Message, Entry]:
    cls: Any = kind_class(part.kind)
    users: Indices | None = None
    tensors = part.tensors
    if part.HasField("users"):
        users = _get(part.users, part.kind, "users", tails)
        if users.dtype.kind != "i" or users.ndim != 1:
            raise ProtocolError(f"{part.kind} names its users by {users.dtype} of shape {users.shape}, wanted a list of integers")
        users = users.astype(np.int64)
    if len(tensors) != len(cls.specs):
        raise ProtocolError(f"{part.kind} has {len(tensors)} tensors, wanted {len(cls.specs)}")
    shapes, widths, natives = [], [], []
    for (name, spec), tensor in zip(cls.specs, tensors, strict=True):
        if tensor.name != name:
            raise ProtocolError(f"{part.kind} has field {_shown(tensor.name)!r}, wanted {name!r}")
        array = _get(tensor, part.kind, name, tails)
        dtype = array.dtype
        if (dtype.kind == "f" or dtype is BFLOAT16) != spec.is_float:
            raise ProtocolError(f"{part.kind}.{name} has dtype {dtype}, wanted {'float' if spec.is_float else 'integer'}")
        if spec.packs and dtype != UINT8:
            raise ProtocolError(f"{part.kind}.{name} has dtype {dtype}, wanted bytes")
        shapes.append(array.shape)
        widths.append(dtype.itemsize)
        natives.append(native(array, _native_dtype(spec, dtype)))
    is_rows = issubclass(cls, Rows)
    if users is not None and not is_rows:
        raise ProtocolError(f"{part.kind} is a broadcast, but it names users")
    message: Message = cls(*natives, users=users) if is_rows else cls(*natives)
    n_rows = None if not is_rows else n_own if users is None else users.size
    cut = [tensor.chunked_bytes for tensor in (part.users, *tensors) if tensor.chunked_bytes] if chunk_bytes else ()
    entry = _checked(cls, size, tuple(cut), chunk_bytes, tuple(shapes), tuple(widths), n_rows, 1 if users is None else users.size, extents)
    return message, entry if users is None else entry._replace(users=users)


@functools.lru_cache(maxsize=1024)
def _checked(
    cls: type[Message],
    size: int,
    cut: Sequence[int],
    chunk_bytes: int,
    shapes: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    n_rows: int | None,
    n_users: int,
    extents: Sequence[tuple[str, int]],
) -> Entry:
    """As `_booked`. ProtocolError unless the shapes have their declared axes, with `n_rows` owners and extents that are known."""
    check_extents(cls, shapes, n_rows, dict(extents))
    return _booked(cls, size, cut, chunk_bytes, shapes, widths, n_users)


def _native_dtype(spec: Spec, written: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a field in the halves: float64; for weights float32 unless written as float64; or int64."""
    if not spec.is_float:
        return UINT8 if spec.packs else INT64
    return FLOAT32 if spec.is_weights and written != FLOAT64 else FLOAT64


def _get(tensor: tensor_pb2.Tensor, kind: str, name: str, tails: Iterator[bytearray | memoryview]) -> AnyArray:
    data = next(tails) if tensor.chunked_bytes else tensor.data
    shape = tuple(tensor.shape)
    dtype = _dtype_of(kind, name, tensor.dtype, shape, len(data))
    try:
        array = np.ndarray(shape, dtype, data)
    except (ValueError, OverflowError) as error:  # an empty tensor may still claim any extent
        raise ProtocolError(f"{kind}.{name} has shape {list(shape)}, which no array can have") from error
    if not array.flags.aligned:
        array = array.copy()  # sums over unaligned numbers run in another order, with other bits
    array.flags.writeable = False
    return array


@functools.lru_cache(maxsize=1024)
def _dtype_of(kind: str, name: str, element_type: int, shape: tuple[int, ...], n_bytes: int) -> np.dtype[Any]:
    """The type of a tensor. ProtocolError unless it is known, and so many bytes are those of the shape."""
    dtype = DTYPES.get(element_type)
    if dtype is None:
        raise ProtocolError(f"{kind}.{name} has element type {element_type}, which is unknown")
    if len(shape) > MAX_AXES:
        raise ProtocolError(f"{kind}.{name} has {len(shape)} axes, wanted at most {MAX_AXES}")
    if max(shape, default=0) > MAX_TENSOR_BYTES:
        raise ProtocolError(f"{kind}.{name} has an axis of {max(shape)}, wanted at most {MAX_TENSOR_BYTES}")
    wanted = math.prod(shape) * dtype.itemsize
    if n_bytes != wanted:
        raise ProtocolError(f"{kind}.{name} brings {n_bytes} bytes, wanted {wanted} for shape {list(shape)}")
    return dtype


def _shown(name: str) -> str:
    return name[:_MAX_SHOWN]


def check_announced(frame: session_pb2.Task | session_pb2.Reply, n_own: int, dims: Mapping[str, int]) -> None:
    """ProtocolError if `Received.decode` would refuse the shapes in the first frame of a task or reply."""
    for part in frame.parts:
        cls = kind_class(part.kind)
        if len(part.tensors) != len(cls.specs):
            raise ProtocolError(f"{part.kind} has {len(part.tensors)} tensors, wanted {len(cls.specs)}")
        shapes = [_announced_shape(tensor, part.kind, name) for (name, _), tensor in zip(cls.specs, part.tensors, strict=True)]
        n_rows = (_announced_shape(part.users, part.kind, "users") or (0,))[0] if part.HasField("users") else n_own
        check_extents(cls, shapes, n_rows if issubclass(cls, Rows) else None, dims)


def _announced_shape(tensor: tensor_pb2.Tensor, kind: str, name: str) -> tuple[int, ...]:
    if not tensor.chunked_bytes:
        return tuple(tensor.shape[: MAX_AXES + 1])  # its bytes are already here
    shape = tuple(tensor.shape)
    _dtype_of(kind, name, tensor.dtype, shape, tensor.chunked_bytes)
    return shape
