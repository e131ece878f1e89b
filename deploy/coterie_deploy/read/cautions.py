"""What one should know before believing a run: stages that ended before their optimum, and what happened on the way."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from coterie.experiment.config import Experiment, experiment_from
from coterie_deploy.terminal.tables import figure
from coterie_server.interface.half import FLAT, UNBOUNDED
from coterie_server.record import summary
from coterie_server.record.summary import Shortfall
from coterie_server.run.plan import stages_of

_EVENTS = ("data", "refused", "numerics", "wait", "skip", "back")  # those that a person may want to act on
_MAX_EVENTS = 5  # of a kind
_MAX_NAMES = 6


def cautions_of(connection: sqlite3.Connection) -> list[str]:
    """A warning for each kind of shortfall, and those that the methods gave when their stages started."""
    given = connection.execute("SELECT text FROM events WHERE kind = 'warning' GROUP BY text ORDER BY MIN(rowid)")
    sentences = [
        *shortfall_sentences(shortfalls_of(connection)),
        *minimiser_sentences(connection),
        *path_sentences(connection),
        *(text for (text,) in given),
    ]
    return [f"warning: {sentence}" for sentence in sentences]


def minimiser_sentences(connection: sqlite3.Connection) -> list[str]:
    """One for the stages whose objective has no minimiser, and one for those where it has several."""
    stages = summary.stages(connection)
    without, several = ([stage.name for stage in stages if key in stage.results] for key in (UNBOUNDED, FLAT))
    said = []
    if without:
        said.append(
            f"{_listed(without)} ended without a minimiser: the objective falls for ever in some direction, as with separable classes, or "
            "with counts that are all 0; the models are only where the search ended (wanted: problem.l2 above 0)"
        )
    if several:
        said.append(f"{_listed(several)} ended at one of several minimisers: some direction changes nothing (wanted: problem.l2 above 0)")
    return said


def path_sentences(connection: sqlite3.Connection) -> list[str]:
    """One where held-out rows have chosen the first or the last penalty of a path: what is beyond it was not tried.

    At a single cluster larger penalties change nothing.
    """
    found = summary.facts(connection)
    final, frozen = found.get("final_stage"), found.get("experiment")
    if final is None or frozen is None:
        return []
    path = [stage.along for stage in stages_of(experiment_from(json.loads(frozen))) if stage.along is not None]
    stages = {stage.name: stage.results for stage in summary.stages(connection)}
    chosen = final.partition("-")[2]
    ends = [(repr(path[0]), "largest"), (repr(path[-1]), "smallest")] if len(path) > 1 and "heldout_loss" in stages[final] else []
    which = dict(ends).get(chosen)
    if which is None or (which == "largest" and stages[final].get("clusters") == 1.0):
        return []
    beyond = which.removesuffix("est") + "er"
    return [f"the best penalty of method.path, {chosen}, is its {which}: {beyond} ones may be better, so extend the path at that end"]


def links_caution(experiment: Experiment, transport: str) -> str:
    """What to know where the experiment shapes links and the transport has none; "" otherwise."""
    given = ", ".join(f"links.{scope} {text}" for scope, text in experiment.federation.links.given())
    if transport != "loopback" or not given:
        return ""
    return f"transport 'loopback' has no links, so {given} is ignored: want transport 'grpc' for the time that they take"


def shortfalls_of(connection: sqlite3.Connection) -> list[Shortfall]:
    """By the stop rule of the run's own experiment."""
    frozen = summary.facts(connection).get("experiment")
    return [] if frozen is None else summary.shortfalls(connection, experiment_from(json.loads(frozen)).stop)


def shortfall_sentences(found: Sequence[Shortfall]) -> list[str]:
    """One for each limit and rule, with its stages."""
    groups: dict[tuple[str, str, float], list[Shortfall]] = {}
    for shortfall in found:
        groups.setdefault((shortfall.limit, shortfall.rule, shortfall.wanted), []).append(shortfall)
    return [_sentence(limit, rule, wanted, listed) for (limit, rule, wanted), listed in groups.items()]


def _sentence(limit: str, rule: str, wanted: float, listed: Sequence[Shortfall]) -> str:
    names = _listed([one.stage for one in listed])
    worst = f"{'up to ' if len(listed) > 1 else ''}{figure(max(one.found for one in listed), 2)}"
    state = f"with {rule} {worst} (wanted {wanted:g})" if rule else "before converging"
    return f"{names} stopped at {limit} {state}: models and clusters are not those of the optimum"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def events_of(connection: sqlite3.Connection) -> list[str]:
    """What happened on the way that a person may want to act on: the latest of each kind, each once."""
    said: dict[str, None] = {}
    for kind in _EVENTS:
        rows = connection.execute(
            "SELECT text FROM events WHERE kind = ? GROUP BY text ORDER BY MAX(rowid) DESC LIMIT ?", (kind, _MAX_EVENTS)
        )
        said |= dict.fromkeys(text for (text,) in rows)
    return list(said)
