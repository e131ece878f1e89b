"""Quality against megabytes: a labelled point for each line of a comparison, and the front of those that no other one beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie_deploy.charts import Chart, cut, spec_of

Point = tuple[str, float, float]  # name, megabytes, quality


def front(points: Sequence[Point], *, is_rising: bool) -> list[Point]:
    """The points that no other one beats: none has a better quality for as many megabytes or fewer. By megabytes, ascending."""
    sign = 1.0 if is_rising else -1.0
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point[1], -sign * point[2])):
        if not kept or sign * point[2] > sign * kept[-1][2]:
            kept.append(point)
    return kept


def pareto_chart(points: Sequence[Point], quality: str, *, is_rising: bool) -> Chart:
    """The chart; megabytes, all above 0, on a logarithmic axis."""
    best = front(points, is_rising=is_rising)
    columns = ("line", "megabytes", quality, "on the front")
    rows = [(name, megabytes, value, (name, megabytes, value) in best) for name, megabytes, value in points]
    named = [dict(zip(columns, row, strict=True)) | {"label": cut(row[0])} for row in rows]
    x_title = "megabytes on the wire, up and down"
    x = {"field": "megabytes", "type": "quantitative", "title": x_title, "scale": {"type": "log", "nice": True, "padding": 14}}
    x["axis"] = {"format": "~g", "tickCount": 5}
    y = {"field": quality, "type": "quantitative", "title": quality, "scale": {"zero": False, "padding": 14}}
    places = {"x": x, "y": y}
    middle = _middle([row[1] for row in rows])
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": "datum['on the front']"}],
            "mark": {"type": "line", "interpolate": "step-after", "style": "mark-of-goal"},
            "encoding": places,
        },
        {
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {**places, "tooltip": [{"field": name} for name in columns[:3]]},
        },
    ]
    for is_right in (False, True):  # of the middle: labels stand on the side where there is room
        side = {"align": "right", "dx": -7} if is_right else {"align": "left", "dx": 7}
        shown = {"transform": [{"filter": f"datum.megabytes {'>' if is_right else '<='} {middle!r}"}]}
        layers.append({**shown, "mark": {"type": "text", "baseline": "middle", **side}, "encoding": {**places, "text": {"field": "label"}}})
    spec = spec_of({"layer": layers, "height": 240}, tuple(named[0]), [tuple(row.values()) for row in named])
    note = "Each point is a method, mean over the seeds; dashed: the front, whose points no other one beats in both. Logarithmic."
    return Chart("pareto", f"{quality[:1].upper()}{quality[1:]} against megabytes", note, spec, columns, rows)


def _middle(values: Sequence[float]) -> float:
    """Of a logarithmic axis."""
    return float((min(values) * max(values)) ** 0.5)
