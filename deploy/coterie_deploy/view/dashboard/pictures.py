"""What the pages show of runs, as content for JSON: numbers as they are, texts as they were written, charts as Vega-Lite specifications."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coterie_deploy.read.standing import Standing
from coterie_deploy.view import charts
from coterie_deploy.view.charts import Against, Chart
from coterie_deploy.view.dashboard.found import Watched
from coterie_deploy.view.run_view import figures_shown
from coterie_deploy.view.watch import latest_of
from coterie_server.record.curves import GAP, Curves
from coterie_server.record.follow import Event
from coterie_server.record.query import Group
from coterie_server.record.summary import SESSION, StageSummary, Traffic

_AXES: Sequence[Against] = ("round", "bytes", "seconds")
_MAX_EVENTS = 100


def run_content(watched: Watched, stage: str | None, figure: str | None) -> dict[str, Any]:
    """A run at this moment; charts of one of its stages, by default the newest or the result's. Raises what `Watcher.look` does."""
    with watched.lock:
        standing, _ = watched.watcher.look()
        follower = watched.watcher.follower
        chosen = next((one for one in standing.stages if one.name == stage), standing.stage)
        if chosen is None:
            curves = None
        elif chosen == standing.stage:
            curves = standing.curves
        else:
            curves = follower.curves(chosen)
        traffic = [row for row in follower.traffic.values() if row.stage != SESSION]
    figures = [] if curves is None else figures_shown(curves)
    shown = _shown(figure, figures, is_gap_known=curves is not None and curves.has_reference)
    drawn = [] if curves is None or shown is None else progress_charts({curves.stage.name: curves}, shown)
    drawn += [] if curves is None else [charts.cumulative_chart(curves)]
    if traffic:
        by_step = _grouped(traffic, lambda row: (row.step, row.direction, row.scope))
        drawn += [charts.traffic_chart(by_step), charts.scope_chart(_grouped(traffic, lambda row: (row.scope, row.direction)))]
    return {
        **_head(standing),
        "stages": [_stage(one) for one in standing.stages],
        "stage": None if chosen is None else chosen.name,
        "figures": {name: charts.figure_name(name) for name in figures},
        "figure": shown,
        "latest": {} if standing.curves is None else latest_of(standing.curves),
        "members": [[member.name, member.n_users, member.is_here, _number(member.since)] for member in standing.members],
        "sent": [[one.scope, one.direction, one.vectors, one.wire_bytes, one.bytes_per_s] for one in standing.sent],
        "events": [_event(event) for event in reversed(standing.events[-_MAX_EVENTS:])],
        "charts": [_chart(chart) for chart in drawn],
    }


def comparison_content(chosen: Mapping[str, Watched], figure: str | None) -> dict[str, Any]:
    """Several runs side by side: the newest stage of each, or that of its result."""
    rows, named = [], dict[str, Curves]()
    for name, watched in chosen.items():
        with watched.lock:
            standing, _ = watched.watcher.look()
        rows.append({"run": name, **_head(standing), **_cost(standing)})
        if standing.curves is not None:
            named[name] = standing.curves
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
    """What was asked for, or the first; the gap to a stage's own smallest objective, which always ends at 0, only when it is asked for."""
    if asked in figures:
        return asked
    return next((name for name in figures if name != GAP or is_gap_known), None)


def progress_charts(named: Mapping[str, Curves], figure: str) -> list[Chart]:
    """A figure against rounds, bytes and seconds, as far as these are known."""
    has_times = any(np.isfinite(curves.seconds).any() for curves in named.values())
    return [charts.progress_chart(named, figure, against) for against in _AXES if (against != "seconds" or has_times)]


def _head(standing: Standing) -> dict[str, Any]:
    up, down = (sum(one.wire_bytes for one in standing.sent if one.direction == way) for way in ("up", "down"))
    stage = standing.stage
    return {
        "name": standing.name,
        "run_id": standing.run_id,
        "attempt": standing.attempt,
        "status": str(standing.status),
        "is_under_way": standing.is_under_way,
        "sentence": standing.sentence if standing.status in ("failed", "stopped") else "",
        "doing": standing.doing if standing.is_under_way and stage is None else "",
        "n_stages": standing.n_stages,
        "n_done": sum(bool(one.outcome) for one in standing.stages),
        "newest": None if stage is None else _stage(stage),
        "limit": standing.limit,
        "rounds_per_s": standing.pace.rounds_per_s,
        "left_s": _number(standing.left_s),
        "likely_s": _number(standing.likely_s),
        "noun": standing.noun,
        "n_wanted": standing.n_wanted,
        "n_users": sum(member.n_users for member in standing.members),
        "up": up,
        "down": down,
    }


def _cost(standing: Standing) -> dict[str, Any]:
    """What the stage that is compared has cost."""
    curves = standing.curves
    if curves is None:
        return {"stage_up": None, "stage_down": None, "stage_s": None, "metric": None}
    up, down = (float(curves.bytes_by(direction=way)[-1]) for way in ("up", "down"))
    metric = curves.stage.results.get("heldout_metric")
    return {"stage_up": up, "stage_down": down, "stage_s": _number(float(curves.seconds[-1])), "metric": metric}


def _stage(stage: StageSummary) -> list[Any]:
    metric = stage.results.get("heldout_metric")
    return [stage.name, stage.method, stage.rounds, stage.outcome, stage.seconds, metric, stage.results.get("clusters")]


def _event(event: Event) -> list[Any]:
    return [event.at, event.kind, event.text]


def _chart(chart: Chart) -> dict[str, Any]:
    return {"key": chart.key, "title": chart.title, "note": chart.note, "spec": chart.spec}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _grouped(rows: Iterable[Traffic], keys_of: Callable[[Traffic], tuple[str, ...]]) -> list[Group]:
    """Traffic by some keys, in order of first appearance."""
    groups: dict[tuple[str, ...], Group] = {}
    for row in rows:
        keys = keys_of(row)
        groups.setdefault(keys, Group(keys)).add((row.vectors, row.scalars, row.payload_bytes, row.message_bytes, row.frames), 0)
    return list(groups.values())
