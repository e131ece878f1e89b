"""Whether a server serves, or a client is alive: `coterie health` for people, and the age of a file for probes of containers.

A probe that starts Python costs as much as a small run. So a member touches a file while its event loop turns, and `sh` tests its age.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.errors import ConfigError, RunError
from coterie.record.files import private_folder
from coterie.session.dial import OPTIONS, SERVICE
from coterie.session.probe import mismatch, unreachable
from coterie.session.tls import Tls
from coterie.text.addresses import host_and_port

ALIVE = "alive"  # in a client's state folder; its time is that of the last turn of the client's event loop
ALIVE_FILE = "COTERIE_ALIVE"  # in the environment: one more such file, of a server that listens too
BEAT_S = 2.0
OLDEST_S = 20.0


def check_server(address: str, tls: Tls | None, timeout_s: float) -> str:
    """The state that the server at HOST:PORT reports.

    RunError unless it serves: it does not answer, or its run has ended. ConfigError when the address is none.
    """
    host_and_port(address)
    channel = grpc.insecure_channel(address, OPTIONS) if tls is None else grpc.secure_channel(address, tls.channel_credentials(), OPTIONS)
    with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            reason = asyncio.run(_why_not(address, tls)) or code
            raise RunError(f"no answer from {address} within {timeout_s:g} s: {reason}") from None
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise RunError(f"the server at {address} is {name}")
    return name


async def _why_not(address: str, tls: Tls | None) -> str:
    return await mismatch(address, tls) or await unreachable(address)


def check_client(state: Path) -> str:
    """RunError unless the client with this state folder was alive a moment ago."""
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
async def beating(state: Path | None = None) -> AsyncIterator[None]:
    """Touches a file in the state folder, and the one of the environment, while the block runs and the event loop turns.

    Ignores a folder that cannot be written.
    """
    named = os.environ.get(ALIVE_FILE)
    files = [*([] if state is None else [state / ALIVE]), *([Path(named)] if named else [])]

    async def beat() -> None:
        while True:
            for file in files:
                with contextlib.suppress(OSError):
                    if file.parent == state:
                        private_folder(state)
                    file.touch()
            await asyncio.sleep(BEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
