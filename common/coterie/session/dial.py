"""The network client of a member: dials the parent, joins, and joins again when the stream is lost.

It moves frames for a client host or an aggregator, and does not interpret them. A `Computer` executes the tasks.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.consent import changed_parts, consent_parts, refusal
from coterie.findings import Finding
from coterie.session.computer import Computer, Thread
from coterie.session.cuts import Cuts
from coterie.session.failures import finding_frame
from coterie.session.member import Member
from coterie.session.member_session import CLOSE_S, End, MemberSession, failure_bytes
from coterie.session.probe import PLAIN, mismatch, unreachable
from coterie.session.tls import Tls
from coterie.session.where import Where
from coterie.v1 import session_pb2
from coterie.wire.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION

SERVICE = "coterie.v1.FederationService"
FAILED = "the run has failed"  # prefix of a member's message when the run was ended by others
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0  # between attempts to rejoin
DOUBT_S = 1.0  # between checks why there is no connection
SAY_S, SAY_AGAIN_S = 1.0, 60.0  # silent wait for a server before `on_wait`, and between two calls
LOOK_S = 0.2  # between looks at an address file
BOOKS_S = 5.0  # for a parent that has ended the run, and may have gone with half the books
REDIAL_S = 3.0  # without a connection, before the name is looked up and the certificate read again
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
    ("grpc.use_local_subchannel_pool", 1),  # a new channel makes a new connection
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


MakeDialler = Callable[[Experiment, str], Any]
OnWait = Callable[[str, float], None]


async def serve_member(
    make: MakeDialler,
    server: str | Where,
    *,
    name: str,
    computer: Computer | None = None,
    tls: Tls | None = None,
    patience_s: float = 60.0,
    stop: asyncio.Event | None = None,
    leave: asyncio.Event | None = None,
    on_wait: OnWait | None = None,
    on_back: Callable[[float], None] | None = None,
    on_trouble: Callable[[str], None] | None = None,
) -> str | None:
    """Serves the run of a server to its end and returns its outcome; None if `stop` was set before.

    `server` is HOST:PORT, or a `Where`, which is asked each time the member dials: a server that was started again may be elsewhere.
    `make(experiment, run_id)` creates the `Member` from the experiment, or returns None if it was stopped. The computer calls it, by
    default a `Thread`. With `tls` both sides show certificates. `patience_s` is the longest time without a server, at the start and between
    two streams.

    Once `stop` is set the member joins no more. It leaves a stream on which it works when `leave` is set, by default `stop`.

    `on_wait` is called if there is no server yet, or no longer, soon and then every minute: with the reason, "" if it is unknown, and the
    seconds that the wait has lasted. `on_back` is called with these seconds when a lost parent is there again. `on_trouble` is called with
    the reason if the parent refuses the member for now, or if streams are cut before anything gets through.
    Raises RunError when the run failed or patience is over. Raises ConfigError and ProtocolError when the parent refused the member, when
    certificates do not fit, or the experiment is wrong. Other errors of a half or of `make` are raised after reporting them to the parent.
    """
    where = server if isinstance(server, Where) else Where(server, insecure=True)
    stop = stop or asyncio.Event()
    parent = _Parent(where, name, patience_s, stop, leave or stop, tls)
    computer = computer or Thread()
    waits = _Waits(parent.why_absent, on_wait, on_back)
    try:
        waits.begin()
        answer = await parent.ask()
        waits.end()
        if answer is None:
            return None
        if answer.outcome:
            return answer.outcome
        try:
            experiment = _experiment_of(answer)
            host = await computer.run(make, experiment, answer.run_id)
        except Exception as error:
            await parent.report(error)
            raise
        return None if host is None else await parent.serve(host, computer, answer.experiment_json, waits, on_trouble)
    finally:
        waits.end()
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


class _Waits:
    """Tells `on_wait` of a wait for the parent, soon and then every minute."""

    def __init__(self, why: Callable[[], Awaitable[str]], on_wait: OnWait | None, on_back: Callable[[float], None] | None) -> None:
        self._why, self._on_wait, self._on_back = why, on_wait, on_back
        self._saying: asyncio.Task[None] | None = None
        self._since, self._has_said = 0.0, False

    def begin(self) -> None:
        """Nothing if the wait has begun before."""
        if self._saying is None and self._on_wait is not None:
            self._since, self._has_said = time.monotonic(), False
            self._saying = asyncio.create_task(self._say(self._on_wait))

    def end(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None

    def back(self) -> None:
        """Ends the wait for a parent that was there before."""
        if self._saying is not None and self._has_said and self._on_back is not None:
            self._on_back(time.monotonic() - self._since)
        self.end()

    async def _say(self, on_wait: OnWait) -> None:
        pause = SAY_S
        while True:
            await asyncio.sleep(pause)
            why = await self._why()
            on_wait(why, time.monotonic() - self._since)
            self._has_said, pause = True, SAY_AGAIN_S


class _MovedError(Exception):
    """The parent is at another address now, or may be: there is no connection."""


class _Parent:
    """The connection to the parent: a channel to where it is, and one stream after another."""

    def __init__(self, where: Where, name: str, patience_s: float, stop: asyncio.Event, leave: asyncio.Event, tls: Tls | None) -> None:
        self._where, self._name, self._patience_s, self._tls = where, name, patience_s, tls
        self._stop, self._leave = stop, leave
        self._address, self._run_id = "", ""  # where the channel leads, and to which run, if that is known
        self._wrong = ""  # why this server is not the parent
        self._channel: Any = None
        self._join: Any = None
        self._random = random.Random()  # noqa: S311 - spreads attempts in time, decides nothing

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _dial(self) -> bool:
        """Makes a new channel to where the parent is now; False while nobody knows where that is.

        The name is looked up again, and the certificate is read again: either may have changed.
        """
        if (place := await asyncio.to_thread(self._where.place)) is not None:
            self._address, self._run_id = place
        if not self._address:
            return False
        await self.close()
        name = self._where.tls_name
        options = OPTIONS if name is None else (*OPTIONS, ("grpc.ssl_target_name_override", name))
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=options)
        else:
            self._tls = await asyncio.to_thread(self._tls.renewed, is_server=False)
            self._channel = grpc.aio.secure_channel(self._address, self._tls.channel_credentials(), options=options)
        self._join = self._channel.stream_stream(f"/{SERVICE}/Join")  # without serialisers: frames are bytes
        return True

    async def _moved(self) -> None:
        """Waits until the parent is elsewhere, and raises _MovedError; for ever if it has a fixed address."""
        while self._where.file is not None:
            await asyncio.sleep(LOOK_S)
            place = await asyncio.to_thread(self._where.place)
            if place is not None and place[0] != self._address:
                raise _MovedError
        await asyncio.Event().wait()

    async def why_absent(self) -> str:
        """Why there is no connection, as a clause; "" if it is not known."""
        return self._wrong or (await unreachable(self._address) if self._address else "there is no such file yet")

    async def ask(self) -> session_pb2.GetExperimentResponse | None:
        """The experiment, once there is a server; None if stopped before."""
        deadline = time.monotonic() + self._patience_s
        while not self._stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                if self._address:
                    await self._check_server(is_last=True)
                why = await self.why_absent() or "something listens there, but it does not speak Coterie's protocol"
                raise RunError(f"waited {self._patience_s:g} s for a server at {self._address or self._where.said}: none answered ({why})")
            try:
                if await self._dial():
                    answer = await self._answer(left, wait_for_ready=True)
                    if answer is None or not self._is_another(answer.run_id, self._run_id):
                        return answer
                    await self._pause(DOUBT_S)
            except _MovedError:
                pass
            except grpc.aio.AioRpcError as error:
                if error.code().name not in _TRY_AGAIN:
                    raise self._refused(End("lost", error.details() or "", error.code().name)) from None
            await self._pause(FIRST_DELAY_S)
        return None

    async def _answer(self, timeout_s: float, *, wait_for_ready: bool) -> session_pb2.GetExperimentResponse | None:
        """The parent's experiment; None if stopped before. Raises AioRpcError, and _MovedError."""
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

    def _is_another(self, run_id: str, wanted: str) -> bool:
        """Whether the server is that of another run, which has the port that an address file still names. Then the parent is not there."""
        is_another = self._where.file is not None and bool(run_id and wanted) and run_id != wanted
        self._wrong = f"run {run_id} is at {self._address}, wanted run {wanted}" if is_another else ""
        return is_another

    async def _find(self, host: Member, served: str, deadline: float) -> str:
        """Dials, until the server is not that of another run; as `_check_same`. RunError at the deadline."""
        while True:
            await self._dial()
            if (outcome := await self._check_same(host, served)) is not None or self._stop.is_set():
                return outcome or ""
            if time.monotonic() > deadline:
                raise RunError(f"host {self._name!r} has had no session for {self._patience_s:g} s: {self._wrong}")
            await self._pause(DOUBT_S)

    async def _check_same(self, host: Member, served: str) -> str | None:
        """ConfigError when the parent returns with an experiment that asks for something else than this member serves.

        The outcome of the run if the parent has nothing but that, otherwise "". (One that is about to end takes the member's book first.)
        None if the server is that of another run.
        """
        try:
            answer = await self._answer(CLOSE_S, wait_for_ready=False)
        except (grpc.aio.AioRpcError, _MovedError):
            return ""  # joining says why
        if answer is not None and self._is_another(answer.run_id, host.run_id):
            return None
        if answer is None or answer.experiment_json == served:
            return ""
        if answer.outcome and not answer.experiment_json:
            return answer.outcome
        if changed := changed_parts(consent_parts(host.experiment), consent_parts(_experiment_of(answer))):
            listed = ", ".join(changed[:_MAX_SHOWN])
            error = refusal(f"host {self._name!r} serves another experiment than the parent now has: {listed} changed", changed)
            await self.report(error)
            raise error
        return ""

    async def _unless_stopped(self, call: Any) -> Any:
        """The call's result, or None if `stop` is set first. ConfigError if the call can never succeed, _MovedError if not there."""

        async def result() -> Any:
            return await call

        works = (result(), self._stop.wait(), self._doubt(), self._moved())
        answering, stopping, *_ = tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering in done:
                return answering.result()
            return None if stopping in done else done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _doubt(self) -> None:
        """Without a connection, looks from time to time for a permanent problem: see `_check_server`. _MovedError after a while."""
        again_at = time.monotonic() + REDIAL_S
        while True:
            state = self._channel.get_state()
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:  # the state until it connects
                await self._check_server()
                if time.monotonic() > again_at:
                    raise _MovedError
                await asyncio.sleep(DOUBT_S)
            else:
                await self._channel.wait_for_state_change(state)

    async def _check_server(self, *, is_last: bool = False) -> None:
        """ConfigError names a permanent problem. _MovedError instead, until the last look, where a file gave the address: it may be old."""
        found = await mismatch(self._address, self._tls, self._where.tls_name)
        if found is None:
            return
        if self._where.file is not None and not is_last:
            self._wrong = f"at {self._address}, {found}"
            raise _MovedError
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

    def _refused(self, end: End) -> CoterieError:
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

    async def _turned_away(self, end: End, said: str, on_trouble: Callable[[str], None] | None) -> str:
        """Says why the parent refuses the member for now, unless that was `said` last. ConfigError for a permanent problem."""
        with contextlib.suppress(_MovedError):
            await self._check_server()
        # The parent's messages name the member; gRPC's own are about connections.
        if on_trouble is None or repr(self._name) not in end.reason or end.reason == said:
            return said
        on_trouble(end.reason)
        return end.reason

    async def serve(
        self, host: Member, computer: Computer, served: str, waits: _Waits, on_trouble: Callable[[str], None] | None = None
    ) -> str | None:
        """Joins, and rejoins after a lost stream until patience is over. `served` is the experiment as the parent sent it.

        A stream on which something got through, or on which there was nothing to send, ends a wait. One that was cut before does not.
        """
        heard_at, delay, said, cuts = time.monotonic(), FIRST_DELAY_S, "", Cuts()
        over, over_at = "", 0.0  # the outcome of the run
        while not self._stop.is_set():
            session = MemberSession(self._join(), host, computer, self._stop, self._leave, waits.back)
            end = await session.run()
            if end.how == "failed":
                raise RunError(f"{FAILED}: {end.reason}", Finding("R6"))
            if end.how != "lost":
                return end.reason if end.how == "finished" else None
            if self._stop.is_set():
                break
            if session.outcome and not over:  # the books are not whole at the parent, which may wait for the rest of them
                over, over_at = session.outcome, time.monotonic()
            if over and (end.code not in _TRY_AGAIN or time.monotonic() - over_at > BOOKS_S):
                return over
            if end.code not in _TRY_AGAIN:
                raise self._refused(end)
            waits.begin()
            now = time.monotonic()
            if (why := cuts.add(session, host.progress, now)) and on_trouble is not None:
                on_trouble(why)
            if end.code == "UNAVAILABLE" and not session.was_welcomed:
                said = await self._turned_away(end, said, on_trouble)
            if session.was_heard and cuts.n_idle <= 1:  # also one that waits for other members before it welcomes this one
                heard_at, delay = now, FIRST_DELAY_S
            if now - heard_at > self._patience_s:
                had = cuts.sentence(session) if cuts.n_idle > 1 else end.reason
                raise RunError(f"host {self._name!r} has had no session with {self._address} for {self._patience_s:g} s: {had}")
            await self._pause(self._random.uniform(0.5, 1.0) * delay)
            delay = min(2 * delay, LONGEST_DELAY_S)
            if outcome := await self._find(host, served, heard_at + self._patience_s):
                return outcome
        await computer.run(host.save)
        return None
