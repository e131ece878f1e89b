"""The dashboard's socket, and its end by a signal."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from coterie.errors import ConfigError, RunError
from coterie.text.addresses import host_and_port, is_loopback, with_port
from coterie_deploy.read.shipped import RUNS
from coterie_deploy.terminal.signals import stopping_on_signals
from coterie_deploy.view.dashboard.app import application
from coterie_deploy.view.pages import vega_script

_GRACE_S = 2  # for answers under way when it ends
_MOST_AT_ONCE = 100  # connections and answers


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none: signals are handled here."""
        yield


def serve_dashboard(top: Path, address: str, *, insecure: bool) -> int:
    """Serves until a signal comes; its exit code. ConfigError for a wrong folder or address, RunError if the address cannot be used."""
    if not top.is_dir() and top != RUNS:
        raise ConfigError(f"{top} is no folder, want one with run folders in or below it")
    host, port = host_and_port(address, "the address to listen on", least_port=0)
    if not insecure and not is_loopback(host):
        raise ConfigError(f"listening on {address} would let anyone who reaches it read the runs: allow it with --insecure")
    vega_script()  # now, and not while the first reader waits
    with _listening(address, host, port) as listener:
        print(f"dashboard of {top} on http://{with_port(host, listener.getsockname()[1])}/", flush=True)  # noqa: T201 - what the command says
        names = [host, socket.gethostname(), socket.getfqdn()] if insecure else []
        return asyncio.run(_serve(top, names, listener))


async def _serve(top: Path, names: list[str], listener: socket.socket) -> int:
    limits: dict[str, Any] = {"limit_concurrency": _MOST_AT_ONCE, "timeout_graceful_shutdown": _GRACE_S}
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "proxy_headers": False}
    server = _Server(uvicorn.Config(application(top, names), lifespan="off", **limits, **quiet))
    with stopping_on_signals() as stop:
        ending = asyncio.create_task(stop.wait())
        ending.add_done_callback(lambda _: setattr(server, "should_exit", True))
        try:
            await server.serve([listener])
        finally:
            ending.cancel()
        return stop.exit_code


@contextlib.contextmanager
def _listening(address: str, host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(where[:2], family=family)
    except OSError as error:
        why = os.strerror(errno.EADDRINUSE) if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise RunError(f"cannot listen on {address}: {why}") from None
    with listener:
        yield listener
