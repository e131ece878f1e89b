"""Averages of known clusters with noise, which protect each user from all others, with `privacy.unit: user`.

    bar_j = r_j + (sum_i gamma_i clip(theta_i - r_j; C) + s C max_i gamma_i z) / Gamma_j,   z standard normal

r_j is the average that the cluster had before, which has noise already (0 at first). So a user moves the sum by max gamma_i C at most. All
that users receive follows from these averages: the average over all clusters is a sum of them. Models depend on earlier averages, under
which the Gaussian mechanism composes all the same. A user is in one cluster, so what counts is the cluster with the most averages.

Coins are public, hence no draw makes epsilon smaller, and the averages that a schedule needs can be counted before the run: those before
which users have made a local step, and all where no average is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.secret import Secret, digest
from coterie.experiment.privacy import Draws, Privacy
from coterie.families.schedule import Schedule
from coterie_server.families.coin_counts import moves
from coterie_server.families.known_clusters import Clusters, averages_of


@dataclass(frozen=True)
class ClusterNoise:
    """Clip C, noise multiplier s, and the key of a stage."""

    clip: float
    multiplier: float
    secret: Secret

    def averages(self, clusters: Clusters, places: Indices, models: Array, before: Array, at: Indices) -> Array:
        """(m, d) as `averages_of`, with noise: `before` (m, d) are the averages that the clusters at `places` had, `at` (m,) iterations.

        Noise depends on the key, the iteration and the sum. A model that is no number counts as the average before.
        """
        place = clusters.segments.place[np.isin(clusters.segments.place, places)]
        reference = before[np.searchsorted(places, place)]
        change = models - reference
        lengths = np.linalg.norm(change, axis=1)
        factors = np.where(np.isfinite(lengths), self.clip / np.maximum(lengths, self.clip), 0.0)
        found = averages_of(clusters, places, reference + np.where(factors > 0, factors, 0.0)[:, None] * np.nan_to_num(change))
        most = clusters.segments.maxima(clusters.gamma)[places]
        sums = clusters.gamma_sums[places]
        scale = self.multiplier * self.clip * np.divide(most, sums, out=np.zeros_like(sums), where=sums > 0)
        for row, number in enumerate(clusters.numbers[places].tolist()):
            key = self.secret.child("cluster", number, int(at[row]), digest(found[row].tobytes(), before[row].tobytes()))
            found[row] += scale[row] * key.numbers().normal(found.shape[1])
        return found


def n_averages(schedule: Schedule, clusters: Clusters, reuse: Indices, stop: int) -> int:
    """How many averages the cluster with the most has before iteration `stop`."""

    def of_clusters() -> Iterator[float]:
        for number, each in zip(clusters.numbers.tolist(), reuse.tolist(), strict=True):
            operations = schedule.operations(number, 0, stop)
            yield moves(operations, np.zeros(operations.size, dtype=np.bool_), each).up

    return int(max(of_clusters())) if stop else 0


def multiplier_of(privacy: Privacy, schedule: Schedule, clusters: Clusters, reuse: Indices, iterations: int) -> float:
    """The noise multiplier of a stage with so many iterations."""
    return privacy.multiplier(Draws(max(1, n_averages(schedule, clusters, reuse, iterations)), 1.0), 1)
