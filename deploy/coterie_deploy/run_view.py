"""A run as pages show it, in the report and on the dashboard: sections of sentences, charts and tables, read from its folder alone."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coterie.arrays import Array, Indices
from coterie_deploy import charts
from coterie_deploy.books import status_of
from coterie_deploy.charts import AXES, Against, Chart, Link
from coterie_deploy.report import Report, ended_by, extent, metric_name, network_sentences, report_of, result_sentence, rounds_sentence
from coterie_deploy.steps import STEPS
from coterie_deploy.tables import count, duration, figure, size
from coterie_server import summary
from coterie_server.curves import GAP, Curves, curves
from coterie_server.query import Query, totals
from coterie_server.rundb import BETWEEN, WITHIN, open_run
from coterie_server.summary import StageSummary

COORDINATOR = "coordinator"
MAIN_FIGURES = (GAP, "accuracy", "loss", "objective", "distance", "primal_residual", "dual_residual", "gradient_norm")
_MOST_FIGURES = 4  # that have a chart each
_MOST_LINKS = 12  # below one member, that are drawn one by one
_MOST_USERS = 160  # rows of a heat map
_MOST_COLUMNS = 48
_MOST_EVENTS = 2000
_DROPPED = ("converged", "has_ended")  # figures that say nothing when drawn


@dataclass(frozen=True)
class Table:
    """The first `n_text` columns are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_text: int = 1


@dataclass(frozen=True)
class Section:
    """A part of a page. `tabs`: charts of which one group is seen at a time."""

    key: str
    title: str
    sentences: Sequence[str] = ()
    tabs: Mapping[str, Sequence[Chart]] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()

    @property
    def all_charts(self) -> list[Chart]:
        """Those of all tabs, and the others."""
        return [*(chart for group in self.tabs.values() for chart in group), *self.charts]


@dataclass(frozen=True)
class RunView:
    """A run."""

    name: str
    folder: Path
    status: str
    headline: str
    facts: Sequence[tuple[str, str]]
    cautions: Sequence[str]
    sections: Sequence[Section]
    curves: Curves | None  # of the stage that is the result, or is under way
    experiment: str  # JSON


def view_of(folder: Path) -> RunView:
    """Everything about a run, finished or under way. ConfigError when the folder has none."""
    report = report_of(folder)
    with contextlib.closing(open_run(folder)) as connection:
        stage = main_stage(report)
        found = None if stage is None else curves(connection, stage)
        sections = [
            _progress(found),
            _communication(connection, report),
            _clusters(connection, report),
            _users(connection, report),
            _events(connection),
            _stages(report),
        ]
        facts = _facts(connection, report)
    return RunView(
        report.facts.get("name", folder.name),
        folder,
        status_of(folder, report.facts),
        extent(report) if report.hosts else f"waiting for {report.experiment.federation.noun}s",
        facts,
        [caution.removeprefix("warning: ") for caution in report.cautions],
        [section for section in sections if section.all_charts or section.tables or section.sentences],
        found,
        json.dumps(json.loads(report.facts["experiment"]), indent=2) if "experiment" in report.facts else "",
    )


def main_stage(report: Report) -> StageSummary | None:
    """The stage that is the result, or the latest one."""
    return report.final or (report.stages[-1] if report.stages else None)


def _facts(connection: sqlite3.Connection, report: Report) -> list[tuple[str, str]]:
    experiment, facts = report.experiment, report.facts
    total = summary.total(report.traffic)
    up, down = (sum(row.wire_bytes for row in report.traffic if row.direction == way) for way in ("up", "down"))
    began = connection.execute("SELECT MIN(at) FROM events").fetchone()[0]
    listed = [
        ("method", experiment.method.name),
        ("problem", experiment.problem.loss if experiment.model is None else f"{experiment.model.name}, {experiment.problem.loss}"),
        ("data", experiment.data.source),
        ("topology", experiment.federation.topology),
        ("seed", str(experiment.seed)),
        ("started", "" if began is None else _utc(began)),
        ("on the wire", f"{size(total.wire_bytes)} ({size(up)} up, {size(down)} down)"),
        ("run", facts.get("run_id", "")),
        ("attempts", facts.get("attempt", "1")),
        ("coterie", facts.get("version", "")),
    ]
    return [(name, value) for name, value in listed if value]


def _utc(seconds: float) -> str:
    import datetime  # noqa: PLC0415

    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---- the sections


def figures_shown(found: Curves) -> list[str]:
    """The figures of the rounds that say most, at most a few."""
    known = [name for name in MAIN_FIGURES if name in found.figures]
    others = [name for name in found.figures if name not in MAIN_FIGURES and name not in _DROPPED]
    return (known or others)[:_MOST_FIGURES]


def _progress(found: Curves | None) -> Section:
    if found is None:
        return Section("progress", "Progress")
    axes: Sequence[Against] = ("round", "bytes", "seconds")
    tabs = {
        f"against {AXES[against]}": [charts.progress_chart({found.stage.name: found}, name, against) for name in figures_shown(found)]
        for against in axes
    }
    said = [f"Stage {found.stage.name}: {count(found.stage.rounds)} rounds, {found.stage.outcome or 'under way'}."]
    if GAP in found.figures:
        said.append(
            "The gap is relative to the reference objective, or, where none is known, to the smallest objective of the stage itself."
        )
    return Section("progress", "Progress", said, tabs=tabs)


def _communication(connection: sqlite3.Connection, report: Report) -> Section:
    by_step = totals(connection, Query(("step", "direction", "scope")))
    if not by_step:
        return Section("communication", "Communication")
    by_scope = totals(connection, Query(("scope", "direction")))
    drawn = [charts.traffic_chart(by_step), charts.scope_chart(by_scope)]
    links = links_of(connection)
    if links:
        drawn.append(charts.topology_chart(links, size))
    stage = main_stage(report)
    if stage is not None:
        drawn.append(charts.cumulative_chart(curves(connection, stage)))
    rows = [
        [
            *(row.step, row.direction, row.scope, count(row.vectors), count(row.expected), count(row.scalars)),
            *(size(row.payload_bytes), size(row.message_bytes), size(row.wire_bytes)),
        ]
        for row in report.traffic
    ]
    columns = ("step", "way", "scope", "vectors", "closed form", "scalars", "payload", "message", "wire")
    most = max(by_step, key=lambda group: group.wire_bytes)
    whole = sum(group.wire_bytes for group in by_step)
    said = [f"Most of it is step {most.keys[0]} {most.keys[1]}: {most.wire_bytes / whole:.0%} of {size(whole)} on the wire."]
    if sentence := rounds_sentence(report.final):
        said.append(f"{sentence[:1].upper()}{sentence[1:]}.")
    if report.n_repeated_bytes:
        said.append(f"Apart from that, {size(report.n_repeated_bytes)} were sent again, came too late, or were repeated by a resumed run.")
    steps = [step for step in dict.fromkeys(row.step for row in report.traffic) if step in STEPS]
    meanings = Table("What the steps carry", ("step", "carries"), [[step, STEPS[step]] for step in steps], n_text=2)
    traffic = Table("Traffic beside the closed form", columns, rows, n_text=3)
    return Section("communication", "Communication", said, charts=drawn, tables=[traffic, meanings])


def links_of(connection: sqlite3.Connection) -> list[Link]:
    """The links of the federation with their useful traffic; of many below one member the busiest, and the others together."""
    n_users = dict(connection.execute("SELECT host, COUNT(*) FROM members GROUP BY host"))
    sent: dict[tuple[str, str], dict[str, float]] = {}
    for group in totals(connection, Query(("scope", "link", "direction"))):
        scope, link, direction = group.keys
        sent.setdefault((scope, link), {})[direction] = group.wire_bytes
    by_parent: dict[str, list[Link]] = {}
    for (scope, link), ways in sent.items():
        above, _, below = link.partition("/") if scope == WITHIN else (COORDINATOR, "", link)
        name = f"{above}/{below}" if scope == WITHIN else below
        by_parent.setdefault(above, []).append(Link(above, name, n_users.get(name), ways.get("up", 0), ways.get("down", 0), scope))
    return [link for listed in by_parent.values() for link in _busiest(listed)]


def _busiest(links: Sequence[Link]) -> list[Link]:
    if len(links) <= _MOST_LINKS:
        return list(links)
    ordered = sorted(links, key=lambda link: -(link.up_bytes + link.down_bytes))
    shown, others = ordered[: _MOST_LINKS - 1], ordered[_MOST_LINKS - 1 :]
    users = [link.n_users for link in others]
    noun = "aggregators" if others[0].scope == BETWEEN else "hosts"
    together = Link(
        others[0].above,
        f"{len(others)} more {noun}",
        None if None in users else sum(number or 0 for number in users),
        sum(link.up_bytes for link in others),
        sum(link.down_bytes for link in others),
        others[0].scope,
    )
    return [*shown, together]


def _clusters(connection: sqlite3.Connection, report: Report) -> Section:
    labels = _labels(connection)
    users = [name for (name,) in connection.execute("SELECT name FROM members ORDER BY position")]
    penalties = _penalties(report)
    drawn: list[Chart] = []
    if len(penalties) > 1:
        stages = sorted(penalties, key=penalties.__getitem__)
        of_stage = {stage.name: stage for stage in report.stages}
        n_clusters = [report.clusters[name] for name in stages]
        judged = [of_stage[name].results.get("heldout_metric") for name in stages]
        drawn += charts.path_charts([penalties[name] for name in stages], n_clusters, judged, metric_name(report.experiment))
        columns = [(f"{penalties[name]:g}", labels[name][-1][1]) for name in stages if labels.get(name)]
        axis = "penalty"
    else:
        stage = main_stage(report)
        listed = [] if stage is None else labels.get(stage.name, [])
        columns, axis = [(str(number), after) for number, after in listed], "round"
    if columns and len(users) > 1:
        columns = [columns[place] for place in _spread(len(columns), _MOST_COLUMNS)]
        order = _order([after for _, after in columns])
        shown = [users[int(order[place])] for place in _spread(len(order), _MOST_USERS)]
        drawn.append(
            charts.clusters_chart(shown, [step for step, _ in columns], [after.tolist() for _, after in columns], axis=axis, users=users)
        )
    return Section("clusters", "Clusters", charts=drawn)


def _labels(connection: sqlite3.Connection) -> dict[str, list[tuple[int, Indices]]]:
    """By stage: the rounds in which the users' clusters changed, and the clusters (n,) after them."""
    names = {stage.number: stage.name for stage in summary.stages(connection)}
    found: dict[str, list[tuple[int, Indices]]] = {}
    for stage, number, text in connection.execute("SELECT stage, round, labels FROM memberships ORDER BY stage, round"):
        found.setdefault(names.get(stage, str(stage)), []).append((number, np.array(json.loads(text))))
    return found


def _penalties(report: Report) -> dict[str, float]:
    """The penalty of each finished stage of a path, by name."""
    from coterie_server.plan import stages_of  # noqa: PLC0415 - it imports every method's room

    has_ended = {stage.name for stage in report.stages if stage.outcome}
    of_stage = {stage.name: getattr(stage.config, "penalty", None) for stage in stages_of(report.experiment) if stage.is_result}
    return {name: value for name, value in of_stage.items() if isinstance(value, float) and value > 0 and name in has_ended}


def _order(columns: Sequence[Indices]) -> Indices:
    """Users such that those who are together stand together, first where there are few clusters."""
    return np.lexsort(sorted(columns, key=lambda labels: -len(np.unique(labels))))


def _spread(n: int, most: int) -> list[int]:
    """At most `most` of the places 0..n-1, evenly, with the first and the last."""
    return sorted(set(np.linspace(0, n - 1, min(n, most)).round().astype(int).tolist())) if n else []


def _users(connection: sqlite3.Connection, report: Report) -> Section:
    stage = main_stage(report)
    if stage is None:
        return Section("users", "Users")
    query = "SELECT r.name, m.name, r.value FROM user_results r JOIN members m ON m.position = r.member WHERE r.stage = ? ORDER BY r.rowid"
    rows = connection.execute(query.replace(" ORDER BY r.rowid", " ORDER BY r.name, r.member"), (stage.number,)).fetchall()
    by_user: dict[str, dict[str, float]] = {}
    for metric, user, value in rows:
        by_user.setdefault(metric.replace("_", " "), {})[user] = value
    if not by_user:
        return _users_of_results(stage, metric_name(report.experiment))
    lines = [[metric, str(len(values)), *_spread_of(np.array(list(values.values())))] for metric, values in by_user.items()]
    table = Table(f"Users of stage {stage.name}", ("metric", "users", "mean", "sd", "min", "q1", "median", "q3", "max"), lines)
    shown = {metric: _some(values) for metric, values in by_user.items()}
    return Section("users", "Users", network_sentences(report), charts=[charts.users_chart(shown)], tables=[table])


def _users_of_results(stage: StageSummary, judged: str) -> Section:
    """What the users of a method that keeps their figures to themselves have told of their spread."""
    names = ("mean", "sd", "min", "q1", "median", "q3", "max")
    metrics = [name.removesuffix("_median") for name in stage.results if name.endswith("_median")]
    lines = [
        [_said(metric, judged), *(figure(stage.results.get(metric if which == "mean" else f"{metric}_{which}")) for which in names)]
        for metric in metrics
    ]
    table = Table(f"Users of stage {stage.name}", ("metric", *names), lines)
    return Section("users", "Users", tables=[table] if lines else [])


def _said(metric: str, judged: str) -> str:
    return {"heldout_metric": f"held-out {judged}", "heldout_loss": "held-out loss"}.get(metric, metric.replace("_", " "))


def _some(values: Mapping[str, float]) -> dict[str, float]:
    """Some of many users, in the order of their values."""
    ordered = sorted(values.items(), key=lambda item: item[1])
    return dict(ordered[place] for place in _spread(len(ordered), 400))


def _spread_of(values: Array) -> list[str]:
    quartiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    sd = float(values.std(ddof=1)) if values.size > 1 else float("nan")
    return [figure(float(value)) for value in (values.mean(), sd, *quartiles)]


def _events(connection: sqlite3.Connection) -> Section:
    rows = connection.execute("SELECT at, kind, text FROM events ORDER BY at, rowid").fetchall()
    if not rows:
        return Section("events", "Events")
    began = rows[0][0]
    listed = [(at - began, kind, text) for at, kind, text in rows]
    shown = listed if len(listed) <= _MOST_EVENTS else [*listed[: _MOST_EVENTS // 2], *listed[-_MOST_EVENTS // 2 :]]
    said = [f"{len(listed):,} events in {duration(listed[-1][0])}."]
    if len(shown) < len(listed):
        said.append(f"The first and the last {_MOST_EVENTS // 2:,} are shown.")
    return Section("events", "Events", said, charts=[charts.events_chart(shown)])


def _stages(report: Report) -> Section:
    if not report.stages:
        return Section("stages", "Stages")
    metric = metric_name(report.experiment)
    rows = [
        [
            f"{stage.name}{' *' if stage is report.final else ''}",
            ended_by(stage, report.short),
            *(count(stage.rounds), duration(stage.seconds), count(report.clusters[stage.name])),
            *(figure(stage.results.get("heldout_loss")), figure(stage.results.get("heldout_metric"))),
        ]
        for stage in report.stages
    ]
    columns = ("stage", "ended by", "rounds", "time", "clusters", "held-out loss", f"held-out {metric}")
    said = [sentence[:1].upper() + sentence[1:] + "." for sentence in [result_sentence(report)] if sentence]
    return Section("stages", "Stages", said, tables=[Table("Stages (* the result)", columns, rows, n_text=2)])


__all__ = ["RunView", "Section", "Table", "figures_shown", "links_of", "main_stage", "view_of"]
