"""Where the aggregators' half of a two-tier method runs in a flat run: in the coordinator, for all clusters at once.

`Hosted` makes an ordinary server half of the coordinator's and the aggregators' halves. What would travel between them is rounded to the
payload type as if it did, so that a flat and a two-tier run have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.wire.codec import Precision
from coterie.wire.messages import Message, PerCluster
from coterie_server.interface.half import ClusterMethod, Counts, Federation, Outcome, Replies, ServerMethod
from coterie_server.interface.wanted import Wanted
from coterie_server.record.rundb import BETWEEN


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
    """The aggregators as the coordinator's half sees them, though they are in this process."""

    def __init__(self, below: Federation, half: ClusterMethod[Any], state: Any, precision: Precision) -> None:
        self.state = state
        self._below, self._half, self._precision = below, half, precision

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Replies:
        """`PerCluster` messages go to the aggregators' half, all others to the users."""
        sent = for_aggregators(messages)
        if not sent:
            return await self._below.exchange(*messages, to=to, wanted=wanted)
        inbox: dict[type[Message], Message] = {type(message): self._rounded(message) for message in sent}
        self.state, answers = await self._half.step(self.state, inbox, self._below)
        return Replies({type(answer): self._rounded(answer) for answer in answers}, None)

    def _rounded(self, message: PerCluster) -> PerCluster:
        floats = {name: spec for name, spec in message.specs if spec.is_float and not spec.is_exact}
        rounded: dict[str, Any] = {name: self._precision.rounded(getattr(message, name)) for name in floats}
        return replace(message, **rounded) if floats else message


@dataclass(frozen=True)
class Hosted:
    """A two-tier method in a flat run."""

    method: ServerMethod[Any]
    half: ClusterMethod[Any]
    precision: Precision

    @property
    def client_options(self) -> Mapping[str, Any]:
        return self.method.client_options

    @property
    def warnings(self) -> Sequence[str]:
        return getattr(self.method, "warnings", ())

    async def init(self, federation: Federation) -> HostedState:
        """Both halves' states before round 1."""
        tier = _Tier(federation, self.half, self.half.init(), self.precision)
        state = await self.method.init(tier)
        return HostedState(state, tier.state)

    async def round(self, state: HostedState, federation: Federation, number: int) -> tuple[HostedState, Mapping[str, float]]:
        """One round of the coordinator's half."""
        tier = _Tier(federation, self.half, state.clusters, self.precision)
        after, figures = await self.method.round(state.method, tier, number)
        return HostedState(after, tier.state), figures

    async def finish(self, state: HostedState, federation: Federation) -> Outcome:
        """What the stage leaves."""
        return await self.method.finish(state.method, _Tier(federation, self.half, state.clusters, self.precision))

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """The closed form of what still travels: nothing does between coordinator and aggregators."""
        return _inside(self.method.expected_vectors(figures))

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Likewise."""
        return self._inside("expected_scalars", figures)

    def spread_of_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Likewise."""
        return self._inside("spread_of_vectors", figures)

    def drawn_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Likewise."""
        return self._inside("drawn_vectors", figures)

    def _inside(self, name: str, figures: Sequence[Mapping[str, float]]) -> Counts:
        formula = getattr(self.method, name, None)
        return {} if formula is None else _inside(formula(figures))


def _inside(counts: Counts) -> Counts:
    """What is inside the clusters, whatever its scope would be called with aggregators."""
    kept = {key: count for key, count in counts.items() if not key[0].startswith("between-") and BETWEEN not in key}
    return {key[:2]: count for key, count in kept.items()}
