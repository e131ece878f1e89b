"""How the values of users are spread, as a Vega-Lite specification."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie_deploy.view.charts import Chart, Spec, number, short, spec_of, told
from coterie_deploy.view.theme import N_COLOURS

_QUARTILES = ("min", "q1", "median", "q3", "max")
_MOST_SHARED = 8  # values of several users, beside which there is room for their numbers


def users_chart(
    by_user: Mapping[str, Mapping[str, float]],
    *,
    key: str = "users",
    title: str = "How users fare",
    x_title: str | None = None,
    clusters: Mapping[str, str] | None = None,
) -> Chart:
    """How values are spread over the users: for each metric a tick for each user, and below them a box of the quartiles.

    With `clusters` (by user), there is no box, because users of different clusters are not one distribution; few clusters have colours.
    """
    rows = [(metric, user, value) for metric, values in by_user.items() for user, value in values.items() if math.isfinite(value)]
    metrics = list(dict.fromkeys(metric for metric, *_ in rows))
    boxes = [(metric, *np.quantile([row[2] for row in rows if row[0] == metric], [0, 0.25, 0.5, 0.75, 1]).tolist()) for metric in metrics]
    y: dict[str, Any] = {"field": "metric", "type": "nominal", "sort": None, "title": None, "scale": {"domain": metrics}}
    y |= {"axis": {"ticks": False, "domain": False, "labelLimit": 190}}

    def layer(mark: Spec, x: str, tooltip: Sequence[Spec], **more: Any) -> dict[str, Any]:
        across = {**number(x, scale={"zero": False}, axis={"tickCount": 6}), "title": x_title}
        return {"mark": mark, "encoding": {"x": across, "y": y, "tooltip": tooltip, **more}}

    below, quartiles = {"yOffset": 9}, told(formats=dict.fromkeys(_QUARTILES, ".4~g"))
    under = {"data": {"values": [dict(zip(("metric", *_QUARTILES), box, strict=True)) for box in boxes]}}
    box = {"type": "bar", "style": "box", "height": 12, **below}
    n_users = len({user for _, user, _ in rows})
    note = f"Ticks: {n_users:,} users"
    counts = Counter((metric, short(value)) for metric, _, value in rows)
    shared = [{"metric": metric, "value": value, "n": n} for (metric, value), n in counts.items() if n > 1]
    has_numbers = 0 < len(shared) <= _MOST_SHARED * len(metrics)
    numbers = [{"data": {"values": shared}, **layer({"type": "text", "dy": -18, "yOffset": -11}, "value", [], text={"field": "n"})}]
    note += "; numbers: users with the same value" if has_numbers else ""
    if clusters is not None:
        names = list(dict.fromkeys(clusters.values()))
        few = len(names) <= N_COLOURS
        colour = {"color": {"field": "cluster", "type": "nominal", "scale": {"domain": names}, "legend": {"columns": 4}}} if few else {}
        ticks = layer({"type": "tick", "opacity": 0.6, "size": 20}, "value", told("user", "cluster", formats={"value": ".4~g"}), **colour)
        drawn = [(metric, user, short(value), clusters.get(user, "")) for metric, user, value in rows]
        note = f"Ticks: {n_users:,} users in {len(names):,} clusters{', by colour' if few else ''}."
        note += " Clusters differ, so no box is drawn across them."
        fields = ("metric", "user", "value", "cluster")
        return Chart(key, title, note, spec_of({**ticks, "height": 40 * len(metrics)}, fields, drawn), fields, drawn)
    layers: list[dict[str, Any]] = [
        layer({"type": "tick", "opacity": 0.5, "size": 16, "yOffset": -11}, "value", told("user", formats={"value": ".4~g"})),
        {**under, **layer({"type": "rule", **below}, "min", quartiles, x2={"field": "max"})},
        {**under, **layer(box, "q1", quartiles, x2={"field": "q3"})},
        {**under, **layer({"type": "tick", "style": "median", "thickness": 2.5, "size": 12, **below}, "median", quartiles)},
    ]
    columns = ("metric", "user", "value")
    layers += numbers if has_numbers else []
    height = (64 if has_numbers else 56) * len(metrics)
    spec = spec_of({"layer": layers, "height": height}, columns, [(metric, user, short(value)) for metric, user, value in rows])
    return Chart(key, title, f"{note}; below them the least, the quartiles and the greatest.", spec, columns, rows)
