"""What is printed and written of the study: a table and a plot for each figure, and all numbers as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from coterie_deploy.studies.reproduce import curves
from coterie_deploy.studies.reproduce.curves import Curve, curve
from coterie_deploy.studies.reproduce.study import LAMS, Row
from coterie_deploy.terminal.tables import table

TITLES = {
    "global": "global model (1)",
    "local": "local models (2)",
    "squared": "squared (4), peak",
    "sum_of_norms": "sum of norms (3), peak",
    "oracle": "oracle",
}
# In the paper's text; it gives no other numbers.
PAPER = {"squared": "86.6 %", "sum_of_norms": "86.8 %"}
# Means over 8 other draws of data of this kind, found independently of this system.
OTHER_DRAWS = {"global": 0.482, "local": 0.872, "squared": 0.908, "sum_of_norms": 0.911, "oracle": 0.910}


def accuracy(rows: Sequence[Row], plot: Path, console: Console) -> None:
    """Figure 1: mean accuracy against the penalty."""
    from coterie_deploy.studies.reproduce import plots  # noqa: PLC0415 - needs the extra `plots`

    found = {method: curve(rows, method, curves.accuracy) for method in TITLES}
    lines = [_accuracy_line(method, found[method], rows) for method in TITLES]
    columns = ("", "accuracy", "+-", "penalty", "lambda (3)", "other draws", "paper")
    console.print(table(f"Mean accuracy, {_seeds(rows)}", columns, lines))
    exact = [row for row in rows if row.method == "sum_of_norms" and row.is_exact]
    for seed in sorted({row.seed for row in rows}):
        penalties = [row.penalty for row in exact if row.seed == seed]
        span = f"LAM from {min(penalties):g} to {max(penalties):g}" if penalties else "no LAM of the grid"
        console.print(f"seed {seed}: (3) has exactly the three clusters for {span}")
    console.print("The paper's data have them for lambda in (0.0892, 0.0919).")
    plots.accuracy(found, _n_users(rows), plot)


def compactness(rows: Sequence[Row], plot: Path, console: Console) -> None:
    """Figure 2: mean distance of two models in one cluster against the penalty, and the number of distinct models."""
    from coterie_deploy.studies.reproduce import plots  # noqa: PLC0415 - needs the extra `plots`

    both = ("sum_of_norms", "squared")
    distance = {method: curve(rows, method, curves.within) for method in (*both, "local")}
    number = {method: curve(rows, method, curves.clusters) for method in both}
    lines = [
        (
            f"{penalty:g}",
            f"{penalty / (2 * _n_users(rows)):.3g}",
            *(f"{distance[method].at(penalty):.5f}" for method in both),
            *(f"{number[method].at(penalty):.1f}" for method in both),
        )
        for penalty in LAMS
    ]
    columns = ("penalty", "lambda (3)", "distance (3)", "distance (4)", "models (3)", "models (4)")
    console.print(table(f"Mean distance within clusters, {_seeds(rows)}", columns, lines))
    nearer = [penalty for penalty in LAMS if distance["sum_of_norms"].at(penalty) < distance["squared"].at(penalty)]
    span = f"for penalties from {min(nearer):g} up" if nearer else "nowhere on the grid"
    console.print(f"(3) is more compact than (4) {span}; the paper finds it so for all penalties.")
    plots.compactness(distance, number, _n_users(rows), plot)


def _accuracy_line(method: str, found: Curve, rows: Sequence[Row]) -> tuple[str, ...]:
    penalty, mean = found.peak()
    error = found.error[int(found.mean.argmax())]
    where = (f"{penalty:g}", f"{penalty / (2 * _n_users(rows)):.3g}") if penalty else ("", "")
    return TITLES[method], f"{mean:.4f}", f"{error:.4f}", *where, f"{OTHER_DRAWS[method]:.3f}", PAPER.get(method, "")


def _seeds(rows: Sequence[Row]) -> str:
    seeds = sorted({row.seed for row in rows})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _n_users(rows: Sequence[Row]) -> int:
    row = next(row for row in rows if row.penalty)
    return round(row.penalty / (2 * row.lambda_eq3))
