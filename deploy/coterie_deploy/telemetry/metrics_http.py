"""The HTTP(S) server of metrics: `prometheus_client` answers, and this adds what it has not.

That is /healthz, the role in the reader's certificate, limits for those who say nothing, and when the metrics were last looked at.
"""

from __future__ import annotations

import socketserver
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler

from coterie.errors import CoterieError
from coterie.session.tls import MONITOR, identity_of

_READERS = (MONITOR, "coordinator")  # roles of certificates
_MAX_THREADS = 64  # of the whole process
_TIMEOUT_S = 10.0  # for a handshake, a request, and writing an answer


class Server(socketserver.ThreadingTCPServer):
    """A thread for each connection."""

    allow_reuse_address = True
    daemon_threads = True  # the end waits for nobody who says nothing

    def __init__(
        self, family: int, place: Any, registry: CollectorRegistry, is_serving: Callable[[], bool], context: ssl.SSLContext | None
    ) -> None:
        self.address_family = family
        self.registry, self.is_serving = registry, is_serving
        self.looked_from = 0.0  # when the last scrape began, 0 where there was none
        self.looked_every_s = 0.0  # how long after the one before, 0 where there was none
        self._context = context
        super().__init__(place, _Handler)

    def looked(self, since: float) -> None:
        """The metrics of that moment, or a later one, have been given out."""
        self.looked_every_s = abs(since - self.looked_from) if self.looked_from else 0.0
        self.looked_from = max(since, self.looked_from)

    def get_request(self) -> tuple[Any, Any]:
        """A connection; its handshake is made in its own thread."""
        request, address = super().get_request()
        request.settimeout(_TIMEOUT_S)
        if self._context is not None:
            request = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - their names
        """Whether there is room for one more thread."""
        return threading.active_count() < _MAX_THREADS

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread."""
        if self._context is not None:
            request.do_handshake()
            if not _may_read(request):
                return
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks badly or goes away is told nothing, and nobody else is."""


def _may_read(secured: ssl.SSLSocket) -> bool:
    names: Any = (secured.getpeercert() or {}).get("subjectAltName", ())
    identity = identity_of(value for kind, value in names if kind == "URI")
    return identity is not None and identity.role in _READERS


class _Handler(MetricsHandler):
    """One request."""

    server: Server

    @property
    def registry(self) -> CollectorRegistry:  # type: ignore[override]
        """Where the library looks for what it serves."""
        return self.server.registry

    def do_GET(self) -> None:  # noqa: N802 - their name
        """/metrics or /healthz."""
        path, since = urlsplit(self.path).path, time.monotonic()
        if path == "/healthz":
            is_serving = self.server.is_serving()
            self._say(*((HTTPStatus.OK, "SERVING") if is_serving else (HTTPStatus.SERVICE_UNAVAILABLE, "NOT_SERVING")))
        elif path != "/metrics":
            self._say(HTTPStatus.NOT_FOUND, "want /metrics or /healthz")
        else:
            try:
                super().do_GET()
            except (sqlite3.Error, CoterieError) as error:
                self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"the run database cannot be read: {error}")
            else:
                self.server.looked(since)

    def _say(self, status: HTTPStatus, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(f"{text}\n".encode())

    def version_string(self) -> str:
        """Of the server: nothing that helps whoever looks for old ones."""
        return "coterie"
