"""The web server of a role's metrics: /metrics for Prometheus, /healthz for whoever asks whether the role serves its run.

/healthz says what the gRPC health service says: SERVING (200) until the run is over, then NOT_SERVING (503). With TLS it speaks HTTPS, and
wants a certificate of the same authority, issued to a monitor or a coordinator; so no host reads the metrics. A server that a monitor has
watched stays for one more look when its run is over, so that the last bytes are seen too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import sqlite3
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from coterie.errors import ConfigError, CoterieError
from coterie.session.tls import MONITOR, Tls, identity_of
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import is_loopback

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_READERS = (MONITOR, "coordinator")  # roles of certificates
_MAX_CONNECTIONS = 16
_TIMEOUT_S = 10.0  # for a handshake, a request, and writing an answer
_LOOK_EVERY_S = 0.05
_SOONEST_S, _LATEST_S = 1.0, 30.0  # for the last look: a busy machine scrapes irregularly
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Metrics:
    """Where metrics are served, as the command line says; `stop` ends the wait for the last look."""

    address: str
    tls: Tls | None = None
    insecure: bool = False
    stop: asyncio.Event | None = None


@contextlib.asynccontextmanager
async def metrics_served(
    how: Metrics | None, hub: Hub, folder: Path, role: Literal["coordinator", "aggregator"], name: str
) -> AsyncIterator[str | None]:
    """Serves the metrics of a hub, whose run database is in the folder, while the block runs; yields their URL.

    ConfigError for a bad address, one that cannot be listened on, one beyond this machine with neither TLS nor `insecure`, and without
    prometheus-client.
    """
    if how is None:
        yield None
        return
    host, port = _place(how)
    try:
        from coterie_deploy.telemetry.metrics import Subject, registry_of  # noqa: PLC0415 - only where they are wanted
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ConfigError(
            "--metrics needs prometheus-client, which is not installed: install the extra, pip install 'coterie[metrics]'"
        ) from None
    server = _bound(how, host, port, registry_of(Subject(hub, folder, role, name)), lambda: not hub.is_over)
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_EVERY_S,), name="coterie-metrics", daemon=True)
    thread.start()
    try:
        yield server.url
        await _looked_at_once_more(server, how.stop)
    finally:
        await asyncio.to_thread(server.end)
        thread.join()


def _place(how: Metrics) -> tuple[str, int]:
    host, colon, port = how.address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the address of --metrics is {how.address!r}, want HOST:PORT")
    if how.tls is None and not how.insecure and not is_loopback(host):
        allow = "give certificates with --tls, or allow it with --insecure"
        raise ConfigError(f"metrics on {how.address} without TLS would be read by whoever reaches it: {allow}")
    return host, int(port)


def _bound(how: Metrics, host: str, port: int, registry: CollectorRegistry, is_serving: Callable[[], bool]) -> _Server:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _Server(family, place, registry, is_serving, None if how.tls is None else how.tls.https())
    except OSError as error:
        raise ConfigError(f"cannot listen on {how.address} for metrics: {error.strerror or error}") from None


async def _looked_at_once_more(server: _Server, stop: asyncio.Event | None) -> None:
    """Waits for the next scrape, where there were some and it is soon."""
    start, every_s = time.monotonic(), server.looked_every_s
    deadline = start + min(max(2 * every_s, _SOONEST_S), _LATEST_S) if every_s else start
    # One that is under way has perhaps read the books before their end.
    while server.looked_from < start and time.monotonic() < deadline and not (stop is not None and stop.is_set()):
        await asyncio.sleep(_LOOK_EVERY_S)


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection, all of which end with the server."""

    allow_reuse_address = True
    request_queue_size = _MAX_CONNECTIONS
    daemon_threads = False  # so that closing waits for them

    def __init__(
        self,
        family: int,
        place: Any,
        registry: CollectorRegistry,
        is_serving: Callable[[], bool],
        context: ssl.SSLContext | None,
    ) -> None:
        self.address_family = family
        self.registry, self.is_serving = registry, is_serving
        self.looked_from = 0.0  # when the last scrape began, 0 where there was none
        self.looked_every_s = 0.0  # how long after the one before, 0 where there was none
        self._context = context
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(place, _Handler)

    @property
    def url(self) -> str:
        """Of the metrics."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http{'s' if self._context is not None else ''}://{shown}:{port}/metrics"

    def looked(self, since: float) -> None:
        """The metrics of that moment, or a later one, have been given out."""
        with self._lock:
            self.looked_every_s = abs(since - self.looked_from) if self.looked_from else 0.0
            self.looked_from = max(since, self.looked_from)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - their names
        """Whether there is room for one more connection."""
        with self._lock:
            return len(self._open) < _MAX_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remembers the connection, so that the end does not wait for who says nothing."""
        request.settimeout(_TIMEOUT_S)
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread; a handshake takes as long as the other side likes, up to the timeout."""
        try:
            if self._context is None:
                _Handler(request, client_address, self)
                return
            # The descriptor stays that of `request`, which the end shuts down.
            with self._context.wrap_socket(request.dup(), server_side=True) as secured:
                if _may_read(secured):
                    _Handler(secured, client_address, self)
        finally:
            with self._lock:
                self._open.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks badly or goes away is told nothing, and nobody else is."""

    def end(self) -> None:
        """Stops listening, and ends what is under way."""
        self.shutdown()
        with self._lock:
            for request in self._open:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)
        self.server_close()


def _may_read(secured: ssl.SSLSocket) -> bool:
    names: Any = (secured.getpeercert() or {}).get("subjectAltName", ())
    identity = identity_of(value for kind, value in names if kind == "URI")
    return identity is not None and identity.role in _READERS


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server

    def do_GET(self) -> None:
        """/metrics or /healthz."""
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._metrics()
        elif path == "/healthz":
            is_serving = self.server.is_serving()
            self._answer(*((HTTPStatus.OK, "SERVING") if is_serving else (HTTPStatus.SERVICE_UNAVAILABLE, "NOT_SERVING")))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "want /metrics or /healthz")

    def _metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415 - this module is there without it

        since = time.monotonic()
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.registry)
        except (sqlite3.Error, CoterieError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"the run database cannot be read: {error}")
            return
        self._send(HTTPStatus.OK, content_type, body)
        self.server.looked(since)

    def _answer(self, status: HTTPStatus, text: str) -> None:
        self._send(status, _TEXT, f"{text}\n".encode())

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Of the server: nothing that helps whoever looks for old ones."""
        return "coterie"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - their names
        """Nothing: a scrape every few seconds is no news."""
