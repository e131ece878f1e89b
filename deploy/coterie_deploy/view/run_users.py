"""The sections about the users of a run: who is together, and how they fare."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from coterie.arrays import Array, Indices
from coterie.experiment.config import Experiment
from coterie_deploy.read.report import Report, cluster_rule, metric_name
from coterie_deploy.terminal.tables import figure
from coterie_deploy.view import charts, charts_structure
from coterie_deploy.view.charts import Chart
from coterie_deploy.view.charts_structure import AGREEMENT
from coterie_deploy.view.sections import Section, Table, main_stage, method_stage
from coterie_server.maths.clusters import adjusted_rand
from coterie_server.record import summary
from coterie_server.record.summary import StageSummary

_MOST_USERS = 160  # rows of a heat map
_MOST_CELLS = 6000
_MOST_TICKS = 400  # users in the chart of a metric
_MOST_COEFFICIENTS = 12
_SPREAD = ("mean", "sd", "min", "q1", "median", "q3", "max")


def clusters_section(connection: sqlite3.Connection, report: Report) -> Section:
    """Who is together, along the path of penalties or as rounds go, and whether the data knew of it."""
    members = connection.execute("SELECT name, cluster FROM members ORDER BY position").fetchall()
    users, known = [name for name, _ in members], _known([cluster for _, cluster in members])
    labels, penalties, own = _labels(connection, len(users)), _penalties(report), method_stage(report)
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
        after = [labelled.tolist() for _, labelled in columns]
        steps = [step for step, _ in columns]
        beside = None if known is None else known.tolist()
        drawn.append(charts_structure.clusters_chart(chosen, steps, after, axis=axis, users=users, known=beside))
    return Section("clusters", "Clusters", said, charts=drawn)


def _known(clusters: Sequence[str]) -> Indices | None:
    """The clusters (n,) that the data names, None where there are none to compare with."""
    distinct = list(dict.fromkeys(clusters))
    return np.array([distinct.index(name) for name in clusters]) if 1 < len(distinct) < len(clusters) else None


def _measured(
    report: Report, stages: Sequence[str], labels: Mapping[str, Sequence[tuple[int, Indices]]], known: Indices | None
) -> dict[str, list[float | None]]:
    """What is drawn along a path, as far as any stage has it."""
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


def _penalties(report: Report) -> dict[str, float]:
    """The penalty of each finished stage of a path, by name."""
    has_ended = {stage.name for stage in report.stages if stage.outcome}
    return {name: stage.along for name, stage in report.plan.items() if stage.along is not None and name in has_ended}


def _order(columns: Sequence[Indices], known: Indices | None) -> Indices:
    """Users such that those who are together stand together, first where there are few clusters; largest clusters first."""
    found = [_by_size(labels) for labels in sorted(columns, key=lambda labels: -len(np.unique(labels)))]
    return np.lexsort(found if known is None else [known, *found])


def _by_size(labels: Indices) -> Indices:
    """The same clusters (n,), numbered from the largest on; those who are alone have one number together."""
    _, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    ranks = np.empty(sizes.size, dtype=np.int64)
    ranks[np.argsort(-sizes, kind="stable")] = np.arange(sizes.size)
    ranks[sizes == 1] = sizes.size
    return ranks[inverse]


def _spread(n: int, most: int) -> list[int]:
    """At most `most` of the places 0..n-1, evenly, with the first and the last."""
    return sorted(set(np.linspace(0, n - 1, min(n, most)).round().astype(int).tolist())) if n else []


def users_section(connection: sqlite3.Connection, report: Report) -> Section:
    """How the users of the result fare, and the coefficients of their models."""
    stage = main_stage(report)
    if stage is None:
        return Section("users", "Users")
    query = "SELECT r.name, m.name, r.value FROM user_results r JOIN members m ON m.position = r.member WHERE r.stage = ?"
    by_user: dict[str, dict[str, float]] = {}
    for metric, user, value in connection.execute(f"{query} ORDER BY r.name, r.member", (stage.number,)):
        by_user.setdefault(metric.replace("_", " "), {})[user] = value
    if by_user:
        lines = [[metric, f"{len(values):,}", *_spread_of(np.array(list(values.values())))] for metric, values in by_user.items()]
        tables = [Table(f"Users of stage {stage.name}", ("metric", "users", *_SPREAD), lines)]
        drawn = [charts.users_chart(group, key=key) for key, group in _alike(by_user).items()]
    else:
        tables, drawn = _told_spread(stage, metric_name(report.experiment)), []
    coefficients = _coefficients(report.folder, stage, report.experiment)
    if coefficients:
        shown = {name: _some(values) for name, values in coefficients.items()}
        drawn.append(charts.users_chart(shown, key="coefficients", title="Coefficients of the users' models"))
        lines = [[name, *_spread_of(np.array(list(values.values())))] for name, values in coefficients.items()]
        tables.append(Table(f"Coefficients of stage {stage.name}", ("coefficient", *_SPREAD), lines))
    return Section("users", "Users", charts=drawn, tables=tables)


def _alike(by_user: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics that can share an axis, by the key of their chart: accuracies together, others each on their own."""
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for metric, values in by_user.items():
        key = "users-accuracy" if metric.endswith("accuracy") else f"users-{metric.replace(' ', '-')}"
        groups.setdefault(key, {})[metric] = _some(values)
    return groups


def _told_spread(stage: StageSummary, judged: str) -> list[Table]:
    """What the users of a method that keeps their figures to themselves have told of their spread."""
    metrics = [name.removesuffix("_median") for name in stage.results if name.endswith("_median")]
    names = {"heldout_metric": f"held-out {judged}", "heldout_loss": "held-out loss"}
    lines = [
        [
            names.get(metric, metric.replace("_", " ")),
            *(figure(stage.results.get(metric if which == "mean" else f"{metric}_{which}")) for which in _SPREAD),
        ]
        for metric in metrics
    ]
    return [Table(f"Users of stage {stage.name}", ("metric", *_SPREAD), lines)] if lines else []


def _coefficients(folder: Path, stage: StageSummary, experiment: Experiment) -> dict[str, dict[str, float]]:
    """The coefficients of linear models that the run has left, by feature and user, without the intercept; empty where they are many."""
    path = folder / "models" / f"{stage.name}.npz"
    if experiment.problem.is_distance or not path.is_file():
        return {}
    with np.load(path) as arrays:
        if "x" not in arrays or arrays["x"].ndim != 2:
            return {}
        x, users = arrays["x"], [str(user) for user in arrays["users"]]
        named = [str(name) for name in arrays["features"]] if "features" in arrays else []
    n_features = x.shape[1] - int(experiment.problem.has_intercept)
    if not 0 < n_features <= _MOST_COEFFICIENTS or len(users) < 2:
        return {}
    names = named if len(named) == n_features else [f"feature {place + 1}" for place in range(n_features)]
    return {name: dict(zip(users, x[:, place].tolist(), strict=True)) for place, name in enumerate(names)}


def _some(values: Mapping[str, float]) -> dict[str, float]:
    """Some of many users, in the order of their values."""
    if len(values) <= _MOST_TICKS:
        return dict(values)
    ordered = sorted(values.items(), key=lambda item: item[1])
    return dict(ordered[place] for place in _spread(len(ordered), _MOST_TICKS))


def _spread_of(values: Array) -> list[str]:
    quartiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    sd = float(values.std(ddof=1)) if values.size > 1 else float("nan")
    return [figure(float(value)) for value in (values.mean(), sd, *quartiles)]
