"""The round engine: stop rules, stages, decisions, checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.record.snapshot import SnapshotFile
from coterie_client.hosting.build import build_host
from coterie_deploy.engines.loopback import join_all
from coterie_server.interface.half import Outcome
from coterie_server.run import coordinator, engine
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.run.engine import Engine, Point, Progress, best
from coterie_server.session.bookings import Bookings
from coterie_server.session.hub import Hub
from tests.simulation import World, bits, query, small_experiment

LEAN = {"name": "pdmm", "penalty": 0.3, "start": "zero"}


def run(experiment: Experiment, **options: object) -> Finished:
    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        join_all(hub, [build_host("h0", experiment, hub.run_id, None)])
        yield

    return asyncio.run(coordinate(experiment, connect, Options(**options)))  # type: ignore[arg-type]


def rounds_of(finished: Finished) -> list[tuple[str, int, str]]:
    return finished.database.connection.execute("SELECT name, rounds, outcome FROM stages ORDER BY number").fetchall()


def test_a_stage_ends_after_its_rounds() -> None:
    assert rounds_of(run(small_experiment(LEAN, stop={"rounds": 7}))) == [("pdmm", 7, "7 rounds")]


def test_a_stage_ends_when_both_residuals_are_small() -> None:
    finished = run(small_experiment(LEAN, stop={"rounds": 3000, "residual": 1e-4}))
    [(_, rounds, outcome)] = rounds_of(finished)
    assert outcome == "residuals at most 0.0001"
    last, before = (finished.database.figures_of(0)[i] for i in (-1, -2))
    assert max(last["primal_residual"], last["dual_residual"]) <= 1e-4
    assert max(before["primal_residual"], before["dual_residual"]) > 1e-4
    assert rounds == len(finished.database.figures_of(0))


def test_a_stage_ends_at_the_objective_gap() -> None:
    optimum = run(small_experiment(LEAN, stop={"rounds": 3000, "residual": 1e-9})).database.figures_of(0)[-1]["objective"]
    stop = {"rounds": 3000, "objective_gap": 1e-4, "reference_objective": optimum}
    finished = run(small_experiment(LEAN, stop=stop))
    assert rounds_of(finished)[0][2] == "objective gap at most 0.0001"
    gaps = [(figures["objective"] - optimum) / optimum for figures in finished.database.figures_of(0)]
    assert gaps[-1] <= 1e-4 < min(gaps[:-1])


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_run_without_a_folder_has_no_checkpoints_to_wait_for(has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    settle = Bookings.settle
    monkeypatch.setattr(Bookings, "settle", lambda bookings: (settled.append(bookings._state.seq), settle(bookings))[1])
    experiment = small_experiment(LEAN, stop={"rounds": 12}, snapshots={"every_rounds": 1})
    run(experiment, folder=tmp_path / "run" if has_folder else None)
    # In each exchange once, and once more before each checkpoint.
    times = [settled.count(seq) for seq in sorted(set(settled))][3:11]
    assert times == [2 if has_folder else 1] * 8


def test_stopping_by_the_clock_is_a_decision_that_another_run_can_repeat(tmp_path: Path) -> None:
    experiment = small_experiment(LEAN, stop={"rounds": 100_000, "residual": None, "wall_time_s": 0.2})
    first = World(experiment, tmp_path / "first", 1).run()
    decisions = query(tmp_path / "first", "SELECT kind, value FROM decisions")
    stopped_at = query(tmp_path / "first", "SELECT rounds FROM stages")[0][0]
    assert decisions == [("wall_time", json.dumps([0, stopped_at]))]

    repeated = run(experiment, decisions_of=tmp_path / "first")
    assert rounds_of(repeated) == [("pdmm", stopped_at, "0.2 s")]
    assert bits(repeated) == bits(first)


def test_a_stop_asked_for_leaves_a_checkpoint_that_a_resume_ends_with_the_same_bits(tmp_path: Path) -> None:
    experiment = small_experiment(LEAN, snapshots={"every_rounds": 1000})
    calm = World(experiment, tmp_path / "calm", 2).run()
    world = World(experiment, tmp_path / "stopped", 2)

    async def stopped() -> None:
        event = asyncio.Event()

        def watch(progress: Progress) -> None:
            if progress.round == 5:
                event.set()

        await coordinate(world.experiment, world.connect, Options(folder=world.folder, observer=watch, stop=event))

    with pytest.raises(RunError, match=r"stopped by a signal in stage 'pdmm' after round \d+; --resume goes on from there"):
        asyncio.run(stopped())
    resumed = asyncio.run(coordinate(world.experiment, world.connect, Options(folder=world.folder, resume=True)))
    assert bits(resumed) == bits(calm)
    assert query(world.folder, "SELECT count(*) FROM figures WHERE name = 'objective'") == [(30,)]


def test_a_round_is_written_down_also_when_what_follows_it_fails(tmp_path: Path) -> None:
    def watch(progress: Progress) -> None:
        if progress.round == 5:
            raise ValueError("seen enough")

    with pytest.raises(ValueError, match="seen enough"):
        run(small_experiment(LEAN), folder=tmp_path / "run", observer=watch)
    assert query(tmp_path / "run", "SELECT max(round), count(*) FROM figures WHERE name = 'dual_residual'") == [(5, 5)]
    assert query(tmp_path / "run", "SELECT max(round) FROM rounds") == [(5,)]


@pytest.mark.parametrize(("limit", "rounds"), [(1 << 19, [0, 60]), (1, [0, 20, 40, 60])])
def test_what_hosts_keep_of_their_replies_is_bounded_by_checkpoints(
    limit: int, rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    def checkpoint(engine: Engine, point: Point) -> None:
        saved.append(point.round)
        written(engine, point)

    written = Engine.checkpoint
    monkeypatch.setattr(engine, "HOST_BYTES", limit)
    monkeypatch.setattr(engine, "_FEWEST_ROUNDS", 20)
    monkeypatch.setattr(Engine, "checkpoint", checkpoint)
    World(small_experiment(LEAN, stop={"rounds": 60}, snapshots={"every_rounds": 60}), tmp_path / "run", 1).run()
    assert saved == [*rounds, 0], "the last is that of the end"


@pytest.mark.parametrize(("young_s", "stages"), [(1e9, [0]), (-1.0, [0, 1, 2, 3])])
def test_a_stage_that_ends_soon_after_a_checkpoint_writes_none(
    young_s: float, stages: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    written = Engine.checkpoint
    monkeypatch.setattr(engine, "_YOUNG_S", young_s)
    monkeypatch.setattr(Engine, "checkpoint", lambda engine, point: (saved.append(point.stage), written(engine, point))[1])
    method = {"name": "pdmm", "path": [0.4, 0.3, 0.2], "start": "zero"}
    path = small_experiment(method, stop={"rounds": 9}, snapshots={"every_rounds": 1000})
    calm = World(path, tmp_path / "calm", 1).run()
    assert saved == stages

    # A coordinator that is killed at the very end repeats what came after the newest checkpoint.
    world = World(path, tmp_path / "killed", 1)
    with monkeypatch.context() as patched:
        patched.setattr(coordinator, "_save_models", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            world.run()
    resumed = asyncio.run(coordinate(world.experiment, world.connect, Options(folder=world.folder, resume=True)))
    assert bits(resumed) == bits(calm)


def test_a_checkpoint_of_another_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    world = World(small_experiment(LEAN, stop={"rounds": 3}), tmp_path / "run", 1)
    world.run()
    store = SnapshotFile(tmp_path / "run" / "checkpoints", "run")
    tree = store.load()
    for old in ({**tree, "format": 1}, {name: value for name, value in tree.items() if name != "format"}):
        store.save(old)
        with pytest.raises(RunError, match=r"^the checkpoints in .*checkpoints were written by another version of coterie: resume the run"):
            asyncio.run(coordinate(world.experiment, world.connect, Options(folder=world.folder, resume=True)))


def test_what_a_stage_carries_is_kept_while_a_later_stage_starts_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_experiment({"name": "pdmm", "path": [0.4, 0.3]}, stop={"rounds": 3}, snapshots={"every_rounds": 1})
    carried: list[list[str]] = []
    written = Engine.checkpoint

    def checkpoint(engine: Engine, point: Point) -> None:
        written(engine, point)
        if not point.round:
            carried.append([name for name, outcome in point.outcomes.items() if outcome.carry is not None])

    monkeypatch.setattr(Engine, "checkpoint", checkpoint)
    World(path, tmp_path / "run", 1).run()
    assert carried == [[], [], ["pdmm-0.4"], []], "of the start, and of the ends of global and of both penalties"


def test_a_used_folder_is_refused_and_a_changed_experiment_is_not_resumed(tmp_path: Path) -> None:
    experiment = small_experiment(LEAN, stop={"rounds": 3})
    World(experiment, tmp_path / "run", 1).run()
    with pytest.raises(ConfigError, match="is already used: choose another one, or --resume"):
        World(experiment, tmp_path / "run", 1).run()
    changed = World(small_experiment(LEAN, stop={"rounds": 4}), tmp_path / "run", 1)
    with pytest.raises(ConfigError, match="the experiment differs from the one"):
        asyncio.run(coordinate(changed.experiment, changed.connect, Options(folder=changed.folder, resume=True)))
    with pytest.raises(ConfigError, match="no run to resume"):
        asyncio.run(coordinate(experiment, changed.connect, Options(folder=tmp_path / "none", resume=True)))


def test_the_best_stage_has_the_smallest_held_out_loss_and_the_earlier_wins_a_tie() -> None:
    outcomes = {name: Outcome(None, figures={"heldout_loss": loss}) for name, loss in (("a", 2.0), ("b", 1.0), ("c", 1.0))}
    assert best(("a", "b", "c"), outcomes) == "b"
    unjudged = {"d": Outcome(None), "e": Outcome(None)}
    assert best(("d", "a"), {**outcomes, **unjudged}) == "a"
    assert best(("d", "e"), unjudged) == "e"


def test_single_precision_halves_the_payload_and_keeps_the_solution() -> None:
    double = run(small_experiment(LEAN, stop={"rounds": 200}))
    single = run(small_experiment(LEAN, stop={"rounds": 200}, payload="float32"))
    payload = "SELECT sum(payload_bytes), sum(vectors) FROM ledger WHERE step = 'S5' AND useful"
    (bytes8, vectors8), (bytes4, vectors4) = (r.database.connection.execute(payload).fetchone() for r in (double, single))
    assert (bytes8, vectors8) == (2 * bytes4, vectors4)
    models8, models4 = (r.outcomes["pdmm"].models for r in (double, single))
    assert models8 is not None
    assert models4 is not None
    np.testing.assert_allclose(models4, models8, atol=1e-4)
    assert not np.array_equal(models4, models8)
