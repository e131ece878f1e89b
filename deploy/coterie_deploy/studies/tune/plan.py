"""What a tune is: an experiment, the points of a grid, the folds; and the folder that remembers it.

OUTPUT/tune.json    the experiment, the grid, the folds
OUTPUT/fold-F/      the run of fold F, as any run's folder
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, apply_overrides, as_written, experiment_from
from coterie.families.grid import MAX_POINTS, Grid
from coterie.registry import method, methods
from coterie.text import yaml_text
from coterie.text.quoting import quoted
from coterie_deploy.engines.launch import Transport
from coterie_deploy.read import shipped
from coterie_deploy.read.shipped import RUNS
from coterie_deploy.studies.series import Series, federation_of

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


# ---- the grid as the command line gives it: --grid method.gamma=0.1,1,10 --grid method.lam=0.1..100:7, all values with all others.
# Values are read as YAML; LOW..HIGH:N stands for N numbers from LOW to HIGH, evenly spaced on a logarithmic scale.

_RANGE = re.compile(r"(\S+?)\.\.(\S+):(\S+)")
_DIGITS = 4  # of the numbers inside of a range: they are read and typed by people
_EXAMPLES = "for example method.gamma=0.1,1,10 or method.lam=0.1..100:7"


def entries_of(options: Sequence[str]) -> list[dict[str, Any]]:
    """The points of the grid, as `coterie.families.grid` wants them, in an order in which neighbours differ in one step of one setting.

    Numbers descend, so that the largest penalties come first: from them on a warm start is short, as along a path. ConfigError for an
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
        raise ConfigError(f"the grid has {n_points} point{'' if n_points == 1 else 's'}, want 2 to {MAX_POINTS} to choose from")
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
    if match := _RANGE.fullmatch(item):
        return _range(match[1], match[2], match[3], option)
    number = _number(item)
    return [item if number is None else number]


def _range(first: str, last: str, count: str, option: str) -> list[float]:
    low, high = _number(first), _number(last)
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
