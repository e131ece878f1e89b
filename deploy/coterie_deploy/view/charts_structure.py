"""Charts of the structure of a run: the clusters of its users, and the links of the federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie_deploy.terminal.tables import counted, size
from coterie_deploy.view.charts import FITTED, SCHEMA, SCOPES, WHOLE, Chart, axis_of, coloured, cut, number, spec_of, told
from coterie_deploy.view.theme import N_COLOURS
from coterie_server.record.rundb import BETWEEN, PEERS

COORDINATOR = "coordinator"
KNOWN = "known"  # the column of a heat map that has the clusters that were known beforehand
_ALONE = "#8a94a155"  # users who share their model with nobody
_GAP = " "  # the empty column after it
_MOST_NAMED = 40  # users whose names fit beside a heat map
_MOST_AGGREGATORS = 8  # that are drawn one by one, the busiest
_MOST_LEAVES = 12
_LEFT = -0.06  # of the axis on which the coordinator is at 0 and each level one further
_LEAF_WORDS = 165  # pixels
_LEAF_HEIGHT = 46
_LEAF_HEIGHT_BELOW = 68  # below aggregators, which have something to say in between


# ---- who is together


def clusters_chart(
    order: Sequence[str],
    steps: Sequence[str],
    labels: Sequence[Sequence[int]],
    *,
    axis: str,
    users: Sequence[str],
    known: Sequence[int] | None = None,
) -> Chart:
    """Which users are together: a column for each step (a penalty, a round), a row for each user, a colour for each cluster.

    `labels[i][j]`: the cluster of `users[j]` after `steps[i]`; `known[j]`: the one that was known beforehand, in a column of its own.
    `order`: the users from top to bottom. A cluster has the colour of the one in the column before that most of its users were in.
    """
    place = {user: j for j, user in enumerate(users)}
    columns = [*zip(steps, labels, strict=True)]
    if known is not None:
        columns = [(KNOWN, known), *columns]
    rows, drawn = [], []
    for (step, after), colours in zip(columns, colours_of([after for _, after in columns]), strict=True):
        sizes = Counter(after)
        for user in order:
            cluster = after[place[user]]
            rows.append((step, user, cluster))
            drawn.append((step, user, cluster, colours[cluster], sizes[cluster]))
    shown = list(steps) if known is None else [KNOWN, _GAP, *steps]
    every = max(1, -(-len(shown) // 12))  # which steps have room for their names
    named = [step for number, step in enumerate(shown) if number % every == 0 or step == KNOWN]
    names = {"labels": len(order) <= _MOST_NAMED, "ticks": False, "domain": False}
    alone = {"condition": {"test": "datum.users === 1", "value": _ALONE}}
    colour = {**alone, "field": "colour", "type": "nominal", "legend": None, "scale": {"domain": list(range(N_COLOURS))}}
    ticks = {"labelAngle": 0, "values": named, "labelOverlap": True, "ticks": False, "domain": False}
    encoding = {
        "x": {"field": "step", "type": "ordinal", "title": axis, "scale": {"domain": shown}, "axis": ticks},
        "y": {"field": "user", "type": "nominal", "sort": None, "title": counted(len(order), "user"), "axis": names},
        "fill": colour,
        "stroke": colour,  # closes the seams that a printer leaves between neighbours
        "tooltip": told("user", "step", "cluster", formats={"users": ","}, titles={"step": axis, "users": "users in it"}),
    }
    height = len(order) * max(2, min(14, 420 // max(len(order), 1)))  # whole pixels: rows of broken height have seams
    unit = {"mark": {"type": "rect", "strokeWidth": 0.4}, "encoding": encoding, "height": height}
    said = [f"Users of one colour in a column are together, grey ones alone; colours repeat after {N_COLOURS} clusters."]
    if labels:
        first, last = len(set(labels[0])), len(set(labels[-1]))
        said.append(f"{counted(first, 'cluster')} throughout." if first == last else f"From {first:,} to {counted(last, 'cluster')}.")
    if known is not None:
        said.append(f"On the left the {counted(len(set(known)), 'cluster')} that the data names, which the method is not told.")
    if len(order) < len(users):
        said.append(f"{len(order):,} of {len(users):,} users are drawn.")
    spec = spec_of(unit, ("step", "user", "cluster", "colour", "users"), drawn)
    return Chart("clusters", "Who is together", " ".join(said), spec, (axis, "user", "cluster"), rows)


def colours_of(columns: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """A colour for each cluster of each column: that of the cluster before it with which it shares most users, if no larger one has it."""
    before: dict[int, int] = {}
    previous: Sequence[int] = ()
    found = []
    n_used = 0
    for labels in columns:
        shared = Counter(zip(labels, previous, strict=False))
        alone = {cluster for cluster, n in Counter(labels).items() if n == 1}
        now: dict[int, int] = {}
        taken: set[int] = set()
        for (cluster, old), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
            if cluster not in now and cluster not in alone and before.get(old, -1) not in taken | {-1}:
                now[cluster] = before[old]
                taken.add(before[old])
        for cluster in dict.fromkeys(labels):
            if cluster in alone:
                now[cluster] = -1
            elif cluster not in now:
                now[cluster], n_used = n_used, n_used + 1
        found.append({cluster: colour % N_COLOURS if colour >= 0 else 0 for cluster, colour in now.items()})
        before, previous = now, labels
    return found


def path_charts(penalties: Sequence[float], measured: Mapping[str, Sequence[float | None]]) -> list[Chart]:
    """The regularization path: what each penalty leaves of the measures, by their names, such as the number of clusters."""
    charts = []
    for name, values in measured.items():
        rows = [row for row in zip(penalties, values, strict=True) if row[1] is not None]
        if len(rows) < 2:
            continue  # the table of the stages has the value
        columns = ("penalty", name)
        axis = {"values": list(penalties), "format": "~g", "labelOverlap": "greedy"}
        encoding = {
            "x": number("penalty", scale={"type": "log", "nice": False, "padding": 8}, axis=axis),
            "y": number("value", name, scale={"zero": name == "clusters"}, axis=WHOLE if name == "clusters" else {}),
            "tooltip": told(formats={"penalty": "~g", "value": ".4~g"}, titles={"value": name}),
        }
        mark = {"type": "line", "point": {"filled": True, "size": 45}}
        spec = spec_of({"mark": mark, "encoding": encoding, "height": 200}, ("penalty", "value"), rows)
        key = "path-" + "-".join(name.split())
        note = "The larger the penalty, the more users share a model." if name == "clusters" else "Each point is a stage of the path."
        charts.append(Chart(key, f"{name[:1].upper()}{name[1:]} along the path", note, spec, columns, rows))
    return charts


def agreement_chart(steps: Sequence[int], values: Sequence[float]) -> Chart:
    """How well found clusters agree with known ones as rounds go."""
    encoding = {
        "x": number("round", axis=axis_of("round")),
        "y": number("agreement", AGREEMENT),
        "tooltip": told(formats={"round": ",", "agreement": ".4~g"}),
    }
    rows = list(zip(steps, values, strict=True))
    mark = {"type": "line", "interpolate": "step-after", "point": {"filled": True, "size": 40}}
    spec = spec_of({"mark": mark, "encoding": encoding, "height": 200}, ("round", "agreement"), rows)
    note = "1: the clusters found are those that the data names; about 0: they have nothing to do with each other."
    return Chart("agreement", "Agreement with known clusters", note, spec, ("round", AGREEMENT), rows)


AGREEMENT = "adjusted Rand index"


# ---- who speaks to whom


@dataclass(frozen=True)
class Link:
    """A link of the federation from `above`, "" for the coordinator, to `below`, with the users of that, None where they are not known."""

    above: str
    below: str
    n_users: int | None
    up_bytes: float
    down_bytes: float
    scope: str

    @property
    def n_bytes(self) -> float:
        return self.up_bytes + self.down_bytes


@dataclass
class _Node:
    """A member and its place: `depth` from the left, `y` in leaves from the top."""

    name: str
    depth: int
    y: float = 0.0
    link: Link | None = None
    below: list[_Node] = field(default_factory=list)

    @property
    def all(self) -> list[_Node]:
        return [self, *(one for child in self.below for one in child.all)]

    @property
    def drawn(self) -> dict[str, Any]:
        """Its place and its two lines of text: name and users, bytes up and down."""
        kind = "root" if self.link is None else "inner" if self.below else "leaf"
        name, more = cut(self.name), ""
        if self.link is not None:
            name += "" if self.link.n_users is None else f" \N{MIDDLE DOT} {counted(self.link.n_users, 'user')}"
            more = f"\N{UPWARDS ARROW} {size(self.link.up_bytes)}  \N{DOWNWARDS ARROW} {size(self.link.down_bytes)}"
        return {"x": self.depth, "y": self.y, "kind": kind, "name": name, "more": more}


def topology_chart(links: Sequence[Link]) -> Chart:
    """The tree of coordinator, aggregators and hosts with the bytes on each link; of many, the busiest, and the others together."""
    root = _tree(links)
    n_leaves = _place(root)
    nodes = root.all
    deepest = max(node.depth for node in nodes)
    widest = max((link.n_bytes for link in links if link.scope != PEERS), default=1.0) or 1.0
    room = f"{_LEAF_WORDS} / max(width, {2 * _LEAF_WORDS})"  # for what is said of the leaves
    across = {"domainMin": _LEFT, "domainMax": {"expr": f"({deepest} - {_LEFT} * {room}) / (1 - {room})"}, "nice": False, "zero": False}
    at_nodes: dict[str, Any] = {
        "x": number("x", scale=across, axis=None),
        "y": number("y", scale={"domain": [n_leaves - 0.25, -0.75], "nice": False}, axis=None),
    }
    scopes = [scope for scope in SCOPES if scope != PEERS and any(link.scope == scope for link in links)]
    colour = coloured("scope", scopes) if len(scopes) > 1 else {**coloured("scope", scopes), "legend": None}
    points = [point for node in nodes for child in node.below for point in _curve(node, child, widest)]
    thickness = number("width", scale=None)
    edges = {
        "data": {"values": points},
        "mark": {"type": "line", "interpolate": "basis", "opacity": 0.65, "strokeCap": "butt"},
        "encoding": {**at_nodes, "detail": {"field": "to"}, "order": {"field": "order"}, "color": colour, "strokeWidth": thickness},
    }
    drawn = [node.drawn for node in nodes]
    dots = {"data": {"values": drawn}, "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1}, "encoding": at_nodes}
    layers = [edges, dots]
    for kind, align, dx, dy in (("root", "left", -5, -14), ("inner", "center", 0, -26), ("leaf", "left", 11, -7)):
        chosen = [node for node in drawn if node["kind"] == kind]
        for style in ({"style": "halo"}, {}):  # what is written over lines stands on a halo of the page's colour
            for what, lower, weight in (("name", 0, "bold"), ("more", 15, "normal")):
                mark = {"type": "text", "align": align, "dx": dx, "dy": dy + lower, "fontWeight": weight, **style}
                layers.append({"data": {"values": chosen}, "mark": mark, "encoding": {**at_nodes, "text": {"field": what}}})
    leaf_height = _LEAF_HEIGHT if deepest == 1 else _LEAF_HEIGHT_BELOW
    spec = {"$schema": SCHEMA, **FITTED, "height": max(130, leaf_height * n_leaves + 30), "layer": layers}
    rows = [
        (link.above or COORDINATOR, link.below, link.scope, link.n_users, round(link.up_bytes), round(link.down_bytes)) for link in links
    ]
    columns = ("from", "to", "scope", "users", "bytes up", "bytes down")
    note = "Useful traffic of the whole run: \N{UPWARDS ARROW} up, \N{DOWNWARDS ARROW} down; lines are as thick as it is much."
    if any(link.scope == PEERS for link in links):
        note += " Links between aggregators are in the table alone: the one named first is their upper end."
    return Chart("topology", "Who speaks to whom", note, spec, columns, rows)


def _tree(links: Sequence[Link]) -> _Node:
    """The coordinator and the members below it that fit."""
    root = _Node(COORDINATOR, 0)
    top = [link for link in links if not link.above and link.scope != PEERS]
    shown = _busiest(top, _MOST_AGGREGATORS if any(link.scope == BETWEEN for link in top) else _MOST_LEAVES)
    for link in shown:
        node = _Node(link.below, 1, link=link)
        root.below.append(node)
        below = [other for other in links if other.above == link.below and other.scope != PEERS]
        node.below = [_Node(other.below, 2, link=other) for other in _busiest(below, max(2, _MOST_LEAVES // len(shown)))]
    return root


def _busiest(links: Sequence[Link], most: int) -> list[Link]:
    """The links with most traffic, in their order, and one that stands for the others."""
    if len(links) <= most:
        return list(links)
    chosen = set(sorted(range(len(links)), key=lambda place: (-links[place].n_bytes, place))[: most - 1])
    shown = [link for place, link in enumerate(links) if place in chosen]
    others = [link for place, link in enumerate(links) if place not in chosen]
    users = [link.n_users for link in others]
    noun = "aggregator" if others[0].scope == BETWEEN else "host"
    up, down = sum(link.up_bytes for link in others), sum(link.down_bytes for link in others)
    n_users = None if None in users else sum(number or 0 for number in users)
    return [*shown, Link(others[0].above, f"{len(others):,} more {noun}s", n_users, up, down, others[0].scope)]


def _place(node: _Node, first: int = 0) -> int:
    """Puts a node beside the middle of what is below it. The number of the leaf after its own."""
    if not node.below:
        node.y = float(first)
        return first + 1
    for child in node.below:
        first = _place(child, first)
    node.y = (node.below[0].y + node.below[-1].y) / 2
    return first


def _curve(node: _Node, child: _Node, widest: float) -> list[dict[str, Any]]:
    """The points of a line from a node to another, horizontal at both. Its key is a place: names may be the same."""
    if child.link is None:
        return []
    middle = (node.depth + child.depth) / 2
    places = [(node.depth, node.y), (middle, node.y), (middle, child.y), (child.depth, child.y)]
    same = {"to": f"{child.depth}:{child.y}", "scope": child.link.scope, "width": 1.5 + 6 * child.link.n_bytes / widest}
    return [{"x": x, "y": y, "order": order, **same} for order, (x, y) in enumerate(places)]
