"""The state of a run in its hub, and of its hosts: the exchange, stage and round, how it ends, and the tasks of each host."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coterie.errors import CoterieError
from coterie.record.ledger import DOWN, UP
from coterie.v1 import session_pb2
from coterie.wire.assembler import Held
from coterie.wire.codec import Encoded
from coterie.wire.messages import Message
from coterie_server.interface.wanted import Wanted
from coterie_server.session.ports import Link, Tracer

HOST_BYTES = 1 << 19  # of replies that a host keeps, a small machine's memory; more only where they come in few exchanges


@dataclass
class Sent:
    """A task kept for replay."""

    seq: int
    encoded: Encoded
    times: int  # it was sent in this attempt
    n_through: int = 0  # the most bytes of it and of its reply that ever were at the other end
    at: tuple[int, int] = (0, 0)  # its stage and round
    seen: Sequence[Message] | None = None  # its messages as the host gets them, where answers differ from these


@dataclass
class Errand:
    """A task whose answer a later exchange may take: see `Federation.exchange`, `within`."""

    seq: int
    answer: list[Message] | None = None  # it has come, and no exchange has taken it yet
    is_checked: bool = False  # against what is wanted, which is known while an exchange is under way

    def awaits(self, seq: int) -> bool:
        """Whether an answer to this task is the one that is missing."""
        return seq == self.seq and self.answer is None


@dataclass
class Host:
    """What the parent knows of one host."""

    name: str
    users: tuple[str, ...]
    clusters: tuple[str, ...]
    link: Link | None = None
    instance: str = ""
    peer_address: str = ""  # where other aggregators dial it
    log: deque[Sent] = field(default_factory=deque)
    asked: int = 0  # the last task that it was to answer
    acked: int = 0  # the last task that it answered
    forgotten: int = 0  # tasks up to this one are no longer in the log
    reached: int = 0  # the last task that its state contains, according to its hello or reply
    snapshot_due: bool = False
    heard_at: float = 0.0
    absent_since: float | None = None
    absent_s: float = 0.0  # seconds without a connection since its last answer, up to the last time it came back
    session_bytes: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})
    replied_bytes: int = 0  # in this attempt; the host keeps its replies between two snapshots
    n_sent: int = 0  # tasks that it was asked to answer in this attempt; one that was sent twice counts twice
    n_replies: int = 0  # replies that came in this attempt
    n_breaches: int = 0  # breaches of the protocol after which the run went on without it
    is_struck: bool = False  # it has broken the protocol or cannot go on, and is not back yet
    holds: session_pb2.Held = field(default_factory=session_pb2.Held)  # how much it holds of a task, according to its hello
    held: Held = field(default_factory=Held)  # of its replies
    n_books: int = 0  # frames of its own ledger that have come
    n_booked: int = 0  # rows of the ledger that concern it, which bounds those it may bring itself
    errand: Errand | None = None  # it is on, with `within`
    taken: dict[int, int] = field(default_factory=dict)  # task of an errand -> the exchange that took its answer, since the last checkpoint

    @property
    def owes(self) -> bool:
        """Whether it has yet to answer something."""
        return self.acked < self.asked

    def open_after(self, seq: int) -> int | None:
        """The task up to exchange `seq` whose answer no exchange up to there has taken, though a later one may."""
        tasks = [task for task, took in self.taken.items() if task <= seq < took]
        return min([*tasks, *([self.errand.seq] if self.errand and self.errand.seq <= seq else [])], default=None)

    def absence_s(self, now: float, since: float) -> float:
        """Seconds without a connection since its last answer, in all; `since`: when a host that never came began to be absent."""
        return self.absent_s + (0.0 if self.link is not None else now - (self.absent_since or since))


@dataclass
class Pending:
    """The exchange under way."""

    seq: int
    waiting: set[str]  # hosts whose answers are missing
    answers: dict[str, list[Message]]
    done: asyncio.Future[None]
    since: float
    wanted: Sequence[Wanted] = ()
    needed: frozenset[str] | None = None  # with `within`: it ends with the first answer, if those of these hosts are there; None: with all

    def leave_out(self, hosts: Iterable[str]) -> None:
        """No longer waits for the answers of these hosts."""
        self.waiting.difference_update(hosts)
        if not self.waiting and not self.done.done():
            self.done.set_result(None)

    def answer(self, host: str, messages: list[Message]) -> None:
        """Takes the answer of a host."""
        self.answers[host] = messages
        if self.needed is not None:
            self.waiting &= self.needed
        self.leave_out((host,))


class RunState:
    """What all duties of a hub must know about the run. `reserved`: the last number that an exchange of an earlier attempt may have."""

    def __init__(self, attempt: int, reserved: int, tracer: Tracer | None) -> None:
        self.attempt, self.tracer = attempt, tracer
        self.earlier = self.reserved = reserved
        self.seq = self.stage = self.round = 0
        self.stage_json = ""  # the settings of the stage
        self.has_started = False  # the join barrier has been passed in this attempt
        self.pending: Pending | None = None
        self.failure: CoterieError | None = None
        self.finish: session_pb2.JoinResponse | None = None  # the frame that hosts receive at the end
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that nobody can join any more."""
        return self.finish is not None

    @property
    def furthest(self) -> int:
        """The last exchange that a host of this run can have seen."""
        return max(self.seq, self.earlier)

    def awaits(self, host: str) -> bool:
        """Whether the exchange under way needs the host's answer."""
        return self.pending is not None and host in self.pending.waiting

    def fail(self, error: CoterieError) -> None:
        """The run cannot go on: this error is raised wherever it waits."""
        self.failure = self.failure or error
        if self.pending is not None and not self.pending.done.done():
            self.pending.done.set_exception(self.failure)
        self.changed()

    def raise_failure(self) -> None:
        """Raises why the run has failed, if it has."""
        if self.failure is not None:
            raise self.failure

    def changed(self) -> None:
        """Wakes `change_within`: a host has come, gone, or sent something."""
        self._changed.set()

    async def change_within(self, seconds: float) -> None:
        """Returns at the next change, at the latest after so many seconds."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(seconds, 0.0))
