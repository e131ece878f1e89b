"""`coterie` processes of a test, and what they leave in a run folder. Nothing here is tested itself."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.consenting import accepting

DEADLINE_S = 40.0


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

    def end(self) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
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
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if part in line:
                return line
        raise AssertionError(f"the server did not say {part!r}")


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


def wait_for(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, asked for until the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError("the deadline has passed")


def n_rounds(folder: Path) -> int:
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT COALESCE(MAX(round), 0) FROM figures WHERE stage = 1").fetchone()[0])
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
