"""The run database: ledger, figures, events and decisions of one run, in SQLite, readable while the run goes on.

Rows are buffered and written in batches. Units: see `coterie.record.ledger`; times are seconds since the epoch. All tables and columns:
docs/reference/run-db.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.record.ledger import CONTROL, UP, Own, Row, as_ranges, of_ranges, step_of
from coterie.text.quoting import some
from coterie.wire.codec import ENVELOPE
from coterie.wire.messages import Broadcast, PerCluster, kind_class
from coterie_server.interface.expected import Expected, Key
from coterie_server.record.run_file import OF_ROUNDS, TABLES, RunFile

if TYPE_CHECKING:
    from coterie_server.interface.half import Members  # not at run time: it imports much that a reader of a database does not need

# The scopes of communication: with a client host that has no aggregator, inside a cluster, between the coordinator and the clusters,
# between the clusters' aggregators themselves.
DIRECT, WITHIN, BETWEEN, PEERS = "direct", "within-cluster", "between-cluster", "between-peers"
PEERS_FILE = "peers.db"  # with an aggregator's links to others, beside its run.db
_NAMED_RUNS = 4
_MAX_MESSAGES = 50_000  # different messages that are remembered; beyond, some are written again
_ROW = "seq, attempt, resent, direction, kind, vectors, scalars, payload_bytes, message_bytes, frames"  # the columns of a `Row`

OnEvent = Callable[[str, str, Mapping[str, Any]], None]  # receives the kind, the text and the data of each event of this process


# The answers of a host to a task, which were booked as useful.
_ANSWERS_AGAIN = """UPDATE ledger_rows SET useful = 0
    WHERE seq = ? AND message IN (SELECT id FROM ledger_messages WHERE link = ? AND direction = ?)"""


class RunDatabase(RunFile):
    """One run's database; `path` None keeps it in memory. RunError when the disk refuses."""

    def __init__(self, path: Path | None, clock: Any = time.time, *, scope: str = DIRECT, on_event: OnEvent | None = None) -> None:
        super().__init__(path, clock)
        self._n_messages: int  # ids that are taken
        self._scope, self._on_event = scope, on_event  # the scope is that of the links that are booked here
        self._messages: dict[tuple[Any, ...], int] = {}  # the id of each in `ledger_messages`
        self._labels: tuple[int, str] | None = None  # stage and text of the latest memberships
        self._same_labels: Indices | None = None  # the array that they came in: after most rounds it is the same
        with self.refusals():
            self._sets: dict[str, int] = dict(self.connection.execute("SELECT members, id FROM user_sets"))
            ((self._n_messages,),) = self.connection.execute("SELECT COALESCE(MAX(id), 0) FROM ledger_messages")
        if self.why_no_wal:
            self.event("journal", f"run.db has a rollback journal instead of a write-ahead log: {self.why_no_wal}")

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Indices | None]], useful: bool) -> None:
        """The parent's own rows for one message on one link; `where` is (stage, round)."""
        # Every message of a run is booked here. Most repeat one that was booked before, and then add one line of seven numbers.
        (stage, number), is_useful, scope, lines, known = where, int(useful), self._scope, self.rows["ledger_rows"], self._messages
        for row, users in rows:
            user_set = None if users is None else self._set_of(as_ranges(users))
            about = (scope, link, user_set, *row[3:])
            lines.append((*row[:3], is_useful, stage, number, known.get(about) or self._message(about)))

    def book_within(self, link: str, rows: Iterable[tuple[Row, Own]], user_sets: Sequence[str]) -> None:
        """An aggregator's side of a link to one of its hosts; `Own.user_set` is a place in `user_sets`, from 1."""
        self._book_of(WITHIN, link, rows, user_sets)

    def book_peers(self, link: str, rows: Iterable[tuple[Row, Own]]) -> None:
        """An aggregator's side of a link to another one."""
        self._book_of(PEERS, link, rows, ())

    def _book_of(self, scope: str, link: str, rows: Iterable[tuple[Row, Own]], user_sets: Sequence[str]) -> None:
        for row, own in rows:
            user_set = self._set_of(user_sets[own.user_set - 1]) if own.user_set else None
            about = (scope, link, user_set, *row[3:])
            message = self._messages.get(about) or self._message(about)
            self.add("ledger_rows", (*row[:3], own.useful, own.stage, own.round, message))

    def _message(self, about: tuple[Any, ...]) -> int:
        """The new id of a message in `ledger_messages`. `about`: scope, link, set of users, and a Row's fields after `resent`."""
        scope, link, user_set, direction, kind, *sizes = about
        if len(self._messages) >= _MAX_MESSAGES:
            self._messages.clear()
        self._n_messages += 1
        self._messages[about] = self._n_messages
        line = (self._n_messages, step_of(kind), kind, direction, scope, link, user_set, _is_broadcast(kind), *sizes)
        self.add("ledger_messages", line)
        return self._n_messages

    def book_host(self, link: str, rows: Iterable[Row]) -> None:
        """A host's own rows."""
        self.rows["host_ledger"] += [(*row[:5], link, *row[5:]) for row in rows]

    def event(self, kind: str, text: str, **data: Any) -> None:
        """Something a person may want to know."""
        self.add("events", (self._clock(), kind, text, json.dumps(data)))
        if self._on_event is not None:
            self._on_event(kind, text, data)

    def decide(self, seq: int, kind: str, value: Any) -> None:
        """A decision that depended on the clock, written before anything that follows from it: a later attempt must repeat it."""
        self.add("decisions", (seq, kind, json.dumps(value)))
        self.flush()

    def events_of(self, aggregator: str, lines: str) -> None:
        """The events of an aggregator, with the times of its clock. ProtocolError for lines that are not [time, kind, text, data]."""
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
            self.add("events", values)

    def _set_of(self, text: str) -> int:
        number = self._sets.get(text)
        if number is None:
            number = self._sets[text] = len(self._sets) + 1
            self.execute("INSERT INTO user_sets VALUES (?, ?)", (number, text))
        return number

    def times(self) -> Counter[tuple[str, str, int]]:
        """How often a message has been booked on each link, in each direction and exchange: the rows of envelopes, of both sides."""
        self.flush()
        query = "SELECT link, direction, seq FROM {} WHERE kind = ?"
        return Counter(row for table in ("ledger", "host_ledger") for row in self.connection.execute(query.format(table), (ENVELOPE,)))

    def links(self) -> list[str]:
        """The hosts with any row."""
        self.flush()
        return [name for (name,) in self.connection.execute("SELECT DISTINCT link FROM ledger UNION SELECT DISTINCT link FROM host_ledger")]

    def user_sets(self, numbers: Indices) -> list[str]:
        """The sets of users in the order of their ids from 1, in the numbers of the whole run; `numbers` (n,) has that of each member."""
        rows = self.connection.execute("SELECT members FROM user_sets ORDER BY id")
        return [as_ranges(numbers[of_ranges(members)]) for (members,) in rows]

    def own_rows(self, link: str) -> Iterator[tuple[Row, Own]]:
        """This side of a link."""
        query = f"SELECT {_ROW}, useful, stage, round, COALESCE(user_set, 0) FROM ledger WHERE link = ? ORDER BY row"  # noqa: S608
        for row in self.connection.execute(query, (link,)):
            yield Row._make(row[:10]), Own._make(row[10:])

    def host_rows(self, link: str) -> Iterator[Row]:
        """The host's side of a link."""
        return map(Row._make, self.connection.execute(f"SELECT {_ROW} FROM host_ledger WHERE link = ? ORDER BY rowid", (link,)))  # noqa: S608

    def event_lines(self) -> list[str]:
        """The events, a JSON array [time, kind, text, data] each."""
        rows = self.connection.execute("SELECT at, kind, text, data FROM events ORDER BY rowid")
        return [json.dumps([at, kind, text, json.loads(data)]) for at, kind, text, data in rows]

    def figures(self, stage: int, round_number: int, figures: Mapping[str, float]) -> None:
        """The figures of one round, which is over now; round 0 is the start of the stage."""
        self.add("rounds", (stage, round_number, self._clock()))
        for name, value in figures.items():
            self.add("figures", (stage, round_number, name, float(value)))

    def figures_of(self, stage: int) -> list[dict[str, float]]:
        """The figures of a stage, one mapping per round."""
        self.flush()
        rounds: dict[int, dict[str, float]] = {}
        rows = self.connection.execute("SELECT round, name, value FROM figures WHERE stage = ? ORDER BY round", (stage,))
        for number, name, value in rows:
            rounds.setdefault(number, {})[name] = float("nan") if value is None else value
        return [rounds[number] for number in sorted(rounds)]

    def membership(self, stage: int, round_number: int, labels: Indices) -> None:
        """The users' clusters (n,) after a round, written when they differ from the last ones. The caller must not change the array."""
        if labels is self._same_labels and self._labels is not None and self._labels[0] == stage:
            return
        self._same_labels = labels
        text = json.dumps(labels.tolist(), separators=(",", ":"))
        if self._labels is None or self._labels[0] != stage:
            self.flush()
            last = "SELECT labels FROM memberships WHERE stage = ? ORDER BY round DESC LIMIT 1"
            self._labels = (stage, (self.connection.execute(last, (stage,)).fetchone() or ("",))[0])
        if self._labels[1] != text:
            self.add("memberships", (stage, round_number, text))
            self._labels = (stage, text)

    def stage(self, number: int, name: str, method: str, rounds: int, outcome: str, seconds: float) -> None:
        """A stage has ended (or, with an empty outcome, has begun)."""
        if not outcome:
            self._labels, self._same_labels = (number, ""), None
        self.execute("INSERT OR REPLACE INTO stages VALUES (?, ?, ?, ?, ?, ?)", (number, name, method, rounds, outcome, seconds))

    def worked_s(self, stage: int) -> float:
        """Seconds that the attempts so far have worked on the rounds of a stage."""
        self.flush()
        return worked_s(self.connection, stage)

    def result(
        self,
        stage: int,
        figures: Mapping[str, float],
        expected: Mapping[Key, Expected | float] | Mapping[tuple[str, str], float],
        by_user: Mapping[str, Array] | None = None,
    ) -> None:
        """The results of a stage: its closing figures, those of each user in member order, the closed form of its traffic.

        A bare number is an exact count of d-vectors.
        """
        with self.transaction():
            for name, value in figures.items():
                self.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (stage, name, float(value)))
            for (step, direction, *scope), form in expected.items():
                whole = form if isinstance(form, Expected) else Expected(float(form))
                key = (stage, step, direction, "".join(scope))
                self.execute("INSERT OR REPLACE INTO expected VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*key, *whole))
            for name, values in (by_user or {}).items():
                judged = np.flatnonzero(~np.isnan(values))
                rows = [(stage, name, member, value) for member, value in zip(judged.tolist(), values[judged].tolist(), strict=True)]
                self.connection.executemany("INSERT OR REPLACE INTO user_results VALUES (?, ?, ?, ?)", rows)

    def printed(self, stage: int, vectors: Mapping[str, float]) -> None:
        """The paper's own count of the d-vectors of a stage, by direction."""
        for direction, count in vectors.items():
            self.execute("INSERT OR REPLACE INTO printed VALUES (?, ?, ?)", (stage, direction, float(count)))

    def members(self, members: Members, host_of: Mapping[str, str]) -> None:
        """Who takes part, and on which host."""
        rows = [(i, name, members.clusters[i], host_of[name]) for i, name in enumerate(members.names)]
        with self.transaction():
            self.connection.execute("DELETE FROM members")
            self.connection.executemany("INSERT INTO members VALUES (?, ?, ?, ?)", rows)

    def put(self, key: str, value: str) -> None:
        """A fact about the run: run_id, name, status, attempt, ..."""
        self.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))

    def get(self, key: str) -> str | None:
        """A fact about the run."""
        row = self.connection.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def hosts(self) -> list[str]:
        """Those with users."""
        return [name for (name,) in self.connection.execute("SELECT DISTINCT host FROM members ORDER BY host")]

    def reserve(self, seq: int) -> None:
        """Exchanges may have numbers up to `seq`. It is on the disk when this returns, so it survives a power failure too."""
        self.execute("PRAGMA synchronous=FULL")
        self.put("reserved", str(seq))
        self.execute(f"PRAGMA synchronous={self._synchronous}")

    @property
    def reserved(self) -> int:
        """The last number that an exchange may have, 0 where there was none."""
        return int(self.get("reserved") or 0)

    def rewind(self, seq: int, stage: int, round_number: int, unanswered: Mapping[str, int] | None = None) -> None:
        """A resumed run repeats everything after this point: later traffic was useless, and later figures are made again.

        `unanswered`: of some hosts, the task whose answer will be taken from it again.
        """
        self.execute("UPDATE ledger_rows SET useful = 0 WHERE seq > ?", (seq,))
        for host, task in (unanswered or {}).items():
            self.execute(_ANSWERS_AGAIN, (task, host, UP))
        for table in OF_ROUNDS:
            later = f"DELETE FROM {table} WHERE stage > ? OR (stage = ? AND round > ?)"  # noqa: S608 - fixed names
            self.execute(later, (stage, stage, round_number))
        self._labels = None
        for table in ("results", "user_results", "expected", "printed"):
            self.execute(f"DELETE FROM {table} WHERE stage >= ?", (stage,))  # noqa: S608 - four fixed names
        self.execute("DELETE FROM stages WHERE number > ?", (stage,))
        self.forget_books()

    def forget_books(self) -> None:
        """Deletes the books of hosts and aggregators. They bring them when a run fails, and again, whole, when it is resumed."""
        self.execute("DELETE FROM host_ledger")
        if self._scope == BETWEEN:
            those = "SELECT id FROM ledger_messages WHERE scope IN (?, ?)"
            self.execute(f"DELETE FROM ledger_rows WHERE message IN ({those})", (WITHIN, PEERS))  # noqa: S608 - a constant of ours
            self.execute("DELETE FROM events WHERE json_extract(data, '$.aggregator') IS NOT NULL")


@functools.cache
def _is_broadcast(kind: str) -> int:
    return int(kind not in CONTROL and issubclass(cls := kind_class(kind), Broadcast) and not issubclass(cls, PerCluster))


def open_run(folder: Path, name: str = "run.db") -> sqlite3.Connection:
    """Opens the database of a run for reading; ConfigError when there is none, or one that lacks a table."""
    path = folder / name
    try:
        has_file = path.is_file()
    except OSError as error:  # a folder above it is not accessible
        raise RunError(f"the run database {path} cannot be read: {error.strerror}") from error
    if not has_file:
        raise no_run_folder(folder, path.name)
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)  # as_uri quotes ?, # and %
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


def worked_s(connection: sqlite3.Connection, stage: int) -> float:
    """Seconds from the start of a stage to the end of its latest round, without the pauses between attempts."""
    ends = [at for (at,) in connection.execute("SELECT at FROM rounds WHERE stage = ? ORDER BY round", (stage,))]
    starts = [at for (at,) in connection.execute("SELECT at FROM events WHERE kind = 'start' ORDER BY at")]
    return sum((after - max([before, *(at for at in starts if at < after)]) for before, after in itertools.pairwise(ends)), 0.0)


@contextlib.contextmanager
def read_run(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database of a run for reading, closed at the end. ConfigError as for `open_run`, RunError when it cannot be read."""
    try:
        with contextlib.closing(open_run(folder)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise unreadable(folder / "run.db", error) from error


def unreadable(path: Path, error: sqlite3.Error) -> RunError:
    """The error for a run database that exists, but is damaged or cannot be read."""
    how = "is damaged" if type(error) is sqlite3.DatabaseError else "cannot be read"  # its subclasses have other causes
    return RunError(f"the run database {path} {how}: {error}")


def no_run_folder(folder: Path, missing: str) -> ConfigError:
    """The error for a folder without a file that every run has."""
    if not folder.exists():
        return ConfigError(f"{folder} is not a run folder: it does not exist")
    why = f"it has no {missing}" if folder.is_dir() else "it is a file"
    below = sorted(path.parent.name for path in folder.glob(f"*/{missing}"))
    return ConfigError(f"{folder} is not a run folder: {why}{f', but these in it are: {some(below, _NAMED_RUNS)}' if below else ''}")
