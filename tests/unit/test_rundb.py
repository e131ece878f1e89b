"""The run database: what it refuses, and that a refusal leaves it usable."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.errors import RunError
from coterie.ledger import UP, Row
from coterie_server.rundb import RunDatabase


def row(seq: int, n_bytes: int) -> Row:
    return Row(seq, 1, 0, UP, "consensus.Slopes", 1, 3, 24, n_bytes, 1)


def test_a_number_beyond_64_bits_names_its_host_and_the_other_rows_are_kept(tmp_path: Path) -> None:
    database = RunDatabase(tmp_path / "run.db")
    database.event("note", "before")
    database.book_host("a", [row(1, 60), row(2, 2**64 - 1)])
    with pytest.raises(RunError, match=r"^table 'host_ledger' of host 'a' was to have the number 18446744073709551615, want -2\^63 to"):
        database.flush()
    assert not database.connection.in_transaction
    database.close()
    again = RunDatabase(tmp_path / "run.db")
    assert again.connection.execute("SELECT seq FROM host_ledger").fetchall() == [(1,)]
    assert again.connection.execute("SELECT text FROM events").fetchall() == [("before",)]
    again.close()


def test_whatever_fails_between_begin_and_commit_is_rolled_back() -> None:
    database = RunDatabase(None)
    database.book_host("a", [row(1, 60)])
    database._add("decisions", (1, "\ud800", "text that is no text"))
    with pytest.raises(UnicodeEncodeError):
        database.flush()
    assert not database.connection.in_transaction
    assert database.connection.execute("SELECT count(*) FROM host_ledger").fetchone() == (0,)
    database.connection.close()
