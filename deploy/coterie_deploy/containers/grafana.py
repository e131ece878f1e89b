"""The dashboard that Grafana shows of a run: traffic by scope and step, totals, progress, members, events, processes.

Single numbers are the last of the time range, so that those of a run that is over stay to be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DATA_SOURCE = {"type": "prometheus", "uid": "coterie-prometheus"}
UID = "coterie"
_SCHEMA = 39  # of dashboards: Grafana 11; later ones read it and raise it
_COLUMNS = 24  # of Grafana's grid
_COORDINATOR = 'instance=~"coordinator:.*"'
_RATE, _RANGE = "[$__rate_interval]", "[$__range]"


@dataclass(frozen=True)
class _Panel:
    """One panel: `queries` are (PromQL, legend); `unit` is one of Grafana's."""

    title: str
    kind: Literal["stat", "timeseries"]
    width: int
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    is_stacked: bool = False
    is_log: bool = False
    is_name: bool = False  # a stat shows the legend in the place of the number
    description: str = ""


_ROWS: tuple[tuple[str, int, tuple[_Panel, ...]], ...] = (
    (
        "Run",
        4,
        (
            _Panel(
                "Status", "stat", 4, [(f"last_over_time(coterie_run_status{{{_COORDINATOR}}}{_RANGE}) == 1", "{{status}}")], is_name=True
            ),
            _Panel(
                "Stage",
                "stat",
                4,
                [(f"topk(1, max_over_time(timestamp(coterie_stage_info{{{_COORDINATOR}}}){_RANGE[:-1]}:2s]))", "{{stage}}")],
                is_name=True,
            ),
            _Panel("Round", "stat", 4, [(f"last_over_time(coterie_round{{{_COORDINATOR}}}{_RANGE})", "round")]),
            _Panel("Users", "stat", 3, [(f"last_over_time(coterie_users{{{_COORDINATOR}}}{_RANGE})", "users")]),
            _Panel("Members present", "stat", 3, [("sum(coterie_members_present)", "present"), ("sum(coterie_members_expected)", "of")]),
            _Panel(
                "Since the last round",
                "stat",
                3,
                [(f"time() - max(last_over_time(coterie_latest_round_timestamp_seconds{_RANGE}))", "")],
                "s",
            ),
            _Panel("Attempt", "stat", 3, [(f"last_over_time(coterie_attempt{{{_COORDINATOR}}}{_RANGE})", "attempt")]),
        ),
    ),
    (
        "Traffic",
        8,
        (
            _Panel(
                "By scope",
                "timeseries",
                12,
                [(f"sum by (scope, direction) (rate(coterie_wire_bytes_total{_RATE}))", "{{scope}} {{direction}}")],
                "Bps",
                description="Messages with their gRPC headers, useful or not.",
            ),
            _Panel(
                "By step of the method",
                "timeseries",
                12,
                [(f"sum by (step, direction) (rate(coterie_wire_bytes_total{_RATE}))", "{{step}} {{direction}}")],
                "Bps",
                is_stacked=True,
            ),
        ),
    ),
    (
        "Totals",
        4,
        (
            _Panel(
                "Up",
                "stat",
                6,
                [(f'sum by (scope) (last_over_time(coterie_wire_bytes_total{{direction="up"}}{_RANGE}))', "{{scope}}")],
                "decbytes",
            ),
            _Panel(
                "Down",
                "stat",
                6,
                [(f'sum by (scope) (last_over_time(coterie_wire_bytes_total{{direction="down"}}{_RANGE}))', "{{scope}}")],
                "decbytes",
            ),
            _Panel("Models", "stat", 6, [(f"sum by (direction) (last_over_time(coterie_vectors_total{_RANGE}))", "{{direction}}")]),
            _Panel(
                "Sent in vain",
                "stat",
                6,
                [(f"sum(last_over_time(coterie_repeated_wire_bytes_total{_RANGE})) or vector(0)", "")],
                "decbytes",
                description="Sent again, too late, or in rounds that a resumed run made again.",
            ),
        ),
    ),
    (
        "Progress",
        8,
        (
            _Panel("Rounds", "timeseries", 8, [(f"sum(rate(coterie_rounds_total{{{_COORDINATOR}}}{_RATE}))", "rounds/s")]),
            _Panel("Objective", "timeseries", 8, [("coterie_objective", "{{stage}}")]),
            _Panel("Other figures", "timeseries", 8, [("coterie_figure", "{{stage}} {{name}}")], is_log=True),
        ),
    ),
    (
        "Members and events",
        8,
        (
            _Panel(
                "Members present",
                "timeseries",
                8,
                [("coterie_members_present", "{{instance}}"), ("coterie_members_expected", "{{instance}} expected")],
            ),
            _Panel("Events", "timeseries", 8, [(f"sum by (kind) (increase(coterie_events_total{_RATE})) > 0", "{{kind}}")]),
            _Panel("Events so far", "stat", 8, [(f"sum by (kind) (last_over_time(coterie_events_total{_RANGE})) > 0", "{{kind}}")]),
        ),
    ),
    (
        "Processes",
        6,
        (
            _Panel("Memory", "timeseries", 12, [('process_resident_memory_bytes{job="coterie"}', "{{instance}}")], "bytes"),
            _Panel(
                "Processor", "timeseries", 12, [(f'rate(process_cpu_seconds_total{{job="coterie"}}{_RATE})', "{{instance}}")], "percentunit"
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": UID,
        "title": "Coterie",
        "tags": ["coterie"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,  # a shared crosshair
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, height, panels in _ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": _place(0, top, _COLUMNS, 1), "panels": []}
        top, left = top + 1, 0
        for panel in panels:
            number += 1
            yield {"id": number, "gridPos": _place(left, top, panel.width, height), **_content(panel)}
            left += panel.width
        top += height


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _content(panel: _Panel) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": DATA_SOURCE,
            "expr": query,
            "legendFormat": legend,
            "instant": is_stat,
            "range": not is_stat,
        }
        for place, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATA_SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _stat_options(panel) if is_stat else _series_options(),
    }


def _defaults(panel: _Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"unit": panel.unit, "color": {"mode": "fixed", "fixedColor": "text"}}
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 20 if panel.is_stacked else 0,
        "showPoints": "auto",
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "symlog", "log": 10, "linearThreshold": 1e-6} if panel.is_log else {"type": "linear"},
    }
    return {"unit": panel.unit, "color": {"mode": "palette-classic"}, "custom": custom}


def _stat_options(panel: _Panel) -> dict[str, Any]:
    has_several = len(panel.queries) > 1 or "{{" in panel.queries[0][1]
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "name" if panel.is_name else "value_and_name" if has_several else "value",
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
    }


def _series_options() -> dict[str, Any]:
    return {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
