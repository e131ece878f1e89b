"""What is printed and written of figures 1, 3 and 4 of Collins et al. (2021), which the paper prints without numbers.

The numbers beside the measured ones are medians over other draws of the same data, found independently of this system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from coterie.arrays import Array
from coterie_deploy.studies.reproduce.fedrep_linear import (
    ALGORITHMS,
    N_NEW,
    NEW_ROWS,
    ROWS,
    SIZES,
    Algorithm,
    Distances,
    Errors,
    Learner,
    figure1,
    figure3,
    figure4,
)
from coterie_deploy.studies.reproduce.files import write_csv
from coterie_deploy.terminal.tables import figure, table

NAMES = ("fedrep-figure1", "fedrep-figure3", "fedrep-figure4")
LEVELS = (0.1, 0.01, 0.001)  # distances to be reached
FLOOR = 10  # rounds at the end, over which the distance is averaged
ALGORITHM_TITLES: Mapping[Algorithm, str] = {"fedrep": "FedRep", "10gd_gd": "10GD-GD", "gd_gd": "GD-GD"}
LEARNER_TITLES: Mapping[Learner, str] = {"fedrep": "FedRep", "fedavg": "FedAvg", "local": "local models"}

# The distance at the start, the rounds to LEVELS, and the floor, for eta = 1.
OTHER_DRAWS_3: Mapping[tuple[Algorithm, int], tuple[str, ...]] = {
    ("fedrep", 100): (".44", "4", "10", "15", "4.2e-4"),
    ("fedrep", 500): (".21", "1", "4", "7", "1.8e-4"),
    ("fedrep", 1000): (".14", "1", "4", "6", "1.3e-4"),
    ("fedrep", 5000): (".06", "0", "3", "5", "5.5e-5"),
    ("10gd_gd", 100): (".44", "", "29", "", ""),
    ("10gd_gd", 500): (".21", "", "14", "", ""),
    ("10gd_gd", 1000): (".14", "", "10", "", ""),
    ("gd_gd", 100): (".44", "", "79", "", ""),
    ("gd_gd", 500): (".21", "", "54", "", ""),
    ("gd_gd", 1000): (".14", "", "46", "", ""),
}
# By m_new.
OTHER_DRAWS_4: Mapping[Learner, Mapping[int, str]] = {
    "fedrep": {1: ".94", 2: "3.3e-6", 3: "1.2e-6", 5: "5.4e-7", 10: "3.0e-7"},
    "fedavg": dict.fromkeys(NEW_ROWS, "about 2"),
    "local": {1: "1.95", 2: "1.86", 3: "1.74", 5: "1.52", 10: "1.0", 20: "4.5e-5"},
}


def reproduce(name: str, seeds: int, output: Path, console: Console) -> Sequence[Distances] | Sequence[Errors]:
    """Measures what the folder `output` does not have, prints the table, and writes plot and numbers there."""
    with console.status("") as status:
        if name == "fedrep-figure3":
            distances = [found for seed in range(seeds) for found in figure3(seed, output, status.update)]
        else:
            measure = figure1 if name == "fedrep-figure1" else figure4
            errors = [found for seed in range(seeds) for found in measure(seed, output, status.update)]
    if name == "fedrep-figure3":
        _show_figure3(distances, output / name, console)
        return distances
    show = _show_figure1 if name == "fedrep-figure1" else _show_figure4
    show(errors, output / name, console)
    return errors


def rounds_to(distances: Sequence[float], level: float) -> float:
    """The first round after which the distance is at most `level`, 0 for the start, infinity for none."""
    reached = np.flatnonzero(np.asarray(distances) <= level)
    return float(reached[0]) if reached.size else np.inf


def median_line(found: Sequence[Distances]) -> tuple[float, ...]:
    """Medians over the seeds: the distance at the start, the rounds to each of LEVELS, the floor."""
    rows = [
        (run.distances[0], *(rounds_to(run.distances, level) for level in LEVELS), float(np.mean(run.distances[-FLOOR:]))) for run in found
    ]
    return tuple(float(value) for value in np.median(rows, axis=0))


def errors_at(found: Sequence[Errors], learner: Learner, rows: int) -> Array:
    """The errors of all users of all seeds."""
    return np.concatenate([run.errors for run in found if (run.learner, run.rows) == (learner, rows)])


def _show_figure3(found: Sequence[Distances], stem: Path, console: Console) -> None:
    from coterie_deploy.studies.reproduce import fedrep_linear_plots  # noqa: PLC0415 - needs the extra `plots`

    curves: dict[int, dict[str, Array]] = {}
    lines = []
    for n_users in SIZES:
        for algorithm in ALGORITHMS:
            runs = [run for run in found if (run.algorithm, run.n_users) == (algorithm, n_users)]
            if not runs:
                continue
            start, *rounds, floor = median_line(runs)
            reached = (f"{value:g}" if np.isfinite(value) else f"> {len(runs[0].distances) - 1}" for value in rounds)
            lines.append((ALGORITHM_TITLES[algorithm], str(n_users), f"{start:.2f}", *reached, f"{floor:.1e}"))
            lines.append(("  other draws", "", *OTHER_DRAWS_3[algorithm, n_users]))
            curves.setdefault(n_users, {})[ALGORITHM_TITLES[algorithm]] = np.array([run.distances for run in runs])
    columns = ("", "n", "start", *(f"to {level:g}" for level in LEVELS), "floor")
    console.print(table(f"Distance of the representation, and rounds to a distance, {_seeds(found)}", columns, lines))
    console.print(
        f"Medians over the seeds; d = 10, k = 2, m = 5 fresh rows, r = .1, eta = 1. The floor is a mean over the last {FLOOR} rounds. "
        "The heads' steps of GD-GD and 10GD-GD are tuned; for n = 5000 only FedRep is run. The paper gives no numbers for its figure."
    )
    plot = stem.with_suffix(".png")
    fedrep_linear_plots.trajectories(curves, plot)
    numbered = ((run.seed, run.algorithm, run.n_users, *point) for run in found for point in enumerate(run.distances))
    write_csv(("seed", "algorithm", "n_users", "round", "distance"), numbered, stem.with_suffix(".csv"))
    _tell_paths(stem, console)


def _show_figure1(found: Sequence[Errors], stem: Path, console: Console) -> None:
    lines = [line for learner, title in LEARNER_TITLES.items() for line in _error_lines(found, learner, title, ROWS)]
    console.print(table(f"Median error by m, {_seeds(found)}", ("m", *map(str, ROWS)), lines))
    console.print(
        "The error of a user's model, of its m rows, is the mean squared error on new rows without noise. 100 users, d = 20, k = 2, "
        "r = .1, 200 rounds on the same rows. The paper gives no numbers for its figure: local models suffer where m is small, a single "
        "model (FedAvg) for any m, FedRep never. Of k = 2 rows a head fits all, and nothing is left to learn a representation from."
    )
    _finish_errors(found, stem, "rows of a user, $m$", ROWS, console)


def _show_figure4(found: Sequence[Errors], stem: Path, console: Console) -> None:
    lines = []
    for learner, title in LEARNER_TITLES.items():
        lines += _error_lines(found, learner, title, NEW_ROWS)
        lines.append(("  other draws", *(OTHER_DRAWS_4[learner].get(rows, "") for rows in NEW_ROWS)))
    console.print(table(f"Median error by m_new, {_seeds(found)}", ("m_new", *map(str, NEW_ROWS)), lines))
    console.print(
        "The error of a new user's model, of its m_new rows, is the mean squared error on new rows without noise. "
        f"{N_NEW} new users for each seed join what 100 others have learnt (coterie adapt); FedRep's and FedAvg's solve for a head. "
        "The paper gives no numbers for its figure."
    )
    _finish_errors(found, stem, "rows of a new user, $m_{new}$", NEW_ROWS, console)


def _error_lines(found: Sequence[Errors], learner: Learner, title: str, sizes: Sequence[int]) -> list[tuple[str, ...]]:
    quartiles = [np.quantile(errors_at(found, learner, rows), [0.25, 0.5, 0.75]) for rows in sizes]
    return [
        (title, *(figure(middle, 3) for _, middle, _ in quartiles)),
        ("  25 %", *(figure(low, 3) for low, _, _ in quartiles)),
        ("  75 %", *(figure(high, 3) for _, _, high in quartiles)),
    ]


def _finish_errors(found: Sequence[Errors], stem: Path, label: str, sizes: Sequence[int], console: Console) -> None:
    from coterie_deploy.studies.reproduce import fedrep_linear_plots  # noqa: PLC0415 - needs the extra `plots`

    curves = {title: {rows: errors_at(found, learner, rows) for rows in sizes} for learner, title in LEARNER_TITLES.items()}
    fedrep_linear_plots.errors(curves, label, stem.with_suffix(".png"))
    numbered = ((run.seed, run.learner, run.rows, *point) for run in found for point in enumerate(run.errors))
    write_csv(("seed", "learner", "rows", "user", "error"), numbered, stem.with_suffix(".csv"))
    _tell_paths(stem, console)


def _tell_paths(stem: Path, console: Console) -> None:
    console.print(f"\nplot: {stem}.png\nnumbers: {stem}.csv", soft_wrap=True)


def _seeds(found: Sequence[Distances] | Sequence[Errors]) -> str:
    seeds = sorted({run.seed for run in found})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
