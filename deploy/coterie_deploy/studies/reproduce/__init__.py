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
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie.errors import ConfigError
from coterie.text.names import similar_names
from coterie_deploy.studies.reproduce import (
    convex_clustering,
    fedrep_linear,
    fedrep_networks,
    fedrep_table1,
    known_clusters,
    known_clusters_exams,
)
from coterie_deploy.studies.reproduce.study import Work, write_numbers
from coterie_deploy.view.pages import needed
from coterie_deploy.view.report_page import write_figure

_MODULES = (convex_clustering, known_clusters, known_clusters_exams, fedrep_linear, fedrep_networks, fedrep_table1)
STUDIES = {name: study for module in _MODULES for name, study in module.STUDIES.items()}


def names() -> list[str]:
    """What can be reproduced."""
    return list(STUDIES)


def reproduce(
    name: str, *, seeds: int = 8, output: Path, data: Path | None = None, columns: str | None = None, console: Console | None = None
) -> Sequence[Any]:
    """Runs what is not yet in the folder `output` for seeds 0, 1, ..., prints the table, and writes NAME.csv, and NAME.png for a plot.

    `data` is a folder with data that is not shipped; `columns` are those A,B of fedrep-table1, by default all that the data at hand
    allows. Returns the numbers behind it. Raises ConfigError for an unknown name or without the library that draws, before anything runs.
    """
    console = console or Console(highlight=False)
    if name not in STUDIES:
        similar = similar_names(name, names())
        raise ConfigError(f"cannot reproduce {name!r}, want one of {', '.join(similar or names())}")
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}, want at least 1")
    if columns is not None and name not in fedrep_table1.STUDIES:
        raise ConfigError(f"{name} has no columns to choose from: --columns is for {', '.join(fedrep_table1.STUDIES)}")
    needed("vl_convert", "report")
    study = STUDIES[name]
    with console.status("") as status:
        work = Work(output, data, columns, status.update)
        rows = [row for seed in range(seeds) for row in study.measure(seed, work)]
    study.show(rows, console)
    console.print()
    if study.chart is not None:
        plot = output / f"{name}.png"
        write_figure(study.chart(rows), plot)
        console.print(f"plot: {plot}", soft_wrap=True)
    numbers = output / f"{study.numbers or name}.csv"
    write_numbers(study, rows, numbers)
    console.print(f"numbers: {numbers}", soft_wrap=True)
    return rows


__all__ = ["names", "reproduce"]
