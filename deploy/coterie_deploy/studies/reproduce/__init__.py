"""Papers' figures made again: the numbers in a table beside the printed ones, plots, and a CSV file.

`convex-clustering-figure1` and `-figure2` are figures 1 and 2 of Armacki, Bajovic, Jakovetic and Kar (2022). The paper does not give its
ellipses, so the data are of the same kind and not the same; curves compare, digits need not.
`known-clusters-table1` and `-figure1` are those of Lyu, Hanzely and Kolar (2022), whose simulated data are given; `-table2` has their
tables 2 and 3 and figure 2 on public data, since theirs are not.
`fedrep-figure1`, `-figure3` and `-figure4` are those of Collins, Hassani, Mokhtari and Shakkottai (2021), whose simulated data are given;
`fedrep-figure5`, `-figure6` and `-table1` are theirs on data at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

from rich.console import Console

from coterie.errors import ConfigError
from coterie.text.names import similar_names
from coterie_deploy.studies.reproduce import (
    fedrep_linear_report,
    fedrep_networks_report,
    fedrep_table1_report,
    known_clusters,
    known_clusters_exams,
    known_clusters_exams_report,
    known_clusters_report,
    report,
)
from coterie_deploy.studies.reproduce.fedrep_linear import Distances, Errors
from coterie_deploy.studies.reproduce.fedrep_networks import Point
from coterie_deploy.studies.reproduce.fedrep_table1 import Score
from coterie_deploy.studies.reproduce.files import write_csv
from coterie_deploy.studies.reproduce.study import Row, rows_of_seed

FIGURES = {"convex-clustering-figure1": report.accuracy, "convex-clustering-figure2": report.compactness}
# The sizes m of users to run, and what to do with the numbers.
KNOWN_CLUSTERS = {
    "known-clusters-table1": (known_clusters_report.TABLE1_SIZES, known_clusters_report.table1),
    "known-clusters-figure1": (known_clusters_report.FIGURE1_SIZES, known_clusters_report.figure1),
}
EXAMS = "known-clusters-table2"
AnyRow = Row | known_clusters.Row | known_clusters_exams.Scores | Distances | Errors | Point | Score


def names() -> list[str]:
    """What can be reproduced."""
    return [*FIGURES, *KNOWN_CLUSTERS, EXAMS, *fedrep_linear_report.NAMES, *fedrep_networks_report.FIGURES, fedrep_table1_report.NAME]


def reproduce(
    name: str, *, seeds: int = 8, output: Path, data: Path | None = None, columns: str | None = None, console: Console | None = None
) -> Sequence[AnyRow]:
    """Runs what is not yet in the folder `output` for seeds 0, 1, ..., prints the table, and writes NAME.csv, and NAME.png for a plot.

    `data` is a folder with data that is not shipped; `columns` are those A,B of fedrep-table1, by default all that the data at hand
    allows. Returns the numbers behind it. Raises ConfigError for an unknown name or without matplotlib, before anything runs.
    """
    console = console or Console(highlight=False)
    if name not in names():
        similar = similar_names(name, names())
        raise ConfigError(f"cannot reproduce {name!r}, want one of {', '.join(similar or names())}")
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}, want at least 1")
    if columns is not None and name != fedrep_table1_report.NAME:
        raise ConfigError(f"{name} has no columns to choose from: --columns is for {fedrep_table1_report.NAME}")
    _need_matplotlib()
    if name in KNOWN_CLUSTERS:
        return _known_clusters(name, seeds, output, console)
    if name == EXAMS:
        return _exams(seeds, output, console)
    if name in fedrep_linear_report.NAMES:
        return fedrep_linear_report.reproduce(name, seeds, output, console)
    if name in fedrep_networks_report.FIGURES:
        return fedrep_networks_report.reproduce(name, seeds, output, data, console)
    if name == fedrep_table1_report.NAME:
        return fedrep_table1_report.reproduce(seeds, output, data, console, columns)
    rows: list[Row] = []
    with console.status("") as status:
        for seed in range(seeds):
            status.update(f"seed {seed}: federated runs of (1), (2), the oracle, (3) and (4), {seed} of {seeds} seeds done")
            rows += rows_of_seed(seed, output)
    FIGURES[name](rows, output / f"{name}.png", console)
    write_csv([field.name for field in fields(Row)], map(astuple, rows), output / "convex-clustering.csv")
    console.print(f"\nplot: {output / name}.png\nnumbers: {output / 'convex-clustering.csv'}", soft_wrap=True)
    return rows


def _known_clusters(name: str, seeds: int, output: Path, console: Console) -> Sequence[known_clusters.Row]:
    sizes, show = KNOWN_CLUSTERS[name]
    rows: list[known_clusters.Row] = []
    with console.status("") as status:
        for seed in range(seeds):
            for m in sizes:
                status.update(f"seed {seed} of 0 to {seeds - 1}, m = {m}: federated runs of the estimators")
                rows += known_clusters.rows_of(seed, m, output)
    show(rows, output, console)
    return rows


def _exams(seeds: int, output: Path, console: Console) -> Sequence[known_clusters_exams.Scores]:
    rows: list[known_clusters_exams.Scores] = []
    with console.status("") as status:
        for seed in range(seeds):
            status.update(f"seed {seed} of 0 to {seeds - 1}: federated runs of the four estimators")
            rows += known_clusters_exams.rows_of(seed, output)
    known_clusters_exams_report.table2(rows, output, console)
    return rows


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra; only this command needs it
    except ImportError:
        raise ConfigError('plots need matplotlib, which is not installed: pip install "coterie[plots]"') from None


__all__ = ["Row", "names", "reproduce"]
