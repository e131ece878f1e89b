"""A coordinator, an aggregator for each cluster and client hosts as real processes: bits, books, kills, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import coterie
from coterie.errors import ConfigError, RunError
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.roles import aggregator as aggregator_role
from coterie_deploy.roles import joining
from coterie_deploy.terminal import signals
from coterie_deploy.terminal.signals import Stop
from coterie_server.interface.half import Replies
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.run import aggregator as aggregator_room
from coterie_server.run.coordinator import Finished
from coterie_server.session.hub import Hub
from tests.consenting import accepting
from tests.two_tier import Death, Tiers, bits, flat, small

COTERIE = [sys.executable, "-m", "coterie"]
DEADLINE_S = 120.0
METHOD = {"name": "async_l2gd", "iterations": 400, "gamma": 1.0, "alpha": 0.4, "p0": 0.2, "p": 0.3, "collect_models": True}
TWO_TIER = {"topology": "clusters", "hosts": 3}


def experiment(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tiers",
        "seed": 4,
        "data": {"source": "npz", "path": "data.npz", "cluster": "cluster"},
        "problem": {"loss": "least_squares", "l2": 0.1},
        "method": METHOD,
        "federation": TWO_TIER,
        "snapshots": {"every_rounds": 7},
        **changes,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with nine users in three clusters."""
    draws = np.random.default_rng(1)
    user = np.repeat(np.arange(9), 6)
    features = draws.normal(size=(54, 2))
    target = (features * (user % 3)[:, None]).sum(axis=1) + draws.normal(size=54)
    np.savez(tmp_path / "data.npz", features=features, target=target, user=user, cluster=np.array(["x", "y", "z"])[user % 3])
    return tmp_path


def start(folder: Path, *arguments: str, log: str = "run.log") -> subprocess.Popen[bytes]:
    with (folder / log).open("ab") as file:
        return subprocess.Popen([*COTERIE, *accepting(arguments)], cwd=folder, stdout=file, stderr=file)


def run(folder: Path, content: Mapping[str, Any], *arguments: str, output: str) -> None:
    (folder / f"{output}.yaml").write_text(yaml.safe_dump(dict(content)))
    with ended(start(folder, "run", f"{output}.yaml", "--output", output, "--quiet", *arguments)) as process:
        assert process.wait(DEADLINE_S) == 0, (folder / "run.log").read_text()


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def models(folder: Path, output: str) -> np.ndarray:
    with np.load(folder / output / "models" / "async_l2gd.npz") as arrays:
        found: np.ndarray = arrays["x"]
        return found


def rows(folder: Path, output: str, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(folder / output / "run.db")) as connection:
        return connection.execute(sql).fetchall()


def check_books(folder: Path, output: str) -> None:
    with contextlib.closing(open_run(folder / output)) as connection:
        books = summary.reconcile(connection)
    assert books.agree, books
    assert books.n_agreed > 0
    assert not books.absent


def test_two_tiers_have_the_bits_of_a_flat_run_and_books_of_their_own(folder: Path) -> None:
    data = {"source": "npz", "path": "data.npz", "cluster": "cluster", "standardize": True}
    content = experiment(federation={**TWO_TIER, "hosts_per_cluster": 2}, data=data)
    run(folder, content, output="tiers")
    run(folder, content, "--topology", "flat", "--hosts", "2", output="flat")
    np.testing.assert_array_equal(models(folder, "tiers"), models(folder, "flat"))
    gaps = "SELECT name, value FROM results WHERE name IN ('gradient_norm', 'gap_at_least', 'gap_at_most') ORDER BY name"
    assert len(rows(folder, "tiers", gaps)) == 3
    assert rows(folder, "tiers", gaps) == rows(folder, "flat", gaps)
    check_books(folder, "tiers")
    for output in ("tiers", "flat"):
        assert verdict_on(folder / output).agrees
    check_books(folder, "flat")
    assert "tiers finished: 9 users, 3 aggregators, " in (folder / "run.log").read_text()
    links = rows(folder, "tiers", "SELECT DISTINCT scope, link FROM ledger ORDER BY link")
    assert [link for scope, link in links if scope == "between-cluster"] == ["x", "y", "z"]
    assert sorted(link for scope, link in links if scope == "within-cluster") == [
        f"{c}/host-{i}-{j}" for i, c in enumerate("xyz", 1) for j in (1, 2)
    ]
    assert rows(folder, "flat", "SELECT DISTINCT scope FROM ledger") == [("direct",)]
    # A cluster's own models stay inside it; pairs alone go up (and what `collect_models` asks for).
    kinds = "SELECT DISTINCT kind FROM ledger WHERE scope = 'between-cluster' AND direction = 'up' AND vectors > 0"
    assert {kind for (kind,) in rows(folder, "tiers", kinds)} == {
        "async_l2gd.ClusterSums",
        "async_l2gd.ClusterState",
        "async_l2gd.FinalModels",
    }
    sets = "SELECT DISTINCT members FROM user_sets JOIN ledger ON user_set = id WHERE link LIKE 'y/%'"
    listed = {int(number) for (text,) in rows(folder, "tiers", sets) for number in re.findall(r"\d+", text)}
    assert listed <= {1, 4, 7}, "sets of users are in the numbers of the whole run"


def processes_of(folder: Path, role: str) -> dict[str, int]:
    """The launched processes of a role in this folder, by name."""
    found = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd") == str(folder):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
                if role in words and "--launched" in words:
                    found[words[words.index("--name") + 1]] = int(entry)
    return found


def round_of(folder: Path, output: str) -> int:
    with contextlib.suppress(sqlite3.Error, TypeError):
        return int(rows(folder, output, "SELECT coalesce(max(round), 0) FROM ledger")[0][0])
    return 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("role", "name", "topology"),
    [("aggregator", "y", "clusters"), ("client", "host-2-1", "clusters"), ("both", "y", "clusters"), ("both", "y", "peers")],
)
def test_a_killed_aggregator_or_host_comes_back_and_the_bits_are_those_of_a_calm_run(
    folder: Path, role: str, name: str, topology: str
) -> None:
    content = experiment(method={**METHOD, "iterations": 6000}, federation={**TWO_TIER, "topology": topology})
    run(folder, content, "--topology", "flat", output="calm")
    (folder / "fire.yaml").write_text(yaml.safe_dump(content))
    victims = [("aggregator", "y"), ("client", "host-3-1")] if role == "both" else [(role, name)]
    with ended(start(folder, "run", "fire.yaml", "--output", "fire", "--quiet")) as process:
        deadline = time.monotonic() + DEADLINE_S
        for place, (of_role, victim) in enumerate(victims):
            while round_of(folder, "fire") < 100 * (place + 1):
                assert process.poll() is None, (folder / "run.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(processes_of(folder, of_role)[victim], signal.SIGKILL)
        assert process.wait(2 * DEADLINE_S) == 0, (folder / "run.log").read_text()
    np.testing.assert_array_equal(models(folder, "fire"), models(folder, "calm"))
    check_books(folder, "fire")
    events = [text for (text,) in rows(folder, "fire", "SELECT text FROM events")]
    assert any("SIGKILL" in text for text in events), events
    for table in ("between-cluster", "within-cluster", "between-peers"):
        groups = f"FROM ledger WHERE useful AND scope = '{table}' AND seq > 0 GROUP BY link, seq, kind, direction"
        once = f"SELECT count(*) FROM (SELECT 1 {groups} HAVING count(*) > 1)"
        assert rows(folder, "fire", once) == [(0,)], "nothing counts twice"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_aggregator_comes_back_under_masks_and_ends_as_a_calm_run_with_open_sums(folder: Path) -> None:
    content = experiment(method={**METHOD, "iterations": 700, "collect_models": False}, exact_sums=True)
    run(folder, content, "--topology", "flat", output="calm")
    (folder / "fire.yaml").write_text(yaml.safe_dump({**content, "federation": {**TWO_TIER, "hosts_per_cluster": 2, "sums": "masked"}}))
    with ended(start(folder, "run", "fire.yaml", "--output", "fire", "--quiet")) as process:
        deadline = time.monotonic() + DEADLINE_S
        while round_of(folder, "fire") < 8:  # of some 110
            assert process.poll() is None, (folder / "run.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(processes_of(folder, "aggregator")["y"], signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 0, (folder / "run.log").read_text()
    results = "SELECT name, value FROM results WHERE value IS NOT NULL ORDER BY name"
    assert rows(folder, "fire", results) == rows(folder, "calm", results)
    check_books(folder, "fire")
    assert any("SIGKILL" in text for (text,) in rows(folder, "fire", "SELECT text FROM events"))
    assert not list((folder / "fire").rglob("*.masks"))


SLOW_LOSS = """
import time
import numpy as np

class Slow:
    is_classifier = False
    curvature_floor, curvature_bound = 1.0, 1.0
    def value(self, s, y): return (s - y) ** 2 / 2
    def slope(self, s, y):
        if y.max() > 500:                       # the users of cluster z
            time.sleep(0.5)
        return s - y
    def curvature(self, s, y): return np.ones_like(s)
    def check_targets(self, y, user): pass
    def predict(self, s): return s
"""


@pytest.mark.slow
def test_a_slow_cluster_does_not_keep_another_from_its_work(folder: Path) -> None:
    (folder / "slow_loss.py").write_text(SLOW_LOSS)
    with np.load(folder / "data.npz") as arrays:
        content = dict(arrays)
    content["target"] = content["target"] + 1000.0 * (content["cluster"] == "z")
    np.savez(folder / "data.npz", **content)
    # Between two global rounds there are some five iterations, most of them local.
    method = {**METHOD, "iterations": 25, "p": 0.1, "collect_models": False}
    rules = {**TWO_TIER, "log_tasks": True}
    run(folder, experiment(method=method, problem={"loss": "slow_loss:Slow", "l2": 0.1}, federation=rules, evaluate=False), output="slow")
    events = [
        (kind, json.loads(data))
        for kind, data in rows(folder, "slow", "SELECT kind, data FROM events WHERE kind IN ('task begins', 'task ends') ORDER BY at")
    ]
    order = [(kind, data["aggregator"], data["round"]) for kind, data in events if data["round"] > 0]
    worked = [number for _, name, number in order if name == "z"]
    n_overtaken = 0
    for number in sorted(set(worked)):
        places = {key: place for place, key in enumerate(order)}
        slow_end = places["task ends", "z", number]
        # The others begin and end their work of the round while the slow cluster is at its own.
        assert all(places["task ends", name, number] < slow_end for name in ("x", "y")) or not _computes(folder, number)
        n_overtaken += all(places["task ends", name, number] < slow_end for name in ("x", "y"))
    assert n_overtaken >= 3, order


def _computes(folder: Path, number: int) -> bool:
    """Whether the slow cluster's task of a round took as long as a slow instruction, by the log."""
    times = rows(
        folder,
        "slow",
        "SELECT kind, at FROM events WHERE json_extract(data, '$.aggregator') = 'z' AND kind LIKE 'task %' "
        f"AND json_extract(data, '$.round') = {number}",
    )
    found = dict(times)
    return bool(found["task ends"] - found["task begins"] > 0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": {"name": "pdmm", "penalty": 0.1}}, "method 'pdmm' has no clusters of its own, want federation.topology 'flat'"),
        ({"federation": {**TWO_TIER, "hosts": 2}}, "2 aggregators for 3 known clusters: want one for each cluster"),
        ({"federation": {**TWO_TIER, "clusters": ["x", "y", "w"]}}, "cluster 'w' has no users, but federation.clusters names it"),
        ({"federation": {**TWO_TIER, "late": "skip"}}, "min_hosts and late 'skip' are for 'flat'"),
        (
            {"federation": {**TWO_TIER, "hosts_per_cluster": 4}},
            "4 hosts for the 3 users of cluster 'x': want at most one host for each user",
        ),
        ({"data": {"source": "npz", "path": "data.npz"}}, "user '0' has no known cluster, want one for every user"),
        ({"method": {**METHOD, "alpha": 1.5}}, "alpha"),
        ({"method": {**METHOD, "p0": 0.0}}, "method.p0 is 0, but cluster 'x' has alpha 0.4"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_sentence(
    folder: Path, changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises((ConfigError, RunError), match=re.escape(sentence)):
        coterie.run(experiment(**changes), transport="grpc")


def test_who_is_of_the_wrong_tier_or_cluster_is_turned_away(folder: Path) -> None:
    """By hand, as on several machines: the coordinator waits for aggregators, an aggregator for the users of its cluster."""
    content = experiment(federation={**TWO_TIER, "join_timeout_s": 300})
    (folder / "e.yaml").write_text(yaml.safe_dump(content))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ended(start(folder, "server", "e.yaml", "--listen", "127.0.0.1:0", "--output", "r", log="server.log")))
        port = _port(folder / "server.log", server)
        client = stack.enter_context(ended(start(folder, "client", "--server", f"127.0.0.1:{port}", log="client.log")))
        arguments = ("--server", f"127.0.0.1:{port}", "--cluster", "x", "--listen", "127.0.0.1:0", "--hosts", "1")
        aggregator = stack.enter_context(ended(start(folder, "aggregator", *arguments, "--state", "a", log="aggregator.log")))
        below = _port(folder / "aggregator.log", aggregator)
        stranger = stack.enter_context(
            ended(start(folder, "client", "--server", f"127.0.0.1:{below}", "--cluster", "y", log="stranger.log"))
        )
        unknown = stack.enter_context(ended(start(folder, "client", "--server", f"127.0.0.1:{below}", "--cluster", "q", log="unknown.log")))
        assert client.wait(DEADLINE_S) == 3
        assert stranger.wait(DEADLINE_S) == 3
        assert unknown.wait(DEADLINE_S) == 2
        aggregator.send_signal(signal.SIGTERM)
        assert aggregator.wait(DEADLINE_S) == 143
        deadline = time.monotonic() + DEADLINE_S
        while "aggregator 'x' cannot join: it was stopped (rule R4)" not in (folder / "server.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert "is a client host, but this parent waits for the clusters' aggregators" in (folder / "client.log").read_text()
    assert "is of cluster 'y', wanted cluster 'x'" in (folder / "stranger.log").read_text()
    assert "listens on 127.0.0.1" in (said := (folder / "aggregator.log").read_text())
    assert "for 1 host of cluster 'x'" in said
    assert re.search(r"listens on 127\.0\.0\.1:\d+ for 3 aggregators", (folder / "server.log").read_text())
    assert "cluster 'q' is not in the data: want one like 'x', 'y', 'z'" in (folder / "unknown.log").read_text()
    assert "stopped by SIGTERM; the same command goes on from here" in (folder / "aggregator.log").read_text()


def test_an_aggregator_without_a_cluster_is_refused_at_once(folder: Path) -> None:
    with ended(start(folder, "aggregator", "--server", "127.0.0.1:9", "--cluster", "", "--listen", "127.0.0.1:0")) as process:
        assert process.wait(DEADLINE_S) == 2
    assert "--cluster is '', want the name of a known cluster" in (folder / "run.log").read_text()


def test_a_state_folder_is_for_one_aggregator_at_a_time(folder: Path) -> None:
    """The second would write into the books of the first, before the coordinator could turn it away."""
    (folder / "e.yaml").write_text(yaml.safe_dump(experiment()))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ended(start(folder, "server", "e.yaml", "--listen", "127.0.0.1:0", "--output", "r", log="server.log")))
        port = _port(folder / "server.log", server)
        arguments = ("--server", f"127.0.0.1:{port}", "--cluster", "x", "--listen", "127.0.0.1:0", "--hosts", "1", "--state", "a")
        first = stack.enter_context(ended(start(folder, "aggregator", *arguments, log="first.log")))
        _port(folder / "first.log", first)
        second = stack.enter_context(ended(start(folder, "aggregator", *arguments, log="second.log")))
        assert second.wait(DEADLINE_S) == 3
        assert first.poll() is None
    said = (folder / "second.log").read_text()
    assert re.search(r"^error: the state folder a/x\.\w+ is in use by another aggregator$", said, re.MULTILINE), said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_aggregator_with_the_state_of_another_cluster_says_so_and_a_host_that_cannot_find_it_is_named(folder: Path) -> None:
    """As after a restart with the wrong state folder; and as after one on another port, where its hosts do not follow."""
    content = experiment(method={**METHOD, "iterations": 10**6}, federation={**TWO_TIER, "absence_timeout_s": 30})
    (folder / "e.yaml").write_text(yaml.safe_dump(content))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ended(start(folder, "server", "e.yaml", "--listen", "127.0.0.1:0", "--output", "r", log="server.log")))
        coordinator = ("--server", f"127.0.0.1:{_port(folder / 'server.log', server)}", "--listen", "127.0.0.1:0", "--hosts", "1")
        running = {}
        for name in "xyz":
            arguments = (*coordinator, "--cluster", name, "--state", name)
            running[name] = stack.enter_context(ended(start(folder, "aggregator", *arguments, log=f"{name}.log")))
            below = f"127.0.0.1:{_port(folder / f'{name}.log', running[name])}"
            arguments = ("--server", below, "--cluster", name, "--name", f"host-{name}", "--state", f"host-{name}", "--patience", "8")
            stack.enter_context(ended(start(folder, "client", *arguments, log=f"host-{name}.log")))
        deadline = time.monotonic() + DEADLINE_S
        while round_of(folder, "r") < 40:
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running["y"].kill()
        running["y"].wait(10)
        (state,) = (entry for entry in (folder / "z").iterdir() if entry.is_dir())
        shutil.copytree(state, folder / "wrong" / state.name.replace("z.", "y."))
        wrong = stack.enter_context(ended(start(folder, "aggregator", *coordinator, "--cluster", "y", "--state", "wrong", log="wrong.log")))
        assert wrong.wait(DEADLINE_S) == 3
        moved = stack.enter_context(ended(start(folder, "aggregator", *coordinator, "--cluster", "y", "--state", "y", log="moved.log")))
        assert moved.wait(DEADLINE_S) == 3
        assert server.wait(DEADLINE_S) == 3
    assert "is of cluster 'z', wanted 'y'" in (folder / "wrong.log").read_text()
    missing = "need 1 host, have 0: host 'host-y' (users 1 to 7) absent"
    assert missing in (folder / "moved.log").read_text()
    assert "aggregator 'y': a member was absent, or did not answer, for too long (rule R3)" in (folder / "server.log").read_text()


def _port(log: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := re.search(r"listens on 127\.0\.0\.1:(\d+)", log.read_text() if log.exists() else "")):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(found[1])


@pytest.mark.slow
def test_two_tiers_fill_missing_cells_with_the_bits_of_a_flat_run(folder: Path) -> None:
    draws = np.random.default_rng(2)
    cells = [["" if draws.random() < 0.2 else repr(float(value)) for value in row] for row in draws.normal(3, 5, size=(54, 2))]
    lines = [f"u{i % 9},{'xyz'[i % 3]},{','.join(row)},{i % 5}" for i, row in enumerate(cells)]
    (folder / "rows.csv").write_text("\n".join(["user,cluster,a,b,y", *lines]) + "\n")
    columns = {"user_column": "user", "cluster_column": "cluster", "target_column": "y", "feature_columns": ["a", "b"]}
    data = {"source": "csv", "path": "rows.csv", **columns, "missing": "indicator", "standardize": True}
    run(folder, experiment(data=data, method={**METHOD, "iterations": 50}), output="tiers")
    run(folder, experiment(data=data, method={**METHOD, "iterations": 50}), "--topology", "flat", "--hosts", "2", output="flat")
    np.testing.assert_array_equal(models(folder, "tiers"), models(folder, "flat"))
    for output in ("tiers", "flat"):
        assert verdict_on(folder / output).agrees


# ---- the same in one process, with faults at chosen exchanges


def test_an_aggregator_writes_itself_down_between_long_tasks_and_the_bits_are_those_of_a_calm_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator asks for no snapshot here; whoever is killed goes on from one that the aggregator took on its own."""
    monkeypatch.setattr(aggregator_room, "HOST_BYTES", 1)
    monkeypatch.setattr(aggregator_room, "_FEWEST_EXCHANGES", 3)
    saved: dict[str, list[int]] = {}
    earlier: dict[tuple[str, int], int] = {}  # the last exchange that an earlier attempt may have numbered
    written = aggregator_room.Aggregator.save

    def save(self: aggregator_room.Aggregator) -> None:
        saved.setdefault(self.name, []).append(self.hub.seq)
        earlier[self.name, self.hub.state.attempt] = self.hub.state.earlier
        written(self)

    monkeypatch.setattr(aggregator_room.Aggregator, "save", save)
    deaths = [Death("c1", "c1", 14), Death("c0-0", "c0", 12), Death("c2", "c2", 9), Death("c2-0", "c2", 15)]
    tiers = Tiers(small(snapshots={"every_rounds": 10_000, "every_s": 600}), tmp_path, deaths=deaths)
    finished = tiers.run()
    assert bits(finished) == bits(flat(tiers.experiment))
    assert tiers.books().agree
    assert min(len(numbers) for numbers in saved.values()) >= 3, saved
    resumed = [
        text for (text,) in tiers.query("SELECT text FROM events WHERE kind = 'resume' AND json_extract(data, '$.aggregator') != ''")
    ]
    assert sorted(text.partition(" resumed")[0] for text in resumed) == ["aggregator 'c1'", "aggregator 'c2'"]
    assert not any(text.endswith("exchange 0") for text in resumed)
    assert earlier == {("c0", 1): 0, ("c1", 1): 0, ("c1", 2): 1000, ("c2", 1): 0, ("c2", 2): 1000}


def one_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tiers, list[Stop]]:
    """A run of one cluster, and what stops the aggregator that was started last."""
    data = {"source": "python", "path": "tests.papers.known_clusters_fixture:made_users"}
    options = {"clusters": 1, "users_per_cluster": 3, "rows": 3, "d": 2}
    stops: list[Stop] = []

    @contextlib.contextmanager
    def stopping() -> Iterator[Stop]:
        stops.append(Stop())
        yield stops[-1]

    monkeypatch.setattr(joining, "stopping_on_signals", stopping)
    monkeypatch.setattr(signals, "STAY_S", 0.0)  # its coordinator is not asked to stop
    return Tiers(small(data={**data, "options": options}, federation={"hosts": 1}), tmp_path), stops


def test_an_aggregator_that_is_asked_to_stop_ends_its_task_and_nothing_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, stops = one_cluster(tmp_path, monkeypatch)

    async def whole() -> Finished:
        async with asyncio.timeout(20), tiers.members():
            running = asyncio.create_task(tiers.coordinated())
            await exchange_of("c0", 8, monkeypatch)
            stops[0].ask("SIGTERM")
            await tiers.tasks["c0"]
            assert tiers.codes.pop("c0") == 143
            tiers.start("c0")
            return await running

    assert bits(asyncio.run(whole())) == bits(flat(tiers.experiment))
    assert tiers.books().agree
    assert tiers.query("SELECT count(*) FROM ledger WHERE useful = 0 AND resent = 0") == [(0,)]
    assert tiers.query("SELECT count(*) FROM events WHERE kind = 'resume'") == [(1,)]


def test_an_aggregator_whose_hosts_are_gone_still_stops_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator_role, "_STOP_S", 0.3)
    tiers, stops = one_cluster(tmp_path, monkeypatch)

    async def whole() -> Finished:
        async with asyncio.timeout(20), tiers.members():
            running = asyncio.create_task(tiers.coordinated())
            await exchange_of("c0", 8, monkeypatch)
            tiers.tasks["c0-0"].cancel()
            await asyncio.gather(tiers.tasks["c0-0"], return_exceptions=True)
            stops[0].ask("SIGTERM")
            async with asyncio.timeout(5):
                await tiers.tasks["c0"]
            assert tiers.codes.pop("c0") == 143
            tiers.start("c0")
            tiers.start("c0-0")
            return await running

    assert bits(asyncio.run(whole())) == bits(flat(tiers.experiment))
    assert tiers.books().agree


async def exchange_of(cluster: str, seq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns when the aggregator of the cluster begins this exchange."""
    reached = asyncio.Event()
    exchange = Hub.exchange

    async def watched(hub: Hub, *messages: Any, **how: Any) -> Replies:
        if (hub.cluster, hub.seq + 1) == (cluster, seq):
            reached.set()
            await asyncio.sleep(0.05)
        return await exchange(hub, *messages, **how)

    monkeypatch.setattr(Hub, "exchange", watched)
    await reached.wait()


def test_books_that_were_brought_when_a_run_failed_count_once_when_it_has_been_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = Tiers(small(), tmp_path)
    exchange = Hub.exchange

    async def failing(hub: Hub, *messages: Any, **how: Any) -> Replies:
        if (hub.rules.is_two_tier, hub.seq, hub.state.attempt) == (True, 12, 1):
            hub.fail(RunError("the disk is full"))
        return await exchange(hub, *messages, **how)

    monkeypatch.setattr(Hub, "exchange", failing)

    async def whole() -> Finished:
        async with asyncio.timeout(40):
            with pytest.raises(RunError, match="the disk is full"):
                async with tiers.members():
                    await tiers.coordinated()
            assert tiers.query("SELECT count(*) > 0 FROM ledger WHERE scope = 'within-cluster'") == [(1,)]
            async with tiers.members():
                return await tiers.coordinated(is_resumed=True)

    assert bits(asyncio.run(whole())) == bits(flat(tiers.experiment))
    books = tiers.books()
    assert books.agree, books
    same = "seq, attempt, resent, stage, round, kind, direction, link, user_set"
    assert tiers.query(f"SELECT link, seq, kind FROM ledger GROUP BY {same} HAVING count(*) > 1") == []
    assert tiers.query("SELECT text FROM events WHERE json_extract(data, '$.aggregator') != '' GROUP BY at, text HAVING count(*) > 1") == []


def test_an_aggregator_that_breaks_tells_its_hosts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours, not a `CoterieError`: its hosts would look for it until their patience is over."""

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(aggregator_room.Aggregator, "_answers", broken)
    tiers, _ = one_cluster(tmp_path, monkeypatch)

    async def whole() -> None:
        async with asyncio.timeout(10), tiers.members():
            with pytest.raises(RunError, match=r"^aggregator 'c0': a mistake of the program itself \(rule X2\)"):
                await tiers.coordinated()
            with pytest.raises(RunError, match=r"^the run has failed: the coordinator's log says why"):
                await tiers.tasks["c0-0"]

    with pytest.raises((ZeroDivisionError, RunError), match=r"by zero|^the run has failed"):
        asyncio.run(whole())


def test_a_state_folder_that_is_being_left_is_waited_for(tmp_path: Path) -> None:
    """As by the aggregator of a resumed run, whose forerunner needs a moment when its launcher was killed."""

    async def second(patience_s: float) -> None:
        async with aggregator_role._locked(tmp_path, patience_s):
            pass

    async def test() -> None:
        async with asyncio.timeout(5):
            async with aggregator_role._locked(tmp_path, 0.0):
                with pytest.raises(RunError, match="is in use by another aggregator"):
                    await second(0.0)
                waiting = asyncio.create_task(second(5.0))
                await asyncio.sleep(0.05)
                assert not waiting.done()
            await waiting

    asyncio.run(test())


def test_a_method_without_clusters_is_refused_before_anything_starts(folder: Path) -> None:
    content = experiment(method={"name": "pdmm", "penalty": 0.1}, references=["local"])
    (folder / "flat.yaml").write_text(yaml.safe_dump(content))
    with ended(start(folder, "run", "flat.yaml", "--output", "r")) as process:
        assert process.wait(DEADLINE_S) == 2
    said = (folder / "run.log").read_text()
    assert "method 'pdmm' has no clusters of its own, want federation.topology 'flat'" in said
    assert "stage" not in said
    assert not (folder / "r").exists()
