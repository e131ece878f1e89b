"""`coterie tune`: settings of a method chosen by cross-validation on the clients.

Each user's training rows are divided into K folds (`data.fold`). The run of a fold trains at every point of a grid (`method.grid`) on the
rows of the other folds. Each point starts where the one before ended, and the users judge its models on the fold's rows. The coordinator
learns losses, and what the method itself sends. The point with the smallest mean loss is chosen. The test rows play no part, so they still
judge the chosen experiment fairly.
"""

import functools
from pathlib import Path

from rich.console import Console

from coterie_deploy.studies.series import How, Wanted
from coterie_deploy.studies.tune.plan import SERIES, Asked, Tuning, choose, fold_folder
from coterie_deploy.studies.tune.result import Tuned, print_result, result_of, write_files


def tune_here(tuning: Tuning, folder: Path, how: How, out: Console, err: Console, *, quiet: bool) -> Tuned:
    """Runs the folds that are not finished yet, writes what they found, and reports. Raises CoterieError.

    If a signal asks it to stop, it raises a RunError that says how to go on.
    """
    numbers = range(1, tuning.folds + 1)
    runs = [Wanted(f"fold {number}", fold_folder(folder, number), functools.partial(tuning.fold, number)) for number in numbers]
    names = [f"{run.name}/{len(runs)}" for run in runs]
    SERIES.make_here(tuning, folder, runs, how, err, names, n_points=len(tuning.entries), quiet=quiet)
    tuned = result_of(tuning, folder)
    write_files(tuned, tuning, folder)
    print_result(tuned, tuning, folder, out)
    return tuned


__all__ = ["Asked", "How", "Tuned", "Tuning", "choose", "tune_here"]
