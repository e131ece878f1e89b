"""One stream of a member to its parent: the hello, tasks and replies, heartbeats, and the end with the member's books."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from coterie.errors import ProtocolError
from coterie.experiment.config import Experiment
from coterie.experiment.links import link_rule
from coterie.session.computer import Computer
from coterie.session.failures import failure_of, finding_in
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Encoded, Received

SILENT_HEARTBEATS = 10  # after this many without a frame, the parent counts as lost
CLOSE_S = 10.0  # wait for a silent parent to close a stream
LONGEST_CLOSE_S = 60.0  # for an active parent, which may have to read very many books
MAX_QUEUED_BYTES = 64 << 20  # queued tasks; further ones are read later
_ITEM_BYTES = 2000  # memory of a small task besides its frame
_HEARTBEAT = session_pb2.JoinRequest(heartbeat=session_pb2.Heartbeat()).SerializeToString()

Call = grpc.aio.StreamStreamCall[bytes, bytes]


class Dialler(Protocol):
    """The member that joins the parent. `handle` and `ending` may return awaitables if the work runs on the event loop."""

    @property
    def name(self) -> str: ...
    @property
    def experiment(self) -> Experiment: ...

    def hello(self) -> Iterator[session_pb2.JoinRequest]: ...
    def welcome(self, welcome: session_pb2.Welcome) -> None: ...
    def handle(self, received: Received) -> Any:
        """The reply (`Encoded`), or None if there is none to send."""

    def settle(self) -> None:
        """Called after a reply is written: does work that the reply did not wait for, but the next one would."""

    def ending(self, finish: session_pb2.Finish) -> Any:
        """Work that must be done before the books are complete."""

    def books(self) -> Iterator[session_pb2.JoinRequest]: ...
    def save(self) -> None: ...


@dataclass(frozen=True)
class Finished:
    """The parent has ended the run."""

    outcome: str
    failed: bool


@dataclass(frozen=True)
class Lost:
    """The stream has ended before the run."""

    code: str
    reason: str


@dataclass(frozen=True)
class Stopped:
    """This side was asked to end the stream, and did."""


End = Finished | Lost | Stopped


def failure_bytes(error: BaseException) -> bytes:
    """An error as a frame for the parent."""
    return session_pb2.JoinRequest(failure=failure_of(error)).SerializeToString()


def _size_of(item: Received | session_pb2.Welcome) -> int:
    """The approximate size of an item in the queue, in bytes."""
    return _ITEM_BYTES + (item.n_bytes if isinstance(item, Received) else item.ByteSize())


class MemberSession:
    """One stream, from hello to its end."""

    def __init__(self, call: Call, host: Dialler, computer: Computer, stop: asyncio.Event) -> None:
        self.was_welcomed = False
        self._call, self._host, self._computer, self._stop = call, host, computer, stop
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

    # ---- outgoing

    async def _write(self, frame: bytes) -> None:
        """Writes one frame. If the stream is gone, the reader reports why."""
        async with self._framing:
            try:
                await self._call.write(frame)
                self._n_written += 1
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

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
                return Lost("DEADLINE_EXCEEDED", f"the parent has taken no frame for {silence_s:g} s")
        return Lost("DEADLINE_EXCEEDED", f"nothing heard from the parent for {SILENT_HEARTBEATS * self._heartbeat_s:g} s")

    @property
    def _hello_beats(self) -> int:
        """Extra heartbeats for a silent parent before its first frame: it answers after the whole hello, and a link may be slow."""
        if self._n_received:
            return 0
        rules = (link_rule(text) for _, text in self._rules.links.given())
        seconds = max((rule.transmission_s(self._hello_bytes) + 2 * rule.delay_s for rule in rules), default=0.0)
        return math.ceil(seconds / self._heartbeat_s)

    # ---- incoming

    async def _read_all(self) -> End:
        assembler = Assembler(session_pb2.JoinResponse)
        call = self._call
        try:
            while True:
                data: Any = await call.read()
                if not isinstance(data, bytes):
                    return Stopped() if self._is_leaving else Lost("OK", "the parent has closed the stream")
                self._n_received += 1
                item = assembler.feed(data)
                if item is None or self._is_leaving or isinstance(item, session_pb2.Heartbeat):
                    continue
                if isinstance(item, session_pb2.Finish):
                    return await self._finish(item)
                await self._take(item)
        except grpc.aio.AioRpcError as error:
            return Lost(error.code().name, error.details() or "")

    async def _take(self, item: Any) -> None:
        """Handles a quick task directly, and queues everything else."""
        if isinstance(item, Received):
            if not self._queue and not self._working.locked() and self._computer.is_quick(item):
                async with self._working:
                    await self._send(self._computer.handle(self._host, item))
                    self._host.settle()
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

    async def _send(self, encoded: Encoded | None) -> None:
        if encoded is not None:
            for frame in encoded.frames():
                await self._write(frame)

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
                    await self._computer.run(self._host.welcome, item)
                    self._heartbeat_s = item.heartbeat_s
                    self.was_welcomed = True
                else:
                    await self._send(await self._computer.run(self._computer.handle, self._host, item))
                    await self._computer.run(self._host.settle)

    # ---- the end

    async def _finish(self, finish: session_pb2.Finish) -> End:
        """Sends the books and waits for the parent to close."""
        self._is_ending = True
        if finish.failed:
            self._queue.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S if finish.failed else self._rules.task_timeout_s):
                await self._work_off()  # also waits for the current task; the books must be complete
                await self._computer.run(self._host.ending, finish)
                for frame in await self._computer.run(lambda: [book.SerializeToString() for book in self._host.books()]):
                    await self._write(frame)
                await self._half_close()
            async with asyncio.timeout(CLOSE_S if finish.failed else LONGEST_CLOSE_S):
                await self._drain()
        return Finished(finding_in(finish.finding).sentence if finish.failed else finish.outcome, finish.failed)

    async def _drain(self) -> None:
        """Reads until the parent closes the stream. TimeoutError if it is silent."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while True:
                async with asyncio.timeout(CLOSE_S):
                    if await self._call.read() is grpc.aio.EOF:
                        return

    async def _watch_stop(self) -> End:
        """When asked to stop: finishes the current task, saves the state and leaves."""
        await self._stop.wait()
        self._is_leaving = self._is_ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rules.task_timeout_s), self._working:
                await self._computer.run(self._host.save)
            async with asyncio.timeout(CLOSE_S):
                await self._half_close()
        await asyncio.sleep(CLOSE_S)  # the reader ends first if the parent closes the stream
        return Stopped()

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
