"""The plot of figure 1 of Lyu, Hanzely and Kolar (2022). Colours after Okabe and Ito (2008)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure

from coterie.errors import RunError
from coterie_deploy.reproduce.plots import BLUE, FONT, GREEN, PURPLE, VERMILION

# By the order in which the estimators come. The first two are nearly equal for large m, so markers and lines differ too.
_STYLES = ((GREEN, "^", "dashdot"), (PURPLE, "D", "dotted"), (BLUE, "s", "dashed"), (VERMILION, "o", "solid"))


class Point(Protocol):
    """What is drawn for one m."""

    @property
    def mean(self) -> float: ...
    @property
    def error(self) -> float: ...


def distances(found: Mapping[str, Sequence[Point]], sizes: Sequence[int], path: Path) -> None:
    """Mean distances by title, with bars of one standard deviation between seeds, for each m of `sizes`; written to `path`."""
    figure = Figure(figsize=(8.5, 6), layout="constrained")
    axes = figure.subplots()
    for (title, points), (colour, marker, line) in zip(found.items(), _STYLES, strict=True):
        means, errors = [point.mean for point in points], [point.error for point in points]
        axes.errorbar(sizes, means, errors, color=colour, marker=marker, linestyle=line, markersize=6, capsize=3, label=title)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.set_yticks([0.3, 0.5, 1, 2, 4, 6], ["0.3", "0.5", "1", "2", "4", "6"])
    axes.minorticks_off()
    axes.set_xlabel("rows of a user, $m$", fontsize=FONT)
    axes.set_ylabel("mean distance to the truth", fontsize=FONT)
    axes.tick_params(labelsize=FONT - 1)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(found), fontsize=FONT - 1, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
