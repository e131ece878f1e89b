"""The run database: what it refuses, and that a refusal leaves it usable."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie.record.ledger import UP, Own, Row
from coterie_server.record import rundb, shared_disk, summary
from coterie_server.record.rundb import BETWEEN, WITHIN, RunDatabase, open_run, read_run


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
    database.add("decisions", (1, "\ud800", "text that is no text"))
    with pytest.raises(UnicodeEncodeError):
        database.flush()
    assert not database.connection.in_transaction
    assert database.connection.execute("SELECT count(*) FROM host_ledger").fetchone() == (0,)
    database.connection.close()


def test_a_reader_sees_all_that_a_stage_has_left_or_nothing_of_it() -> None:
    database = RunDatabase(None)
    with pytest.raises(TypeError):
        database.result(0, {"clusters": 3.0, "accuracy": None}, {("S5", "up"): 4.0})  # type: ignore[dict-item]
    assert not database.connection.in_transaction
    assert database.connection.execute("SELECT count(*) FROM results").fetchone() == (0,)
    database.result(0, {"clusters": 3.0}, {("S5", "up"): 4.0}, {"heldout_loss": np.array([0.5, np.nan, 0.25])})
    assert database.connection.execute("SELECT name, value FROM results").fetchall() == [("clusters", 3.0)]
    assert database.connection.execute("SELECT member, value FROM user_results").fetchall() == [(0, 0.5), (2, 0.25)]
    assert database.connection.execute("SELECT step, direction, vectors FROM expected").fetchall() == [("S5", "up", 4.0)]
    database.connection.close()


def test_the_first_clusters_of_a_stage_are_written_also_where_they_are_those_of_the_stage_before() -> None:
    database, labels = RunDatabase(None), np.array([0, 0, 1])
    for stage in (0, 1):
        database.stage(stage, f"s{stage}", "pdmm", 0, "", 0.0)
        for number in (1, 2):
            database.membership(stage, number, labels)
    database.flush()
    assert database.connection.execute("SELECT stage, round FROM memberships ORDER BY stage").fetchall() == [(0, 1), (1, 1)]
    database.connection.close()


def test_books_that_were_brought_before_a_run_was_resumed_are_forgotten() -> None:
    """Everybody brings all of its book again, whatever of it was already here; the parent's own rows stay."""
    database = RunDatabase(None, scope=BETWEEN)
    users = np.array([0])
    database.book("x", (0, 1), [(row(1, 60), users), (row(2, 60), users)], True)
    database.event("join", "aggregator 'x' joined", host="x")
    for _ in range(2):
        database.forget_books()
        database.book_host("x", [row(1, 60), row(2, 60)])
        database.book_within("x/h", [(row(5, 60), Own(1, 0, 1, 1))], ["0"])
        database.book_host("x/h", [row(5, 60)])
        database.events_of("x", '[1.0, "join", "host h joined", {"host": "h"}]')
        database.flush()
    books = summary.reconcile(database.connection)
    assert (books.n_agreed, books.n_differences) == (3, 0)
    assert database.connection.execute("SELECT text FROM events").fetchall() == [("aggregator 'x' joined",), ("host h joined",)]
    database.rewind(1, 0, 0)
    assert database.connection.execute("SELECT link, seq, useful FROM ledger").fetchall() == [("x", 1, 1), ("x", 2, 0)]
    assert database.connection.execute("SELECT count(*) FROM host_ledger").fetchone() == (0,)
    database.close()


def test_messages_that_are_alike_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a resumed run, which does not read them all again: it writes what it books anew, under other ids."""
    monkeypatch.setattr(rundb, "_MAX_MESSAGES", 2)
    for attempt in (1, 2):
        database = RunDatabase(tmp_path / "run.db")
        for seq in range(1, 6):
            database.book("h", (0, seq), [(row(seq, 60), None), (row(seq, 61), None)], True)
        database.flush()
        assert database.connection.execute("SELECT count(*) FROM ledger_messages").fetchone() == (2 * attempt,)
        assert database.connection.execute("SELECT count(*), sum(message_bytes) FROM ledger").fetchone() == (10 * attempt, 605 * attempt)
        database.close()
    database = RunDatabase(tmp_path / "run.db")
    for size in (60, 61, 62, 60):  # the third is one more than are remembered
        database.book("h", (0, 7), [(row(7, size), None)], True)
    database.flush()
    assert database.connection.execute("SELECT count(*) FROM ledger_messages").fetchone() == (4 + 4,)
    assert [size for (size,) in database.connection.execute("SELECT message_bytes FROM ledger WHERE seq = 7")] == [60, 61, 62, 60]
    database.close()


def test_an_aggregator_that_is_started_again_keeps_what_it_booked_itself() -> None:
    database = RunDatabase(None, scope=WITHIN)
    database.book("h", (0, 1), [(row(1, 60), None), (row(2, 60), None)], True)
    database.book_host("h", [row(1, 60)])
    database.flush()
    database.rewind(1, 0, 0)
    assert [(one.seq, own.useful) for one, own in database.own_rows("h")] == [(1, 1), (2, 0)]
    assert list(database.host_rows("h")) == []
    database.close()


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%41", "ü & <c>"])
def test_a_run_is_read_in_a_folder_of_any_name_and_nothing_is_written_beside_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with contextlib.closing(RunDatabase(folder / "run.db")) as database:
        database.put("name", "odd")
    with contextlib.closing(open_run(folder)) as connection:
        assert connection.execute("SELECT value FROM run WHERE key = 'name'").fetchone() == ("odd",)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM run")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_run_database_that_cannot_be_read_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.db"
    path.write_text("no database, but long enough to be taken for one" * 20)
    with pytest.raises(RunError, match=rf"^the run database {path} is damaged: file is not a database$"), read_run(tmp_path):
        pass
    path.unlink()
    RunDatabase(path).close()
    with pytest.raises(RunError, match=rf"^the run database {path} cannot be read: no such table: gone$"), read_run(tmp_path) as connection:
        connection.execute("SELECT * FROM gone")
    elsewhere, connect = f"file:{tmp_path}/none?mode=ro", sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda _, **options: connect(elsewhere, **options))
    with pytest.raises(RunError, match=rf"^the run database {path} cannot be read: unable to open database file$"), read_run(tmp_path):
        pass

    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(RunError, match=rf"^the run database {path} cannot be read: Permission denied$"), read_run(tmp_path):
        pass


def test_what_is_no_run_folder_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("nowhere", "it does not exist"), ("file", "it is a file"), ("", "it has no run.db")):
        with pytest.raises(ConfigError, match=rf"{name} is not a run folder: {why}$"), read_run(tmp_path / name):
            pass
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").touch()
    with pytest.raises(ConfigError, match=r"it has no run.db, but these in it are: a, b$"), read_run(tmp_path):
        pass


def test_on_a_shared_file_system_another_process_reads_a_run_that_goes_on_without_a_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shared_disk.OVERRIDE, "rollback")
    said = list[str]()
    database = RunDatabase(tmp_path / "run.db", on_event=lambda _, text, __: said.append(text))
    assert said == ["run.db has a rollback journal instead of a write-ahead log: COTERIE_RUN_DB_JOURNAL is rollback"]
    count = "import sys; from coterie_server.record.rundb import open_run; from pathlib import Path; "
    count += "print(*open_run(Path(sys.argv[1])).execute('SELECT count(*) FROM host_ledger').fetchone())"
    for n in (1, 2):
        database.book_host("a", [row(n, 60)])
        database.flush()
        assert database.connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run.db"]
        done = subprocess.run([sys.executable, "-c", count, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == [str(n)]
    database.close()


@pytest.mark.parametrize(("journal", "level"), [("wal", 1), ("rollback", 2)])  # SQLite's NORMAL and FULL
def test_a_file_without_a_log_stays_safe_from_power_failures_once_numbers_are_reserved(
    journal: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shared_disk.OVERRIDE, journal)
    database = RunDatabase(tmp_path / "run.db")
    for _ in range(2):
        assert database.connection.execute("PRAGMA synchronous").fetchone() == (level,)
        database.reserve(1000)
    database.close()


def test_a_run_that_comes_to_a_shared_file_system_gives_its_write_ahead_log_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_disk.OVERRIDE, "wal")
    killed = RunDatabase(tmp_path / "run.db")
    killed.book_host("a", [row(1, 60)])
    killed.flush()
    killed.connection.close()
    monkeypatch.setenv(shared_disk.OVERRIDE, "rollback")
    again = RunDatabase(tmp_path / "run.db")
    assert again.connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert again.connection.execute("SELECT seq FROM host_ledger").fetchall() == [(1,)]
    again.close()


@pytest.mark.parametrize(
    ("folder", "kind", "is_shared"),
    [
        ("runs", "ext4", False),
        ("home/x/runs", "nfs4", True),
        ("home two/x", "fuse.sshfs", True),
        ("home/local", "tmpfs", False),
        ("homes", "ext4", False),
        ("fuse", "fuse.overlayfs", False),
    ],
)
def test_the_mount_of_a_folder_says_whether_machines_share_it(
    folder: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_shared: bool
) -> None:
    mounts = tmp_path / "mounts"
    places = {"home": "nfs4", "home\\040two": "fuse.sshfs", "home/local": "tmpfs", "fuse": "fuse.overlayfs"}
    lines = [f"server:/x {tmp_path}/{place} {found} rw 0 0" for place, found in places.items()]
    mounts.write_text("\n".join(["/dev/root / ext4 rw 0 0", *lines]) + "\n")
    monkeypatch.setattr(shared_disk, "_MOUNTS", mounts)
    monkeypatch.delenv(shared_disk.OVERRIDE, raising=False)
    assert shared_disk.file_system(tmp_path / folder) == kind
    why = shared_disk.why_no_wal(tmp_path / folder)
    assert why == (f"its folder is on a shared file system ({kind})" if is_shared else "")


def test_an_unknown_journal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_disk.OVERRIDE, "none")
    with pytest.raises(ConfigError, match="COTERIE_RUN_DB_JOURNAL is 'none', want wal, rollback or nothing"):
        RunDatabase(tmp_path / "run.db")
