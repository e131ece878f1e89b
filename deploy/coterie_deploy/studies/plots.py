"""Plots of studies as Vega-Lite specifications: curves with their spread, side by side in panels where there are several."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from coterie_deploy.view.charts import Spec, number, spec_of

WIDTH, HEIGHT = 340, 240  # points, of one panel alone
_MARKED = 15  # points of a curve, above which they are not marked
_MOST_NAMED = 12  # curves that have room in a legend
_NUMBER = "datum.value && abs(datum.value) < 1e-3 ? format(datum.value, '.0e') : format(datum.value, ',.6~g')"


@dataclass(frozen=True)
class Point:
    """A point of a curve. Its spread goes from `low` to `high`."""

    curve: str
    x: float | str
    y: float
    low: float
    high: float
    panel: str = ""

    @classmethod
    def around(cls, curve: str, x: float | str, y: float, spread: float) -> Self:
        """A point whose spread is the same to both sides."""
        return cls(curve, x, y, y - spread, y + spread)


@dataclass(frozen=True)
class Axis:
    """An axis: numbers, or with `is_named` names in the order of the points."""

    title: str
    is_log: bool = False
    is_named: bool = False
    ticks: Sequence[float] = ()
    low: float | None = None  # where it ends, if not where the points do
    high: float | None = None

    def channel(self, field: str) -> dict[str, Any]:
        """Its part of an encoding."""
        if self.is_named:
            return {"field": field, "type": "nominal", "sort": None, "title": self.title, "axis": {"labelAngle": -60, "labelLimit": 400}}
        ends = {name: end for name, end in (("domainMin", self.low), ("domainMax", self.high)) if end is not None}
        scale = {"type": "log" if self.is_log else "linear", "zero": False, "nice": False, "padding": 8, **ends}
        ticks: dict[str, Any] = {"values": list(self.ticks)} if self.ticks else {"tickCount": 4 if self.is_log else 6}
        return number(field, self.title, scale=scale, axis={"labelExpr": _NUMBER, **ticks})


def curves(
    points: Sequence[Point],
    x: Axis,
    y: Axis,
    *,
    bands: bool = False,
    levels: Mapping[str, float] | None = None,
    ring: tuple[str, Point] | None = None,
    height: int = HEIGHT,
) -> Spec:
    """A line for each curve, with its spread as bars or `bands`; `levels` are lines across, and a `ring` marks one point, with its name."""
    names = list(dict.fromkeys(point.curve for point in points))
    listed = [*names, *(levels or ()), *(() if ring is None else (ring[0],))]
    many = len(names) > _MOST_NAMED
    ordered: dict[str, Any] = {"field": "curve", "type": "nominal", "sort": listed, "scale": {"domain": listed}}
    named = [*listed[: _MOST_NAMED - 1], listed[-1]] if many else listed
    colour = {**ordered, "legend": {"values": named, "columns": 3, "symbolType": "stroke", "symbolOpacity": 1}}
    if many:
        colour["scale"] = {"domain": listed, "scheme": "viridis"}
    dashes = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4]]
    dash = {**ordered, "scale": {"domain": listed, "range": [dashes[place % len(dashes)] for place in range(len(listed))]}, "legend": None}
    place = {"x": x.channel("x"), "y": y.channel("y"), "color": colour}
    spread = {**place, "y": y.channel("low"), "y2": {"field": "high"}}
    of_band: dict[str, Any] = {"type": "area", "opacity": 0.2, "clip": True}
    of_bars: dict[str, Any] = {"type": "rule", "strokeWidth": 1, "clip": True}
    line: dict[str, Any] = {"type": "line", "clip": True}
    if len(points) <= _MARKED * len(names) * len({point.panel for point in points}):
        line["point"] = {"filled": True, "size": 30}
    if x.is_named:
        line = {"type": "point", "filled": True, "size": 40}
    layers: list[dict[str, Any]] = [
        {"mark": of_band if bands else of_bars, "encoding": spread},
        {"mark": line, "encoding": {**place, **({} if x.is_named else {"strokeDash": dash})}},
    ]
    if levels:
        values = [{"curve": name, "y": value} for name, value in levels.items()]
        across = {"y": y.channel("y"), "color": colour, "strokeDash": dash}
        layers.append({"data": {"values": values}, "mark": {"type": "rule", "strokeWidth": 1.5, "clip": True}, "encoding": across})
    if ring is not None:
        values = [{**asdict(ring[1]), "curve": ring[0]}]
        layers.append({"data": {"values": values}, "mark": {"type": "point", "size": 250, "strokeWidth": 2}, "encoding": place})
    fields = ("curve", "x", "y", "low", "high", "panel")
    rows = [tuple(asdict(point).values()) for point in points]
    return spec_of({"layer": layers, "width": WIDTH, "height": height}, fields, rows)


def panels(spec: Mapping[str, Any], field: str = "panel", *, columns: int = 2) -> Spec:
    """The same in a panel for each value of a field, as wide together as one alone."""
    rest = {key: spec[key] for key in ("$schema", "data")}
    of_one = {key: value for key, value in spec.items() if key not in (*rest, "autosize")}
    size = {"width": WIDTH // columns - 15, "height": spec["height"] * 2 // 3}
    values = list(dict.fromkeys(row[field] for row in spec["data"]["values"]))
    facet = {"field": field, "type": "nominal", "sort": values, "title": None}
    return {**rest, "facet": facet, "columns": columns, "spec": {**of_one, **size}}
