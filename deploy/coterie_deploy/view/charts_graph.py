"""Charts of convex clustering: the graph of the users, and the path of penalties as a tree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie_deploy.terminal.tables import counted
from coterie_deploy.view import graph_layout
from coterie_deploy.view.charts import FITTED, SCHEMA, Chart, cut, number, short, told
from coterie_deploy.view.theme import N_COLOURS

_NEUTRAL = "#8a94a1"  # users who share their model with nobody, and what belongs to several clusters
_MOST_USERS = 500  # that are points of their own
_MOST_CLUSTERS = 300
_MOST_TIES = 1500  # lines
_ROOM_FOR_NUMBER = 10  # pixels: the radius of a cluster that has its number of users in it
_GRAPH_HEIGHT, _PAPER_HEIGHT = 380, 240
_MOST_LEAVES = 40
_LEAF_HEIGHT = 14
_COLOUR = {
    "condition": {"test": "!isValid(datum.colour)", "value": _NEUTRAL},
    "field": "colour",
    "type": "nominal",
    "legend": None,
    "scale": {"domain": list(range(N_COLOURS))},
}

# ---- the graph


@dataclass(frozen=True)
class Ties:
    """Edges between users: their numbers (m,) and (m,), and weights (m,)."""

    first: NDArray[Any]
    second: NDArray[Any]
    weight: Array


def graph_chart(
    users: Sequence[str], models: Array, labels: Indices, colours: Mapping[int, int], ties: Ties | None, *, stage: str, said: str
) -> Chart:
    """Users as points where their models (n, d) lie, in the colours of their clusters `labels` (n,), with a line for each tie.

    Of many users, clusters are the points. `ties` None draws no lines, and `said`, who is tied to whom, says why.
    """
    plane = graph_layout.of_values(models[:, 0]) if models.shape[1] == 1 else graph_layout.plane_of(models)
    draw = _users if len(users) <= _MOST_USERS else _clusters
    points, lines, columns, rows, notes = draw(users, models, labels, colours, ties, plane)
    x, y, half_width, half_height = points.layout.box()
    unit = f"max({half_width:.4g} / max(width, 1), {half_height:.4g} / height)"  # both axes have the same scale, at any width

    def across(middle: float, extent: str) -> dict[str, Any]:
        ends = {"domainMin": f"{middle:.4g} - {unit} * {extent}", "domainMax": f"{middle:.4g} + {unit} * {extent}"}
        return {"scale": {**{end: {"expr": text} for end, text in ends.items()}, "nice": False, "zero": False}, "axis": None}

    place: dict[str, Any] = {"x": number("x", **across(x, "width")), "y": number("y", **across(y, "height"))}
    layers: list[dict[str, Any]] = []
    if lines:
        width, opacity = ({**number(name), "scale": None, "legend": None} for name in ("width", "opacity"))
        ends: dict[str, Any] = {**place, "x2": {"field": "x2"}, "y2": {"field": "y2"}, "strokeWidth": width, "opacity": opacity}
        tooltip = told("from", "to", formats={"weight": ".4~g"})
        layers.append({"data": {"values": lines}, "mark": {"type": "rule"}, "encoding": {**ends, "tooltip": tooltip}})
    # A circle of area a has a radius of sqrt(a) / 2 pixels.
    area: dict[str, Any] = {"calculate": f"pow(datum.r / ({unit}), 2)", "as": "area"}
    marked: dict[str, Any] = {
        **place,
        "size": {**number("area"), "scale": None, "legend": None},
        "color": _COLOUR,
        "tooltip": points.tooltip,
    }
    circle = {
        "type": "circle",
        "opacity": 1,
        **({} if points.has_numbers else {"style": "ringed"}),
    }  # small clusters have no room for a ring
    layers.append({"data": {"values": points.values}, "transform": [area], "mark": circle, "encoding": marked})
    if points.has_numbers:
        large = {"filter": f"datum.r / (2 * {unit}) > {_ROOM_FOR_NUMBER} + 3 * (datum.users >= 100) + 5 * (datum.users >= 1000)"}
        number_of = {**place, "text": {"field": "users", "format": ","}, "tooltip": points.tooltip}
        text = {"type": "text", "style": "on-colour"}
        layers.append({"data": {"values": points.values}, "transform": [large], "mark": text, "encoding": number_of})
    spec = {"$schema": SCHEMA, **FITTED, "height": _GRAPH_HEIGHT, "layer": layers}
    sentences = [f"{said[:1].upper()}{said[1:]}.", *notes, _axes_said(models, plane)]
    return Chart("graph", f"The graph at the end of {stage}", " ".join(filter(None, sentences)), spec, columns, rows, _PAPER_HEIGHT)


@dataclass(frozen=True)
class _Points:
    layout: graph_layout.Layout
    values: Sequence[Mapping[str, Any]]
    tooltip: Sequence[Mapping[str, Any]]
    has_numbers: bool = False


_Drawn = tuple[_Points, list[dict[str, Any]], tuple[str, ...], list[tuple[Any, ...]], list[str]]


def _users(
    users: Sequence[str], models: Array, labels: Indices, colours: Mapping[int, int], ties: Ties | None, plane: graph_layout.Plane
) -> _Drawn:
    """A point for each user."""
    n, sizes = len(users), np.bincount(labels)
    layout = graph_layout.users_in(plane, models, labels, may_move=models.shape[1] > 1)
    degree = np.zeros(n, np.int64) if ties is None else np.bincount(np.concatenate([ties.first, ties.second]), minlength=n)
    axes = ("value",) if models.shape[1] == 1 else ("across", "up")
    rows: list[tuple[Any, ...]] = []
    values: list[Mapping[str, Any]] = []
    for user, label, (x, y), r, place, tied in zip(
        users, labels.tolist(), layout.places.tolist(), layout.radii.tolist(), plane.values.tolist(), degree.tolist(), strict=True
    ):
        rows.append((user, label, *([] if ties is None else [tied]), *(short(one) for one in place[: len(axes)])))
        colour = colours[label] if sizes[label] > 1 else None
        together = int(sizes[label])
        values.append({"user": user, "cluster": label, "together": together, **_spot(x, y, r), "colour": colour, "tied": tied})
    formats = {"together": ",", **({} if ties is None else {"tied": ","})}
    tooltip = told("user", "cluster", formats=formats, titles={"together": "users in it", "tied": "ties"})
    columns = ("user", "cluster", *(() if ties is None else ("ties",)), *axes)
    notes = [_colours_said(sizes)]
    if layout.n_spread:
        notes.append(f"{counted(layout.n_spread, 'user')} with the model of others lie around it.")
    lines: list[dict[str, Any]] = []
    if ties is not None:
        lines = _lines(layout, ties.first, ties.second, ties.weight, list(users))
        notes.append(_lines_said(len(lines), len(ties.weight), "tie"))
    return _Points(layout, values, tooltip), lines, columns, rows, notes


def _clusters(
    users: Sequence[str], models: Array, labels: Indices, colours: Mapping[int, int], ties: Ties | None, plane: graph_layout.Plane
) -> _Drawn:
    """A point for each cluster, or for the largest of many."""
    del models
    sizes = np.bincount(labels)
    order = np.argsort(-sizes, kind="stable")
    chosen = order[:_MOST_CLUSTERS]
    layout = graph_layout.clusters_in(plane, labels, chosen)
    n_within, lines, n_between = 0, list[dict[str, Any]](), 0
    if ties is not None:
        place = np.full(len(sizes), -1)
        place[chosen] = np.arange(len(chosen))
        ends = np.sort(np.stack([labels[ties.first], labels[ties.second]]), axis=0)
        apart = ends[0] != ends[1]
        n_within = int((~apart).sum())
        pairs, which = np.unique(ends[:, apart], axis=1, return_inverse=True)
        weights = np.bincount(which.reshape(-1), ties.weight[apart], pairs.shape[1])
        n_between = pairs.shape[1]
        there = (place[pairs] >= 0).all(axis=0)
        names = [f"cluster {label}" for label in chosen.tolist()]
        one, other = place[pairs[:, there]]
        lines = _lines(layout, one, other, weights[there], names)
    values, rows = list[Mapping[str, Any]](), list[tuple[Any, ...]]()
    for label, (x, y), r in zip(chosen.tolist(), layout.places.tolist(), layout.radii.tolist(), strict=True):
        n = int(sizes[label])
        rows.append((label, n, users[int(np.flatnonzero(labels == label)[0])]))
        values.append({"cluster": label, "users": n, **_spot(x, y, r), "colour": colours[label] if n > 1 else None})
    left = len(users) - int(sizes[chosen].sum())
    notes = [f"{len(users):,} users are drawn as {counted(len(sizes), 'cluster')}: points have areas by their users, and numbers of them."]
    if left:
        rest = f"{len(sizes) - len(chosen):,} clusters"
        notes = [
            f"{len(users):,} users are in {len(sizes):,} clusters. The {len(chosen):,} largest are drawn: areas are by users. "
            f"{counted(left, 'user')} in {rest} are not."
        ]
    notes.append(_colours_said(sizes))
    if ties is not None:
        inside = f"Of {len(ties.weight):,} ties {n_within:,} are within clusters"
        drawn = "all" if len(lines) == n_between else f"{len(lines):,} of them"
        notes.append(f"{inside}; the others are between {counted(n_between, 'pair')} of clusters, {drawn} drawn.")
    tooltip = told("cluster", formats={"users": ","})
    return _Points(layout, values, tooltip, has_numbers=True), lines, ("cluster", "users", "first user"), rows, notes


def _spot(x: float, y: float, r: float) -> dict[str, float]:
    return {"x": short(x), "y": short(y), "r": short(r)}


def _lines(
    layout: graph_layout.Layout, first: NDArray[Any], second: NDArray[Any], weight: Array, names: Sequence[str]
) -> list[dict[str, Any]]:
    """The strongest ties, the weaker ones first; the wider and darker, the larger their weight."""
    order = np.argsort(-weight, kind="stable")[:_MOST_TIES][::-1]
    largest = float(weight.max(initial=0.0)) or 1.0
    faint = min(1.0, math.sqrt(300 / max(len(order), 1)))  # many lines lie on each other
    lines = []
    for i, j, w in zip(first[order].tolist(), second[order].tolist(), weight[order].tolist(), strict=True):
        (x, y), (x2, y2), share = layout.places[i].tolist(), layout.places[j].tolist(), math.sqrt(w / largest)
        ends = {"x": short(x), "y": short(y), "x2": short(x2), "y2": short(y2)}
        seen = {"width": round(0.4 + 2.0 * share, 2), "opacity": round((0.25 + 0.45 * share) * faint, 3)}
        lines.append({**ends, **seen, "weight": short(w), "from": names[i], "to": names[j]})
    return lines


def _lines_said(n_drawn: int, n: int, noun: str) -> str:
    which = f"Lines: {counted(n, noun)}" if n_drawn == n else f"Lines: the {n_drawn:,} strongest of {counted(n, noun)}"
    return f"{which}, wider and darker with more weight."


def _colours_said(sizes: Indices) -> str:
    n_alone, n = int((sizes == 1).sum()), len(sizes)
    if n == n_alone:
        return "Every user is alone." if n > 1 else ""
    said = "All users are in one cluster." if n == 1 else f"Colours: {n - n_alone:,} clusters of several users"
    if n > 1:
        said += f", repeated after {N_COLOURS}" if n - n_alone > N_COLOURS else ""
        said += f"; grey: {counted(n_alone, 'user')} alone." if n_alone else "."
    return said


def _axes_said(models: Array, plane: graph_layout.Plane) -> str:
    if len(models) == 1:
        return ""
    if models.shape[1] == 1:
        return "Across: the one number of a model; from top to bottom: the users in their order."
    first, second = plane.shares
    if first == 0:
        return "All models are equal, so places mean nothing."
    up = f"; up: the second, {second:.0%}" if second > 0 else ""
    moved = "Each axis fills the picture, and points that would overlap are moved apart."
    far = f" {counted(plane.n_outside, 'user')} farther away lie at the edge." if plane.n_outside else ""
    return f"Across: the first principal component of the models, {first:.0%} of their variance{up}. {moved}{far}"


# ---- the path


@dataclass
class _Group:
    """Users who are together from a level on: 0 for single users, 1 for the smallest penalty."""

    level: int
    size: int
    first: int  # the number of its first user
    below: list[_Group] = field(default_factory=list)
    n_groups: int = 1  # more than 1 for a bundle of groups, which is drawn as one leaf
    y: float = 0.0


def tree_chart(
    penalties: Sequence[float],
    labels: Sequence[Indices],
    users: Sequence[str],
    *,
    chosen: float | None = None,
    colours: Mapping[int, int] | None = None,
) -> Chart | None:
    """The clusters (n,) at increasing penalties as a tree. None unless there are two penalties and two users.

    Lines join at the smallest penalty from which on their users stay together. `chosen` is marked, and its clusters have `colours`.
    """
    if len(penalties) < 2 or len(users) < 2:
        return None
    roots = _tree(_lasting(labels), len(users))
    own = None if chosen is None else list(penalties).index(chosen)
    colour_of: dict[int, int | None] = {}
    if own is not None and colours is not None:
        sizes = np.bincount(labels[own])
        colour_of = {user: colours.get(label) for user, label in enumerate(labels[own].tolist()) if sizes[label] > 1}
    small = next(size for size in _sizes() if _n_leaves(roots, size) <= _MOST_LEAVES)
    top = _Group(len(penalties) + 1, len(users), 0, _bundled(roots, small))
    leaves = _placed(top, users)
    step = (penalties[-1] / penalties[0]) ** (1 / (len(penalties) - 1))
    at = [penalties[0] / step, *penalties, penalties[-1] * math.sqrt(step)]
    values = _segments(top, at, 0 if own is None else own + 1, colour_of)
    scale = {"type": "log", "nice": False, "domain": [at[0], at[-1]]}
    axis = {"values": list(penalties), "format": "~g", "labelOverlap": "greedy"}
    x = number("x", "penalty", scale=scale, axis=axis)
    names = {"values": list(range(len(leaves))), "labelExpr": "leaves[datum.value]", "ticks": False, "domain": False, "grid": False}
    y = number("y", scale={"domain": [len(leaves) - 0.4, -0.6], "nice": False}, axis={**names, "title": None, "labelOverlap": False})
    dash = {"condition": {"test": "datum.groups > 1", "value": [3, 2]}, "value": [1, 0]}
    encoding = {
        "x": x,
        "y": y,
        "x2": {"field": "x2"},
        "y2": {"field": "y2"},
        "color": _COLOUR,
        "strokeWidth": {**number("width"), "scale": None, "legend": None},
        "strokeDash": dash,
        "tooltip": told("who", formats={"users": ","}, titles={"who": "of", "users": "users"}),
    }
    mark = {"type": "rule", "strokeCap": {"expr": "datum.groups > 1 ? 'butt' : 'square'"}}
    layers: list[dict[str, Any]] = [{"data": {"values": values}, "mark": mark, "encoding": encoding}]
    if chosen is not None:
        across = {"x": {"datum": chosen, "type": "quantitative"}, "tooltip": {"value": f"penalty {chosen:g}, the result"}}
        layers.append({"data": {"values": [{}]}, "mark": {"type": "rule", "style": "mark-of-goal"}, "encoding": across})
    height = max(110, _LEAF_HEIGHT * len(leaves))
    spec = {"$schema": SCHEMA, **FITTED, "height": height, "params": [{"name": "leaves", "value": leaves}], "layer": layers}
    columns = ("penalty", "groups that join", "users then together", "first user")
    rows = [
        (penalties[one.level - 1], len(one.below), one.size, users[one.first])
        for one in sorted(_all(roots), key=lambda one: (one.level, one.first))
        if one.below
    ]
    note = _tree_said(labels, len(users), small=small, is_bundled=any(one["groups"] > 1 for one in values), chosen=chosen)
    return Chart("tree", "The path as a tree", note, spec, columns, rows)


def _tree_said(labels: Sequence[Indices], n: int, *, small: int, is_bundled: bool, chosen: float | None) -> str:
    said = ["Lines join at the smallest penalty from which on their users stay together."]
    n_left, n_splits = len(np.unique(labels[-1])), splits(labels)
    said.append("At the largest one all are together." if n_left == 1 else f"At the largest one {n_left:,} clusters are left.")
    if n_splits:
        said.append(f"The path is not nested: {counted(n_splits, 'time')} a cluster parts at a larger penalty, which the tree leaves out.")
    else:
        said.append("No cluster parts again at a larger penalty.")
    if is_bundled:
        of = "users" if small == 1 else f"groups of at most {small:,} users"
        said.append(f"{n:,} users: a dashed line stands for several {of}.")
    if chosen is not None:
        said.append(f"Dashed across: the penalty of the result, {chosen:g}; its clusters have colours.")
    return " ".join(said)


def splits(labels: Sequence[Indices]) -> int:
    """How often a cluster parts on the way to larger penalties, over clusters (n,) at increasing penalties; 0 where they are nested."""
    return sum(len(np.unique(_both(before, after))) - len(np.unique(before)) for before, after in itertools.pairwise(labels))


def _both(one: Indices, other: Indices) -> Indices:
    """(n,) the clusters of users who are together in both."""
    return np.unique(np.stack([one, other]), axis=1, return_inverse=True)[1].reshape(-1)


def _lasting(labels: Sequence[Indices]) -> list[Indices]:
    """For each penalty: who is together there and at all larger ones."""
    found = [np.unique(labels[-1], return_inverse=True)[1].reshape(-1)]
    for before in reversed(labels[:-1]):
        found.append(_both(before, found[-1]))
    return found[::-1]


def _tree(levels: Sequence[Indices], n: int) -> list[_Group]:
    """The groups at the last of the levels (n,), each of which joins groups of the one before."""
    groups = [_Group(0, 1, user) for user in range(n)]
    parts = np.arange(n)
    for level, labels in enumerate(levels, 1):
        starts = np.unique(parts, return_index=True)[1]
        joined: list[list[_Group]] = [[] for _ in range(int(labels.max()) + 1)]
        for group, label in zip(groups, labels[starts].tolist(), strict=True):
            joined[label].append(group)
        groups = [
            below[0] if len(below) == 1 else _Group(level, sum(one.size for one in below), min(one.first for one in below), below)
            for below in joined
        ]
        parts = labels
    return groups


def _all(groups: Sequence[_Group]) -> list[_Group]:
    found = list(groups)
    for group in found:  # grows meanwhile
        found.extend(group.below)
    return found


def _sizes() -> Sequence[int]:
    """Of groups that may be bundled: none, single users, and larger ones."""
    return [*range(8), *(round(8 * 1.25**power) for power in range(200))]


def _n_leaves(groups: Sequence[_Group], small: int) -> int:
    """Leaves of a tree in which groups of at most this size that join at once are one."""
    large = [group for group in groups if group.size > small]
    return (len(large) < len(groups)) + sum(_n_leaves(group.below, small) if group.below else 1 for group in large)


def _bundled(groups: Sequence[_Group], small: int) -> list[_Group]:
    """The groups, largest first, and last one leaf for those of at most this size."""
    large = sorted((group for group in groups if group.size > small), key=lambda one: (-one.size, one.first))
    found = [_Group(one.level, one.size, one.first, _bundled(one.below, small)) for one in large]
    if few := [group for group in groups if group.size <= small]:
        found.append(_Group(0, sum(one.size for one in few), min(one.first for one in few), n_groups=len(few)))
    return found


def _placed(group: _Group, users: Sequence[str]) -> list[str]:
    """Puts a group beside the middle of what is below it. The names of the leaves from top to bottom."""
    leaves: list[str] = []

    def place(one: _Group) -> None:
        for below in one.below:
            place(below)
        if one.below:
            one.y = (one.below[0].y + one.below[-1].y) / 2
            return
        one.y = float(len(leaves))
        leaves.append(_name(one, users))

    place(group)
    return leaves


def _name(leaf: _Group, users: Sequence[str]) -> str:
    if leaf.size == 1:
        return cut(users[leaf.first])
    return counted(leaf.size, "user") + (f" in {leaf.n_groups:,} groups" if 1 < leaf.n_groups < leaf.size else "")


def _segments(top: _Group, at: Sequence[float], chosen: int, colour_of: Mapping[int, int | None]) -> list[dict[str, Any]]:
    """A line for each group from where it is formed to where it joins others, and one across where groups join.

    Groups up to the level `chosen` lie within a cluster there, and have the colour of their first user.
    """
    values: list[dict[str, Any]] = []
    for group in _all([top]):
        for one in group.below:
            who = f"{one.n_groups:,} groups" if one.n_groups > 1 else "one user" if one.size == 1 else "a group"
            seen = {"width": round(1 + 2.5 * math.sqrt(one.size / top.size), 2), "users": one.size, "groups": one.n_groups, "who": who}
            x, x2 = at[one.level], at[group.level]
            is_within = (group if one.n_groups > 1 else one).level <= chosen
            values.append({"x": x, "x2": x2, "y": one.y, "y2": one.y, "colour": colour_of.get(one.first) if is_within else None, **seen})
        if len(group.below) > 1 and group is not top:
            width = round(1 + 2.5 * math.sqrt(group.size / top.size), 2)
            across = {"width": min(width, 1.5), "users": group.size, "groups": 1, "who": "a group"}
            x, ends = at[group.level], (group.below[0].y, group.below[-1].y)
            colour = colour_of.get(group.first) if group.level <= chosen else None
            values.append({"x": x, "x2": x, "y": ends[0], "y2": ends[1], "colour": colour, **across})
    return values
