"""Reads a run database as it grows: each update reads only rows that are new.

Whole tables are read at the first update, and again after a killed run was resumed: it repeats rounds, and their first traffic is no longer
useful. Figures, bytes by round, totals, events and connected hosts are kept here, so asking for them costs nothing. Units are those of
`coterie.record.ledger`. Only useful traffic is counted.
"""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_server.record import summary
from coterie_server.record.curves import Curves, with_gap
from coterie_server.record.query import ABOVE
from coterie_server.record.rundb import read_run
from coterie_server.record.summary import SESSION, StageSummary, Traffic

MAX_EVENTS = 500  # kept, the latest
_Round = tuple[int, int, float]  # stage, round, when it was over
_Figure = tuple[int, int, str, float]  # stage, round, name, value

_NEW = "FROM ledger WHERE row > ? AND useful"
# A broadcast counts once in vectors and scalars, so broadcasts are read one by one; in bytes they count like other messages.
_TOTALS = f"""
SELECT CASE WHEN seq = 0 THEN {SESSION} ELSE stage END, step, direction, scope, SUM(vectors * NOT is_broadcast),
    SUM(scalars * NOT is_broadcast), SUM(payload_bytes), SUM(message_bytes), SUM(frames) {_NEW} GROUP BY 1, 2, 3, 4 ORDER BY MIN(row)
"""
_BROADCASTS = f"""
SELECT stage, step, direction, scope, vectors, scalars, seq, {ABOVE}, attempt, resent, kind {_NEW}
    AND is_broadcast AND vectors + scalars > 0
"""
_BY_ROUND = f"""
SELECT stage, direction, scope, round, SUM(message_bytes) + {GRPC_FRAME_HEADER_BYTES} * SUM(frames) {_NEW} AND seq > 0 GROUP BY 1, 2, 3, 4
"""
_FIGURES = "SELECT round, name, value FROM figures WHERE stage = ? AND round > ? AND value IS NOT NULL"
_ROUNDS = "SELECT round, at FROM rounds WHERE stage = ? AND round > ?"
_RESUMED = "SELECT 1 FROM events WHERE kind = 'resume' AND json_extract(data, '$.attempt') = ? LIMIT 1"


@dataclass(frozen=True)
class Event:
    """Something that happened, at a time in seconds since the epoch."""

    at: float
    kind: str
    text: str
    data: Mapping[str, Any]

    @property
    def host(self) -> str | None:
        """The coordinator's host that the event names; None for events below an aggregator."""
        name = self.data.get("host")
        return name if isinstance(name, str) and "aggregator" not in self.data else None


@dataclass(frozen=True)
class Added:
    """What one update has read."""

    is_anew: bool = True  # this replaces all that earlier updates have read
    traffic: Sequence[Traffic] = ()  # to be added to the totals by (stage, step, direction, scope)
    rounds: Sequence[_Round] = ()
    figures: Sequence[_Figure] = ()
    events: Sequence[Event] = ()


class _Column:
    """Numbers by round, in an array that doubles when it is full."""

    def __init__(self, empty: float) -> None:
        self._empty, self._values = empty, np.full(64, empty)

    def until(self, last: int) -> Array:
        """The array, with room for the rounds up to `last`."""
        if last >= self._values.size:
            self._values = np.concatenate([self._values, np.full(max(self._values.size, last + 1), self._empty)])
        return self._values

    def up_to(self, last: int) -> Array:
        """(last + 1,) a copy."""
        return self.until(last)[: last + 1].copy()


@dataclass
class _Series:
    """One stage."""

    last_round: int = -1  # the latest round that has ended
    last_figure: int = -1  # the latest round with a figure
    at: _Column = field(default_factory=lambda: _Column(np.nan))
    figures: dict[str, _Column] = field(default_factory=dict)
    wire_bytes: dict[tuple[str, str], _Column] = field(default_factory=dict)  # of each round alone


class Follower:
    """Follows the database of a run: `update` reads, everything else returns what was read. Not for two threads at once.

    `facts` is what the run says of itself, `hosts` the number of users of each host of the coordinator, `stages` those that have begun,
    `traffic` the totals in order of appearance, `events` the latest ones, `here` whether each host that ever joined is connected, and since
    when.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, str] = {}
        self.hosts: dict[str, int] = {}
        self.stages: list[StageSummary] = []
        self._life: tuple[str, str, bool] | None = None  # run, attempt, and whether the attempt has deleted what it repeats
        self._forget()

    def _forget(self) -> None:
        self.traffic: dict[tuple[int, str, str, str], Traffic] = {}
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.here: dict[str, tuple[bool, float]] = {}
        self._series: dict[int, _Series] = {}
        self._seen: dict[tuple[Any, ...], bytearray] = {}  # which exchanges had a broadcast
        self._last_row = self._last_event = 0

    @property
    def stage(self) -> StageSummary | None:
        """The stage under way, or the last one."""
        return self.stages[-1] if self.stages else None

    def update(self) -> Added:
        """Reads what is new. ConfigError when there is no run database, or none of this version; RunError when it cannot be read."""
        try:
            with read_run(self.folder) as connection:
                connection.execute("BEGIN")  # so that all queries see the database of one moment
                return self._read(connection)
        except (ValueError, TypeError) as error:
            raise RunError(f"the run database {self.folder / 'run.db'} is damaged: {error}") from error

    def _read(self, connection: sqlite3.Connection) -> Added:
        self.facts = summary.facts(connection)
        self.hosts = summary.hosts(connection)
        self.stages = summary.stages(connection)
        # A resumed run first writes its attempt, then deletes what it repeats, then writes an event.
        run_id, attempt = self.facts.get("run_id", ""), self.facts.get("attempt", "1")
        life = (run_id, attempt, True)
        if self._life != life:
            is_resumed = attempt != "1" and connection.execute(_RESUMED, (int(attempt),)).fetchone() is not None
            life = (run_id, attempt, is_resumed)
        is_anew = life != self._life
        if is_anew:
            self._forget()
            self._life = life
        rounds, figures = self._read_rounds(connection)
        return Added(is_anew, self._read_ledger(connection), rounds, figures, self._read_events(connection))

    def curves(self, stage: StageSummary) -> Curves:
        """A stage round by round, as `coterie_server.record.curves.curves` has it."""
        series = self._series_of(stage.number)
        last = series.last_round if series.last_round >= 0 else stage.rounds
        at = series.at.up_to(last)
        figures = {name: column.up_to(last) for name, column in series.figures.items()}
        sent = {way: column.up_to(last) for way, column in series.wire_bytes.items()}
        wire_bytes = {way: np.cumsum(by_round) for way, by_round in sent.items() if by_round.any()}
        return with_gap(Curves(stage, np.arange(last + 1), at - at[0], figures, wire_bytes), self.facts.get("experiment", "{}"))

    def began_at(self, stage: StageSummary) -> float:
        """When a stage began, in seconds since the epoch; NaN when that is not known."""
        return float(self._series_of(stage.number).at.up_to(0)[0])

    def _read_ledger(self, connection: sqlite3.Connection) -> list[Traffic]:
        (last,) = connection.execute("SELECT COALESCE(MAX(rowid), 0) FROM ledger_rows").fetchone()
        if last == self._last_row:
            return []
        since, self._last_row = (self._last_row,), last
        added = {row[:4]: Traffic(*row) for row in connection.execute(_TOTALS, since)}
        for row in connection.execute(_BROADCASTS, since):
            self._count_once(added, row[:4], row[4:6], row[6], (*row[:4], *row[7:]))
        for stage, direction, scope, number, n_bytes in connection.execute(_BY_ROUND, since):
            self._series_of(stage).wire_bytes.setdefault((direction, scope), _Column(0.0)).until(number)[number] += n_bytes
        for key, row in added.items():
            stage, step, direction, scope = key
            both = [self.traffic[key], row] if key in self.traffic else [row]
            self.traffic[key] = summary.total(both, stage=stage, step=step, direction=direction, scope=scope)
        return list(added.values())

    def _count_once(
        self, added: dict[tuple[Any, ...], Traffic], key: tuple[Any, ...], counted: tuple[int, int], seq: int, which: tuple[Any, ...]
    ) -> None:
        """Counts vectors and scalars of a broadcast, unless it was counted on another link."""
        seen = self._seen.setdefault(which, bytearray())
        if seq >= len(seen):
            seen.extend(bytes(max(len(seen), seq + 1 - len(seen))))
        if not seen[seq]:
            seen[seq] = 1
            row = added[key]
            added[key] = replace(row, vectors=row.vectors + counted[0], scalars=row.scalars + counted[1])

    def _read_rounds(self, connection: sqlite3.Connection) -> tuple[list[_Round], list[_Figure]]:
        rounds, figures = list[_Round](), list[_Figure]()
        for stage in self.stages:
            series = self._series_of(stage.number)
            if stage.outcome and series.last_figure >= stage.rounds:
                continue  # the outcome may be written before the last rounds
            ended = connection.execute(_ROUNDS, (stage.number, series.last_round)).fetchall()
            found = connection.execute(_FIGURES, (stage.number, series.last_figure)).fetchall()
            for number, at in ended:
                series.at.until(number)[number] = at
                series.last_round = max(series.last_round, number)
            for number, name, value in found:
                series.figures.setdefault(name, _Column(np.nan)).until(number)[number] = value
                series.last_figure = max(series.last_figure, number)
            rounds += [(stage.number, *row) for row in ended]
            figures += [(stage.number, *row) for row in found]
        return rounds, figures

    def _read_events(self, connection: sqlite3.Connection) -> list[Event]:
        rows = connection.execute("SELECT rowid, at, kind, text, data FROM events WHERE rowid > ? ORDER BY rowid", (self._last_event,))
        added = []
        for rowid, at, kind, text, data in rows:
            self._last_event = rowid
            event = Event(at, kind, text, json.loads(data))
            added.append(event)
            self._note_presence(event)
        self.events.extend(added)
        return added

    def _note_presence(self, event: Event) -> None:
        host = event.host
        if event.kind == "start":
            self.here = dict.fromkeys(self.here, (False, event.at))
        elif host is not None and event.kind == "join":
            self.here[host] = (True, event.at)
        elif host is not None and event.kind == "lost" and not event.data.get("book"):
            self.here[host] = (False, event.at)

    def _series_of(self, stage: int) -> _Series:
        return self._series.setdefault(stage, _Series())
