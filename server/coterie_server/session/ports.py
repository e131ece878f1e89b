"""The interfaces that a hub needs from outside: streams to send on, a recorder, and a tracer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from coterie.arrays import Indices
from coterie.record.ledger import Own, Row
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Entry
from coterie.wire.messages import Message


class Link(Protocol):
    """One host's stream, as the hub sees it. Sending never blocks; a link that cannot send reports the loss."""

    def send(self, item: Encoded, /) -> None: ...
    async def flush(self) -> None: ...  # sends a small message that waits at once, not at the next turn of the event loop
    def send_frame(self, frame: session_pb2.JoinResponse) -> None: ...
    def close(self, code: str, reason: str) -> None: ...


class Recorder(Protocol):
    """Records what happens at the hub (the run database). RunError: full disk."""

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Indices | None]], useful: bool) -> None: ...
    def book_host(self, link: str, rows: Iterable[Row]) -> None: ...
    # An aggregator's side of a link to a host of its own or another aggregator, and its events; ProtocolError for lines that are no events.
    def book_within(self, link: str, rows: Iterable[tuple[Row, Own]], user_sets: Sequence[str]) -> None: ...
    def book_peers(self, link: str, rows: Iterable[tuple[Row, Own]]) -> None: ...
    def events_of(self, aggregator: str, lines: str) -> None: ...
    def event(self, kind: str, text: str, **data: Any) -> None: ...
    def decide(self, seq: int, kind: str, value: Any) -> None: ...
    def reserve(self, seq: int) -> None: ...  # exchange numbers up to `seq`, on the disk
    def flush(self) -> None: ...


class Tracer(Protocol):
    """Follows the stages, rounds and exchanges of a run as they happen. The run does not depend on it."""

    def begin_run(self, run_id: str, attempt: int, experiment: str, method: str) -> None: ...
    # A round begins; without `is_round`, the work of a stage before its first round or after its last.
    def enter(self, stage: str, method: str, round_number: int, *, is_round: bool) -> None: ...
    def task(self, aggregator: str, seq: int, attempt: int, stage: str, round_number: int) -> None: ...  # an aggregator begins one
    def exchange(self, seq: int, attempt: int, messages: Sequence[Message]) -> AbstractContextManager[None]: ...
    def sent(self, member: str, seq: int, entries: Sequence[Entry]) -> None: ...  # a task to a host, perhaps again
    def answered(self, member: str, entries: Sequence[Entry]) -> None: ...  # with the answer that is waited for
