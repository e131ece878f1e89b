"""The network client of a member: dials the parent, joins, and joins again when the stream is lost.

It moves frames for a client host or an aggregator, and does not interpret them. A `Computer` executes the tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.consent import changed_parts, consent_parts, refusal
from coterie.findings import Finding
from coterie.session.computer import Computer, Thread
from coterie.session.failures import finding_frame
from coterie.session.member_session import CLOSE_S, Dialler, Finished, Lost, MemberSession, Stopped, failure_bytes
from coterie.session.probe import PLAIN, mismatch
from coterie.session.tls import Tls
from coterie.v1 import session_pb2
from coterie.wire.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION

SERVICE = "coterie.v1.FederationService"
FAILED = "the run has failed"  # prefix of a member's message when the run was ended by others
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0  # between attempts to rejoin
DOUBT_S = 1.0  # between checks why there is no connection
SAY_S = 1.0  # silent wait for a server before `on_wait`
_MAX_SHOWN = 5  # changed keys

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


T = TypeVar("T")


MakeDialler = Callable[[Experiment, str], Any]


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
                await call.write(failure_bytes(error))
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            call.cancel()

    async def serve(self, host: Dialler, computer: Computer, served: str, on_refusal: Callable[[str], None] | None = None) -> str | None:
        """Joins, and rejoins after a lost stream until patience is over. `served` is the experiment as the parent sent it."""
        heard_at, delay, said = time.monotonic(), FIRST_DELAY_S, ""
        while not self._stop.is_set():
            session = MemberSession(self._join(), host, computer, self._stop)
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
