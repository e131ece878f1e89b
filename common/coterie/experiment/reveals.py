"""Who learns what: what each method sends about a user, who sees it, and what it reveals.

A method declares it beside its messages, in `reveals` of its `METHOD`. Four things are made from it: the text that a host's owner reads
before a run, `coterie data EXPERIMENT --reveals`, the table in SECURITY.md, and the steps that a host answers. A step without a reveal is
refused. This module knows no method by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from coterie.experiment.method import Fact, Kind
from coterie.registry import built_in_methods, is_method, method, room

if TYPE_CHECKING:
    from coterie.experiment.config import Experiment

Seen = Literal["parents", "aggregator", "coordinator", "between"]
BEFORE, AFTER = ("prepare",), ("evaluation", "inference", "masking")  # steps of every run
SEEN: Mapping[Seen, str] = {  # in a run with aggregators; in a flat run it is the coordinator
    "parents": "aggregator and the coordinator",
    "aggregator": "aggregator",
    "coordinator": "coordinator",
    "between": "coordinator",
}
AMONG_PEERS = "other aggregators"  # who sees what is "between", with topology peers

_MASKED = "under masks, "
_OF_MASKED = "the total over all hosts that are asked, and no host's own part; with the help of all other hosts, that part too"
_OF_MASKED_TIERS = (
    "the aggregator: the total over the hosts of its cluster; the coordinator: that over all clusters, and of a cluster with the help of "
    "its aggregator or of all others; nobody: a host's own part, but with the help of all other hosts of its cluster"
)
_OF_NOISED = "the total with the noise of all hosts that are asked, which tells little of a single user; hosts that help take theirs off"


@dataclass(frozen=True)
class Reveal:
    """One thing that each user sends up.

    `steps` are those of the messages that ask for it or carry it: "ROOM/STEP", or "ROOM" for all steps of a room of `coterie.methods`. It
    is sent if the method's settings have the values in `needs` (a set allows each of its values, a class its instances), and none in
    `unless`. `kind` restricts it to one kind of models. `summed` is what is sent instead with `exact_sums`: one sum for each host, and
    `noised` with `privacy.where: hosts`.
    """

    up: str
    concluded: str
    steps: tuple[str, ...]
    needs: Mapping[str, Any] = field(default_factory=dict)
    unless: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind | None = None
    seen: Seen = "parents"
    title: str = ""  # instead of the method's name
    summed: str = ""
    noised: str = ""
    concluded_of_sums: str = "of a host with one user, what is concluded without sums; of others, what the sum says of each"

    def holds(self, settings: Any, *, is_network: bool) -> bool:
        """Whether it is sent with these settings of its method."""
        if self.kind is not None and (self.kind == "network") != is_network:
            return False
        if any(_is_wanted(getattr(settings, key, None), value) for key, value in self.unless.items()):
            return False
        return all(_is_wanted(getattr(settings, key, None), wanted) for key, wanted in self.needs.items())

    @property
    def condition(self) -> str:
        """When it is sent, for readers."""
        listed = [f"{key.replace('_', ' ')} `{_shown(wanted)}`" for key, wanted in self.needs.items()]
        listed += [f"{key.replace('_', ' ')} not `{_shown(value)}`" for key, value in self.unless.items()]
        kinds = {"convex": ["a convex problem"], "network": ["a network"], None: []}[self.kind]
        return ", ".join([*kinds, *listed])


@dataclass(frozen=True)
class Step:
    """A reveal of an experiment: the part of the run, and who sees it."""

    name: str
    seen_by: str
    reveal: Reveal


def steps_of(experiment: Experiment) -> list[Step]:
    """Who learns what in this experiment, in order of sending."""
    is_network = experiment.model is not None
    of_masked = _OF_MASKED_TIERS if experiment.federation.is_two_tier else _OF_MASKED
    listed: list[Step] = []

    def add(name: str, whose: str, settings: Any) -> None:
        for reveal in room(whose).reveals:
            if reveal.holds(settings, is_network=is_network):
                seen = SEEN[reveal.seen] if experiment.federation.is_two_tier else "coordinator"
                if reveal.seen == "between" and experiment.federation.has_peers:
                    seen = AMONG_PEERS
                if reveal.summed and sends_sums(experiment, whose):
                    reveal = _as_sums(reveal, experiment, of_masked)  # noqa: PLW2901
                listed.append(Step(reveal.title or name, seen, reveal))

    for name in BEFORE:
        add(name, name, SimpleNamespace(**dict(experiment.data), **dict.fromkeys(facts_of(experiment), True)))
    for name in experiment.references:
        add(f"reference {name}", name, method(name).config())
    add(f"method {experiment.method.name}", experiment.method.name, experiment.method)
    for name in AFTER:
        add(name, name, experiment)
    return listed


def _as_sums(reveal: Reveal, experiment: Experiment, of_masked: str) -> Reveal:
    """What is sent of it as sums; `of_masked` is what can be concluded under masks."""
    if not experiment.masks_sums:
        return replace(reveal, up=reveal.summed, concluded=reveal.concluded_of_sums)
    if reveal.noised and experiment.privacy is not None and experiment.privacy.is_shared:
        return replace(reveal, up=f"{_MASKED}{reveal.noised}", concluded=_OF_NOISED)
    return replace(reveal, up=f"{_MASKED}{reveal.summed}", concluded=of_masked)


def facts_of(experiment: Experiment) -> frozenset[Fact]:
    """What the methods of an experiment must know of users' convex losses."""
    configs = [experiment.method, *(method(name).config() for name in experiment.references)]
    return frozenset().union(*(method(config.name).facts(config) for config in configs))


def sends_sums(experiment: Experiment, name: str) -> bool:
    """Whether users' answers to a method leave their host only in exact sums, as far as `Reveal.summed` says."""
    kind: Kind = "convex" if experiment.model is None else "network"
    return experiment.exact_sums and is_method(name) and kind in method(name).sums


def why_not_masked(experiment: Experiment) -> str:
    """Why masks over sums (`federation.sums: masked`) would not hide what hosts send, and what is wanted; "" where they do."""
    rules, data, kind = experiment.federation, experiment.data, "convex" if experiment.model is None else "network"
    if not experiment.exact_sums:
        return "exact_sums is false, and numbers with a floating point cannot be masked: want exact_sums: true"
    totals = {"hosts": (rules.hosts, ""), "hosts_per_cluster": (rules.hosts_per_cluster, " of its cluster")}
    for key, (n, of) in totals.items() if rules.is_two_tier else [("hosts", totals["hosts"])]:
        if n < 2:
            return f"federation.{key} is {n}, whose sum is the total{of}: want at least 2"
        if (rules.min_summed or 0) > n:
            return f"min_summed is {rules.min_summed}: want at most federation.{key}, which is {n}"
    if experiment.inference:
        return "inference sends second moments of each user: want inference: false"
    if data.standardize or data.fills_missing:
        key = "data.standardize" if data.standardize else "data.missing"
        return f"{key} sends sums of each user's features: want rows that are standardised and filled before"
    for name, settings in ((experiment.method.name, experiment.method), *((name, method(name).config()) for name in experiment.references)):
        if kind not in method(name).sums:
            return f"{name!r} needs the answer of each user: want it out of method and references"
        listed = (found for found in method(name).reveals if found.holds(settings, is_network=kind == "network") and not found.summed)
        if sent := next((found.up for found in listed if not all(step.endswith(("evaluation", "evaluate")) for step in found.steps)), ""):
            return f"{name!r} also sends of each user {sent}: want it out of method and references"
    return ""


def summed_by(experiment: Experiment) -> frozenset[str]:
    """The steps whose messages a host of this experiment sends only as sums, if they have any."""
    names = (experiment.method.name, *experiment.references)
    listed = [found for name in names if sends_sums(experiment, name) for found in method(name).reveals if found.summed]
    return frozenset(step for reveal in listed for step in reveal.steps)


def answered_by(experiment: Experiment) -> frozenset[str]:
    """The steps that a host of this experiment answers: "ROOM/STEP", or "ROOM" for all of its steps."""
    return frozenset(step for found in steps_of(experiment) for step in found.reveal.steps)


def is_answered(answered: frozenset[str], whose: str, step: str) -> bool:
    """Whether they include a message of this room and step."""
    return whose in answered or f"{whose}/{step}" in answered


def table() -> list[str]:
    """The table of SECURITY.md, as lines of Markdown. Methods with equal rows share one."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    listed = [(name, reveal) for name in (*BEFORE, *built_in_methods(), *AFTER) for reveal in room(name).reveals]
    for name, reveal in listed:
        label = reveal.title or f"`{name}`"
        if reveal.condition and not reveal.title:
            label += f" ({reveal.condition})"
        seen = "parents" if reveal.seen == "parents" else f"the {reveal.seen}"
        if reveal.seen == "between":
            seen = f"the coordinator; with topology peers {AMONG_PEERS}"
        labels = rows.setdefault((reveal.up, reveal.concluded, seen), [])
        if label not in labels:
            labels.append(label)
    lines = ["| method | per user, up | seen by | what can be concluded |", "|---|---|---|---|"]
    return lines + [f"| {', '.join(labels)} | {up} | {seen} | {concluded} |" for (up, concluded, seen), labels in rows.items()]


def _is_wanted(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, type):
        return isinstance(value, wanted)
    return value in wanted if isinstance(wanted, frozenset) else bool(value == wanted)


def _shown(wanted: Any) -> str:
    if isinstance(wanted, type):
        return wanted.__name__.lower()
    values: Sequence[Any] = sorted(wanted, key=str) if isinstance(wanted, frozenset) else [wanted]
    return " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
