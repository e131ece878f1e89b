"""The plots of figures 1 and 2 of Lyu, Hanzely and Kolar (2022). Colours after Okabe and Ito (2008)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.arrays import Array
from coterie_deploy.studies.reproduce.files import save_figure
from coterie_deploy.studies.reproduce.plots import BLACK, BLUE, FONT, GREEN, PURPLE, VERMILION

# By the order in which the estimators come. Some are nearly equal for large m, so markers and lines differ too.
_STYLES = (
    (GREEN, "^", "dashdot"),
    (PURPLE, "D", "dotted"),
    (BLUE, "s", "dashed"),
    (VERMILION, "o", "solid"),
    (BLACK, "x", "none"),  # not measured for every m
)
_LOSSES = np.linspace(0.0, 3.0, 31)  # edges of the bars; the last bar also holds what is above


class Point(Protocol):
    """What is drawn for one m."""

    @property
    def mean(self) -> float: ...
    @property
    def error(self) -> float: ...


def distances(found: Mapping[str, Mapping[int, Point]], path: Path) -> None:
    """Mean distances by title and m, with bars of one standard deviation between seeds; written to `path`."""
    figure = Figure(figsize=(8.5, 6), layout="constrained")
    axes = figure.subplots()
    for (title, points), (colour, marker, line) in zip(found.items(), _STYLES, strict=True):
        means, errors = [point.mean for point in points.values()], [point.error for point in points.values()]
        axes.errorbar(list(points), means, errors, color=colour, marker=marker, linestyle=line, markersize=6, capsize=3, label=title)
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({m for points in found.values() for m in points})
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.set_yticks([0.3, 0.5, 1, 2, 4, 6], ["0.3", "0.5", "1", "2", "4", "6"])
    axes.minorticks_off()
    axes.set_xlabel("rows of a user, $m$", fontsize=FONT)
    axes.set_ylabel("mean distance to the truth", fontsize=FONT)
    _plain(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=FONT - 1, frameon=False)
    save_figure(figure, path)


def losses(found: Mapping[str, Sequence[Array]], path: Path) -> None:
    """How the users' losses are distributed, by title: for each seed losses (n,), whose shares are averaged; written to `path`."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (title, seeds), (colour, _, _) in zip(panels.flat, found.items(), _STYLES, strict=False):
        last = (_LOSSES[-2] + _LOSSES[-1]) / 2
        shares = np.mean([np.histogram(np.minimum(each, last), _LOSSES)[0] / len(each) for each in seeds], axis=0)
        axes.stairs(shares, _LOSSES, fill=True, color=colour, alpha=0.75)
        mean = float(np.mean([each.mean() for each in seeds]))
        axes.axvline(mean, color=BLACK, linestyle="dashed", linewidth=1.5)
        axes.text(mean + 0.04, 0.95, f"mean {mean:.3f}", transform=axes.get_xaxis_transform(), va="top", fontsize=FONT - 1)
        above = float(np.mean([(each > _LOSSES[-1]).mean() for each in seeds]))
        axes.text(0.98, 0.5, f"{100 * above:.1f} % above {_LOSSES[-1]:g}", transform=axes.transAxes, ha="right", fontsize=FONT - 1)
        axes.set_title(title, fontsize=FONT)
        _plain(axes)
    figure.supxlabel("cross-entropy of a user on its held-out rows (last bar: and above)", fontsize=FONT)
    figure.supylabel("share of the users", fontsize=FONT)
    save_figure(figure, path)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=FONT - 1)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
