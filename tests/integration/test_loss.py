"""on_loss: skip. A run goes on without a host that is gone, takes it back, and another run can repeat all of it to the bit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.record.snapshot import SnapshotFile
from coterie.wire.codec import Encoded
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.record.rundb import RunDatabase
from coterie_server.run.coordinator import Finished, Options, _repeat_decisions, coordinate
from coterie_server.run.engine import Engine
from coterie_server.session.hub import Hub
from tests.integration.test_kills import FEW, FEW_SHARES, assert_same_bits, calm
from tests.processes import Processes, processes
from tests.simulation import bits, query, small_experiment

RULES = {"hosts": 3, "on_loss": "skip", "absence_timeout_s": 0.05}
LEAN = {"name": "pdmm", "penalty": 0.3, "start": "zero"}
NEVER = 10**9


class Killed(BaseException):
    """The coordinator is gone at once."""


@dataclass
class Story:
    """Host h1 is gone in an exchange, and back when h0 is asked in a later one; the coordinator may die in between."""

    lost_at: int = 6
    back_at: int = 12
    killed_at: int = NEVER


class Link(LoopbackLink):
    """The story as it happens to the link of one host."""

    def __init__(self, hub: Hub, host: Host, story: Story) -> None:
        super().__init__(hub, host)
        self.story, self.back = story, LoopbackLink(hub, host)

    def send(self, encoded: Encoded) -> None:
        if self._host.name == "h1" and self._hub.seq >= self.story.lost_at:
            self._hub.lost("h1", self, "gone")
            return
        super().send(encoded)


class First(LoopbackLink):
    """The link of h0."""

    lossy: Link

    def send(self, encoded: Encoded) -> None:
        if self._hub.seq == self.lossy.story.killed_at and self._hub.state.attempt == 1:
            raise Killed
        if self._hub.seq == self.lossy.story.back_at:
            asyncio.get_running_loop().call_soon(self.lossy.back.join)
        super().send(encoded)


def run(experiment: Experiment, folder: Path, story: Story | None = None, **options: Any) -> Finished:
    names = [user.name for user in list_users(experiment.data, experiment.seed)]
    kept: dict[str, Host] = {}

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        for i in range(3):
            store = SnapshotFile(folder / "hosts" / f"h{i}", "host")
            kept.setdefault(f"h{i}", build_host(f"h{i}", experiment, hub.run_id, names[i::3], store=store))
        if story is None:
            links: list[LoopbackLink] = [LoopbackLink(hub, host) for host in kept.values()]
        else:
            first, lossy = First(hub, kept["h0"]), Link(hub, kept["h1"], story)
            first.lossy = lossy
            links = [first, lossy, LoopbackLink(hub, kept["h2"])]
            if hub.state.attempt > 1 and story.killed_at > story.lost_at:
                del links[1]  # the host has not come back yet
        for link in links:
            link.join()

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                hub.tick()

        ticking = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticking.cancel()

    def attempt(*, resume: bool = False) -> Finished:
        return asyncio.run(coordinate(experiment, connect, Options(folder=folder, resume=resume, **options)))

    if story is None or story.killed_at == NEVER:
        return attempt()
    with pytest.raises(Killed):
        attempt()
    return attempt(resume=True)


def decisions(folder: Path) -> list[tuple[int, str, list[str]]]:
    rows = query(folder, "SELECT DISTINCT seq, kind, value FROM decisions ORDER BY seq")
    return [(seq, kind, json.loads(value)) for seq, kind, value in rows]


def linear(**federation: Any) -> Experiment:
    data = {"source": "representation", "users": 9, "d": 5, "k": 2, "rows_per_user": 8}
    method = {"name": "fedrep_linear", "participation": 0.5, "heads": "gradient", "eta": 0.05, "head_eta": 0.05, "start": "random"}
    content = {"name": "linear", "seed": 2, "data": data, "method": method, "stop": {"rounds": 20}}
    return experiment_from({**content, "snapshots": {"every_rounds": 4}, "federation": {**RULES, **federation}})


def everything(finished: Finished) -> dict[str, bytes]:
    shared = {name: array.tobytes() for outcome in finished.outcomes.values() for name, array in outcome.shared.items()}
    return {**bits(finished), **shared}


@pytest.mark.parametrize("kind", ["pdmm", "fedrep_linear"])
def test_a_lost_host_is_left_out_until_it_is_back_and_another_run_repeats_that(kind: str, tmp_path: Path) -> None:
    experiment = small_experiment(LEAN, federation=RULES) if kind == "pdmm" else linear()
    lost = run(experiment, tmp_path / "lost", Story())
    assert decisions(tmp_path / "lost")[0] == (6, "skip", ["h1"])
    assert {row[1:] for row in map(tuple, [(s, k, *v) for s, k, v in decisions(tmp_path / "lost")[1:]])} == {("pass", "h1")}
    said = query(tmp_path / "lost", "SELECT text FROM events WHERE kind IN ('skip', 'back') ORDER BY rowid")
    assert [text for (text,) in said] == ["going on without h1 from exchange 6 on", "host 'h1' takes part again from exchange 13 on"]
    calm = run(experiment, tmp_path / "calm")
    assert everything(calm) != everything(lost)
    assert decisions(tmp_path / "calm") == []
    repeated = run(experiment, tmp_path / "repeated", decisions_of=tmp_path / "lost")
    assert everything(repeated) == everything(lost)


@pytest.mark.parametrize("kind", ["pdmm", "fedrep_linear"])
def test_a_coordinator_that_is_killed_while_a_host_is_lost_goes_on_without_it(kind: str, tmp_path: Path) -> None:
    federation = {"join_timeout_s": 0.05}
    experiment = small_experiment(LEAN, federation={**RULES, **federation}) if kind == "pdmm" else linear(**federation)
    killed = run(experiment, tmp_path / "killed", Story(killed_at=11, back_at=16))
    assert query(tmp_path / "killed", "SELECT value FROM run WHERE key = 'attempt'") == [("2",)]
    assert [seq for seq, _, _ in decisions(tmp_path / "killed")][:1] == [6]
    repeated = run(experiment, tmp_path / "repeated", decisions_of=tmp_path / "killed")
    assert everything(repeated) == everything(killed)


@pytest.mark.parametrize("kind", ["pdmm", "fedrep_linear"])
def test_a_host_that_never_comes_back_is_missing_at_the_end_and_the_run_has_ended(kind: str, tmp_path: Path) -> None:
    experiment = small_experiment(LEAN, federation=RULES) if kind == "pdmm" else linear()
    lost = run(experiment, tmp_path / "lost", Story(back_at=NEVER))
    assert query(tmp_path / "lost", "SELECT value FROM run WHERE key = 'status'") == [("finished",)]
    assert query(tmp_path / "lost", "SELECT count(*) FROM results WHERE name = 'sum_of_losses'") == [(1,)]
    repeated = run(experiment, tmp_path / "repeated", decisions_of=tmp_path / "lost")
    assert everything(repeated) == everything(lost)


def test_pdmm_has_the_optimum_of_everyone_when_the_host_is_back(tmp_path: Path) -> None:
    experiment = small_experiment(LEAN, federation=RULES, stop={"rounds": 600, "residual": 1e-6})
    lost, calm = run(experiment, tmp_path / "lost", Story(back_at=60)), run(experiment, tmp_path / "calm")
    np.testing.assert_allclose(lost.outcomes["pdmm"].models, calm.outcomes["pdmm"].models, atol=1e-4)


def test_a_host_that_misses_a_whole_penalty_of_a_path_takes_part_in_the_next(tmp_path: Path) -> None:
    method = {"name": "pdmm", "path": [0.4, 0.3, 0.2], "start": "zero"}
    experiment = small_experiment(method, federation=RULES, stop={"rounds": 12})
    lost = run(experiment, tmp_path / "lost", Story(lost_at=8, back_at=34))
    named = query(tmp_path / "lost", "SELECT stage, count(*) FROM ledger WHERE link = 'h1' AND step = 'S5' AND useful GROUP BY stage")
    assert dict(named) == {0: 6, 2: named[-1][1]}
    assert named[-1][1] > 0
    repeated = run(experiment, tmp_path / "repeated", decisions_of=tmp_path / "lost")
    assert everything(repeated) == everything(lost)


def test_a_host_that_is_lost_before_the_method_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    experiment = small_experiment({**LEAN, "start": "global"}, federation=RULES)
    with pytest.raises(RunError, match=r"host 'h1' .* absent since .*; on_loss is skip, but stage 'global' needs every user: without some"):
        run(experiment, tmp_path / "run", Story(lost_at=4, back_at=NEVER))
    resumed = asyncio.run(_resumed(experiment, tmp_path / "run"))
    assert everything(resumed) == everything(run(experiment, tmp_path / "calm"))


async def _resumed(experiment: Experiment, folder: Path) -> Finished:
    names = [user.name for user in list_users(experiment.data, experiment.seed)]

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        for i in range(3):
            store = SnapshotFile(folder / "hosts" / f"h{i}", "host")
            LoopbackLink(hub, build_host(f"h{i}", experiment, hub.run_id, names[i::3], store=store)).join()
        yield

    return await coordinate(experiment, connect, Options(folder=folder, resume=True))


def test_all_decisions_of_an_exchange_are_repeated() -> None:
    """Two hosts may be given up one after the other, by different attempts."""
    database = RunDatabase(None)
    for kind in ("skip", "pass"):
        database.decide(3, kind, ["a"])
        database.decide(3, kind, ["b"])
        database.decide(4, kind, ["a"])
    experiment = small_experiment(LEAN)
    hub = Hub(experiment, "run", database, float)
    _repeat_decisions(database.connection, hub, Engine(experiment, hub, database, None))
    assert hub.participation.skips == hub.participation.passes == {3: frozenset({"a", "b"}), 4: frozenset({"a"})}


def test_a_method_that_cannot_skip_is_refused_before_anybody_is_waited_for(tmp_path: Path) -> None:
    experiment = small_experiment({"name": "squared", "penalty": 0.1}, federation=RULES)
    with pytest.raises(ConfigError, match=r"federation\.on_loss is 'skip', but method 'squared' needs every user"):
        run(experiment, tmp_path / "run")


# ---- real processes


def wait_for_event(struck: Processes, kind: str) -> None:
    deadline = time.monotonic() + 60
    while struck.rows(f"SELECT count(*) FROM events WHERE kind = '{kind}'") == [(0,)]:
        assert time.monotonic() < deadline, struck.logs()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("on_loss", ["skip", "wait"])
def test_a_killed_host_that_comes_back_much_later(on_loss: str, tmp_path: Path) -> None:
    rules = {"hosts": 3, "on_loss": on_loss, "absence_timeout_s": 0.7}
    content = {**FEW, "method": LEAN, "stop": {"rounds": 8000, "residual": None}, "snapshots": {"every_rounds": 50}, "federation": rules}
    with processes(tmp_path, content, hosts=FEW_SHARES) as struck:
        struck.wait_for_round(100)
        struck.shoot("b")
        wait_for_event(struck, on_loss)
        struck.start("b")
        struck.end()
        kinds = dict(struck.rows("SELECT kind, count(*) FROM decisions GROUP BY kind"))
        said = dict(struck.rows("SELECT kind, count(*) FROM events WHERE kind IN ('skip', 'back', 'wait') GROUP BY kind"))
    if on_loss == "wait":
        assert kinds == {}
        assert said["wait"] < 30
        assert_same_bits(struck.run, calm(tmp_path, content), "pdmm")
        return
    assert kinds["skip"] == said["skip"] == said["back"] == 1
    assert kinds["pass"] > 1
    (tmp_path / "again").mkdir()
    with processes(tmp_path / "again", content, hosts=FEW_SHARES, options=["--replay-decisions", str(struck.run)]) as repeated:
        repeated.end()
    assert_same_bits(repeated.run, struck.run, "pdmm")
