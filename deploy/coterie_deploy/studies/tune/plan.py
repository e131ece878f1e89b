"""What a tune is: an experiment, the points of a grid, the folds; and the folder that remembers it.

OUTPUT/tune.json    the experiment, the grid, the folds
OUTPUT/fold-F/      the run of fold F, as any run's folder
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, apply_overrides, as_written, experiment_from
from coterie.families.grid import Grid
from coterie.registry import method, methods
from coterie_deploy.engines.launch import Transport
from coterie_deploy.read import shipped
from coterie_deploy.read.shipped import RUNS
from coterie_deploy.studies.series import Series, federation_of
from coterie_deploy.studies.tune.grid import entries_of

TUNE = "tune.json"
DEFAULT_FOLDS = 5
MAX_FOLDS = 1000


@dataclass(frozen=True)
class Tuning:
    """A cross-validation, entirely."""

    content: Mapping[str, Any]  # the experiment as it was written, without a grid
    entries: Sequence[Mapping[str, Any]]  # the grid: changes of the method's settings
    folds: int
    federation: Mapping[str, Any]  # how its runs are started, where that is not what the experiment says: hosts, topology

    def fold(self, number: int) -> Experiment:
        """The run of fold `number`, from 1: a stage for each point. ConfigError when a point does not fit the method."""
        content, evaluated = self.content, {"references": [], "evaluate": True}
        data = {**content["data"], "fold": {"number": number, "of": self.folds}}
        method = {**content["method"], "grid": list(self.entries)}
        federation = {**content.get("federation", {}), **self.federation}
        return experiment_from({**content, **evaluated, "data": data, "method": method, "federation": federation})

    def chosen(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The experiment with the settings of one point, as one would write it."""
        method = {key: value for key, value in {**self.content["method"], **entry}.items() if value is not None}
        return {**self.content, "method": method}


SERIES = Series("tune", "tune", TUNE, Tuning, "fold-*")


@dataclass(frozen=True)
class Asked:
    """What a command asks for. None and () stand for what the experiment, or the tune that is resumed, says."""

    experiment: str
    grid: Sequence[str] = ()
    folds: int | None = None
    overrides: Sequence[str] = ()
    seed: int | None = None
    hosts: int | None = None
    topology: str | None = None
    transport: Transport = "grpc"
    output: Path | None = None
    resume: bool = False


def choose(asked: Asked, default_hosts: Callable[[Experiment], int]) -> tuple[Tuning, Path]:
    """The tune and its folder. ConfigError for what is wrong with either, or where the folder is used by another."""
    own = SERIES.folder_named(asked.experiment, resume=asked.resume)
    listed: Sequence[Mapping[str, Any]] = entries_of(asked.grid) if asked.grid else ()
    experiment = _load(asked, own, listed)
    folder = asked.output or own or RUNS / f"{experiment.name}-tune"
    started = SERIES.started(folder, resume=asked.resume)
    folds = asked.folds if asked.folds is not None else DEFAULT_FOLDS if started is None else started.folds
    if not 2 <= folds <= MAX_FOLDS:
        raise ConfigError(f"folds is {folds}, want 2 to {MAX_FOLDS}")
    entries = listed or experiment.method.grid or (() if started is None else started.entries)
    if len(entries) < 2:
        many = f"{len(entries)} point{'' if len(entries) == 1 else 's'}"
        raise ConfigError(f"the grid has {many}, want at least 2: --grid method.setting=values, or method.grid in the experiment")
    content = as_written(experiment)
    content["method"].pop("grid", None)
    given = {key: value for key, value in (("hosts", asked.hosts), ("topology", asked.topology)) if value is not None}
    given = {**({} if started is None else started.federation), **given}
    tuning = Tuning(content, entries, folds, federation_of(content, given, asked.transport, default_hosts))
    SERIES.check_same(tuning.fold(1), None if started is None else started.fold(1), folder, folder)
    return tuning, folder


def _load(asked: Asked, own: Path | None, entries: Sequence[Mapping[str, Any]]) -> Experiment:
    """The experiment, with the settings of the first point in it: an experiment may leave to the grid what it does not know."""
    first = entries[0] if entries else {}
    listed = [*asked.overrides, *(f"method.{key}={json.dumps(value)}" for key, value in first.items())]
    if own is None:
        experiment = shipped.load(asked.experiment, listed, seed=asked.seed)
    else:
        listed += [] if asked.seed is None else [f"seed={asked.seed}"]
        experiment = experiment_from(apply_overrides(dict(SERIES.read(own).content), listed), str(own / TUNE))
    if experiment.data.fold is not None:
        raise ConfigError(f"the experiment {asked.experiment} has data.fold, want none: a tune makes the folds itself")
    if not isinstance(experiment.method, Grid):
        able = [name for name in methods() if issubclass(method(name).config, Grid)]
        raise ConfigError(f"method {experiment.method.name!r} cannot be tuned, want one of {', '.join(able)}")
    return experiment


def fold_folder(folder: Path, number: int) -> Path:
    """Where the run of fold `number`, from 1, is."""
    return folder / f"fold-{number}"
