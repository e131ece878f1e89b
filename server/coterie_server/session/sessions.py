"""What the hub keeps of each host and asks of its surroundings, and what it keeps for hosts that come back. No logic of a run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from coterie.arrays import Indices
from coterie.errors import CoterieError
from coterie.record.ledger import DOWN, UP, Own, Row
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Entry, Received
from coterie.wire.messages import Message
from coterie_server.interface.wanted import Wanted

MAX_REASON_CHARS = 1000  # of what a host is told, and of what is written down: HTTP/2 trailers have a size limit
NOT_SPARED = "; on_loss is skip, but "  # before the reason for which a run ends that might have gone on without a host
_MAX_SHOWN = 50  # characters of a stranger's name
_FIRST_FEW = 20  # of like events are written down each, later ones whenever their number has doubled


class Refusal(CoterieError):  # noqa: N818 - a decision, not a fault of ours
    """A host is turned away; `code` is the gRPC status it gets, with the message. `public` may name other hosts, the message does not."""

    def __init__(self, code: str, reason: str, public: str | None = None) -> None:
        super().__init__(reason, public=public)
        self.code = code


def shortened(text: str, most: int = MAX_REASON_CHARS) -> str:
    """What a host has sent, or a sentence with it: of bounded length, and in characters that can be shown."""
    text = text[:most]
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def shown(name: str) -> str:
    """A name that a stranger has given, as a piece of a sentence."""
    return shortened(name, _MAX_SHOWN)


class Sparse:
    """Which of many like events are written down: what a host or a stranger can bring about again and again is not to fill the disk."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], int] = {}

    def due(self, kind: str, who: str) -> int:
        """How many events of this kind there were, if this one is to be written down, else 0. `who`: one of a bounded number of names."""
        times = self._times[kind, who] = self._times.get((kind, who), 0) + 1
        doublings, rest = divmod(times, _FIRST_FEW)
        return times if times <= _FIRST_FEW or (not rest and not doublings & (doublings - 1)) else 0


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

    def flush(self) -> None:
        """Writes what is buffered. RunError: full disk."""


class Tracer(Protocol):
    """What is told where the run is, what is asked and what is answered, at the moment it happens. It is no part of the run."""

    def begin_run(self, run_id: str, attempt: int, experiment: str, method: str) -> None: ...

    def enter(self, stage: str, method: str, round_number: int, *, is_round: bool) -> None:
        """A round begins, or, if it is none, what a stage does before its first round and after its last."""

    def task(self, aggregator: str, seq: int, attempt: int, stage: str, round_number: int) -> None:
        """An aggregator begins a task of its parent."""

    def exchange(self, seq: int, attempt: int, messages: Sequence[Message]) -> AbstractContextManager[None]: ...

    def sent(self, member: str, seq: int, entries: Sequence[Entry]) -> None:
        """A task has been sent to a host, perhaps again."""

    def answered(self, member: str, entries: Sequence[Entry]) -> None:
        """A host has given the answer that is waited for."""


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


@dataclass
class Pending:
    """The exchange under way."""

    seq: int
    waiting: set[str]
    answers: dict[str, list[Message]]
    done: asyncio.Future[None]
    since: float
    wanted: Sequence[Wanted] = ()


def packed(log: Sequence[Sent]) -> dict[str, Any]:
    """The messages of a host since its last snapshot, as a snapshot tree: there are many, mostly small ones, so it has one leaf for all."""
    heads = [sent.encoded.head for sent in log]
    return {
        "seqs": np.array([sent.seq for sent in log], dtype=np.int64),
        "head_bytes": np.array([len(head) for head in heads], dtype=np.int64),
        "heads": b"".join(heads),
        "tails": {str(place): list(sent.encoded.tails) for place, sent in enumerate(log) if sent.encoded.tails},
    }


def unpacked(log: Mapping[str, Any], n_users: int) -> Iterator[Sent]:
    """The messages again, each sent once."""
    start = 0
    for place, (seq, n_bytes) in enumerate(zip(log["seqs"].tolist(), log["head_bytes"].tolist(), strict=True)):
        head = log["heads"][start : start + n_bytes]
        start += n_bytes
        tails = tuple(memoryview(tail) for tail in log["tails"].get(str(place), ()))
        received = Received(session_pb2.JoinResponse.FromString(head).task, tuple(bytearray(tail) for tail in tails), len(head))
        _, entries = received.decode(n_users)
        yield Sent(seq, Encoded(head, tails, tuple(entries), is_task=True), 1)
