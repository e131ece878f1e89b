"""Reproduced figures and tables of papers: a table beside the printed numbers, plots, and a CSV file.

`convex-clustering-figure1` and `-figure2` are figures 1 and 2 of Armacki, Bajovic, Jakovetic and Kar (2022). The paper does not give its
ellipses, so the data are of the same kind but not the same: compare the curves, not the digits.
`convex-clustering-scaling` is the path on half-moon points of Touw, Groenen and Terada (2022): time, gap and clusters at each penalty.
`known-clusters-table1` and `-figure1` are those of Lyu, Hanzely and Kolar (2022), whose simulated data are given. `-table2` stands for
their tables 2 and 3 and figure 2, whose data are not public, on public data.
`fedrep-figure1`, `-figure3` and `-figure4` are those of Collins, Hassani, Mokhtari and Shakkottai (2021), whose simulated data are given.
`fedrep-figure5`, `-figure6` and `-table1` are theirs on the data that is available.
`private-silos` is figure 3 (c) of Liu, Hu, Wu and Smith (2022) at epsilon 6, on their data.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie.errors import ConfigError, RunError
from coterie.extras import needed
from coterie.text.names import similar_names
from coterie_deploy.engines.api import outside_of_loops
from coterie_deploy.roles.server import with_advice
from coterie_deploy.studies.reproduce import (
    convex_clustering,
    fedrep_linear,
    fedrep_networks,
    fedrep_table1,
    half_moons,
    known_clusters,
    known_clusters_exams,
    private_silos,
)
from coterie_deploy.studies.reproduce.study import Part, Plan, Work
from coterie_deploy.studies.side_by_side import Pool, cores, here
from coterie_deploy.terminal.signals import stopping_on_signals
from coterie_deploy.terminal.waiting import waiting
from coterie_deploy.view.report_page import write_figure

_MODULES = (
    convex_clustering,
    half_moons,
    known_clusters,
    known_clusters_exams,
    fedrep_linear,
    fedrep_networks,
    fedrep_table1,
    private_silos,
)
STUDIES = {name: study for module in _MODULES for name, study in module.STUDIES.items()}


def names() -> list[str]:
    """What can be reproduced."""
    return list(STUDIES)


def reproduce(
    name: str,
    *,
    seeds: int = 8,
    output: Path,
    data: Path | None = None,
    columns: str | None = None,
    jobs: int | None = 1,
    console: Console | None = None,
) -> Sequence[Any]:
    """Runs what the folder `output` does not have yet for seeds 0, 1, ..., prints the table, and writes NAME.csv, and NAME.png for a plot.

    `jobs` parts are measured at a time, None: one for each core.
    `data` is a folder with data that is not shipped. `columns` are those A,B of fedrep-table1, by default all that the data allow.
    Returns the measured rows. Raises ConfigError for an unknown name or without the library that draws, before anything runs.
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
    with waiting(Console(stderr=True, highlight=False), name) as say:
        jobs = cores() if jobs is None else jobs
        if jobs > 1:
            outside_of_loops(lambda: asyncio.run(_side_by_side(jobs, name, range(seeds), Work(output, data, columns, say))))
        rows = [row for seed in range(seeds) for row in study.measure(seed, Work(output, data, columns, say))]
    study.show(rows, console)
    console.print()
    if study.chart is not None:
        plot = output / f"{name}.png"
        write_figure(study.chart(rows), plot)
        console.print(f"plot: {plot}", soft_wrap=True)
    numbers = output / f"{study.numbers or name}.csv"
    study.write_numbers(rows, numbers)
    console.print(f"numbers: {numbers}", soft_wrap=True)
    return rows


async def _side_by_side(jobs: int, name: str, seeds: Iterable[int], work: Work) -> None:
    """Measures what the folder does not have, so many parts at a time. A signal ends all at once; what was measured is kept."""
    parts: dict[str, int] = {}  # the seed of each
    for seed in seeds:
        plan = Plan(work.folder, work.data, work.columns)
        STUDIES[name].measure(seed, plan)
        parts |= {part: seed for part in plan.missing if part not in parts}
    if len(parts) < 2:
        return
    under_way: dict[int, str] = {}

    def heard(number: int, said: str | None) -> None:
        under_way[number] = said or under_way.get(number, "starting")
        work.say("; ".join(under_way.values()))

    pool = Pool(jobs, _measured, heard, lambda number: under_way.pop(number, None))
    calls = {number: (name, seed, work.folder, work.data, work.columns, part) for number, (part, seed) in enumerate(parts.items())}
    with stopping_on_signals() as stop:
        try:
            await pool.results(calls, dict(enumerate(parts)), stop, 0.0)
        except RunError as error:
            raise with_advice(error, stop, "the same command goes on with what was measured") from None


def _measured(name: str, seed: int, folder: Path, data: Path | None, columns: str | None, part: str) -> None:
    """A part in a process of the pool."""
    STUDIES[name].measure(seed, Part(folder, data, columns, here.tell, part))


__all__ = ["names", "reproduce"]
