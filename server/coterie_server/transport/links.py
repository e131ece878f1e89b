"""Shaped links: a parent makes each stream to a member as slow as `federation.links` says, in both directions, at its own end.

A FIFO serialiser and a delay, without a token bucket and so without bursts. Frames are transmitted one after the other. Each takes bytes /
rate, and goes to gRPC a delay later. After a frame arrives, the parent reads on only when its transmission is over, so that its sender
notices the rate; the frame is seen a delay later. Heartbeats keep their place among the frames, and the delay of one does not hold up the
transmission of the next. Bytes are the frame and 5 bytes of gRPC header, as in the ledger. No bit of a result depends on any of this.
An aggregator shapes what it sends to another one, whose question has travelled for a delay; heartbeats between them are not shaped.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from coterie.experiment.links import LinkRule, LinkRules, link_rule
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_server.session.hub import Hub

READ_AHEAD_S = 0.01  # the next frame is read so long before a transmission ends: a late timer must not leave the link idle
MAX_HELD_BYTES = 64 << 20  # the most frames that wait for their delay; beyond, the sender is held up, as by a TCP window
_TIMER_S = 1e-3  # the event loop rounds waits up to this, so they are made shorter by half of it, which is right in the mean


class Clock(Protocol):
    """Seconds that only go forward."""

    def time(self) -> float: ...
    async def sleep_until(self, at: float) -> None: ...


class LoopClock:
    """The clock of the running event loop."""

    def __init__(self) -> None:
        self.time = asyncio.get_running_loop().time

    async def sleep_until(self, at: float) -> None:
        """Returns at `at`, give or take half a millisecond; at once when that is past."""
        if (wait_s := at - self.time() - _TIMER_S / 2) > 0:
            await asyncio.sleep(wait_s)


def rule_of(rules: LinkRules, scope: str) -> LinkRule | None:
    """The rule that shapes the links of a scope, or None."""
    text = getattr(rules, scope)
    return None if text is None else link_rule(text)


def scope_of(hub: Hub) -> str:
    """The scope of a parent's links, a key of `federation.links`."""
    if hub.cluster is not None:
        return "within"
    return "between" if hub.rules.is_two_tier else "direct"


def note_links(hub: Hub, rule: LinkRule | None) -> None:
    """Records how links are shaped, and a warning where the experiment has rules only for links that the run does not have.

    A flat run has its aggregators' halves in the coordinator: there is no link between clusters, and hosts' links are direct.
    """
    scope = scope_of(hub)
    there = {scope} if scope == "direct" else {scope, "within", *["peers"] * hub.rules.has_peers}
    if rule is not None:
        text, data = told_of(scope, rule)
        hub.recorder.event("links", text, **data)
    elif hub.cluster is None and (others := [name for name, _ in hub.rules.links.given() if name not in there]):
        listed, topology = ", ".join(f"links.{name}" for name in others), hub.rules.topology
        hub.recorder.event("warning", f"federation.{listed} shapes no link of this run, whose topology is {topology!r}: want links.{scope}")


def told_of(scope: str, rule: LinkRule) -> tuple[str, dict[str, Any]]:
    """The text and the data of the event that says how the links of a scope are shaped."""
    return f"links are shaped to {rule.text}: {scope}", {"scope": scope, "bits_per_s": rule.bits_per_s, "delay_s": rule.delay_s}


class Serialiser:
    """One direction of a link: frames wait for those before them."""

    def __init__(self, rule: LinkRule) -> None:
        self.delay_s = rule.delay_s
        self._rule = rule
        self._free_at = -math.inf

    def transmitted_at(self, wire_bytes: int, at: float) -> float:
        """When the last byte of a frame that waits from `at` on is transmitted, behind all frames before; it arrives a delay later."""
        self._free_at = max(at, self._free_at) + self._rule.transmission_s(wire_bytes)
        return self._free_at


class Outlet:
    """Shapes the frames that a parent sends on one stream. `put` and `take` are called once for each message, in order."""

    def __init__(self, rule: LinkRule, clock: Clock) -> None:
        self._serialiser, self._clock = Serialiser(rule), clock
        self._put_at: deque[float] = deque()
        self._taken_at = -math.inf

    def put(self) -> None:
        """A message is queued."""
        self._put_at.append(self._clock.time())

    def take(self) -> None:
        """The oldest message is taken from the queue to be written."""
        self._taken_at = self._put_at.popleft()

    async def passed(self, n_bytes: int) -> None:
        """Returns when the next frame of the message arrives at the other end.

        It is transmitted right after the frame before, while the writer still waits for that one to arrive.
        """
        sent_at = self._serialiser.transmitted_at(n_bytes + GRPC_FRAME_HEADER_BYTES, self._taken_at)
        await self._clock.sleep_until(sent_at + self._serialiser.delay_s)


class Inlet:
    """Shapes the frames that come on one stream: `pump` reads them, `read`, in another task, returns them."""

    def __init__(self, read_next: Callable[[], Awaitable[Any]], rule: LinkRule, clock: Clock) -> None:
        self._read_next, self._serialiser, self._clock = read_next, Serialiser(rule), clock
        self._held: deque[tuple[float, Any]] = deque()  # time of arrival, and a frame, the end of the stream, or an error
        self._n_bytes = 0
        self._changed = asyncio.Event()

    @property
    def is_holding(self) -> bool:
        """Whether something has come that has not been seen."""
        return bool(self._held)

    async def pump(self) -> None:
        """Reads to the end of the stream, no faster than the link carries."""
        data: Any = b""
        while isinstance(data, bytes):
            try:
                data = await self._read_next()
            except Exception as error:  # `read` raises it
                data = error
            n_bytes = len(data) if isinstance(data, bytes) else 0
            sent_at = self._serialiser.transmitted_at(n_bytes + GRPC_FRAME_HEADER_BYTES if n_bytes else 0, self._clock.time())
            self._held.append((sent_at + self._serialiser.delay_s, data))
            self._n_bytes += n_bytes
            self._changed.set()
            await self._clock.sleep_until(sent_at - READ_AHEAD_S)
            while self._n_bytes > MAX_HELD_BYTES:
                await self._change()

    async def read(self) -> Any:
        """The next frame, or the end of the stream, once it has arrived. Raises errors of `pump`."""
        while not self._held:
            await self._change()
        arrives_at, data = self._held[0]
        await self._clock.sleep_until(arrives_at)
        self._held.popleft()
        if isinstance(data, Exception):
            raise data
        self._n_bytes -= len(data) if isinstance(data, bytes) else 0
        self._changed.set()
        return data

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


async def call(rule: LinkRule, clock: Clock, up_bytes: int, down_bytes: int) -> None:
    """Waits for the time of a call on an idle link."""
    wire_bytes = up_bytes + down_bytes + 2 * GRPC_FRAME_HEADER_BYTES
    await clock.sleep_until(clock.time() + rule.transmission_s(wire_bytes) + 2 * rule.delay_s)
