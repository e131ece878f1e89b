"""What can be taken away from a run: its ledger row by row, a copy of its database, its report."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from coterie_deploy.read.costs import Weighing
from coterie_deploy.view.report_page import html_of, page_of
from coterie_deploy.view.run_view import view_of
from coterie_server.record.rundb import read_run

_ROWS_AT_ONCE = 20_000
_ROWS = """
SELECT ledger.row, COALESCE(stages.name, '') AS stage, round, seq, attempt, resent, useful, step, kind, direction, scope, link,
    user_sets.members AS users, is_broadcast, vectors, scalars, payload_bytes, message_bytes, frames
FROM ledger LEFT JOIN stages ON number = stage AND seq > 0 LEFT JOIN user_sets ON user_sets.id = user_set
WHERE ledger.row > ? ORDER BY ledger.row LIMIT ?
"""
_one_report = threading.Lock()  # they take seconds each


class LedgerPieces:
    """All rows as CSV with a header, or as JSON lines; `users` are places in member order.

    The first rows are read at once: ConfigError or RunError for a run that is gone or cannot be read, while that can still be answered.
    """

    def __init__(self, folder: Path, form: str) -> None:
        self._folder, self._form = folder, form
        self._columns, self._first = _rows_after(folder, 0)

    async def __aiter__(self) -> AsyncIterator[str]:
        """Piece by piece; nobody waits while it is written."""
        rows, is_csv = self._first, self._form == "csv"
        if is_csv:
            yield _as_csv([self._columns])
        while rows:
            yield await run_in_threadpool(_as_csv, [row[1:] for row in rows]) if is_csv else _as_lines(self._columns, rows)
            _, rows = await run_in_threadpool(_rows_after, self._folder, rows[-1][0])


def _rows_after(folder: Path, last: int) -> tuple[list[str], list[Any]]:
    """A connection for each piece: a slow reader keeps none open, with which the run could not be closed."""
    with read_run(folder) as connection:
        found = connection.execute(_ROWS, (last, _ROWS_AT_ONCE))
        return [column[0] for column in found.description[1:]], found.fetchall()


def _as_csv(rows: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _as_lines(columns: list[str], rows: list[Any]) -> str:
    return "".join(json.dumps(dict(zip(columns, row[1:], strict=True))) + "\n" for row in rows)


def copy_of(folder: Path) -> Path:
    """A copy of the database, of one moment, in a temporary file that is the caller's."""
    with tempfile.NamedTemporaryFile(suffix=".db", delete=False) as file:
        path = Path(file.name)
    try:
        with read_run(folder) as source, contextlib.closing(sqlite3.connect(path)) as target:
            source.backup(target)
    except BaseException:
        path.unlink()
        raise
    return path


def report_of_run(folder: Path) -> str:
    """The page that `coterie report` writes."""
    with _one_report:
        return html_of(page_of([view_of(folder)], Weighing()))
