"""Where the dashboard listens, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from coterie.errors import ConfigError, RunError
from coterie_deploy.read.shipped import RUNS
from coterie_deploy.terminal.signals import Stop, stopping_on_signals
from coterie_deploy.view.dashboard.app import application
from coterie_deploy.view.pages import vega_script
from coterie_server.transport.serve import is_loopback

_GRACE_S = 2  # for answers under way when it ends
_MOST_AT_ONCE = 100  # connections and answers


class _Server(uvicorn.Server):
    """Whose signals are handled here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


def serve_dashboard(top: Path, address: str, *, insecure: bool) -> int:
    """Serves until a signal comes; the exit code for it.

    ConfigError for a folder or an address that will not do, RunError for an address that cannot be listened on.
    """
    if not top.is_dir() and top != RUNS:
        raise ConfigError(f"{top} is no folder, want one with run folders in or below it")
    host, port = _host_and_port(address)
    if not insecure and not is_loopback(host):
        raise ConfigError(f"listening on {address} would let anyone who reaches it read the runs: allow it with --insecure")
    vega_script()  # now, and not while the first reader waits
    with _listening(address, host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        print(f"dashboard of {top} on http://{shown}:{listener.getsockname()[1]}/", flush=True)  # noqa: T201 - what the command says
        names = [host, socket.gethostname(), socket.getfqdn()] if insecure else []
        return asyncio.run(_serve(top, names, listener))


async def _serve(top: Path, names: list[str], listener: socket.socket) -> int:
    config = uvicorn.Config(
        application(top, names),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_AT_ONCE,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config)
    with stopping_on_signals() as stop:
        ending = asyncio.create_task(_end(server, stop))
        try:
            await server.serve([listener])
        finally:
            ending.cancel()
        return stop.exit_code


async def _end(server: uvicorn.Server, stop: Stop) -> None:
    await stop.wait()
    server.should_exit = True


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the address to listen on is {address!r}, want HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


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
