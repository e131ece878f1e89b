"""The assembler: complete tasks and replies from the frames of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.errors import ProtocolError
from coterie.v1 import session_pb2
from coterie.wire.codec import MAX_TENSOR_BYTES, PROTOCOL_VERSION, Received
from coterie.wire.frames import CHUNK_TAG, PLAIN_BYTES, REPLY_PARTS, TASK_PARTS, check_fields, chunk_data, lift

Announced = Callable[[session_pb2.Task | session_pb2.Reply], None]


class Assembler:
    """Reassembles frames. Feed it the bytes of each frame in order; it returns whole tasks and replies.

    Frames of other kinds (hello, heartbeat, ...) are returned unchanged. One assembler serves one direction of one stream.
    """

    def __init__(self, outer: type[session_pb2.JoinRequest | session_pb2.JoinResponse], announced: Announced | None = None) -> None:
        self._outer = outer
        self._announced = announced  # called with a task or reply before its large tensors are allocated; it may refuse them
        self._part_number = TASK_PARTS if outer is session_pb2.JoinResponse else REPLY_PARTS
        self._open: Received | None = None
        self._missing: list[tuple[bytearray | memoryview, int]] = []  # buffers in order, with the position filled so far

    def feed(self, data: bytes) -> Received | Any | None:
        """A whole `Received`, a frame of another kind, or None while chunks are missing. ProtocolError for malformed frames."""
        if data[:1] == CHUNK_TAG and (chunk := chunk_data(data)) is not None:
            return self._chunk(chunk)
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
            tails = tuple(np.empty(size, dtype=np.uint8).data for size in sizes)  # in larger pages than a bytearray
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
