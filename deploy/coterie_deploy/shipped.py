"""Experiments by name: the files in `experiments/`, a YAML file of one's own, or the frozen experiment of a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.config import Experiment, load_experiment
from coterie.errors import ConfigError
from coterie.names import natural_key, similar_names

FOLDER = Path(__file__).parent / "experiments"
FROZEN = "experiment.json"
RUNS = Path("runs")


@dataclass(frozen=True)
class Chosen:
    """An experiment as a command wants it run, and the folder for it."""

    experiment: Experiment
    folder: Path


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
) -> Chosen:
    """The experiment and its run folder; without `hosts` their number is the experiment's own, the resumed run's, or the default."""
    path = find(name_or_path)
    experiment = load(name_or_path, overrides, seed=seed, hosts=hosts)
    folder = output or (path.parent if path.name == FROZEN and resume else RUNS / experiment.name)
    if hosts is None and "hosts" not in experiment.federation.model_fields_set:
        frozen = folder / FROZEN
        number = load_experiment(frozen).federation.hosts if resume and frozen.is_file() else default_hosts(experiment)
        experiment = load(name_or_path, overrides, seed=seed, hosts=number)
    return Chosen(experiment, folder)
