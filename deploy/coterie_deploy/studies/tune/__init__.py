"""`coterie tune`: settings of a method chosen by cross-validation on the clients.

Each user's training rows are dealt to K folds (`data.fold`). The run of a fold trains at every point of a grid (`method.grid`) on the rows
of the other folds, each point from where the one before ended, and the users judge its models on the fold's rows. The coordinator learns
what the method itself sends, and losses. The point with the smallest mean loss is chosen. The test rows play no part in it, so they still
judge the chosen experiment fairly.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from rich.console import Console

from coterie_deploy.studies.progress import series_display
from coterie_deploy.studies.series import How, Wanted
from coterie_deploy.studies.tune.plan import SERIES, Asked, Tuning, choose, fold_folder
from coterie_deploy.studies.tune.result import Tuned, print_result, result_of, write_files
from coterie_deploy.terminal.signals import stopping_on_signals


def tune_here(tuning: Tuning, folder: Path, how: How, out: Console, err: Console, *, quiet: bool) -> Tuned:
    """Runs the folds that are not finished yet, writes what they found, and reports. Raises CoterieError.

    Asked to stop, it ends with a RunError that says how to go on.
    """
    asyncio.run(_run(tuning, folder, how, err, quiet=quiet))
    tuned = result_of(tuning, folder)
    write_files(tuned, tuning, folder)
    print_result(tuned, tuning, folder, out)
    return tuned


async def _run(tuning: Tuning, folder: Path, how: How, err: Console, *, quiet: bool) -> None:
    numbers = range(1, tuning.folds + 1)
    runs = [Wanted(f"fold {number}", fold_folder(folder, number), functools.partial(tuning.fold, number)) for number in numbers]
    names = [f"{run.name}/{len(runs)}" for run in runs]
    with stopping_on_signals() as stop, series_display(err, names, len(tuning.entries), quiet=quiet) as shown:
        await SERIES.make(tuning, folder, runs, how, shown, stop)


__all__ = ["Asked", "How", "Tuned", "Tuning", "choose", "tune_here"]
