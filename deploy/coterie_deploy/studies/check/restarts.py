"""Checks that a method has the same bits after restarts: nothing survives a process but what a snapshot or a checkpoint holds."""

from __future__ import annotations

import os
import signal

import numpy as np

from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.check.counts import check_books, check_counts
from coterie_deploy.studies.check.results import results_of
from coterie_deploy.studies.check.trial import Failed, Trial
from coterie_deploy.studies.check.world import CoordinatorKilledError, Faults, World, random_faults
from coterie_server.record.rundb import read_run
from coterie_server.run.engine import Progress

_MAX_RESTARTS = 12  # exchanges at which somebody is restarted, of a longer run


def snapshots(trial: Trial) -> str:
    """Everybody is restarted from disk in turn, with a snapshot after each round."""
    often = trial.experiment.snapshots.model_copy(update={"every_rounds": 1})
    experiment = trial.experiment.model_copy(update={"snapshots": often})
    exchanges = np.arange(1, trial.n_exchanges + 1)
    if exchanges.size > _MAX_RESTARTS:
        exchanges = np.sort(np.random.default_rng(trial.seed).choice(exchanges, _MAX_RESTARTS, replace=False))
    listed = exchanges.tolist()
    names = trial.hosts * len(listed)
    faults = Faults(dict(zip(listed, names, strict=False)), dict(zip(listed, names[1:], strict=False)), tuple(listed))
    world = trial.world(World, "restarted", experiment=experiment, faults=faults, keeps_hosts=False)
    trial.compare(trial.run(world), "when everybody is restarted from disk now and then")
    return ""


def kills(trial: Trial) -> str:
    """Hosts and coordinator die at random exchanges."""
    for number, keeps_hosts in enumerate((True, False)):
        faults = random_faults(2 * trial.seed + number, trial.n_exchanges, trial.hosts)
        world = trial.world(World, "killed", faults=faults, keeps_hosts=keeps_hosts)
        run = trial.run(world)
        who = [f"{name} in exchange {seq}" for seq, name in {**faults.hosts_before, **faults.hosts_after}.items()]
        where = f"after kills of {', '.join(who)} and the coordinator in exchange {faults.coordinator[0]}"
        if not world.done:
            raise Failed("nobody could be killed: the run asks no host for anything")
        trial.compare(run, where)
        check_books(verdict_on(run.folder))
    return ""


class _Sword:
    """Kills a client process after one round, and the coordinator after another."""

    def __init__(self, seed: int, n_rounds: int, n_hosts: int) -> None:
        draws = np.random.default_rng(seed)
        self.first, self.second = sorted(int(number) for number in draws.integers(1, n_rounds, 2, endpoint=True))
        self.name = f"host-{draws.integers(1, n_hosts, endpoint=True)}"
        self.processes: dict[str, int] = {}
        self._n_rounds = 0

    def started(self, name: str, process: int) -> None:
        """A member is there."""
        self.processes[name] = process

    def after_round(self, _: Progress) -> None:
        """Strikes when it is time."""
        self._n_rounds += 1
        if self._n_rounds == self.first:
            os.kill(self.processes[self.name], signal.SIGKILL)
        if self._n_rounds == self.second:
            raise CoordinatorKilledError


def processes(trial: Trial) -> str:
    """A client process is killed, then the coordinator; the run is resumed."""
    with read_run(trial.calm.folder) as connection:
        n_rounds = int(connection.execute("SELECT SUM(rounds) FROM stages").fetchone()[0])
    sword = _Sword(trial.seed, n_rounds, trial.n_hosts)
    folder = trial.run_folder("processes")
    try:
        trial.launched(folder, trial.n_hosts, observer=sword.after_round, on_process=sword.started)
    except CoordinatorKilledError:
        finished = trial.launched(folder, trial.n_hosts, resume=True)
    else:
        raise Failed(f"the run ended before round {sword.second}, at which it ended undisturbed")
    where = f"after SIGKILL of a client process in round {sword.first} and a resume of the coordinator in round {sword.second}"
    trial.compare_results(results_of(finished, folder), where)
    verdict = verdict_on(folder)
    check_books(verdict)
    check_counts(verdict)
    return ""
