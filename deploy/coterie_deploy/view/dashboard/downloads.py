"""The downloads of a run: its ledger row by row, a copy of its database, its report. The caller removes the temporary files."""

import contextlib
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from coterie_deploy.read.costs import Weighing
from coterie_deploy.view.ledger_tables import write_lines
from coterie_deploy.view.report_page import html_of, page_of
from coterie_deploy.view.run_view import view_of
from coterie_server.record.rundb import read_run

_ROWS = """
SELECT COALESCE(stages.name, '') AS stage, round, seq, attempt, resent, useful, step, kind, direction, scope, link,
    user_sets.members AS users, is_broadcast, vectors, scalars, payload_bytes, message_bytes, frames
FROM ledger LEFT JOIN stages ON number = stage AND seq > 0 LEFT JOIN user_sets ON user_sets.id = user_set ORDER BY ledger.row
"""
_one_report = threading.Lock()  # they take seconds each


def ledger_of(folder: Path, form: str) -> Path:
    """All rows, useful or not, as csv or jsonl; `users` are places in member order, null for all behind the link."""
    with _new_file() as path, read_run(folder) as connection, path.open("w", encoding="utf-8", newline="") as file:
        found = connection.execute(_ROWS)
        write_lines(form, file, [column[0] for column in found.description], found)
    return path


def copy_of(folder: Path) -> Path:
    """A copy of the database at one moment."""
    with _new_file() as path, read_run(folder) as source, contextlib.closing(sqlite3.connect(path)) as target:
        source.backup(target)
    return path


@contextlib.contextmanager
def _new_file() -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="coterie-", delete=False) as file:
        path = Path(file.name)
    try:
        yield path
    except BaseException:
        path.unlink()
        raise


def report_of_run(folder: Path) -> str:
    with _one_report:
        return html_of(page_of([view_of(folder)], Weighing()))
