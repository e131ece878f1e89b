"""Client hosts as processes of this machine: started, watched, and stopped with the run.

Each is a `coterie client` in a session of its own, so that Ctrl-C reaches the launcher alone, with its standard input as a lifeline. A
process that was killed by a signal is started again and goes on from its state; one that says why it cannot go on ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError, CoterieError, RunError
from coterie_server.hub import Hub

MAX_RESTARTS = 3  # of one host
GRACE_S = 15.0  # for writing the state down when the run stops
LOG = "log.txt"
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class HostProcess:
    """What a host is started with; `folder` keeps its state and what it prints."""

    name: str
    users: str  # a selection
    folder: Path
    data: Path | None


@contextlib.asynccontextmanager
async def host_processes(hub: Hub, port: int, hosts: Sequence[HostProcess]) -> AsyncIterator[None]:
    """Runs these hosts while the block runs. What goes wrong with one of them fails the hub."""
    closing = asyncio.Event()
    watches = [asyncio.create_task(_watch(hub, port, host, closing)) for host in hosts]
    try:
        yield
    finally:
        closing.set()
        await asyncio.gather(*watches)


async def _watch(hub: Hub, port: int, host: HostProcess, closing: asyncio.Event) -> None:
    try:
        for _ in range(1 + MAX_RESTARTS):
            code, sentence = await _run_once(port, host, closing)
            if closing.is_set() or hub.is_over:
                return
            if code >= 0:
                break
            hub.recorder.event("restart", f"host {host.name!r} was killed by {_signal(code)} and is started again", host=host.name)
        hub.fail(_failure(host, code, sentence))
    except OSError as error:
        hub.fail(RunError(f"cannot start host {host.name!r} in {host.folder}: {error.strerror or error}"))


async def _run_once(port: int, host: HostProcess, closing: asyncio.Event) -> tuple[int, str]:
    """One process from its start to its end: exit code, and the sentence it left, if any."""
    host.folder.mkdir(parents=True, exist_ok=True)
    path = host.folder / LOG
    with path.open("ab") as log:
        start = log.tell()
        process = await asyncio.create_subprocess_exec(
            *_command(port, host),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await _ended_or_closing(process, closing)
    finally:
        code = await _stopped(process)
    return code, _sentence(path, start)


def _command(port: int, host: HostProcess) -> list[str]:
    """-P: the working directory is not to hide our modules; `coterie` itself appends it to the path."""
    command = [sys.executable, "-P", "-m", "coterie_deploy", "client", "--server", f"127.0.0.1:{port}", "--launched"]
    command += ["--name", host.name, "--users", host.users, "--state", os.fspath(host.folder), "--patience", f"{_PATIENCE_S:g}"]
    return command if host.data is None else [*command, "--data", os.fspath(host.data)]


async def _ended_or_closing(process: asyncio.subprocess.Process, closing: asyncio.Event) -> None:
    tasks = [asyncio.create_task(process.wait()), asyncio.create_task(closing.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stopped(process: asyncio.subprocess.Process) -> int:
    """Ends a process that still runs: its lifeline first, then by force."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(GRACE_S):
            return await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


def _sentence(log: Path, start: int) -> str:
    """The error that a process printed last; of a mistake of ours, the last line of its traceback."""
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[start:].decode("utf-8", "replace").split("\n")
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or [line for line in lines if line.strip()] or [""])[-1].strip()
    return ""


def _failure(host: HostProcess, code: int, sentence: str) -> CoterieError:
    if code < 0:
        return RunError(f"host {host.name!r} was killed by {_signal(code)} {1 + MAX_RESTARTS} times")
    if code == ConfigError.exit_code:
        return ConfigError(f"host {host.name!r} has ended: {sentence}")
    return RunError(f"host {host.name!r} has ended with exit code {code}: {sentence or f'see {host.folder / LOG}'}")


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
