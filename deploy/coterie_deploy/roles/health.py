"""`coterie health`: is the server at an address serving, or is the client host of a state folder alive? For probes of containers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.errors import ConfigError, RunError
from coterie.session.dial import OPTIONS, SERVICE
from coterie.session.probe import mismatch
from coterie.session.tls import Tls

ALIVE = "alive"  # in a client's state folder; its time is that of the last turn of the client's event loop
BEAT_S = 2.0
OLDEST_S = 20.0
_PORT = re.compile(r"[0-9]{1,5}")


def check_server(address: str, tls: Tls | None, timeout_s: float) -> str:
    """What the server at HOST:PORT says of itself.

    RunError unless it serves: it does not answer, or its run has ended. ConfigError when the address is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise ConfigError(f"the address is {address!r}, want HOST:PORT")
    channel = grpc.insecure_channel(address, OPTIONS) if tls is None else grpc.secure_channel(address, tls.channel_credentials(), OPTIONS)
    with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            reason = asyncio.run(mismatch(address, tls)) or code
            raise RunError(f"no answer from {address} within {timeout_s:g} s ({reason})") from None
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise RunError(f"the server at {address} is {name}")
    return name


def check_client(state: Path) -> str:
    """RunError unless the client with this state folder has been alive a moment ago."""
    try:
        age_s = time.time() - (state / ALIVE).stat().st_mtime
    except OSError as error:
        raise RunError(f"no client is alive with the state folder {state}: {error.strerror or error}") from None
    if age_s > OLDEST_S:
        raise RunError(f"the client with the state folder {state} was alive {age_s:.0f} s ago, wanted at most {OLDEST_S:g} s")
    return "ALIVE"


def check(address: str | None, state: Path | None, tls: Tls | None, timeout_s: float) -> str:
    """The check of a server or of a client; want one of the two."""
    if (address is None) == (state is None):
        raise ConfigError("want HOST:PORT of a server, or --state with the folder of a client, and not both")
    return check_client(state) if state is not None else check_server(str(address), tls, timeout_s)


@contextlib.asynccontextmanager
async def beating(state: Path) -> AsyncIterator[None]:
    """While the block runs, and the event loop turns, the state folder says so. A folder that cannot be written says nothing."""

    async def beat() -> None:
        while True:
            with contextlib.suppress(OSError):
                state.mkdir(parents=True, exist_ok=True)
                (state / ALIVE).touch()
            await asyncio.sleep(BEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(OSError):
            (state / ALIVE).unlink(missing_ok=True)
