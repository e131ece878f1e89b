"""How an aggregator takes its cluster through the iterations of Algorithm 1 that need nothing from the other clusters.

Lyu, Hanzely and Kolar (2022); see `coterie.methods.async_l2gd`. The coins determine every iteration, so users receive only how far to go
alone, and the averages that they do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie.families.cluster_messages import GlobalAverage
from coterie.families.schedule import CLUSTER, GLOBAL, LOCAL, combined, moved, schedule_by
from coterie.methods.async_l2gd import MESSAGES, Advance, Centres, Config, Parameters, Steps
from coterie.wire.messages import Message, PerCluster
from coterie_server.families.cluster_noise import ClusterNoise
from coterie_server.families.coin_counts import NO_REUSE, REUSE_ALL
from coterie_server.families.known_clusters import Clusters, averaged
from coterie_server.interface.half import ClusterSetting, Federation

STALE, FRESH, SHARED = 0, 1, 2  # who knows bar_j: nobody; the aggregator; its users too


@dataclass(frozen=True)
class ClusterHalfState:
    """The state of c clusters."""

    at: Indices  # (c,) the next iteration
    known: Indices  # (c,) STALE, FRESH or SHARED
    cluster_average: Array  # (c, d) bar_j
    global_average: Array  # (c, d) bar
    within_rounds: Indices  # (c,) how often the cluster has averaged on its own
    traced: Array  # (c, d) bar_j of the latest trace, with exact sums
    left: Indices  # (n,) how often a rule has left each user out; empty without one
    parameters: Parameters | None = None


@dataclass(frozen=True)
class _Leg:
    """The next steps of a cluster that need no message: averaging steps whose averages are known, then local steps."""

    until: int
    wants_models: bool
    first: int | None = None  # the operation at its beginning whose average users do not have
    centres: bool = False  # whether both averages go with it, since more averaging follows
    known: int = STALE  # who knows bar_j when it is done
    is_within: bool = False  # whether the models are wanted for a round of the cluster's own


class _Step(NamedTuple):
    """The effect of an averaging step."""

    known: int  # who then knows bar_j, if it is used again
    needs_target: bool = False  # whether users must receive the point that the step goes to


# By the operation and who knows bar_j before. A CLUSTER step with a STALE bar_j must first ask for models; a LOCAL step ends averaging.
# A GLOBAL step with the bar that users have moves all averages, and both sides compute them; one with a new bar is not in the table.
_STEPS = {
    (CLUSTER, FRESH): _Step(SHARED, needs_target=True),
    (CLUSTER, SHARED): _Step(SHARED),
    (GLOBAL, STALE): _Step(STALE),
    (GLOBAL, FRESH): _Step(FRESH),
    (GLOBAL, SHARED): _Step(SHARED),
}


class Walk:
    """Takes some clusters from their iterations to those that the coordinator wants."""

    def __init__(
        self,
        config: Config,
        clusters: Clusters,
        setting: ClusterSetting,
        state: ClusterHalfState,
        noise: ClusterNoise | None = None,  # of the averages
    ) -> None:
        if state.parameters is None:
            raise RunError("the coordinator sent no parameters before the first iteration")
        self._config, self._clusters, self._p, self._before = config, clusters, state.parameters, state
        self._precision, self._is_exact, self._noise = setting.precision, setting.is_exact, noise
        self._schedule = schedule_by(setting.seed, float(self._p.p0[0]), self._p.p, clusters.numbers, config.coins)
        self._at, self._known, self._within_rounds = state.at.copy(), state.known.copy(), state.within_rounds.copy()
        self._left = state.left.copy()
        self._cluster_average, self._global_average = state.cluster_average.copy(), state.global_average.copy()
        self._has_news = np.zeros(clusters.size, dtype=np.bool_)  # whether bar is new, and has yet to be sent to the users

    async def to(self, go: Advance, news: GlobalAverage | None, federation: Federation) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Walks in waves: in each, all clusters that are not done take a leg."""
        if news is not None:
            self._global_average = news.average.copy()
            self._has_news[:] = True
        wants_pair = go.wants_pair > 0
        while (pending := np.flatnonzero((self._at < go.until) | (wants_pair & (self._known == STALE)))).size:
            legs = {place: self._leg(place, int(go.until[place]), bool(wants_pair[place])) for place in pending.tolist()}
            if self._is_exact:  # a sum is over all users who are asked
                for wants_models in (True, False):
                    await self._wave({place: leg for place, leg in legs.items() if leg.wants_models == wants_models}, federation)
            else:
                await self._wave(legs, federation)
        known = self._at, self._known, self._cluster_average, self._global_average, self._within_rounds
        state = ClusterHalfState(*known, self._before.traced, self._left, self._p)
        if not wants_pair.any():
            return state, []
        weight = self._clusters.alpha * self._clusters.gamma_sums
        return state, [MESSAGES.cluster_sums(self._clusters.numbers, weight[:, None] * self._cluster_average, weight)]

    def _leg(self, place: int, until: int, wants_pair: bool) -> _Leg:
        number, at, known = int(self._clusters.numbers[place]), int(self._at[place]), int(self._known[place])
        ops = self._schedule.operations(number, at, min(until + 1, self._config.iterations))
        n = until - at  # the most iterations of the leg; the one after them, if any, decides what must be known then
        reusable = int(self._p.is_reusable[place])
        done, first, centres = 0, None, False
        while done < n and (step := _STEPS.get((int(ops[done]), known))) is not None:
            if ops[done] == GLOBAL and done == 0 and self._has_news[place]:
                # Another global round needs both averages only if bar is used again; otherwise it brings its own.
                centres = ops.size > 1 and ((ops[1] == CLUSTER and reusable > NO_REUSE) or (ops[1] == GLOBAL and reusable == REUSE_ALL))
                step = _Step(SHARED if centres else FRESH, needs_target=True)
            first = int(ops[done]) if step.needs_target else first
            known = step.known if reusable else STALE
            done += 1
        if done < n and ops[done] == LOCAL:
            local = ops[done:n] == LOCAL
            done += local.size if local.all() else int(local.argmin())
            known = STALE
        stops_at = at + done
        needs = done < ops.size and known == STALE and (ops[done] == CLUSTER or (stops_at == until and wants_pair))
        return _Leg(stops_at, needs, first, centres, known, is_within=needs and bool(ops[done] == CLUSTER))

    async def _wave(self, legs: Mapping[int, _Leg], federation: Federation) -> None:
        if not legs:
            return
        numbers, places = self._clusters.numbers, np.array(list(legs), dtype=np.int64)
        until = np.array([leg.until for leg in legs.values()], dtype=np.int64)
        wants = np.array([leg.wants_models for leg in legs.values()], dtype=np.int64)
        sent: list[Message] = [Steps(numbers[places], until, wants), *self._targets(legs)]
        is_all = places.size == self._clusters.size
        to = None if is_all else self._clusters.users_at(places)
        wishes = [(places[wants > 0], MESSAGES.models, "theta")]
        found = await averaged(
            federation, self._clusters, wishes, sent, to, left=self._left, is_exact=self._is_exact, wants_models=self._noise is not None
        )
        for place, leg in legs.items():
            self._arrive(place, leg)
        for asked, averages in found:
            if not self._cluster_average.shape[1]:
                self._cluster_average = np.zeros((self._clusters.size, averages.shape[1]))
            if self._noise is not None:  # `averages` are the users' models
                averages = self._noise.averages(self._clusters, asked, averages, self._cluster_average[asked], self._at[asked])  # noqa: PLW2901
            self._cluster_average[asked] = self._precision.rounded(averages)
            self._known[asked] = FRESH

    def _targets(self, legs: Mapping[int, _Leg]) -> list[Message]:
        numbers = self._clusters.numbers
        centres = np.array([place for place, leg in legs.items() if leg.centres], dtype=np.int64)
        single = [place for place, leg in legs.items() if leg.first is not None and not leg.centres]
        listed: list[Message] = []
        if single:
            points = [self._target(place, legs[place].first) for place in single]
            listed.append(MESSAGES.target(numbers[single], np.array(points)))
        if centres.size:
            self._cluster_average[centres] = self._precision.rounded(self._cluster_average[centres])  # as users receive it
            listed.append(Centres(numbers[centres], self._cluster_average[centres], self._global_average[centres]))
        return listed

    def _target(self, place: int, operation: int | None) -> Array:
        bar_j: Array = self._cluster_average[place]
        if operation == CLUSTER:
            return bar_j
        return combined(float(self._p.alpha[place]), float(self._p.tau[place]), bar_j, self._global_average[place])

    def _arrive(self, place: int, leg: _Leg) -> None:
        """Updates the cluster's state after a leg; bar_j moves with the global rounds on the way, as at the users."""
        ops = self._schedule.operations(int(self._clusters.numbers[place]), int(self._at[place]), leg.until)
        if leg.known != STALE and self._p.is_reusable[place]:
            gamma = float(self._clusters.gamma[self._clusters.segments.place == place][0])
            step = float(self._p.eta[place]) * gamma / float(self._p.p0[place]) if self._p.p0[place] > 0 else 0.0
            for _ in range(int((ops == GLOBAL).sum())):
                bar_j = moved(self._cluster_average[place], self._global_average[place], step, float(self._p.alpha[place]))
                self._cluster_average[place] = bar_j
        if ops.size:
            self._has_news[place] = False
        self._at[place], self._known[place] = leg.until, leg.known
        self._within_rounds[place] += int(leg.is_within)
