"""What a comparison is: an experiment, methods, seeds; and the folder that remembers it.

OUTPUT/compare.json     the experiment, the methods with their settings, the seeds
OUTPUT/METHOD-SEED/     the run of a method from a seed, as any run's folder

A method takes over the keys of the experiment's own method section that it knows too, such as the optimizer; all else is left at its
defaults, or set for it alone: `--set METHOD:method.key=value`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, apply_overrides, as_written, experiment_from
from coterie.experiment.method import Kind, Meaningless
from coterie.experiment.plugins import is_path
from coterie.registry import is_method, method, methods, written
from coterie.text.names import similar_names
from coterie.text.quoting import quoted
from coterie_deploy.engines.api import Source, load_experiment
from coterie_deploy.engines.launch import Transport
from coterie_deploy.read.shipped import FROZEN, RUNS
from coterie_deploy.studies.series import Series, federation_of
from coterie_server.record.curves import Goal, goal_from
from coterie_server.run.plan import stages_of

COMPARE = "compare.json"
DEFAULT_SEEDS = "0:3"
MAX_RUNS = 1000
_FOR_ONE = re.compile(r"\s*(\w+):(.*)", re.DOTALL)
_SEEDS = re.compile(r"(\d{1,19}):(\d{1,19})|\d{1,19}(?:,\d{1,19})*")


@dataclass(frozen=True)
class Comparing:
    """A comparison, entirely."""

    content: Mapping[str, Any]  # the experiment as it was written, with what is set for all
    methods: Sequence[str]
    seeds: Sequence[int]
    settings: Mapping[str, Sequence[str]]  # by method: what is set for it alone, as overrides
    federation: Mapping[str, Any]  # how the runs are started, where that is not what the experiment says: hosts, topology
    target: str | None = None
    beside: Sequence[str] = ()  # import paths of the methods that are files beside the experiment

    def __post_init__(self) -> None:
        """Methods beside the experiment are found by their names once their paths have been seen. ConfigError where they are not there."""
        for path in self.beside:
            method(path)

    def experiment(self, method: str, seed: int) -> Experiment:
        """The run of a method from a seed. ConfigError where the method does not fit the experiment."""
        section = {key: self.content["method"][key] for key in _taken_over(method, self.content)}
        federation = {**self.content.get("federation", {}), **self.federation}
        alone = {"references": [], "evaluate": True, "seed": seed, "federation": federation}
        content = {**self.content, **alone, "method": {**section, "name": method}}
        return experiment_from(apply_overrides(content, self.settings.get(method, ())), f"the experiment with method {method!r}")

    def left_out(self, method: str) -> list[str]:
        """The keys of the experiment's own method section that this method does not have, or not in the same sense."""
        taken_over = _taken_over(method, self.content)
        return [key for key in self.content["method"] if key not in taken_over and key != "name"]

    def runs(self) -> list[tuple[str, int]]:
        """Method and seed of each run, seed by seed: the table of some seeds is of use before all are done."""
        return [(method, seed) for seed in self.seeds for method in self.methods]

    @property
    def goal(self) -> Goal | None:
        """What the runs are to reach. ConfigError when the target is no goal."""
        return None if self.target is None else goal_from(self.target)


SERIES = Series("comparison", "compare", COMPARE, Comparing, "*-[0-9]*")


@dataclass(frozen=True)
class Asked:
    """What is asked for. None and () stand for what the experiment, or the comparison that is resumed, says."""

    experiment: Source
    methods: str | None = None  # a,b,c
    seeds: str | None = None  # 0:3, or 0,2,5
    overrides: Sequence[str] = ()
    hosts: int | None = None
    transport: Transport = "loopback"
    output: Path | None = None
    resume: bool = False
    target: str | None = None


def choose(asked: Asked, default_hosts: Callable[[Experiment], int]) -> tuple[Comparing, Path]:
    """The comparison and its folder. ConfigError for what is wrong with either, or where the folder has other runs than those asked for."""
    own = SERIES.folder_named(asked.experiment, resume=asked.resume)
    for_all, for_one = _divided(asked.overrides)
    base = _content(asked.experiment, own, for_all)
    folder = asked.output or own or RUNS / f"{base['name']}-compare"
    started = SERIES.started(folder, resume=asked.resume)
    methods = _methods(asked.methods, base) if asked.methods is not None else () if started is None else tuple(started.methods)
    if not methods:
        raise ConfigError(f"there are no methods to compare, want --methods with some of {', '.join(_fitting(base))}")
    seeds = _seeds(asked.seeds or DEFAULT_SEEDS) if asked.seeds is not None or started is None else tuple(started.seeds)
    if len(methods) * len(seeds) > MAX_RUNS:
        raise ConfigError(f"{len(methods)} methods from {len(seeds)} seeds are {len(methods) * len(seeds)} runs, want at most {MAX_RUNS}")
    for stranger in for_one.keys() - set(methods):
        raise ConfigError(
            f"--set {stranger}:{quoted(for_one[stranger][0])} is for a method that is not compared, want one of {', '.join(methods)}"
        )
    earlier = started.settings if started is not None and own is not None else {}
    settings = {name: [*earlier.get(name, ()), *for_one.get(name, ())] for name in methods if name in earlier or name in for_one}
    target = asked.target if asked.target is not None or started is None else started.target
    beside = [path for name in methods if (path := written(name)) != name]
    given = {**({} if started is None else started.federation), **({} if asked.hosts is None else {"hosts": asked.hosts})}
    federation = federation_of(base, given, asked.transport, default_hosts)
    comparing = Comparing(base, methods, seeds, settings, federation, target, beside)
    _check(comparing, folder)
    return comparing, folder


def _check(comparing: Comparing, folder: Path) -> None:
    """ConfigError for a method that does not fit the experiment, a target that is none, and a run in the folder that is another one."""
    _ = comparing.goal
    for name, seed in comparing.runs():
        frozen = run_folder(folder, name, seed) / FROZEN
        try:
            experiment = comparing.experiment(name, seed)
        except ConfigError as error:
            raise ConfigError(f"{error} (--set {name}:method.key=value is for this method alone)") from None
        stages_of(experiment)
        SERIES.check_same(experiment, load_experiment(frozen) if frozen.is_file() else None, frozen.parent, folder)


def _content(config: Source, own: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The experiment as written, or as remembered by its comparison."""
    if own is not None:
        content = apply_overrides(dict(SERIES.read(own).content), overrides)
        return as_written(experiment_from(content, str(own / COMPARE)))
    experiment = load_experiment(config, overrides)
    if getattr(experiment.method, "grid", None):
        raise ConfigError(f"the experiment {experiment.name} has method.grid, want none: a comparison has one run for each method and seed")
    return as_written(experiment)


def _kind(content: Mapping[str, Any]) -> Kind:
    return "convex" if content.get("model") is None else "network"


def _fitting(content: Mapping[str, Any]) -> list[str]:
    """The methods for experiments of this kind: with a network, or convex."""
    return [name for name in methods(_kind(content)) if method(name).stands_alone]


def _methods(text: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    names, fitting = [_called(name.strip()) for name in text.split(",")], _fitting(content)
    kind = "a convex problem" if content.get("model") is None else "a network"
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(f"--methods has {name!r} twice, want each once")
        if name in fitting or (written(name) != name and _kind(content) in method(name).models):
            continue
        if is_method(name):
            raise ConfigError(f"method {name!r} does not fit an experiment with {kind}, want some of {', '.join(fitting)}")
        wanted = " or ".join(similar_names(name, fitting)) or f"some of {', '.join(fitting)}"
        raise ConfigError(f"the method {quoted(name)} is unknown, want {wanted}")
    return tuple(names)


def _called(name: str) -> str:
    """The name of a method, also of one that is given by its import path."""
    return method(name).name if is_path(name) else name


def _seeds(text: str) -> tuple[int, ...]:
    """FIRST:END, without END, as Python counts; or a list."""
    found = _SEEDS.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--seeds is {quoted(text)}, want FIRST:END such as 0:3, which is 0, 1 and 2, or a list such as 0,1,2")
    if found[1] is None:
        listed = [int(seed) for seed in found[0].split(",")]
    else:
        first, end = int(found[1]), int(found[2])
        if not first < end <= first + MAX_RUNS:
            raise ConfigError(f"--seeds is {text.strip()}, want 1 to {MAX_RUNS} seeds, FIRST:END without END")
        listed = list(range(first, end))
    if len(set(listed)) < len(listed):
        raise ConfigError(f"--seeds is {text.strip()}, want each seed once")
    return tuple(listed)


def _divided(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """What is set for all methods, and for one: METHOD:KEY=VALUE."""
    for_all: list[str] = []
    for_one: dict[str, list[str]] = {}
    for override in overrides:
        found = _FOR_ONE.fullmatch(override)
        if found is not None and "=" in found[2]:
            for_one.setdefault(found[1], []).append(found[2])
        else:
            for_all.append(override)
    return for_all, for_one


def _taken_over(name: str, content: Mapping[str, Any]) -> list[str]:
    """The keys of the experiment's own method section that mean the same to this method: both have them from a class in common.

    Many methods have a penalty, each its own.
    """
    own, other = method(content["method"]["name"]), method(name)
    shared = [base for base in own.config.__mro__ if issubclass(other.config, base) and issubclass(base, BaseModel)]
    left_out = set() if other is own else {*other.meaningless.get(_kind(content), Meaningless()).keys, *other.own_sense}
    return [key for key in content["method"] if key not in left_out and any(key in base.model_fields for base in shared)]


def run_folder(folder: Path, method: str, seed: int) -> Path:
    """Where the run of a method from a seed is."""
    return folder / f"{method}-{seed}"
