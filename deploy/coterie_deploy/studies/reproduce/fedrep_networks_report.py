"""What is printed, drawn and written of figures 5 and 6 of Collins et al. (2021), for which the paper gives no numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
from rich.console import Console

from coterie.errors import RunError
from coterie_deploy.studies.reproduce.fedrep_networks import NEW_EPOCHS, NEW_ROWS, Point, figure5, figure6
from coterie_deploy.studies.reproduce.files import write_csv
from coterie_deploy.terminal.tables import table

_TITLES = {"fedrep": "FedRep", "fedavg": "FedAvg"}


@dataclass(frozen=True)
class Figure:
    """How a figure is measured and what is said of it."""

    measure: Callable[[int, Path, Path | None, Callable[[str], None]], list[Point]]
    title: str
    x: str
    y: str
    is_error: bool  # whether 1 - accuracy is shown
    said: str  # by the paper, in words
    shown: tuple[int, ...]  # which x go into the table


FIGURES = {
    "fedrep-figure5": Figure(
        figure5,
        "Local test error against local epochs E",
        "local epochs E: of the head (FedRep), of the update (FedAvg)",
        "mean local test error",
        True,
        "The paper: FedRep's performance is monotonically non-decreasing with E; more local updates do not necessarily improve FedAvg.",
        (1, 2, 5, 10),
    ),
    "fedrep-figure6": Figure(
        figure6,
        "New users' accuracy after training the head",
        "epochs of the new users' heads",
        "mean accuracy on held-out rows",
        False,
        f"The paper: FedRep is significantly better than what is compared. New users have at most {NEW_ROWS} rows.",
        (0, 1, 5, 10, NEW_EPOCHS),
    ),
}


def reproduce(name: str, seeds: int, output: Path, data: Path | None, console: Console) -> Sequence[Point]:
    """Measures what the folder `output` does not have, prints the table, and writes plot and numbers there."""
    figure = FIGURES[name]
    points: list[Point] = []
    with console.status("") as status:
        for seed in range(seeds):
            points += figure.measure(seed, output, data, status.update)
    values = _values(points, figure)
    lines = []
    for method, title in _TITLES.items():
        lines.append((title, *(f"{np.mean(values[method][x]):.3f}" for x in figure.shown)))
        if seeds > 1:
            lines.append(("  +-", *(f"{np.std(values[method][x], ddof=1):.3f}" for x in figure.shown)))
    which = f"seed 0, {points[0].data}" if seeds == 1 else f"seeds 0 to {seeds - 1}, {points[0].data}"
    console.print(table(f"{figure.title}, {which}", ("", *map(str, figure.shown)), lines))
    console.print(figure.said)
    if name == "fedrep-figure5" and points[0].data == "digits":
        console.print("These are scikit-learn's digits: the paper's CIFAR-10 needs --data DIR with cifar10_jpeg_train.npz and _test.npz.")
    _draw(values, figure, output / f"{name}.png")
    write_csv([field.name for field in fields(Point)], map(astuple, points), output / f"{name}.csv")
    console.print(f"\nplot: {output / name}.png\nnumbers: {output / name}.csv", soft_wrap=True)
    return points


def _values(points: Sequence[Point], figure: Figure) -> dict[str, dict[int, list[float]]]:
    """By method and x, one value for each seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for point in points:
        value = 1 - point.accuracy if figure.is_error else point.accuracy
        found.setdefault(point.method, {}).setdefault(point.epochs, []).append(value)
    return found


def _draw(values: dict[str, dict[int, list[float]]], figure: Figure, path: Path) -> None:
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415 - needs the extra `plots`

    from coterie_deploy.studies.reproduce.plots import BLUE, FONT, VERMILION  # noqa: PLC0415

    canvas = Canvas(figsize=(8, 5.5), layout="constrained")
    axes = canvas.subplots()
    for (method, title), colour, marker in zip(_TITLES.items(), (VERMILION, BLUE), ("o", "s"), strict=True):
        xs = sorted(values[method])
        means = [float(np.mean(values[method][x])) for x in xs]
        errors = [float(np.std(values[method][x])) for x in xs]
        axes.errorbar(xs, means, errors, color=colour, marker=marker, capsize=3, label=title)
    axes.set_xlabel(figure.x, fontsize=FONT)
    axes.set_ylabel(figure.y, fontsize=FONT)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(fontsize=FONT - 1, frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, dpi=150)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
