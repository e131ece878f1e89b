"""Two-tier methods in a flat run: the aggregators' half runs in the coordinator, for all clusters at once.

`hosted` makes an ordinary half from the coordinator's and the aggregators' halves. Their messages are rounded to the payload type, so that
a flat and a two-tier run have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.arrays import Indices
from coterie.errors import ConfigError, ProtocolError
from coterie.experiment.config import Experiment
from coterie.wire.messages import AskTotal, Message, PerCluster
from coterie_server.interface.half import (
    FLAT_ONLY,
    ClusterMethod,
    ClusterSetting,
    Counts,
    Federation,
    Outcome,
    Replies,
    StageHalf,
    Sum,
    Totals,
    server_half,
)
from coterie_server.interface.peers import as_sent
from coterie_server.interface.totals import of_clusters, total
from coterie_server.interface.wanted import Wanted
from coterie_server.record.rundb import BETWEEN


def check_tiers(experiment: Experiment, methods: Sequence[str]) -> None:
    """ConfigError unless all methods of a run have what its topology needs."""
    rules = experiment.federation
    if flat := [name for name in methods if server_half(name).tiers == FLAT_ONLY and rules.is_two_tier]:
        raise ConfigError(f"method {flat[0]!r} has no clusters of its own, want federation.topology 'flat'")
    if not rules.has_peers:
        return
    if experiment.references:
        why = f"reference {experiment.references[0]!r} sends the coordinator what users compute, which topology 'peers' keeps from it"
        raise ConfigError(f"{why}: want references: []")
    if above := [name for name in methods if server_half(name).peers is None]:
        why = f"the coordinator makes the averages of method {above[0]!r}, which aggregators cannot exchange among themselves"
        raise ConfigError(f"{why}: want federation.topology 'clusters' or 'flat'")


def for_aggregators(messages: Sequence[Message]) -> Sequence[PerCluster]:
    """The messages for the aggregators' half: all of them, or none. ProtocolError when they are mixed with messages for the users."""
    found = [message for message in messages if isinstance(message, PerCluster)]
    if found and len(found) < len(messages):
        raise ProtocolError("a task mixes messages for the aggregator with messages for its users")
    return found


@dataclass(frozen=True)
class HostedState:
    """The state of both halves."""

    method: Any
    clusters: Any


class _Tier:
    """The federation of the coordinator's half: aggregators in this process."""

    def __init__(self, below: Federation, half: ClusterMethod[Any], state: Any, setting: ClusterSetting) -> None:
        self.state = state
        self._below, self._half, self._setting = below, half, setting

    async def exchange(
        self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = (), within: int | None = None
    ) -> Replies:
        """`PerCluster` messages go to the aggregators' half, all others to the users."""
        sent = for_aggregators(messages)
        if not sent:
            return await self._below.exchange(*messages, to=to, wanted=wanted, within=within)
        return await self._answered(*sent)

    async def total(self, *messages: Message, of: Sequence[Sum], to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Totals:
        """Of the clusters, or of the users."""
        if not for_aggregators(messages):
            return await self._below.total(*messages, of=of, to=to, wanted=wanted)
        n_members, precision = len(self._setting.members), self._setting.precision
        return await total(self._answered, messages, of, to, wanted, n_members, precision, is_exact=self._setting.is_exact)

    async def _answered(self, *messages: Message, **_: Any) -> Replies:
        asks = [message for message in messages if isinstance(message, AskTotal)]
        precision = self._setting.precision
        inbox: dict[type[Message], Message] = {type(one): as_sent(one, precision) for one in messages if isinstance(one, PerCluster)}
        self.state, answers = await self._half.step(self.state, inbox, self._below)
        listed = [as_sent(one, precision) if isinstance(one, PerCluster) else one for one in of_clusters(answers, asks)]
        return Replies({type(one): one for one in listed}, None)


def hosted(above: StageHalf[Any], half: ClusterMethod[Any], setting: ClusterSetting) -> StageHalf[HostedState]:
    """A two-tier method in a flat run. Its closed forms leave out messages between coordinator and aggregators, which do not travel."""

    async def init(federation: Federation) -> HostedState:
        tier = _Tier(federation, half, half.init(), setting)
        state = await above.init(tier)
        return HostedState(state, tier.state)

    async def round_(state: HostedState, federation: Federation, number: int) -> tuple[HostedState, Mapping[str, float]]:
        tier = _Tier(federation, half, state.clusters, setting)
        after, figures = await above.round(state.method, tier, number)
        return HostedState(after, tier.state), figures

    async def finish(state: HostedState, federation: Federation) -> Outcome:
        tier = _Tier(federation, half, state.clusters, setting)
        outcome = await above.finish(state.method, tier)
        return replace(outcome, notes=(*outcome.notes, *half.notes(tier.state)))

    return replace(
        above,
        init=init,
        round=round_,
        finish=finish,
        labels_of=lambda state: above.labels_of(state.method),
        expected_vectors=lambda figures: _inside(above.expected_vectors(figures)),
        expected_scalars=lambda figures: _inside(above.expected_scalars(figures)),
        spread_of_vectors=lambda figures: _inside(above.spread_of_vectors(figures)),
        drawn_vectors=lambda figures: _inside(above.drawn_vectors(figures)),
    )


def _inside(counts: Counts) -> Counts:
    """The counts inside the clusters, without scope."""
    return {key[:2]: count for key, count in counts.items() if BETWEEN not in key}
