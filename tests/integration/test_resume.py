"""Snapshots and resume by replay: whoever dies and whenever, the models are the same bits and the ledger calls repeats repeats."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import RunError
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.run.coordinator import Options, coordinate
from coterie_server.session.hub import Hub
from coterie_server.session.refusal import Refusal
from tests.simulation import CoordinatorKilledError, Faults, World, bits, query, random_faults, small_experiment
from tests.slow import slow_after

METHODS = {
    "squared": {"name": "squared", "penalty": 0.07},
    "lean": {"name": "pdmm", "penalty": 0.3, "start": "zero"},
    "paper": {"name": "pdmm", "penalty": 0.3, "placement": "paper", "order": "jacobi"},
    "paired": {"name": "pdmm", "penalty": 0.3, "placement": "paper", "sampling": "paired", "primal_fraction": 0.5},
}


def n_exchanges(folder: Path) -> int:
    return int(query(folder, "SELECT max(seq) FROM ledger")[0][0])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, Any]]:
    """The number of exchanges and the bits of a method's undisturbed run on three hosts."""

    @functools.cache
    def run(method: str) -> tuple[int, Any]:
        folder = tmp_path_factory.mktemp("calm")
        finished = World(small_experiment(METHODS[method]), folder / "run", 3).run()
        return n_exchanges(folder / "run"), bits(finished)

    return run


@pytest.mark.parametrize("n_hosts", [1, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_hosts_does_not_change_a_bit(method: str, n_hosts: int, tmp_path: Path) -> None:
    experiment = small_experiment(METHODS[method])
    alone = World(experiment, tmp_path / "one", 1).run()
    several = World(experiment, tmp_path / "several", n_hosts).run()
    assert bits(several) == bits(alone)


@pytest.mark.parametrize("seed", slow_after(3, range(10)))
@pytest.mark.parametrize("method", METHODS)
def test_killed_hosts_and_a_killed_coordinator_end_with_the_same_bits(
    method: str, seed: int, tmp_path: Path, calm: Callable[[str], tuple[int, Any]]
) -> None:
    n, undisturbed = calm(method)
    faults = random_faults(seed, n, ["h0", "h1", "h2"])
    world = World(small_experiment(METHODS[method]), tmp_path / "faulty", 3, faults, keeps_hosts=bool(seed % 2))
    assert bits(world.run()) == undisturbed
    assert len(world.done) == 3, "all faults must have struck"


@pytest.mark.parametrize("seed", range(4))
def test_useful_traffic_is_counted_once_whatever_was_repeated(seed: int, tmp_path: Path) -> None:
    experiment = small_experiment(METHODS["paper"])
    World(experiment, tmp_path / "calm", 3).run()
    faults = random_faults(seed, n_exchanges(tmp_path / "calm"), ["h0", "h1", "h2"])
    World(experiment, tmp_path / "faulty", 3, faults).run()
    totals = (
        "SELECT stage, round, step, direction, link, sum(vectors), sum(scalars), sum(payload_bytes) FROM ledger "
        "WHERE useful AND step != 'control' GROUP BY 1, 2, 3, 4, 5"
    )
    assert query(tmp_path / "faulty", totals) == query(tmp_path / "calm", totals)
    repeats = query(tmp_path / "faulty", "SELECT count(*) FROM ledger WHERE NOT useful AND step != 'control'")[0][0]
    assert repeats > 0


def test_a_host_that_lost_its_state_after_it_was_forgotten_is_turned_away(tmp_path: Path) -> None:
    import shutil

    experiment = small_experiment(METHODS["squared"], snapshots={"every_rounds": 1})
    World(experiment, tmp_path / "calm", 2).run()
    last = n_exchanges(tmp_path / "calm")

    class Amnesia(World):
        def kill(self, link):  # type: ignore[no-untyped-def]
            hub, name = link.hub, link.name
            shutil.rmtree(self.folder / "hosts" / name)
            hub.lost(name, link, "killed")
            with pytest.raises(Refusal, match=r"host 'h1' came back without its state: it is at task 0, wanted at least \d+"):
                LoopbackLink(hub, self.host(name, hub.run_id)).join()
            hub.fail(RunError(hub.journal.refused[name]))

    with pytest.raises(RunError, match="host 'h1' came back without its state"):
        Amnesia(experiment, tmp_path / "faulty", 2, Faults(hosts_before={last: "h1"})).run()


def test_a_host_cannot_claim_an_exchange_that_no_attempt_has_numbered(tmp_path: Path) -> None:
    experiment = small_experiment(METHODS["squared"])
    calm = World(experiment, tmp_path / "calm", 3).run()

    class Boasting(World):
        @contextlib.asynccontextmanager
        async def connect(self, hub: Hub) -> AsyncIterator[None]:
            for claimed in (10**9, 1001) if hub.state.attempt > 1 else ():
                liar = self.host("h1", hub.run_id)
                liar.last_seq = claimed
                with pytest.raises(Refusal, match=f"state that is not of this run: it is at task {claimed}, but none above 1000 was ever"):
                    LoopbackLink(hub, liar).join()
            async with super().connect(hub):
                yield
                assert hub.participation.furthest < 1000

    world = Boasting(experiment, tmp_path / "faulty", 3, Faults(coordinator=[4]))
    assert bits(world.run()) == bits(calm)
    assert query(world.folder, "SELECT value FROM run WHERE key = 'reserved'") == [("1000",)]
    assert len(query(world.folder, "SELECT * FROM events WHERE kind = 'refused'")) == 2


def test_both_books_agree_to_the_byte(tmp_path: Path) -> None:
    World(small_experiment(METHODS["paired"]), tmp_path / "run", 3).run()
    columns = "link, seq, attempt, resent, direction, kind, vectors, scalars, payload_bytes, message_bytes, frames"
    parent = query(tmp_path / "run", f"SELECT {columns} FROM ledger WHERE seq > 0 ORDER BY {columns}")
    hosts = query(tmp_path / "run", f"SELECT {columns} FROM host_ledger ORDER BY {columns}")
    assert len(parent) > 100
    assert parent == hosts


def test_a_killed_run_says_how_many_rounds_of_its_stage_were_made(tmp_path: Path) -> None:
    world = World(small_experiment({**METHODS["lean"], "start": "global"}), tmp_path / "run", 1, Faults(coordinator=[20]))
    with pytest.raises(CoordinatorKilledError):
        asyncio.run(coordinate(world.experiment, world.connect, Options(folder=world.folder)))
    with contextlib.closing(open_run(world.folder)) as connection:
        before, under_way = summary.stages(connection)
    assert before.outcome
    assert (under_way.name, under_way.outcome) == ("pdmm", "")
    n_rounds = query(world.folder, "SELECT count(DISTINCT round) FROM figures WHERE stage = 1")
    assert [(under_way.rounds,)] == n_rounds
    assert under_way.rounds > 5


def test_a_resumed_run_names_its_stage_as_its_progress_does(tmp_path: Path) -> None:
    World(small_experiment({**METHODS["lean"], "start": "global"}), tmp_path / "run", 1, Faults(coordinator=[20])).run()
    ((text,),) = query(tmp_path / "run", "SELECT text FROM events WHERE kind = 'resume'")
    assert text.startswith("resumed in stage 2/2 pdmm, round ")
