"""The outgoing half of a host's stream at the parent: queues tasks and frames, and writes them."""

from __future__ import annotations

import asyncio
import math
from collections import deque

import grpc

from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded
from coterie_server.transport.links import Outlet

SMALL_BYTES = 64 << 10  # a task up to this size does not keep other hosts waiting while it is written

Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcLink:
    """The outgoing half of one stream; `outlet` shapes it."""

    def __init__(self, context: Context, silence_s: float, outlet: Outlet | None = None) -> None:
        self._context, self._outlet = context, outlet
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self.closed: asyncio.Future[tuple[str, str]] = self._loop.create_future()
        self._queue: deque[Encoded | bytes] = deque()
        self._beats: deque[bytes] = deque()  # heartbeats go first, and between the chunks of a large message
        self._is_writing = False
        self._silence_s = silence_s  # how long one frame may wait for the host to take it
        self._deadline = math.inf  # of the frame that is being written
        self._inline: asyncio.Timeout | None = None  # around a write in the run's own turn

    def send_frame(self, frame: session_pb2.JoinResponse) -> None:
        """Queues a frame of the session itself."""
        if frame.WhichOneof("frame") == "heartbeat" and self._outlet is None:
            if not self._beats:  # one is enough for a host that does not read
                self._beats.append(frame.SerializeToString())
            self._wake.set()
        else:
            self.send(frame.SerializeToString())

    def close(self, code: str, reason: str) -> None:
        """Ends the stream with the gRPC status `code`. The first call counts."""
        if not self.closed.done():
            self.closed.set_result((code, reason))

    def send(self, item: Encoded | bytes) -> None:
        """Queues a task, whose chunks are cut when they are written, or a frame."""
        self._queue.append(item)
        if self._outlet is not None:
            self._outlet.put()
        self._loop.call_soon(self._wake_writer)

    def _wake_writer(self) -> None:
        """Wakes the writer, unless `flush` has written the message: a needless turn costs as much as a small message."""
        if self._queue and not self._is_writing:
            self._wake.set()

    def check(self) -> None:
        """Closes the stream if the host has not taken a frame for too long."""
        if self._loop.time() > self._deadline:
            self.close("DEADLINE_EXCEEDED", f"the host has taken no frame for {self._silence_s:g} s")
            if self._inline is not None:
                self._inline.reschedule(self._loop.time())

    async def flush(self) -> None:
        """Writes a small task that waits alone, in the caller's own turn; the writer writes everything else."""
        if len(self._queue) != 1 or self._beats or self._is_writing or self._outlet is not None:
            return
        item = self._queue[0]
        if not isinstance(item, Encoded) or item.n_bytes > SMALL_BYTES:
            return
        self._inline = asyncio.timeout(None)
        try:
            async with self._inline:
                await self._write_queued()
        except TimeoutError:  # `check` has closed the stream
            return
        finally:
            self._inline = None

    async def write_all(self) -> None:
        """Writes what is queued until cancelled."""
        while True:
            if not self._is_writing:
                await self._write_queued()
            self._wake.clear()
            await self._wake.wait()

    async def _write_queued(self) -> None:
        """Writes until nothing is left; a stream that cannot be written to is closed. One caller at a time."""
        self._is_writing = True
        try:
            while self._queue or self._beats:
                await self._write_beats()
                if self._queue:
                    await self._write_item(self._queue.popleft())
        except Exception as error:  # gRPC raises several kinds, all of which mean that the stream is gone
            self.close("UNAVAILABLE", f"the stream broke while it was written to: {type(error).__name__} {error}")
        finally:
            self._is_writing = False

    async def _write(self, frame: bytes) -> None:
        if self._outlet is not None:
            await self._outlet.passed(len(frame))
        self._deadline = self._loop.time() + self._silence_s
        await self._context.write(frame)
        self._deadline = math.inf

    async def _write_beats(self) -> None:
        while self._beats:
            await self._write(self._beats.popleft())

    async def _write_item(self, item: Encoded | bytes) -> None:
        if self._outlet is not None:
            self._outlet.take()
        for frame in (item,) if isinstance(item, bytes) else item.frames():
            await self._write(frame)
            if self._beats:
                await self._write_beats()
