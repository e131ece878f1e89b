"""The run database: ledger, figures, events and decisions of one run, in SQLite, readable while the run goes on.

Rows are buffered and written in batches. Units: see `coterie.record.ledger`; times are seconds since the epoch. `useful` is 1 for the
traffic of the committed history: what was sent again, came too late, or belongs to rounds that a killed coordinator had to repeat has 0.
`expected` is the closed form of what a stage sends, `printed` the paper's own count. `rounds` says when each round was over; round 0 is the
start of its stage. `memberships` has the users' clusters in member order, as a JSON array, for each round in which they changed.
deploy/docs/ledger.md has all tables and columns.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.record.ledger import CONTROL, Own, Row, as_ranges, of_ranges, step_of
from coterie.wire.messages import Broadcast, PerCluster, kind_class
from coterie_server.interface.expected import Expected, Key
from coterie_server.record.run_file import OF_ROUNDS, TABLES, RunFile

if TYPE_CHECKING:
    from coterie_server.interface.half import Members  # which brings much that a reader of a database does not need

# The scopes of communication: with a client host that has no aggregator, inside a cluster, between the clusters.
DIRECT, WITHIN, BETWEEN = "direct", "within-cluster", "between-cluster"
_MAX_MESSAGES = 50_000  # that are remembered: where more are different, some of the same are written again
_RESERVED = "reserved"

OnEvent = Callable[[str, str, Mapping[str, Any]], None]  # is told the kind, the text and the data of each event of one's own


class RunDatabase:
    """One run's database; `path` None keeps it in memory. RunError when the disk refuses."""

    def __init__(self, path: Path | None, clock: Any = time.time, *, scope: str = DIRECT, on_event: OnEvent | None = None) -> None:
        self._scope = scope  # of the links that are booked here
        self._clock = clock
        self._on_event = on_event
        self._file = RunFile(path, clock)
        self.connection = self._file.connection
        self._sets: dict[str, int] = {}
        self._messages: dict[tuple[Any, ...], int] = {}  # the id of each in `ledger_messages`
        self._n_messages = 0  # ids that are taken
        self._labels: tuple[int, str] | None = None  # stage and text of the latest memberships
        self._same_labels: Indices | None = None  # the array that they came in, which is there again after most rounds
        with self._file.refusals():
            self._sets |= self.connection.execute("SELECT members, id FROM user_sets").fetchall()
            ((self._n_messages,),) = self.connection.execute("SELECT COALESCE(MAX(id), 0) FROM ledger_messages")

    # ---- what the hub writes down

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Indices | None]], useful: bool) -> None:
        """The parent's own rows for one message on one link; `where` is (stage, round)."""
        # Every message of a run comes here: most are like one that was booked before, and the line then has seven numbers.
        (stage, number), is_useful, scope, lines = where, int(useful), self._scope, self._file.rows["ledger_rows"]
        known = self._messages
        for row, users in rows:
            user_set = None if users is None else self._set_of(as_ranges(users))
            about = (scope, link, user_set, *row[3:])
            lines.append((*row[:3], is_useful, stage, number, known.get(about) or self._message(about)))

    def book_within(self, link: str, rows: Iterable[tuple[Row, Own]], user_sets: Sequence[str]) -> None:
        """An aggregator's side of a link to one of its hosts; `Own.user_set` is a place in `user_sets`, from 1."""
        for row, own in rows:
            user_set = self._set_of(user_sets[own.user_set - 1]) if own.user_set else None
            about = (WITHIN, link, user_set, *row[3:])
            message = self._messages.get(about) or self._message(about)
            self._file.add("ledger_rows", (*row[:3], own.useful, own.stage, own.round, message))

    def _message(self, about: tuple[Any, ...]) -> int:
        """Writes down what a message is, and gives its id; `about` is scope, link, set of users, and what follows `resent` in a Row."""
        scope, link, user_set, direction, kind, *sizes = about
        if len(self._messages) >= _MAX_MESSAGES:
            self._messages.clear()
        self._n_messages += 1
        self._messages[about] = self._n_messages
        step, is_broadcast = _facts_of(kind)
        self._file.add("ledger_messages", (self._n_messages, step, kind, direction, scope, link, user_set, is_broadcast, *sizes))
        return self._n_messages

    def book_host(self, link: str, rows: Iterable[Row]) -> None:
        """A host's own rows."""
        for row in rows:
            self._file.add("host_ledger", (*row[:5], link, *row[5:]))

    def event(self, kind: str, text: str, **data: Any) -> None:
        """Something a person may want to know."""
        self._file.add("events", (self._clock(), kind, text, json.dumps(data)))
        if self._on_event is not None:
            self._on_event(kind, text, data)

    def decide(self, seq: int, kind: str, value: Any) -> None:
        """A decision that depended on the clock, written before anything that follows from it: a later attempt must repeat it."""
        self._file.add("decisions", (seq, kind, json.dumps(value)))
        self.flush()

    def events_of(self, aggregator: str, lines: str) -> None:
        """What has happened at an aggregator, in its own time. ProtocolError when the lines are not what the contract says."""
        for line in lines.splitlines():
            try:
                at, kind, text, data = json.loads(line)
                values = (float(at), str(kind), str(text), json.dumps({**data, "aggregator": aggregator}, allow_nan=False))
                if not math.isfinite(values[0]):
                    raise ValueError("not a time")
                for word in values[1:3]:
                    word.encode()  # half a surrogate pair is no text for a database
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise ProtocolError(f"an event of its book is {line[:100]!r}, wanted [time, kind, text, data]") from error
            self._file.add("events", values)

    def _set_of(self, text: str) -> int:
        number = self._sets.get(text)
        if number is None:
            number = self._sets[text] = len(self._sets) + 1
            self._file.execute("INSERT INTO user_sets VALUES (?, ?)", (number, text))
        return number

    # ---- what an aggregator reads of it, for the coordinator's books

    def links(self) -> list[str]:
        """The hosts that something was booked for."""
        self.flush()
        return [name for (name,) in self.connection.execute("SELECT DISTINCT link FROM ledger UNION SELECT DISTINCT link FROM host_ledger")]

    def user_sets(self, numbers: Indices) -> list[str]:
        """The sets of users in the order of their ids from 1, in the numbers of the whole run; `numbers` (n,) has that of each member."""
        rows = self.connection.execute("SELECT members FROM user_sets ORDER BY id")
        return [as_ranges(numbers[of_ranges(members)]) for (members,) in rows]

    def own_rows(self, link: str) -> Iterator[tuple[Row, Own]]:
        """This side of a link."""
        columns = "seq, attempt, resent, direction, kind, vectors, scalars, payload_bytes, message_bytes, frames"
        query = f"SELECT {columns}, useful, stage, round, COALESCE(user_set, 0) FROM ledger WHERE link = ? ORDER BY row"  # noqa: S608
        for row in self.connection.execute(query, (link,)):
            yield Row._make(row[:10]), Own._make(row[10:])

    def host_rows(self, link: str) -> Iterator[Row]:
        """The host's side of a link."""
        columns = "seq, attempt, resent, direction, kind, vectors, scalars, payload_bytes, message_bytes, frames"
        query = f"SELECT {columns} FROM host_ledger WHERE link = ? ORDER BY rowid"  # noqa: S608 - fixed columns
        for row in self.connection.execute(query, (link,)):
            yield Row._make(row)

    def event_lines(self) -> list[str]:
        """The events, a JSON array [time, kind, text, data] each."""
        rows = self.connection.execute("SELECT at, kind, text, data FROM events ORDER BY rowid")
        return [json.dumps([at, kind, text, json.loads(data)]) for at, kind, text, data in rows]

    # ---- what the engine writes down

    def figures(self, stage: int, round_number: int, figures: Mapping[str, float]) -> None:
        """The figures of one round, which is over now; round 0 is the start of the stage."""
        self._file.add("rounds", (stage, round_number, self._clock()))
        for name, value in figures.items():
            self._file.add("figures", (stage, round_number, name, float(value)))

    def figures_of(self, stage: int) -> list[dict[str, float]]:
        """The figures of a stage, one mapping per round."""
        self.flush()
        rounds: dict[int, dict[str, float]] = {}
        rows = self.connection.execute("SELECT round, name, value FROM figures WHERE stage = ? ORDER BY round", (stage,))
        for number, name, value in rows:
            rounds.setdefault(number, {})[name] = float("nan") if value is None else value
        return [rounds[number] for number in sorted(rounds)]

    def membership(self, stage: int, round_number: int, labels: Indices) -> None:
        """The users' clusters (n,) after a round, written when they are not those written last. They must not change afterwards."""
        if labels is self._same_labels and self._labels is not None and self._labels[0] == stage:
            return
        self._same_labels = labels
        text = json.dumps(labels.tolist(), separators=(",", ":"))
        if self._labels is None or self._labels[0] != stage:
            self._labels = (stage, self._last_labels(stage))
        if self._labels[1] != text:
            self._file.add("memberships", (stage, round_number, text))
            self._labels = (stage, text)

    def _last_labels(self, stage: int) -> str:
        self.flush()
        last = "SELECT labels FROM memberships WHERE stage = ? ORDER BY round DESC LIMIT 1"
        row = self.connection.execute(last, (stage,)).fetchone()
        return "" if row is None else str(row[0])

    def stage(self, number: int, name: str, method: str, rounds: int, outcome: str, seconds: float) -> None:
        """A stage has ended (or, with an empty outcome, has begun)."""
        if not outcome:
            self._labels, self._same_labels = (number, ""), None
        self._file.execute("INSERT OR REPLACE INTO stages VALUES (?, ?, ?, ?, ?, ?)", (number, name, method, rounds, outcome, seconds))

    def result(
        self,
        stage: int,
        figures: Mapping[str, float],
        expected: Mapping[Key, Expected | float] | Mapping[tuple[str, str], float],
        by_user: Mapping[str, Array] | None = None,
    ) -> None:
        """What a stage has left: its closing figures, those of each user in member order, the closed form of its traffic.

        A bare number is an exact count of d-vectors.
        """
        with self._file.transaction():
            for name, value in figures.items():
                self._file.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (stage, name, float(value)))
            for (step, direction, *scope), form in expected.items():
                whole = form if isinstance(form, Expected) else Expected(float(form))
                key = (stage, step, direction, "".join(scope))
                self._file.execute("INSERT OR REPLACE INTO expected VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*key, *whole))
            for name, values in (by_user or {}).items():
                judged = np.flatnonzero(~np.isnan(values))
                rows = [(stage, name, member, value) for member, value in zip(judged.tolist(), values[judged].tolist(), strict=True)]
                self.connection.executemany("INSERT OR REPLACE INTO user_results VALUES (?, ?, ?, ?)", rows)

    def printed(self, stage: int, vectors: Mapping[str, float]) -> None:
        """The paper's own count of the d-vectors of a stage, by direction."""
        for direction, count in vectors.items():
            self._file.execute("INSERT OR REPLACE INTO printed VALUES (?, ?, ?)", (stage, direction, float(count)))

    def members(self, members: Members, host_of: Mapping[str, str]) -> None:
        """Who takes part, and on which host."""
        rows = [(*row, host_of[row[1]]) for row in zip(range(len(members.names)), members.names, members.clusters, strict=True)]
        with self._file.transaction():
            self.connection.execute("DELETE FROM members")
            self.connection.executemany("INSERT INTO members VALUES (?, ?, ?, ?)", rows)

    def put(self, key: str, value: str) -> None:
        """A fact about the run: run_id, name, status, attempt, ..."""
        self._file.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))

    def get(self, key: str) -> str | None:
        """A fact about the run."""
        row = self.connection.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def reserve(self, seq: int) -> None:
        """Exchanges may have numbers up to `seq`: this is on the disk when it returns, so that it survives the end of power too."""
        self._file.execute("PRAGMA synchronous=FULL")
        self.put(_RESERVED, str(seq))
        self._file.execute("PRAGMA synchronous=NORMAL")

    @property
    def reserved(self) -> int:
        """The last number that an exchange may have, 0 where there was none."""
        return int(self.get(_RESERVED) or 0)

    def rewind(self, seq: int, stage: int, round_number: int) -> None:
        """A resumed run repeats everything after this point: traffic that was booked later brought nothing, figures are made again."""
        self._file.execute("UPDATE ledger_rows SET useful = 0 WHERE seq > ?", (seq,))
        for table in OF_ROUNDS:
            later = f"DELETE FROM {table} WHERE stage > ? OR (stage = ? AND round > ?)"  # noqa: S608 - fixed names
            self._file.execute(later, (stage, stage, round_number))
        self._labels = None
        for table in ("results", "user_results", "expected", "printed"):
            self._file.execute(f"DELETE FROM {table} WHERE stage >= ?", (stage,))  # noqa: S608 - four fixed names
        self._file.execute("DELETE FROM stages WHERE number > ?", (stage,))
        self.forget_books()

    def forget_books(self) -> None:
        """Hosts and aggregators bring their books also when a run fails; when it is resumed they will bring all of it again."""
        self._file.execute("DELETE FROM host_ledger")
        if self._scope == BETWEEN:
            self._file.execute("DELETE FROM ledger_rows WHERE message IN (SELECT id FROM ledger_messages WHERE scope = ?)", (WITHIN,))
            self._file.execute("DELETE FROM events WHERE json_extract(data, '$.aggregator') IS NOT NULL")

    # ---- the file

    def flush(self) -> None:
        """Writes all buffered rows in one transaction."""
        self._file.flush()

    def flush_if_due(self) -> None:
        """Writes the buffered rows when they are many or old."""
        self._file.flush_if_due()

    def check(self) -> None:
        """RunError when the file is damaged."""
        self._file.check()

    def close(self) -> None:
        """Flushes and closes. A closed run is one file, readable from a read-only place too, unless a reader is still there."""
        self._file.close()


@functools.cache
def _facts_of(kind: str) -> tuple[str, int]:
    """The step of a kind of message, and whether it is a broadcast."""
    if kind in CONTROL:
        return step_of(kind), 0
    cls = kind_class(kind)
    return step_of(kind), int(issubclass(cls, Broadcast) and not issubclass(cls, PerCluster))


def open_run(folder: Path) -> sqlite3.Connection:
    """Opens the database of a run for reading; ConfigError when there is none, or one that lacks a table."""
    path = folder / "run.db"
    try:
        has_file = path.is_file()
    except OSError as error:  # what is above it may not be looked into
        raise RunError(f"the run database {path} cannot be read: {error.strerror}") from error
    if not has_file:
        raise no_run_folder(folder, path.name)
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)  # whose folder may have ?, # or %
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        missing = [name for name in TABLES if name not in tables]
        if TABLES[-1] in missing:
            raise ConfigError(f"{folder} has a run.db without the tables of a run: nothing has been written to it yet")
        if missing:
            raise ConfigError(f"{folder} was written by an older version of coterie: its run.db has no table {missing[0]!r}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def read_run(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database of a run for reading, closed at the end. ConfigError as for `open_run`, RunError when it cannot be read."""
    try:
        with contextlib.closing(open_run(folder)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise unreadable(folder / "run.db", error) from error


def unreadable(path: Path, error: sqlite3.Error) -> RunError:
    """What is wrong with a run database that is there."""
    how = "is damaged" if type(error) is sqlite3.DatabaseError else "cannot be read"  # of its kinds, that of a damaged file
    return RunError(f"the run database {path} {how}: {error}")


def no_run_folder(folder: Path, missing: str) -> ConfigError:
    """Of a folder without a file that every run has."""
    if not folder.exists():
        return ConfigError(f"{folder} is not a run folder: it does not exist")
    why = f"it has no {missing}" if folder.is_dir() else "it is a file"
    return ConfigError(f"{folder} is not a run folder: {why}")
