"""Experiments by name: the files in `experiments/`, a YAML file of one's own, or the frozen experiment of a run folder."""

import fnmatch
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_to_json, load_experiment
from coterie.session.where import ADDRESS
from coterie.text.names import natural_key, similar_names
from coterie_server.record.rundb import no_run_folder
from coterie_server.run.coordinator import is_held

FOLDER = Path(__file__).parents[1] / "experiments"
FROZEN = "experiment.json"
RUNS = Path("runs")
NEW_USERS = "new-users"  # in the folder of a run of `coterie adapt`: the file of a new user that does not name it
_OF_RUNS = (  # what runs and their reports write into a run folder
    *(FROZEN, ADDRESS, "run.db*", "run.lock", "checkpoints", "hosts", "models", "start.npz", "report.html", f"{NEW_USERS}*"),
)
HOSTS = "hosts"  # in a run folder: state and log of each host that was started with the run


@dataclass(frozen=True)
class Chosen:
    experiment: Experiment
    folder: Path
    note: str = ""  # for the person who started the command


def shipped() -> dict[str, Path]:
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
    """The experiment of the run in a folder. ConfigError if it has none."""
    if not (folder / FROZEN).is_file():
        raise no_run_folder(folder, FROZEN)
    return load_experiment(folder / FROZEN)


def load(name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None, hosts: int | None = None) -> Experiment:
    """The experiment with `overrides` of the form "key.key=value"; `seed` and `hosts` replace its own."""
    given = {"seed": seed, "federation.hosts": hosts}
    return load_experiment(find(name_or_path), [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)])


def changing(overrides: Sequence[str], seed: int | None) -> list[str]:
    """The options with which a command changes an experiment as `load` does."""
    return [*(word for override in overrides for word in ("--set", override)), *([] if seed is None else ["--seed", str(seed)])]


def choose(
    name_or_path: str,
    overrides: Sequence[str],
    *,
    seed: int | None,
    hosts: int | None,
    default_hosts: Callable[[Experiment], int],
    output: Path | None,
    resume: bool,
    overwrite: bool | None = None,
    command: str = "run",
) -> Chosen:
    """The experiment and its run folder; without `hosts` their number is the experiment's own, the resumed run's, or the default.

    A run is resumed as it was frozen. ConfigError if the folder is used by another run, or the options ask for another experiment;
    `command` is the command that could resume it. `overwrite`: if a run that is not under way in the folder may be replaced. False: without
    `output`, the next free folder is taken instead. None: neither.
    """
    path = find(name_or_path)
    experiment = load(name_or_path, overrides, seed=seed, hosts=hosts)
    folder = output or (path.parent if path.name == FROZEN and resume else RUNS / experiment.name)
    note = ""
    if overwrite:
        check_replaceable(folder)
    elif (folder / FROZEN).is_file() and not resume:
        if overwrite is None or output is not None:
            replace = "" if overwrite is None else " replace its run with --overwrite,"
            what = f"the run folder {folder} is already used"
            raise ConfigError(f"{what}: choose another one with --output,{replace} or go on with its run with --resume")
        used, folder = folder, next_free(folder)
        note = f"{used} has a run, so this one is in {folder} (--overwrite replaces the run, --resume goes on with it)"
    frozen = folder / FROZEN
    started = load_experiment(frozen) if frozen.is_file() and not overwrite else None
    if hosts is None and "hosts" not in experiment.federation.model_fields_set:
        number = default_hosts(experiment) if started is None else started.federation.hosts
        experiment = load(name_or_path, overrides, seed=seed, hosts=number)
    found = None if started is None else difference(experiment, started)
    if started is None or found is None:
        return Chosen(experiment, folder, note)
    if overrides or seed is not None or hosts not in (None, started.federation.hosts) or experiment.name != started.name:
        key, old, new = found
        raise ConfigError(f"{key} is {new}, but {folder} was started with {old}: resume it with `coterie {command} {folder} --resume`")
    return Chosen(started, folder, "{0} stays {1}: the run goes on as frozen in {3}, not with {2}".format(*found, frozen))


def next_free(folder: Path) -> Path:
    """The first of FOLDER, FOLDER-2, FOLDER-3, ... without a run."""
    places = itertools.chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2)))
    return next(place for place in places if not (place / FROZEN).is_file())


def runs_in(folder: Path) -> list[Path]:
    """The folder if it is a run's or has no runs in it; else the runs in it, such as those of a comparison, by name."""
    if (folder / FROZEN).is_file():
        return [folder]
    return sorted((place.parent for place in folder.glob(f"*/{FROZEN}")), key=lambda place: natural_key(place.name)) or [folder]


def check_replaceable(folder: Path) -> None:
    """ConfigError if the folder is there and is more than the folder of a run that is not under way."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / FROZEN).is_file():
        raise no_run_folder(folder, FROZEN)
    others = [path.name for path in folder.iterdir() if not any(fnmatch.fnmatch(path.name, one) for one in _OF_RUNS)]
    if others or folder.is_symlink():
        what = f"has {min(others)!r}, which no run writes" if others else "is a link"
        raise ConfigError(f"--overwrite would delete {folder}, which {what}: move it away, or choose another folder with --output")
    if is_held(folder):
        raise ConfigError(f"the run in {folder} is under way: stop it before --overwrite, or choose another folder with --output")


def has_started(name_or_path: str, output: Path | None) -> bool:
    """Whether the run folder of a command has a run."""
    return ((output or RUNS / load(name_or_path).name) / FROZEN).is_file()


def difference(experiment: Experiment, started: Experiment) -> tuple[str, str, str] | None:
    """The first key in which an experiment differs from the one that a run was started with, with the old and the new value."""
    new, old = (by_dotted_key(json.loads(experiment_to_json(one))) for one in (experiment, started))
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) != old.get(key):
            return key, json.dumps(old.get(key)), json.dumps(new.get(key))
    return None


def by_dotted_key(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= by_dotted_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
