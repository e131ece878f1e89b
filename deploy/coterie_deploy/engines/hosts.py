"""Client hosts and aggregators as processes of this machine: started, watched, and stopped with the run.

Each is a `coterie client` or a `coterie aggregator` in a session of its own, so that Ctrl-C reaches the launcher alone, with its standard
input as a lifeline. A process that was killed by a signal is started again and goes on from its state; one that says why it cannot go on
ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment
from coterie.findings import NO_RULE, Finding
from coterie.session.dial import FAILED
from coterie.session.failures import FAILURE, left_failure, sentence_of
from coterie_deploy.engines.loopback import with_words
from coterie_deploy.roles.aggregator import PORT
from coterie_deploy.telemetry.spans import Telemetry
from coterie_server.session.hub import Hub

MAX_RESTARTS = 3  # of one process
GRACE_S = 15.0  # for writing the state down when the run stops
LOG = "log.txt"
_TRACEBACK = "Traceback (most recent call last):"
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, eq=False)
class HostProcess:
    """What a host is started with; `folder` keeps its state and what it prints."""

    name: str
    selection: Sequence[str]  # options that choose its users
    folder: Path
    data: Path | None
    noun: ClassVar[str] = "host"

    def command(self, port: int) -> list[str]:
        """The arguments of `coterie`."""
        data = [] if self.data is None else ["--data", os.fspath(self.data)]
        return ["client", *_common(port, self.name, self.folder), *self.selection, *data]


@dataclass(frozen=True, eq=False)
class AggregatorProcess:
    """What an aggregator is started with."""

    name: str
    cluster: str
    hosts: Sequence[HostProcess]
    folder: Path
    telemetry: Telemetry | None = None
    noun: ClassVar[str] = "aggregator"

    def command(self, port: int) -> list[str]:
        """The arguments of `coterie`."""
        own = ["--cluster", self.cluster, "--listen", "127.0.0.1:0", "--hosts", str(len(self.hosts))]
        traced = [] if self.telemetry is None else self.telemetry.options
        return ["aggregator", *_common(port, self.name, self.folder), *own, *traced]


Launched = HostProcess | AggregatorProcess
OnProcess = Callable[[str, int], None]  # receives name and process id of a member each time it is started


def _common(port: int, name: str, folder: Path) -> list[str]:
    where = ["--server", f"127.0.0.1:{port}", "--launched", "--name", name]
    return [*where, "--state", os.fspath(folder), "--patience", f"{_PATIENCE_S:g}"]


@contextlib.asynccontextmanager
async def host_processes(
    hub: Hub, port: int, processes: Sequence[Launched], on_process: OnProcess | None = None, *, keeps_logs: bool = True
) -> AsyncIterator[None]:
    """Runs these processes, and an aggregator's hosts, while the block runs. What goes wrong with one of them fails the hub.

    An error that ends the block is raised with what the processes have said at their own ends: whoever launches them owns their data.
    """
    closing = asyncio.Event()
    watches = [asyncio.create_task(_watch(hub, port, process, closing, on_process)) for process in processes]
    aggregators = _aggregators(processes)
    watches += [asyncio.create_task(_watch_below(hub, aggregator, closing, on_process)) for aggregator in aggregators]
    starts = {process: _size(process.folder / LOG) for process in (*processes, *(host for one in aggregators for host in one.hosts))}
    error: CoterieError | None = None
    try:
        yield
    except CoterieError as caught:
        error = caught
        raise
    finally:
        closing.set()
        await asyncio.gather(*watches)
        if error is not None and (said := _said(error, processes, starts, keeps_logs=keeps_logs)):
            raise with_words(error, said) from error


def _said(error: CoterieError, processes: Sequence[Launched], starts: Mapping[Launched, int], *, keeps_logs: bool) -> str:
    """What those that the error names, or the hosts of an aggregator that it names, have said at their own ends; "" for nothing."""
    named = [process for process in processes if repr(process.name) in error.public]
    below = [host for one in _aggregators(processes) for host in one.hosts]
    own = [host for one in _aggregators(named) for host in one.hosts] + [host for host in below if repr(host.name) in error.public]
    said = [(process, _sentence(process.folder / LOG, starts[process])) for process in (*own, *named)]
    found = [(process, sentence) for process, sentence in said if sentence and not sentence.startswith(FAILED)]
    if not found:
        return ""
    process, sentence = found[0]
    return f"{process.noun} {process.name!r}: {sentence}{f' ({process.folder / LOG})' if keeps_logs else ''}"


def _aggregators(processes: Sequence[Launched]) -> list[AggregatorProcess]:
    return [process for process in processes if isinstance(process, AggregatorProcess)]


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


async def _watch_below(hub: Hub, aggregator: AggregatorProcess, closing: asyncio.Event, on_process: OnProcess | None) -> None:
    """Starts the aggregator's hosts when it is known where it listens. (If it never listens, that is what fails the hub.)"""
    port_file = aggregator.folder / PORT
    with contextlib.suppress(OSError):  # starting the aggregator there says why
        port_file.unlink(missing_ok=True)
    while not closing.is_set() and not hub.is_over:
        with contextlib.suppress(OSError, ValueError):
            port = int(port_file.read_text(encoding="utf-8"))
            await asyncio.gather(*(_watch(hub, port, host, closing, on_process) for host in aggregator.hosts))
            return
        await asyncio.sleep(_LOOK_EVERY_S)


async def _watch(hub: Hub, port: int, host: Launched, closing: asyncio.Event, on_process: OnProcess | None) -> None:
    try:
        for _ in range(1 + MAX_RESTARTS):
            code = await _run_once(port, host, closing, on_process)
            if closing.is_set() or hub.is_over:
                return
            if code >= 0:
                break
            hub.recorder.event("restart", f"{host.noun} {host.name!r} was killed by {_signal(code)} and is started again", host=host.name)
        hub.ended(host.name, _failure(host, code, hub.experiment))
    except OSError as error:
        hub.fail(RunError(f"cannot start {host.noun} {host.name!r} in {host.folder}: {error.strerror or error}", Finding("R5")))


async def _run_once(port: int, host: Launched, closing: asyncio.Event, on_process: OnProcess | None) -> int:
    """One process from its start to its end: its exit code."""
    host.folder.mkdir(parents=True, exist_ok=True)
    (host.folder / FAILURE).unlink(missing_ok=True)
    with (host.folder / LOG).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "coterie"),  # -P: the working directory is not to hide our modules
            *host.command(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if on_process is not None:
        on_process(host.name, process.pid)
    try:
        await _ended_or_closing(process, closing)
    finally:
        code = await _stopped(process)
    return code


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
    """The error that a process printed last; of a mistake of ours, the last line of its traceback. "" where it has ended well."""
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[start:].decode("utf-8", "replace").split("\n")
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        traceback = [line for line in lines if line.strip()] if _TRACEBACK in lines else []
        return (errors or traceback or [""])[-1].strip()
    return ""


def _failure(host: Launched, code: int, experiment: Experiment) -> CoterieError:
    """Why the process is gone, as far as others may know; `_said` adds the rest for whoever has launched it."""
    if code < 0:
        return RunError(f"{host.noun} {host.name!r} was killed by {_signal(code)} {1 + MAX_RESTARTS} times", Finding("R1"))
    finding = left_failure(host.folder) or NO_RULE
    family = ConfigError if code == ConfigError.exit_code else RunError
    sentence = f"{host.noun} {host.name!r} has ended with exit code {code}: {sentence_of(finding, experiment)}; its own log names it"
    return family(sentence, finding, below=Finding("R1"))


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
