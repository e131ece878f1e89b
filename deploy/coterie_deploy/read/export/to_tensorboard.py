"""TensorBoard event files, without TensorFlow: a folder for each stage, which TensorBoard shows as a run.

The steps of FIGURE/by_round are rounds, those of FIGURE/by_bytes useful wire bytes; result/FIGURE is a closing figure. The experiment is a
text and, as hyper-parameters, a session in the folder itself. Values are float32, as TensorBoard keeps them. Times are those of the rounds.

Each stage has one file, to which exports append. `coterie-export.json` has the id of the run, and for each file its valid length and last
round. Bytes that a killed export wrote beyond that length are cut off and written again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import ConfigError, RunError
from coterie.extras import extra
from coterie.record.files import written_whole
from coterie_deploy.read.export.points import BY_BYTES, BY_ROUND, Points, StagePoints

with extra("tensorboard", "tensorboard", "--to tensorboard needs tensorboard"):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

STATE = "coterie-export.json"
_LOCK = "coterie-export.lock"
_VERSION = "brain.Event:2"  # of event files: with it, steps need not ascend
_ROOT = ""  # the "stage" of what is about the whole run


@dataclass
class _Written:
    """The state of the file of a stage."""

    file: str  # in the folder
    n_bytes: int = 0  # that are good
    rounds: int = 0  # the last that is there by round
    rounds_by_bytes: int = 0
    has_results: bool = False


@contextlib.contextmanager
def target(output: str, points: Points) -> Iterator[EventFiles]:
    """The event files of a run. ConfigError unless the folder is new, empty, or has an earlier export of the same run."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(path.name != _LOCK for path in folder.iterdir())
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{folder} is in use by another export") from None
        yield EventFiles(folder, points.run_id, _state_in(folder, points.run_id) if is_used else {})


def _state_in(folder: Path, run_id: str) -> dict[str, _Written]:
    path = folder / STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stages = {name: _Written(**fields) for name, fields in content["stages"].items()}
        found = str(content["run_id"])
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not empty and holds no export, want a folder of its own for each run") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged ({error}): export to another folder") from None
    if found != run_id:
        raise ConfigError(f"{folder} holds an export of run {found}, want another folder for run {run_id}")
    for written in stages.values():
        file = folder / written.file
        if not file.is_file() or file.stat().st_size < written.n_bytes:
            raise ConfigError(f"{file} is not what an earlier export has left: export to another folder")
    return stages


class EventFiles:
    def __init__(self, folder: Path, run_id: str, stages: dict[str, _Written]) -> None:
        self._folder, self._run_id, self._stages = folder, run_id, stages

    def add(self, points: Points) -> int:
        """Adds what is not there yet; how many values these were. RunError when it cannot be written."""
        try:
            if _ROOT not in self._stages:
                self._append(_ROOT, points.began_at, [Event(wall_time=points.began_at, summary=one) for one in _described(points)])
            n_values = sum(self._add_stage(stage) for stage in points.stages if stage.rounds.size)
        except OSError as error:
            raise RunError(f"cannot write to {self._folder}: {error.strerror or error}") from error
        content = {"run_id": self._run_id, "stages": {name: asdict(written) for name, written in self._stages.items()}}
        with written_whole(self._folder / STATE) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())
        return n_values

    def _add_stage(self, stage: StagePoints) -> int:
        written = self._stages.get(stage.name, _Written(""))
        n_values = self._append(stage.name, float(stage.at[0]), _events(stage, written))
        written = self._stages[stage.name]
        written.rounds = max(written.rounds, int(stage.rounds[-1]))
        if stage.n_bytes is not None:
            written.rounds_by_bytes = max(written.rounds_by_bytes, int(stage.rounds[-1]))
        written.has_results = written.has_results or stage.has_ended
        return n_values

    def _append(self, stage: str, at: float, events: Iterable[Any]) -> int:
        """Appends to the file of a stage, which it creates if necessary; the number of values."""
        n_values = 0
        if stage not in self._stages:
            path = self._folder / stage / f"events.out.tfevents.{at:.0f}.coterie"
            path.parent.mkdir(exist_ok=True)
            self._stages[stage] = _Written(os.fspath(path.relative_to(self._folder)))
        written = self._stages[stage]
        with (self._folder / written.file).open("ab") as file:
            file.truncate(written.n_bytes)  # cuts off what a killed export wrote
            file.seek(0, os.SEEK_END)
            records = RecordWriter(file)
            if not written.n_bytes:
                records.write(Event(wall_time=at, file_version=_VERSION).SerializeToString())
            for event in events:
                n_values += len(event.summary.value)
                records.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
            written.n_bytes = file.tell()
        return n_values


def _events(stage: StagePoints, written: _Written) -> Iterator[Any]:
    for place, number in enumerate(stage.rounds.tolist()):
        values = {name: float(values[place]) for name, values in stage.figures.items() if not np.isnan(values[place])}
        at = float(stage.at[place])
        if values and number > written.rounds:
            yield _event(at, number, {f"{name}/{BY_ROUND}": value for name, value in values.items()})
        if values and stage.n_bytes is not None and number > written.rounds_by_bytes:
            yield _event(at, int(stage.n_bytes[place]), {f"{name}/{BY_BYTES}": value for name, value in values.items()})
            yield _event(at, number, {f"{name}/{BY_ROUND}": float(cost[place]) for name, cost in stage.costs.items()})
    if stage.has_ended and stage.results and not written.has_results:
        results = {f"result/{name}": value for name, value in stage.results.items()}
        yield _event(float(stage.at[-1]), int(stage.rounds[-1]), results)


def _event(at: float, step: int, values: dict[str, float]) -> Any:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    return Event(wall_time=at, step=step, summary=summary)


def _described(points: Points) -> list[Any]:
    """The experiment, as text and as hyper-parameters."""
    experiment = json.dumps(json.loads(points.facts["experiment"]), indent=2)
    text = f"Run {points.run_id} of Coterie {points.facts['version']}\n\n```json\n{experiment}\n```\n"
    return [text_pb("experiment", text), hparams_pb(points.settings, trial_id=points.run_id, start_time_secs=points.began_at)]
