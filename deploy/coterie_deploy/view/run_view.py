"""A run as pages show it, in the report and on the dashboard: sections of sentences, charts and tables, read from its folder alone."""

from __future__ import annotations

import datetime
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.experiment.features import in_a_line
from coterie_deploy.read.costs import AXES, Weighing, axes_of, cost, goal_said
from coterie_deploy.read.costs import figures_shown as figures_shown  # noqa: PLC0414 - a word of this module too
from coterie_deploy.read.feature_lines import features_in
from coterie_deploy.read.ledger_page import closed_form, status_of
from coterie_deploy.read.report import (
    Report,
    ended_by,
    headline,
    judgement_sentences,
    metric_name,
    report_of,
    result_sentence,
    rho_of,
    rounds_sentence,
)
from coterie_deploy.read.steps import carried
from coterie_deploy.terminal.tables import count, counted, duration, figure, size
from coterie_deploy.view import charts, charts_structure
from coterie_deploy.view.charts_structure import Link
from coterie_deploy.view.run_users import clusters_section, users_section
from coterie_deploy.view.sections import Section, Table, method_stage, sentence
from coterie_server.record import summary
from coterie_server.record.curves import GAP, Curves, Goal, curves, is_by_definition, reached, why_not_reached, with_figure_of
from coterie_server.record.query import Query, totals
from coterie_server.record.rundb import BETWEEN, WITHIN, read_run

_MOST_EVENTS = 1000
_LEVELS = {GAP: (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6), "accuracy": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)}  # whose cost is told


@dataclass(frozen=True)
class RunView:
    """A run."""

    name: str
    folder: Path
    status: str
    n_users: int
    headline: str
    description: str
    results: Sequence[str]  # sentences
    facts: Sequence[tuple[str, str]]
    cautions: Sequence[str]
    sections: Sequence[Section]
    curves: Curves | None  # of the method's own stage, see `method_stage`
    experiment: str  # JSON


def view_of(folder: Path, weighing: Weighing | None = None) -> RunView:
    """Everything about a run, finished or under way. ConfigError when the folder has none."""
    report = report_of(folder)
    with read_run(folder) as connection:
        stage = method_stage(report)
        found = None if stage is None else curves(connection, stage)
        if found is not None and weighing is not None and weighing.goal is not None:
            found = with_figure_of(weighing.goal, found)
        sections = [
            _progress(connection, report, found, weighing or Weighing()),
            _communication(connection, report, found),
            clusters_section(connection, report),
            users_section(connection, report),
            _events(connection, report),
            _stages(report),
        ]
        facts = _facts(connection, report)
    return RunView(
        report.facts.get("name", folder.name),
        folder,
        status_of(folder, report.facts),
        sum(report.hosts.values()),
        headline(report),
        report.experiment.description,
        [sentence(text) for text in (result_sentence(report), *judgement_sentences(report)) if text],
        facts,
        [*(caution.removeprefix("warning: ") for caution in report.cautions), *report.events],
        [section for section in sections if section.all_charts or section.tables or section.sentences],
        found,
        json.dumps(json.loads(report.facts["experiment"]), indent=2) if "experiment" in report.facts else "",
    )


def _facts(connection: sqlite3.Connection, report: Report) -> list[tuple[str, str]]:
    experiment, facts = report.experiment, report.facts
    up, down = (sum(row.wire_bytes for row in report.traffic if row.direction == way) for way in charts.WAYS)
    began = _began(connection)
    listed = [
        ("method", experiment.method.name),
        ("problem", experiment.problem.loss if experiment.model is None else f"{experiment.model.name}, {experiment.problem.loss}"),
        ("data", experiment.data.source),
        ("features", in_a_line(features_in(facts))),
        ("topology", experiment.federation.topology),
        ("seed", str(experiment.seed)),
        ("up on the wire", size(up)),
        ("down on the wire", size(down)),
        ("started", "" if began is None else f"{datetime.datetime.fromtimestamp(began, datetime.UTC):%Y-%m-%d %H:%M} UTC"),
        ("run", facts.get("run_id", "")),
        ("attempts", facts.get("attempt", "1")),
        ("version", facts.get("version", "")),
    ]
    return [(name, value) for name, value in listed if value]


def _began(connection: sqlite3.Connection) -> float | None:
    """When something happened first."""
    found = connection.execute("SELECT MIN(at) FROM (SELECT MIN(at) AS at FROM events UNION ALL SELECT MIN(at) FROM rounds)").fetchone()[0]
    return None if found is None else float(found)


# ---- the sections


def _progress(connection: sqlite3.Connection, report: Report, found: Curves | None, weighing: Weighing) -> Section:
    if found is None:
        return Section("progress", "Progress")
    named, names = {found.stage.name: found}, figures_shown(found)
    if weighing.goal is not None and weighing.goal.figure in found.figures:
        names = list(dict.fromkeys([weighing.goal.figure, *names]))
    tabs = {
        f"against {AXES[against]}": [
            charts.progress_chart(named, name, against, up_weight=weighing.up_weight, goal=weighing.goal) for name in names
        ]
        for against in axes_of(named.values())
    }
    rounds = counted(found.stage.rounds, "round")
    outcome = found.stage.outcome or ("under way" if report.is_at_work else f"stopped after round {count(found.stage.rounds)}")
    said = [f"Stage {found.stage.name}: {rounds}{'' if outcome == rounds else f'; {outcome}'}."]
    if GAP in names:
        to = "reference objective of the experiment" if found.has_reference else "smallest objective of the stage itself"
        said.append(f"The gap is relative to the {to}{'' if found.has_reference or found.stage.outcome else ' so far: it has not ended'}.")
    goal = weighing.goal
    if goal is not None and goal.figure in found.figures and is_by_definition(found, goal):
        said.append(sentence(why_not_reached(found, goal)))
    tables = [_costs(found, goal), *_between(connection, found, goal)]
    return Section("progress", "Progress", said, tabs if names else {}, tables=[table for table in tables if table.rows])


def _costs(found: Curves, goal: Goal | None) -> Table:
    """What it cost to reach the goal, or else some round values, as far as they were reached."""
    goals = [Goal(name, level) for name, levels in _LEVELS.items() if name in found.figures for level in levels]
    if goal is not None:
        goals = [goal] if goal.figure in found.figures else []
    axes = [axis for axis in axes_of([found]) if axis != "round"]
    rows = []
    rounds = [reached(found, one) for one in goals]
    for one, at, harder in zip(goals, rounds, [*rounds[1:], None], strict=False):
        if at is not None and at != harder:
            paid = {axis: float(cost(found, axis)[at]) for axis in axes}
            rows.append(
                [goal_said(one), count(at), *(duration(value) if axis == "seconds" else size(value) for axis, value in paid.items())]
            )
        elif goal is not None:
            rows.append([goal_said(one), "-" if is_by_definition(found, one) else "not reached", *("-" for _ in axes)])
    return Table(
        f"What it cost stage {found.stage.name} to get there",
        ("goal", "round", *(AXES[axis].replace("seconds", "time") for axis in axes)),
        rows,
    )


def _between(connection: sqlite3.Connection, found: Curves, goal: Goal | None) -> list[Table]:
    """What had crossed between clusters when the goal was reached, by cluster."""
    at = reached(found, goal) if goal is not None and goal.figure in found.figures else None
    if goal is None or at is None or not any(scope == BETWEEN for _, scope in found.wire_bytes):
        return []
    query = Query(("cluster", "direction"), stages=(found.stage.number,), last_round=at, scopes=(BETWEEN,))
    sent: dict[str, dict[str, float]] = {}
    for group in totals(connection, query):
        cluster, direction = group.keys
        sent.setdefault(cluster, {})[direction] = group.wire_bytes
    rows = [
        [cluster or "several", *(size(ways.get(way, 0)) for way in charts.WAYS), size(sum(ways.values()))] for cluster, ways in sent.items()
    ]
    return [Table(f"Between clusters in stage {found.stage.name} until {goal_said(goal)}", ("cluster", *charts.WAYS, "both"), rows)]


def _communication(connection: sqlite3.Connection, report: Report, found: Curves | None) -> Section:
    traffic = report.traffic
    if not any(row.wire_bytes for row in traffic):
        return Section("communication", "Communication")
    links = links_of(connection)
    several = len({row.scope for row in traffic}) > 1
    drawn = [charts.traffic_chart(traffic), charts.vectors_chart(traffic), charts.scope_chart(traffic) if several else None]
    drawn += [None if found is None else charts.cumulative_chart(found), charts_structure.topology_chart(links) if links else None]
    rows = [
        [
            *(row.step, row.direction, row.scope, count(row.vectors), closed_form(row, narrow=False), count(row.scalars)),
            *(size(row.payload_bytes), size(row.message_bytes), size(row.wire_bytes)),
        ]
        for row in traffic
    ]
    columns = ("step", "way", "scope", "vectors", "closed form", "scalars", "payload", "message", "wire")
    most, whole = max(traffic, key=lambda row: row.wire_bytes), summary.total(traffic).wire_bytes
    said = [f"Most of it is step {most.step} {most.direction}: {most.wire_bytes / whole:.0%} of {size(whole)} on the wire."]
    if averages := rounds_sentence(report.final):
        said.append(sentence(averages))
    if report.n_repeated_bytes:
        said.append(f"Apart from that, {size(report.n_repeated_bytes)} were sent again, came too late, or were repeated by a resumed run.")
    words = carried(report.facts)
    steps = [step for step in dict.fromkeys(row.step for row in traffic) if step in words]
    meanings = Table("What the steps carry", ("step", "carries"), [[step, words[step]] for step in steps], n_text=2)
    beside = Table("Traffic beside the closed form", columns, rows, n_text=3)
    return Section("communication", "Communication", said, charts=[chart for chart in drawn if chart], tables=[beside, meanings])


def links_of(connection: sqlite3.Connection) -> list[Link]:
    """The links of the federation with their useful traffic."""
    n_users = dict(connection.execute("SELECT host, COUNT(*) FROM members GROUP BY host"))
    sent: dict[tuple[str, str], dict[str, float]] = {}
    for group in totals(connection, Query(("scope", "link", "direction"))):
        scope, link, direction = group.keys
        sent.setdefault((scope, link), {})[direction] = group.wire_bytes
    links = []
    for (scope, link), ways in sent.items():
        above, _, below = link.partition("/") if scope == WITHIN else ("", "", link)
        users = None if above else n_users.get(below)
        above = above.replace("%2F", "/").replace("%25", "%")
        links.append(Link(above, below, users, ways.get("up", 0), ways.get("down", 0), scope))
    return links


def _events(connection: sqlite3.Connection, report: Report) -> Section:
    rows = connection.execute("SELECT at, kind, text FROM events ORDER BY at, rowid").fetchall()
    began = _began(connection)
    if not rows or began is None:
        return Section("events", "Events")
    names = {stage.number: stage.name for stage in report.stages}
    spans = connection.execute("SELECT stage, MIN(at), MAX(at) FROM rounds GROUP BY stage ORDER BY stage").fetchall()
    stages = [(names.get(number, str(number)), start - began, end - began) for number, start, end in spans]
    listed = [(at - began, kind, text) for at, kind, text in rows]
    shown = listed if len(listed) <= _MOST_EVENTS else [*listed[: _MOST_EVENTS // 2], *listed[-_MOST_EVENTS // 2 :]]
    said = [f"{counted(len(listed), 'event')} in {duration(max(at for at, *_ in listed))}."]
    if len(shown) < len(listed):
        said.append(f"The first and the last {_MOST_EVENTS // 2:,} are shown.")
    return Section("events", "Events", said, charts=[charts.events_chart(shown, stages)])


def _stages(report: Report) -> Section:
    if not report.stages:
        return Section("stages", "Stages")
    metric = metric_name(report.experiment)
    with_rho = any("rho_first" in stage.results for stage in report.stages)
    rows = [
        [
            f"{stage.name}{' *' if stage is report.final else ''}",
            ended_by(stage, report),
            *(count(stage.rounds), duration(stage.seconds), *([rho_of(stage)] if with_rho else []), count(report.clusters[stage.name])),
            *(figure(stage.results.get("heldout_loss")), figure(stage.results.get("heldout_metric"))),
        ]
        for stage in report.stages
    ]
    rho = ["rho"] if with_rho else []
    columns = ("stage", "ended by", "rounds", "time", *rho, "clusters", "held-out loss", f"held-out {metric}")
    return Section("stages", "Stages", tables=[Table("Stages (* the result)", columns, rows, n_text=2)])
