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
from coterie_deploy.studies.compare.plan import MEMORY, Asked, Comparing, choose, run_folder
from coterie_deploy.studies.compare.result import Compared, print_result, result_of, write_files
from coterie_deploy.studies.several import How, Wanted, run_all
from coterie_deploy.studies.tune.progress import tune_display
from coterie_deploy.terminal.signals import stopping_on_signals


def compare_here(comparing: Comparing, folder: Path, how: How, out: Console, err: Console, *, quiet: bool) -> Compared:
    """Makes the runs that are not finished yet, writes what they have reached, and reports. Raises CoterieError.

    Asked to stop, it ends with a RunError that says how to go on.
    """
    MEMORY.write(comparing, folder)
    try:
        asyncio.run(_run(comparing, folder, how, err, quiet=quiet))
    except ConfigError:
        MEMORY.forget_unless_begun(folder)
        raise
    try:
        compared, mistake = result_of(comparing, folder), None
    except ConfigError as error:  # a target of a figure that there is not: what the runs have found is told all the same
        compared, mistake = result_of(replace(comparing, target=None), folder), error
    written = write_files(compared, folder)
    print_result(compared, comparing, written, out)
    if mistake is not None:
        raise mistake
    return compared


async def _run(comparing: Comparing, folder: Path, how: How, err: Console, *, quiet: bool) -> None:
    runs = [
        Wanted(f"{method}-{seed}", run_folder(folder, method, seed), functools.partial(comparing.experiment, method, seed))
        for method, seed in comparing.runs()
    ]
    runs.sort(key=lambda run: not is_finished(run.folder))  # what is left to do follows, so that the time it takes can be told
    with stopping_on_signals() as stop, tune_display(err, len(runs), 1, quiet=quiet, names=[run.name for run in runs]) as shown:
        await run_all(runs, how, shown, stop, f"coterie compare {folder} --resume")


__all__ = ["Asked", "Compared", "Comparing", "How", "choose", "compare_here"]
