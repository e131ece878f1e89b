"""What a parent keeps of each host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from coterie.record.ledger import DOWN, UP
from coterie.wire.codec import Encoded
from coterie_server.session.ports import Link

HOST_BYTES = 1 << 19  # of replies that a host keeps, a small machine's memory; more only where they come in few exchanges


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
    n_sent: int = 0  # tasks that it was asked to answer, in this attempt, as often as it was asked
    n_replies: int = 0  # that came, in this attempt
    n_breaches: int = 0  # of the protocol, that the run went on without it after
    is_struck: bool = False  # it has broken the protocol or cannot go on, and is not back yet
    n_booked: int = 0  # rows of the ledger that concern it, which bounds those it may bring itself

    @property
    def owes(self) -> bool:
        """Whether it has yet to answer something."""
        return self.acked < self.asked

    @property
    def has_caught_up(self) -> bool:
        """Whether it may take part again."""
        return not self.owes and not self.is_struck

    def absence_s(self, now: float, since: float) -> float:
        """How long it was without a connection since its last answer, in all; of one that never came, since `since`."""
        return self.absent_s + (0.0 if self.link is not None else now - (self.absent_since or since))
