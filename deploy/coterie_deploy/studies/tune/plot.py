"""The plot of a tune: held-out loss against one setting, a curve for each choice of the others, with bars of one standard error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.families.grid import value_text
from coterie_deploy.studies import plots
from coterie_deploy.studies.plots import Axis, curves
from coterie_deploy.studies.tune.result import Point, Tuned
from coterie_deploy.view.charts import Spec

_LOG_FROM = 10.0  # ratio of the largest to the smallest value from which an axis is logarithmic


def chart(tuned: Tuned, n_folds: int) -> Spec:
    """The points at their numbers, or for want of these at their places in the grid; a ring around the chosen one."""
    along, others = _axis_and_others(tuned)

    def drawn(point: Point) -> plots.Point:
        x = point.name if along is None else float(point.entry[along])
        curve = " ".join(f"{key}={value_text(point.entry.get(key))}" for key in others) or "mean, and its standard error"
        return plots.Point(curve, x, point.loss, point.loss - point.error, point.loss + point.error)

    listed = [drawn(point) for point in sorted(tuned.points, key=lambda point: _order(point, others))]
    y = Axis(f"held-out loss, mean of {n_folds} folds")
    ring = (f"chosen: {tuned.best.name}", drawn(tuned.best))
    if along is None:
        return curves(listed, Axis("point of the grid", is_named=True), y, ring=ring)
    numbers = [float(point.entry[along]) for point in tuned.points]
    is_log = min(numbers) > 0 and max(numbers) >= _LOG_FROM * min(numbers)
    return curves(listed, Axis(along, is_log=is_log), y, ring=ring)


def _axis_and_others(tuned: Tuned) -> tuple[str | None, list[str]]:
    """The setting along the axis, that with the most numbers; None where none has two. And the other settings that differ."""
    distinct = {key: {value_text(point.entry.get(key)) for point in tuned.points} for key in tuned.keys}
    numeric = [key for key in tuned.keys if len(distinct[key]) > 1 and all(_is_number(point.entry.get(key)) for point in tuned.points)]
    along = max(numeric, key=lambda key: len(distinct[key]), default=None)
    others = [key for key in tuned.keys if key != along and len(distinct[key]) > 1] if along is not None else []
    return along, others


def _order(point: Point, keys: Sequence[str]) -> tuple[Any, ...]:
    """Numbers in their order, other things in that of their text."""
    values = [point.entry.get(key) for key in keys]
    return tuple((not _is_number(value), value if _is_number(value) else 0, value_text(value)) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
