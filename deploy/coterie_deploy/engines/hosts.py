"""Client hosts and aggregators as processes of this machine: started, watched, and stopped with the run.

Each is a `coterie client` or a `coterie aggregator` in a session of its own, so that Ctrl-C reaches only the launcher. It ends when its
standard input is closed. A process that a signal killed is started again and resumes from its state; one that ends with an error ends the
run.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment
from coterie.findings import NO_RULE, Finding
from coterie.session.dial import FAILED
from coterie.session.failures import FAILURE, left_failure, sentence_of
from coterie.session.where import ADDRESS
from coterie_deploy.engines.interface import GRACE_S, LOG
from coterie_deploy.engines.loopback import with_words
from coterie_deploy.telemetry.logs import NOTE
from coterie_deploy.telemetry.spans import Telemetry
from coterie_server.record.rundb import OnEvent
from coterie_server.session.hub import Hub

MAX_RESTARTS = 3  # of one process
_MAX_NOTES = 1 << 20  # bytes of a log that are searched: notes come first
_TRACEBACK = "Traceback (most recent call last):"
_PATIENCE_S = 60.0


@dataclass(frozen=True, eq=False)
class MemberProcess:
    """The start of a client host, or of an aggregator above hosts. `folder` has its state and its log."""

    name: str
    folder: Path
    own: Sequence[str]  # options of the role
    hosts: Sequence[Self] | None = None  # below an aggregator

    @property
    def noun(self) -> str:
        return "host" if self.hosts is None else "aggregator"

    def command(self, server: str) -> list[str]:
        """The arguments of `coterie`. `server`: where its parent is."""
        where = ["--server", server, "--launched", "--name", self.name, "--state", os.fspath(self.folder)]
        return ["client" if self.hosts is None else "aggregator", *where, "--patience", f"{_PATIENCE_S:g}", *self.own]


@dataclass(frozen=True)
class Ended:
    """How one start of a member has ended; `lost` says what has ended it from outside, and then it is started again."""

    code: int
    lost: str = ""

    @classmethod
    def with_code(cls, code: int) -> Self:
        """Of a process, as Python counts: below 0 it is the signal."""
        return cls(code, f"was killed by {_signal(code)}" if code < 0 else "")


OnProcess = Callable[[str, int], None]  # receives name and process id of a member each time it is started
Once = Callable[[str, MemberProcess, asyncio.Event], Awaitable[Ended]]  # runs a member below a server once, until the event at the latest


def host_process(name: str, selection: Sequence[str], folder: Path, data: Path | None) -> MemberProcess:
    """A host; `selection` are the options that choose its users."""
    return MemberProcess(name, folder, [*selection, *([] if data is None else ["--data", os.fspath(data)])])


def aggregator_process(cluster: str, hosts: Sequence[MemberProcess], folder: Path, telemetry: Telemetry | None = None) -> MemberProcess:
    """The aggregator of a cluster."""
    own = ["--cluster", cluster, "--listen", "127.0.0.1:0", "--hosts", str(len(hosts))]
    return MemberProcess(cluster, folder, [*own, *([] if telemetry is None else telemetry.options)], hosts)


@contextlib.asynccontextmanager
async def host_processes(
    hub: Hub, server: str, processes: Sequence[MemberProcess], once: Once, *, keeps_logs: bool = True
) -> AsyncIterator[None]:
    """Runs these processes, and an aggregator's hosts, while the block runs. A process that goes wrong fails the hub.

    `once` is how one is run: `on_this_machine`, or that of an engine.

    An error that ends the block is raised with the errors that the processes have printed: whoever launches them owns their data.
    """
    closing = asyncio.Event()
    servers = dict.fromkeys(processes, server)
    servers |= {host: f"@{one.folder / ADDRESS}" for one in processes for host in one.hosts or ()}
    watches = [asyncio.create_task(_watch(hub, parent, process, closing, once)) for process, parent in servers.items()]
    starts = {process: _size(process.folder / LOG) for process in servers}
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


def _said(error: CoterieError, processes: Sequence[MemberProcess], starts: Mapping[MemberProcess, int], *, keeps_logs: bool) -> str:
    """The error that a process printed which `error` names, or a host of an aggregator that it names; "" for none."""
    named = [process for process in processes if repr(process.name) in error.public]
    own = [*_below(named), *(host for host in _below(processes) if repr(host.name) in error.public)]
    for process in (*own, *named):
        sentence = _sentence(process.folder / LOG, starts[process])
        if sentence and not sentence.startswith(FAILED):
            return f"{process.noun} {process.name!r}: {sentence}{f' ({process.folder / LOG})' if keeps_logs else ''}"
    return ""


def _below(processes: Sequence[MemberProcess]) -> list[MemberProcess]:
    """The hosts of aggregators."""
    return [host for process in processes for host in process.hosts or ()]


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


async def _watch(hub: Hub, server: str, host: MemberProcess, closing: asyncio.Event, once: Once) -> None:
    try:
        for _ in range(1 + MAX_RESTARTS):
            end = await once(server, host, closing)
            if closing.is_set() or hub.is_over:
                return
            if not end.lost:
                break
            hub.recorder.event("restart", f"{host.noun} {host.name!r} {end.lost} and is started again", host=host.name)
        hub.ended(host.name, _failure(host, end, hub.experiment))
    except CoterieError as error:
        hub.fail(error)
    except OSError as error:
        hub.fail(RunError(f"cannot start {host.noun} {host.name!r} in {host.folder}: {error.strerror or error}", Finding("R5")))


def on_this_machine(on_process: OnProcess | None = None) -> Once:
    """Processes of this machine."""

    async def once(server: str, host: MemberProcess, closing: asyncio.Event) -> Ended:
        return Ended.with_code(await _run_once(server, host, closing, on_process))

    return once


async def _run_once(server: str, host: MemberProcess, closing: asyncio.Event, on_process: OnProcess | None) -> int:
    """One process from its start to its end: its exit code."""
    host.folder.mkdir(parents=True, exist_ok=True)
    (host.folder / FAILURE).unlink(missing_ok=True)
    with (host.folder / LOG).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "coterie"),  # -P: files of the working directory must not hide our modules
            *host.command(server),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if on_process is not None:
        on_process(host.name, process.pid)
    tasks = [asyncio.create_task(process.wait()), asyncio.create_task(closing.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        code = await _stopped(process)
    return code


async def _stopped(process: asyncio.subprocess.Process) -> int:
    """Ends a process that still runs: closes its standard input, and later kills it."""
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
    """The error that a process printed last, or the last line of its traceback; "" if it ended well."""
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[start:].decode("utf-8", "replace").split("\n")
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        traceback = [line for line in lines if line.strip()] if _TRACEBACK in lines else []
        return (errors or traceback or [""])[-1].strip()
    return ""


def _failure(host: MemberProcess, end: Ended, experiment: Experiment) -> CoterieError:
    """Why the process is gone, as far as others may know; `_said` adds the rest for its launcher."""
    if end.lost:
        return RunError(f"{host.noun} {host.name!r} {end.lost} {1 + MAX_RESTARTS} times", Finding("R1"))
    finding = left_failure(host.folder) or NO_RULE
    family = ConfigError if end.code == ConfigError.exit_code else RunError
    sentence = f"{host.noun} {host.name!r} has ended with exit code {end.code}: {sentence_of(finding, experiment)}; its own log names it"
    return family(sentence, finding, below=Finding("R1"))


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# ---- notes of hosts about their data, each sentence once: several hosts may read the same file


class HostNotes:
    """Call it with each event of the run, which it passes on. It says the notes of a host that joins.

    A host in this process has its notes. One in a process of its own writes them to its log before it joins.
    """

    def __init__(self, say: Callable[[str], None] | None, further: OnEvent | None) -> None:
        self._say, self._further = say, further
        self._said: set[str] = set()
        self._logs: dict[str, list[Path]] = {}

    def of(self, sentences: Iterable[str]) -> None:
        """Says those that are new."""
        for sentence in sentences:
            if sentence not in self._said and self._say is not None:
                self._say(sentence)
            self._said.add(sentence)

    def watch(self, processes: Sequence[MemberProcess]) -> None:
        """The processes of the run; an aggregator joins when its hosts have."""
        self._logs |= {one.name: [host.folder / LOG for host in ([one] if one.hosts is None else one.hosts)] for one in processes}

    def __call__(self, kind: str, text: str, data: Mapping[str, Any]) -> None:
        """An event."""
        if kind == "join":
            for log in self._logs.pop(str(data.get("host")), ()):
                self.of(notes_in(log))
        if self._further is not None:
            self._further(kind, text, data)


def notes_in(log: Path) -> list[str]:
    """The notes in a host's log; none if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        lines = file.read(_MAX_NOTES).decode("utf-8", "replace").split("\n")
        return [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]
    return []
