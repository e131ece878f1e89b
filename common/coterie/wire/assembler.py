"""The assembler makes complete tasks and replies from the frames of a stream. What was cut goes on where it was cut, on the next stream."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.errors import ProtocolError
from coterie.v1 import session_pb2
from coterie.wire.codec import MAX_TENSOR_BYTES, PROTOCOL_VERSION, Received, Repeat
from coterie.wire.fields import PLAIN_BYTES, REPLY_PARTS, TASK_PARTS, check_fields, chunk_in

Announced = Callable[[session_pb2.Task | session_pb2.Reply], None]


@dataclass(slots=True)
class Partial:
    """A message with chunked tensors, of which the first `n_bytes` of `total` bytes are here."""

    received: Received
    total: int
    n_bytes: int = 0

    def add(self, data: bytes | memoryview) -> None:
        """The next chunk. ProtocolError when it does not end with its tensor or before."""
        start = self.n_bytes
        for tail in self.received.tails:
            if start < len(tail):
                break
            start -= len(tail)
        end = start + len(data)
        if end > len(tail) or not data:
            raise ProtocolError(f"a chunk ends at byte {end} of a tensor of {len(tail)} bytes")
        memoryview(tail)[start:end] = data
        self.n_bytes += len(data)
        self.received.chunk_bytes = max(self.received.chunk_bytes, len(data))

    def goes_on(self, header: session_pb2.Task | session_pb2.Reply, head_bytes: int) -> "Partial":
        """The same message after the header of its continuation. The former may be in use in another thread, and stays as it is."""
        frame = copy.deepcopy(self.received.frame)
        resent = frame.resent
        frame.MergeFrom(header)  # type: ignore[arg-type]
        frame.ClearField("continued")
        frame.resent = resent
        if isinstance(frame, session_pb2.Task) and isinstance(header, session_pb2.Task):
            frame.replay, frame.snapshot, frame.reply_held = header.replay, header.snapshot, header.reply_held
        self.received.unbooked.append(Repeat(header.resent, head_bytes, header.continued.held, header.continued.again))
        return Partial(replace(self.received, frame=frame), self.total, self.n_bytes)


class Held:
    """What a receiver holds of the large messages of one peer, for longer than a stream: one that was cut, and one that comes.

    With `keeps_whole` a whole message counts as held until it is handled: its stream may be lost before.
    """

    def __init__(self, kept: Partial | None = None, *, keeps_whole: bool = False) -> None:
        self.kept, self.keeps_whole = kept, keeps_whole
        self.flowing: Partial | None = None

    def reopened(self) -> "Held":
        """For the next stream. Frames of the former one, should any come, find nothing that they could fill."""
        kept, self.kept, self.flowing = self.flowing or self.kept, None, None
        return Held(kept, keeps_whole=self.keeps_whole)

    def bytes_of(self, seq: int, attempt: int) -> int:
        """How many bytes of this message are held."""
        kept = self.kept
        return kept.n_bytes if kept is not None and (kept.received.frame.seq, kept.received.frame.attempt) == (seq, attempt) else 0

    def handled(self, seq: int) -> None:
        """A message was handled: its tensors are freed, and only the fact remains."""
        kept = self.kept
        if kept is not None and kept.received.frame.seq == seq:
            frame = kept.received.frame
            kept.received = replace(kept.received, frame=type(frame)(seq=frame.seq, attempt=frame.attempt), tails=())


class Assembler:
    """Reassembles frames. Feed it the bytes of each frame in order; it returns whole tasks and replies.

    Frames of other kinds (hello, heartbeat, ...) are returned unchanged. One assembler serves one direction of one stream, which `held`
    outlives.
    """

    def __init__(
        self, outer: type[session_pb2.JoinRequest | session_pb2.JoinResponse], announced: Announced | None = None, held: Held | None = None
    ) -> None:
        self._outer = outer
        self._announced = announced  # called with a task or reply before its large tensors are allocated; it may refuse them
        self.held = held or Held()

    def feed(self, data: bytes) -> Received | Any | None:
        """A whole `Received`, a frame of another kind, or None while chunks are missing. ProtocolError for malformed frames."""
        if (chunk := chunk_in(data)) is not None:
            return self._chunk(chunk)
        if len(data) > PLAIN_BYTES:
            check_fields(data, TASK_PARTS if self._outer is session_pb2.JoinResponse else REPLY_PARTS)
        try:
            outer = self._outer.FromString(data)
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
        if (flowing := self.held.flowing) is not None:
            missing = flowing.total - flowing.n_bytes
            raise ProtocolError(f"a {which} came while {missing} bytes of the one before were missing")
        partial = self._continued(frame, which, len(data)) if frame.HasField("continued") else self._begun(frame, len(data))
        if isinstance(partial, Received):
            return partial
        self.held.flowing = partial
        return self._whole(partial)

    def _begun(self, frame: session_pb2.Task | session_pb2.Reply, head_bytes: int) -> Partial | Received:
        sizes = [tensor.chunked_bytes for part in frame.parts for tensor in (part.users, *part.tensors) if tensor.chunked_bytes]
        if not sizes:
            return Received(frame, (), head_bytes)
        if self._announced is not None:
            self._announced(frame)
        if sum(sizes) > MAX_TENSOR_BYTES:
            raise ProtocolError(f"tensors of {sum(sizes)} bytes were announced, wanted at most {MAX_TENSOR_BYTES}")
        try:
            tails = tuple(np.empty(size, dtype=np.uint8).data for size in sizes)  # in larger pages than a bytearray
        except MemoryError as error:
            raise ProtocolError(f"tensors of {sum(sizes)} bytes were announced, which do not fit into memory") from error
        return Partial(Received(frame, tails, head_bytes, chunk_bytes=1), sum(sizes))

    def _continued(self, header: session_pb2.Task | session_pb2.Reply, which: str, head_bytes: int) -> Partial:
        kept, rest = self.held.kept, header.continued
        if kept is None or (header.seq, header.attempt) != (kept.received.frame.seq, kept.received.frame.attempt):
            raise ProtocolError(f"a {which} with number {header.seq} goes on, but nothing of it is held")
        if rest.held != kept.n_bytes or rest.again > kept.total - kept.n_bytes or header.parts:
            wanted = f"wanted {kept.n_bytes}, at most {kept.total - kept.n_bytes} and no part"
            raise ProtocolError(
                f"a {which} goes on behind {rest.held} bytes, with {rest.again} again and {len(header.parts)} parts; {wanted}"
            )
        if self._announced is not None:
            self._announced(header)
        self.held.kept = None
        return kept.goes_on(header, head_bytes)

    def _chunk(self, data: bytes | memoryview) -> Received | None:
        if self.held.flowing is None:
            raise ProtocolError(f"a chunk of {len(data)} bytes came, but no tensor is incomplete")
        self.held.flowing.add(data)
        return self._whole(self.held.flowing)

    def _whole(self, partial: Partial) -> Received | None:
        if partial.n_bytes < partial.total:
            return None
        self.held.flowing = None
        if self.held.keeps_whole:
            self.held.kept = partial
        return partial.received
