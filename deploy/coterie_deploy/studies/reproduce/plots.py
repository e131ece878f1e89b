"""The plots. Lambda of (3), or gamma of (4), below; LAM and GAM, which are 2N times that, above. Colours after Okabe and Ito (2008)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie_deploy.studies.reproduce.curves import Curve
from coterie_deploy.studies.reproduce.files import save_figure

BLUE, VERMILION, GREEN, PURPLE, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
SERIES = {"sum_of_norms": ("sum of norms (3)", BLUE, "o"), "squared": ("squared penalty (4)", VERMILION, "s")}
LEVELS = {
    "oracle": ("oracle", BLACK, (0, (5, 2))),
    "local": ("local models (2)", GREEN, "dashdot"),
    "global": ("global model (1)", PURPLE, "dotted"),
}
FONT = 12


def accuracy(found: Mapping[str, Curve], n_users: int, path: Path) -> None:
    """Figure 1, with bands of one standard error, and above it the same from the local models' accuracy up; written to `path`."""
    figure = Figure(figsize=(8.5, 9), layout="constrained")
    near, whole = figure.subplots(2, sharex=True, height_ratios=(3, 4))
    for axes in (near, whole):
        for method in SERIES:
            _curve(axes, found[method], method, n_users)
        for method in LEVELS:
            _level(axes, float(found[method].mean[0]), method)
        _penalty_axes(axes, n_users, above=axes is near)
    low, high = float(found["local"].mean[0]), max(found[method].peak()[1] for method in (*SERIES, "oracle"))
    near.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
    near.set_xlabel("")
    near.text(0.02, 0.24, "the upper end, enlarged", transform=near.transAxes, ha="left", fontsize=FONT)
    figure.supylabel("mean accuracy on the cluster's test data", fontsize=FONT)
    _legend(figure, whole)
    save_figure(figure, path)


def compactness(distance: Mapping[str, Curve], number: Mapping[str, Curve], n_users: int, path: Path) -> None:
    """Figure 2, with the number of distinct models below, written to `path`."""
    figure = Figure(figsize=(8.5, 8.5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for method in SERIES:
        _curve(upper, distance[method], method, n_users)
        _curve(lower, number[method], method, n_users)
    _level(upper, float(distance["local"].mean[0]), "local")
    _penalty_axes(upper, n_users, above=True)
    _penalty_axes(lower, n_users, above=False)
    upper.set_xlabel("")
    upper.set_yscale("log")
    upper.set_ylim(bottom=1e-5)  # models that are equal in a solution are apart by the solver's tolerance
    upper.set_ylabel("mean distance of two models\nin one cluster", fontsize=FONT)
    lower.set_ylabel("distinct models", fontsize=FONT)
    _legend(figure, upper)
    save_figure(figure, path)


def _curve(axes: Axes, curve: Curve, method: str, n_users: int) -> None:
    label, colour, marker = SERIES[method]
    x = curve.penalty / (2 * n_users)
    axes.plot(x, curve.mean, color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=label)
    axes.fill_between(x, curve.mean - curve.error, curve.mean + curve.error, color=colour, alpha=0.2, linewidth=0)


def _level(axes: Axes, value: float, method: str) -> None:
    label, colour, style = LEVELS[method]
    axes.axhline(value, color=colour, linestyle=style, linewidth=1.8, label=label)


def _penalty_axes(axes: Axes, n_users: int, *, above: bool) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(r"$\lambda$ of (3), $\gamma$ of (4)", fontsize=FONT)
    axes.tick_params(labelsize=FONT - 1)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    if above:
        top = axes.secondary_xaxis("top", functions=(lambda x: np.multiply(x, 2 * n_users), lambda x: np.divide(x, 2 * n_users)))
        top.set_xlabel(rf"LAM, GAM $= 2N\lambda$, $2N\gamma$  ($N = {n_users}$)", fontsize=FONT)
        top.tick_params(labelsize=FONT - 1)


def _legend(figure: Figure, axes: Axes) -> None:
    """One legend for the figure, outside of the axes."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=FONT - 1, frameon=False)
