"""Running totals of what a run's database says was sent, happened and was done: each reading takes only what is new since the one before.

All of them only grow, also over a resume, where traffic that was useful turns out to have been repeated: `sent` is all of it, useful or
not, and `repeated` the part that was sent again, came too late or belongs to rounds that were made again. Both count a broadcast once in
vectors and scalars, and once for each receiving host in bytes and frames, as `coterie_server.record.summary` does. A coordinator's totals
leave out what aggregators have brought in their books: that is in those of the aggregators.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_server.record.query import SESSION
from coterie_server.record.rundb import WITHIN

_MAX_OPEN = 20_000  # broadcasts that are remembered; who is sent one after so many others have been is counted anew
_NEW = "rowid > ? AND rowid <= ?"
_NEW_ROWS = _NEW.replace("rowid", "row")  # of the view that is the ledger
_SUMS = "SUM(payload_bytes), SUM(message_bytes), SUM(frames)"
_SINGLE = "step, direction, scope, useful"
_EACH = f"{_SINGLE}, CASE WHEN seq = 0 THEN {SESSION} ELSE stage END, seq, attempt, resent, kind"
_OWN_EVENTS = "json_extract(data, '$.aggregator') IS NULL"
_ROUNDS = "SELECT stage, round, at FROM rounds WHERE round > 0 ORDER BY stage DESC, round DESC"

Key = tuple[str, str, str]  # step, direction, scope


@dataclass
class Amounts:
    """A total: d-vectors, scalars, bytes and gRPC frames; see `coterie.record.ledger`."""

    vectors: int = 0
    scalars: int = 0
    payload_bytes: int = 0
    message_bytes: int = 0
    frames: int = 0

    @property
    def wire_bytes(self) -> int:
        """Message bytes and the header of each gRPC frame."""
        return self.message_bytes + GRPC_FRAME_HEADER_BYTES * self.frames

    def add(self, vectors: int, scalars: int, sums: Sequence[int]) -> None:
        """Adds vectors, scalars and (payload bytes, message bytes, frames)."""
        self.vectors += vectors
        self.scalars += scalars
        self.payload_bytes += sums[0]
        self.message_bytes += sums[1]
        self.frames += sums[2]


class Tally:
    """The totals of one run; `of_aggregator` when the database is an aggregator's own."""

    def __init__(self, *, of_aggregator: bool = False) -> None:
        self.sent: dict[Key, Amounts] = {}
        self.repeated: dict[Key, Amounts] = {}
        self.events: dict[str, int] = {}  # by kind
        self.rounds = 0  # made since `begin`, those that were made again too
        self.figures: dict[str, float] = {}  # of the newest stage, each as it was given last; NaN where a round could not tell
        self._is_own = "1" if of_aggregator else f"scope <> '{WITHIN}'"
        self._attempt = ""
        self._ledger_row = self._event_row = 0
        self._open: dict[tuple[object, ...], tuple[int, int]] = {}  # broadcasts, with the vectors and scalars that were counted
        self._last_round: tuple[tuple[int, int], float] | None = None
        self._figures_of = (-1, -1)  # stage and round up to which figures were read

    def begin(self, connection: sqlite3.Connection) -> None:
        """The rounds that are there already are not counted."""
        self._count_rounds(connection)
        self.rounds = 0

    def read(self, connection: sqlite3.Connection) -> None:
        """Takes what is new. Within a transaction of the caller's, all of it is of one moment."""
        [[attempt]] = connection.execute("SELECT COALESCE((SELECT value FROM run WHERE key = 'attempt'), '')").fetchall()
        last_row, last_event = (_last(connection, table) for table in ("ledger_rows", "events"))
        if attempt != self._attempt or last_row < self._ledger_row or last_event < self._event_row:
            self._attempt, self._event_row, self.events = attempt, 0, {}
            self._forget_ledger()
        if self._count_events(connection, last_event):
            self._forget_ledger()  # what was useful may no longer be
        self._count_ledger(connection, last_row)
        self._count_rounds(connection)
        self._read_figures(connection)

    def _forget_ledger(self) -> None:
        self._ledger_row, self.sent, self.repeated, self._open = 0, {}, {}, {}
        self._figures_of = (-1, -1)

    def _count_events(self, connection: sqlite3.Connection, last: int) -> bool:
        """Whether the run was resumed."""
        query = f"SELECT kind, COUNT(*) FROM events WHERE {_NEW} AND {_OWN_EVENTS} GROUP BY kind"  # noqa: S608 - constants of ours
        new: dict[str, int] = dict(connection.execute(query, (self._event_row, last)))
        for kind, number in new.items():
            self.events[kind] = self.events.get(kind, 0) + number
        self._event_row = last
        return "resume" in new

    def _count_ledger(self, connection: sqlite3.Connection, last: int) -> None:
        where = f"FROM ledger WHERE {_NEW_ROWS} AND {self._is_own}"
        place = self._ledger_row, last
        single = f"SELECT {_SINGLE}, SUM(vectors), SUM(scalars), {_SUMS} {where} AND NOT is_broadcast GROUP BY {_SINGLE}"
        for *key, useful, vectors, scalars, payload, message, frames in connection.execute(single, place):
            self._add((key[0], key[1], key[2]), useful, vectors, scalars, (payload, message, frames))
        each = f"SELECT {_EACH}, MAX(vectors), MAX(scalars), {_SUMS} {where} AND is_broadcast GROUP BY {_EACH}"
        for row in connection.execute(each, place):
            self._add_broadcast(row[:9], row[9], row[10], row[11:])
        self._ledger_row = last

    def _add_broadcast(self, one: tuple[object, ...], vectors: int, scalars: int, sums: Sequence[int]) -> None:
        """Its vectors and scalars only so far as no other host has been sent them."""
        counted = self._open.get(one, (0, 0))
        self._open[one] = max(counted[0], vectors), max(counted[1], scalars)
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]
        key = str(one[0]), str(one[1]), str(one[2])
        self._add(key, one[3], max(vectors - counted[0], 0), max(scalars - counted[1], 0), sums)

    def _add(self, key: Key, useful: object, vectors: int, scalars: int, sums: Sequence[int]) -> None:
        self.sent.setdefault(key, Amounts()).add(vectors, scalars, sums)
        if not useful:
            self.repeated.setdefault(key, Amounts()).add(vectors, scalars, sums)

    def _count_rounds(self, connection: sqlite3.Connection) -> None:
        """From the newest back to the one that was counted last: a resumed run makes rounds again, at a later time."""
        known, newest = self._last_round, None
        for stage, number, at in connection.execute(_ROUNDS):
            if known is not None and (stage, number) <= known[0] and at <= known[1]:
                break
            newest = newest or ((stage, number), at)
            self.rounds += 1
        self._last_round = newest or known

    def _read_figures(self, connection: sqlite3.Connection) -> None:
        [[stage]] = connection.execute("SELECT COALESCE(MAX(number), 0) FROM stages").fetchall()
        if stage != self._figures_of[0]:
            self._figures_of, self.figures = (stage, -1), {}
        query = "SELECT round, name, value FROM figures WHERE stage = ? AND round > ? ORDER BY round"
        for number, name, value in connection.execute(query, self._figures_of):
            self.figures[name] = float("nan") if value is None else float(value)
            self._figures_of = (stage, number)


def _last(connection: sqlite3.Connection, table: str) -> int:
    [[row]] = connection.execute(f"SELECT COALESCE(MAX(rowid), 0) FROM {table}").fetchall()  # noqa: S608 - two fixed names
    return int(row)
