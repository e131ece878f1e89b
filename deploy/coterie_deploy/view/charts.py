"""Charts of runs as Vega-Lite specifications: one for the report, the dashboard, and the figures of a paper.

A specification carries its own data and no colours: these come from a theme (`view.theme`), which whoever draws it passes as configuration.
Lines are thinned to what a screen can show, with the highest and lowest values of each stretch; `rows` has what was drawn.
`charts_structure` has the charts of who is together and who speaks to whom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie_deploy.read.costs import AXES, cost, goal_said
from coterie_deploy.read.costs import Against as Against  # noqa: PLC0414 - a word of this module too
from coterie_deploy.view.theme import N_COLOURS
from coterie_server.record.curves import GAP, RESIDUAL, Curves, Goal
from coterie_server.record.query import Group
from coterie_server.record.rundb import BETWEEN, DIRECT, WITHIN
from coterie_server.record.summary import Traffic

Spec = Mapping[str, Any]
Rows = Sequence[tuple[Any, ...]]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing is fetched
FITTED = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
MAX_POINTS = 400  # of a line
MAX_LETTERS = 24  # of a name beside a mark
WAYS = ("up", "down")
SCOPES = (DIRECT, BETWEEN, WITHIN)
# What has a colour of its own has it in all charts: the places in the palette of ways, then of scopes.
_COLOUR_ORDER = (*WAYS, *SCOPES)
_FEW = 15  # points of a line that are marked
_LEAST_SHARE = 0.005  # of the largest bar that one must have to be seen
_LOGARITHMIC = (GAP, "primal_residual", "dual_residual", RESIDUAL, "gradient_norm", "distance")
_NAMES = {
    GAP: "relative gap of the objective",
    RESIDUAL: "residual, the larger of primal and dual",
    "primal_residual": "primal residual",
    "dual_residual": "dual residual",
    "gradient_norm": "norm of the gradient",
    "loss": "training loss",
    "accuracy": "mean local test accuracy",
    "squared_error": "mean squared error on held-out rows",
    "deviance": "mean deviance on held-out rows",
    "heldout_loss": "held-out loss",
    "distance": "distance to the true representation",
}


@dataclass(frozen=True)
class Chart:
    """A chart and the table behind it. `note` says in a sentence what one sees."""

    key: str
    title: str
    note: str
    spec: Spec
    columns: Sequence[str]
    rows: Rows


def figure_name(figure: str) -> str:
    """A figure of a round in words."""
    return _NAMES.get(figure, figure.replace("_", " "))


# ---- what a run has reached, and at what cost


def progress_chart(
    named: Mapping[str, Curves], figure: str, against: Against, *, up_weight: float = 1.0, goal: Goal | None = None
) -> Chart:
    """A figure of each round against what it has cost; a line for each of the named stages that has it, and one across for the goal."""
    rows: list[tuple[Any, ...]] = []
    for name, curves in named.items():
        if figure in curves.figures:
            paid, values = thinned(cost(curves, against, up_weight=up_weight), curves.figures[figure])
            rows += [(name, _whole(a, against), b) for a, b in zip(paid.tolist(), values.tolist(), strict=True)]
    is_log = figure in _LOGARITHMIC and sum(y > 0 for _, _, y in rows) > 1
    if is_log:
        rows = [row for row in rows if row[2] > 0]
    weighted = f", up {up_weight:g} times" if against == "bytes" and up_weight != 1 else ""
    x_title, y_title = AXES[against] + weighted, figure_name(figure)
    y = number("y", y_title, scale={"zero": False})
    if is_log:
        y = number("y", y_title, scale={"type": "log"}, axis=_decades([row[2] for row in rows]))
    x_format = ",.4~r" if against in ("round", "seconds") else ","
    encoding: dict[str, Any] = {
        "x": number("x", x_title, axis=axis_of(against), scale={"nice": False}),
        "y": y,
        "tooltip": told("name", formats={"x": x_format, "y": ".4~g"}, titles={"name": "of", "x": x_title, "y": y_title}),
    }
    n_lines = len({row[0] for row in rows})
    if len(named) > 1:
        encoding["color"] = {"field": "name", "type": "nominal", "sort": list(named), "scale": {"domain": list(named)}}
        encoding["color"]["legend"] = {"symbolType": "stroke"}
        if len(named) > N_COLOURS:
            encoding["strokeDash"] = {**encoding["color"], "scale": {"domain": list(named), "range": _dashes(len(named))}}
    is_single = len(rows) <= n_lines  # one round alone is a point
    mark: dict[str, Any] = {"type": "point", "filled": True, "size": 60} if is_single else {"type": "line", "clip": True}
    if not is_single and len(rows) <= _FEW * n_lines:
        mark["point"] = {"filled": True, "size": 28}
    layers: list[dict[str, Any]] = [{"mark": mark, "encoding": encoding}]
    if goal is not None and goal.figure == figure and (goal.value > 0 or not is_log):
        across = {"y": {"datum": goal.value, "type": "quantitative"}, "tooltip": {"value": goal_said(goal)}}
        layers.append({"data": {"values": [{}]}, "mark": {"type": "rule", "style": "mark-of-goal"}, "encoding": across})
    unit = layers[0] if len(layers) == 1 else {"layer": layers}
    spec = spec_of({**unit, "height": 240}, ("name", "x", "y"), [(name, a, _short(b)) for name, a, b in rows])
    note = ("Logarithmic. " if is_log else "") + _what_counts(against)
    if goal is not None and len(layers) > 1:
        note += f" Dashed: {goal_said(goal)}."
    return Chart(f"{figure}-{against}", _title(f"{y_title} against {x_title}"), note, spec, ("of", x_title, y_title), rows)


def _what_counts(against: Against) -> str:
    return {
        "round": "Round by round of the stage.",
        "seconds": "Time since the stage began.",
        "bytes": "Bytes of the stage up to the end of each round, both ways, repeats not counted.",
    }.get(against, "Bytes of the stage up to the end of each round, repeats not counted.")


def _whole(value: float, against: Against) -> float:
    """Rounds and bytes as the whole numbers that they are."""
    return value if against == "seconds" or not value.is_integer() else int(value)


def cumulative_chart(curves: Curves) -> Chart:
    """The bytes of a stage so far, by direction and scope, round by round."""
    rows: list[tuple[Any, ...]] = []
    ordered = sorted(curves.wire_bytes.items(), key=lambda item: (SCOPES.index(item[0][1]), WAYS.index(item[0][0])))
    for (direction, scope), sent in ordered:
        x, y = thinned(curves.rounds.astype(np.float64), sent)
        rows += [(direction, scope, int(a), round(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    scopes = list(dict.fromkeys(row[1] for row in rows))
    columns = ("way", "scope", "round", "bytes")
    encoding: dict[str, Any] = {
        "x": number("round", axis=axis_of("round"), scale={"nice": False}),
        "y": number("bytes", "bytes so far", axis=axis_of("bytes")),
        "color": coloured("way", WAYS),
        "detail": {"field": "scope"},
        "tooltip": told("way", "scope", formats={"round": ",", "bytes": ","}),
    }
    if len(scopes) > 1:
        dashes = {"domain": scopes, "range": _dashes(len(scopes))}
        encoding["strokeDash"] = {"field": "scope", "type": "nominal", "scale": dashes, "legend": {"labelExpr": _SHORT_SCOPE}}
    spec = spec_of({"mark": {"type": "line"}, "encoding": encoding, "height": 240}, columns, rows)
    return Chart("cumulative", "Bytes so far", "Useful traffic of the stage on the wire, set-up included.", spec, columns, rows)


_COLUMNS = ("step", "way", "scope", "vectors", "closed form", "bytes")


def _traffic_rows(traffic: Iterable[Traffic | Group]) -> list[tuple[Any, ...]]:
    rows = []
    for row in traffic:
        keys, expected = (row.keys, None) if isinstance(row, Group) else ((row.step, row.direction, row.scope), row.expected)
        rows.append((*keys, row.vectors, expected, round(row.wire_bytes)))
    return rows


def _named(rows: Rows) -> list[tuple[Any, ...]]:
    """The rows with the name of their bars before them: the step, and the scope where there are several."""
    several = len({row[2] for row in rows}) > 1
    return [(f"{row[0]} ({_scope(row[2])})" if several else row[0], *row) for row in rows]


def traffic_chart(traffic: Iterable[Traffic | Group], *, key: str = "traffic", title: str = "Bytes by step") -> Chart:
    """Bars of bytes for traffic, or groups by step, direction and scope, in their order, up and down; two for a step in two scopes."""
    rows = _traffic_rows(traffic)
    named = _named(rows)
    drawn, left_out = _large_enough(named, of=6)
    note = "A broadcast counts once for each host in bytes."
    note += _not_drawn(left_out)
    bars = _bars(drawn, "bytes", "bytes on the wire", axis_of("bytes"), ("step", "way", "scope"))
    return Chart(key, title, note, spec_of(bars, ("bar", *_COLUMNS), drawn), _COLUMNS, rows)


def vectors_chart(traffic: Iterable[Traffic]) -> Chart | None:
    """Bars of vectors for steps, with a tick where the closed form of the method says that they end; None where there is no vector."""
    kept = [row for row in traffic if row.vectors or row.expected]
    rows = _traffic_rows(kept)
    if not rows:
        return None
    drawn, left_out = _large_enough(_named(rows), of=4)
    axis = {"labelExpr": _COUNTS, "tickCount": 5, "tickMinStep": 1}
    bars = _bars(drawn, "vectors", "vectors", axis, ("step", "way", "scope", "closed form"))
    places = {name: bars["encoding"][name] for name in ("y", "yOffset", "tooltip")}
    ticks = {
        "transform": [{"filter": "isValid(datum['closed form'])"}],
        "mark": {"type": "tick", "style": "closed-form", "thickness": 2.5, "size": 15},
        "encoding": {**places, "x": number("closed form")},
    }
    layers = {"layer": [{"mark": bars["mark"], "encoding": bars["encoding"]}, ticks], "height": bars["height"]}
    note = f"A vector is one model; a broadcast counts once. Across the bars: the closed form{_met(kept)}.{_not_drawn(left_out)}"
    return Chart("vectors", "Vectors by step, and the closed form", note, spec_of(layers, ("bar", *_COLUMNS), drawn), _COLUMNS, rows)


def _met(traffic: Sequence[Traffic]) -> str:
    """Whether measured vectors are those of the closed form, or of the coins that were drawn where that is a mean over coins."""
    with_form = [row for row in traffic if row.expected is not None]
    if not with_form:
        return ": this method has none"
    mean = ", of random coins their mean" if any(row.spread for row in with_form) else ""
    are_met = all(row.vectors in (row.expected, row.drawn) for row in with_form)
    if not are_met:
        return mean
    return f"{mean}; for the coins drawn, all bars are what it says" if mean else ", which all of them meet"


def scope_chart(traffic: Iterable[Traffic | Group]) -> Chart:
    """Bars of bytes for the scopes of traffic, or of groups by scope and direction, up and down."""
    sums: dict[tuple[str, str], list[float]] = {}
    for row in traffic:
        scope, way = row.keys if isinstance(row, Group) else (row.scope, row.direction)
        found = sums.setdefault((scope, way), [0, 0])
        found[0] += row.vectors
        found[1] += round(row.wire_bytes)
    rows: list[tuple[Any, ...]] = [(scope, way, *sums[scope, way]) for scope in SCOPES for way in WAYS if (scope, way) in sums]
    columns = ("scope", "way", "vectors", "bytes")
    note = "Direct: with client hosts; between: of the coordinator with the clusters' aggregators; within: of these with their hosts."
    drawn = [(_scope(row[0]), *row) for row in rows]
    bars = _bars(drawn, "bytes", "bytes on the wire", axis_of("bytes"), ("scope", "way", "vectors"))
    spec = spec_of(bars, ("bar", *columns), drawn)
    return Chart("scopes", "Bytes by scope", note, spec, columns, rows)


def _not_drawn(left_out: Sequence[str]) -> str:
    """What is said of the bars that nobody could see."""
    if not left_out:
        return ""
    listed = ", ".join(left_out) if len(left_out) <= 4 else f"{len(left_out)} steps, which the table has"
    return f" Not drawn, with less than {_LEAST_SHARE:.1%} of the largest: {listed}."


def _bars(rows: Rows, field: str, title: str, axis: Mapping[str, Any], tooltip: Sequence[str]) -> dict[str, Any]:
    """A pair of bars, up and down, for each name at the start of a row."""
    encoding = {
        "y": {"field": "bar", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False}},
        "yOffset": {"field": "way", "type": "nominal", "sort": list(WAYS), "scale": {"domain": list(WAYS)}},
        "x": number(field, title, axis=axis),
        "color": coloured("way", WAYS),
        "tooltip": told(*tooltip, formats={field: ","}),
    }
    return {"mark": {"type": "bar", "cornerRadiusEnd": 2}, "encoding": encoding, "height": 30 * len({row[0] for row in rows})}


def _large_enough(named: Rows, *, of: int) -> tuple[list[tuple[Any, ...]], list[str]]:
    """The rows whose bars can be seen, by their place `of`, and the names of the others."""
    largest: dict[str, float] = {}
    for row in named:
        largest[row[0]] = max(largest.get(row[0], 0), row[of])
    least = _LEAST_SHARE * max(largest.values(), default=0)
    return [row for row in named if largest[row[0]] >= least], [name for name, value in largest.items() if value < least]


# ---- users, events, runs


def users_chart(by_user: Mapping[str, Mapping[str, float]], *, key: str = "users", title: str = "How users fare") -> Chart:
    """How values are spread over the users: for each metric a tick for each user, and below them a box of the quartiles."""
    rows = [(metric, user, value) for metric, values in by_user.items() for user, value in values.items() if math.isfinite(value)]
    metrics = list(dict.fromkeys(metric for metric, *_ in rows))
    boxes = [(metric, *np.quantile([row[2] for row in rows if row[0] == metric], [0, 0.25, 0.5, 0.75, 1]).tolist()) for metric in metrics]
    y: dict[str, Any] = {"field": "metric", "type": "nominal", "sort": None, "title": None, "scale": {"domain": metrics}}
    y |= {"axis": {"ticks": False, "domain": False, "labelLimit": 190}}

    def layer(mark: Spec, x: str, tooltip: Sequence[Spec], **more: Any) -> dict[str, Any]:
        across = {**number(x, scale={"zero": False}, axis={"tickCount": 6}), "title": None}
        return {"mark": mark, "encoding": {"x": across, "y": y, "tooltip": tooltip, **more}}

    below, quartiles = {"yOffset": 9}, told(formats=dict.fromkeys(_QUARTILES, ".4~g"))
    under = {"data": {"values": [dict(zip(("metric", *_QUARTILES), box, strict=True)) for box in boxes]}}
    box = {"type": "bar", "style": "box", "height": 12, **below}
    layers: list[dict[str, Any]] = [
        layer({"type": "tick", "opacity": 0.5, "size": 16, "yOffset": -11}, "value", told("user", formats={"value": ".4~g"})),
        {**under, **layer({"type": "rule", **below}, "min", quartiles, x2={"field": "max"})},
        {**under, **layer(box, "q1", quartiles, x2={"field": "q3"})},
        {**under, **layer({"type": "tick", "style": "median", "thickness": 2.5, "size": 12, **below}, "median", quartiles)},
    ]
    columns = ("metric", "user", "value")
    spec = spec_of({"layer": layers, "height": 56 * len(metrics)}, columns, [(metric, user, _short(value)) for metric, user, value in rows])
    return Chart(key, title, "Ticks: users; below them the least, the quartiles and the greatest.", spec, columns, rows)


_QUARTILES = ("min", "q1", "median", "q3", "max")


def events_chart(events: Sequence[tuple[float, str, str]], stages: Sequence[tuple[str, float, float]] = ()) -> Chart:
    """What has happened when: (seconds since the run began, kind, text); and from when to when each stage went."""
    kinds = [*([_STAGES] if stages else []), *dict.fromkeys(kind for _, kind, _ in events)]
    x = number("seconds", "seconds since the run began", axis={"tickCount": 6}, scale={"padding": 10})
    axis = {"grid": True, "ticks": False, "domain": False}
    y = {"field": "kind", "type": "nominal", "sort": kinds, "scale": {"domain": kinds}, "title": None, "axis": axis}
    mark = {"type": "point", "filled": True, "size": 55, "opacity": 0.75}
    points = {"mark": mark, "encoding": {"x": x, "y": y, "tooltip": told("kind", "text", formats={"seconds": ",.1f"})}}
    columns = ("seconds", "kind", "text")
    values = [dict(zip(columns, event, strict=True)) for event in events]
    layers = [*([_stage_bars(stages, x, y)] if stages else []), {**points, "data": {"values": values}}]
    note = "Each point is an event of the run" + (", each bar a stage." if stages else ".")
    rows = [*((start, "stage", f"{name}, until {end:.1f}") for name, start, end in stages), *events]
    spec = {"$schema": SCHEMA, **FITTED, "height": 24 * len(kinds), "layer": layers}
    return Chart("events", "What happened when", note, spec, columns, rows)


_STAGES = "stages"  # the row of an events chart that is theirs


def _stage_bars(stages: Sequence[tuple[str, float, float]], x: Spec, y: Spec) -> dict[str, Any]:
    """The layer of stages: bars that are by turns darker and lighter."""
    names = ("text", "seconds", "until")
    drawn = [{**dict(zip(names, stage, strict=True)), "kind": _STAGES, "odd": place % 2} for place, stage in enumerate(stages)]
    shade = {"field": "odd", "type": "ordinal", "scale": {"domain": [0, 1], "range": [0.85, 0.4]}, "legend": None}
    tooltip = [{"field": "text", "type": "nominal", "title": "stage"}]
    encoding = {"x": x, "x2": {"field": "until"}, "y": y, "opacity": shade, "tooltip": tooltip}
    return {"data": {"values": drawn}, "mark": {"type": "bar", "height": 12}, "encoding": encoding}


def outcomes_chart(outcomes: Sequence[tuple[str, float, float]], figure: str, x_title: str) -> Chart:
    """A point for each run, (run, bytes, best value of a figure): who reaches more with less."""
    names = [name for name, _, _ in outcomes]
    y_title = f"best {figure_name(figure)}"
    is_log = figure in _LOGARITHMIC and all(value > 0 for _, _, value in outcomes)
    scale = {"type": "log"} if is_log else {"zero": False, "padding": 12}
    of_run = {"field": "run", "type": "nominal", "sort": names, "scale": {"domain": names}}
    encoding = {
        "x": number("bytes", x_title, axis=axis_of("bytes"), scale={"zero": True}),
        "y": number("value", y_title, scale=scale),
        "color": of_run,
        "shape": of_run,
        "tooltip": told("run", formats={"bytes": ",", "value": ".4~g"}),
    }
    mark = {"type": "point", "filled": True, "size": 110, "opacity": 1}
    spec = spec_of({"mark": mark, "encoding": encoding, "height": 240}, ("run", "bytes", "value"), outcomes)
    note = "Each point is a run: its best value, and the bytes that it had sent by then."
    return Chart("outcomes", _title(f"{y_title} against {x_title}"), note, spec, ("run", x_title, y_title), list(outcomes))


# ---- parts


def number(field: str, title: str | None = None, **more: Any) -> dict[str, Any]:
    """A channel of numbers; without a title it has the field's name."""
    return {"field": field, "type": "quantitative", **({} if title is None else {"title": title}), **more}


def told(*names: str, formats: Mapping[str, str], titles: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What is told of a mark under the pointer: names, and numbers with their formats."""
    listed = [{"field": name, "type": "nominal"} for name in names] + [number(name, format=form) for name, form in formats.items()]
    return [{**one, "title": titles[one["field"]]} if titles and one["field"] in titles else one for one in listed]


def spec_of(unit: Mapping[str, Any], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """A specification that carries its data, as wide as what it stands in. What is no number is null."""
    values = [dict(zip(columns, map(_or_null, row), strict=True)) for row in rows]
    return {"$schema": SCHEMA, "data": {"values": values}, **FITTED, **unit}


def coloured(field: str, values: Sequence[str]) -> dict[str, Any]:
    """The colours that ways and scopes have in all charts."""
    scale = {"domain": list(_COLOUR_ORDER)}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"values": list(values), "labelExpr": _SHORT_SCOPE}}


def axis_of(against: Against) -> dict[str, Any]:
    """Ticks of rounds, seconds or bytes."""
    match against:
        case "round":
            return {"labelExpr": _WHOLE, "tickCount": 6}
        case "seconds":
            return {"format": ",~r", "tickCount": 6}
        case _:
            return {"labelExpr": _BYTES, "tickCount": 5, "tickMinStep": 1}


_WHOLE = "datum.value % 1 === 0 ? format(datum.value, ',') : ''"  # also of few rounds, between which there is nothing
_SHORT_SCOPE = "replace(datum.label, '-cluster', '')"
_BYTES = "replace(format(datum.value, '.3~s'), /([a-zA-Z]?)$/, ' $1B')"
_POWERS = "replace(format(datum.value, '.0e'), 'e+', 'e')"  # fonts of figures have no raised minus
_COUNTS = "format(datum.value, '.3~s')"


def _decades(values: Sequence[float]) -> dict[str, Any]:
    """An axis with some powers of ten around positive values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    step = max(1, math.ceil((high - low) / 6))
    powers = range(low, max(high, low + 1) + 1, step)
    return {"values": [10.0**power for power in powers], "labelExpr": _POWERS}


def cut(name: str) -> str:
    """A name that has room beside a mark."""
    return name if len(name) <= MAX_LETTERS else f"{name[: MAX_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _scope(scope: str) -> str:
    return scope.removesuffix("-cluster")


def _dashes(n: int) -> list[list[int]]:
    """Patterns of dashes, the first of them none; for many lines one for each round of the palette."""
    patterns = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
    if n <= len(patterns):
        return patterns[:n]
    return [patterns[place // N_COLOURS % len(patterns)] for place in range(n)]


def _short(value: float) -> float:
    """As exact as a screen can show."""
    return float(f"{value:.6g}")


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """The points that are numbers; of many, from each stretch the first and those with the least and the greatest value, and the last."""
    is_there = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_there], y[is_there]
    if x.size <= MAX_POINTS:
        return x, y
    kept = {0, int(x.size - 1)}
    for piece in np.array_split(np.arange(x.size), MAX_POINTS // 3):
        kept |= {int(piece[0]), int(piece[np.argmin(y[piece])]), int(piece[np.argmax(y[piece])])}
    places = np.array(sorted(kept))
    return x[places], y[places]
