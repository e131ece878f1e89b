"""What the hub keeps of each host and asks of its surroundings, and what a hello must look like. No logic of a run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coterie.arrays import Indices
from coterie.errors import CoterieError
from coterie.ledger import DOWN, UP, Own, Row
from coterie.messages import Message
from coterie.v1 import session_pb2
from coterie.wire import PROTOCOL_VERSION, Encoded


class Refusal(CoterieError):  # noqa: N818 - a decision, not a fault of ours
    """A host is turned away; `code` is the gRPC status it gets."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Link(Protocol):
    """One host's stream, as the hub sees it. Sending never blocks; a link that cannot send reports the loss."""

    def send(self, encoded: Encoded) -> None: ...

    async def flush(self) -> None:
        """Sends what is small and waits at once, rather than at the next turn of the event loop."""

    def send_frame(self, frame: session_pb2.JoinResponse) -> None: ...

    def close(self, code: str, reason: str) -> None: ...


class Recorder(Protocol):
    """Where the hub writes down what happens (the run database)."""

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Indices | None]], useful: bool) -> None: ...

    def book_host(self, link: str, rows: Iterable[Row]) -> None: ...

    def book_within(self, link: str, rows: Iterable[tuple[Row, Own]], user_sets: Sequence[str]) -> None:
        """An aggregator's side of a link to one of its hosts."""

    def events_of(self, aggregator: str, lines: str) -> None:
        """What has happened at an aggregator. ProtocolError when the lines are not what the contract says."""

    def event(self, kind: str, text: str, **data: Any) -> None: ...

    def decide(self, seq: int, kind: str, value: Any) -> None: ...


@dataclass
class Sent:
    """A task kept for replay."""

    seq: int
    encoded: Encoded
    times: int  # it was sent in this attempt


@dataclass
class Host:
    """What the parent knows of one host."""

    name: str
    users: tuple[str, ...]
    clusters: tuple[str, ...]
    link: Link | None = None
    instance: str = ""
    log: deque[Sent] = field(default_factory=deque)
    asked: int = 0  # the last task that it was to answer
    acked: int = 0  # the last task that it answered
    forgotten: int = 0  # tasks up to this one are no longer in the log
    reached: int = 0  # the last task that its state contains, as told by hello or reply
    snapshot_due: bool = False
    heard_at: float = 0.0
    absent_since: float | None = None
    absent_s: float = 0.0  # without a connection since its last answer, up to the last time it came back
    session_bytes: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})
    replied_bytes: int = 0  # in this attempt; the host keeps its replies between two snapshots
    n_booked: int = 0  # rows of the ledger that concern it, which bounds those it may bring itself

    @property
    def owes(self) -> bool:
        """Whether it has yet to answer something."""
        return self.acked < self.asked

    def absence_s(self, now: float, since: float) -> float:
        """How long it was without a connection since its last answer, in all; of one that never came, since `since`."""
        return self.absent_s + (0.0 if self.link is not None else now - (self.absent_since or since))


@dataclass
class Pending:
    """The exchange under way."""

    seq: int
    waiting: set[str]
    answers: dict[str, list[Message]]
    done: asyncio.Future[None]
    since: float


def check_form(hello: session_pb2.Hello) -> None:
    """Refusal of what is wrong with a hello, whatever the run."""
    if hello.protocol != PROTOCOL_VERSION:
        raise Refusal("FAILED_PRECONDITION", f"host {hello.host!r} speaks protocol {hello.protocol}, wanted {PROTOCOL_VERSION}")
    if not hello.host or not hello.users:
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} brings {len(hello.users)} users, wanted a name and at least one user")
    names = [user.name for user in hello.users]
    if len(set(names)) != len(names) or not all(names):
        seen: set[str] = set()
        twice = next((name for name in names if not name or name in seen or seen.add(name)), "")  # type: ignore[func-returns-value]
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} names user {twice!r} more than once or without a name")
