"""The network client of a member: dials the parent, joins, and joins again when the stream is lost.

It moves frames for a client host or an aggregator, and does not interpret them. A `Computer` executes the tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.consent import changed_parts, consent_parts, refusal
from coterie.experiment.links import link_rule
from coterie.findings import Finding
from coterie.session.computer import Computer, Thread
from coterie.session.failures import failure_of, finding_frame, finding_in
from coterie.session.probe import PLAIN, mismatch
from coterie.session.tls import Tls
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION, Encoded, Received

SERVICE = "coterie.v1.FederationService"
FAILED = "the run has failed"  # prefix of a member's message when the run was ended by others
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0  # between attempts to rejoin
DOUBT_S = 1.0  # between checks why there is no connection
SAY_S = 1.0  # silent wait for a server before `on_wait`
SILENT_HEARTBEATS = 10  # after this many without a frame, the parent counts as lost
CLOSE_S = 10.0  # wait for a silent parent to close a stream
LONGEST_CLOSE_S = 60.0  # for an active parent, which may have to read very many books
MAX_QUEUED_BYTES = 64 << 20  # queued tasks; further ones are read later
_MAX_SHOWN = 5  # changed keys
_ITEM_BYTES = 2000  # memory of a small task besides its frame

# See the options of `coterie_server.transport.serve`: pings must not come more often than the server permits.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # a stray http_proxy breaks even localhost
)

# Which error a status of the parent means. Those in _TRY_AGAIN are retried; all others are failures of the run. (gRPC itself sets INTERNAL
# and UNKNOWN, when a stream is cut while it is written or closed.)
_TRY_AGAIN = frozenset({"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN"})
_FAMILIES: dict[str, type[CoterieError]] = {
    "ALREADY_EXISTS": ConfigError,
    "UNAUTHENTICATED": ConfigError,
    "PERMISSION_DENIED": ConfigError,
    "FAILED_PRECONDITION": ProtocolError,
    "INVALID_ARGUMENT": ProtocolError,
    "RESOURCE_EXHAUSTED": ProtocolError,
    "UNIMPLEMENTED": ProtocolError,
}
_HEARTBEAT = session_pb2.JoinRequest(heartbeat=session_pb2.Heartbeat()).SerializeToString()

Call = grpc.aio.StreamStreamCall[bytes, bytes]
T = TypeVar("T")


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


MakeDialler = Callable[[Experiment, str], Any]


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


async def serve_member(
    make: MakeDialler,
    server_address: str,
    *,
    name: str,
    computer: Computer | None = None,
    tls: Tls | None = None,
    patience_s: float = 60.0,
    stop: asyncio.Event | None = None,
    on_wait: Callable[[], None] | None = None,
    on_refusal: Callable[[str], None] | None = None,
) -> str | None:
    """Serves the run at HOST:PORT to its end and returns its outcome; None if `stop` was set before.

    `make(experiment, run_id)` creates the `Dialler` from the experiment, or returns None if it was stopped. The computer calls it, by
    default a `Thread`. With `tls` both sides show certificates. `patience_s` is the longest time without a server, at the start and between
    two streams.

    `on_wait` is called once if there is no server yet. `on_refusal` is called with the reason if the parent refuses the member for now.
    Raises RunError when the run failed or patience is over. Raises ConfigError and ProtocolError when the parent refused the member, when
    certificates do not fit, or the experiment is wrong. Other errors of a half or of `make` are raised after reporting them to the parent.
    """
    parent = _Parent(server_address, name, patience_s, stop or asyncio.Event(), tls)
    computer = computer or Thread()
    try:
        answer = await _watched(parent.ask(), on_wait)
        if answer is None:
            return None
        try:
            experiment = _experiment_of(answer)
            host = await computer.run(make, experiment, answer.run_id)
        except Exception as error:
            await parent.report(error)
            raise
        return None if host is None else await parent.serve(host, computer, answer.experiment_json, on_refusal)
    finally:
        await to_the_end(parent.close())
        await to_the_end(computer.close())


def _experiment_of(answer: session_pb2.GetExperimentResponse) -> Experiment:
    """ProtocolError when the answer is not JSON, ConfigError when it is not an experiment."""
    try:
        content = json.loads(answer.experiment_json)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the parent's experiment of {len(answer.experiment_json)} characters is not JSON: {error}") from None
    return experiment_from(content)


async def to_the_end(work: Coroutine[Any, Any, Any]) -> None:
    """Awaits work that has its own deadline and must not be interrupted, even if the caller is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


async def _watched(answer: Coroutine[Any, Any, T], on_wait: Callable[[], None] | None) -> T:
    """The answer; `on_wait` is called if it takes long."""
    if on_wait is None:
        return await answer
    timer = asyncio.get_running_loop().call_later(SAY_S, on_wait)
    try:
        return await answer
    finally:
        timer.cancel()


def _failure(error: BaseException) -> bytes:
    """An error as a frame for the parent."""
    return session_pb2.JoinRequest(failure=failure_of(error)).SerializeToString()


class _Parent:
    """The connection to the parent: one channel, and one stream after another."""

    def __init__(self, address: str, name: str, patience_s: float, stop: asyncio.Event, tls: Tls | None) -> None:
        self._address, self._name, self._patience_s, self._stop, self._tls = address, name, patience_s, stop, tls
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.channel_credentials(), options=OPTIONS)
        self._join: Any = self._channel.stream_stream(f"/{SERVICE}/Join")  # without serialisers, since frames are bytes
        self._random = random.Random()  # noqa: S311 - spreads attempts in time, decides nothing

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self) -> session_pb2.GetExperimentResponse | None:
        """The experiment, once there is a server; None if stopped before."""
        deadline = time.monotonic() + self._patience_s
        while not self._stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RunError(f"waited {self._patience_s:g} s for a server at {self._address}: none answered")
            try:
                return await self._answer(left, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code().name not in _TRY_AGAIN:
                    raise self._refused(Lost(error.code().name, error.details() or "")) from None
            await self._pause(FIRST_DELAY_S)
        return None

    async def _answer(self, timeout_s: float, *, wait_for_ready: bool) -> session_pb2.GetExperimentResponse | None:
        """The parent's experiment; None if stopped before. Raises AioRpcError."""
        get: Any = self._channel.unary_unary(
            f"/{SERVICE}/GetExperiment",
            request_serializer=session_pb2.GetExperimentRequest.SerializeToString,
            response_deserializer=session_pb2.GetExperimentResponse.FromString,
        )
        request = session_pb2.GetExperimentRequest(protocol=PROTOCOL_VERSION, host=self._name)
        answer: session_pb2.GetExperimentResponse | None = await self._unless_stopped(
            get(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        )
        return answer

    async def _check_same(self, experiment: Experiment, served: str) -> None:
        """ConfigError when the parent returns with an experiment that asks for something else than this member serves."""
        try:
            answer = await self._answer(CLOSE_S, wait_for_ready=False)
        except grpc.aio.AioRpcError:
            return  # joining says why
        if answer is None or answer.experiment_json == served:
            return
        if changed := changed_parts(consent_parts(experiment), consent_parts(_experiment_of(answer))):
            listed = ", ".join(changed[:_MAX_SHOWN])
            error = refusal(f"host {self._name!r} serves another experiment than the parent now has: {listed} changed", changed)
            await self.report(error)
            raise error

    async def _unless_stopped(self, call: Any) -> Any:
        """The call's result, or None if `stop` is set first. ConfigError if the call can never succeed."""

        async def result() -> Any:
            return await call

        answering, stopping, doubting = tasks = [asyncio.create_task(work) for work in (result(), self._stop.wait(), self._doubt())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering in done:
                return answering.result()
            return None if stopping in done else doubting.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _doubt(self) -> None:
        """Without a connection, looks from time to time for a permanent problem. ConfigError names it."""
        while True:
            state = self._channel.get_state()
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:  # the state until it connects
                await self._check_server()
                await asyncio.sleep(DOUBT_S)
            else:
                await self._channel.wait_for_state_change(state)

    async def _check_server(self) -> None:
        """ConfigError when the server and this member can never connect."""
        found = await mismatch(self._address, self._tls)
        if found is None:
            return
        if found == PLAIN:
            await self._complain(Finding("J1"))
        raise ConfigError(f"host {self._name!r} cannot join the server at {self._address}: {found}")

    async def _complain(self, finding: Finding) -> None:
        """Sends the reason in plain text, if the server can be reached."""
        async with grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel:
            request = session_pb2.GetExperimentRequest(protocol=PROTOCOL_VERSION, host=self._name, finding=finding_frame(finding))
            call: Any = channel.unary_unary(f"/{SERVICE}/GetExperiment")  # the answer is not read
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call(request.SerializeToString(), timeout=CLOSE_S)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    def _refused(self, end: Lost) -> CoterieError:
        family = _FAMILIES.get(end.code, RunError)
        reason = end.reason or f"no reason is given (status {end.code})"
        return family(f"the server at {self._address} refused host {self._name!r}: {reason}")

    async def report(self, error: Exception) -> None:
        """Reports to the parent why this host fails. A parent that cannot be reached has its own deadline."""
        call = self._join()
        hello = session_pb2.Hello(protocol=PROTOCOL_VERSION, host=self._name, more=True)
        try:
            async with asyncio.timeout(CLOSE_S):
                await call.write(session_pb2.JoinRequest(hello=hello).SerializeToString())
                await call.write(_failure(error))
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            call.cancel()

    async def serve(self, host: Dialler, computer: Computer, served: str, on_refusal: Callable[[str], None] | None = None) -> str | None:
        """Joins, and rejoins after a lost stream until patience is over. `served` is the experiment as the parent sent it."""
        heard_at, delay, said = time.monotonic(), FIRST_DELAY_S, ""
        while not self._stop.is_set():
            session = _Session(self._join(), host, computer, self._stop)
            end = await session.run()
            if isinstance(end, Finished):
                if end.failed:
                    raise RunError(f"{FAILED}: {end.outcome}", Finding("R6"))
                return end.outcome
            if isinstance(end, Stopped):
                return None
            if end.code not in _TRY_AGAIN:
                raise self._refused(end)
            if end.code == "UNAVAILABLE" and not session.was_welcomed:
                await self._check_server()
                # The parent's messages name the member; gRPC's own are about connections.
                if on_refusal is not None and repr(self._name) in end.reason and end.reason != said:
                    said = end.reason
                    on_refusal(said)
            if session.was_welcomed:
                heard_at, delay = time.monotonic(), FIRST_DELAY_S
            if time.monotonic() - heard_at > self._patience_s:
                raise RunError(f"host {self._name!r} has had no session with {self._address} for {self._patience_s:g} s: {end.reason}")
            await self._pause(self._random.uniform(0.5, 1.0) * delay)
            delay = min(2 * delay, LONGEST_DELAY_S)
            await self._check_same(host.experiment, served)
        await computer.run(host.save)
        return None


def _size_of(item: Received | session_pb2.Welcome) -> int:
    """The approximate size of an item in the queue, in bytes."""
    return _ITEM_BYTES + (item.n_bytes if isinstance(item, Received) else item.ByteSize())


class _Session:
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
                await self._write(_failure(error))
                await self._half_close()
                if reading.done():
                    await self._drain()
                else:
                    await asyncio.wait((reading,))
