"""Averages of known clusters that aggregators make among themselves, so that the coordinator sees none (`federation.topology: peers`).

Lyu, Hanzely and Kolar (2022), end of section 3.3: Algorithm 1 needs no central server. Each aggregator sends its pair
(alpha_j sum gamma_i theta_i, alpha_j Gamma_j) to all others: k(k-1) vectors. Or a ring passes partial sums on in the order of the clusters,
in full precision and with the weight of each cluster, and the last one's average goes back: 2(k-1) vectors. Sums are added in the order of
the clusters in both, as the coordinator adds them, so bits are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.experiment.federation import PeersShape
from coterie.families.cluster_messages import ClusterMessages, PartialSums
from coterie.wire.messages import Message, PerCluster, kind_class
from coterie.wire.precision import Precision
from coterie_server.families.known_clusters import Clusters, weighted_average
from coterie_server.interface.half import ClusterMethod, Counts, Federation, Key, StageHalf
from coterie_server.interface.peers import Peers, as_sent
from coterie_server.record.rundb import BETWEEN, PEERS


@dataclass(frozen=True)
class Averaged:
    """The kinds of one average: the pair of each cluster, sums on their way around a ring, and the average itself."""

    sums: type[Any]
    partial: type[PartialSums]
    average: type[Any]


@dataclass(frozen=True)
class PeersState:
    """The state of an aggregator."""

    method: Any  # of the aggregators' half
    news: Array | None = None  # (1, d) the average that the half receives with the coordinator's next message
    news_kind: str = ""  # the kind of that message
    centre: Array | None = None  # (1, d) alpha_j bar + (1-alpha_j) bar_j, after the objective


class AmongPeers:
    """The aggregators' half of one cluster, whose averages over all clusters come from the other aggregators."""

    def __init__(
        self,
        half: ClusterMethod[Any],
        clusters: Clusters,
        messages: ClusterMessages,
        averages: Sequence[Averaged],
        peers: Peers,
        precision: Precision,
    ) -> None:
        self._half, self._clusters, self._messages, self._peers, self._precision = half, clusters, messages, peers, precision
        self._averages = {averaged.sums: averaged for averaged in averages}
        self._traced = Averaged(messages.trace_sums, messages.trace_partial_sums, messages.trace_average)

    def init(self) -> PeersState:
        """The state when the stage starts."""
        return PeersState(self._half.init())

    async def step(
        self, state: PeersState, inbox: Mapping[type[Message], Message], federation: Federation
    ) -> tuple[PeersState, Sequence[PerCluster]]:
        """As `ClusterMethod.step`; the answers hold no average."""
        if self._messages.ask_gap in inbox:
            if state.centre is None:
                raise RunError("the coordinator asks for the gap before the objective")
            inbox = {self._messages.gap_centre: self._messages.gap_centre(self._clusters.numbers, state.centre)}
        elif state.news is not None and self._messages.trace not in inbox:
            kind: type[Any] = kind_class(state.news_kind)
            inbox = {**inbox, kind: kind(self._clusters.numbers, state.news)}
            state = replace(state, news=None)
        method, answers = await self._half.step(state.method, inbox, federation)
        state, told = replace(state, method=method), list[PerCluster]()
        for answer in answers:
            if (averaged := self._averages.get(type(answer))) is not None:
                news = await self._average(averaged, answer)
                state = replace(state, news=news.average, news_kind=news.kind)
            elif isinstance(answer, self._messages.cluster_state):
                centre, part = await self._parted(as_sent(answer, self._precision))
                state = replace(state, centre=centre)
                told.append(part)
            else:
                told.append(answer)
        return state, told

    def notes(self, state: PeersState) -> Sequence[str]:
        """As `ClusterMethod.notes`."""
        return self._half.notes(state.method)

    async def _parted(self, found: Any) -> tuple[Array, PerCluster]:
        """The centre of the cluster's gap, and what the coordinator receives of the objective."""
        weighted = self._traced.sums(found.clusters, found.weight[:, None] * found.average, found.weight)
        bar, alpha = (await self._average(self._traced, weighted)).average, self._clusters.alpha[:, None]
        distance = found.weight * ((found.average - bar) ** 2).sum(axis=1)
        part = self._messages.cluster_part(found.clusters, found.inner, found.spread, distance, found.within_rounds)
        return alpha * bar + (1 - alpha) * found.average, part

    async def _average(self, averaged: Averaged, own: Any) -> Any:
        """The average over all clusters, as the coordinator would send it."""
        own = as_sent(own, self._precision)
        if self._peers.is_ring:
            return await self._around(averaged, own)
        self._peers.offer(own)
        others = [place for place in range(self._peers.n) if place != self._peers.place]
        found = dict(
            zip(others, await _together([self._peers.fetch(averaged.sums, place, own.weighted.shape[1]) for place in others]), strict=True)
        )
        listed: list[Any] = [found.get(place, own) for place in range(self._peers.n)]
        values, weights = (np.concatenate([getattr(sums, name) for sums in listed]) for name in ("weighted", "weight"))
        return self._as_news(averaged, _mean(weighted_average(values, weights) if weights.sum() > 0 else None, own))

    async def _around(self, averaged: Averaged, own: Any) -> Any:
        place, last, d = self._peers.place, self._peers.n - 1, own.weighted.shape[1]
        sums = averaged.partial(own.clusters, own.weighted, own.weight)
        if place > 0:
            before = await self._peers.fetch(averaged.partial, place - 1, d)
            parts = (np.concatenate([getattr(before, name), getattr(own, name)]) for name in ("clusters", "weight"))
            clusters, weight = parts
            sums = averaged.partial(clusters, before.weighted + own.weighted, weight)
        if place < last:
            self._peers.offer(sums, place + 1)
            news = self._as_news(averaged, (await self._peers.fetch(averaged.average, place + 1, d)).average[0])
        else:
            total = float(sums.weight.sum())
            news = self._as_news(averaged, _mean(sums.weighted[0] / total if total > 0 else None, own))
        if place > 0:
            self._peers.offer(news, place - 1)
        return news

    def _as_news(self, averaged: Averaged, average: Array) -> Any:
        return as_sent(averaged.average(self._clusters.numbers, average[None]), self._precision)


def _mean(found: Array | None, own: Any) -> Array:
    """0 where all alpha_j Gamma_j are 0: then no user moves to the average."""
    return np.zeros(own.weighted.shape[1]) if found is None else found


async def _together(work: Sequence[Any]) -> Sequence[Any]:
    """All results; the first error cancels the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- closed forms


def counted(half: StageHalf[Any], shape: PeersShape, k: int, d: int) -> StageHalf[Any]:
    """The coordinator's half; where k aggregators average among themselves, with their closed forms.

    Of a link between two of them, the one of the smaller cluster is the parent: what it sends goes down.
    """
    if not shape:
        return half
    is_ring = shape == "ring"
    return replace(
        half,
        expected_vectors=lambda figures: _vectors(half.expected_vectors(figures), k, is_ring),
        expected_scalars=lambda figures: _scalars(half.expected_scalars(figures), k, d, is_ring),
        spread_of_vectors=lambda figures: _vectors(half.spread_of_vectors(figures), k, is_ring),
        drawn_vectors=lambda figures: _vectors(half.drawn_vectors(figures), k, is_ring),
    )


def _vectors(counts: Counts, k: int, is_ring: bool) -> Counts:
    """With a coordinator each cluster sends a vector and receives one, so there are 2k a round; the objective only sends k."""
    share = (k - 1) / k if is_ring else (k - 1) / 2
    found: dict[Key, float] = {}
    for key, count in counts.items():
        if key == ("trace", "up", BETWEEN):
            found |= {("trace", way, PEERS): share * count for way in ("up", "down")}
        elif len(key) == 3 and key[2] == BETWEEN and key[0].startswith("between-"):
            found[key[0], key[1], PEERS] = share * count
        elif key != ("gap", "down", BETWEEN):
            found[key] = count
    return found


def _scalars(counts: Counts, k: int, d: int, is_ring: bool) -> Counts:
    """Three scalars of each cluster are left of the objective. Around a ring, sums carry the weights of the clusters so far."""
    n_traces = counts["trace", "up", BETWEEN] / (k * (d + 3))
    down = (k - 1) * d + k * (k - 1) / 2 if is_ring else k * (k - 1) / 2 * (d + 1)
    up = (k - 1) * d if is_ring else down
    moved: dict[Key, float] = {("trace", "up", BETWEEN): 3.0 * k * n_traces}
    return {**counts, **moved, ("trace", "down", PEERS): n_traces * down, ("trace", "up", PEERS): n_traces * up}
