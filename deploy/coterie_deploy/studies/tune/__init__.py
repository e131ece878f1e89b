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

from coterie.errors import ConfigError
from coterie_deploy.studies.several import How, Wanted, run_all
from coterie_deploy.studies.tune.plan import MEMORY, Asked, Tuning, choose, fold_folder
from coterie_deploy.studies.tune.progress import tune_display
from coterie_deploy.studies.tune.result import Tuned, print_result, result_of, write_files
from coterie_deploy.terminal.signals import stopping_on_signals


def tune_here(tuning: Tuning, folder: Path, how: How, out: Console, err: Console, *, quiet: bool) -> Tuned:
    """Runs the folds that are not finished yet, writes what they found, and reports. Raises CoterieError.

    Asked to stop, it ends with a RunError that says how to go on.
    """
    MEMORY.write(tuning, folder)
    try:
        asyncio.run(_run(tuning, folder, how, err, quiet=quiet))
    except ConfigError:
        MEMORY.forget_unless_begun(folder)
        raise
    tuned = result_of(tuning, folder)
    write_files(tuned, tuning, folder)
    print_result(tuned, tuning, folder, out)
    return tuned


async def _run(tuning: Tuning, folder: Path, how: How, err: Console, *, quiet: bool) -> None:
    numbers = range(1, tuning.folds + 1)
    runs = [Wanted(f"fold {number}", fold_folder(folder, number), functools.partial(tuning.fold, number)) for number in numbers]
    with stopping_on_signals() as stop, tune_display(err, tuning.folds, len(tuning.entries), quiet=quiet) as shown:
        await run_all(runs, how, shown, stop, f"coterie tune {folder} --resume")


__all__ = ["Asked", "How", "Tuned", "Tuning", "choose", "tune_here"]
