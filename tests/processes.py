"""A coordinator, aggregators and client hosts as real processes, each of which can be killed and started again.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.consenting import accepting
from tests.two_tier import free_port

COTERIE = [sys.executable, "-m", "coterie"]
DEADLINE_S = 120.0
STILL_S = 3.0
SERVER = "coordinator"
EXPERIMENT = "experiment.yaml"


class Processes:
    """One run by the commands of its roles: SERVER, clusters for aggregators, the names of hosts."""

    def __init__(self, folder: Path, content: Mapping[str, Any], run: Path, commands: Mapping[str, Sequence[str]]) -> None:
        self.folder, self.run, self.commands = folder, run, dict(commands)
        (folder / EXPERIMENT).write_text(yaml.safe_dump(dict(content)))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in self.commands:
            self.start(name)

    @property
    def states(self) -> dict[str, Path]:
        """The state folders of the members."""
        return {name: Path(command[-1]) for name, command in self.commands.items() if name != SERVER}

    def start(self, name: str, *more: str) -> None:
        """Starts a role."""
        with (self.folder / f"{name}.log").open("ab") as file:
            command = [*COTERIE, *accepting(self.commands[name]), *more]
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, stdout=file, stderr=file)

    def start_again(self, *names: str, option: str = "--resume") -> None:
        """Starts roles that have ended, the coordinator with this option."""
        for name in names:
            self.start(name, *((option,) if name == SERVER else ()))

    def kill(self, *names: str) -> None:
        """Roles are gone at once, and started again."""
        for name in names:
            self.shoot(name)
        self.start_again(*names)

    def shoot(self, name: str) -> None:
        """A role is gone at once."""
        assert self.processes[name].poll() is None, f"{name} is to be killed, but has ended\n{self.logs()}"
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(10)

    def round(self, stage: int) -> int:
        """The newest round of a stage that the run's database knows; the database is readable all the time."""
        path = self.run / "run.db"
        if path.exists():
            with (
                contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection,
                contextlib.suppress(sqlite3.Error),
            ):
                return int(connection.execute("SELECT coalesce(max(round), 0) FROM ledger WHERE stage = ?", (stage,)).fetchone()[0])
        return 0

    def wait_for_round(self, wanted: int, stage: int = 0) -> None:
        """Until that round is in the database."""
        deadline = time.monotonic() + DEADLINE_S
        while self.round(stage) < wanted and self.processes[SERVER].poll() is None:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def wait_for_standstill(self, stage: int = 0) -> None:
        """Until no round has ended for STILL_S: somebody who was asked does not answer."""
        deadline, newest, since = time.monotonic() + DEADLINE_S, -1, time.monotonic()
        while time.monotonic() - since < STILL_S:
            assert time.monotonic() < deadline, self.logs()
            if (known := self.round(stage)) != newest:
                newest, since = known, time.monotonic()
            time.sleep(0.02)

    def ends(self, name: str, code: int, seconds: float = DEADLINE_S) -> str:
        """Waits for a role, which must end with this exit code; what it printed."""
        assert self.processes[name].wait(seconds) == code, self.logs()
        return (self.folder / f"{name}.log").read_text()

    def end(self) -> None:
        """Waits for all, who must end well."""
        for name in self.processes:
            self.ends(name, 0)

    def logs(self) -> str:
        """The end of what each printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Of the run's database."""
        with contextlib.closing(sqlite3.connect(self.run / "run.db")) as connection:
            return connection.execute(sql).fetchall()


@contextlib.contextmanager
def processes(
    folder: Path,
    content: Mapping[str, Any],
    *,
    hosts: Mapping[str, str] | None = None,
    clusters: Sequence[str] = (),
    places: Mapping[str, Path] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Processes]:
    """The roles of a run while the block runs, each started by hand.

    `hosts` are names and selections of users of a flat run; `clusters` are the known clusters of one with two tiers, with a host each. What
    a role writes is where `places` says, by default in `folder`; `options` are more of the coordinator's.
    """
    where = {**dict.fromkeys([SERVER, *(hosts or ()), *clusters], folder), **(places or {})}
    address, run = f"127.0.0.1:{free_port()}", where[SERVER] / "run"
    commands = {SERVER: ["server", EXPERIMENT, "--listen", address, "--output", str(run), "--quiet", *options]}
    for name, users in (hosts or {}).items():
        commands[name] = ["client", "--server", address, "--name", name, "--users", users, "--state", str(where[name] / f"state-{name}")]
    for cluster in clusters:
        below, host = f"127.0.0.1:{free_port()}", f"of-{cluster}"
        states = str(where[cluster] / f"state-{cluster}"), str(folder / f"state-{host}")
        commands[cluster] = [
            "aggregator",
            "--server",
            address,
            "--cluster",
            cluster,
            "--listen",
            below,
            "--hosts",
            "1",
            "--state",
            states[0],
        ]
        commands[host] = ["client", "--server", below, "--name", host, "--cluster", cluster, "--state", states[1]]
    with _ended(Processes(folder, content, run, commands)) as started:
        yield started


@contextlib.contextmanager
def launched(folder: Path, content: Mapping[str, Any], run: Path) -> Iterator[Processes]:
    """`coterie run` while the block runs: the only role, which starts its hosts itself."""
    with _ended(Processes(folder, content, run, {SERVER: ["run", EXPERIMENT, "--output", str(run), "--quiet"]})) as started:
        yield started


@contextlib.contextmanager
def _ended(started: Processes) -> Iterator[Processes]:
    try:
        yield started
    finally:
        for process in started.processes.values():
            process.kill()
            process.wait(10)


def arrays_of(folder: Path, stage: str) -> dict[str, np.ndarray]:
    """What a finished run has left of a stage."""
    with np.load(folder / "models" / f"{stage}.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}
