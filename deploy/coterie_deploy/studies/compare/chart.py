"""Quality against megabytes: a labelled point for each line of a comparison, and the front of those that no other one beats in both."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from coterie_deploy.view.charts import Chart, number, spec_of, told

Point = tuple[str, str, float, float]  # row, how it was fine-tuned ("" not at all), megabytes, quality

AS_IT_IS = "as it is"
_WIDTH, _HEIGHT, _LETTER, _LINE, _GAP = 285.0, 240.0, 4.8, 11.0, 7.0  # pixels, of a figure as wide as a column of a paper
_SHIFTS = (0, *(sign * n for n in range(1, 13) for sign in (1, -1)))  # of a label from beside its point, in half lines
_LED = 2  # half lines from which a line leads from a point to its label
_WIDE_SPREAD = 20.0  # of megabytes, the largest by the smallest, from which their axis is logarithmic
_FROM_ZERO = 0.5  # part of the greatest quality that the least one has at most where the axis begins at 0
_LABEL = 40  # letters of a label at most
_BEFORE = r"(?<=[={\[])|(?<=(?<!:) )"  # what follows can stand alone: an entry of a setting, or its value
_WAY_OFF = 2.0  # square pixels of overlap that a label accepts rather than go half a line further


def front(points: Sequence[Point], *, is_rising: bool) -> list[Point]:
    """The points that no other one beats: none has as good a quality for as many megabytes or fewer. By megabytes, ascending."""
    sign = 1.0 if is_rising else -1.0
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point[2], -sign * point[3])):
        if not kept or sign * point[3] > sign * kept[-1][3]:
            kept.append(point)
    return kept


def pareto_chart(points: Sequence[Point], quality: str, *, is_rising: bool, what: str = "method") -> Chart:
    """The chart. Points of one row, `what` it is, have their form from how it was fine-tuned.

    Both axes begin at 0, or say what they do instead: megabytes that differ a lot (all are above 0) are on a logarithmic axis, and the axis
    of qualities that hardly differ is broken, with its first value in its title.
    """
    best = front(points, is_rising=is_rising)
    height = max(_HEIGHT, _LINE * len(points))
    sizes, qualities = [point[2] for point in points], [point[3] for point in points]
    is_log = max(sizes) > _WIDE_SPREAD * min(sizes)
    across, back = (math.log10, lambda place: 10.0**place) if is_log else (float, float)
    x_range = _around([across(value) for value in sizes], from_zero=not is_log)
    is_whole = 0 <= min(qualities) <= _FROM_ZERO * max(qualities)
    y_range = _around(qualities, from_zero=is_whole)
    columns = (what, "fine-tuned", "megabytes", quality, "on the front")
    rows = [
        (name, tuned or AS_IT_IS, megabytes, value, (name, tuned, megabytes, value) in best) for name, tuned, megabytes, value in points
    ]
    labels = _shortened([point[0] for point in points])
    places = _places(points, labels, best, across, x_range, y_range, height)
    drawn = [
        (*row, label, is_left, is_led, back(_value(x, x_range, _WIDTH)), _value(height - y, y_range, height))
        for row, label, (x, y, is_left, is_led) in zip(rows, labels, places, strict=True)
    ]
    scale = {"type": "log" if is_log else "linear", "domain": [back(end) for end in x_range], "nice": False}
    axis = {"labelExpr": "format(datum.value, '~r')", "tickCount": 5, "labelOverlap": True}
    x = number("megabytes", f"megabytes on the wire, up and down{' (logarithmic)' if is_log else ''}", scale=scale, axis=axis)
    broken = "" if is_whole else f" (axis from {y_range[0]:.3g}, not 0)"
    y = number(quality, f"{quality}{broken}", scale={"domain": list(y_range), "nice": False})
    tunings = list(dict.fromkeys(row[1] for row in rows))
    legend = {"symbolFillColor": "#8a94a1"} if len(tunings) > 1 else None
    form = {"field": "fine-tuned", "type": "nominal", "sort": tunings, "legend": legend}

    def layer(mark: dict[str, Any], only: str = "true", **encoding: Any) -> dict[str, Any]:
        return {"transform": [{"filter": only}], "mark": mark, "encoding": {"x": x, "y": y, **encoding}}

    beside = {"x": {**x, "field": "label x"}, "y": {**y, "field": "label y"}, "text": {"field": "label"}}
    tooltip = told(*columns[:2], formats=dict.fromkeys(columns[2:4], "~g"))
    leading = {"type": "rule", "strokeWidth": 0.7, "color": "#8a94a1"}
    worst = y_range[0] if is_rising else y_range[1]
    corners = [(best[0][2], worst), *((point[2], point[3]) for point in best), (back(x_range[1]), best[-1][3])]  # to the sides of the chart
    stairs = [{"megabytes": size, quality: value} for size, value in corners]
    layers = [
        *([] if is_whole else _break(height)),
        {**layer({"type": "line", "interpolate": "step-after", "style": "mark-of-goal"}), "data": {"values": stairs}},
        layer(leading, "datum['is led']", x2={"field": "label x"}, y2={"field": "label y"}),
        layer({"type": "point", "filled": True, "size": 45, "opacity": 1}, shape=form, tooltip=tooltip),
        layer({"type": "text", "baseline": "middle", "align": "left"}, "!datum['is left']", **beside),
        layer({"type": "text", "baseline": "middle", "align": "right"}, "datum['is left']", **beside),
    ]
    spec = spec_of({"layer": layers, "height": height}, (*columns, "label", "is left", "is led", "label x", "label y"), drawn)
    note = f"Each point is a {what}, mean over the seeds; dashed: the front, whose points no other one beats in both."
    note += " Megabytes are on a logarithmic axis." if is_log else ""
    return Chart("pareto", f"{quality[:1].upper()}{quality[1:]} against megabytes", note, spec, columns, rows)


def _shortened(names: Sequence[str]) -> list[str]:
    """Names as labels. Long ones lose what they begin with in common, and then their middles: settings differ at either end."""
    too_long = {name for name in names if len(name) > _LABEL}
    parts = [re.split(_BEFORE, name) for name in sorted(too_long)]
    same = itertools.takewhile(lambda listed: len(set(listed)) == 1, zip(*parts, strict=False))
    common, half = "".join(listed[0] for listed in same) if len(too_long) > 1 else "", _LABEL // 2
    rest = ["\N{HORIZONTAL ELLIPSIS}" + name.removeprefix(common) if common and name in too_long else name for name in names]
    return [name if len(name) <= _LABEL else f"{name[: half - 1]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}" for name in rest]


def _around(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """A range with room around the values."""
    low, high = 0.0 if from_zero else min(values), max(values)
    room = 0.1 * (high - low) or 0.5 * abs(high) or 0.5
    return 0.0 if from_zero else low - room, high + room


def _break(height: float) -> list[dict[str, Any]]:
    """Two strokes across the vertical axis, above its lower end: it does not begin at 0."""
    strokes = [{"x": {"value": -5}, "x2": {"value": 5}, "y": {"value": height - up}, "y2": {"value": height - up - 5}} for up in (4, 8)]
    return [{"data": {"values": [{}]}, "mark": {"type": "rule", "strokeWidth": 1.2}, "encoding": stroke} for stroke in strokes]


def _value(pixel: float, ends: tuple[float, float], length: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * pixel / length


Box = tuple[float, float, float, float]  # left, right, top, bottom


def _places(
    points: Sequence[Point],
    labels: Sequence[str],
    best: Sequence[Point],
    across: Callable[[float], float],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    height: float,
) -> list[tuple[float, float, bool, bool]]:
    """Where the label of each point begins or, left of it, ends: right of the point where there is room, else as near as there is some.

    Last, whether a line leads there.
    """

    def mark(point: Point) -> tuple[float, float]:
        along = [(value - low) / (high - low) for value, (low, high) in ((across(point[2]), x_range), (point[3], y_range))]
        return along[0] * _WIDTH, height - along[1] * height

    taken: list[Box] = [(x - _GAP / 2, x + _GAP / 2, y - _GAP / 2, y + _GAP / 2) for x, y in map(mark, points)]
    stairs = [(mark(best[0])[0], height), *map(mark, best), (_WIDTH, mark(best[-1])[1])]
    for (x, y), (next_x, next_y) in itertools.pairwise(stairs):  # the two parts of each step of the front
        taken += [(x, next_x, y - 1, y + 1), (next_x - 1, next_x + 1, min(y, next_y), max(y, next_y))]
    placed = []
    for point, label in zip(points, labels, strict=True):
        x, y = mark(point)
        width = _LETTER * len(label)
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
