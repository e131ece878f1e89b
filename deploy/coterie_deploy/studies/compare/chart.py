"""Quality against megabytes: a labelled point for each line of a comparison, and the front of those that no other one beats in both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from coterie_deploy.view.charts import Chart, cut, number, spec_of, told

Point = tuple[str, str, float, float]  # method, how it was fine-tuned ("" not at all), megabytes, quality

AS_IT_IS = "as it is"
_WIDTH, _HEIGHT, _LETTER, _LINE, _GAP = 285.0, 240.0, 4.8, 11.0, 7.0  # pixels, of a figure as wide as a column of a paper
_SHIFTS = (0, *(sign * n for n in range(1, 9) for sign in (1, -1)))  # of a label from beside its point, in half lines
_LED = 2  # half lines from which a line leads from a point to its label
_WAY_OFF = 2.0  # square pixels of overlap that a label accepts rather than go half a line further


def front(points: Sequence[Point], *, is_rising: bool) -> list[Point]:
    """The points that no other one beats: none has as good a quality for as many megabytes or fewer. By megabytes, ascending."""
    sign = 1.0 if is_rising else -1.0
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point[2], -sign * point[3])):
        if not kept or sign * point[3] > sign * kept[-1][3]:
            kept.append(point)
    return kept


def pareto_chart(points: Sequence[Point], quality: str, *, is_rising: bool) -> Chart:
    """The chart; megabytes, all above 0, on a logarithmic axis. Points of one method have their form from how it was fine-tuned."""
    best = front(points, is_rising=is_rising)
    height = max(_HEIGHT, _LINE * len(points))
    x_range, y_range = _around([math.log10(point[2]) for point in points]), _around([point[3] for point in points])
    columns = ("method", "fine-tuned", "megabytes", quality, "on the front")
    rows = [
        (method, tuned or AS_IT_IS, megabytes, value, (method, tuned, megabytes, value) in best)
        for method, tuned, megabytes, value in points
    ]
    drawn = [
        (*row, cut(row[0]), is_left, is_led, 10 ** _value(x, x_range, _WIDTH), _value(height - y, y_range, height))
        for row, (x, y, is_left, is_led) in zip(rows, _labels(points, best, x_range, y_range, height), strict=True)
    ]
    x_title = "megabytes on the wire, up and down"
    scale = {"type": "log", "domain": [10**end for end in x_range], "nice": False}
    axis = {"format": "~g", "tickCount": 5, "labelOverlap": True}
    x = number("megabytes", x_title, scale=scale, axis=axis)
    y = number(quality, quality, scale={"domain": list(y_range), "nice": False})
    tunings = list(dict.fromkeys(row[1] for row in rows))
    legend = {"symbolFillColor": "#8a94a1"} if len(tunings) > 1 else None
    form = {"field": "fine-tuned", "type": "nominal", "sort": tunings, "legend": legend}

    def layer(mark: dict[str, Any], only: str = "true", **encoding: Any) -> dict[str, Any]:
        return {"transform": [{"filter": only}], "mark": mark, "encoding": {"x": x, "y": y, **encoding}}

    beside = {"x": {**x, "field": "label x"}, "y": {**y, "field": "label y"}, "text": {"field": "label"}}
    tooltip = told(*columns[:2], formats=dict.fromkeys(columns[2:4], "~g"))
    leading = {"type": "rule", "strokeWidth": 0.7, "color": "#8a94a1"}
    layers = [
        layer({"type": "line", "interpolate": "step-after", "style": "mark-of-goal"}, "datum['on the front']"),
        layer(leading, "datum['is led']", x2={"field": "label x"}, y2={"field": "label y"}),
        layer({"type": "point", "filled": True, "size": 45, "opacity": 1}, shape=form, tooltip=tooltip),
        layer({"type": "text", "baseline": "middle", "align": "left"}, "!datum['is left']", **beside),
        layer({"type": "text", "baseline": "middle", "align": "right"}, "datum['is left']", **beside),
    ]
    spec = spec_of({"layer": layers, "height": height}, (*columns, "label", "is left", "is led", "label x", "label y"), drawn)
    note = "Each point is a method, mean over the seeds; dashed: the front, whose points no other one beats in both. Logarithmic."
    return Chart("pareto", f"{quality[:1].upper()}{quality[1:]} against megabytes", note, spec, columns, rows)


def _around(values: Sequence[float]) -> tuple[float, float]:
    """A range with room around the values."""
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


def _value(pixel: float, ends: tuple[float, float], length: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * pixel / length


def _pixel(value: float, ends: tuple[float, float], length: float) -> float:
    return (value - ends[0]) / (ends[1] - ends[0]) * length


Box = tuple[float, float, float, float]  # left, right, top, bottom


def _labels(
    points: Sequence[Point], best: Sequence[Point], x_range: tuple[float, float], y_range: tuple[float, float], height: float
) -> list[tuple[float, float, bool, bool]]:
    """Where the name of each point begins or, left of it, ends: right of the point where there is room, else as near as there is some.

    Last, whether a line leads there.
    """

    def mark(point: Point) -> tuple[float, float]:
        return _pixel(math.log10(point[2]), x_range, _WIDTH), height - _pixel(point[3], y_range, height)

    taken: list[Box] = [(x - _GAP / 2, x + _GAP / 2, y - _GAP / 2, y + _GAP / 2) for x, y in map(mark, points)]
    for (x, y), (next_x, next_y) in itertools.pairwise(map(mark, best)):  # the two parts of each step of the front
        taken += [(x, next_x, y - 1, y + 1), (next_x - 1, next_x + 1, min(y, next_y), max(y, next_y))]
    placed = []
    for point in points:
        x, y = mark(point)
        width = _LETTER * len(cut(point[0]))
        choices: list[tuple[float, int, Box, bool, bool]] = []
        for shift, is_left in itertools.product(_SHIFTS, (False, True)):
            start, middle = x - _GAP - width if is_left else x + _GAP, y + shift * _LINE / 2
            box = (start, start + width, middle - _LINE / 2, middle + _LINE / 2)
            cost = _overlap(box, taken) + _beyond(box, height) + _WAY_OFF * abs(shift)
            choices.append((cost, len(choices), box, is_left, abs(shift) >= _LED))
        _, _, box, is_left, is_led = min(choices)
        taken.append(box)
        placed.append((box[1] if is_left else box[0], (box[2] + box[3]) / 2, is_left, is_led))
    return placed


def _overlap(box: Box, others: Sequence[Box]) -> float:
    """The area that a box has in common with others."""
    left, right, top, bottom = box
    return sum(max(0.0, min(right, r) - max(left, a)) * max(0.0, min(bottom, b) - max(top, t)) for a, r, t, b in others)


def _beyond(box: Box, height: float) -> float:
    """What of a label is beyond the sides of the chart."""
    left, right, top, bottom = box
    return (max(0.0, -left) + max(0.0, right - _WIDTH)) * _LINE + (max(0.0, -top) + max(0.0, bottom - height)) * (right - left)
