"""How much `async_al2sgd` communicates: for the coins of a seed, and in the mean over coins, with its deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.families.schedule import schedule_by
from coterie.methods.async_al2sgd import recorded_refreshes
from coterie_server.families import coin_counts, known_clusters
from coterie_server.families.coin_counts import NO_REUSE
from coterie_server.families.known_clusters import Clusters
from coterie_server.families.partial import last_of
from coterie_server.interface.half import Counts
from coterie_server.methods.async_al2sgd.rates import Rates, refresh_coin
from coterie_server.record.rundb import BETWEEN, WITHIN

_COUNTED = ("between_rounds", "anchor_rounds", "within_vectors", "within_targets")


@dataclass(frozen=True)
class ClosedForms:
    """The counts of one stage. `hosts` (k,) are the client hosts of each cluster; `is_warm`: the first iteration has an anchor."""

    clusters: Clusters
    hosts: Indices
    d: int
    iterations: int
    coins: Sequence[Sequence[Any]] | None  # recorded
    is_warm: bool
    collects: bool
    is_exact: bool  # whether hosts send sums

    @property
    def senders(self) -> Indices:
        """(k,) how many vectors come up from a cluster that averages: of its users, or sums of its hosts."""
        return self.hosts if self.is_exact else self.clusters.sizes

    def expected_rounds(self, rates: Rates, n: int) -> dict[str, float]:
        """How often clusters average in n iterations, alone and together. No average is reused; an anchor at the end is not shared."""
        anchors = rates.rho * min(n, self.iterations - 1) + self.is_warm
        within = n * (1 - rates.p0) * rates.p
        return {
            "between_rounds_expected": n * rates.p0,
            "anchor_rounds_expected": anchors,
            "within_rounds_expected": float(within.sum()),
            "within_vectors_expected": float((self.senders * (n * rates.p0 + within)).sum()),  # theta_i up for averages
            "within_targets_expected": float((self.hosts * (n * rates.p0 + within)).sum()),  # and what is subtracted down to hosts
        }

    def drawn_rounds(self, rates: Rates, seed: int) -> dict[str, float]:
        """The same for the coins of this seed, or those recorded."""
        n = self.iterations
        schedule = schedule_by(seed, rates.p0, rates.p, self.clusters.numbers, self.coins)
        operations = [schedule.operations(number, 0, n) for number in self.clusters.numbers.tolist()]
        needs_bar = coin_counts.needed(operations, is_reusable=False)
        averages = np.array([coin_counts.moves(ops, needs_bar, NO_REUSE).up for ops in operations])
        refreshes = refresh_coin(seed, rates.rho, recorded_refreshes(self.coins)).flips(0, n - 1)
        return {
            "between_rounds_drawn": float(needs_bar.sum()),
            "anchor_rounds_drawn": float(refreshes.sum()) + self.is_warm,
            "within_vectors_drawn": float((self.senders * averages).sum()),
            "within_targets_drawn": float((self.hosts * averages).sum()),
        }

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """A pair's vector up and an average down for each cluster and global round or anchor; x_i up for each user and anchor.

        Each host of a cluster receives the vector that an averaging iteration subtracts, and both averages of an anchor.
        """
        means = (last_of(figures, f"{name}_expected") for name in _COUNTED)
        return {**self._averages(*means), **self._fixed_counts(figures)[0]}

    def spread_of_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Standard deviations over the coins, of binomial counts with these means; inside clusters, which share a coin, a bound.

        The bound is that of clusters which all make the same choices, with the mean of their probabilities.
        """
        n, users, hosts = last_of(figures, "iteration"), float(self.senders.sum()), float(self.hosts.sum())
        units = dict(zip(_COUNTED, (1.0, 1.0, users, hosts), strict=True))
        means = {name: last_of(figures, f"{name}_expected") / unit for name, unit in units.items()}
        means["anchor_rounds"] -= self.is_warm  # no coin decides the first anchor
        spread = {name: max(mean * (1 - mean / n), 0.0) ** 0.5 if n else 0.0 for name, mean in means.items()}
        return self._averages(*(unit * spread[name] for name, unit in units.items()))

    def drawn_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """For the coins of this seed, or those recorded; nothing for a stage that was stopped early."""
        if not figures or "within_vectors_drawn" not in figures[-1]:
            return {}
        return self._averages(*(figures[-1][f"{name}_drawn"] for name in _COUNTED))

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Two constants of each user up, and their extremes for each cluster; nine parameters down to each cluster, and on to its hosts.

        With these goes gamma_i to each user. Then the objective, and the end.
        """
        n_hosts, n_users, k = float(self.hosts.sum()), self.clusters.gamma.size, self.clusters.size
        return {
            ("parameters", "up", BETWEEN): 2.0 * k,
            ("parameters", "up", WITHIN): 2.0 * n_users,
            ("parameters", "down", BETWEEN): 9.0 * k,
            ("parameters", "down", WITHIN): 9 * n_hosts + n_users,
            **self._fixed_counts(figures)[1],
        }

    def _averages(self, between: float, anchors: float, models: float, targets: float) -> dict[tuple[str, ...], float]:
        """The counts of averaging by step and direction."""
        k, n_up = self.clusters.size, float(self.senders.sum())
        both: dict[tuple[str, ...], float] = {("between-average", way, BETWEEN): k * between for way in ("up", "down")}
        both |= {("between-anchor", way, BETWEEN): k * anchors for way in ("up", "down")}
        anchor_down = 2 * float(self.hosts.sum()) * anchors
        averages: dict[tuple[str, ...], float] = {("within-average", "up"): models, ("within-average", "down"): targets}
        return both | averages | {("within-anchor", "up"): n_up * anchors, ("within-anchor", "down"): anchor_down}

    def _fixed_counts(self, figures: Sequence[Mapping[str, float]]) -> tuple[Counts, Counts]:
        return known_clusters.fixed_counts(self.clusters, self.d, figures, self.hosts, collects=self.collects, is_exact=self.is_exact)
