"""What the aggregators' half of a method sees of the other aggregators, with `federation.topology: peers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from coterie.wire.messages import PerCluster
from coterie.wire.precision import Precision

P = TypeVar("P", bound=PerCluster)


class Peers(Protocol):
    """All aggregators of the run. Their places are from 0, in the order of the numbers of their clusters."""

    @property
    def place(self) -> int:
        """That of this aggregator."""

    @property
    def n(self) -> int:
        """How many there are, with this one."""

    @property
    def is_ring(self) -> bool:
        """Whether sums go around a ring, since there are more than `federation.ring_above`."""

    def offer(self, message: PerCluster, to: int | None = None) -> None:
        """Lets the aggregator at a place (None: all) fetch this message of the task under way, once for each of them."""

    async def fetch(self, kind: type[P], place: int, d: int) -> P:
        """What the aggregator at a place offers this one in the task under way, with vectors of length d.

        RunError where it is gone for too long, or offers something else.
        """


def as_sent(message: P, precision: Precision) -> P:
    """The message as its receiver decodes it."""
    floats = {name: spec for name, spec in message.specs if spec.is_float and not spec.is_exact}
    rounded: dict[str, Any] = {name: precision.rounded(getattr(message, name)) for name in floats}
    return replace(message, **rounded) if floats else message
