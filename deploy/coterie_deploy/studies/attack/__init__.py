"""`coterie attack`: a drill. Runs of an experiment in this process, in which some hosts lie, with each rule of `federation.robust`.

The lying is done to the hosts of the drill (`lies`). No file, option or message makes a host of a real run lie.
"""

from pathlib import Path

from rich.console import Console

from coterie_deploy.studies.attack.plan import SERIES, Asked, Attacking, choose
from coterie_deploy.studies.attack.result import print_result, result_of, write_files
from coterie_deploy.studies.series import How


def attack_here(attacking: Attacking, folder: Path, how: How, out: Console, err: Console, *, quiet: bool) -> None:
    """Makes the runs that are not finished yet, and prints what they have reached. Raises CoterieError."""
    runs = attacking.wanted(folder)
    names = [f"{run.name} ({number}/{len(runs)})" for number, run in enumerate(runs, start=1)]
    SERIES.make_here(attacking, folder, runs, how, err, names, quiet=quiet)
    attacked = result_of(attacking, folder)
    print_result(attacked, attacking, write_files(attacked, attacking, folder), out)


__all__ = ["Asked", "Attacking", "How", "attack_here", "choose"]
