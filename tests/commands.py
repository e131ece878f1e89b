"""`coterie` processes of a test, and what they leave in a run folder. Nothing here is tested itself."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.consenting import accepting

DEADLINE_S = 120.0
# Enough rounds to be disturbed: there is no residual that ends it earlier.
LONG = """
name: long
seed: 3
data: {source: ellipses, users_per_cluster: 3, test_per_class: 20}
problem: {loss: squared_hinge, l2: 0.001}
method: {name: pdmm, penalty: 0.07}
stop: {rounds: 2500, residual: null}
snapshots: {every_rounds: 100}
"""


class Command:
    """A `coterie` process of this test, in a folder of its own.

    What is to hold in it before it starts is up to a `launcher`, words of a command that ends with executing what follows them. With
    `preexec_fn` the process would be forked from this one, whose threads of gRPC abort the child now and then.
    """

    def __init__(self, here: Path, *arguments: str, launcher: Sequence[str] = ()) -> None:
        environment = {**os.environ, "COLUMNS": "60"}
        environment.pop("GRPC_VERBOSITY", None)  # a command that ran in this process has set it for itself
        self.process = subprocess.Popen(
            [*launcher, sys.executable, "-P", "-m", "coterie", *accepting(arguments)],
            cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self, seconds: float = DEADLINE_S) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        out, err = self.process.communicate(timeout=seconds)
        assert "Traceback" not in err
        return self.process.returncode, out, err

    def fails(self, code: int) -> str:
        """Its last line, the sentence."""
        found, _, err = self.end()
        last = err.strip().splitlines()[-1]
        assert (found, last[:7]) == (code, "error: "), err
        return last

    def address(self) -> str:
        """Where a server says that it listens."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if match := re.search(r"listens on (\S+)", line):
                return match[1]
        raise AssertionError("the server did not start")

    def waits(self) -> None:
        """Until a client has said that there is no server yet: once there is one, it joins without having to start first."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("waiting for a server at ")

    def line(self, part: str) -> str:
        """The next line of a server's progress with this part."""
        return _line(self.process.stderr, part)

    def said(self, part: str) -> str:
        """The next line of a host's output with this part."""
        return _line(self.process.stdout, part)


def _line(stream: Iterable[str] | None, part: str) -> str:
    assert stream is not None
    for line in stream:
        if part in line:
            return line
    raise AssertionError(f"the process has ended, and did not say {part!r}")


@contextlib.contextmanager
def commands_in(folder: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands in a folder; kills what a failed test leaves running."""
    commands: list[Command] = []

    def run(*arguments: str, launcher: Sequence[str] = ()) -> Command:
        commands.append(Command(folder, *arguments, launcher=launcher))
        return commands[-1]

    try:
        yield run
    finally:
        for command in commands:
            if command.process.poll() is None:
                command.process.kill()
            command.process.communicate()


def in_one_process(folder: Path, *experiment: str) -> Path:
    """The run folder of an experiment (a file or a shipped name, and options) that is run undisturbed in one process."""
    code, _, err = Command(folder, "run", *experiment, "--transport", "loopback", "--output", "one", "--quiet").end(120.0)
    assert code == 0, err
    return folder / "one"


def wait_for(condition: Callable[[], Any], what: str | Callable[[], str] = "a condition", seconds: float = DEADLINE_S) -> Any:
    """The first true value of `condition`. At the deadline an error says what was waited for; a function is called only then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")


def n_rounds(folder: Path, stage: int = 1) -> int:
    """How many rounds of a stage have ended; 0 when the run cannot be read yet."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT COALESCE(MAX(round), 0) FROM figures WHERE stage = ?", (stage,)).fetchone()[0])
    return 0


def events(folder: Path, kind: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM events WHERE kind = ?", (kind,))]


def models(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in (folder / "models").glob("*.npz"):
        with np.load(path) as arrays:
            found[path.stem] = b"".join(arrays[name].tobytes() for name in sorted(arrays.files))
    return found
