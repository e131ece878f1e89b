"""`coterie compare`: methods on the same experiment from the same seeds, what each reaches, and what that costs.

Every method and seed is an ordinary run in a folder of its own, so all that looks at runs works on each of them.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from coterie.errors import ConfigError
from coterie_deploy.read.folders import is_finished
from coterie_deploy.studies.compare.plan import SERIES, Asked, Comparing, choose, run_folder
from coterie_deploy.studies.compare.result import Compared, print_result, result_of, write_files
from coterie_deploy.studies.progress import series_display
from coterie_deploy.studies.series import How, Shown, Wanted
from coterie_deploy.terminal.signals import Stop, stopping_on_signals


def compare_here(comparing: Comparing, folder: Path, how: How, out: Console, err: Console, *, quiet: bool) -> Compared:
    """Makes the runs that are not finished yet, writes what they have reached, and reports. Raises CoterieError.

    Asked to stop, it ends with a RunError that says how to go on.
    """

    async def make_all() -> None:
        with stopping_on_signals() as stop, series_display(err, names_shown(comparing, folder), quiet=quiet) as shown:
            await make_runs(comparing, folder, how, shown, stop)

    asyncio.run(make_all())
    try:
        compared, mistake = result_of(comparing, folder), None
    except ConfigError as error:  # a target of a figure that there is not: what the runs have found is told all the same
        compared, mistake = result_of(replace(comparing, target=None), folder), error
    written = write_files(compared, folder)
    print_result(compared, comparing, written, out)
    if mistake is not None:
        raise mistake
    return compared


def wanted(comparing: Comparing, folder: Path) -> list[Wanted]:
    """The runs of a comparison, finished ones first: so the time that the others take can be told."""
    runs = [
        Wanted(f"{method}-{seed}", run_folder(folder, method, seed), functools.partial(comparing.experiment, method, seed))
        for method, seed in comparing.runs()
    ]
    return sorted(runs, key=lambda run: not is_finished(run.folder))


def names_shown(comparing: Comparing, folder: Path) -> list[str]:
    """What a display calls the runs."""
    runs = wanted(comparing, folder)
    return [f"{run.name} ({number}/{len(runs)})" for number, run in enumerate(runs, start=1)]


async def make_runs(comparing: Comparing, folder: Path, how: How, shown: Shown, stop: Stop) -> None:
    """Remembers the comparison in its folder, and makes the runs that are not finished yet. Raises CoterieError."""
    await SERIES.make(comparing, folder, wanted(comparing, folder), how, shown, stop)


__all__ = ["Asked", "Compared", "Comparing", "How", "choose", "compare_here", "make_runs"]
