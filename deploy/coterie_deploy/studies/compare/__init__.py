"""`coterie compare`: methods, or settings of a method, on the same experiment from the same seeds: what each reaches, and what that costs.

Every row and seed is an ordinary run in a folder of its own, so all commands for runs work on each of them.
"""

import functools
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from coterie.errors import ConfigError
from coterie_deploy.read.folders import is_finished
from coterie_deploy.studies.compare.plan import SERIES, Asked, Comparing, choose, number_of_runs, run_folder
from coterie_deploy.studies.compare.result import Compared, print_result, result_of, write_files
from coterie_deploy.studies.compare.vary import parsed
from coterie_deploy.studies.series import How, Wanted


def compare_here(comparing: Comparing, folder: Path, how: How, out: Console, err: Console, *, quiet: bool) -> Compared:
    """Makes the runs that are not finished yet, writes what they have reached, and reports. Raises CoterieError.

    If a signal asks it to stop, it raises a RunError that says how to go on.
    """
    if comparing.vary and not quiet:
        print(number_of_runs(comparing), file=err.file, flush=True)
    SERIES.make_here(comparing, folder, wanted(comparing, folder), how, err, names_shown(comparing, folder), quiet=quiet)
    try:
        compared, mistake = result_of(comparing, folder), None
    except ConfigError as error:  # no run has the target's figure: the other results are printed all the same
        compared, mistake = result_of(replace(comparing, target=None), folder), error
    print_result(compared, comparing, write_files(compared, folder), out)
    if mistake is not None:
        raise mistake
    return compared


def wanted(comparing: Comparing, folder: Path) -> list[Wanted]:
    """The runs of a comparison. Finished ones come first, so the display can estimate the time of the others."""
    runs = [
        Wanted(f"{row.folder}-{seed}", run_folder(folder, row, seed), functools.partial(comparing.experiment, row.name, seed))
        for row, seed in comparing.runs()
    ]
    return sorted(runs, key=lambda run: not is_finished(run.folder))


def names_shown(comparing: Comparing, folder: Path) -> list[str]:
    """The names of the runs in a display."""
    runs = wanted(comparing, folder)
    return [f"{run.name} ({number}/{len(runs)})" for number, run in enumerate(runs, start=1)]


__all__ = ["Asked", "Compared", "Comparing", "How", "choose", "compare_here", "parsed"]
