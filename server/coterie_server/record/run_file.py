"""The SQLite file of a run: its tables, rows that are buffered and written in batches, and errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coterie.errors import RunError
from coterie.findings import Finding
from coterie_server.record.shared_disk import why_no_wal

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members (position INTEGER PRIMARY KEY, name TEXT NOT NULL, cluster TEXT NOT NULL, host TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS stages (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, method TEXT NOT NULL, rounds INTEGER NOT NULL, outcome TEXT NOT NULL,
    seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS figures (
    stage INTEGER NOT NULL, round INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (stage, round, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (
    stage INTEGER NOT NULL, round INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (stage, round)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results (stage INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (stage, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS user_results (
    stage INTEGER NOT NULL, name TEXT NOT NULL, member INTEGER NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (stage, name, member)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS expected (
    stage INTEGER NOT NULL, step TEXT NOT NULL, direction TEXT NOT NULL, scope TEXT NOT NULL, vectors REAL, spread REAL NOT NULL,
    drawn REAL, scalars REAL, PRIMARY KEY (stage, step, direction, scope)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS printed (
    stage INTEGER NOT NULL, direction TEXT NOT NULL, vectors REAL NOT NULL, PRIMARY KEY (stage, direction)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS memberships (
    stage INTEGER NOT NULL, round INTEGER NOT NULL, labels TEXT NOT NULL, PRIMARY KEY (stage, round)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS user_sets (id INTEGER PRIMARY KEY, members TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS ledger_messages (
    id INTEGER PRIMARY KEY, step TEXT NOT NULL, kind TEXT NOT NULL, direction TEXT NOT NULL, scope TEXT NOT NULL, link TEXT NOT NULL,
    user_set INTEGER, is_broadcast INTEGER NOT NULL, vectors INTEGER NOT NULL, scalars INTEGER NOT NULL, payload_bytes INTEGER NOT NULL,
    message_bytes INTEGER NOT NULL, frames INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS ledger_rows (
    seq INTEGER NOT NULL, attempt INTEGER NOT NULL, resent INTEGER NOT NULL, useful INTEGER NOT NULL, stage INTEGER NOT NULL,
    round INTEGER NOT NULL, message INTEGER NOT NULL);
CREATE VIEW IF NOT EXISTS ledger AS
    SELECT ledger_rows.rowid AS row, seq, attempt, resent, useful, stage, round, step, kind, direction, scope, link, user_set, is_broadcast,
        vectors, scalars, payload_bytes, message_bytes, frames
    FROM ledger_rows CROSS JOIN ledger_messages ON ledger_messages.id = message;
CREATE TABLE IF NOT EXISTS host_ledger (
    seq INTEGER NOT NULL, attempt INTEGER NOT NULL, resent INTEGER NOT NULL, direction TEXT NOT NULL, kind TEXT NOT NULL,
    link TEXT NOT NULL, vectors INTEGER NOT NULL, scalars INTEGER NOT NULL, payload_bytes INTEGER NOT NULL,
    message_bytes INTEGER NOT NULL, frames INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS events (at REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS decisions (seq INTEGER NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL);
"""
TABLES = re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", _SCHEMA)  # in the order of creation
FLUSH_S = 0.5  # the greatest age of buffered rows
_FLUSH_ROWS = 5000
_PAGES_BYTES = 64 << 10  # an I/O error with less free space than this means a full disk: SQLite writes so much of an index at once
_INSERTS = {
    "ledger_messages": 13,
    "ledger_rows": 7,
    "host_ledger": 11,
    "figures": 4,
    "rounds": 3,
    "memberships": 3,
    "events": 4,
    "decisions": 3,
}
OF_ROUNDS = ("figures", "rounds", "memberships")  # made again when a resumed run repeats a round
_LINKS = {"ledger_messages": 5, "host_ledger": 5}  # the column that names the link


class RunFile:
    """One file; `path` None keeps it in memory. `rows` wait to be written, by table. RunError when the disk refuses."""

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _INSERTS}
        self._path, self._clock, self._flushed_at = path, clock, clock()
        self.why_no_wal = "" if path is None else why_no_wal(path.parent)
        self._synchronous = "FULL" if self.why_no_wal else "NORMAL"  # without a log, a power failure could damage the file otherwise
        with self.refusals():
            self.connection = sqlite3.connect(path or ":memory:", timeout=30.0, isolation_level=None)
            if path is not None:
                # The index of a write-ahead log is memory that processes share, which those of two machines cannot.
                self.connection.execute(f"PRAGMA journal_mode={'DELETE' if self.why_no_wal else 'WAL'}")
                self.connection.execute(f"PRAGMA synchronous={self._synchronous}")
            self.connection.executescript(_SCHEMA)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Turns errors of SQLite in the block into a RunError with a sentence. A full disk has the system's words for it."""
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            if type(error) is sqlite3.DatabaseError:  # its subclasses have other causes than a damaged file
                raise self._damaged(str(error)) from error
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the higher bits only say more about the same error
            is_full = code == sqlite3.SQLITE_FULL
            if code == sqlite3.SQLITE_IOERR and self._path is not None:
                is_full = shutil.disk_usage(self._path.parent).free < _PAGES_BYTES
            reason = os.strerror(errno.ENOSPC) if is_full else str(error)
            raise RunError(f"cannot write the run database {self._path}: {reason}", Finding("R5")) from error

    def _damaged(self, how: str) -> RunError:
        return RunError(f"the run database {self._path} is damaged ({' '.join(how.split())}): start again with another --output")

    def check(self) -> None:
        """RunError when the file is damaged."""
        with self.refusals():
            found = self.connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(str(found))

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        """Writes at once."""
        with self.refusals():
            self.connection.execute(statement, values)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that the block writes, or nothing of it. Many rows then cost little more than one."""
        with self.refusals():
            try:
                self.connection.execute("BEGIN")
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def add(self, table: str, values: tuple[Any, ...]) -> None:
        """Buffers a row."""
        self.rows[table].append(values)

    def flush_if_due(self) -> None:
        """Writes the buffered rows when they are many or old."""
        if self._clock() - self._flushed_at > FLUSH_S or sum(map(len, self.rows.values())) >= _FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes all buffered rows in one transaction."""
        self._flushed_at = self._clock()
        if not any(self.rows.values()):
            return
        try:
            with self.transaction():
                for table, n_columns in _INSERTS.items():
                    marks = ",".join("?" * n_columns)
                    verb = "INSERT OR REPLACE" if table in OF_ROUNDS else "INSERT"
                    self.connection.executemany(f"{verb} INTO {table} VALUES ({marks})", self.rows[table])
        except RunError as error:
            if isinstance(error.__cause__, OverflowError):
                raise self._without_large_numbers() from error.__cause__
            raise
        for rows in self.rows.values():
            rows.clear()

    def _without_large_numbers(self) -> RunError:
        """Drops the rows that no table takes, so that the others can be written, and names the first of them."""
        found = ""
        for table, rows in self.rows.items():
            kept = [values for values in rows if not any(map(_is_too_large, values))]
            if len(kept) < len(rows) and not found:
                values = next(values for values in rows if any(map(_is_too_large, values)))
                link = f" of host {values[_LINKS[table]]!r}" if table in _LINKS else ""
                number = next(filter(_is_too_large, values))
                found = f"table {table!r}{link} was to have the number {number}, want -2^63 to 2^63 - 1"
            rows[:] = kept
        return RunError(found or f"cannot write the run database {self._path}: a number is too large", Finding("R5"))

    def close(self) -> None:
        """Flushes and closes. A closed run is one file, readable from a read-only place too, unless a reader still has it open."""
        try:
            self.flush()
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("PRAGMA busy_timeout=0")
                self.connection.execute("PRAGMA journal_mode=DELETE")
        finally:
            self.connection.close()


def _is_too_large(value: object) -> bool:
    """For SQLite, whose integers have 64 bits."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63
