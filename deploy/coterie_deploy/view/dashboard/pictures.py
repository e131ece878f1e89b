"""The content of the dashboard's pages, for JSON: numbers, texts, and charts as Vega-Lite specifications."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import CoterieError
from coterie_deploy.read.costs import figures_shown
from coterie_deploy.read.report import report_of
from coterie_deploy.read.run_status import RunStatus, Status, Watcher
from coterie_deploy.view import charts
from coterie_deploy.view.charts import Against, Chart
from coterie_deploy.view.run_users import clusters_section
from coterie_deploy.view.watch import latest_of
from coterie_server.record.curves import GAP, Curves
from coterie_server.record.query import Group
from coterie_server.record.rundb import read_run
from coterie_server.record.summary import SESSION, StageSummary, Traffic

_AXES: Sequence[Against] = ("round", "bytes", "seconds")
_MAX_EVENTS = 100
_KEPT = 16  # finished runs whose pictures are kept
_PICTURES = ("tree", "graph")  # charts of the report that a finished run has here too


def run_content(watched: Watcher, stage: str | None, figure: str | None) -> dict[str, Any]:
    """A run at this moment; charts of one of its stages, by default the newest or the result's. Raises what `Watcher.look` does."""
    with watched.lock:
        run, _ = watched.look()
        follower = watched.follower
        chosen = next((one for one in run.stages if one.name == stage), run.stage)
        curves = run.curves if chosen is None or chosen == run.stage else follower.curves(chosen)
        traffic = [row for row in follower.traffic.values() if row.stage != SESSION]
    figures = [] if curves is None else figures_shown(curves)
    shown = _shown(figure, figures, is_gap_known=curves is not None and curves.has_reference)
    drawn = [] if curves is None or shown is None else progress_charts({curves.stage.name: curves}, shown)
    drawn += [] if curves is None else [charts.cumulative_chart(curves)]
    if traffic:
        by_step = _grouped(traffic, lambda row: (row.step, row.direction, row.scope))
        drawn += [charts.traffic_chart(by_step), charts.scope_chart(_grouped(traffic, lambda row: (row.scope, row.direction)))]
    if run.status is Status.finished:
        drawn += _pictures(watched.folder, run.run_id, run.attempt)
    return {
        **_head(run),
        "stages": [_stage(one) for one in run.stages],
        "stage": None if chosen is None else chosen.name,
        "figures": {name: charts.figure_name(name) for name in figures},
        "figure": shown,
        "latest": {} if run.curves is None else latest_of(run.curves),
        "members": [[member.name, member.n_users, member.is_here, member.since] for member in run.members],
        "sent": [[one.scope, one.direction, one.vectors, one.wire_bytes, one.bytes_per_s] for one in run.sent],
        "events": [[event.at, event.kind, event.text] for event in reversed(run.events[-_MAX_EVENTS:])],
        "charts": [_chart(chart) for chart in drawn],
    }


@functools.lru_cache(maxsize=_KEPT)
def _pictures(folder: Path, run_id: str, attempt: int) -> tuple[Chart, ...]:
    """The pictures of a finished run, which does not change. None where its experiment or its models cannot be read: the rest can."""
    del run_id, attempt
    try:
        report = report_of(folder)
        with read_run(folder) as connection:
            return tuple(chart for chart in clusters_section(connection, report).all_charts if chart.key in _PICTURES)
    except (CoterieError, ImportError, OSError, ValueError):
        return ()


def comparison_content(chosen: Mapping[str, Watcher], figure: str | None) -> dict[str, Any]:
    """Several runs side by side: the newest stage of each, or that of its result."""
    rows, named = [], dict[str, Curves]()
    for name, watched in chosen.items():
        with watched.lock:
            run, _ = watched.look()
        rows.append({"run": name, **_head(run), **_cost(run)})
        if run.curves is not None:
            named[name] = run.curves
    listed = [one for curves in named.values() for one in figures_shown(curves)]
    figures = sorted(dict.fromkeys(listed), key=lambda one: -listed.count(one))
    shown = _shown(figure, figures, is_gap_known=all(curves.has_reference for curves in named.values()))
    return {
        "runs": rows,
        "figures": {one: charts.figure_name(one) for one in figures},
        "figure": shown,
        "charts": [_chart(chart) for chart in (progress_charts(named, shown) if shown is not None else [])],
    }


def _shown(asked: str | None, figures: Sequence[str], *, is_gap_known: bool) -> str | None:
    """The figure asked for, or the first. A gap to a stage's own smallest objective always ends at 0, so it is never the default."""
    if asked in figures:
        return asked
    return next((name for name in figures if name != GAP or is_gap_known), None)


def progress_charts(named: Mapping[str, Curves], figure: str) -> list[Chart]:
    if not any(np.isfinite(curves.figures[figure]).sum() > 1 for curves in named.values() if figure in curves.figures):
        return []  # a single point: the page has its value among the latest figures
    has_times = any(np.isfinite(curves.seconds).any() for curves in named.values())
    return [charts.progress_chart(named, figure, against) for against in _AXES if (against != "seconds" or has_times)]


def _head(run: RunStatus) -> dict[str, Any]:
    up, down = (sum(one.wire_bytes for one in run.sent if one.direction == way) for way in ("up", "down"))
    stage = run.stage
    return {
        "name": run.name,
        "run_id": run.run_id,
        "attempt": run.attempt,
        "status": str(run.status),
        "is_under_way": run.is_under_way,
        "sentence": run.sentence if run.status in ("failed", "stopped") else "",
        "doing": run.doing if run.is_under_way and stage is None else "",
        "n_stages": run.n_stages,
        "n_done": sum(bool(one.outcome) for one in run.stages),
        "newest": None if stage is None else _stage(stage),
        "limit": run.limit,
        "rounds_per_s": run.pace.rounds_per_s,
        "left_s": run.left_s,
        "likely_s": run.likely_s,
        "noun": run.noun,
        "n_wanted": run.n_wanted,
        "n_users": sum(member.n_users for member in run.members),
        "up": up,
        "down": down,
    }


def _cost(run: RunStatus) -> dict[str, Any]:
    curves = run.curves
    if curves is None:
        return {"stage_up": None, "stage_down": None, "stage_s": None, "metric": None}
    up, down = (float(curves.bytes_by(direction=way)[-1]) for way in ("up", "down"))
    metric = curves.stage.results.get("heldout_metric")
    return {"stage_up": up, "stage_down": down, "stage_s": float(curves.seconds[-1]), "metric": metric}


def _stage(stage: StageSummary) -> list[Any]:
    metric = stage.results.get("heldout_metric")
    return [stage.name, stage.method, stage.rounds, stage.outcome, stage.seconds, metric, stage.results.get("clusters")]


def _chart(chart: Chart) -> dict[str, Any]:
    return {"key": chart.key, "title": chart.title, "note": chart.note, "spec": chart.spec}


def _grouped(rows: Iterable[Traffic], keys_of: Callable[[Traffic], tuple[str, ...]]) -> list[Group]:
    """Traffic by some keys, in order of first appearance."""
    groups: dict[tuple[str, ...], Group] = {}
    for row in rows:
        keys = keys_of(row)
        groups.setdefault(keys, Group(keys)).add((row.vectors, row.scalars, row.payload_bytes, row.message_bytes, row.frames))
    return list(groups.values())
