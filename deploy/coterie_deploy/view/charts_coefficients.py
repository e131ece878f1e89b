"""The caterpillar plot: the same coefficient of many models, in the order of its values, with intervals where they were measured."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie_deploy.read.coefficients import Coefficient
from coterie_deploy.view.charts import Chart, number, spec_of, told

MOST_MODELS = 200  # that are drawn; of more, some evenly along the order
_MOST_LABELS = 60
_LABELLED, _NARROW = 14, 4  # height of a model with and without its name
_COLUMNS = ("name", "cluster", "estimate", "low", "high", "rows")


def caterpillar_chart(coefficient: str, found: Sequence[Coefficient], kind: str, level: float, place: int, common: float | None) -> Chart:
    """`found` are those of one coefficient and kind of model ("user", "cluster"); `common` is that of everyone's model.

    `place` is the number of the coefficient in the run, for the key.
    """
    ordered = sorted(found, key=lambda one: one.estimate)
    kept = sorted(set(np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_MODELS)).round().astype(int).tolist()))
    rows = [_row(ordered[position]) for position in kept]
    has_intervals = any(math.isfinite(low) for *_, low, _, _ in rows)
    is_labelled = len(rows) <= _MOST_LABELS
    axis = {"labels": is_labelled, "ticks": False, "domain": False, "labelLimit": 160}
    y = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": axis, "scale": {"domain": [row[0] for row in rows]}}
    across = number("estimate", coefficient, scale={"zero": False}, axis={"tickCount": 6})
    ends = dict.fromkeys(("low", "high"), ".4~g") if has_intervals else {}
    tooltip = told("name", "cluster", formats={"estimate": ".4~g", **ends, "rows": ",d"})
    layers: list[dict[str, Any]] = []
    if has_intervals:
        span = {"x": {**across, "field": "low"}, "x2": {"field": "high"}, "y": y, "tooltip": tooltip}
        layers.append({"mark": {"type": "rule", "opacity": 0.6}, "encoding": span})
    mark = {"type": "point", "filled": True, "size": 30 if is_labelled else 12, "opacity": 1}
    layers.append({"mark": mark, "encoding": {"x": across, "y": y, "tooltip": tooltip}})
    if common is not None:
        dashed = {"type": "rule", "strokeDash": [4, 3]}
        layers.append({"data": {"values": [{"estimate": common}]}, "mark": dashed, "encoding": {"x": across}})
    spec = spec_of({"layer": layers, "height": max(60, len(rows) * (_LABELLED if is_labelled else _NARROW))}, _COLUMNS, rows)
    parts = [
        f"Points: {kind}s in the order of their estimates",
        *([f"lines: {100 * level:g} % intervals"] if has_intervals else []),
        *(["dashed: the common model"] if common is not None else []),
        *([f"{len(rows)} of {len(ordered):,} are drawn"] if len(rows) < len(ordered) else []),
    ]
    return Chart(f"coefficients-{place}", f"{coefficient} by {kind}", f"{'; '.join(parts)}.", spec, _COLUMNS, rows)


def _row(one: Coefficient) -> tuple[Any, ...]:
    low, high = (math.nan if end is None else end for end in (one.low, one.high))
    return one.name, one.cluster, one.estimate, low, high, one.n_rows
