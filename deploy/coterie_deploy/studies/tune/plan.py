"""What defines a tune: an experiment, the points of a grid, the folds; and its folder.

OUTPUT/tune.json    the experiment, the grid, the folds
OUTPUT/fold-F/      the run of fold F, as any run's folder
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, as_written, experiment_from
from coterie.experiment.overrides import apply_overrides
from coterie.families.grid import MAX_POINTS, Grid
from coterie.registry import method, methods
from coterie.text import yaml_text
from coterie.text.quoting import quoted
from coterie_deploy.engines.launch import Transport
from coterie_deploy.read import shipped
from coterie_deploy.read.shipped import RUNS
from coterie_deploy.studies.series import Series, federation_of
from coterie_deploy.terminal.tables import counted

TUNE = "tune.json"
DEFAULT_FOLDS = 5
MAX_FOLDS = 1000


@dataclass(frozen=True)
class Tuning:
    """All that defines a cross-validation."""

    content: Mapping[str, Any]  # the experiment as it was written, without a grid
    entries: Sequence[Mapping[str, Any]]  # the grid: changes of the method's settings
    folds: int
    federation: Mapping[str, Any]  # hosts and topology of its runs, where they differ from the experiment's

    def fold(self, number: int) -> Experiment:
        """The run of fold `number`, from 1: a stage for each point. ConfigError when a point does not fit the method."""
        content = {**self.content, "references": [], "evaluate": True}
        for key, more in (("data", {"fold": {"number": number, "of": self.folds}}), ("method", {"grid": list(self.entries)})):
            content[key] = {**content[key], **more}
        return experiment_from({**content, "federation": {**content.get("federation", {}), **self.federation}})

    def chosen(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The experiment with the settings of one point, as one would write it."""
        method = {key: value for key, value in {**self.content["method"], **entry}.items() if value is not None}
        return {**self.content, "method": method}


SERIES = Series("tune", "tune", TUNE, Tuning, "fold-*")


@dataclass(frozen=True)
class Asked:
    """The options of the command. None and () mean the values of the experiment, or of the tune that is resumed."""

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
        many = counted(len(entries), "point")
        raise ConfigError(f"the grid has {many}, want at least 2: --grid method.setting=values, or method.grid in the experiment")
    content = as_written(experiment)
    content["method"].pop("grid", None)
    before, given = {} if started is None else started.federation, {"hosts": asked.hosts, "topology": asked.topology}
    tuning = Tuning(content, entries, folds, federation_of(content, before, given, asked.transport, default_hosts))
    SERIES.check_same(tuning.fold(1), None if started is None else started.fold(1), folder, folder)
    return tuning, folder


def _load(asked: Asked, own: Path | None, entries: Sequence[Mapping[str, Any]]) -> Experiment:
    """The experiment with the settings of the first point, since a required setting may be in the grid alone."""
    listed = [*asked.overrides, *(f"method.{key}={json.dumps(value)}" for key, value in (entries[0] if entries else {}).items())]
    if own is None:
        experiment = shipped.load(asked.experiment, listed, seed=asked.seed)
    else:
        listed += [] if asked.seed is None else [f"seed={asked.seed}"]
        experiment = experiment_from(apply_overrides(dict(SERIES.read(own).content), listed), str(own / TUNE))
    if experiment.data.fold is not None:
        raise ConfigError(f"the experiment {asked.experiment} has data.fold, want none: a tune makes the folds itself")
    if not isinstance(experiment.method, Grid):
        able = [name for name in methods() if issubclass(method(name).config, Grid)]
        name = experiment.method.name
        way = f"one run tries the values of method.{key} itself; " if (key := method(name).tries) else ""
        raise ConfigError(f"method {name!r} cannot be tuned: {way}coterie tune wants one of {', '.join(able)}")
    return experiment


def fold_folder(folder: Path, number: int) -> Path:
    """Where the run of fold `number`, from 1, is."""
    return folder / f"fold-{number}"


# ---- the grid of the command line: --grid method.gamma=0.1,1,10 --grid method.lam=0.1..100:7, all values with all others.
# Values are read as YAML; LOW..HIGH:N stands for N numbers from LOW to HIGH, evenly spaced on a logarithmic scale.

_RANGE = re.compile(r"(\S+?)\.\.(\S+):(\S+)")
_DIGITS = 4  # of the numbers inside a range: people read and type them
_EXAMPLES = "for example method.gamma=0.1,1,10 or method.lam=0.1..100:7"


def entries_of(options: Sequence[str]) -> list[dict[str, Any]]:
    """The points of the grid, for `coterie.families.grid`. Neighbours in this order differ in one step of one setting.

    Numbers descend: the largest penalties come first, and each point is a good start for the next, as along a path. ConfigError for an
    option that is not of the form above, a setting without values or with a value twice, and a grid of one point or too many.
    """
    values: dict[str, list[Any]] = {}
    for option in options:
        key, listed = _setting(option)
        if key in values:
            raise ConfigError(f"--grid has method.{key} twice, want each setting once")
        values[key] = listed
    n_points = math.prod(len(listed) for listed in values.values())
    if not 2 <= n_points <= MAX_POINTS:
        raise ConfigError(f"the grid has {counted(n_points, 'point')}, want 2 to {MAX_POINTS} to choose from")
    points: list[dict[str, Any]] = [{}]
    for key, listed in values.items():
        turns = (listed, listed[::-1])
        points = [{**point, key: value} for place, point in enumerate(points) for value in turns[place % 2]]
    return points


def _setting(option: str) -> tuple[str, list[Any]]:
    """One option: the method's setting, and its values."""
    place, equals, text = option.partition("=")
    room, _, key = place.strip().partition(".")
    if not equals or room != "method" or not key.isidentifier():
        raise ConfigError(f"--grid {quoted(option)} wants the form method.setting=values, {_EXAMPLES}")
    found = yaml_text.parsed(f"[{text}]", f"--grid {quoted(option)}: the list of values")
    listed = [value for item in found for value in _values(item, option)]
    if not listed:
        raise ConfigError(f"--grid {quoted(option)} has no values, want at least one, {_EXAMPLES}")
    twice = next((value for place, value in enumerate(listed) if value in listed[:place]), None)
    if twice is not None:
        raise ConfigError(f"--grid {quoted(option)} has the value {twice} twice, want each once")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in listed):
        listed.sort(reverse=True)
    return key, listed


def _values(item: Any, option: str) -> list[Any]:
    """The values that one item of the list stands for. YAML reads 1e-3, without a point, as text."""
    if not isinstance(item, str):
        return [item]
    if (match := _RANGE.fullmatch(item)) is None:
        number = _number(item)
        return [item if number is None else number]
    low, high, count = _number(match[1]), _number(match[2]), match[3]
    if low is None or high is None or not 0 < low < high or not count.isdecimal() or not 2 <= int(count[:9]) <= MAX_POINTS:
        raise ConfigError(f"--grid {quoted(option)}: a range is LOW..HIGH:N with 0 < LOW < HIGH and N from 2 to {MAX_POINTS}")
    steps = int(count) - 1
    inner = [float(f"{low * (high / low) ** (step / steps):.{_DIGITS}g}") for step in range(1, steps)]
    return [low, *inner, high]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
