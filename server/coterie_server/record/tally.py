"""Running totals of a run's traffic, events and rounds: each reading takes only rows that are new.

The totals only grow, also over a resume, which makes useful traffic repeated traffic. `sent` is all traffic, useful or not; `repeated` is
the part that was sent again, came too late or belongs to rounds that were made again. Both count a broadcast once in vectors and scalars,
and once for each receiving host in bytes and frames, as `coterie_server.record.summary` does. A coordinator's totals leave out the books of
aggregators, which have totals of their own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from coterie_server.record.query import SESSION, Amounts
from coterie_server.record.rundb import PEERS, WITHIN

_MAX_OPEN = 20_000  # broadcasts that are remembered; one that is sent again after so many others counts anew
_NEW = "rowid > ? AND rowid <= ?"
_NEW_ROWS = _NEW.replace("rowid", "row")  # of the view that is the ledger
_SUMS = "SUM(payload_bytes), SUM(message_bytes), SUM(frames)"
_SINGLE = "step, direction, scope, useful"
_EACH = f"{_SINGLE}, CASE WHEN seq = 0 THEN {SESSION} ELSE stage END, seq, attempt, resent, kind"
_OWN_EVENTS = "json_extract(data, '$.aggregator') IS NULL"
_ROUNDS = "SELECT stage, round, at FROM rounds WHERE round > 0 ORDER BY stage DESC, round DESC"

Key = tuple[str, str, str]  # step, direction, scope


class Tally:
    """The totals of one run; `of_aggregator` when the database is an aggregator's own."""

    def __init__(self, *, of_aggregator: bool = False) -> None:
        self.sent: dict[Key, Amounts] = {}
        self.repeated: dict[Key, Amounts] = {}
        self.events: dict[str, int] = {}  # by kind
        self.rounds = 0  # rounds since `begin`; one that was made again counts again
        self.figures: dict[str, float] = {}  # the latest value of each figure of the newest stage; NaN where the round had none
        self._is_own = "1" if of_aggregator else f"scope NOT IN ('{WITHIN}', '{PEERS}')"
        self._attempt = ""
        self._ledger_row = self._event_row = 0
        self._open: dict[tuple[object, ...], tuple[int, int]] = {}  # broadcasts, with the vectors and scalars that were counted
        self._last_round: tuple[tuple[int, int], float] | None = None
        self._figures_of = (-1, -1)  # stage and round up to which figures were read

    def begin(self, connection: sqlite3.Connection) -> None:
        """Rounds that exist already are not counted."""
        self._count_rounds(connection)
        self.rounds = 0

    def read(self, connection: sqlite3.Connection) -> None:
        """Takes what is new. In a transaction of the caller, all of it is of one moment."""
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
        for row in connection.execute(single, place):
            self._add(row[:3], row[3], row[4:])
        each = f"SELECT {_EACH}, MAX(vectors), MAX(scalars), {_SUMS} {where} AND is_broadcast GROUP BY {_EACH}"
        for row in connection.execute(each, place):
            # Vectors and scalars count only so far as no other host has been sent them.
            one, vectors, scalars = row[:9], row[9], row[10]
            counted = self._open.get(one, (0, 0))
            self._open[one] = max(counted[0], vectors), max(counted[1], scalars)
            if len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._add(row[:3], row[3], (max(vectors - counted[0], 0), max(scalars - counted[1], 0), *row[11:]))
        self._ledger_row = last

    def _add(self, key: Key, useful: object, sums: Sequence[int]) -> None:
        self.sent.setdefault(key, Amounts()).add(sums)
        if not useful:
            self.repeated.setdefault(key, Amounts()).add(sums)

    def _count_rounds(self, connection: sqlite3.Connection) -> None:
        """From the newest round back to the one that was counted last: a resumed run makes rounds again, at a later time."""
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
