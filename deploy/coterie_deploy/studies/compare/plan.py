"""What defines a comparison: an experiment, methods, seeds, keys that vary; and its folder.

OUTPUT/compare.json             the experiment, the methods with their settings, the seeds
OUTPUT/METHOD-SEED/             the run of a method from a seed, as any run's folder
OUTPUT/METHOD-SETTINGS-SEED/    the same where keys vary

A method takes over those keys of the experiment's method section that it knows too, such as the optimizer. Its users work as much in a
round as those of the experiment's method (`budget`). Its other settings keep their defaults, unless they are set for this method alone:
`--set METHOD:method.key=value`.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, as_written, experiment_from, experiment_to_json
from coterie.experiment.method import Kind, shared_keys
from coterie.experiment.overrides import apply_overrides
from coterie.experiment.plugins import is_path
from coterie.experiment.problem import METRICS
from coterie.families.partial import Work
from coterie.registry import is_method, method, methods, written
from coterie.text.names import similar_names
from coterie.text.quoting import quoted
from coterie_deploy.engines.api import Source, load_experiment
from coterie_deploy.engines.launch import Transport
from coterie_deploy.read.shipped import FROZEN, RUNS
from coterie_deploy.studies.compare import budget
from coterie_deploy.studies.compare.vary import Row, checked, overrides_of, rows_of, said
from coterie_deploy.studies.series import Series, federation_of
from coterie_deploy.terminal.tables import counted
from coterie_server.record.curves import Goal, goal_from
from coterie_server.run.plan import stages_of

COMPARE = "compare.json"
Budget = Literal["same", "own"]
DEFAULT_SEEDS = "0:3"
MAX_RUNS = 1000
_FOR_ONE = re.compile(r"\s*(\w+):(.*)", re.DOTALL)
_SEEDS = re.compile(r"(\d{1,19}):(\d{1,19})|\d{1,19}(?:,\d{1,19})*")


@dataclass(frozen=True)
class Comparing:
    """All that defines a comparison."""

    content: Mapping[str, Any]  # the experiment as it was written, with what is set for all
    methods: Sequence[str]
    seeds: Sequence[int]
    settings: Mapping[str, Sequence[str]]  # by method: what is set for it alone, as overrides
    federation: Mapping[str, Any]  # hosts and topology of the runs, where they differ from the experiment's
    target: str | None = None
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # by dotted key: its values; several keys are a grid
    beside: Sequence[str] = ()  # import paths of the methods that are files beside the experiment
    budget: Budget = "own"  # "same": every method has the local work of the experiment's own one; "own": its own settings or defaults
    evaluate_every: int | None = None  # rounds, of methods whose users can evaluate along the way; None: as the experiment has it
    work: Mapping[str, str] = field(default_factory=dict)  # by row, in words: for whoever reads the file

    def __post_init__(self) -> None:
        """Loads the methods beside the experiment, which are found by name from now on. ConfigError for those that do not exist."""
        for path in self.beside:
            method(path)

    @functools.cached_property
    def rows(self) -> dict[str, Row]:
        """The lines of the comparison by name: a method, or a method with values of what varies."""
        return {row.name: row for row in rows_of(self.methods, self.vary)}

    def of(self, method: str) -> list[Row]:
        """The rows of a method."""
        return [row for row in self.rows.values() if row.method == method]

    def experiment(self, name: str, seed: int) -> Experiment:
        """The run of a row from a seed. ConfigError where its method or a value does not fit the experiment."""
        row = self.rows[name]
        section = {key: self.content["method"][key] for key in _taken_over(row.method, self.content)}
        if self.budget == "same" and row.method != self.own.method.name:
            config = self._with(row, section, seed).method
            section = budget.with_same_work(config, section, self.own, self.settings_of(row))
        return self._with(row, budget.with_evaluations(row.method, section, self.evaluate_every), seed)

    def settings_of(self, row: Row) -> list[str]:
        """What is set for a row alone, as overrides."""
        return [*self.settings.get(row.method, ()), *row.overrides]

    def _with(self, row: Row, section: Mapping[str, Any], seed: int) -> Experiment:
        federation = {**self.content.get("federation", {}), **self.federation}
        content = {**self.content, "references": [], "evaluate": True, "seed": seed, "federation": federation}
        content["method"] = {**section, "name": row.method}
        values = "".join(f" and {key} {said(value)}" for key, value in row.values.items())
        return experiment_from(apply_overrides(content, self.settings_of(row)), f"the experiment with method {row.method!r}{values}")

    @functools.cached_property
    def own(self) -> Experiment:
        """The experiment itself, with its own method, and the first value of each key that varies."""
        return experiment_from(dict(self.content))

    def work_of(self, name: str) -> Work | None:
        """The local work of a drawn user in a round of a row; None where it is not counted in passes."""
        return budget.work_of(self.experiment(name, self.seeds[0]))

    def left_out(self, method: str) -> list[str]:
        """The keys of the experiment's own method section that this method does not have, or not in the same sense."""
        config = self.experiment(self.of(method)[0].name, self.seeds[0]).method
        drawn = [key for key in budget.DRAWN if getattr(config, key, None) == getattr(self.own.method, key, None)]
        kept = {"name", *_taken_over(method, self.content), *drawn}
        return [key for key in self.content["method"] if key not in kept and f"method.{key}" not in self.vary]

    def untuned(self, name: str) -> list[str]:
        """The strengths of a method that are left at their defaults, each with its value."""
        config = self.experiment(self.of(name)[0].name, self.seeds[0]).method
        return [f"{key} {getattr(config, key):g}" for key in method(name).strengths if key not in config.model_fields_set]

    def runs(self) -> list[tuple[Row, int]]:
        """Row and seed of each run, seed by seed, since a table of some seeds is useful before all are done."""
        return [(row, seed) for seed in self.seeds for row in self.rows.values()]

    @property
    def goal(self) -> Goal | None:
        """The goal of the runs. ConfigError when the target is no goal."""
        return None if self.target is None else goal_from(self.target)


SERIES = Series("comparison", "compare", COMPARE, Comparing, "*-[0-9]*")


@dataclass(frozen=True)
class Asked:
    """The options of the command. None and () mean the values of the experiment, or of the comparison that is resumed."""

    experiment: Source
    methods: str | None = None  # a,b,c
    seeds: str | None = None  # 0:3, or 0,2,5
    overrides: Sequence[str] = ()
    hosts: int | None = None
    transport: Transport = "loopback"
    output: Path | None = None
    resume: bool = False
    target: str | None = None
    budget: str | None = None
    vary: Mapping[str, Sequence[Any]] | None = None


def choose(asked: Asked, default_hosts: Callable[[Experiment], int]) -> tuple[Comparing, Path]:
    """The comparison and its folder. ConfigError for what is wrong with either, or where the folder has other runs than those asked for."""
    own = SERIES.folder_named(asked.experiment, resume=asked.resume)
    for_all, for_one = _divided(asked.overrides)
    vary: Mapping[str, Sequence[Any]] = checked(asked.vary or {})
    base = _content(asked.experiment, own, [*for_all, *_first_of(vary)])
    folder = asked.output or own or RUNS / f"{base['name']}-compare"
    started = SERIES.started(folder, resume=asked.resume)
    if started is not None and not vary:
        vary = started.vary
        base = _content(asked.experiment, own, [*for_all, *_first_of(vary)])
    _check_set_once(vary, for_all, for_one)
    if asked.hosts is not None and (found := {"federation", "federation.hosts"} & vary.keys()):
        raise ConfigError(f"--vary has {min(found)}, but --hosts {asked.hosts} sets it: want one of them")
    _check_varies_the_same(vary, started, folder)
    methods = listed_methods(asked.methods, base) if asked.methods is not None else () if started is None else tuple(started.methods)
    methods = methods or ((base["method"]["name"],) if vary else ())
    if not methods:
        instead = "; or --vary KEY=V1,V2 for settings of one method"
        raise ConfigError(f"there are no methods to compare, want --methods with some of {', '.join(_fitting(base))}{instead}")
    seeds = listed_seeds(asked.seeds or DEFAULT_SEEDS) if asked.seeds is not None or started is None else tuple(started.seeds)
    if (n_runs := math.prod(map(len, [methods, seeds, *vary.values()]))) > MAX_RUNS:
        raise ConfigError(f"{_counted(methods, vary)} from {counted(len(seeds), 'seed')} are {n_runs} runs, want at most {MAX_RUNS}")
    if strangers := for_one.keys() - set(methods):
        option = f"--set {min(strangers)}:{quoted(for_one[min(strangers)][0])}"
        raise ConfigError(f"{option} is for a method that is not compared, want one of {', '.join(methods)}")
    earlier = started.settings if started is not None and own is not None else {}
    settings = {name: [*earlier.get(name, ()), *for_one.get(name, ())] for name in methods if name in earlier or name in for_one}
    target = asked.target if asked.target is not None or started is None else started.target
    beside = [path for name in methods if (path := written(name)) != name]
    before = {} if started is None else started.federation
    federation = federation_of(base, before, {"hosts": asked.hosts}, asked.transport, default_hosts)
    shared, every = _budget(asked, started), _evaluated(base, target) if started is None else started.evaluate_every
    comparing = Comparing(base, methods, seeds, settings, federation, target, vary, beside, shared, every)
    _check(comparing, folder, asked.transport)
    listed = {name: work for name in comparing.rows if (work := comparing.work_of(name)) is not None}
    return replace(comparing, work={name: budget.sentence(work) for name, work in listed.items()}), folder


def _first_of(vary: Mapping[str, Sequence[Any]]) -> list[str]:
    """Overrides with the first value of each key, without which an experiment may lack one that it needs."""
    return overrides_of({key: values[0] for key, values in vary.items()})


def _check_set_once(vary: Mapping[str, Any], for_all: Sequence[str], for_one: Mapping[str, Sequence[str]]) -> None:
    """ConfigError for a key that varies and is also set, or has a part that is."""
    for override in itertools.chain(for_all, *for_one.values()):
        key = override.partition("=")[0].strip()
        if found := next((name for name in vary if name == key or key.startswith(f"{name}.")), None):
            raise ConfigError(f"--vary has {found}, but --set {quoted(override)} sets it: want one of them")


def _check_varies_the_same(vary: Mapping[str, Any], started: Comparing | None, folder: Path) -> None:
    """ConfigError where a comparison that goes on would vary other keys: its table has one set of rows."""
    if started is not None and (new := list(vary)) != (old := list(started.vary)):
        told = [" and ".join(keys) or "no key" for keys in (new, old)]
        again = f"go on with `coterie compare {folder} --resume`, or choose another --output"
        raise ConfigError(f"--vary has {told[0]}, but the comparison in {folder} varies {told[1]}: {again}")


def number_of_runs(comparing: Comparing) -> str:
    """A sentence, for before they start."""
    return f"{_counted(comparing.methods, comparing.vary)} from {counted(len(comparing.seeds), 'seed')}: {len(comparing.runs())} runs"


def _counted(methods: Sequence[str], vary: Mapping[str, Sequence[Any]]) -> str:
    if not vary:
        return counted(len(methods), "method")
    times = " x ".join(f"{len(values)}" for values in vary.values())
    settings = f"{times} settings"
    return f"{settings} of {methods[0]}" if len(methods) == 1 else f"{len(methods)} methods with {settings} each"


def _budget(asked: Asked, started: Comparing | None) -> Budget:
    if asked.budget not in (None, "same", "own"):
        raise ConfigError(f"--budget is {quoted(asked.budget)}, want same or own")
    chosen = asked.budget or ("same" if started is None else started.budget)
    return "same" if chosen == "same" else "own"


def _evaluated(content: Mapping[str, Any], target: str | None) -> int | None:
    """How often users evaluate on the way to a target, in rounds; None without a target, or where it is of another figure."""
    goal = None if target is None else goal_from(target)
    if goal is None or goal.figure not in METRICS:
        return None
    return max(1, experiment_from(dict(content)).stop.rounds // budget.TRACED_ROUNDS)


def _check(comparing: Comparing, folder: Path, transport: Transport) -> None:
    """ConfigError for a method or value that does not fit the experiment, values that mean the same, a target that is none, and a run in
    the folder that is another one."""
    _ = comparing.goal
    rows: dict[str, Row] = {}
    for row, seed in comparing.runs():
        frozen = run_folder(folder, row, seed) / FROZEN
        try:
            experiment = comparing.experiment(row.name, seed)
        except ConfigError as error:
            hint = "" if row.values else f" (--set {row.method}:method.key=value is for this method alone)"
            raise ConfigError(f"{error}{hint}") from None
        same = rows.setdefault(experiment_to_json(experiment), row)
        if comparing.vary and same is not row:
            keys = " and ".join(comparing.vary)
            raise ConfigError(f"--vary {keys}: {same.name} and {row.name} are the same experiment, want values that differ")
        if transport == "loopback" and experiment.federation.is_two_tier:
            raise ConfigError(f"{row.name}: transport 'loopback' has one process, want federation.topology 'flat', or --transport grpc")
        stages_of(experiment)
        SERIES.check_same(experiment, load_experiment(frozen) if frozen.is_file() else None, frozen.parent, folder)


def _content(config: Source, own: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The experiment as written, or as its comparison has it."""
    if own is not None:
        return as_written(experiment_from(apply_overrides(dict(SERIES.read(own).content), overrides), str(own / COMPARE)))
    experiment = load_experiment(config, overrides)
    if getattr(experiment.method, "grid", None):
        raise ConfigError(f"the experiment {experiment.name} has method.grid, want none: a comparison has one run for each method and seed")
    return as_written(experiment)


def _kind(content: Mapping[str, Any]) -> Kind:
    return "convex" if content.get("model") is None else "network"


def _fitting(content: Mapping[str, Any]) -> list[str]:
    """The methods for experiments of this kind: with a network, or convex."""
    return [name for name in methods(_kind(content)) if method(name).stands_alone]


def listed_methods(text: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    listed, fitting = [name.strip() for name in text.split(",")], _fitting(content)
    names = [method(name).name if is_path(name) else name for name in listed]
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


def listed_seeds(text: str) -> tuple[int, ...]:
    """FIRST:END, as Python counts, without END; or a list."""
    found = _SEEDS.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--seeds is {quoted(text)}, want FIRST:END such as 0:3, which is 0, 1 and 2, or a list such as 0,1,2")
    if found[1] is not None:
        first, end = int(found[1]), int(found[2])
        if not first < end <= first + MAX_RUNS:
            raise ConfigError(f"--seeds is {text.strip()}, want 1 to {MAX_RUNS} seeds, FIRST:END without END")
        return tuple(range(first, end))
    listed = tuple(int(seed) for seed in found[0].split(","))
    if len(set(listed)) < len(listed):
        raise ConfigError(f"--seeds is {text.strip()}, want each seed once")
    return listed


def _divided(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides for all methods, and those for one: METHOD:KEY=VALUE."""
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
    """The keys of the experiment's own method section that mean the same to this method."""
    return shared_keys(content["method"], method(content["method"]["name"]), method(name), _kind(content))


def run_folder(folder: Path, row: Row, seed: int) -> Path:
    """Where the run of a row from a seed is."""
    return folder / f"{row.folder}-{seed}"
