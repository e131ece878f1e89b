"""`coterie ledger --verify`: what is wrong with a ledger is found, and said with its exchange, link and step."""

from __future__ import annotations

import io
import shutil
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from coterie_deploy.read.verify import print_verification, verdict_on
from coterie_server.interface.half import Expected
from coterie_server.record.rundb import RunDatabase
from tests.simulation import CoordinatorKilledError, Faults, World, small_experiment
from tests.small_runs import as_table


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three hosts."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    World(small_experiment({"name": "pdmm", "penalty": 0.3, "start": "zero"}, stop={"rounds": 3}), folder, 3).run()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def change(run: Path, statement: str) -> None:
    connection = sqlite3.connect(run / "run.db")
    if " ledger " in statement:
        as_table(connection)
    with connection:
        assert connection.execute(statement).rowcount == 1
    connection.close()


def said(run: Path) -> tuple[bool, str]:
    out = io.StringIO()
    agrees = print_verification(run, Console(file=out, width=300, color_system=None))
    return agrees, out.getvalue()


ONE = "rowid = (SELECT MIN(rowid) FROM {} WHERE seq = 3 AND link = 'h1' AND kind = 'pdmm.UpdatedModels')"
OWN, HOSTS = ONE.format("ledger"), ONE.format("host_ledger")
WHERE = "xchange 3, link 'h1', step S5 (pdmm.UpdatedModels, up): the coordinator booked "


def test_an_untouched_run_agrees(run: Path) -> None:
    agrees, text = said(run)
    assert agrees
    assert text.splitlines()[-1] == "Everything agrees."
    assert "rows, to the byte." in text
    assert "pdmm" in text


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        (f"UPDATE ledger SET message_bytes = message_bytes + 1 WHERE {OWN}", " bytes, host 'h1' "),
        (f"UPDATE host_ledger SET payload_bytes = payload_bytes - 8 WHERE {HOSTS}", "72 bytes of payload, host 'h1' 64"),
        (f"UPDATE host_ledger SET vectors = 4 WHERE {HOSTS}", "3 vectors, host 'h1' 4"),
        (f"UPDATE ledger SET vectors = 2 WHERE {OWN}", "2 vectors, host 'h1' 3"),
        (f"DELETE FROM ledger WHERE {OWN}", "0 bytes, host 'h1' "),
        (f"DELETE FROM host_ledger WHERE {HOSTS}", "host 'h1' 0 (the coordinator alone has it)"),
        (f"INSERT INTO ledger SELECT * FROM ledger WHERE {OWN}", "6 vectors, host 'h1' 3; "),
        (f"INSERT INTO host_ledger SELECT * FROM host_ledger WHERE {HOSTS}", "in 1 rows and 2"),
    ],
)
def test_a_row_that_was_changed_dropped_or_doubled_on_one_side_is_named(run: Path, statement: str, sentence: str) -> None:
    change(run, statement)
    agrees, text = said(run)
    assert not agrees
    assert WHERE in text
    assert sentence in text
    assert "THE BOOKS DIFFER" in text


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        (f"UPDATE ledger SET vectors = 2 WHERE {OWN}", "Stage 'pdmm', step S5 up: 26 vectors, closed form 27: 1 too few."),
        (f"INSERT INTO ledger SELECT * FROM ledger WHERE {OWN}", "Stage 'pdmm', step S5 up: 30 vectors, closed form 27: 3 too many."),
        (f"UPDATE ledger SET useful = 0 WHERE {OWN}", "Stage 'pdmm', step S5 up: 24 vectors, closed form 27: 3 too few."),
        (
            "UPDATE expected SET scalars = 10 WHERE step = 'smoothness'",
            "Stage 'pdmm', step smoothness up: 9 scalars, closed form 10: 1 too few.",
        ),
    ],
)
def test_a_step_that_is_not_its_closed_form_is_named(run: Path, statement: str, sentence: str) -> None:
    change(run, statement)
    agrees, text = said(run)
    assert not agrees
    assert sentence in text


def test_a_step_that_should_have_moved_something_is_named(run: Path) -> None:
    connection = sqlite3.connect(run / "run.db")
    as_table(connection)
    with connection:
        connection.execute("DELETE FROM ledger WHERE step = 'S5'")
        connection.execute("DELETE FROM host_ledger WHERE kind = 'pdmm.UpdatedModels'")
    connection.close()
    agrees, text = said(run)
    assert not agrees
    assert "step S5 up: 0 vectors, closed form 27: 27 too few." in text


def test_books_that_a_finished_run_misses_are_a_failure(run: Path) -> None:
    connection = sqlite3.connect(run / "run.db")
    with connection:
        connection.execute("DELETE FROM host_ledger WHERE link = 'h2'")
    connection.close()
    agrees, text = said(run)
    assert not agrees
    assert "The books of h2 did not arrive." in text


def test_the_book_of_a_host_that_was_left_out_is_missing_and_no_failure(run: Path) -> None:
    connection = sqlite3.connect(run / "run.db")
    with connection:
        connection.execute("DELETE FROM host_ledger WHERE link = 'h2'")
        connection.execute("INSERT INTO decisions VALUES (9, 'skip', '[\"h2\"]')")
    connection.close()
    agrees, text = said(run)
    assert agrees
    assert "The book of h2 did not arrive: the run has gone on without it." in text
    assert text.splitlines()[-1] == "What there is agrees."
    connection = sqlite3.connect(run / "run.db")
    with connection:
        connection.execute("DELETE FROM host_ledger WHERE link = 'h1'")
    connection.close()
    agrees, text = said(run)
    assert not agrees
    assert "The books of h1 did not arrive." in text


def test_a_run_under_way_is_judged_by_what_there_is(tmp_path: Path) -> None:
    experiment = small_experiment({"name": "pdmm", "penalty": 0.3}, stop={"rounds": 9})
    world = World(experiment, tmp_path / "run", 3, Faults(coordinator=[14]))
    with pytest.raises(CoordinatorKilledError):
        world.attempt(resume=False)
    agrees, text = said(tmp_path / "run")
    assert agrees, text
    assert "The books of h0, h1, h2 arrive when the run finishes." in text
    assert "Stage 'pdmm' has not ended: its closed form is not known yet." in text
    assert text.splitlines()[-1] == "What there is agrees."
    connection = sqlite3.connect(tmp_path / "run" / "run.db")
    as_table(connection)
    with connection:
        connection.execute("UPDATE ledger SET vectors = vectors + 1 WHERE rowid = (SELECT MIN(rowid) FROM ledger WHERE step = 'query')")
    connection.close()
    agrees, text = said(tmp_path / "run")
    assert not agrees
    assert "Stage 'global', step query down: " in text


def test_rows_that_only_the_parent_has_are_no_difference_while_a_run_goes_on(run: Path) -> None:
    change(run, f"DELETE FROM host_ledger WHERE {HOSTS}")
    change(run, "UPDATE run SET value = 'failed: it had to stop' WHERE key = 'status'")
    agrees, text = said(run)
    assert agrees
    assert "1 rows are the parents' alone so far" in text
    change(run, f"UPDATE host_ledger SET vectors = 9 WHERE {HOSTS.replace('seq = 3', 'seq = 2')}")
    assert not said(run)[0]


# ---- means


def with_form(folder: Path, n_vectors: int, form: Expected) -> Path:
    """A run that moved so many vectors in one step."""
    folder.mkdir()
    database = RunDatabase(folder / "run.db")
    for key, value in {"attempt": "1", "status": "finished", "name": "made"}.items():
        database.put(key, value)
    database.stage(0, "async", "async_l2gd", 5, "9 iterations", 0.1)
    as_table(database.connection)
    columns = (1, 1, 1, 0, 1, 0, 1, "within-average", "async_l2gd.Models", "up", "direct", "a", None, 0, n_vectors, 3 * n_vectors, 0, 0, 1)
    database.connection.execute(f"INSERT INTO ledger VALUES ({', '.join('?' * len(columns))})", columns)
    database.connection.execute(
        "INSERT INTO host_ledger SELECT seq, attempt, resent, direction, kind, link, vectors, scalars, 0, 0, 1 FROM ledger"
    )
    database.result(0, {}, {("within-average", "up"): form})
    database.close()
    return folder


@pytest.mark.parametrize(("n_vectors", "agrees", "sentence"), [(139, True, "+3.9 standard deviations."), (59, False, "-4.1 standard")])
def test_a_mean_must_be_within_four_standard_deviations(n_vectors: int, agrees: bool, sentence: str, tmp_path: Path) -> None:
    run = with_form(tmp_path / "run", n_vectors, Expected(100.0, spread=10.0))
    found, text = said(run)
    assert found == agrees
    assert sentence in text


@pytest.mark.parametrize(("n_vectors", "agrees"), [(117, True), (116, False)])
def test_where_the_coins_are_known_the_count_is_exact(n_vectors: int, agrees: bool, tmp_path: Path) -> None:
    run = with_form(tmp_path / "run", n_vectors, Expected(100.0, spread=10.0, drawn=117.0))
    found, text = said(run)
    assert found == agrees
    wanted = (
        "117 vectors, as for the coins that were drawn; 100 ± 10 over all coins."
        if agrees
        else "116 vectors, for the coins that were drawn 117"
    )
    assert wanted in text


def test_the_closed_forms_of_an_older_version_are_not_judged(run: Path) -> None:
    connection = sqlite3.connect(run / "run.db")
    with connection:
        connection.execute("DROP TABLE expected")
        connection.execute("CREATE TABLE expected (stage INTEGER, step TEXT, direction TEXT, vectors REAL)")
        connection.execute("INSERT INTO expected VALUES (0, 'S5', 'up', 1.0)")
    connection.close()
    agrees, text = said(run)
    assert agrees
    assert "of an older version" in text
    assert not verdict_on(run).judged


def test_a_reply_that_was_lost_with_its_stream_is_its_hosts_alone_and_no_difference(run: Path) -> None:
    columns = "seq, attempt, 7, direction, kind, link, vectors, scalars, payload_bytes, message_bytes, frames"
    change(run, f"INSERT INTO host_ledger SELECT {columns} FROM host_ledger WHERE {HOSTS}")
    assert not said(run)[0]
    change(run, """INSERT INTO events VALUES (1.0, 'lost', 'host ''h1'' is gone', '{"host": "h1"}')""")
    agrees, text = said(run)
    assert agrees
    assert "1 rows are those of 'h1' alone: replies on their way when its stream was lost." in text
    change(run, f"INSERT INTO host_ledger SELECT {columns} FROM host_ledger WHERE {HOSTS.replace('UpdatedModels', 'Aggregates')}")
    assert not said(run)[0], "a task that the parent has not sent cannot have arrived"
