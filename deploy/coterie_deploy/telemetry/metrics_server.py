"""A role's metrics over HTTP: /metrics for Prometheus, and /healthz for probes.

/healthz answers like the gRPC health service: SERVING (200) until the run is over, then NOT_SERVING (503). With TLS, clients need a
certificate of the same authority for a monitor or a coordinator, so no host can read the metrics. If there were scrapes, the server waits
for one more after the run, so that the last bytes are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coterie.errors import ConfigError
from coterie.extras import extra
from coterie.session.tls import Tls
from coterie.text.addresses import host_and_port, is_loopback, with_port
from coterie_server.session.hub import Hub

if TYPE_CHECKING:
    from coterie_deploy.telemetry.metrics import Server

_LOOK_EVERY_S = 0.05
_SOONEST_S, _LATEST_S = 1.0, 30.0  # wait for the last scrape: a busy machine scrapes irregularly


@dataclass(frozen=True)
class Metrics:
    """Where metrics are served; `stop` ends the wait for the last scrape."""

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
    with extra("metrics", "prometheus_client", "--metrics needs prometheus-client"):
        from coterie_deploy.telemetry.metrics import Server, Subject, registry_of  # noqa: PLC0415
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        registry, context = registry_of(Subject(hub, folder, role, name)), None if how.tls is None else how.tls.https()
        server = Server(family, place, registry, lambda: not hub.is_over, context)
    except OSError as error:
        raise ConfigError(f"cannot listen on {how.address} for metrics: {error.strerror or error}") from None
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_EVERY_S,), name="coterie-metrics", daemon=True)
    thread.start()
    try:
        yield f"http{'' if how.tls is None else 's'}://{with_port(host, server.server_address[1])}/metrics"
        await _looked_at_once_more(server, how.stop)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def _place(how: Metrics) -> tuple[str, int]:
    host, port = host_and_port(how.address, "the address of --metrics", least_port=0)
    if how.tls is None and not how.insecure and not is_loopback(host):
        allow = "give certificates with --tls, or allow it with --insecure"
        raise ConfigError(f"metrics on {how.address} without TLS would be read by whoever reaches it: {allow}")
    return host, port


async def _looked_at_once_more(server: Server, stop: asyncio.Event | None) -> None:
    """Waits for one more scrape, if there were some and the next one is soon."""
    start, every_s = time.monotonic(), server.looked_every_s
    deadline = start + min(max(2 * every_s, _SOONEST_S), _LATEST_S) if every_s else start
    # A scrape under way may have read the books before their end.
    while server.looked_from < start and time.monotonic() < deadline and not (stop is not None and stop.is_set()):
        await asyncio.sleep(_LOOK_EVERY_S)
