"""Charts of runs as Vega-Lite specifications, for the report, the dashboard and the figures of a paper.

A specification carries its own data, and no colours: they come from a theme (`view.theme`) when it is drawn. Lines are thinned to what a
screen can show, with the highest and lowest values of each stretch; `rows` has what was drawn. `charts_structure` has the charts of
clusters and of the topology.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie_deploy.read.costs import AXES, cost, goal_said
from coterie_deploy.read.costs import Against as Against  # noqa: PLC0414 - a word of this module too
from coterie_deploy.view.theme import N_COLOURS
from coterie_server.record.curves import GAP, RESIDUAL, Curves, Goal
from coterie_server.record.query import Group
from coterie_server.record.rundb import BETWEEN, DIRECT, PEERS, WITHIN
from coterie_server.record.summary import Traffic

Spec = Mapping[str, Any]
Rows = Sequence[tuple[Any, ...]]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing is fetched
FITTED = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
MAX_POINTS = 400  # of a line
MAX_LETTERS = 24  # of a name beside a mark
WAYS = ("up", "down")
SCOPES = (DIRECT, BETWEEN, WITHIN, PEERS)
# Ways and scopes have the same colours in all charts: these are their places in the palette.
_COLOUR_ORDER = (*WAYS, *SCOPES)
_FEW = 15  # points of a line that are marked
_LEAST_SHARE = 0.005  # of the largest bar that one must have to be seen
_LOGARITHMIC = (GAP, "duality_gap", "primal_residual", "dual_residual", RESIDUAL, "gradient_norm", "distance", "rounding")
_NAMES = {
    GAP: "relative gap of the objective",
    "duality_gap": "relative duality gap",
    RESIDUAL: "residual, the larger of primal and dual",
    "primal_residual": "primal residual",
    "dual_residual": "dual residual",
    "gradient_norm": "norm of the gradient",
    "rounding": "rounding error of exact sums, at most",
    "loss": "training loss",
    "accuracy": "mean local test accuracy",
    "squared_error": "mean squared error on held-out rows",
    "deviance": "mean deviance on held-out rows",
    "heldout_loss": "held-out loss",
    "distance": "distance to the true representation",
}


@dataclass(frozen=True)
class Chart:
    """A chart and the table behind it. `note` is a sentence on what it shows, `paper_height` the height of a figure of a column."""

    key: str
    title: str
    note: str
    spec: Spec
    columns: Sequence[str]
    rows: Rows
    paper_height: int | None = None  # points; None: that of the specification


@dataclass(frozen=True)
class Table:
    """A table of a page. The first `n_text` columns are text."""

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
        return [*(chart for group in self.tabs.values() for chart in group), *self.charts]


def figure_name(figure: str) -> str:
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
            whole = [x if against == "seconds" or not x.is_integer() else int(x) for x in paid.tolist()]
            rows += [(name, x, y) for x, y in zip(whole, values.tolist(), strict=True)]
    weighted = f", up {up_weight:g} times" if against == "bytes" and up_weight != 1 else ""
    x_title, y_title = AXES[against] + weighted, figure_name(figure)
    y = number("y", y_title, scale={"zero": False})
    is_log = figure in _LOGARITHMIC and sum(y > 0 for _, _, y in rows) > 1
    if is_log:
        rows = [row for row in rows if row[2] > 0]
        y = number("y", y_title, scale={"type": "log"}, axis=_decades([row[2] for row in rows]))
    is_count = not is_log and all(float(row[2]).is_integer() for row in rows)  # such as users
    if is_count:
        y = number("y", y_title, axis=WHOLE)  # from 0
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
    spec = spec_of({**unit, "height": 240}, ("name", "x", "y"), [(name, a, short(b)) for name, a, b in rows])
    is_from_0 = is_count or min((row[2] for row in rows), default=0) <= 0 <= max((row[2] for row in rows), default=0)
    note = ("Logarithmic. " if is_log else "" if is_from_0 else "The vertical axis does not begin at 0. ") + _COUNTED.get(
        against, _COUNTED["bytes"].replace(", both ways", "")
    )
    if goal is not None and len(layers) > 1:
        note += f" Dashed: {goal_said(goal)}."
    return Chart(f"{figure}-{against}", _title(f"{y_title} against {x_title}"), note, spec, ("of", x_title, y_title), rows)


_COUNTED: Mapping[str, str] = {  # on the horizontal axis
    "round": "Round by round of the stage.",
    "seconds": "Time since the stage began.",
    "bytes": "Bytes of the stage up to the end of each round, both ways, repeats not counted.",
}


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
    """The rows of `_COLUMNS`, each after the name of its bar: the step, and the scope if there are several."""
    rows = []
    for row in traffic:
        keys, expected = (row.keys, None) if isinstance(row, Group) else ((row.step, row.direction, row.scope), row.expected)
        rows.append((*keys, row.vectors, expected, round(row.wire_bytes)))
    several = len({row[2] for row in rows}) > 1
    return [(f"{row[0]} ({row[2].removesuffix('-cluster')})" if several else row[0], *row) for row in rows]


def traffic_chart(traffic: Iterable[Traffic | Group], *, key: str = "traffic", title: str = "Bytes by step") -> Chart:
    """Bars of bytes for traffic, or groups by step, direction and scope, in their order, up and down; two for a step in two scopes."""
    named = _traffic_rows(traffic)
    drawn, not_drawn = _large_enough(named, of=6)
    bars = _bars(drawn, "bytes", "bytes on the wire", axis_of("bytes"), ("step", "way", "scope"))
    spec, note = spec_of(bars, ("bar", *_COLUMNS), drawn), f"A broadcast counts once for each host in bytes.{not_drawn}"
    return Chart(key, title, note, spec, _COLUMNS, [row[1:] for row in named])


def vectors_chart(traffic: Iterable[Traffic]) -> Chart | None:
    """Bars of vectors for steps, with a tick where the closed form of the method says that they end; None where there is no vector."""
    kept = [row for row in traffic if row.vectors or row.expected]
    named = _traffic_rows(kept)
    if not named:
        return None
    drawn, not_drawn = _large_enough(named, of=4)
    axis = {"labelExpr": _COUNTS, "tickCount": 5, "tickMinStep": 1}
    bars = _bars(drawn, "vectors", "vectors", axis, ("step", "way", "scope", "closed form"))
    places = {name: bars["encoding"][name] for name in ("y", "yOffset", "tooltip")}
    ticks = {
        "transform": [{"filter": "isValid(datum['closed form'])"}],
        "mark": {"type": "tick", "style": "closed-form", "thickness": 2.5, "size": 15},
        "encoding": {**places, "x": number("closed form")},
    }
    layers = {"layer": [{"mark": bars["mark"], "encoding": bars["encoding"]}, ticks], "height": bars["height"]}
    note = f"A vector is one model; a broadcast counts once. Across the bars: the closed form{_met(kept)}.{not_drawn}"
    spec, rows = spec_of(layers, ("bar", *_COLUMNS), drawn), [row[1:] for row in named]
    return Chart("vectors", "Vectors by step, and the closed form", note, spec, _COLUMNS, rows)


def _met(traffic: Sequence[Traffic]) -> str:
    """Whether measured vectors are those of the closed form, or of the coins that were drawn where that is a mean over coins."""
    with_form = [row for row in traffic if row.expected is not None]
    if not with_form:
        return ": this method has none"
    mean = ", of random coins their mean" if any(row.spread for row in with_form) else ""
    if not all(row.vectors in (row.expected, row.drawn) for row in with_form):
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
    drawn = [(row[0].removesuffix("-cluster"), *row) for row in rows]
    bars = _bars(drawn, "bytes", "bytes on the wire", axis_of("bytes"), ("scope", "way", "vectors"))
    return Chart("scopes", "Bytes by scope", note, spec_of(bars, ("bar", *columns), drawn), columns, rows)


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


def _large_enough(named: Rows, *, of: int) -> tuple[list[tuple[Any, ...]], str]:
    """The rows whose bars, the values at place `of`, are long enough to be seen, and a sentence on the others."""
    largest: dict[str, float] = {}
    for row in named:
        largest[row[0]] = max(largest.get(row[0], 0), row[of])
    least = _LEAST_SHARE * max(largest.values(), default=0)
    left_out = [name for name, value in largest.items() if value < least]
    listed = ", ".join(left_out) if len(left_out) <= 4 else f"{len(left_out)} steps, which the table has"
    said = f" Not drawn, with less than {_LEAST_SHARE:.1%} of the largest: {listed}." if left_out else ""
    return [row for row in named if largest[row[0]] >= least], said


# ---- events, runs


def events_chart(events: Sequence[tuple[float, str, str]], stages: Sequence[tuple[str, float, float]] = ()) -> Chart:
    """Events, (seconds since the run began, kind, text), and a bar for each stage, (name, start, end)."""
    kinds = [*([_STAGES] if stages else []), *dict.fromkeys(kind for _, kind, _ in events)]
    x = number("seconds", "seconds since the run began", axis={"tickCount": 6}, scale={"padding": 10})
    axis = {"grid": True, "ticks": False, "domain": False}
    y = {"field": "kind", "type": "nominal", "sort": kinds, "scale": {"domain": kinds}, "title": None, "axis": axis}
    mark = {"type": "point", "filled": True, "size": 55, "opacity": 0.75}
    points = {"mark": mark, "encoding": {"x": x, "y": y, "tooltip": told("kind", "text", formats={"seconds": ",.1f"})}}
    columns = ("seconds", "kind", "text")
    values = [dict(zip(columns, event, strict=True)) for event in events]
    layers: list[dict[str, Any]] = [{**points, "data": {"values": values}}]
    if stages:  # bars that are by turns darker and lighter
        names = ("text", "seconds", "until")
        drawn = [{**dict(zip(names, stage, strict=True)), "kind": _STAGES, "odd": place % 2} for place, stage in enumerate(stages)]
        shade = {"field": "odd", "type": "ordinal", "scale": {"domain": [0, 1], "range": [0.85, 0.4]}, "legend": None}
        tooltip = [{"field": "text", "type": "nominal", "title": "stage"}]
        across = {"x": x, "x2": {"field": "until"}, "y": y, "opacity": shade, "tooltip": tooltip}
        layers.insert(0, {"data": {"values": drawn}, "mark": {"type": "bar", "height": 12}, "encoding": across})
    note = "Each point is an event of the run" + (", each bar a stage." if stages else ".")
    rows = [*((start, "stage", f"{name}, until {end:.1f}") for name, start, end in stages), *events]
    spec = {"$schema": SCHEMA, **FITTED, "height": 24 * len(kinds), "layer": layers}
    return Chart("events", "What happened when", note, spec, columns, rows)


_STAGES = "stages"  # the row of an events chart that is theirs


def outcomes_chart(outcomes: Sequence[tuple[str, float, float]], figure: str, x_title: str) -> Chart:
    """A point for each run: (run, bytes, best value of a figure)."""
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
    """The tooltip of a mark: names, and numbers with their formats."""
    listed = [{"field": name, "type": "nominal"} for name in names] + [number(name, format=form) for name, form in formats.items()]
    return [{**one, "title": titles[one["field"]]} if titles and one["field"] in titles else one for one in listed]


def spec_of(unit: Mapping[str, Any], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """A specification that carries its data, as wide as the page. NaN and infinity become null."""
    kept = ([None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row] for row in rows)
    values = [dict(zip(columns, row, strict=True)) for row in kept]
    return {"$schema": SCHEMA, "data": {"values": values}, **FITTED, **unit}


def coloured(field: str, values: Sequence[str]) -> dict[str, Any]:
    """The colours that ways and scopes have in all charts."""
    scale = {"domain": list(_COLOUR_ORDER)}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"values": list(values), "labelExpr": _SHORT_SCOPE}}


def axis_of(against: Against) -> dict[str, Any]:
    """Ticks of rounds, seconds or bytes."""
    axes: dict[str, dict[str, Any]] = {"round": {"labelExpr": _WHOLE, "tickCount": 6}, "seconds": {"format": ",~r", "tickCount": 6}}
    return axes.get(against, {"labelExpr": _BYTES, "tickCount": 5, "tickMinStep": 1})


_WHOLE = "datum.value % 1 === 0 ? format(datum.value, ',') : ''"  # also of few rounds, between which there is nothing
WHOLE = {"labelExpr": _WHOLE, "tickMinStep": 1, "tickCount": 6}  # an axis of counts
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
    """A name, shortened to fit beside a mark."""
    return name if len(name) <= MAX_LETTERS else f"{name[: MAX_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _dashes(n: int) -> list[list[int]]:
    """Patterns of dashes, the first of them none; for many lines one for each round of the palette."""
    patterns = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
    every = 1 if n <= len(patterns) else N_COLOURS
    return [patterns[place // every % len(patterns)] for place in range(n)]


def short(value: float) -> float:
    return float(f"{value:.6g}")  # as precise as a screen can show


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
