"""Check of what a method does without the users of a lost host."""

from __future__ import annotations

import numpy as np

from coterie.errors import ConfigError
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.check.counts import check_counts
from coterie_deploy.studies.check.trial import Failed, NotApplicable, Trial
from coterie_deploy.studies.check.world import Leaving, World
from coterie_server.record.rundb import read_run
from coterie_server.run.absence import why_everyone
from coterie_server.run.plan import stages_of

_ABSENCE_S = 0.02  # until a host is given up: all others answer at once
_AWAY = 3  # exchanges
_ASKED = (
    "SELECT DISTINCT seq FROM ledger JOIN stages ON number = stage "
    "WHERE link = ? AND direction = 'down' AND step NOT IN ('standardize', 'describe', 'control') AND name IN ({}) ORDER BY seq"
)


def left_out(trial: Trial) -> str:
    """It refuses to, or goes on; and another run repeats that."""
    if trial.n_hosts == 1:
        raise NotApplicable("the federation has one user")
    rules = trial.experiment.federation.model_copy(update={"on_loss": "skip", "absence_timeout_s": _ABSENCE_S})
    experiment = trial.experiment.model_copy(update={"federation": rules})
    stages = stages_of(trial.experiment)
    name = trial.experiment.method.name
    first = next(place for place, stage in enumerate(stages) if stage.method == name)
    if why := next(filter(None, map(why_everyone, stages[first:])), ""):
        try:
            trial.run(trial.world(World, "refused", experiment=experiment))
        except ConfigError as error:
            if why not in str(error):
                raise Failed(f"the run is refused, but not since it needs every user: {error}") from error
            return f"it needs every user: {why}"
        raise Failed(f"method {name!r} needs every user ({why}), but on_loss 'skip' was not refused")
    tolerant = [stage.name for stage in stages[first:]]
    draws, leaver = np.random.default_rng(trial.seed), trial.hosts[1]
    with read_run(trial.calm.folder) as connection:
        asked = [seq for (seq,) in connection.execute(_ASKED.format(", ".join("?" * len(tolerant))), (leaver, *tolerant))]
    for comes_back in (True, False):
        lost_at = int(draws.choice(asked))
        back_at = lost_at + _AWAY if comes_back else 1 << 30
        where = f"when host {leaver!r} is lost in exchange {lost_at} and {'comes back' if comes_back else 'stays away'}"
        run = trial.run(trial.world(Leaving, "without", leaver, lost_at, back_at, experiment=experiment))
        with read_run(run.folder) as connection:
            if not connection.execute("SELECT COUNT(*) FROM decisions").fetchone()[0]:
                raise Failed(f"{where}, nobody is left out")
        verdict = verdict_on(run.folder)
        if not verdict.books.agree:
            raise Failed(f"{where}, {'; '.join(verdict.books.differences[:3])}")
        check_counts(verdict, where)
        again = trial.run(trial.world(World, "repeated", experiment=experiment, decisions_of=run.folder))
        if found := run.results.first_difference(again.results, with_counts=False):
            raise Failed(f"{where}, a run that repeats these decisions has other bits: {found}")
    return "it goes on without them"
