"""`coterie run`, `server` and `client` as real processes: a run over gRPC, its bits, how it stops, goes on and fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import DEADLINE_S, Command, commands_in, events, in_one_process, models, n_rounds, wait_for
from tests.two_tier import free_port

EXPERIMENT = """
name: small
seed: 3
data: {source: ellipses, users_per_cluster: 2, test_per_class: 50}
problem: {loss: squared_hinge, l2: 0.001}
method: {name: squared, penalty: 0.07}
references: [local, global, oracle]
"""
# Enough rounds to be interrupted: the residual is never that small.
LONG = """
name: long
seed: 3
data: {source: ellipses, users_per_cluster: 2, test_per_class: 50}
problem: {loss: squared_hinge, l2: 0.001}
method: {name: pdmm, penalty: 0.07, evaluate_every: 0}
stop: {rounds: 1500, residual: null}
snapshots: {every_rounds: 60}
federation: {absence_timeout_s: 30}
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands in one folder with both experiments."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    (tmp_path / "long.yaml").write_text(LONG)
    with commands_in(tmp_path) as run:
        yield run


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The models of the long run, made in one process."""
    here = tmp_path_factory.mktemp("undisturbed")
    (here / "long.yaml").write_text(LONG)
    return models(in_one_process(here, "long.yaml"))


def test_a_run_over_grpc_reports_and_has_the_bits_of_loopback(start: Callable[..., Command], tmp_path: Path) -> None:
    distributed = start("run", "small.yaml", "--hosts", "2", "--output", "grpc")
    simulated = start("run", "small.yaml", "--transport", "loopback", "--output", "loopback")
    code, report, progress = distributed.end()
    assert code == 0
    assert report.startswith("small finished: 6 users, 2 hosts, ")
    assert "squared *" in report
    assert max(map(len, report.splitlines())) <= 60
    assert "stage 4/4 squared: round" in progress
    assert simulated.end()[0] == 0
    assert len(models(tmp_path / "grpc")) == 4
    assert models(tmp_path / "grpc") == models(tmp_path / "loopback")
    text = start("ledger", "grpc").end()[1]
    assert "to the byte" in " ".join(text.split())
    assert "DIFFER" not in text


def test_a_run_stopped_by_a_signal_goes_on_to_the_same_bits(
    start: Callable[..., Command], tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    command = start("run", "long.yaml", "--hosts", "2")
    wait_for(lambda: n_rounds(tmp_path / "runs/long") > 60)
    command.process.send_signal(signal.SIGINT)
    sentence = command.fails(130)
    assert "stopped by a signal in stage 'pdmm' after round" in sentence
    assert sentence.endswith("coterie run runs/long --resume")
    assert n_rounds(tmp_path / "runs/long") < 1500
    code, report, err = start("run", "runs/long", "--resume").end()
    assert code == 0, err
    assert "2 hosts" in report
    assert models(tmp_path / "runs/long") == undisturbed


def test_a_run_in_one_process_hears_signals_too(start: Callable[..., Command], tmp_path: Path) -> None:
    command = start("run", "long.yaml", "--transport", "loopback", "--set", "stop.rounds=1000000")
    wait_for(lambda: n_rounds(tmp_path / "runs/long") > 60)
    command.process.terminate()
    assert "after round" in command.fails(143)


@pytest.mark.slow
def test_a_killed_host_is_started_again_and_the_bits_stay(
    start: Callable[..., Command], tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    command = start("run", "long.yaml", "--hosts", "2")
    wait_for(lambda: n_rounds(tmp_path / "runs/long") > 60)
    os.kill(children(command.process.pid)[0], signal.SIGKILL)
    code, _, err = command.end()
    assert code == 0, err
    assert len(events(tmp_path / "runs/long", "restart")) == 1
    assert models(tmp_path / "runs/long") == undisturbed
    ledger = " ".join(start("ledger", "runs/long").end()[1].split())
    assert "sent again, late or repeated" in ledger
    assert "DIFFER" not in ledger


@pytest.mark.slow
def test_hosts_end_with_a_killed_launcher_and_its_run_can_be_resumed(
    start: Callable[..., Command], tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    command = start("run", "long.yaml", "--hosts", "2")
    wait_for(lambda: n_rounds(tmp_path / "runs/long") > 60)
    hosts = children(command.process.pid)
    assert len(hosts) == 2
    command.process.kill()
    command.process.communicate()
    wait_for(lambda: not any(is_running(host) for host in hosts))
    code, _, err = start("run", "long.yaml", "--hosts", "2", "--resume", "--quiet").end()
    assert code == 0, err
    assert models(tmp_path / "runs/long") == undisturbed
    assert "DIFFER" not in start("ledger", "runs/long").end()[1]


def test_server_and_clients_stop_on_sigterm_and_go_on(start: Callable[..., Command], tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    server = start("server", "long.yaml", "--listen", "127.0.0.1:0", "--hosts", "2")
    address = server.address()
    first, second = (("client", "--server", address, "--users", users) for users in ("#0..#2", "u3,u4,u5"))
    clients = [start(*first), start(*second)]
    wait_for(lambda: n_rounds(tmp_path / "runs/long") > 60)
    server.process.terminate()
    assert "--resume" in server.fails(143)
    clients[0].process.terminate()
    assert clients[0].end()[0] == 143
    clients[0] = start(*first)
    server = start("server", "long.yaml", "--listen", address, "--hosts", "2", "--resume")
    code, report, err = server.end()
    assert code == 0, err
    assert "2 hosts" in report
    assert [client.end()[0] for client in clients] == [0, 0]
    assert models(tmp_path / "runs/long") == undisturbed


def test_a_client_is_light(start: Callable[..., Command], tmp_path: Path) -> None:
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0")
    # A process inherits the peak of the one it was forked from, so a small one stands between it and the tests.
    code = """
import resource, subprocess, sys
client = [sys.executable, "-P", "-m", "coterie", "client", "--server", sys.argv[1], "--accept", "any"]
subprocess.run(client, stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss / 1024, used.ru_utime + used.ru_stime)
"""
    command = [sys.executable, "-c", code, server.address()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    peak_mb, cpu_s = map(float, done.stdout.split())
    # Generous, since a test must not depend on the machine: tests/benchmarks/bench_memory.py measures.
    assert peak_mb < 120
    assert cpu_s < 5.0
    assert server.end()[0] == 0


# ---- what goes wrong


ROWS = """
name: rows
data: {source: csv, path: rows.csv, user_column: user, target_column: y, feature_columns: [a]}
problem: {loss: logistic, l2: 0.01}
method: {name: global}
federation: {hosts: 2, join_timeout_s: 30}
"""


def write_users(folder: Path, first: int, wrong: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    rows = [f"u{first + user},{0.1 * row},{(-1) ** row}" for user in range(2) for row in range(6)]
    if wrong:
        rows[4] = f"u{first},lots,1"
    (folder / "rows.csv").write_text("\n".join(["user,a,y", *rows, ""]))


def test_a_host_with_bad_data_is_reported_and_the_server_waits_for_a_better_one(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "rows.yaml").write_text(ROWS)
    write_users(tmp_path / "a", 0)
    write_users(tmp_path / "b", 2, wrong=True)
    server = start("server", "rows.yaml", "--listen", "127.0.0.1:0")
    address = server.address()
    good = start("client", "--server", address, "--name", "a", "--data", "a")
    bad = ("client", "--server", address, "--name", "b", "--data", "b")
    assert "rows.csv line 6, column 'a': 'lots'" in start(*bad).fails(2)
    assert "lots" not in server.line("host 'b' cannot join: ")
    write_users(tmp_path / "b", 2)
    better = start(*bad)
    code, report, err = server.end()
    assert code == 0, err
    assert report.startswith("rows finished: 4 users, 2 hosts")
    assert [good.end()[0], better.end()[0]] == [0, 0]
    assert len(events(tmp_path / "runs/rows", "refused")) == 1


def test_a_host_with_bad_data_is_named_when_nobody_came_in_its_place_but_not_to_the_others(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "rows.yaml").write_text(ROWS)
    write_users(tmp_path / "a", 0)
    write_users(tmp_path / "b", 2, wrong=True)
    address = f"127.0.0.1:{free_port()}"
    good, bad = (start("client", "--server", address, "--name", name, "--data", name, "--patience", "8") for name in "ab")
    good.waits()
    bad.waits()
    server = start("server", "rows.yaml", "--listen", address, "--set", "federation.join_timeout_s=5")
    bad.fails(2)
    sentence = server.fails(3)
    assert "need 2 of 2 hosts, have 1" in sentence
    assert "host 'b' cannot join: " in sentence
    assert "lots" not in sentence
    code, out, err = good.end()
    assert (code, "lots" in out + err) == (3, False)
    assert "host 'a' must wait: too few members joined in time (rule R2); trying again for up to 8 s\n" in out, (out, err, sentence)
    assert f"host 'a' has had no session with {address} for 8 s" in err


def test_a_client_without_a_server_says_once_that_it_waits(start: Callable[..., Command]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    client = start("client", "--server", address, "--patience", "3")
    code, out, _ = client.end()
    assert (code, out) == (
        3,
        f"waiting for a server at {address} (up to 3 s): the connection was refused, so nothing listens at this port\n",
    )


def test_wrong_rows_of_one_host_end_the_run_with_their_sentence(start: Callable[..., Command], tmp_path: Path) -> None:
    rows = [f"u{user},{0.1 * row},{(-1) ** row}" for user in range(4) for row in range(6)]
    rows[20] = "u3,lots,1"
    (tmp_path / "rows.csv").write_text("\n".join(["user,a,y", *rows, ""]))
    (tmp_path / "rows.yaml").write_text(
        "name: rows\ndata: {source: csv, path: rows.csv, user_column: user, target_column: y, feature_columns: [a]}\n"
        "problem: {loss: logistic, l2: 0.01}\nmethod: {name: global}\n"
    )
    assert "rows.csv line 22, column 'a': 'lots'" in start("run", "rows.yaml", "--hosts", "2").fails(2)


NAN_LOSS = """
import numpy as np
from coterie_client.problems.losses import LeastSquares

class Loss(LeastSquares):
    def slope(self, s, y):
        return np.where(y > 2, np.nan, s - y)
"""


def test_a_host_that_returns_nan_is_named_with_the_user(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "nan_loss.py").write_text(NAN_LOSS)
    rows = [f"u{user},{0.1 * row},{3 if (user, row) == (2, 4) else (-1) ** row}" for user in range(3) for row in range(6)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,a,y", *rows, ""]))
    (tmp_path / "nan.yaml").write_text(
        "name: nan\nproblem: {loss: 'nan_loss:Loss'}\nmethod: {name: global}\n"
        "data: {source: csv, path: rows.csv, user_column: user, target_column: y, feature_columns: [a], test_fraction: 0}\n"
    )
    sentence = start("run", "nan.yaml").fails(3)
    assert "'u2'" in sentence
    assert "'host-3'" in sentence


def test_a_user_of_two_hosts_is_named_and_so_are_they(start: Callable[..., Command]) -> None:
    address = f"127.0.0.1:{free_port()}"
    hosts = {
        name: start("client", "--server", address, "--users", users, "--name", name, "--patience", "8")
        for name, users in (("A", "#0..#3"), ("B", "#3..#5"))
    }
    for host in hosts.values():
        host.waits()
    server = start("server", "small.yaml", "--listen", address, "--hosts", "2", "--set", "federation.join_timeout_s=5")
    codes = {name: host.end() for name, host in hosts.items()}
    assert sorted(code for code, _, _ in codes.values()) == [2, 3]
    sentence = next(err for code, _, err in codes.values() if code == 2)
    assert "'u3'" in sentence
    assert sum(f"host '{name}'" in sentence for name in "AB") == 1, "a host is not told who the other one is"
    code, _, err = server.end()
    assert code == 3
    claim = next(line for line in err.splitlines() if line.startswith("user 'u3' is claimed by host"))
    assert all(name in claim for name in ("'A'", "'B'"))
    assert "need 2 of 2 hosts, have 1" in err.splitlines()[-1]


def test_a_host_that_dies_and_stays_away_is_named(start: Callable[..., Command], tmp_path: Path) -> None:
    server = start("server", "long.yaml", "--listen", "127.0.0.1:0", "--hosts", "2", "--set", "federation.absence_timeout_s=1")
    address = server.address()
    stays = start("client", "--server", address, "--users", "#0..#2", "--name", "stays")
    leaves = start("client", "--server", address, "--users", "#3..#5", "--name", "leaves")
    wait_for(lambda: n_rounds(tmp_path / "runs/long") > 5)
    leaves.process.kill()
    sentence = server.fails(3)
    assert "host 'leaves' (users u3 to u5) absent since round" in sentence
    assert stays.fails(3) == "error: the run has failed: a member was absent, or did not answer, for too long (rule R3)"


def test_hosts_that_never_come_are_counted(start: Callable[..., Command]) -> None:
    command = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--hosts", "3", "--set", "federation.join_timeout_s=0.5")
    assert "need 3 of 3 hosts, have 0" in command.fails(3)


def test_a_port_in_use_is_named_and_the_folder_is_still_free(start: Callable[..., Command], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen on {address}: Address already in use" in start("server", "small.yaml", "--listen", address).fails(2)
    assert not (tmp_path / "runs/small").exists()


def test_a_run_folder_is_used_by_one_coordinator_only(start: Callable[..., Command], tmp_path: Path) -> None:
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0")
    server.address()
    assert "runs/small" in start("server", "small.yaml", "--listen", "127.0.0.1:0", "--resume").fails(3)


@pytest.mark.parametrize("blocks_left", [0, 120])
def test_a_full_disk_is_named(start: Callable[..., Command], blocks_left: int) -> None:
    limited = ("sh", "-c", f'ulimit -f {blocks_left} && exec "$@"', "limited")
    command = start("run", "long.yaml", "--transport", "loopback", "--quiet", launcher=limited)
    assert re.search(r"cannot write .*runs/long", command.fails(3))


def test_a_folder_that_cannot_be_made_is_named(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file/run" in start("run", "small.yaml", "--output", "file/run").fails(3)
