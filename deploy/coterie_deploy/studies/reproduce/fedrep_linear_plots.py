"""The plots of figures 1, 3 and 4 of Collins et al. (2021). Lines are medians, bands go from the lower to the upper quartile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.arrays import Array
from coterie_deploy.studies.reproduce.files import save_figure
from coterie_deploy.studies.reproduce.plots import BLUE, FONT, GREEN, VERMILION

_STYLES = ((VERMILION, "o", "solid"), (BLUE, "s", "dashed"), (GREEN, "^", "dashdot"))  # by the order in which curves come


def trajectories(found: Mapping[int, Mapping[str, Array]], path: Path) -> None:
    """Distances (seeds, rounds + 1) by n and title, a panel for each n; written to `path`."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (n_users, curves) in zip(panels.flat, found.items(), strict=False):
        for (title, distances), (colour, _, line) in zip(curves.items(), _STYLES, strict=False):
            _curve(axes, range(distances.shape[1]), distances.T, title, color=colour, line=line)
        axes.set_title(f"$n = {n_users}$", fontsize=FONT)
        _log_axes(axes)
    for axes in panels[-1]:
        axes.set_xlabel("rounds", fontsize=FONT)
    figure.supylabel("principal angle distance to the truth", fontsize=FONT)
    _save(figure, panels.flat[0], path)


def errors(found: Mapping[str, Mapping[int, Array]], label: str, path: Path) -> None:
    """Users' errors by title and number of rows, with the name of the latter; written to `path`."""
    figure = Figure(figsize=(8.5, 6), layout="constrained")
    axes = figure.subplots()
    for (title, values), (colour, marker, line) in zip(found.items(), _STYLES, strict=True):
        _curve(axes, list(values), list(values.values()), title, color=colour, marker=marker, line=line)
    sizes = list(next(iter(found.values())))
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.minorticks_off()
    axes.set_xlabel(label, fontsize=FONT)
    axes.set_ylabel("error of a user's model", fontsize=FONT)
    _log_axes(axes)
    _save(figure, axes, path)


def _curve(axes: Axes, x: Sequence[int], values: Sequence[Array] | Array, title: str, *, color: str, line: str, marker: str = "") -> None:
    low, middle, high = np.transpose([np.quantile(each, [0.25, 0.5, 0.75]) for each in values])
    axes.plot(x, middle, label=title, color=color, linestyle=line, marker=marker, linewidth=1.8, markersize=5)
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _log_axes(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.tick_params(labelsize=FONT - 1)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=FONT - 1, frameon=False)
    save_figure(figure, path)
