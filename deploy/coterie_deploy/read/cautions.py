"""Warnings about a run: stages that ended before their optimum, and important events."""

import json
import sqlite3
from collections.abc import Sequence

from coterie.experiment.config import Experiment, experiment_from
from coterie_deploy.terminal.tables import figure
from coterie_server.interface.half import FLAT, OVERLAP, UNBOUNDED
from coterie_server.record import summary
from coterie_server.record.summary import Shortfall
from coterie_server.run.plan import stages_of

_EVENTS = ("data", "refused", "numerics", "wait", "skip", "back", "note")  # on which a person may want to act
_MAX_EVENTS = 5  # of a kind
_MAX_NAMES = 6
_OVERLAP = 0.5  # from here on users of two clusters may be closer than users of one


def cautions_of(connection: sqlite3.Connection) -> list[str]:
    """A warning for each kind of shortfall, and the methods' own warnings from the start of their stages."""
    given = connection.execute("SELECT text FROM events WHERE kind = 'warning' GROUP BY text ORDER BY MIN(rowid)")
    sentences = [
        *shortfall_sentences(shortfalls_of(connection)),
        *minimiser_sentences(connection),
        *path_sentences(connection),
        *overlap_sentences(connection),
        *(text for (text,) in given),
    ]
    return [f"warning: {sentence}" for sentence in sentences]


def minimiser_sentences(connection: sqlite3.Connection) -> list[str]:
    """A sentence for the stages whose objective has no minimiser, and one for those where it has several."""
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
    """A sentence if a path has chosen nothing, or no clusters, or its first or last penalty: penalties beyond it were not tried.

    With a single cluster, larger penalties change nothing. Where every user is a cluster, its refit is the user alone for all smaller ones.
    """
    found = summary.facts(connection)
    final, frozen = found.get("final_stage"), found.get("experiment")
    if final is None or frozen is None:
        return []
    listed = stages_of(experiment_from(json.loads(frozen)))
    path = [repr(stage.along) for stage in listed if stage.along is not None]
    stages = {stage.name: stage.results for stage in summary.stages(connection)}
    chosen = final.partition("-")[2]
    if len(path) < 2 or chosen not in path:
        return []
    if "heldout_loss" not in stages[final]:
        unchosen = f"no held-out rows chose among the penalties of method.path: the result {final} is only the last"
        return [f"{unchosen} (wanted: data.test_fraction above 0)"]
    ((n_users,),) = connection.execute("SELECT COUNT(*) FROM members")
    n_clusters, said = stages[final].get("clusters"), []
    if n_clusters == n_users:
        said = [f"nothing was clustered: in the best stage, {final}, each of the {n_users} users is on its own"]
        if next(stage for stage in listed if stage.name == final).along is None:
            return said  # a refit
    which = {path[0]: "largest", path[-1]: "smallest"}.get(chosen)
    if which is None or (which == "largest" and n_clusters == 1.0):
        return said
    beyond = which.removesuffix("est") + "er"
    return [*said, f"the best penalty of method.path, {chosen}, is the {which} of the path: add {beyond} ones, which may be better"]


def overlap_sentences(connection: sqlite3.Connection) -> list[str]:
    """A sentence for the stages that ended before the models of a cluster had come together."""
    found = {stage.name: overlap for stage in summary.stages(connection) if (overlap := stage.results.get(OVERLAP, 0.0)) > _OVERLAP}
    if not found:
        return []
    worst = figure(max(found.values()), 2)
    return [
        f"{_listed(list(found))} ended before the clusters were clear: a model is up to {worst} times as far from its cluster's mean as "
        "the two closest clusters are from each other; the optimum may have other clusters (wanted: a smaller stop.residual, or son_newton)"
    ]


def links_caution(experiment: Experiment, transport: str) -> str:
    """A sentence if the experiment shapes links and the transport has none; else ""."""
    given = ", ".join(f"links.{scope} {text}" for scope, text in experiment.federation.links.given())
    if transport != "loopback" or not given:
        return ""
    return f"transport 'loopback' has no links, so {given} is ignored: want transport 'grpc' for the time that they take"


def shortfalls_of(connection: sqlite3.Connection) -> list[Shortfall]:
    """Shortfalls by the stop rule of the run's experiment."""
    frozen = summary.facts(connection).get("experiment")
    return [] if frozen is None else summary.shortfalls(connection, experiment_from(json.loads(frozen)).stop)


def shortfall_sentences(found: Sequence[Shortfall]) -> list[str]:
    """A sentence for each limit and rule, with its stages."""
    groups: dict[tuple[str, str, float], list[Shortfall]] = {}
    for shortfall in found:
        groups.setdefault((shortfall.limit, shortfall.rule, shortfall.wanted), []).append(shortfall)
    said = []
    for (limit, rule, wanted), listed in groups.items():
        worst = f"{'up to ' if len(listed) > 1 else ''}{figure(max(one.found for one in listed), 2)}"
        state = f"with {rule} {worst} (wanted {wanted:g})" if rule else "before converging"
        names = _listed([one.stage for one in listed])
        said.append(f"{names} stopped at {limit} {state}: models and clusters are not those of the optimum")
    return said


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def events_of(connection: sqlite3.Connection) -> list[str]:
    """The latest events of each kind on which a person may want to act, each once."""
    said: dict[str, None] = {}
    for kind in _EVENTS:
        rows = connection.execute(
            "SELECT text FROM events WHERE kind = ? GROUP BY text ORDER BY MAX(rowid) DESC LIMIT ?", (kind, _MAX_EVENTS)
        )
        said |= dict.fromkeys(text for (text,) in rows)
    return list(said)
