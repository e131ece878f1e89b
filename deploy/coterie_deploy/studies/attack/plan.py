"""What defines a drill: an experiment, methods, rules, kinds of lies, seeds; and its folder.

OUTPUT/attack.json                        all of these
OUTPUT/METHOD-RULE-KIND-SEED/             the run of a method with a rule, in which some hosts lie so
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment import plugins
from coterie.experiment.config import Experiment, as_written
from coterie.experiment.robust import HALF, RULES
from coterie.registry import method
from coterie.text.quoting import quoted
from coterie_client.data import UserHead, list_users
from coterie_deploy.engines.api import load_experiment
from coterie_deploy.engines.shares import divided
from coterie_deploy.read.shipped import RUNS
from coterie_deploy.studies.attack.lies import KINDS, STRENGTHS, Lies
from coterie_deploy.studies.compare.plan import Comparing, listed_methods, listed_seeds
from coterie_deploy.studies.series import Series, Wanted

NOBODY, MEAN = "nobody", "mean"  # the kind without lies, the rule that is none
_HOSTS = 10
MAX_RUNS = 1000


@dataclass(frozen=True)
class Cell:
    """A run, but for its seed."""

    method: str
    rule: str
    kind: str


@dataclass(frozen=True)
class Attacking:
    """All that defines a drill."""

    content: Mapping[str, Any]  # the experiment as it was written
    methods: Sequence[str]
    rules: Sequence[str]
    kinds: Sequence[str]
    seeds: Sequence[int]
    hosts: int  # of all
    liars: int  # of these, the last ones
    strength: float | None = None  # of the lies; None: that of each kind
    lying: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by seed: the users of hosts that lie

    def cells(self) -> Iterator[Cell]:
        """Method by method. A method that no rule fits has the mean alone, which stands for what it does by itself."""
        for name in self.methods:
            for rule in self.rules_of(name):
                for kind in (NOBODY, *self.kinds):
                    yield Cell(name, rule, kind)

    def rules_of(self, name: str) -> list[str]:
        """Those that fit the method in this experiment."""
        return [rule for rule in self.rules if self._fits(name, rule)]

    def _fits(self, name: str, rule: str) -> bool:
        try:
            self.experiment(Cell(name, rule, NOBODY), self.seeds[0])
        except ConfigError:
            if rule == MEAN:
                raise
            return False
        return True

    def experiment(self, cell: Cell, seed: int) -> Experiment:
        """The experiment of a run, with the fraction that lies as that of the rule. ConfigError where the method does not fit it."""
        rule = None if cell.rule == MEAN else {"rule": cell.rule}
        if rule is not None and cell.rule not in HALF:
            rule["fraction"] = min(self.liars / self.hosts, 0.49)  # type: ignore[assignment]
        federation = {**self.content.get("federation", {}), "hosts": self.hosts, "topology": "flat", "robust": rule}
        own = {"collect_models": True} if "collect_models" in method(cell.method).config.model_fields else {}
        settings = {cell.method: [f"method.{key}={str(value).lower()}" for key, value in own.items()]}
        comparing = Comparing({**self.content, "federation": federation}, [cell.method], [seed], settings, {}, budget="same")
        return comparing.experiment(cell.method, seed)

    def disguise(self, cell: Cell, seed: int) -> Lies | None:
        """What makes the last hosts lie."""
        if cell.kind == NOBODY:
            return Lies("label_flip", frozenset(), 0.0, seed)  # a run of a drill, in which nobody does
        names = frozenset(f"host-{number}" for number in range(self.hosts - self.liars + 1, self.hosts + 1))
        strength = STRENGTHS[cell.kind] if self.strength is None else self.strength
        return Lies(cell.kind, names, strength, seed)  # type: ignore[arg-type]

    def wanted(self, folder: Path) -> list[Wanted]:
        """The runs, seed by seed."""
        return [
            Wanted(
                f"{cell.method} {cell.rule} {cell.kind} {seed}",
                run_folder(folder, cell, seed),
                functools.partial(self.experiment, cell, seed),
                self.disguise(cell, seed),
            )
            for seed in self.seeds
            for cell in self.cells()
        ]


SERIES = Series("drill", "attack", "attack.json", Attacking, "*-[0-9]*")


def run_folder(folder: Path, cell: Cell, seed: int) -> Path:
    """Where the run of a cell from a seed is."""
    return folder / f"{cell.method}-{cell.rule.replace(':', '.')}-{cell.kind}-{seed}"


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    experiment: str
    hosts: int  # that lie
    of: int | None  # hosts
    kinds: str
    rules: str
    methods: str | None
    seeds: str
    strength: float | None
    overrides: Sequence[str]
    output: Path | None
    resume: bool
    data: Path | None


def choose(asked: Asked) -> tuple[Attacking, Path]:
    """The drill and its folder. ConfigError for what is wrong with either."""
    if (own := SERIES.folder_named(asked.experiment, resume=asked.resume)) is not None:
        return SERIES.read(own), own
    experiment = load_experiment(asked.experiment, asked.overrides)
    if experiment.exact_sums:  # the lies would not be told, and the drill would say that they do no harm
        raise ConfigError(
            "exact_sums is true, but a drill changes answers of single users, and these hosts send sums: want false and open sums"
        )
    content = as_written(experiment)
    folder = asked.output or RUNS / f"{content['name']}-attack"
    if (started := SERIES.started(folder, resume=asked.resume)) is not None:
        return started, folder
    methods = listed_methods(asked.methods, content) if asked.methods else (content["method"]["name"],)
    seeds = listed_seeds(asked.seeds)
    others = [name for name in map(str.strip, asked.rules.split(",")) if plugins.is_path(name) or plugins.is_there("rule", name)]
    rules = _listed("rule", asked.rules, (MEAN, *RULES, *others))
    kinds = _listed("kind", asked.kinds, KINDS)
    attacking = Attacking(content, methods, rules, kinds, seeds, 1, 0)
    users = {seed: _users(attacking, methods[0], seed, asked.data) for seed in seeds}
    n_users = min(map(len, users.values()))
    n_hosts = asked.of or content.get("federation", {}).get("hosts") or min(_HOSTS, n_users)
    if not 0 < asked.hosts < n_hosts / 2:
        raise ConfigError(f"--hosts is {asked.hosts}, want at least 1 and less than half of the {n_hosts} hosts (--of sets their number)")
    if n_hosts > n_users:
        raise ConfigError(f"--of is {n_hosts}, want at most the {n_users} users that there are")
    lying = {
        str(seed): [heads[at].name for share in divided(range(len(heads)), n_hosts)[-asked.hosts :] for at in share]
        for seed, heads in users.items()
    }
    found = Attacking(content, methods, rules, kinds, seeds, n_hosts, asked.hosts, asked.strength, lying)
    if (n_runs := len(seeds) * sum(1 for _ in found.cells())) > MAX_RUNS:
        raise ConfigError(f"these are {n_runs} runs, want at most {MAX_RUNS}: fewer kinds, rules, methods or seeds")
    return found, folder


def _users(attacking: Attacking, name: str, seed: int, data: Path | None) -> Sequence[UserHead]:
    experiment = attacking.experiment(Cell(name, MEAN, NOBODY), seed)
    return list_users(experiment.data, seed, data)


def _listed(what: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Some of the known names, in their order, or all."""
    listed = [name.strip() for name in text.split(",")]
    if listed == ["all"]:
        return tuple(known)
    if unknown := [name for name in listed if name not in known]:
        raise ConfigError(f"--{what} has {quoted(unknown[0])}, want all or some of {', '.join(known)}")
    return tuple(name for name in known if name in listed)
