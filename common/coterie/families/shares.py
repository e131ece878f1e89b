"""Noise of hosts in masked sums (`privacy.where: hosts`), as an experiment says. See `coterie.draws.shares`."""

from __future__ import annotations

from coterie.draws.shares import Shares
from coterie.experiment.config import Experiment
from coterie.experiment.privacy import Draws
from coterie.families.masking import rules_of
from coterie.masked.graph import least
from coterie.wire.fixed_point import Form

# A round as it counts. The coordinator knows which users it draws, so a draw makes epsilon no smaller: each user counts in each round.
EACH_ROUND = Draws(1, 1.0)


def n_noised(experiment: Experiment) -> int:
    """How many hosts a total is of at least, each with its share of the noise. Hosts refuse totals of fewer (`coterie.masked.roster`)."""
    rules = rules_of(experiment, "host")
    return rules.fewest or least(rules.hosts, rules.fraction)


def shares_of(experiment: Experiment) -> Shares | None:
    """The noise of an experiment; None where hosts add none to sums. ConfigError if no noise is enough for `privacy.epsilon`."""
    privacy = experiment.privacy
    if privacy is None or not privacy.is_shared:
        return None
    return Shares(privacy.clip, privacy.multiplier(EACH_ROUND, experiment.stop.rounds), n_noised(experiment))


def shared(n_hosts: int) -> str:
    """Whose the noise is, and what hosts that help the coordinator make of it: a clause."""
    said = f"it is that of {n_hosts} hosts, and a total is of as many or more"
    return f"{said}: of A hosts, t of whom help the coordinator, sqrt((A - t) / {n_hosts}) times the noise is left"


def form_of(shares: Shares) -> Form:
    """How totals are written."""
    return Form(0, shares.bits, 0)
