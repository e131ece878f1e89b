"""What the hub asks of its surroundings: streams to send on, a place to write to, and a tracer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from coterie.arrays import Indices
from coterie.record.ledger import Own, Row
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded
from coterie.wire.messages import Message
from coterie.wire.parts import Entry


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

    def reserve(self, seq: int) -> None:
        """Writes to the disk that exchanges may have numbers up to `seq`. RunError: full disk."""

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
