"""The sections about the users of a run: their clusters, and the quality of their models."""

import json
import sqlite3
from collections.abc import Mapping, Sequence

import numpy as np

from coterie.arrays import Array, Indices
from coterie.experiment.config import Experiment
from coterie_deploy.read.report import Report, cluster_rule, metric_name
from coterie_deploy.terminal.tables import figure
from coterie_deploy.view import charts_structure, charts_users
from coterie_deploy.view.charts import Chart, Section, Table
from coterie_deploy.view.charts_structure import AGREEMENT
from coterie_deploy.view.run_graph import graph_of, tree_of
from coterie_server.maths.clusters import adjusted_rand
from coterie_server.record import summary
from coterie_server.record.summary import StageSummary

_MOST_USERS = 160  # rows of a heat map
_MOST_CELLS = 6000
_MOST_TICKS = 400  # users in the chart of a metric
_SPREAD = ("mean", "sd", "min", "q1", "median", "q3", "max")


def clusters_section(connection: sqlite3.Connection, report: Report) -> Section:
    """The clusters along the path of penalties or by rounds, and their agreement with known ones."""
    members = connection.execute("SELECT name, cluster FROM members ORDER BY position").fetchall()
    users, known = [name for name, _ in members], _known([cluster for _, cluster in members])
    labels, own = _labels(connection, len(users)), report.own
    has_ended = {stage.name for stage in report.stages if stage.outcome}
    penalties = {name: stage.along for name, stage in report.plan.items() if stage.along is not None and name in has_ended}
    drawn: list[Chart] = []
    if len(penalties) > 1:
        stages = sorted(penalties, key=penalties.__getitem__)
        drawn += charts_structure.path_charts([penalties[name] for name in stages], _measured(report, stages, labels, known))
        columns, axis = [(f"{penalties[name]:g}", labels[name][-1][1]) for name in stages if labels.get(name)], "penalty"
    else:
        listed = [] if own is None else labels.get(own.name, [])
        columns, axis = [(f"{number:,}", after) for number, after in listed], "round"
        if known is not None and len(listed) > 1:
            agreement = [adjusted_rand(known, after) for _, after in listed]
            drawn.append(charts_structure.agreement_chart([number for number, _ in listed], agreement))
    said = []
    beside = None if known is None else known.tolist()
    until: list[list[int]] = []  # the columns up to that of the own stage, which decide about the colours of its clusters
    if columns and len(users) > 1:
        if known is not None and own is not None and labels.get(own.name):
            agreed = adjusted_rand(known, labels[own.name][-1][1])
            said.append(f"The clusters of {own.name} agree with the known ones by {agreed:.3f} ({AGREEMENT}; 1: the same).")
        if own is not None and (rule := cluster_rule(report, own.name)):
            said.append(f"Users are in one cluster where they are {rule}.")
        n_shown = min(len(users), _MOST_USERS)
        columns = [columns[place] for place in _spread(len(columns), max(2, _MOST_CELLS // n_shown))]
        order = _order([after for _, after in columns], known)
        chosen = [users[int(order[place])] for place in _spread(len(order), n_shown)]
        steps, after = [step for step, _ in columns], [labelled.tolist() for _, labelled in columns]
        drawn.append(charts_structure.clusters_chart(chosen, steps, after, axis=axis, users=users, known=beside))
        own_step = f"{penalties[own.name]:g}" if own is not None and own.name in penalties else ""
        place = steps.index(own_step) if own_step in steps else len(steps) - 1
        until = [*([] if beside is None else [beside]), *after[: place + 1]]
    if len(penalties) > 1 and columns:
        ended = {name: labels[name][-1][1] for name in penalties if labels.get(name)}
        tree = tree_of(report, penalties, ended, users, charts_structure.colours_of(until)[-1] if until else None)
        drawn += [] if tree is None else [tree]
    graph, why_not = graph_of(report, until)
    said += [why_not] if why_not else []
    return Section("clusters", "Clusters", said, charts=[*drawn, *([] if graph is None else [graph])])


def _known(clusters: Sequence[str]) -> Indices | None:
    """The clusters (n,) that the data names, None where there are none to compare with."""
    distinct = list(dict.fromkeys(clusters))
    return np.array([distinct.index(name) for name in clusters]) if 1 < len(distinct) < len(clusters) else None


def _measured(
    report: Report, stages: Sequence[str], labels: Mapping[str, Sequence[tuple[int, Indices]]], known: Indices | None
) -> dict[str, list[float | None]]:
    results = {stage.name: stage.results for stage in report.stages}
    measured: dict[str, list[float | None]] = {
        "clusters": [report.clusters[name] for name in stages],
        f"held-out {metric_name(report.experiment)}": [results[name].get("heldout_metric") for name in stages],
    }
    if known is not None:
        measured[AGREEMENT] = [adjusted_rand(known, labels[name][-1][1]) if labels.get(name) else None for name in stages]
    return {name: values for name, values in measured.items() if any(value is not None for value in values)}


def _labels(connection: sqlite3.Connection, n_users: int) -> dict[str, list[tuple[int, Indices]]]:
    """By stage: the rounds in which the users' clusters changed, and the clusters (n,) after them."""
    names = {stage.number: stage.name for stage in summary.stages(connection)}
    found: dict[str, list[tuple[int, Indices]]] = {}
    for stage, number, text in connection.execute("SELECT stage, round, labels FROM memberships ORDER BY stage, round"):
        labels = np.array(json.loads(text))
        if labels.size == n_users:
            found.setdefault(names.get(stage, str(stage)), []).append((number, labels))
    return found


def _order(columns: Sequence[Indices], known: Indices | None) -> Indices:
    """An order of users that keeps clusters together, first in the steps with few clusters; largest clusters first."""
    found = [_by_size(labels) for labels in sorted(columns, key=lambda labels: -len(np.unique(labels)))]
    return np.lexsort(found if known is None else [known, *found])


def _by_size(labels: Indices) -> Indices:
    """The same clusters (n,), numbered from the largest on; all clusters of one user have the same number."""
    _, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    ranks = np.empty(sizes.size, dtype=np.int64)
    ranks[np.argsort(-sizes, kind="stable")] = np.arange(sizes.size)
    ranks[sizes == 1] = sizes.size
    return ranks[inverse]


def _spread(n: int, most: int) -> list[int]:
    """At most `most` of the places 0..n-1, evenly, with the first and the last."""
    return sorted(set(np.linspace(0, n - 1, min(n, most)).round().astype(int).tolist())) if n else []


def users_section(connection: sqlite3.Connection, report: Report) -> Section:
    """The figures of the result's users."""
    stage = report.main
    if stage is None:
        return Section("users", "Users")
    query = "SELECT r.name, m.name, r.value FROM user_results r JOIN members m ON m.position = r.member WHERE r.stage = ?"
    by_user: dict[str, dict[str, float]] = {}
    for metric, user, value in connection.execute(f"{query} ORDER BY r.name, r.member", (stage.number,)):
        by_user.setdefault(metric.replace("_", " ").replace("heldout", "held-out"), {})[user] = value
    if by_user:
        lines = [[metric, f"{len(values):,}", *_spread_of(np.array(list(values.values())))] for metric, values in by_user.items()]
        tables = [Table(f"Users of stage {stage.name}", ("metric", "users", *_SPREAD), lines)]
        clusters = _clusters_of(connection, stage)
        drawn = [
            charts_users.users_chart(group, key=key, x_title=_unit(next(iter(group)), report.experiment), clusters=clusters)
            for key, group in _alike(by_user).items()
        ]
    else:
        tables, drawn = _told_spread(stage, metric_name(report.experiment), sum(report.hosts.values())), []
    return Section("users", "Users", charts=drawn, tables=tables)


def _clusters_of(connection: sqlite3.Connection, stage: StageSummary) -> dict[str, str] | None:
    """The known cluster of each user or, without any, the one that the stage has found; None unless some but not all users are together."""
    members = connection.execute("SELECT name, cluster FROM members ORDER BY position").fetchall()
    users = [name for name, _ in members]
    if _known([cluster for _, cluster in members]) is not None:
        return dict(members)
    found = _labels(connection, len(users)).get(stage.name)
    labels = [] if not found else found[-1][1].tolist()
    return {user: f"cluster {label}" for user, label in zip(users, labels, strict=True)} if 1 < len(set(labels)) < len(users) else None


def _unit(metric: str, experiment: Experiment) -> str:
    """What the numbers of a metric mean, for the axis below them."""
    if metric.endswith("accuracy"):
        return "share of a user's held-out rows"
    if metric.endswith("squared error"):
        unit = "units" if experiment.data.target_scale is None else "standard deviations"
        return f"mean over a user's held-out rows, in squared {unit} of the target"
    return "mean over a user's held-out rows" if metric.endswith(("deviance", "loss")) else metric


def _alike(by_user: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics that can share an axis, by the key of their chart: accuracies together, others each on their own."""
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for metric, values in by_user.items():
        key = "users-accuracy" if metric.endswith("accuracy") else f"users-{metric.replace(' ', '-')}"
        groups.setdefault(key, {})[metric] = _some(values)
    return groups


def _told_spread(stage: StageSummary, judged: str, n_users: int) -> list[Table]:
    """The spread of users' figures, for a method that does not collect the figures of each user."""
    names = {"heldout_metric": f"held-out {judged}", "heldout_loss": "held-out loss"}
    lines = []
    for metric in (name.removesuffix("_median") for name in stage.results if name.endswith("_median")):
        spread = [stage.results.get(metric if which == "mean" else f"{metric}_{which}") for which in _SPREAD]
        lines.append([names.get(metric, metric.replace("_", " ")), f"{n_users:,}", *map(figure, spread)])
    return [Table(f"Users of stage {stage.name}", ("metric", "users", *_SPREAD), lines)] if lines else []


def _some(values: Mapping[str, float]) -> dict[str, float]:
    """At most `_MOST_TICKS` users, in the order of their values."""
    if len(values) <= _MOST_TICKS:
        return dict(values)
    ordered = sorted(values.items(), key=lambda item: item[1])
    return dict(ordered[place] for place in _spread(len(ordered), _MOST_TICKS))


def _spread_of(values: Array) -> list[str]:
    quartiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    sd = float(values.std(ddof=1)) if values.size > 1 else float("nan")
    return [figure(float(value)) for value in (values.mean(), sd, *quartiles)]
