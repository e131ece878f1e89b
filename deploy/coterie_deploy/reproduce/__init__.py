"""Papers' figures made again: the numbers in a table beside the printed ones, plots, and a CSV file.

`convex-clustering-figure1` and `-figure2` are figures 1 and 2 of Armacki, Bajovic, Jakovetic and Kar (2022). The paper does not give its
ellipses, so the data are of the same kind and not the same; curves compare, digits need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from coterie.errors import ConfigError
from coterie.names import similar_names
from coterie_deploy.reproduce import report
from coterie_deploy.reproduce.study import Row, rows_of_seed

FIGURES = {"convex-clustering-figure1": report.accuracy, "convex-clustering-figure2": report.compactness}


def names() -> list[str]:
    """What can be reproduced."""
    return list(FIGURES)


def reproduce(name: str, *, seeds: int = 8, output: Path, console: Console | None = None) -> Sequence[Row]:
    """Runs what is not yet in the folder `output` for seeds 0, 1, ..., prints the table, and writes NAME.png and convex-clustering.csv.

    Returns the numbers behind it. Raises ConfigError for an unknown name or without matplotlib, before anything runs.
    """
    console = console or Console(highlight=False)
    if name not in FIGURES:
        similar = similar_names(name, FIGURES)
        raise ConfigError(f"cannot reproduce {name!r}, want one of {', '.join(similar or FIGURES)}")
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}, want at least 1")
    _need_matplotlib()
    rows: list[Row] = []
    with console.status("") as status:
        for seed in range(seeds):
            status.update(f"seed {seed}: federated runs of (1), (2), the oracle, (3) and (4), {seed} of {seeds} seeds done")
            rows += rows_of_seed(seed, output)
    FIGURES[name](rows, output / f"{name}.png", console)
    report.write_csv(rows, output / "convex-clustering.csv")
    console.print(f"\nplot: {output / name}.png\nnumbers: {output / 'convex-clustering.csv'}", soft_wrap=True)
    return rows


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra; only this command needs it
    except ImportError:
        raise ConfigError('plots need matplotlib, which is not installed: pip install "coterie[plots]"') from None


__all__ = ["Row", "names", "reproduce"]
