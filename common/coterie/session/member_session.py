"""One stream of a member to its parent: the hello, tasks and replies, heartbeats, and the end with the member's books."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from coterie.errors import ProtocolError
from coterie.experiment.links import link_rule
from coterie.session.computer import Computer
from coterie.session.failures import failure_of, finding_in
from coterie.session.member import Member
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Encoded, Received
from coterie.wire.fields import CHUNK_BYTES

SILENT_HEARTBEATS = 10  # after this many without a frame, the parent counts as lost
CLOSE_S = 10.0  # wait for a silent parent to close a stream
LONGEST_CLOSE_S = 60.0  # for an active parent, which may have to read very many books
MAX_QUEUED_BYTES = 64 << 20  # queued tasks; further ones are read later
_ITEM_BYTES = 2000  # memory of a small task besides its frame
_HEARTBEAT = session_pb2.JoinRequest(heartbeat=session_pb2.Heartbeat()).SerializeToString()

Call = grpc.aio.StreamStreamCall[bytes, bytes]


@dataclass(frozen=True)
class End:
    """How a stream ended: the parent has ended the run, the stream was lost before, or this side was asked to end it, and did."""

    how: Literal["finished", "failed", "lost", "stopped"]
    reason: str = ""  # the outcome of a run that was ended
    code: str = ""  # gRPC's, of a lost stream


def failure_bytes(error: BaseException) -> bytes:
    """An error as a frame for the parent."""
    return session_pb2.JoinRequest(failure=failure_of(error)).SerializeToString()


def _size_of(item: Received | session_pb2.Welcome) -> int:
    return _ITEM_BYTES + (item.n_bytes if isinstance(item, Received) else item.ByteSize())


class MemberSession:
    def __init__(
        self, call: Call, host: Member, computer: Computer, stop: asyncio.Event, leave: asyncio.Event, on_heard: Callable[[], None]
    ) -> None:
        self.was_welcomed, self._on_heard = False, on_heard
        self.outcome = ""  # of the run, once it is over
        self.n_up = self.n_down = 0  # bytes of frames that were written and read
        self._has_sent = False  # something of a reply, or a book
        self._call, self._host, self._computer, self._stop, self._leave = call, host, computer, stop, leave
        self._rules = host.experiment.federation
        self._heartbeat_s = self._rules.heartbeat_s  # until the welcome
        self._queue: deque[Received | session_pb2.Welcome] = deque()
        self._queued_bytes = 0
        self._is_full = False  # the reader waits until something leaves the queue
        self._has_room = asyncio.Event()
        self._is_greeted = False
        self._wake = asyncio.Event()
        self._working = asyncio.Lock()  # from the start of a task until its reply is written
        self._framing = asyncio.Lock()  # gRPC allows only one write at a time
        self._n_received = self._n_written = 0
        self._hello_bytes = 0
        self._is_leaving = False  # tasks are dropped now
        self._is_ending = False  # the parent may be silent now; other deadlines hold
        host.held = host.held.reopened()

    @property
    def was_heard(self) -> bool:
        """Whether the parent has sent anything: it has taken the member in."""
        return self._n_received > 0

    async def run(self) -> End:
        """Serves the stream. Raises errors of the halves, after reporting them to the parent."""
        reading = asyncio.create_task(self._read_all())
        others = [asyncio.create_task(work) for work in (self._introduce(), self._work(), self._beat(), self._watch_stop())]
        waiting: set[asyncio.Task[Any]] = {reading, *others}
        tasks = tuple(waiting)
        try:
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                error = next((task.exception() for task in done if task.exception() is not None), None)
                if error is not None:
                    await self._leave_with(error, reading)
                    raise error
                end: End | None = next((task.result() for task in done if task.result() is not None), None)
                if end is not None:
                    return end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._call.cancel()

    @property
    def was_busy(self) -> bool:
        """Whether some of a message travelled on the stream that may not have arrived whole. A very long hello counts too."""
        return self._has_sent or self._host.held.flowing is not None or (not self.was_welcomed and self.n_up > CHUNK_BYTES)

    async def _write(self, frame: bytes) -> bool:
        """Writes one frame. False if the stream is gone; the reader reports why."""
        async with self._framing:
            try:
                await self._call.write(frame)
                self._n_written += 1
                self.n_up += len(frame)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return False
        return True

    async def _half_close(self) -> None:
        async with self._framing:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()

    async def _introduce(self) -> None:
        for frame in self._host.hello():
            data = frame.SerializeToString()
            self._hello_bytes += len(data)
            await self._write(data)

    async def _beat(self) -> End:
        """Sends a heartbeat when nothing else was sent, and detects a silent parent. It counts its own turns instead of seconds."""
        turns = 0
        while turns < 2 * (SILENT_HEARTBEATS + self._hello_beats):
            received, written = self._n_received, self._n_written
            await asyncio.sleep(self._heartbeat_s / 2)
            silence_s = SILENT_HEARTBEATS * self._heartbeat_s
            is_silent = received == self._n_received and not self._is_full
            turns = turns + 1 if is_silent and not self._is_ending else 0
            # A frame in progress is a sign of life, and a stuck write must not stop the count.
            if written != self._n_written or self._framing.locked():
                continue
            try:
                async with asyncio.timeout(silence_s):
                    await self._write(_HEARTBEAT)
            except TimeoutError:
                return End("lost", f"the parent has taken no frame for {silence_s:g} s", "DEADLINE_EXCEEDED")
        return End("lost", f"nothing heard from the parent for {SILENT_HEARTBEATS * self._heartbeat_s:g} s", "DEADLINE_EXCEEDED")

    @property
    def _hello_beats(self) -> int:
        """Extra heartbeats for a silent parent before its first frame: it answers after the whole hello, and a link may be slow."""
        if self._n_received:
            return 0
        rules = (link_rule(text) for _, text in self._rules.links.given())
        seconds = max((rule.transmission_s(self._hello_bytes) + 2 * rule.delay_s for rule in rules), default=0.0)
        return math.ceil(seconds / self._heartbeat_s)

    async def _read_all(self) -> End:
        assembler = Assembler(session_pb2.JoinResponse, held=self._host.held)
        call = self._call
        try:
            while True:
                data: Any = await call.read()
                if not isinstance(data, bytes):
                    return End("stopped") if self._is_leaving else End("lost", "the parent has closed the stream", "OK")
                self._n_received += 1
                self.n_down += len(data)
                if self._n_received == 1:
                    self._on_heard()
                item = assembler.feed(data)
                if item is None or self._is_leaving or isinstance(item, session_pb2.Heartbeat):
                    continue
                if isinstance(item, session_pb2.Finish):
                    return await self._finish(item)
                if isinstance(item, session_pb2.PeerList):  # at once: a task that is under way may wait for one of them
                    self._host.meet(item)
                    continue
                await self._take(item)
        except grpc.aio.AioRpcError as error:
            return End("lost", error.details() or "", error.code().name)

    async def _take(self, item: Any) -> None:
        """Handles a quick task directly, and queues everything else."""
        if isinstance(item, Received):
            if not self._queue and not self._working.locked() and self._computer.is_quick(item):
                async with self._working:
                    await self._handle_at_once(item)
                return
        elif not isinstance(item, session_pb2.Welcome):
            raise ProtocolError(f"the parent sent a {type(item).__name__.lower()}, wanted a welcome, a task or the finish")
        elif self._is_greeted:
            raise ProtocolError("the parent sent a second welcome on one stream, wanted one")
        else:
            self._is_greeted = True
        while self._queue and self._queued_bytes + _size_of(item) > MAX_QUEUED_BYTES:
            self._is_full = True
            self._has_room.clear()
            await self._has_room.wait()
        self._is_full = False
        self._queue.append(item)
        self._queued_bytes += _size_of(item)
        self._wake.set()

    async def _handle_at_once(self, task: Received) -> None:
        await self._send(self._computer.handle(self._host, task))
        self._host.settle()

    async def _send(self, encoded: Encoded | None) -> None:
        if encoded is not None:
            self._has_sent = True
            for frame in encoded.frames():
                if not await self._write(frame):
                    return

    async def _work(self) -> None:
        while True:
            await self._work_off()
            self._wake.clear()
            await self._wake.wait()

    async def _work_off(self) -> None:
        async with self._working:
            while self._queue and not self._is_leaving:
                item = self._queue.popleft()
                self._queued_bytes -= _size_of(item)
                self._has_room.set()
                if isinstance(item, session_pb2.Welcome):
                    await self._computer.run(self._host.welcome, item, waits=False)
                    self._heartbeat_s = item.heartbeat_s
                    self.was_welcomed = True
                elif self._computer.is_quick(item):  # otherwise a parent that is as quick would keep all its tasks in the thread
                    await self._handle_at_once(item)
                else:
                    is_new = item.frame.seq > self._host.last_seq  # what was handled before has its answer
                    await self._send(await self._computer.run(self._computer.handle, self._host, item, waits=is_new))
                    await self._computer.run(self._host.settle, waits=is_new)

    async def _finish(self, finish: session_pb2.Finish) -> End:
        """Sends the books and waits for the parent to close."""
        self._is_ending, lost, is_closed = True, None, False
        if finish.failed:
            self._queue.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S if finish.failed else self._rules.task_timeout_s):
                await self._work_off()  # also waits for the current task; the books must be complete
                if self._host.whole_books is None:
                    await self._computer.run(self._host.ending, finish)
                    self._host.whole_books = await self._computer.run(lambda: [book.SerializeToString() for book in self._host.books()])
                self._has_sent = True
                for frame in self._host.whole_books[finish.books_held :]:
                    if not await self._write(frame):
                        break
                await self._half_close()
            async with asyncio.timeout(CLOSE_S if finish.failed else LONGEST_CLOSE_S):
                lost = await self._drain()
                is_closed = lost is None
        if finish.failed:
            return End("failed", finding_in(finish.finding).sentence)
        self.outcome = finish.outcome
        if is_closed:
            await self._computer.run(self._host.ended)
        return End("finished", finish.outcome) if lost is None else lost

    async def _drain(self) -> End | None:
        """Reads until the parent closes the stream; how it was lost, if it was. TimeoutError if the parent is silent."""
        try:
            while True:
                async with asyncio.timeout(CLOSE_S):
                    if await self._call.read() is grpc.aio.EOF:
                        return None
        except grpc.aio.AioRpcError as error:
            return End("lost", error.details() or "", error.code().name)

    async def _watch_stop(self) -> End:
        """When asked to stop: finishes the current task, saves the state and leaves. A member that works stays until it is to leave."""
        await self._stop.wait()
        if self.was_welcomed:
            await self._leave.wait()
        self._is_leaving = self._is_ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rules.task_timeout_s), self._working:
                await self._computer.run(self._host.save)
            async with asyncio.timeout(CLOSE_S):
                await self._half_close()
        await asyncio.sleep(CLOSE_S)  # the reader ends first if the parent closes the stream
        return End("stopped")

    async def _leave_with(self, error: BaseException, reading: asyncio.Task[End]) -> None:
        """Reports to the parent why this host fails, and waits for it to close the stream."""
        self._is_leaving = self._is_ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._write(failure_bytes(error))
                await self._half_close()
                if reading.done():
                    await self._drain()
                else:
                    await asyncio.wait((reading,))
