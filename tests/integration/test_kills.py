"""Real processes, real SIGKILL: a client host and then the coordinator die at random rounds, and the run ends with the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import yaml

from coterie_deploy import run
from coterie_deploy.user_models import finished_run, models_of
from tests.networks import CLASSES, write_users

COTERIE = [sys.executable, "-m", "coterie_deploy"]
ROUNDS = 900
SHARES = {"a": "0-19", "b": "20-34", "c": "35-59"}
DEADLINE_S = 60.0
EXPERIMENT = {
    "name": "kills",
    "seed": 11,
    "data": {"source": "ellipses", "test_per_class": 50},
    "problem": {"loss": "squared_hinge", "l2": 1e-3},
    "stop": {"rounds": ROUNDS},
    "snapshots": {"every_rounds": 50},
    "federation": {"hosts": len(SHARES), "absence_timeout_s": 30},
}
PAPER = {"name": "pdmm", "penalty": 0.09, "placement": "paper", "sampling": "paired", "primal_fraction": 0.3, "evaluate_every": 10}
LEAN = {"name": "pdmm", "penalty": 0.09}


class Cluster:
    """A coordinator and its client hosts as processes, each of which can be killed and started again."""

    def __init__(self, folder: Path, method: dict[str, object], changes: Mapping[str, object]) -> None:
        self.folder = folder
        self.stage = 0 if "model" in changes else 1  # after the reference that pdmm starts from
        (folder / "kills.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **changes, "method": method}))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.clients = {name: self.start_client(name) for name in SHARES}
        self.server = self.start_server()

    def start(self, *arguments: str, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as file:
            environment = {**os.environ, "COVERAGE_PROCESS_START": ""}
            return subprocess.Popen([*COTERIE, *arguments], cwd=self.folder, stdout=file, stderr=file, env=environment)

    def start_client(self, name: str) -> subprocess.Popen[bytes]:
        return self.start("client", "--server", self.address, "--name", name, "--users", SHARES[name], log=f"{name}.log")

    def start_server(self, *extra: str) -> subprocess.Popen[bytes]:
        return self.start("server", "kills.yaml", "--listen", self.address, "--output", "run", "--quiet", *extra, log="server.log")

    def round(self) -> int:
        """The newest round of the last stage that the run's database knows; the database is readable all the time."""
        path = self.folder / "run" / "run.db"
        if not path.exists():
            return 0
        with (
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection,
            contextlib.suppress(sqlite3.Error),
        ):
            return int(connection.execute("SELECT coalesce(max(round), 0) FROM ledger WHERE stage = ?", (self.stage,)).fetchone()[0])
        return 0

    def wait_for_round(self, wanted: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.round() < wanted and self.server.poll() is None:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def kill_client(self, name: str) -> None:
        self.clients[name].send_signal(signal.SIGKILL)
        self.clients[name].wait(10)
        self.clients[name] = self.start_client(name)

    def kill_server(self) -> None:
        self.server.send_signal(signal.SIGKILL)
        self.server.wait(10)
        self.server = self.start_server("--resume")

    def end(self) -> None:
        assert self.server.wait(DEADLINE_S) == 0, self.logs()
        for client in self.clients.values():
            assert client.wait(20) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def models(self) -> np.ndarray:
        with np.load(self.folder / "run" / "models" / "pdmm.npz") as arrays:
            return arrays["x"]

    def rows(self, sql: str) -> list[tuple[int, ...]]:
        with contextlib.closing(sqlite3.connect(self.folder / "run" / "run.db")) as connection:
            return connection.execute(sql).fetchall()


@contextlib.contextmanager
def cluster(folder: Path, method: dict[str, object], changes: Mapping[str, object] | None = None) -> Iterator[Cluster]:
    started = Cluster(folder, method, changes or {})
    try:
        yield started
    finally:
        for process in (started.server, *started.clients.values()):
            process.kill()
            process.wait(10)


def calm_models(method: dict[str, object]) -> np.ndarray:
    result = run({**EXPERIMENT, "method": method, "federation": {"hosts": 1}})
    return np.stack(list(result.models.values()))


def strike(seed: int, folder: Path, method: dict[str, object]) -> None:
    draws = np.random.default_rng(seed)
    first, second = sorted(int(number) for number in draws.integers(20, ROUNDS - 300, 2))
    with cluster(folder, method) as under_fire:
        under_fire.wait_for_round(first)
        under_fire.kill_client(str(draws.choice(list(SHARES))))
        under_fire.wait_for_round(second)
        under_fire.kill_server()
        under_fire.end()
        assert under_fire.rows("SELECT value FROM run WHERE key = 'attempt'") == [("2",)], "the coordinator must have died in the middle"
        assert under_fire.rows("SELECT count(*) FROM events WHERE kind = 'resume'") == [(1,)]
        kept = under_fire.rows("SELECT count(DISTINCT round) FROM ledger WHERE useful AND stage = 1 AND step = 'S5'")
        assert kept == [(ROUNDS,)], "each round must count once"
        np.testing.assert_array_equal(under_fire.models(), calm_models(method))


@pytest.mark.timeout(150)
def test_a_killed_host_and_then_a_killed_coordinator_end_with_the_same_bits(tmp_path: Path) -> None:
    strike(0, tmp_path, PAPER)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("seed", range(1, 11))
def test_kills_at_ten_random_pairs_of_rounds_end_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    strike(seed, tmp_path, PAPER if seed % 2 else LEAN)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("hosts", [1, 3, 7])
def test_grpc_with_any_number_of_hosts_gives_the_bits_of_the_loopback(hosts: int) -> None:
    content = {**EXPERIMENT, "method": LEAN, "federation": {"hosts": hosts}, "stop": {"rounds": 100}}
    far, near = run(content, transport="grpc", hosts=hosts), run({**content, "federation": {"hosts": 1}})
    for user, model in near.models.items():
        np.testing.assert_array_equal(far.models[user], model)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_networks_and_heads_have_the_same_bits_after_kills(seed: int, tmp_path: Path) -> None:
    rounds = 120
    changes = {
        "data": {"source": "npz", "path": str(write_users(tmp_path / "users.npz", n_users=60))},
        "problem": {"loss": "cross_entropy"},
        "model": {"name": "mlp", "hidden": [6, 4], "classes": CLASSES},
        "stop": {"rounds": rounds},
        "snapshots": {"every_rounds": 15},
    }
    method: dict[str, object] = {"name": "fedrep", "participation": 0.3, "head_epochs": 2, "evaluate_every": 10}
    calm = tmp_path / "calm"
    run({**EXPERIMENT, **changes, "method": method, "federation": {"hosts": 1}}, output=calm)
    draws = np.random.default_rng(seed)
    with cluster(tmp_path, method, changes) as killed:
        killed.wait_for_round(int(draws.integers(5, rounds // 2)))
        killed.kill_client(str(draws.choice(list(SHARES))))
        killed.wait_for_round(int(draws.integers(rounds // 2, rounds - 5)))
        killed.kill_server()
        killed.end()
    undisturbed, again = finished_run(calm), finished_run(tmp_path / "run")
    assert {name: array.tobytes() for name, array in again.shared.items()} == {n: a.tobytes() for n, a in undisturbed.shared.items()}
    whole, restarted = models_of(undisturbed, None), models_of(again, tmp_path / "coterie-state")
    assert list(whole) == list(restarted)
    assert len(whole) == 60
    for user, tensors in whole.items():
        assert {name: array.tobytes() for name, array in tensors.items()} == {n: a.tobytes() for n, a in restarted[user].items()}
