"""The pages on the ledger and its database: tables and columns are those of the database, and the queries run."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.registry import methods
from coterie_server.record.rundb import RunDatabase, open_run
from tests.simulation import World, small_experiment

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE, TABLES = ((REFERENCE / name).read_text(encoding="utf-8") for name in ("ledger.md", "run-db.md"))
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def section(page: str, title: str) -> str:
    """What stands under a heading of the second level."""
    parts = (part.partition("\n") for part in re.split(r"^## ", page, flags=re.MULTILINE))
    return next(text for heading, _, text in parts if heading == title)


def described() -> dict[str, list[str]]:
    """The columns of each table on the page; a row may have several."""
    parts = re.split(r"^### ", section(TABLES, "Tables"), flags=re.MULTILINE)[1:]
    rows = {part.partition("\n")[0]: re.findall(r"^\| (`[^|]+`) \|", part, flags=re.MULTILINE) for part in parts}
    return {name: re.findall(r"\w+", " ".join(found)) for name, found in rows.items()}


def test_the_page_has_the_tables_and_columns_of_the_database() -> None:
    with contextlib.closing(RunDatabase(None)) as database:
        names = [name for (name,) in database.connection.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")]
        found = {name: [row[1] for row in database.connection.execute(f"PRAGMA table_info({name})")] for name in names}
    assert described() == found


def test_every_method_has_its_closed_form_on_the_page() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", section(PAGE, "Closed forms"), flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) - {"paper", "lean", "forecast"} == set(methods())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """Placement paper, whose S7 is a broadcast to three hosts."""
    folder = tmp_path_factory.mktemp("page") / "run"
    World(small_experiment({"name": "pdmm", "penalty": 0.3, "placement": "paper", "start": "zero"}, stop={"rounds": 2}), folder, 3).run()
    with contextlib.closing(open_run(folder)) as connection:
        yield connection


@pytest.mark.parametrize("query", QUERIES)
def test_its_queries_run(query: str, run: sqlite3.Connection) -> None:
    run.execute(query).fetchall()


def test_its_queries_count_a_broadcast_once_and_know_the_closed_form(run: sqlite3.Connection) -> None:
    by_step, *_, not_closed = QUERIES
    vectors = {row[:2]: row[2] for row in run.execute(by_step)}
    assert vectors["S7", "down"] == vectors["S5", "up"] == 18
    assert run.execute(not_closed).fetchall() == []
    doubled = not_closed.replace("FROM ledger WHERE", "FROM (SELECT * FROM ledger UNION ALL SELECT * FROM ledger) WHERE")
    assert {row[1] for row in run.execute(doubled)} >= {"S5"}
