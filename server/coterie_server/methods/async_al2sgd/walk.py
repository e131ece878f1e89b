"""How an aggregator takes its cluster through the iterations of Algorithm 2 that need nothing from the other clusters.

Lyu, Hanzely and Kolar (2022); see `coterie.methods.async_al2sgd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.coins import first
from coterie.families.schedule import LOCAL, Schedule, combined
from coterie.methods.async_al2sgd import (
    ANCHOR,
    MESSAGES,
    NOTHING,
    THETA,
    Advance,
    AnchorAverages,
    Anchors,
    AnchorSums,
    GlobalAnchor,
    Parameters,
    Steps,
)
from coterie.wire.messages import Message, PerCluster, select_clusters
from coterie_server.families.known_clusters import Clusters, Wish, averaged
from coterie_server.interface.half import Federation


@dataclass(frozen=True)
class ClusterHalfState:
    """The state of c clusters."""

    at: Indices  # (c,) the next iteration
    average: Array  # (c, d) the newest average, of theta or of x
    within_rounds: Indices  # (c,) how often the cluster has averaged on its own
    traced: Array  # (c, d) bar_j of the latest trace, with exact sums
    left: Indices  # (n,) how often a rule has left each user out; empty without one
    parameters: Parameters | None = None


class Walk:
    """Takes some clusters from their iterations to those that the coordinator wants.

    A leg of a cluster is (iteration to go to, wanted there): at most one averaging iteration, whose target is known, then local ones.
    """

    def __init__(self, clusters: Clusters, schedule: Schedule, parameters: Parameters, state: ClusterHalfState, *, is_exact: bool) -> None:
        self._clusters, self._schedule, self._p, self._before, self._is_exact = clusters, schedule, parameters, state, is_exact
        self._at, self._average, self._within_rounds = state.at.copy(), state.average.copy(), state.within_rounds.copy()
        self._left = state.left.copy()
        self._targets: dict[int, Array] = {}  # by place: the vector that the next iteration subtracts
        self._answered = np.zeros(clusters.size, dtype=np.bool_)

    async def to(
        self, go: Advance, inbox: Mapping[type[Message], Message], federation: Federation
    ) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Walks in waves: in each, all clusters that are not done take a leg."""
        extra: list[PerCluster] = []
        if isinstance(anchor := inbox.get(GlobalAnchor), GlobalAnchor):
            extra.append(AnchorAverages(self._clusters.numbers, self._average, anchor.average))
        if isinstance(news := inbox.get(MESSAGES.global_average), MESSAGES.global_average):
            self._targets = {
                place: combined(float(self._p.alpha[place]), float(self._p.tau[place]), self._average[place], bar)
                for place, bar in enumerate(news.average)
            }
        while (pending := np.flatnonzero((self._at < go.until) | ((go.wanted != NOTHING) & ~self._answered))).size:
            legs = {place: self._leg(place, int(go.until[place]), int(go.wanted[place])) for place in pending.tolist()}
            # A sum is over all users who are asked: those of clusters with other wishes are asked apart.
            for wishes in ((NOTHING,), (THETA,), (ANCHOR,)) if self._is_exact else ((NOTHING, THETA, ANCHOR),):
                if some := {place: leg for place, leg in legs.items() if leg[1] in wishes}:
                    mine = [part for one in extra if (part := select_clusters(one, self._clusters.numbers[list(some)])) is not None]
                    await self._wave(some, go.until, mine, federation)
            extra = []
        state = ClusterHalfState(self._at, self._average, self._within_rounds, self._before.traced, self._left, self._p)
        wanted = int(go.wanted[0])
        if wanted == NOTHING:
            return state, []
        weight = self._clusters.alpha * self._clusters.gamma_sums
        sums = MESSAGES.cluster_sums if wanted == THETA else AnchorSums
        return state, [sums(self._clusters.numbers, weight[:, None] * self._average, weight)]

    def _leg(self, place: int, until: int, wanted: int) -> tuple[int, int]:
        at = int(self._at[place])
        averages = self._schedule.operations(int(self._clusters.numbers[place]), at, until) != LOCAL
        n_ready = 1 if place in self._targets else 0
        stop = first(averages[n_ready:], at + n_ready) if averages.size else until
        return stop, THETA if stop < until else wanted

    async def _wave(self, legs: Mapping[int, tuple[int, int]], until: Indices, extra: Sequence[Message], federation: Federation) -> None:
        numbers, places = self._clusters.numbers, np.array(list(legs), dtype=np.int64)
        stops, wanted = np.array(list(legs.values()), dtype=np.int64).T
        sent: list[Message] = [*extra, Steps(numbers[places], stops, wanted)]
        if known := [place for place in legs if place in self._targets]:
            sent.append(MESSAGES.target(numbers[known], np.array([self._targets.pop(place) for place in known])))
        is_all = places.size == self._clusters.size
        to = None if is_all else self._clusters.users_at(places)
        wishes: list[Wish] = [(places[wanted == THETA], MESSAGES.models, "theta"), (places[wanted == ANCHOR], Anchors, "x")]
        found = await averaged(federation, self._clusters, wishes, sent, to, left=self._left, is_exact=self._is_exact)
        self._at[places] = stops
        for asked, averages in found:
            self._learn(asked, averages)
        is_within = stops < until[places]
        self._targets |= {place: self._average[place] for place in places[is_within].tolist()}
        self._within_rounds[places[is_within]] += 1
        self._answered[places[~is_within]] = True

    def _learn(self, asked: Indices, averages: Array) -> None:
        """Takes the averages of the clusters whose users have sent their models."""
        if not self._average.shape[1]:
            self._average = np.zeros((self._clusters.size, averages.shape[1]))
        self._average[asked] = averages
