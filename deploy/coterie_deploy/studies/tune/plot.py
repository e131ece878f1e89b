"""The plot of a tune: held-out loss against one setting, a curve for each choice of the others, with bars of one standard error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.errors import RunError
from coterie.families.grid import value_text
from coterie_deploy.studies.tune.result import Point, Tuned

FONT = 12
_LOG_FROM = 10.0  # ratio of the largest to the smallest value from which an axis is logarithmic
_CURVES_NAMED = 12  # more have no room in the legend
_MARKERS = "osD^vP"


def draw(tuned: Tuned, n_folds: int, path: Path) -> None:
    """Writes the plot to `path`. Raises RunError when it cannot be written."""
    along, others = _axis_and_others(tuned)
    figure = Figure(figsize=(8.5, 6), layout="constrained")
    axes = figure.subplots()
    place = _places(axes, tuned.points, along)
    curves: dict[str, list[Point]] = {}
    for point in sorted(tuned.points, key=lambda point: _order(point, others)):
        curves.setdefault(" ".join(f"{key}={value_text(point.entry.get(key))}" for key in others), []).append(point)
    # The dark two thirds of the map: its light end is too pale for a line.
    colours = mpl.colormaps["viridis"](np.linspace(0.0, 0.85, len(curves)))
    for number, (label, points) in enumerate(curves.items()):
        ordered = sorted(points, key=place)
        x, y, error = (np.array(part) for part in zip(*((place(p), p.loss, p.error) for p in ordered), strict=True))
        marker = _MARKERS[number % len(_MARKERS)]
        style = {"color": colours[number], "marker": marker, "markersize": 5, "capsize": 3, "elinewidth": 0.9}
        style |= {"linestyle": "none"} if along is None else {"linewidth": 1.6}
        axes.errorbar(x, y, yerr=error, label=label if number < _CURVES_NAMED else "_", **style)
    best = tuned.best
    ring = {"marker": "o", "markersize": 15, "markerfacecolor": "none", "markeredgecolor": "#D55E00", "markeredgewidth": 2}
    axes.plot([place(best)], [best.loss], linestyle="none", label=f"chosen: {best.name}", **ring)  # type: ignore[arg-type]
    axes.set_xlabel(along or "point of the grid", fontsize=FONT)
    axes.set_ylabel(f"held-out loss, mean of {n_folds} folds", fontsize=FONT)
    axes.tick_params(labelsize=FONT - 1)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    named = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label]
    figure.legend(*zip(*named, strict=True), loc="outside lower center", ncols=3, fontsize=FONT - 1, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _axis_and_others(tuned: Tuned) -> tuple[str | None, list[str]]:
    """The setting along the axis, that with the most numbers; None where none has two. And the other settings that differ."""
    distinct = {key: {value_text(point.entry.get(key)) for point in tuned.points} for key in tuned.keys}
    numeric = [key for key in tuned.keys if len(distinct[key]) > 1 and all(_is_number(point.entry.get(key)) for point in tuned.points)]
    along = max(numeric, key=lambda key: len(distinct[key]), default=None)
    others = [key for key in tuned.keys if key != along and len(distinct[key]) > 1] if along is not None else []
    return along, others


def _places(axes: Axes, points: Sequence[Point], along: str | None) -> Any:
    """Where a point is on the axis: at its number, or for want of one at its place in the grid."""
    if along is None:
        place_of = {point.name: float(place) for place, point in enumerate(points)}
        axes.set_xticks(list(place_of.values()), list(place_of), rotation=60, ha="right")
        return lambda point: place_of[point.name]
    numbers = [float(point.entry[along]) for point in points]
    if min(numbers) > 0 and max(numbers) >= _LOG_FROM * min(numbers):
        axes.set_xscale("log")
    return lambda point: float(point.entry[along])


def _order(point: Point, keys: Sequence[str]) -> tuple[Any, ...]:
    """Numbers in their order, other things in that of their text."""
    values = [point.entry.get(key) for key in keys]
    return tuple((not _is_number(value), value if _is_number(value) else 0, value_text(value)) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
