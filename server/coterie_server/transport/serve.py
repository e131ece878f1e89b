"""The parent's end of the wire: a gRPC server in front of a `Hub`.

It moves frames and decides nothing: what a frame means is the hub's to say. Join frames are (de)serialised here rather than by gRPC, so
that a large tensor is cut into chunks one at a time and never held twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.record.ledger import UP
from coterie.session.dial import to_the_end
from coterie.session.failures import MISTAKE, finding_in
from coterie.session.tls import Identity, Tls, identity_of
from coterie.v1 import session_pb2
from coterie.wire.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION, Assembler, Received
from coterie_server.session.hub import Hub
from coterie_server.session.refusal import MAX_REASON_CHARS, Refusal, short_name, shortened
from coterie_server.transport.door import MOST_STRANGERS, Door, Doorkeeper, ended
from coterie_server.transport.grpc_link import SMALL_BYTES, Context, GrpcLink
from coterie_server.transport.links import Inlet, LoopClock, Outlet, call, note_links, rule_of

SERVICE = "coterie.v1.FederationService"
TICK_S = 0.5
STOP_GRACE_S = 2.0
MAX_HELLO_BYTES = 64 << 20
MAX_HELLO_USERS = 1_000_000
_USER_BYTES = 100  # a user of an unfinished hello takes about so much beside its name
_SPARE_CONNECTIONS = 256  # beside two for each host, the old one and the new one; one that is refused is closed at once
_SPARE_STREAMS = 64  # of one connection, which hosts of one process may share
# Frames without content, in a burst and for each of the times between two heartbeats: a host sends no more than a few.
_BURST, _FRAMES_PER_BEAT = 200, 20

# These and the options of `coterie.session.dial` belong together. gRPC also pings to measure the bandwidth of large messages; where
# that counts as too many pings, a server ends the connection in the middle of a round, so the count is switched off.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # otherwise two servers could share a port, and hosts would join either
    ("grpc.enable_http_proxy", 0),
    # Who connects and says nothing, or nothing in HTTP/2, and who opens no stream, is disconnected; the default is 2 minutes, and never.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 20_000),
)


@dataclass
class Serving:
    """A running server. `port` is the one listened on, also when 0 was asked for."""

    port: int
    _health: Any = field(repr=False)

    async def drain(self) -> None:
        """From now on the health service says NOT_SERVING; sessions go on."""
        # A watcher that takes no answer keeps the health service waiting for it, and the others with it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self._health.enter_graceful_shutdown()


@contextlib.asynccontextmanager
async def serving(
    hub: Hub,
    experiment_json: str,
    address: str,
    tls: Tls | None = None,
    *,
    insecure: bool = False,
) -> AsyncIterator[Serving]:
    """Serves `hub` at HOST:PORT while the block runs; streams still open at its end get UNAVAILABLE.

    With `tls` both sides show certificates, and a member's says for whom it may speak. Raises ConfigError when the address is not a
    loopback address and there is neither `tls` nor `insecure`, and when it cannot be listened on.
    """
    _check_address(hub, address, tls, insecure)
    service = _Service(hub, experiment_json, wants_identity=tls is not None)
    health_service: Any = health.aio.HealthServicer()
    await health_service.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    doorkeeper = Doorkeeper(service.door, hub.rules.silence_s, lambda reason: hub.turned_away("", reason))
    server = grpc.aio.server(options=(*OPTIONS, *_limits(hub.rules.hosts)), interceptors=(doorkeeper,))
    server.add_generic_rpc_handlers((service.handlers(),))
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    try:
        running = Serving(_listen(server, address, tls), health_service)
        await server.start()
        ticking = asyncio.create_task(_tick(hub, running, service))
        try:
            yield running
        finally:
            ticking.cancel()
            await to_the_end(_stop(running, service, server))
    finally:
        await to_the_end(server.stop(None))  # a server that was never stopped keeps its port


def _limits(n_hosts: int) -> tuple[tuple[str, int], ...]:
    """What grows with the number of hosts: connections, for which there are file descriptors, and the streams of each."""
    return (
        ("grpc.max_allowed_incoming_connections", 2 * n_hosts + _SPARE_CONNECTIONS),
        ("grpc.max_concurrent_streams", n_hosts + _SPARE_STREAMS),
    )


async def _stop(running: Serving, service: _Service, server: grpc.aio.Server) -> None:
    await running.drain()
    await service.close()
    await server.stop(STOP_GRACE_S)


def _check_address(hub: Hub, address: str, tls: Tls | None, insecure: bool) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the address to listen on is {address!r}, want HOST:PORT")
    if tls is not None or is_loopback(host.strip("[]")):
        return
    if not insecure:
        raise ConfigError(
            f"listening on {address} without TLS would let anyone join: give certificates with --tls, or allow it with --insecure"
        )
    hub.recorder.event("insecure", plain_text(address))


def plain_text(address: str) -> str:
    """What it means to listen at an address without TLS."""
    return f"listening on {address} without TLS: anyone who reaches it can join and read the models"


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine, for itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _listen(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    try:
        return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        raise ConfigError(f"cannot listen on {address}: {_why_not(address)}") from None


def _why_not(address: str) -> str:
    """gRPC keeps the operating system's reason to itself, so it is asked for again."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return "the address was taken a moment ago"


async def _tick(hub: Hub, running: Serving, service: _Service) -> None:
    """The hub's clock, and the health service's view of the run."""
    is_drained = False
    while True:
        await asyncio.sleep(TICK_S)
        service.note_held()
        hub.tick()
        service.check_links()
        if hub.is_over and not is_drained:
            is_drained = True
            await running.drain()


class _Service:
    """The two rpcs."""

    def __init__(self, hub: Hub, experiment_json: str, *, wants_identity: bool) -> None:
        self._hub = hub
        self.wants_identity = wants_identity
        self._answer = session_pb2.GetExperimentResponse(run_id=hub.run_id, experiment_json=experiment_json)
        self._sessions: dict[asyncio.Task[Any], _Session] = {}
        self.rule = rule_of(hub)
        note_links(hub, self.rule)
        self.door = Door(hub.rules.hosts + MOST_STRANGERS)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Generic handlers; Join's frames stay bytes."""
        request, response = session_pb2.GetExperimentRequest, session_pb2.GetExperimentResponse
        rpcs: dict[str, Any] = {
            "GetExperiment": grpc.unary_unary_rpc_method_handler(
                self._get_experiment,
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            ),
            "Join": grpc.stream_stream_rpc_method_handler(self._join),
        }
        return grpc.method_handlers_generic_handler(SERVICE, rpcs)

    async def _get_experiment(self, request: session_pb2.GetExperimentRequest, context: Any) -> session_pb2.GetExperimentResponse:
        if self.wants_identity and (why := _not_named(context, request.host)) is not None:
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, request.host, why)
        if request.HasField("finding"):
            reason = f"host {short_name(request.host)!r} will not join: {finding_in(request.finding).sentence}"
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, request.host, reason)
        if request.protocol != PROTOCOL_VERSION:
            reason = f"host {short_name(request.host)!r} speaks protocol {request.protocol}, wanted {PROTOCOL_VERSION}"
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, request.host, reason)
        if self._hub.is_over:
            await context.abort(grpc.StatusCode.ABORTED, f"run {self._hub.run_id} has ended")
        if self.rule is not None:
            await call(self.rule, LoopClock(), request.ByteSize(), self._answer.ByteSize())
        return self._answer

    async def _refuse(self, context: Any, code: grpc.StatusCode, name: str, reason: str) -> None:
        self._hub.turned_away(name, reason)
        await context.abort(code, reason[:MAX_REASON_CHARS])

    async def _join(self, _: Any, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs every rpc in a task
        session = self._sessions[task] = _Session(self._hub, context, self)
        try:
            await session.run()
        finally:
            del self._sessions[task]

    def note_held(self) -> None:
        """Hosts whose frames are held back here are heard."""
        for session in self._sessions.values():
            session.note_held()

    def check_links(self) -> None:
        """Gives up the streams of hosts that have stopped reading."""
        for session in self._sessions.values():
            session.link.check()

    async def close(self) -> None:
        """Ends all sessions and waits for their tasks, which gRPC itself does not wait for."""
        for session in self._sessions.values():
            session.link.close("UNAVAILABLE", "the parent is stopping")
        if self._sessions:
            await asyncio.wait(tuple(self._sessions), timeout=STOP_GRACE_S)
        await self.door.close(STOP_GRACE_S)


class _Session:
    """One host's stream: the tasks that read and write it."""

    def __init__(self, hub: Hub, context: Context, service: _Service) -> None:
        self._wants_identity = service.wants_identity
        rule, door = service.rule, service.door
        clock = LoopClock()
        self.link = GrpcLink(context, hub.rules.silence_s, None if rule is None else Outlet(rule, clock))
        self._inlet = None if rule is None else Inlet(context.read, rule, clock)
        self._receive = context.read if self._inlet is None else self._inlet.read
        # A hello as long as may be is carried by a slow link for longer than one waits for a host that says nothing.
        self._hello_s = hub.rules.silence_s + (0.0 if rule is None else rule.transmission_s(MAX_HELLO_BYTES) + rule.delay_s)
        self._hub = hub
        self._context = context
        self._assembler = Assembler(session_pb2.JoinRequest, lambda frame: hub.announced(self._name, frame))
        self._name = ""
        self._door = door
        self._stranger = door.enter(self._give_up)
        self._start = asyncio.get_running_loop().time()
        self._n_empty = 0  # frames without content
        self._hello = session_pb2.Hello()  # as much of it as has come

    def _give_up(self, reason: str) -> None:
        self._turned_away(reason)
        self.link.close("UNAVAILABLE", reason)

    def _turned_away(self, reason: str) -> None:
        self._hub.turned_away("", f"a stranger at {self._context.peer()} is turned away: {reason}")

    async def run(self) -> None:
        """Serves the stream until it ends, then gives it its status."""
        tasks = [asyncio.create_task(work) for work in (self._read_all(), self.link.write_all())]
        if self._inlet is not None:
            tasks.append(asyncio.create_task(self._inlet.pump()))
        code, reason = "CANCELLED", "the connection broke"
        try:
            code, reason = await self.link.closed
        finally:
            self.link.close(code, reason)  # frames still under way are ignored from here on
            self._door.leave(self._stranger)
            self._hello = session_pb2.Hello()  # it may be large, and somebody may still hold the session
            if self._name:
                self._hub.lost(self._name, self.link, reason)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if code != "OK":
            await ended(self._context, grpc.StatusCode[code], reason[:MAX_REASON_CHARS])

    def note_held(self) -> None:
        """The host is heard while a frame of it is held back by a shaped link."""
        if self._inlet is not None and self._inlet.is_holding and self._name and not self.link.closed.done():
            self._hub.heard(self._name)

    async def _read_all(self) -> None:
        link = self.link
        try:
            async with asyncio.timeout(self._hello_s):
                name = await self._read_hello()
            if name is not None:
                self._name = name
                self._door.leave(self._stranger)
                await self._read_frames()
            link.close("OK", "it closed its stream")
        except Refusal as refusal:
            self._name = ""
            link.close(refusal.code, str(refusal))
        except ProtocolError as error:
            if self._name:
                self._hub.broke(self._name, link, str(error))
            else:
                self._turned_away(str(error))
            link.close("INVALID_ARGUMENT", str(error))
        except TimeoutError:
            self._turned_away(reason := f"no hello came within {self._hello_s:g} s")
            link.close("DEADLINE_EXCEEDED", reason)
        except Exception as error:
            # A mistake of ours: nobody may wait for this host any longer, and the traceback goes to the log.
            self._hub.fail(RunError(f"the session of host {self._name!r} broke with {type(error).__name__}", MISTAKE))
            link.close("ABORTED", "the parent has made a mistake; its log says which")
            raise

    async def _read(self) -> tuple[Any, int]:
        """The next whole item and the size of its last frame; (None, 0) at the end of the stream."""
        while True:
            data: Any = await self._receive()
            if not isinstance(data, bytes):
                return None, 0
            if self._name:
                self._hub.heard(self._name)
            elif data[:1] not in _BEFORE_HELLO:
                raise ProtocolError(f"a frame of {len(data)} bytes came before the hello was complete, wanted a hello")
            item = self._assembler.feed(data) if self._name or len(data) <= SMALL_BYTES else await self._looked_at(data)
            if item is not None:
                return item, len(data)

    async def _looked_at(self, data: bytes) -> Any:
        """A large frame of a stranger."""
        async with self._door.turn():
            return self._assembler.feed(data)

    def _count_empty(self) -> None:
        """One more frame without content. ProtocolError when there are too many: a flood of them would take the time of the others."""
        self._n_empty += 1
        n_beats = (asyncio.get_running_loop().time() - self._start) / self._hub.rules.heartbeat_s
        if self._n_empty > _BURST + _FRAMES_PER_BEAT * n_beats:
            seconds = f"{self._hub.rules.heartbeat_s:g} s"
            raise ProtocolError(f"{self._n_empty} heartbeats came, wanted at most {_FRAMES_PER_BEAT} in {seconds} on average")

    async def _read_hello(self) -> str | None:
        """Hands the hello of all frames together to the hub: the host's name. None when it has only come to say why it cannot."""
        n_bytes = 0
        while True:
            item, size = await self._read()
            n_bytes += size
            if n_bytes > MAX_HELLO_BYTES:
                name = short_name(self._hello.host)
                raise ProtocolError(f"the hello of host {name!r} has more than {MAX_HELLO_BYTES} bytes, which is the most")
            if isinstance(item, session_pb2.Failure):
                self._check_name(self._hello.host)
                self._hub.failed(self._hello.host, item)
                return None
            if isinstance(item, session_pb2.Hello):
                self._add_to_hello(item, size)
                if not item.more:
                    break
            elif item is None:  # gRPC refuses frames that are too large by itself, and does not tell
                self._turned_away(f"it left before its hello was complete, or sent a frame of more than {MAX_FRAME_BYTES} bytes")
                return None
            elif isinstance(item, session_pb2.Heartbeat):
                self._count_empty()
            else:
                raise ProtocolError(f"the first frame is a {_kind(item)}, wanted a hello")
        whole, self._hello = self._hello, session_pb2.Hello()
        if self._wants_identity:
            self._check_identity(whole)
        self._hub.hello(whole, self.link)
        self._hub.tally(whole.host, UP, n_bytes)
        return whole.host

    def _check_name(self, name: str) -> None:
        """Refusal of who speaks in the name of another before its hello is complete."""
        if self._wants_identity and (why := _not_named(self._context, name)) is not None:
            self._hub.turned_away(name, why)
            raise Refusal("PERMISSION_DENIED", why)

    def _check_identity(self, hello: session_pb2.Hello) -> None:
        """Refusal of a host whose certificate is not for its name, its role or its users."""
        identity = _identity(self._context)
        reason: str | None = _nobody(hello.host)
        if identity is not None:
            users = ((user.name, user.cluster) for user in hello.users)
            found = identity.why_not(hello.host, is_aggregator=hello.aggregator, users=users)
            reason = None if found is None else f"host {hello.host!r} is refused: {found}"
        if reason is not None:
            self._hub.turned_away(hello.host, reason)
            raise Refusal("PERMISSION_DENIED", reason)

    def _add_to_hello(self, piece: session_pb2.Hello, size: int) -> None:
        """One more piece of the hello. ProtocolError when it is another host's, or the host has too many users."""
        whole, name = self._hello, short_name(piece.host)
        if whole.host and (piece.host, piece.instance) != (whole.host, whole.instance):
            raise ProtocolError(f"a hello of host {name!r} came in the middle of that of host {short_name(whole.host)!r}")
        if whole.host and not piece.users:
            self._count_empty()
        if len(whole.users) + len(piece.users) > MAX_HELLO_USERS:
            raise ProtocolError(f"host {name!r} brings more than {MAX_HELLO_USERS} users, which is the most")
        self._door.keep(self._stranger, size + _USER_BYTES * (len(piece.users) + len(piece.schema) + len(piece.findings)))
        whole.MergeFrom(piece)

    async def _read_frames(self) -> None:
        hub, name, closed = self._hub, self._name, self.link.closed
        while True:
            item, size = await self._read()
            if item is None or closed.done():
                return
            if isinstance(item, Received):
                hub.received(name, item)
                await asyncio.sleep(0)  # whoever waits for the answer goes on before the next one is asked for
                continue
            hub.tally(name, UP, size)
            if isinstance(item, session_pb2.Failure):
                self._count_empty()
                hub.failed(name, item, self.link)
            elif isinstance(item, session_pb2.Book):
                hub.book_of(name, item)
            elif isinstance(item, session_pb2.Heartbeat):
                self._count_empty()
            else:
                raise ProtocolError(f"it sent a {_kind(item)} in the middle of its session")


def _identity(context: Any) -> Identity | None:
    """Who the peer's certificate says it is."""
    uris = context.auth_context().get("x509_subject_alternative_name", ())
    return identity_of(uri.decode("utf-8", "replace") for uri in uris)


def _not_named(context: Any, name: str) -> str | None:
    """Why the peer may not speak in this name; None when it may."""
    identity = _identity(context)
    if identity is None:
        return _nobody(short_name(name))
    found = identity.why_not_named(name)
    return None if found is None else f"host {short_name(name)!r} is refused: {shortened(found)}"


def _nobody(host: str) -> str:
    return f"the certificate of host {host!r} names no member of a federation: issue one with `coterie certs issue`"


# The first byte of frames that may come before a hello is complete: hello, heartbeat, failure. No tensor is put together for a stranger.
_JOIN_FIELDS = session_pb2.JoinRequest.DESCRIPTOR.fields_by_name
_BEFORE_HELLO = tuple(bytes((_JOIN_FIELDS[name].number << 3 | 2,)) for name in ("hello", "heartbeat", "failure"))


def _kind(item: Any) -> str:
    return type(item.frame if isinstance(item, Received) else item).__name__.lower()
