"""Run folders that something has happened to: resuming says so in one sentence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.errors import ConfigError, RunError
from coterie_server.record.rundb import RunDatabase
from coterie_server.run.coordinator import Options, coordinate
from tests.simulation import World, small_experiment

EXPERIMENT = small_experiment({"name": "squared", "penalty": 0.07})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run."""
    World(EXPERIMENT, tmp_path / "run", 2).run()
    return tmp_path / "run"


def delete(path: Path) -> None:
    path.unlink()


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def scramble(path: Path) -> None:
    """All but the first page."""
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(255 - byte for byte in content[4096:]))


def of_another_run(path: Path) -> None:
    path.unlink()
    database = RunDatabase(path)
    database.put("run_id", "another")
    database.close()


@pytest.mark.parametrize(
    ("file", "harm", "sentence"),
    [
        ("run.db", delete, "run.db is missing or empty, but there are checkpoints: start again with another --output$"),
        ("run.db", halve, "run.db is damaged .*: start again with another --output$"),
        ("run.db", scramble, "run.db is damaged .*: start again with another --output$"),
        ("run.db", of_another_run, "run.db is of run 'another', but the checkpoints are of run '.*': start again with another --output$"),
        ("experiment.json", halve, "experiment.json is damaged .*: start again with another --output$"),
    ],
)
def test_a_damaged_run_is_not_resumed(run: Path, file: str, harm: Callable[[Path], None], sentence: str) -> None:
    harm(run / file)
    for _ in range(2):  # to be told so changes nothing
        world = World(EXPERIMENT, run, 2)
        with pytest.raises((ConfigError, RunError), match=sentence) as error:
            asyncio.run(coordinate(world.experiment, world.connect, Options(folder=run, resume=True)))
        assert "\n" not in str(error.value)


def test_a_crash_while_the_experiment_is_frozen_leaves_the_folder_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json.tmp").write_text('{"da')
    World(EXPERIMENT, tmp_path / "run", 2).run()
    assert (tmp_path / "run" / "experiment.json").read_text().endswith("}\n")
    assert not (tmp_path / "run" / "experiment.json.tmp").exists()
