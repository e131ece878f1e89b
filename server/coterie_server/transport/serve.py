"""The parent's end of the wire: a gRPC server in front of a `Hub`.

It moves frames; the hub decides what they mean. Join frames are (de)serialised here and not by gRPC, so that a large tensor is cut into
chunks one at a time and never held twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coterie.errors import ConfigError
from coterie.session.dial import to_the_end
from coterie.session.failures import finding_in
from coterie.session.tls import Tls
from coterie.text.addresses import host_and_port, is_loopback
from coterie.v1 import session_pb2
from coterie.wire.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION
from coterie_server.session.hub import Hub
from coterie_server.session.refusal import MAX_REASON_CHARS, short_name
from coterie_server.transport.grpc_link import Context
from coterie_server.transport.host_session import HostSession, not_named
from coterie_server.transport.links import LoopClock, call, note_links, rule_of, scope_of
from coterie_server.transport.unknown_peers import MOST_UNKNOWN, UnaryLimits, UnknownPeers

SERVICE = "coterie.v1.FederationService"
TICK_S = 0.5
STOP_GRACE_S = 2.0
_SPARE_CONNECTIONS = 256  # besides two for each host, an old and a new one; beyond, gRPC closes connections at once
_SPARE_STREAMS = 64  # of one connection, which hosts of one process may share

# These belong to the options of `coterie.session.dial`. gRPC also pings to measure the bandwidth of large messages, and a server would end
# the connection after too many of these pings in the middle of a round, so the count is switched off.
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
    # Ends connections without a handshake in HTTP/2 (default: after 2 minutes) and without a stream (default: never).
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
        # A watcher that takes no answer would keep the health service, and so all others, waiting.
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
    more: Sequence[grpc.GenericRpcHandler] = (),
) -> AsyncIterator[Serving]:
    """Serves `hub` at HOST:PORT while the block runs, and `more` rpcs; streams still open at its end get UNAVAILABLE.

    With `tls` both sides show certificates, and a member's names its users. Raises ConfigError when the address is not a loopback address
    and there is neither `tls` nor `insecure`, and when the server cannot listen on it.
    """
    check_address(address, is_secure=tls is not None or insecure)
    if tls is None and not is_loopback(host_and_port(address, least_port=0)[0]):
        hub.recorder.event("insecure", plain_text(address))
    service = _Service(hub, experiment_json, wants_identity=tls is not None)
    health_service: Any = health.aio.HealthServicer()
    await health_service.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    limits = UnaryLimits(service.unknown, hub.rules.silence_s, lambda reason: hub.turned_away("", reason))
    n_connections, n_streams = 2 * hub.rules.hosts + _SPARE_CONNECTIONS, hub.rules.hosts + _SPARE_STREAMS
    most = (("grpc.max_allowed_incoming_connections", n_connections), ("grpc.max_concurrent_streams", n_streams))
    server = grpc.aio.server(options=(*OPTIONS, *most), interceptors=(limits,))
    server.add_generic_rpc_handlers((handlers(service.get_experiment, service.join), *more))
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    try:
        running = Serving(bound(server, address, tls), health_service)
        await server.start()
        ticking = asyncio.create_task(_tick(hub, running, service))
        try:
            yield running
        finally:
            ticking.cancel()
            await to_the_end(_stop(running, service, server))
    finally:
        await to_the_end(server.stop(None))  # a server that was never stopped keeps its port


async def _stop(running: Serving, service: _Service, server: grpc.aio.Server) -> None:
    await running.drain()
    await service.close()
    await server.stop(STOP_GRACE_S)


def handlers(get_experiment: Any, join: Any) -> grpc.GenericRpcHandler:
    """Handlers of the two rpcs; Join's frames stay bytes."""
    request, response = session_pb2.GetExperimentRequest, session_pb2.GetExperimentResponse
    rpcs: dict[str, Any] = {
        "GetExperiment": grpc.unary_unary_rpc_method_handler(
            get_experiment, request_deserializer=request.FromString, response_serializer=response.SerializeToString
        ),
        "Join": grpc.stream_stream_rpc_method_handler(join),
    }
    return grpc.method_handlers_generic_handler(SERVICE, rpcs)


def bound(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    """The port of HOST:PORT, where the server will listen. ConfigError if it cannot."""
    try:
        return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        raise ConfigError(f"cannot listen on {address}: {_why_not(address)}") from None


def check_address(address: str, *, is_secure: bool) -> None:
    """ConfigError unless it is HOST:PORT, on this machine or allowed to be elsewhere."""
    host, _ = host_and_port(address, "the address to listen on", least_port=0)
    if not is_secure and not is_loopback(host):
        cure = "give certificates with --tls, or allow it with --insecure"
        raise ConfigError(f"listening on {address} without TLS would let anyone join: {cure}")


def plain_text(address: str) -> str:
    """The warning about an address without TLS."""
    return f"listening on {address} without TLS: anyone who reaches it can join and read the models"


def _why_not(address: str) -> str:
    """The operating system's reason, which gRPC does not report."""
    host, port = host_and_port(address, least_port=0)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
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
        for session in service.sessions.values():
            session.note_held()
        hub.tick()
        for session in service.sessions.values():
            session.link.check()
        if hub.is_over and not is_drained:
            is_drained = True
            await running.drain()


class _Service:
    """The two rpcs."""

    def __init__(self, hub: Hub, experiment_json: str, *, wants_identity: bool) -> None:
        self._hub, self._wants_identity, self._rule = hub, wants_identity, rule_of(hub.rules.links, scope_of(hub))
        self._answer = session_pb2.GetExperimentResponse(run_id=hub.run_id, experiment_json=experiment_json)
        self.sessions: dict[asyncio.Task[Any], HostSession] = {}
        note_links(hub, self._rule)
        self.unknown = UnknownPeers(hub.rules.hosts + MOST_UNKNOWN)

    async def get_experiment(self, request: session_pb2.GetExperimentRequest, context: Any) -> session_pb2.GetExperimentResponse:
        if self._wants_identity and (why := not_named(context, request.host)) is not None:
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, request.host, why)
        if request.HasField("finding"):
            reason = f"host {short_name(request.host)!r} will not join: {finding_in(request.finding).sentence}"
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, request.host, reason)
        if request.protocol != PROTOCOL_VERSION:
            reason = f"host {short_name(request.host)!r} speaks protocol {request.protocol}, wanted {PROTOCOL_VERSION}"
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, request.host, reason)
        if (end := self._hub.state.finish) is not None:
            if end.finish.failed:
                await context.abort(grpc.StatusCode.ABORTED, f"run {self._hub.run_id} has ended")
            self._answer.outcome = end.finish.outcome
        if self._rule is not None:
            await call(self._rule, LoopClock(), request.ByteSize(), self._answer.ByteSize())
        return self._answer

    async def _refuse(self, context: Any, code: grpc.StatusCode, name: str, reason: str) -> None:
        self._hub.turned_away(name, reason)
        await context.abort(code, reason[:MAX_REASON_CHARS])

    async def join(self, _: Any, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs every rpc in a task
        session = HostSession(self._hub, context, self._rule, self.unknown, wants_identity=self._wants_identity)
        self.sessions[task] = session
        try:
            await session.run()
        finally:
            del self.sessions[task]

    async def close(self) -> None:
        """Ends all sessions and waits for their tasks, which gRPC itself does not wait for."""
        for session in self.sessions.values():
            session.link.close("UNAVAILABLE", "the parent is stopping")
        if self.sessions:
            await asyncio.wait(tuple(self.sessions), timeout=STOP_GRACE_S)
        await self.unknown.close(STOP_GRACE_S)
