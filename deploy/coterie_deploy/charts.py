"""Charts of runs as Vega-Lite specifications: one for the report, the dashboard, and the figures of a paper.

A specification carries its own data and no colours: these come from a theme (`theme`), which whoever draws it passes as configuration.
Lines are thinned to what a screen can show, with the highest and lowest values of each stretch; `rows` has what was drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coterie.arrays import Array
from coterie_server.curves import GAP, Curves
from coterie_server.query import Group

Against = Literal["round", "bytes", "seconds"]
Spec = Mapping[str, Any]

_FITTED = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing is fetched
AXES: Mapping[Against, str] = {"round": "round", "bytes": "bytes on the wire", "seconds": "seconds"}
MAX_POINTS = 400  # of a line
_LEAST_SHARE = 0.005  # of the largest bar that one must have to be seen
_MOST_LETTERS = 24  # of a member's name beside its place
_LOGARITHMIC = (GAP, "primal_residual", "dual_residual", "gradient_norm", "distance")
_NAMES = {
    GAP: "relative gap of the objective",
    "primal_residual": "primal residual",
    "dual_residual": "dual residual",
    "gradient_norm": "norm of the gradient",
    "loss": "training loss",
    "accuracy": "mean local test accuracy",
    "heldout_loss": "held-out loss",
    "distance": "distance to the true representation",
    "clusters": "clusters",
}
_LIGHT = ("#0b69c7", "#d9480f", "#0f8a5f", "#a03ba0", "#8a6d00", "#c2255c", "#0c8599", "#5f3dc4", "#5c7c1f", "#6b7280")
_DARK = ("#6cb4ff", "#ff9a5c", "#4fd1a1", "#e294e2", "#e0c250", "#ff8fb1", "#5fd3e0", "#b3a1ff", "#b2d46b", "#aab2bd")


@dataclass(frozen=True)
class Chart:
    """A chart and the table behind it. `note` says in a sentence what one sees."""

    key: str
    title: str
    note: str
    spec: Spec
    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]


def theme(*, dark: bool, paper: bool = False) -> dict[str, Any]:
    """The configuration for Vega-Lite: colours that can be told apart without seeing red and green. `paper`: for print."""
    ink, faint = ("#e6e9ee", "#3a414c") if dark else ("#1f2733", "#d9dee5")
    size = 10 if paper else 12
    font = "Helvetica, Arial, sans-serif" if paper else "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": size, "titleFontSize": size, "titleFontWeight": "normal"}
    return {
        "background": "white" if paper else "transparent",
        "font": font,
        "range": {"category": list(_DARK if dark else _LIGHT)},
        "view": {"stroke": None},
        "axis": {**words, "gridColor": faint, "domainColor": faint, "tickColor": faint, "labelLimit": 150, "labelPadding": 5},
        "legend": {**words, "orient": "top", "title": None, "symbolStrokeWidth": 3, "labelLimit": 240, "columns": 2},
        "header": {**words, "labelFontWeight": "bold", "labelAnchor": "start"},
        "text": {"color": ink, "fontSize": size},
        "rule": {"color": faint},
        "line": {"strokeWidth": 1.5 if paper else 2},
        "mark": {"color": (_DARK if dark else _LIGHT)[0]},
    }


def figure_name(figure: str) -> str:
    """A figure of a round in words."""
    return _NAMES.get(figure, figure.replace("_", " "))


# ---- what a run has reached, and at what cost


def cost(curves: Curves, against: Against, *, up_weight: float = 1.0) -> Array:
    """(t,) what each round has cost so far: rounds, seconds, or bytes on the wire, with those up counted `up_weight` times."""
    if against == "seconds":
        return curves.seconds
    if against == "bytes":
        return up_weight * curves.bytes_by(direction="up") + curves.bytes_by(direction="down")
    return curves.rounds.astype(np.float64)


def progress_chart(named: Mapping[str, Curves], figure: str, against: Against, *, up_weight: float = 1.0) -> Chart:
    """A figure of each round against what it has cost; a line for each of the named stages that has it."""
    rows: list[tuple[Any, ...]] = []
    for name, curves in named.items():
        if figure in curves.figures:
            x, y = _thinned(cost(curves, against, up_weight=up_weight), curves.figures[figure])
            rows += [(name, a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    is_log = figure in _LOGARITHMIC and sum(y > 0 for _, _, y in rows) > 1
    if is_log:
        rows = [row for row in rows if row[2] > 0]
    weighted = f", up {up_weight:g} times" if against == "bytes" and up_weight != 1 else ""
    x_title, y_title = AXES[against] + weighted, figure_name(figure)
    encoding: dict[str, Any] = {
        "x": {"field": "x", "type": "quantitative", "title": x_title, "axis": _axis(against), "scale": {"nice": False}},
        "y": {"field": "y", "type": "quantitative", "title": y_title, "scale": {"type": "log"} if is_log else {"zero": False}},
        "tooltip": [
            {"field": "name", "title": "of"},
            {"field": "x", "title": x_title, "format": ",.4~s" if against == "bytes" else ",.4~r"},
            {"field": "y", "title": y_title, "format": ".4~g"},
        ],
    }
    if is_log:
        encoding["y"]["axis"] = {"format": ".0e", "values": _decades([row[2] for row in rows])}
    if len(named) > 1:
        encoding["color"] = {"field": "name", "type": "nominal", "sort": list(named)}
    is_single = len(rows) <= len(named)  # one round alone is a point
    mark = {"type": "point", "filled": True, "size": 60} if is_single else {"type": "line", "interpolate": "linear", "clip": True}
    spec = _spec({"mark": mark, "encoding": encoding, "height": 240}, ("name", "x", "y"), rows)
    title = f"{y_title[:1].upper()}{y_title[1:]} against {x_title}"
    note = "Logarithmic. " if is_log else ""
    return Chart(f"{figure}-{against}", title, f"{note}{_what_counts(against)}", spec, ("of", x_title, y_title), rows)


def _what_counts(against: Against) -> str:
    return {
        "round": "Round by round of the stage.",
        "bytes": "Bytes of the stage up to the end of each round, both ways, repeats not counted.",
        "seconds": "Time since the stage began.",
    }[against]


def cumulative_chart(curves: Curves) -> Chart:
    """The bytes of a stage so far, by direction and scope, round by round."""
    rows: list[tuple[Any, ...]] = []
    for (direction, scope), sent in curves.wire_bytes.items():
        x, y = _thinned(curves.rounds.astype(np.float64), sent)
        rows += [(_way(direction, scope), a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    encoding = {
        "x": {"field": "round", "type": "quantitative", "title": "round", "axis": _axis("round"), "scale": {"nice": False}},
        "y": {"field": "bytes", "type": "quantitative", "title": "bytes so far", "axis": _axis("bytes")},
        "color": {
            "field": "way",
            "type": "nominal",
            "sort": sorted({row[0] for row in rows}, key=lambda way: (not way.startswith("up"), way)),
        },
        "tooltip": [{"field": "way"}, {"field": "round"}, {"field": "bytes", "format": ",.4~s"}],
    }
    spec = _spec({"mark": {"type": "line"}, "encoding": encoding, "height": 240}, ("way", "round", "bytes"), rows)
    return Chart("cumulative", "Bytes so far, by way", "Useful traffic of the stage on the wire.", spec, ("way", "round", "bytes"), rows)


def traffic_chart(groups: Iterable[Group], *, key: str = "traffic", title: str = "Traffic by step") -> Chart:
    """Bars for groups by step, direction and scope, in their order."""
    rows = [(*group.keys, group.vectors, round(group.wire_bytes)) for group in groups]
    several = len({scope for _, _, scope, *_ in rows}) > 1
    named = [(f"{row[0]} ({row[2].removesuffix('-cluster')})" if several else row[0], *row) for row in rows]
    drawn = [
        row for row in named if max(other[-1] for other in named if other[0] == row[0]) >= _LEAST_SHARE * max(row[-1] for row in named)
    ]
    columns = ("step", "way", "scope", "vectors", "bytes")
    note = "A broadcast counts once for each host in bytes, and once in vectors."
    if len(drawn) < len(named):
        note += f" Not drawn: steps with less than {_LEAST_SHARE:.1%} of the largest."
    return Chart(key, title, note, _spec(_bars(columns[:3]), ("bar", *columns), drawn), columns, rows)


def _bars(tooltip: Sequence[str]) -> dict[str, Any]:
    """A pair of bars, up and down, for each `bar`."""
    encoding = {
        "y": {"field": "bar", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False}},
        "yOffset": {"field": "way", "type": "nominal", "sort": ["up", "down"]},
        "x": {"field": "bytes", "type": "quantitative", "title": "bytes on the wire", "axis": _axis("bytes")},
        "color": {"field": "way", "type": "nominal", "sort": ["up", "down"]},
        "tooltip": [{"field": name} for name in tooltip] + [{"field": name, "format": ",.4~s"} for name in ("bytes", "vectors")],
    }
    return {"mark": {"type": "bar", "cornerRadiusEnd": 2}, "encoding": encoding, "height": {"step": 30, "for": "position"}}


def scope_chart(groups: Iterable[Group]) -> Chart:
    """Bars for groups by scope and direction."""
    rows = [(*group.keys, group.vectors, round(group.wire_bytes)) for group in groups]
    columns = ("scope", "way", "vectors", "bytes")
    note = "Direct: with client hosts; within: inside a cluster; between: of the coordinator with the clusters' aggregators."
    spec = _spec(_bars(columns[:2]), ("bar", *columns), [(row[0].removesuffix("-cluster"), *row) for row in rows])
    return Chart("scopes", "Traffic by scope", note, spec, columns, rows)


# ---- who is together


def clusters_chart(
    order: Sequence[str], steps: Sequence[str], labels: Sequence[Sequence[int]], *, axis: str, users: Sequence[str]
) -> Chart:
    """Which users are together: a column for each step (a penalty, a round), a row for each user, a colour for each cluster.

    `labels[i][j]`: the cluster of `users[j]` after `steps[i]`. `order`: the users from top to bottom.
    """
    place = {user: j for j, user in enumerate(users)}
    rows, drawn = [], []
    for step, after in zip(steps, labels, strict=True):
        sizes = Counter(after)
        for user in order:
            cluster = after[place[user]]
            rows.append((step, user, cluster))
            drawn.append((step, user, cluster, cluster % len(_LIGHT), sizes[cluster]))
    n_clusters = [len(set(after)) for after in labels]
    encoding = {
        "x": {"field": "step", "type": "ordinal", "sort": None, "title": axis, "axis": {"labelOverlap": True, "labelAngle": 0}},
        "y": {
            "field": "user", "type": "nominal", "sort": None, "title": f"{len(order):,} users",
            "axis": {"labels": len(order) <= _MOST_NAMED, "ticks": False, "domain": False},
        },
        "color": {
            "condition": {"test": "datum.size === 1", "value": "#88888840"}, "field": "colour", "type": "nominal", "legend": None,
            "scale": {"domain": list(range(len(_LIGHT)))},
        },
        "tooltip": [{"field": "user"}, {"field": "step", "title": axis}, {"field": "cluster"}, {"field": "size", "title": "users in it"}],
    }  # fmt: skip
    height = {"step": max(2, min(14, 420 // len(order)))}  # whole pixels: rows of broken height have seams
    unit = {"mark": {"type": "rect"}, "encoding": encoding, "height": height}
    columns = (axis, "user", "cluster")
    found = f"From {n_clusters[0]:,} to {n_clusters[-1]:,} clusters." if n_clusters else ""
    note = f"Users of one colour in a column are together, grey ones alone; colours repeat after {len(_LIGHT)} clusters. {found}"
    spec = _spec(unit, ("step", "user", "cluster", "colour", "size"), drawn)
    return Chart("clusters", "Who is together", note.strip(), spec, columns, rows)


_MOST_NAMED = 40  # users whose names have room beside a heat map


def path_charts(penalties: Sequence[float], n_clusters: Sequence[float | None], judged: Sequence[float | None], metric: str) -> list[Chart]:
    """The regularization path: how many clusters each penalty leaves, and what held-out rows say of its models."""
    rows = list(zip(penalties, n_clusters, judged, strict=True))
    columns = ("penalty", "clusters", f"held-out {metric}")
    charts = [("path", "clusters", "Clusters along the path", "The larger the penalty, the more users share a model.", True)]
    if any(value is not None for value in judged):
        charts.append(("path-judged", columns[2], f"Held-out {metric} along the path", "What the users' held-out rows say.", False))
    found = []
    for key, column, title, note, zero in charts:
        encoding = {
            "x": {
                "field": "penalty",
                "type": "quantitative",
                "scale": {"type": "log", "nice": False},
                "axis": {"tickCount": 5, "format": "~g", "labelOverlap": "greedy"},
            },
            "y": {"field": column, "type": "quantitative", "scale": {"zero": zero}},
            "tooltip": [{"field": name} for name in columns],
        }
        mark = {"type": "line", "point": {"filled": True, "size": 40}}
        found.append(Chart(key, title, note, _spec({"mark": mark, "encoding": encoding, "height": 200}, columns, rows), columns, rows))
    return found


# ---- users, links, events


def users_chart(by_user: Mapping[str, Mapping[str, float]]) -> Chart:
    """How a metric is spread over the users: quartiles as a box, each user as a tick."""
    rows = [(metric, user, value) for metric, values in by_user.items() for user, value in values.items()]
    y = {"field": "metric", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False, "labelLimit": 180}}
    x = {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}}
    layers = [
        {"mark": {"type": "boxplot", "extent": "min-max", "size": 16, "opacity": 0.5}, "encoding": {"x": x, "y": y}},
        {
            "mark": {"type": "tick", "opacity": 0.5, "size": 22},
            "encoding": {"x": x, "y": y, "tooltip": [{"field": "user"}, {"field": "value", "format": ".4~g"}]},
        },
    ]
    spec = _spec({"layer": layers, "height": {"step": 46}}, ("metric", "user", "value"), rows)
    note = "Boxes: quartiles, from the least to the greatest user; ticks: users."
    return Chart("users", "How users fare", note, spec, ("metric", "user", "value"), rows)


@dataclass(frozen=True)
class Link:
    """A link of the federation: from `above` to `below`, with what `below` is (an aggregator, a host, "12 more hosts")."""

    above: str
    below: str
    n_users: int | None
    up_bytes: float
    down_bytes: float
    scope: str


def topology_chart(links: Sequence[Link], size: Any) -> Chart:
    """The tree of coordinator, aggregators and hosts with the bytes on each link; `size` writes bytes."""
    children: dict[str, list[Link]] = {}
    for link in links:
        children.setdefault(link.above, []).append(link)
    below = {link.below for link in links}
    roots = [above for above in children if above not in below]
    places: dict[str, tuple[int, float]] = {}
    n_leaves = 0

    def put(name: str, depth: int) -> float:
        nonlocal n_leaves
        ys = [put(link.below, depth + 1) for link in children.get(name, ())]
        if not ys:
            ys, n_leaves = [float(n_leaves)], n_leaves + 1
        places[name] = (depth, sum(ys) / len(ys))
        return places[name][1]

    for root in roots:
        put(root, 0)
    deepest = max(depth for depth, _ in places.values())
    widest = max((link.up_bytes + link.down_bytes for link in links), default=1.0) or 1.0
    edges, nodes = [], [{"x": places[root][0], "y": places[root][1], "name": "", "more": [root], "leaf": False} for root in roots]
    for link in links:
        (x, y), (x2, y2) = places[link.above], places[link.below]
        whole = link.up_bytes + link.down_bytes
        edges.append({"x": x, "y": y, "x2": x2, "y2": y2, "width": 1 + 6 * whole / widest, "scope": link.scope})
        users = "" if link.n_users is None else f"{link.n_users:,} user{'' if link.n_users == 1 else 's'}"
        more = f"\N{UPWARDS ARROW} {size(link.up_bytes)}  \N{DOWNWARDS ARROW} {size(link.down_bytes)}"
        is_leaf = link.below not in children
        said = [users, more] if users and is_leaf else [more]
        nodes.append(
            {
                "x": x2,
                "y": y2,
                "name": _cut(link.below.rpartition("/")[2] if link.below.startswith(f"{link.above}/") else link.below),
                "more": said,
                "leaf": is_leaf,
            }
        )
    x_scale = {"domain": [-0.3, deepest + (1.15 if deepest == 1 else 1.6)], "nice": False}
    y_scale = {"domain": [-0.6, max(n_leaves - 0.4, 0.6)], "reverse": True, "nice": False}
    at_nodes = {
        "x": {"field": "x", "type": "quantitative", "scale": x_scale, "axis": None},
        "y": {"field": "y", "type": "quantitative", "scale": y_scale, "axis": None},
    }
    scopes = list(dict.fromkeys(link.scope for link in links))
    colour: dict[str, Any] = {"field": "scope", "type": "nominal", "sort": scopes, "legend": {} if len(scopes) > 1 else None}
    width = {"field": "width", "type": "quantitative", "scale": None}

    def words(field: str, dy: int, leaf: str, **how: Any) -> dict[str, Any]:
        mark = {"type": "text", "align": "left" if leaf else "center", "dx": 9 if leaf else 0, "dy": dy, **how}
        test = "datum.leaf" if leaf else "!datum.leaf"
        return {
            "data": {"values": nodes},
            "transform": [{"filter": test}],
            "mark": mark,
            "encoding": {**at_nodes, "text": {"field": field}},
        }

    layers = [
        {
            "data": {"values": edges},
            "mark": {"type": "rule", "opacity": 0.75, "strokeCap": "round"},
            "encoding": {**at_nodes, "x2": {"field": "x2"}, "y2": {"field": "y2"}, "color": colour, "strokeWidth": width},
        },
        {"data": {"values": nodes}, "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1}, "encoding": at_nodes},
        words("name", -14, "leaf", fontWeight="bold"),
        words("more", 1, "leaf"),
        words("name", -26, "", fontWeight="bold"),
        words("more", -13, ""),
    ]
    spec = {"$schema": SCHEMA, **_FITTED, "height": max(120, 54 * n_leaves), "layer": layers}
    rows = [(link.above, link.below, link.scope, link.n_users, round(link.up_bytes), round(link.down_bytes)) for link in links]
    columns = ("from", "to", "scope", "users", "bytes up", "bytes down")
    return Chart(
        "topology", "Who speaks to whom", "Useful traffic of the whole run; lines are as thick as it is much.", spec, columns, rows
    )


def events_chart(events: Sequence[tuple[float, str, str]]) -> Chart:
    """What has happened when: (seconds since the run began, kind, text)."""
    encoding = {
        "x": {"field": "seconds", "type": "quantitative", "title": "seconds since the run began", "axis": {"tickCount": 6}},
        "y": {"field": "kind", "type": "nominal", "sort": None, "title": None, "axis": {"grid": True, "ticks": False, "domain": False}},
        "tooltip": [{"field": "seconds", "format": ",.1f"}, {"field": "kind"}, {"field": "text"}],
    }
    mark = {"type": "point", "filled": True, "size": 50, "opacity": 0.7}
    spec = _spec({"mark": mark, "encoding": encoding, "height": {"step": 22}}, ("seconds", "kind", "text"), events)
    return Chart("events", "What happened", "Each point is an event of the run.", spec, ("seconds", "kind", "text"), list(events))


# ---- parts


def _spec(unit: Mapping[str, Any], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    values = [dict(zip(columns, row, strict=True)) for row in rows]
    return {"$schema": SCHEMA, "data": {"values": values}, **_FITTED, **unit}


def _axis(against: Against) -> dict[str, Any]:
    return {"labelExpr": _BYTES, "tickCount": 5} if against == "bytes" else {"format": ",.4~r", "tickCount": 6}


_BYTES = "format(datum.value, '.3~s') + 'B'"


def _decades(values: Sequence[float]) -> list[float]:
    """Some powers of ten around positive values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    step = max(1, math.ceil((high - low) / 6))
    return [10.0**power for power in range(low, high + 1, step)]


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"


def _way(direction: str, scope: str) -> str:
    return direction if scope == "direct" else f"{direction}, {scope.removesuffix('-cluster')}"


def _thinned(x: Array, y: Array) -> tuple[Array, Array]:
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
