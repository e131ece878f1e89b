"""Experiments by name: the files in `experiments/`, a YAML file of one's own, or the frozen experiment of a run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_to_json, load_experiment
from coterie.text.names import natural_key, similar_names
from coterie_server.record.rundb import no_run_folder

FOLDER = Path(__file__).parents[1] / "experiments"
FROZEN = "experiment.json"
RUNS = Path("runs")
HOSTS = "hosts"  # in a run folder: state and log of each host that was started with the run


@dataclass(frozen=True)
class Chosen:
    """An experiment as a command wants it run, and the folder for it."""

    experiment: Experiment
    folder: Path
    note: str = ""  # what may surprise


def shipped() -> dict[str, Path]:
    """The shipped experiments by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: natural_key(path.stem))}


def find(name_or_path: str) -> Path:
    """The file of an experiment; a run folder stands for the frozen experiment in it. ConfigError when there is none."""
    known = shipped()
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if (path / FROZEN).is_file():
        return path / FROZEN
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} is a folder without {FROZEN}, want an experiment: a YAML file, a run folder or a shipped name")
    similar = similar_names(name_or_path, known)
    hint = f"did you mean {' or '.join(map(repr, similar))}?" if similar else f"shipped are {', '.join(known) or 'none'}"
    raise ConfigError(f"there is no experiment {name_or_path!r}, neither shipped nor as a file: {hint}")


def frozen_in(folder: Path) -> Experiment:
    """The experiment of the run in a folder. ConfigError when it has none."""
    if not (folder / FROZEN).is_file():
        raise no_run_folder(folder, FROZEN)
    return load_experiment(folder / FROZEN)


def load(name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None, hosts: int | None = None) -> Experiment:
    """The experiment with `overrides` of the form "key.key=value"; `seed` and `hosts` replace its own."""
    listed = list(overrides)
    if seed is not None:
        listed.append(f"seed={seed}")
    if hosts is not None:
        listed.append(f"federation.hosts={hosts}")
    return load_experiment(find(name_or_path), listed)


def choose(
    name_or_path: str,
    overrides: Sequence[str],
    *,
    seed: int | None,
    hosts: int | None,
    default_hosts: Callable[[Experiment], int],
    output: Path | None,
    resume: bool,
    command: str = "run",
) -> Chosen:
    """The experiment and its run folder; without `hosts` their number is the experiment's own, the resumed run's, or the default.

    A run is resumed as it was frozen, unless something else is asked for. ConfigError when the folder is used by another run, or
    the run to resume is another one; `command` is what could go on with it.
    """
    path = find(name_or_path)
    experiment = load(name_or_path, overrides, seed=seed, hosts=hosts)
    folder = output or (path.parent if path.name == FROZEN and resume else RUNS / experiment.name)
    frozen = folder / FROZEN
    if frozen.is_file() and not resume:
        raise ConfigError(f"the run folder {folder} is already used: choose another one with --output, or go on with its run with --resume")
    started = load_experiment(frozen) if frozen.is_file() else None
    if hosts is None and "hosts" not in experiment.federation.model_fields_set:
        number = default_hosts(experiment) if started is None else started.federation.hosts
        experiment = load(name_or_path, overrides, seed=seed, hosts=number)
    found = None if started is None else difference(experiment, started)
    if started is None or found is None:
        return Chosen(experiment, folder)
    if overrides or seed is not None or hosts not in (None, started.federation.hosts) or experiment.name != started.name:
        key, old, new = found
        raise ConfigError(f"{key} is {new}, but {folder} was started with {old}: resume it with `coterie {command} {folder} --resume`")
    return Chosen(started, folder, "{0} stays {1}: the run goes on as frozen in {3}, not with {2}".format(*found, frozen))


def has_started(name_or_path: str, output: Path | None) -> bool:
    """Whether the run folder that a command means has a run."""
    return ((output or RUNS / load(name_or_path).name) / FROZEN).is_file()


def difference(experiment: Experiment, started: Experiment) -> tuple[str, str, str] | None:
    """The first key in which an experiment differs from the one that a run was started with, with the old and the new value."""
    new, old = (_flat(json.loads(experiment_to_json(one))) for one in (experiment, started))
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) != old.get(key):
            return key, json.dumps(old.get(key)), json.dumps(new.get(key))
    return None


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
