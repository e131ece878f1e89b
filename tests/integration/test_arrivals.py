"""sampling: arrival. No host waits for another; which answers an update took is recorded, and another run can repeat it to the bit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError, RunError, StoppedError
from coterie.experiment.config import Experiment
from coterie.record.snapshot import SnapshotFile
from coterie.wire.codec import Encoded
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_deploy.read.verify import verdict_on
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub
from tests.integration.test_kills import FEW, FEW_SHARES, assert_same_bits
from tests.processes import SERVER, processes
from tests.simulation import bits, query, small_experiment

ARRIVAL = {"name": "pdmm", "penalty": 0.3, "start": "zero", "sampling": "arrival"}
ON_GRAPH = {**ARRIVAL, "graph": {"neighbours": 2}}
SLOW = 7  # exchanges that the slow host needs for a task
NEVER = 10**9


def experiment_of(method: Mapping[str, Any], **extra: Any) -> Experiment:
    return small_experiment(method, **{"federation": {"hosts": 3}, **extra})


class Killed(BaseException):
    """The coordinator is gone at once."""


class SlowLink(LoopbackLink):
    """The host answers only when the others have been asked so many times more, or when nobody else is waited for."""

    def __init__(self, hub: Hub, host: Host, takes: int) -> None:
        super().__init__(hub, host)
        self.takes, self.held = takes, list[tuple[int, Encoded]]()

    def send(self, encoded: Encoded) -> None:
        self.held.append((self._hub.seq + self.takes, encoded))

    def release(self) -> None:
        """Answers what it has had long enough, and what the run cannot go on without."""
        pending = self._hub.state.pending
        while self.held and (self._hub.seq >= self.held[0][0] or (pending is not None and pending.waiting == {self.name})):
            super().send(self.held.pop(0)[1])


class FastLink(LoopbackLink):
    """A host that answers at once. The coordinator may die, or be asked to stop, before its task of some exchange."""

    killed_at = NEVER
    stopped_at = NEVER
    slow: Sequence[SlowLink] = ()
    stop: asyncio.Event | None = None

    def send(self, encoded: Encoded) -> None:
        if self._hub.seq == self.killed_at and self._hub.state.attempt == 1:
            raise Killed
        if self._hub.seq == self.stopped_at and self._hub.state.attempt == 1 and self.stop is not None:
            self.stop.set()
        super().send(encoded)


def run(experiment: Experiment, folder: Path, takes: int = 0, killed_at: int = NEVER, stopped_at: int = NEVER, **options: Any) -> Finished:
    """Hosts h0 and h2 answer at once, h1 takes its time."""
    names = [user.name for user in list_users(experiment.data, experiment.seed)]
    kept: dict[str, Host] = {}

    def attempt(*, resume: bool = False) -> Finished:
        stop = asyncio.Event()

        @contextlib.asynccontextmanager
        async def connect(hub: Hub) -> AsyncIterator[None]:
            for i in range(3):
                store = SnapshotFile(folder / "hosts" / f"h{i}", "host")
                kept.setdefault(f"h{i}", build_host(f"h{i}", experiment, hub.run_id, names[i::3], store=store))
            slow = SlowLink(hub, kept["h1"], takes)
            first, last = FastLink(hub, kept["h0"]), FastLink(hub, kept["h2"])
            last.killed_at, last.stopped_at, last.stop = killed_at, stopped_at, stop
            for link in (first, slow, last):
                link.join()

            async def work() -> None:
                while True:
                    await asyncio.sleep(0)
                    slow.release()

            working = asyncio.create_task(work())
            try:
                yield
            finally:
                working.cancel()

        return asyncio.run(coordinate(experiment, connect, Options(folder=folder, resume=resume, stop=stop, **options)))

    if killed_at == stopped_at == NEVER:
        return attempt()
    with pytest.raises(Killed if killed_at < NEVER else StoppedError):
        attempt()
    return attempt(resume=True)


def arrivals(folder: Path) -> dict[int, list[str]]:
    return {seq: json.loads(value) for seq, value in query(folder, "SELECT seq, value FROM decisions WHERE kind = 'arrive' ORDER BY rowid")}


def figures(folder: Path) -> list[Any]:
    return query(folder, "SELECT stage, round, name, value FROM figures ORDER BY stage, round, name")


@pytest.mark.parametrize("method", [ARRIVAL, ON_GRAPH], ids=["all pairs", "graph"])
def test_fast_hosts_do_not_wait_and_a_replay_of_the_arrivals_has_the_same_bits(method: dict[str, Any], tmp_path: Path) -> None:
    experiment = experiment_of(method)
    recorded = run(experiment, tmp_path / "recorded", SLOW)
    taken = arrivals(tmp_path / "recorded")
    assert list(taken.values()).count(["h0", "h2"]) > 20
    assert list(taken.values()).count(["h0", "h1", "h2"]) >= 3
    assert taken[max(taken)] == ["h1"], "the answer that is owed at the end is waited for"
    repeated = run(experiment, tmp_path / "repeated", decisions_of=tmp_path / "recorded")
    assert bits(repeated) == bits(recorded)
    assert figures(tmp_path / "repeated") == figures(tmp_path / "recorded")
    calm = run(experiment, tmp_path / "calm")
    assert bits(calm) != bits(recorded)
    for name in ("recorded", "repeated", "calm"):
        agrees(tmp_path / name)


def agrees(folder: Path) -> None:
    verdict = verdict_on(folder)
    assert verdict.agrees, (verdict.books, verdict.differences)


@pytest.mark.parametrize(
    ("method", "at"),
    [(ARRIVAL, {"killed_at": 14}), (ARRIVAL, {"killed_at": 20}), (ARRIVAL, {"stopped_at": 17}), (ON_GRAPH, {"killed_at": 20})],
    ids=["killed", "killed later", "stopped", "killed on a graph"],
)
def test_a_coordinator_that_dies_or_stops_while_a_host_is_at_work_goes_on_with_the_bits_of_its_arrivals(
    method: dict[str, Any], at: dict[str, int], tmp_path: Path
) -> None:
    """A checkpoint is made every four rounds, so the answer to a task from before it is taken after it, and asked for again."""
    experiment = experiment_of(method)
    resumed = run(experiment, tmp_path / "resumed", SLOW, **at)
    assert query(tmp_path / "resumed", "SELECT max(attempt) FROM ledger") == [(2,)]
    assert list(arrivals(tmp_path / "resumed").values()).count(["h0", "h1", "h2"]) >= 3
    repeated = run(experiment, tmp_path / "repeated", decisions_of=tmp_path / "resumed")
    assert bits(repeated) == bits(resumed)
    assert figures(tmp_path / "repeated") == figures(tmp_path / "resumed")
    agrees(tmp_path / "resumed")


def test_an_answer_never_becomes_older_than_allowed(tmp_path: Path) -> None:
    experiment = experiment_of({**ARRIVAL, "max_staleness": 3})
    run(experiment, tmp_path / "run", takes=100)
    assert query(tmp_path / "run", "SELECT max(value) FROM figures WHERE name = 'staleness'") == [(3.0,)]
    assert query(tmp_path / "run", "SELECT value FROM results WHERE name = 'greatest_staleness'") == [(3.0,)]


def test_a_replay_of_another_runs_arrivals_is_refused_where_these_end(tmp_path: Path) -> None:
    run(experiment_of(ARRIVAL, stop={"rounds": 5}), tmp_path / "short", SLOW)
    with pytest.raises(RunError, match=r"is not among the arrivals to repeat: the recorded run took none in it"):
        run(experiment_of(ARRIVAL, stop={"rounds": 9}), tmp_path / "long", decisions_of=tmp_path / "short")


def test_a_replay_of_arrivals_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    run(experiment_of(ARRIVAL, stop={"rounds": 5}), tmp_path / "changed", SLOW)
    with contextlib.closing(sqlite3.connect(tmp_path / "changed" / "run.db")) as connection, connection:
        connection.execute("UPDATE decisions SET value = '[\"h9\"]' WHERE rowid = 3")
    with pytest.raises(RunError, match=r"the arrivals to repeat name host 'h9' in exchange \d+, which owes no answer"):
        run(experiment_of(ARRIVAL, stop={"rounds": 5}), tmp_path / "run", decisions_of=tmp_path / "changed")


def test_drawn_arrivals_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """Not on the clock, and not on the hosts: the same users are slow, wherever they are."""
    names = [user.name for user in list_users(experiment_of(ARRIVAL).data, 5)]
    drawn = {**ARRIVAL, "delays": dict.fromkeys(names[1:3], 5)}
    one, other = run(experiment_of(drawn), tmp_path / "one", SLOW), run(experiment_of(drawn), tmp_path / "other")
    assert bits(one) == bits(other)
    assert figures(tmp_path / "one") == figures(tmp_path / "other")
    assert bits(run(experiment_of(drawn, seed=6), tmp_path / "seed")) != bits(one)
    ((greatest,),) = query(tmp_path / "one", "SELECT value FROM results WHERE name = 'greatest_staleness'")
    assert 4 <= greatest <= 8, "a task takes 1 to 9 times that of others"
    assert not arrivals(tmp_path / "one")
    (said,) = query(tmp_path / "one", "SELECT text FROM events WHERE kind = 'note'")
    assert said[0].startswith(
        "stage 'pdmm' has updates instead of rounds (sampling: arrival), with arrivals that are drawn from the seed: "
    )
    assert said[0].endswith(f" updates old in the mean and {greatest:.0f} at most")
    agrees(tmp_path / "one")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"sampling": "full", "max_staleness": 3}, "max_staleness is given with sampling full, which has a round for all"),
        ({"placement": "paper"}, "exact answers in placement lean and constants of its own: placement is paper"),
        ({"tau": 2.0}, "tau is 2.0 with sampling arrival, want less than 2"),
        ({"acceleration": "anderson"}, "sampling is arrival, want full"),
        ({"primal_fraction": 0.5}, "sampling is arrival, which draws nothing: primal_fraction has no meaning"),
    ],
)
def test_settings_without_a_meaning_for_arrivals_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        experiment_of({**ARRIVAL, **wrong})


def test_lost_hosts_cannot_be_left_out(tmp_path: Path) -> None:
    rules = {"hosts": 3, "on_loss": "skip"}
    with pytest.raises(ConfigError, match="on_loss is 'skip', but method 'pdmm' needs every user: with sampling 'arrival'"):
        run(experiment_of(ARRIVAL, federation=rules), tmp_path / "run")
    with pytest.raises(ConfigError, match="delays names user 'nobody', which the run does not have"):
        run(experiment_of({**ARRIVAL, "delays": {"nobody": 2}}), tmp_path / "unknown")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hosts_and_a_coordinator_that_are_killed_go_on_with_the_recorded_arrivals(tmp_path: Path) -> None:
    """Real processes, whose answers come when they come."""
    content = {**FEW, "method": {**ARRIVAL, "penalty": 0.09}, "stop": {"rounds": 3000, "residual": None}}
    with processes(tmp_path, content, hosts=FEW_SHARES) as struck:
        struck.wait_for_round(300)
        struck.kill("b")
        struck.wait_for_round(900)
        struck.kill(SERVER)
        struck.wait_for_round(1500)
        struck.kill(SERVER, "a")
        struck.end()
    assert query(struck.run, "SELECT value FROM run WHERE key = 'attempt'") == [("3",)]
    assert len({tuple(names) for names in arrivals(struck.run).values()}) > 1, "nobody ever waited"
    agrees(struck.run)
    (tmp_path / "again").mkdir()
    with processes(tmp_path / "again", content, hosts=FEW_SHARES, options=["--replay-decisions", str(struck.run)]) as repeated:
        repeated.end()
    assert_same_bits(repeated.run, struck.run, "pdmm")
    assert figures(repeated.run) == figures(struck.run)
