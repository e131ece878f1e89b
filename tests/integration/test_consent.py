"""A coordinator that asks for something else than a host's owner has accepted is refused: in the next run, on a resume, and by a host that
has stayed. Real processes, and a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.experiment.config import experiment_from
from coterie.experiment.consent import consent_hash
from tests.commands import DEADLINE_S, Command, commands_in, n_rounds, wait_for
from tests.slow import slow_after
from tests.two_tier import free_port

ROWS = "school,region,ses,hours,score\n" + "".join(f"s{i % 6},{i % 2},{i * 7 % 11},{i * 5 % 13},{i * 3 % 17}\n" for i in range(60))
DATA = {"source": "csv", "path": "rows.csv", "user_column": "school", "target_column": "score", "feature_columns": ["ses", "hours"]}
SMALL: dict[str, Any] = {
    "name": "small",
    "data": DATA,
    "problem": {"loss": "least_squares", "l2": 0.1},
    "method": {"name": "local"},
    "federation": {"join_timeout_s": 60, "absence_timeout_s": 20},
}
LONG: dict[str, Any] = {**SMALL, "method": {"name": "pdmm", "penalty": 0.01}, "stop": {"rounds": 1_000_000, "residual": 1e-300}}
CHANGES: dict[str, Mapping[str, Any]] = {
    "data.feature_columns": {"data": {**DATA, "feature_columns": ["ses", "region"]}},
    "method.name": {"method": {"name": "global"}},
    "references": {"references": ["global"]},
    "code": {"problem": {"loss": "own:huber"}},
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    with commands_in(tmp_path) as run:
        yield run


def hash_of(content: Mapping[str, Any]) -> str:
    return consent_hash(experiment_from(content))


def client(start: Callable[..., Command], address: str, *more: str) -> Command:
    return start("client", "--server", address, "--name", "a", *more)


@pytest.mark.parametrize("key", slow_after(1, CHANGES))
def test_a_changed_experiment_is_refused_by_a_host_that_accepted_the_earlier_one(
    key: str, start: Callable[..., Command], tmp_path: Path
) -> None:
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "one")
    host = client(start, server.address(), "--accept", hash_of(SMALL))
    assert (server.end()[0], host.end()[0]) == (0, 0)

    changed = {**SMALL, **CHANGES[key]}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(changed))
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "two")
    refused = start("client", "--server", server.address(), "--name", "a", "--accept", hash_of(SMALL))
    sentence = refused.fails(2)
    assert key in sentence
    assert hash_of(changed) in sentence


def without_terminal(folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "coterie", "client", "--server", address, "--name", "a"]
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_a_pinned_host_goes_on_without_a_word_and_refuses_a_change(start: Callable[..., Command], tmp_path: Path) -> None:
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "one", "--seed", "1")
    client(start, server.address(), "--accept", hash_of(SMALL)).end()
    server.end()
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "two", "--seed", "2")
    assert without_terminal(tmp_path, server.address()).returncode == 0
    assert server.end()[0] == 0
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "three", "--set", "method.name=global")
    done = without_terminal(tmp_path, server.address())
    assert done.returncode == 2
    assert "method.name changed" in done.stderr


def test_nobody_to_ask_is_a_refusal_before_any_data_is_opened(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").unlink()
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0")
    done = without_terminal(tmp_path, server.address())
    assert done.returncode == 2
    assert f"start with --accept {hash_of(SMALL)}" in done.stderr
    assert "rows.csv" not in done.stderr


def test_on_a_resume_a_started_host_and_one_that_stayed_refuse_what_has_changed(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(yaml.safe_dump({**LONG, "federation": {**LONG["federation"], "hosts": 2}}))
    address = f"127.0.0.1:{free_port()}"
    serve = ("server", "long.yaml", "--listen", address, "--output", "long")
    server = start(*serve)
    accepts = ("--accept", hash_of(LONG))
    stays = start("client", "--server", address, "--name", "stays", "--users", "s0..s2", *accepts)
    leaves = start("client", "--server", address, "--name", "leaves", "--users", "s3..s5", *accepts)
    wait_for(lambda: n_rounds(tmp_path / "long") >= 3)
    leaves.process.send_signal(signal.SIGTERM)
    assert leaves.end()[0] == 143
    server.process.kill()
    server.process.wait()

    frozen = tmp_path / "long" / "experiment.json"
    content = json.loads(frozen.read_text())
    content["references"] = ["global"]
    frozen.write_text(json.dumps(content))
    server = start("server", "long", "--listen", address, "--output", "long", "--resume")
    for host in (stays, start("client", "--server", address, "--name", "leaves", "--users", "s3..s5", *accepts)):
        assert "references changed" in host.fails(2)


# ---- on a terminal


class OnTerminal:
    """A client on a pseudo-terminal of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        command = [sys.executable, "-P", "-m", "coterie", "client", *arguments]
        self.process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.screen = ""

    def until(self, part: str) -> str:
        """What has been printed, once it has this part."""
        deadline = time.monotonic() + DEADLINE_S
        while part not in self.screen:
            assert time.monotonic() < deadline, self.screen
            if select.select([self.ours], [], [], 0.1)[0]:
                self.screen += self._read()
            elif self.process.poll() is not None:
                raise AssertionError(self.screen)
        return self.screen

    def types(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def end(self) -> int:
        """Its exit code, once all that it prints is read."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.ours], [], [], 0.05)[0]:
                self.screen += self._read()
        while select.select([self.ours], [], [], 0.05)[0] and (more := self._read()):
            self.screen += more
        return self.process.wait(1)

    def _read(self) -> str:
        try:
            return os.read(self.ours, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return ""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Callable[..., OnTerminal]]:
    started: list[OnTerminal] = []

    def run(*arguments: str) -> OnTerminal:
        started.append(OnTerminal(tmp_path, *arguments))
        return started[-1]

    yield run
    for one in started:
        one.close()


def test_an_owner_is_asked_once_and_a_change_is_refused(
    start: Callable[..., Command], on_terminal: Callable[..., OnTerminal], tmp_path: Path
) -> None:
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "one")
    host = on_terminal("--server", server.address(), "--name", "a")
    page = host.until("[y/N]")
    for part in (hash_of(SMALL), "users: school", "features: ses, hours", "method: local", "the coordinator sees the final model"):
        assert part in page
    host.types("y\n")
    assert host.end() == 0, host.screen
    assert server.end()[0] == 0

    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "two")
    again = on_terminal("--server", server.address(), "--name", "a")
    assert again.end() == 0
    assert "[y/N]" not in again.screen
    server.end()

    server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "three", "--set", "data.user_column=region")
    changed = on_terminal("--server", server.address(), "--name", "a")
    assert changed.end() == 2
    assert "[y/N]" not in changed.screen
    assert "data.user_column changed" in changed.screen


def test_an_owner_who_says_no_is_not_asked_for_data(
    start: Callable[..., Command], on_terminal: Callable[..., OnTerminal], tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").unlink()
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0")
    host = on_terminal("--server", server.address(), "--name", "a")
    host.until("[y/N]")
    host.types("\n")
    assert host.end() == 2
    assert "has not accepted" in host.screen
    assert "rows.csv" not in host.screen.partition("[y/N]")[2]


def test_a_signal_ends_the_question(start: Callable[..., Command], on_terminal: Callable[..., OnTerminal]) -> None:
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0")
    host = on_terminal("--server", server.address(), "--name", "a")
    host.until("[y/N]")
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 143
