"""A full disk: one sentence that names the path, nothing lost, and with room again the run ends with the bits it would have had."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import RunError
from coterie.record.files import written_whole
from coterie.record.snapshot import SnapshotFile
from coterie.v1 import session_pb2
from coterie_server.record.rundb import RunDatabase
from coterie_server.run.coordinator import Finished, Options, coordinate
from tests.integration.test_kills import CLUSTERS, EXPERIMENT, FEW, FEW_SHARES, L2GD, assert_same_bits, calm
from tests.processes import SERVER, Processes, launched, processes
from tests.simulation import World, bits, query, small_experiment

NO_SPACE = os.strerror(errno.ENOSPC)
SMALL = small_experiment({"name": "pdmm", "penalty": 0.3, "start": "zero"})
PDMM = {
    **FEW,
    "method": {"name": "pdmm", "penalty": 0.3, "start": "zero"},
    "stop": {"rounds": 3000, "residual": 1e-300},
    "snapshots": {"every_rounds": 20},
}
TWO_TIERS = {**L2GD, "federation": {**EXPERIMENT["federation"], "topology": "clusters"}, "snapshots": {"every_rounds": 20}}


# ---- one file


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, older = tmp_path / "deep" / "state", tmp_path / "deep" / "state.1"
    for content in (b"first", b"second"):
        with written_whole(path, keep=older) as file:
            file.write(content)
    monkeypatch.setattr("coterie.record.files.os.fsync", full)
    with (
        pytest.raises(RunError, match=f"^cannot write the state {re.escape(str(path))}: {NO_SPACE}$"),
        written_whole(path, "the state") as file,
    ):
        file.write(b"third")
    assert (path.read_bytes(), older.read_bytes()) == (b"second", b"first")
    assert sorted(os.listdir(path.parent)) == ["state", "state.1"], "what is left of the third would only take room"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, NO_SPACE)


# ---- a run in one process, with a disk that is full at one moment


def fill_at(monkeypatch: pytest.MonkeyPatch, file: str, nth: int) -> None:
    """The nth time that a file of this name takes its place, there is no room for it."""
    replace, times = os.replace, 0

    def refusing(source: Path, target: Path) -> None:
        nonlocal times
        times += Path(target).match(file)
        if times == nth and Path(target).match(file):
            times += 1
            full()
        replace(source, target)

    monkeypatch.setattr("coterie.record.files.os.replace", refusing)


def fill_database_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """From the nth flush of the first attempt on the database cannot grow, which SQLite says as of a full disk."""
    flush, times = RunDatabase.flush, 0

    def limited(database: RunDatabase) -> None:
        nonlocal times
        times += 1
        if times >= nth and database.get("attempt") in (None, "1"):
            pages = database.connection.execute("PRAGMA page_count").fetchone()[0]
            database.connection.execute(f"PRAGMA max_page_count={pages}")
            for number in range(2000):
                database.event("ballast", f"{number} " * 100)
        flush(database)

    monkeypatch.setattr(RunDatabase, "flush", limited)


def resumed(world: World) -> Finished:
    return asyncio.run(coordinate(world.experiment, world.connect, Options(folder=world.folder, resume=True)))


@pytest.mark.parametrize(
    ("file", "nth", "sentence"),
    [
        ("run.snapshot", 1, "^cannot write the snapshot .*/run/checkpoints/run.snapshot: "),
        ("run.snapshot", 4, "^cannot write the snapshot .*/run/checkpoints/run.snapshot: "),
        ("pdmm.npz", 1, "^cannot write the models .*/run/models/pdmm.npz: "),
        ("experiment.json", 1, "^cannot write .*/run/experiment.json: "),
        ("run_id", 1, "^cannot write .*/run/checkpoints/run_id: "),
    ],
)
def test_what_cannot_be_written_is_named_and_a_resumed_run_has_the_same_bits(
    file: str, nth: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = World(SMALL, tmp_path / "calm", 3).run()
    fill_at(monkeypatch, file, nth)
    world = World(SMALL, tmp_path / "run", 3, keeps_hosts=False)
    with pytest.raises(RunError, match=f"{sentence}{NO_SPACE}$"):
        world.run()
    again = world.run() if file == "experiment.json" else resumed(world)
    assert bits(again) == bits(undisturbed)


def test_a_host_that_cannot_write_its_snapshot_says_so_without_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = World(SMALL, tmp_path / "calm", 3).run()
    fill_at(monkeypatch, "host.snapshot", 5)
    world = World(SMALL, tmp_path / "run", 3, keeps_hosts=False)
    with pytest.raises(RunError, match=r"^host 'h.': a file cannot be written \(rule R5\); its own log names it$"):
        world.run()
    assert bits(resumed(world)) == bits(undisturbed)


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_database_that_cannot_grow_is_named_and_a_resumed_run_has_the_same_bits(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = World(SMALL, tmp_path / "calm", 3).run()
    fill_database_at(monkeypatch, nth)
    world = World(SMALL, tmp_path / "run", 3, keeps_hosts=False)
    with pytest.raises(RunError, match=f"^cannot write the run database .*/run/run.db: {NO_SPACE}$"):
        world.run()
    assert bits(resumed(world)) == bits(undisturbed)
    counts = "SELECT count(DISTINCT round) FROM ledger WHERE useful AND step = 'S5'"
    assert query(world.folder, counts) == query(tmp_path / "calm", counts), "each round must count once"


def test_a_run_whose_last_rows_cannot_be_written_does_not_say_that_it_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = World(SMALL, tmp_path / "calm", 3).run()
    event = RunDatabase.event

    def noticing(database: RunDatabase, kind: str, *rest: Any, **data: Any) -> None:
        if kind == "finished":
            database.connection.execute("PRAGMA query_only=ON")  # from here on nothing at all can be written
        event(database, kind, *rest, **data)

    world = World(SMALL, tmp_path / "run", 3, keeps_hosts=False)
    with monkeypatch.context() as patch:
        patch.setattr(RunDatabase, "event", noticing)
        with pytest.raises(RunError, match="cannot write the run database"):
            world.run()
    status = "SELECT value FROM run WHERE key = 'status'"
    assert query(world.folder, status) == [("running",)]
    assert bits(resumed(world)) == bits(undisturbed)
    assert query(world.folder, status) == [("finished",)]


def test_hosts_are_told_when_the_models_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would look for the coordinator until their patience is over."""
    told: list[session_pb2.Finish] = []
    fill_at(monkeypatch, "pdmm.npz", 1)
    world = World(SMALL, tmp_path / "run", 1)
    monkeypatch.setattr("coterie_client.hosting.host.Host.ending", lambda _, finish: told.append(finish))
    with pytest.raises(RunError, match="cannot write the models"):
        world.run()
    assert (told[0].failed, told[0].outcome, told[0].finding.rule) == (True, "", "R5"), "the path is not for hosts"


def test_a_full_disk_does_not_hide_why_a_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(SMALL, tmp_path / "run", 1)

    def failing(*_: object) -> None:
        fill_database_at(monkeypatch, 1)
        raise RunError("the first reason")

    monkeypatch.setattr("coterie_server.run.engine.Engine._after_round", failing)
    with pytest.raises(RunError, match=r"^the first reason$"):
        world.run()


def test_an_old_snapshot_is_there_when_the_newer_one_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotFile(tmp_path, "host")
    store.save({"n": 1})
    monkeypatch.setattr("coterie.record.files.os.fsync", full)
    with pytest.raises(RunError, match=f"cannot write the snapshot .*host.snapshot: {NO_SPACE}"):
        store.save({"n": 2})
    assert store.load() == {"n": 1}


# ---- real processes, a real disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"NOT TESTED on a real disk: mount is not permitted here ({mounted.stderr.strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    """Not a byte is left."""
    with (disk / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def error_of(struck: Processes, name: str) -> str:
    """The one line in which a role says why it has ended."""
    said = struck.ends(name, 3)
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    (struck.folder / f"{name}.log").unlink()
    return errors[0]


def check_goes_on(struck: Processes, disk: Path, tmp_path: Path, content: dict[str, Any], stage: str) -> None:
    """With room again, the same commands end with the bits of a run that has seen nothing."""
    (disk / "ballast").unlink()
    for name in struck.commands:
        struck.start(name, *(("--resume",) if name == SERVER else ()))
    struck.end()
    assert_same_bits(struck.run, calm(tmp_path, content), stage)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_run_folder_ends_the_run_and_with_room_again_it_goes_on(tmp_path: Path, disk: Path) -> None:
    with processes(tmp_path, PDMM, hosts=FEW_SHARES, places={SERVER: disk}) as struck:
        struck.wait_for_round(100)
        fill(disk)
        sentence = rf"cannot write the (snapshot|run database) {re.escape(str(struck.run))}/[a-z./]+: {NO_SPACE}$"
        assert re.fullmatch(f"error: {sentence}", error_of(struck, SERVER))
        for name in FEW_SHARES:
            assert error_of(struck, name) == "error: the run has failed: a file cannot be written (rule R5)"
        struck.start(SERVER, "--resume")  # while there is still no room
        assert re.fullmatch(rf"error: cannot write .*{re.escape(str(struck.run))}.*: {NO_SPACE}", error_of(struck, SERVER))
        check_goes_on(struck, disk, tmp_path, PDMM, "pdmm")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("who", "content", "how"), [("b", PDMM, {"hosts": FEW_SHARES}), ("c1", TWO_TIERS, {"clusters": CLUSTERS})])
def test_a_full_state_folder_of_a_member_ends_the_run_and_with_room_again_it_goes_on(
    who: str, content: dict[str, Any], how: dict[str, Any], tmp_path: Path, disk: Path
) -> None:
    with processes(tmp_path, content, places={who: disk}, **how) as struck:
        struck.wait_for_round(100)
        fill(disk)
        sentence = rf"cannot write the (snapshot|run database) {re.escape(str(disk))}/.*: {NO_SPACE}"
        assert re.fullmatch(f"error: {sentence}", error_of(struck, who))
        noun = "host" if who == "b" else "aggregator"
        assert error_of(struck, SERVER) == f"error: {noun} '{who}': a file cannot be written (rule R5); its own log names it"
        for name in struck.commands:
            if name not in (SERVER, who):
                assert error_of(struck, name).startswith("error: the run has failed: ")
        check_goes_on(struck, disk, tmp_path, content, content["method"]["name"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
def test_a_launched_run_on_a_disk_that_is_full_at_some_round_goes_on_when_it_has_room(seed: int, tmp_path: Path, disk: Path) -> None:
    """Coordinator, hosts, and what they print, all on the same disk."""
    content = {**PDMM, "federation": {"hosts": 2}}
    with launched(tmp_path, content, disk / "run") as struck:
        struck.wait_for_round(int(np.random.default_rng(seed).integers(1, 400)))
        fill(disk)
        assert re.search(rf"cannot write .*{re.escape(str(struck.run))}.*: {NO_SPACE}$", error_of(struck, SERVER))
        struck.commands[SERVER] = ["run", str(struck.run), "--quiet"]
        check_goes_on(struck, disk, tmp_path, content, "pdmm")
