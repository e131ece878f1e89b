"""A run as the report shows it: sections of sentences, charts and tables, read from its folder alone."""

import datetime
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.experiment.features import in_a_line
from coterie.record.ledger import peers_of
from coterie.registry import method
from coterie_deploy.read.costs import AXES, Against, Weighing, axes_of, cost, figures_shown, goal_said
from coterie_deploy.read.ledger_page import closed_form, saved_sentences, status_of
from coterie_deploy.read.report import (
    Report,
    adapted,
    averages_sentence,
    ended_by,
    headline,
    judgement_sentences,
    metric_name,
    privacy_sentences,
    report_of,
    result_sentence,
)
from coterie_deploy.read.sentences import carried, features_in
from coterie_deploy.terminal.tables import count, counted, duration, figure, size
from coterie_deploy.view import charts, charts_structure
from coterie_deploy.view.charts import Section, Table
from coterie_deploy.view.charts_privacy import EPSILON, spent_chart
from coterie_deploy.view.charts_structure import Link
from coterie_deploy.view.run_coefficients import coefficients_section
from coterie_deploy.view.run_users import clusters_section, users_section
from coterie_server.record import summary
from coterie_server.record.curves import GAP, Curves, Goal, curves, is_by_definition, reached, why_not_reached, with_figure_of
from coterie_server.record.query import Query, totals
from coterie_server.record.rundb import BETWEEN, PEERS, WITHIN, read_run
from coterie_server.record.summary import StageSummary

_MOST_EVENTS = 1000
_LEVELS = {GAP: (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6), "accuracy": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)}  # whose cost is told


@dataclass(frozen=True)
class RunView:
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
    curves: Curves | None  # of the method's own stage, see `Report.own`
    experiment: str  # JSON


def view_of(folder: Path, weighing: Weighing | None = None) -> RunView:
    """Everything about a run, finished or under way. ConfigError when the folder has none."""
    report = report_of(folder)
    with read_run(folder) as connection:
        stage = report.own
        found = None if stage is None else curves(connection, stage)
        if found is not None and weighing is not None and weighing.goal is not None:
            found = with_figure_of(weighing.goal, found)
        sections = [
            _stages(report),
            users_section(connection, report),
            coefficients_section(connection, report),
            clusters_section(connection, report),
            _progress(connection, report, found, weighing or Weighing()),
            _communication(connection, report, found),
            _events(connection, report),
        ]
        facts = _facts(connection, report)
    return RunView(
        report.facts.get("name", folder.name),
        folder,
        status_of(folder, report.facts),
        sum(report.hosts.values()),
        headline(report),
        report.experiment.description,
        [sentence(text) for text in (result_sentence(report), *judgement_sentences(report), *privacy_sentences(report)) if text],
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
        ("users", count(sum(report.hosts.values()))),
        ("rows", _rows(facts)),
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


def _rows(facts: Mapping[str, str]) -> str:
    """How many rows all users have together; "" for runs that did not write it down."""
    found = json.loads(facts.get("rows", "{}"))
    if not found:
        return ""
    return f"{found['training']:,} to train" + ("" if found["held_out"] is None else f", {found['held_out']:,} held out")


def _began(connection: sqlite3.Connection) -> float | None:
    found = connection.execute("SELECT MIN(at) FROM (SELECT MIN(at) AS at FROM events UNION ALL SELECT MIN(at) FROM rounds)").fetchone()[0]
    return None if found is None else float(found)


def progress_charts(named: Mapping[str, Curves], figures: Sequence[str], against: Against, weighing: Weighing) -> list[charts.Chart]:
    return [charts.progress_chart(named, name, against, up_weight=weighing.up_weight, goal=weighing.goal) for name in figures]


# ---- the sections


def _progress(connection: sqlite3.Connection, report: Report, found: Curves | None, weighing: Weighing) -> Section:
    if found is None:
        return Section("progress", "Progress")
    named, names = {found.stage.name: found}, figures_shown(found)
    if weighing.goal is not None and weighing.goal.figure in found.figures:
        names = list(dict.fromkeys([weighing.goal.figure, *names]))
    alone = [name for name in names if np.isfinite(found.figures[name]).sum() < 2]
    names = [name for name in names if name not in alone]
    tabs = {f"against {AXES[axis]}": progress_charts(named, names, axis, weighing) for axis in axes_of(named.values())}
    if EPSILON in found.figures:
        tabs[f"against {EPSILON}"] = [spent_chart(found, name) for name in names if name != EPSILON]
    rounds = counted(found.stage.rounds, "round")
    outcome = found.stage.outcome or ("under way" if report.is_at_work else f"stopped after round {count(found.stage.rounds)}")
    said = [f"Stage {found.stage.name}: {rounds}{'' if outcome == rounds else f'; {outcome}'}."]
    said += [single_sentence(found, name) for name in alone if np.isfinite(found.figures[name]).any()]
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
    levels = [Goal(name, level) for name, levels in _LEVELS.items() for level in levels] if goal is None else [goal]
    goals = [one for one in levels if one.figure in found.figures]
    axes = [axis for axis in axes_of([found]) if axis != "round"]
    rows = []
    rounds = [reached(found, one) for one in goals]
    for one, at, harder in zip(goals, rounds, [*rounds[1:], None], strict=False):
        if at is not None and at != harder:
            paid = {axis: float(cost(found, axis)[at]) for axis in axes}
            cells = (duration(value) if axis == "seconds" else size(value) for axis, value in paid.items())
            rows.append([goal_said(one), count(at), *cells])
        elif goal is not None:
            rows.append([goal_said(one), "-" if is_by_definition(found, one) else "not reached", *("-" for _ in axes)])
    columns = ("goal", "round", *(AXES[axis].replace("seconds", "time") for axis in axes))
    return Table(f"What it cost stage {found.stage.name} to get there", columns, rows)


def _between(connection: sqlite3.Connection, found: Curves, goal: Goal | None) -> list[Table]:
    """The traffic between clusters up to the goal, by cluster."""
    at = reached(found, goal) if goal is not None and goal.figure in found.figures else None
    scopes = tuple(scope for scope in (BETWEEN, PEERS) if any(one == scope for _, one in found.wire_bytes))
    if goal is None or at is None or not scopes:
        return []
    sent = _by_way(connection, Query(("cluster", "direction"), stages=(found.stage.number,), last_round=at, scopes=scopes))
    bytes_of = {cluster or "several": (*(ways.get(way, 0) for way in charts.WAYS), sum(ways.values())) for (cluster,), ways in sent.items()}
    rows = [[cluster, *map(size, sums)] for cluster, sums in bytes_of.items()]
    return [Table(f"Between clusters in stage {found.stage.name} until {goal_said(goal)}", ("cluster", *charts.WAYS, "both"), rows)]


def _communication(connection: sqlite3.Connection, report: Report, found: Curves | None) -> Section:
    traffic = report.traffic
    if not any(row.wire_bytes for row in traffic):
        return Section("communication", "Communication")
    links = links_of(connection)
    several = len({row.scope for row in traffic}) > 1
    tree = charts_structure.topology_chart(links) if len(links) > 1 else None
    drawn = [charts.traffic_chart(traffic), charts.vectors_chart(traffic), charts.scope_chart(traffic) if several else None]
    drawn += [None if found is None else charts.cumulative_chart(found), tree]
    columns = {
        "step": [row.step for row in traffic],
        "way": [row.direction for row in traffic],
        "scope": [row.scope for row in traffic],
        "vectors": [count(row.vectors) for row in traffic],
        "closed form": [closed_form(row, narrow=False) for row in traffic],
        "scalars": [count(row.scalars) for row in traffic],
        **{what: [size(getattr(row, f"{what}_bytes")) for row in traffic] for what in ("payload", "message", "wire")},
    }
    most, whole = max(traffic, key=lambda row: row.wire_bytes), summary.total(traffic).wire_bytes
    part = "Most of it is" if most.wire_bytes > whole / 2 else "The largest part is"
    said = [f"{part} step {most.step} {most.direction}: {most.wire_bytes / whole:.0%} of {size(whole)} on the wire."]
    said += [_link_sentence(link) for link in links if len(links) == 1]
    if averages := averages_sentence(report.final):
        said.append(sentence(averages))
    if report.n_repeated_bytes:
        said.append(f"Apart from that, {size(report.n_repeated_bytes)} were sent again, came too late, or were repeated by a resumed run.")
    said += [sentence(saved) for saved in saved_sentences(report.savings)]
    words = carried(report.facts)
    steps = [step for step in dict.fromkeys(row.step for row in traffic) if step in words]
    meanings = Table("What the steps carry", ("step", "carries"), [[step, words[step]] for step in steps], n_text=2)
    beside = Table("Traffic beside the closed form", [*columns], [*zip(*columns.values(), strict=True)], n_text=3)
    return Section("communication", "Communication", said, charts=[chart for chart in drawn if chart], tables=[beside, meanings])


def _link_sentence(link: Link) -> str:
    """What a federation with a single host has instead of a picture of its links."""
    users = "" if link.n_users is None else f", with {counted(link.n_users, 'user')}"
    return f"There is one link, to {link.below}{users}: {size(link.up_bytes)} up and {size(link.down_bytes)} down."


def single_sentence(found: Curves, name: str) -> str:
    """A figure that one round alone has, instead of a chart."""
    place = int(np.flatnonzero(np.isfinite(found.figures[name]))[0])
    value = figure(float(found.figures[name][place])) if found.figures[name][place] else "0"
    return sentence(f"{charts.figure_name(name)} is known in round {count(int(found.rounds[place]))} alone, and is {value}")


def links_of(connection: sqlite3.Connection) -> list[Link]:
    n_users = dict(connection.execute("SELECT host, COUNT(*) FROM members GROUP BY host"))
    links = []
    for (scope, link), ways in _by_way(connection, Query(("scope", "link", "direction"))).items():
        ends = peers_of(link) if scope == PEERS else None
        above, _, below = link.partition("/") if scope == WITHIN else ("", "", link)
        if ends is not None:
            links.append(Link(*ends, None, ways.get("up", 0), ways.get("down", 0), scope))
            continue
        users = None if above else n_users.get(below)
        above = above.replace("%2F", "/").replace("%25", "%")
        links.append(Link(above, below, users, ways.get("up", 0), ways.get("down", 0), scope))
    return links


def _by_way(connection: sqlite3.Connection, query: Query) -> dict[tuple[str, ...], dict[str, float]]:
    """Wire bytes by direction, the last key of the query, for each of its other keys."""
    sent: dict[tuple[str, ...], dict[str, float]] = {}
    for group in totals(connection, query):
        sent.setdefault(group.keys[:-1], {})[group.keys[-1]] = group.wire_bytes
    return sent


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
    name = method(report.experiment.method.name).adapts
    adapts = any(adapted(stage) for stage in report.stages)
    stages = report.stages
    columns = {
        "stage": [f"{stage.name}{' *' if stage is report.final else ''}" for stage in stages],
        "ended by": [ended_by(stage, report) for stage in stages],
        "rounds": [count(stage.rounds) for stage in stages],
        "time": [duration(stage.seconds) for stage in stages],
        **({name: [_adapted(stage) for stage in stages]} if adapts else {}),
        "clusters": [count(report.clusters[stage.name]) for stage in stages],
        "held-out loss": [figure(stage.results.get("heldout_loss")) for stage in stages],
        f"held-out {metric}": [figure(stage.results.get("heldout_metric")) for stage in stages],
    }
    rows = [*zip(*columns.values(), strict=True)]
    return Section("stages", "Stages", tables=[Table("Stages (* the result)", [*columns], rows, n_text=2)])


def _adapted(stage: StageSummary) -> str:
    first, last = (figure(value, 2) for value in adapted(stage) or (None, None))
    return last if first == last else f"{first} to {last}"


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
