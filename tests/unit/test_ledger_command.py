"""`coterie ledger` of a part of the ledger, in a grouping or a format: what it says and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from rich.console import Console

from coterie.record.ledger import DOWN, SESSION, UP, Row
from coterie.wire.codec import ENVELOPE
from coterie_deploy.cli import app as cli
from coterie_deploy.read.ledger_page import savings_table
from coterie_deploy.terminal.tables import is_narrow, is_tiny
from coterie_deploy.view import ledger_tables
from coterie_server.interface.half import Members
from coterie_server.record.compressed import Saving
from coterie_server.record.query import KEYS, MEASURES, ROW_COLUMNS
from coterie_server.record.rundb import RunDatabase
from tests.small_runs import EXPERIMENT

QUERY, SLOPES, FINAL = "consensus.GroupModel", "consensus.Slopes", "evaluation.FinalModels"
NAMES = ("u0", 'with, comma and "quotes"', "u2")
Say = Callable[..., str]


def made(folder: Path, n_stages: int = 2, n_rounds: int = 3) -> Path:
    """A run folder: stages of some rounds, three users of two clusters on two hosts."""
    folder.mkdir()
    with contextlib.closing(RunDatabase(folder / "run.db", lambda: 0.0)) as database:
        for key, value in {"name": "made", "run_id": "1f", "status": "finished", "final_stage": f"stage-{n_stages - 1}"}.items():
            database.put(key, value)
        database.members(Members(NAMES, ("x", "x", "y")), dict(zip(NAMES, ("one", "one", "two"), strict=True)))
        seq = 0
        for stage in range(n_stages):
            database.stage(stage, f"stage-{stage}", "global", n_rounds, "converged", 1.0)
            database.figures(stage, 0, {})
            for number in range(1, n_rounds + 1):
                seq += 1
                for link, vectors in (("one", 2), ("two", 1)):
                    for way, kind in ((DOWN, QUERY), (UP, SLOPES), (UP, ENVELOPE)):
                        n = 0 if kind == ENVELOPE else vectors
                        listed = [(Row(seq, 1, 0, way, kind, n, 3 * n, 24 * n, 100 * n + 10, 1), None)]
                        database.book(link, (stage, number), listed, True)
                database.book("two", (stage, number), [(Row(seq, 1, 1, DOWN, QUERY, 1, 3, 24, 7, 1), None)], False)
                database.figures(stage, number, {"objective": 1 + 2.0**-number})
            n_vectors = 3.0 * n_rounds
            database.result(stage, {}, {("query", "down"): n_vectors, ("gradient", "up"): n_vectors})
        database.book("one", (0, 0), [(Row(0, 1, 0, UP, SESSION, 0, 0, 0, 500, 0), None)], True)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return made(tmp_path / "run")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """What the command prints when it succeeds."""

    def run(*arguments: object) -> str:
        assert cli._run(["ledger", *map(str, arguments)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Say:
    """The sentence with which the command fails with this exit code."""

    def run(code: int, *arguments: object) -> str:
        assert cli._run(["ledger", *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        return err

    return run


def data(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# ---- groups


def test_a_grouped_table_has_totals_shares_and_the_closed_form(folder: Path, say: Say) -> None:
    lines = [line.split() for line in say(folder, "--by", "step,direction", "--sort", "wire").splitlines()]
    listed = {tuple(words[:2]): words[2:] for words in lines if len(words) > 10}
    # 2 stages x 3 rounds: 2 + 1 vectors, 200 + 10 and 100 + 10 bytes, and 5 for each of two frames
    assert listed["query", "down"] == ["18", "18", "54", "12", "432", "B", "1.92", "kB", "1.98", "kB", "42.7%"]
    assert listed["gradient", "up"] == listed["query", "down"]
    assert listed["control", "up"] == ["0", "-", "0", "12", "0", "B", "620", "B", "680", "B", "14.7%"], "and the session"
    total = next(words for words in lines if words[:1] == ["total"])
    assert total[1:3] == ["36", "36"]
    assert total[-1] == "100.0%"


def test_the_largest_comes_first_where_that_is_asked_for(folder: Path, say: Say) -> None:
    groups = data(say(folder, "--by", "link,step", "--sort", "wire", "--format", "csv"))
    sizes = [int(group["wire_bytes"]) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2
    assert groups[0]["link"] == "one"


def test_a_part_without_by_is_grouped_by_step_direction_and_scope(folder: Path, say: Say) -> None:
    text = say(folder, "--rounds", "2")
    assert "made, run 1f: rounds 2" in text
    assert [line.split()[:3] for line in text.splitlines() if " direct " in line] == [
        ["query", "down", "direct"],
        ["gradient", "up", "direct"],
        ["control", "up", "direct"],
    ]
    assert "formula" not in text


@pytest.mark.parametrize(
    ("options", "vectors"),
    [
        (["--rounds", "1"], 12),
        (["--rounds", "2:"], 24),
        (["--rounds", ":2"], 24),
        (["--rounds", "1:3"], 36),
        (["--rounds", "2:2", "--stage", "stage-1"], 6),
        (["--stage", "stage-1"], 18),
        (["--stage", "session"], 0),
        (["--direction", "up"], 18),
        (["--step", "query", "--step", "gradient"], 36),
        (["--scope", "direct"], 36),
        (["--scope", "direct", "--link", "two"], 12),
        (["--cluster", "x"], 24),
        (["--member", "u0"], 12),
        (["--member", "u0", "--member", NAMES[1]], 24),
        (["--member", "u2", "--direction", "down"], 6),
        (["--repeats"], 6),
    ],
)
def test_options_choose_a_part(folder: Path, say: Say, options: list[str], vectors: int) -> None:
    groups = data(say(folder, *options, "--by", "attempt", "--format", "csv"))
    assert sum(float(group["vectors"]) for group in groups) == vectors


def test_until_a_goal(folder: Path, say: Say) -> None:
    text = say(folder, "--until", "objective=1.3", "--by", "stage,round")
    assert "objective <= 1.3 was reached in round 2 of 3 of stage stage-1\n" in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("stage-")] == [["stage-1", "1"], ["stage-1", "2"]]
    text = say(folder, "--until", "gap=0.12", "--stage", "stage-0", "--by", "stage", "--rounds", "2:")
    assert " of stage stage-0; gap: from the smallest objective" in " ".join(text.split())
    text = say(folder, "--until", "objective=1.2", "--stage", "stage-0", "--by", "stage", "--rounds", "2:")
    assert "what ended the stage" in " ".join(text.split())
    assert len([line for line in text.splitlines() if line.startswith("stage-0")]) == 1
    limited = data(say(folder, "--until", "objective=1.2", "--rounds", ":1", "--by", "round", "--format", "csv"))
    assert [group["round"] for group in limited] == ["1"]


def test_a_goal_is_about_the_stage_that_the_result_refits_as_in_the_report(folder: Path, say: Say) -> None:
    with contextlib.closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as connection:
        experiment = {**yaml.safe_load(EXPERIMENT), "method": {"name": "pdmm", "penalty": 0.05, "refit": True}}
        connection.execute("INSERT INTO run VALUES ('experiment', ?)", (json.dumps(experiment),))
        connection.execute("UPDATE stages SET name = 'pdmm', method = 'pdmm' WHERE number = 0")
        connection.execute("UPDATE stages SET name = 'refit', method = 'oracle' WHERE number = 1")
        connection.execute("UPDATE run SET value = 'refit' WHERE key = 'final_stage'")
    assert "of stage pdmm\n" in say(folder, "--until", "objective=1.3", "--by", "stage")
    assert "of stage refit\n" in say(folder, "--until", "objective=1.3", "--by", "stage", "--stage", "refit")


def test_a_goal_that_was_never_reached_ends_with_3(folder: Path, refuse: Say) -> None:
    said = refuse(3, folder, "--until", "objective=0.5", "--by", "step")
    assert said == "error: stage 'stage-1' has not reached objective <= 0.5: it came to 1.12 in round 3 of 3\n"
    said = refuse(3, folder, "--until", "gap=1e-20", "--by", "step")
    assert "stage 'stage-1' says nothing of gap <= 1e-20: round 3 of 3" in said
    assert "has no figure 'accuracy'" in refuse(2, folder, "--until", "accuracy=0.9")
    assert "the run has no stage 'session'" in refuse(2, folder, "--until", "gap=1", "--stage", "session")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--by", "steps"], "--by has the key 'steps', want some of stage, round, step"),
        (["--by", ""], "--by has the key ''"),
        (["--by", "step,step"], "want each key once"),
        (["--rounds", "x"], "--rounds is 'x', want a round such as 7"),
        (["--rounds", ":"], "--rounds is ':'"),
        (["--rounds", ""], "--rounds is ''"),
        (["--rounds", "9:3"], "--rounds is '9:3', from 9 on but only up to 3, want the smaller first: 3:9"),
        (["--rounds", "-3"], "--rounds is '-3'"),
        (["--sort", "size"], "--sort is 'size', want one of vectors, scalars, payload, message, wire, frames"),
        (["--sort", "wire", "--format", "csv"], "--sort is for groups, want --by with it"),
        (["--format", "xml"], "--format is 'xml', want one of table, csv, jsonl, parquet"),
        (["--format", "parquet"], "want --output FILE"),
        (["--scope", "within"], "the run has no scope 'within-cluster', want one of direct"),
        (["--member", "u9"], "the run has no user 'u9'"),
        (["--until", "gap"], "the goal is 'gap', want FIGURE=VALUE"),
        (["--by", "stage", "--total"], "--total is all stages together, want --by without stage"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(folder: Path, refuse: Say, options: list[str], said: str) -> None:
    assert said in refuse(2, folder, *options)


def test_no_such_traffic_is_said(folder: Path, say: Say) -> None:
    said = " ".join(say(folder, "--rounds", "99", "--stage", "stage-0").split())
    there_is = "There are rounds 1 to 3; steps query, gradient, control; directions down, up; scopes direct."
    assert said.endswith(f"There is no such traffic. {there_is}")
    said = " ".join(say(folder, "--repeats", "--stage", "session").split())
    assert said.endswith("There is no such traffic. There is no other of these stages either.")


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("options", [["--by", "step,direction,scope"], ["--by", "link,cluster"], ["--by", "user"], []])
def test_tables_fit_the_terminal(folder: Path, say: Say, monkeypatch: pytest.MonkeyPatch, width: int, options: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = say(folder, *options)
    assert all(len(line) <= width for line in text.splitlines())
    assert "wire" in text


def test_a_narrow_table_leaves_out_numbers_rather_than_to_break_them(folder: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = [line.split() for line in say(folder, "--by", "step,direction,scope", "--sort", "vectors").splitlines()]
    assert ["step", "way", "scope", "vectors", "wire"] in lines, "what is sorted by comes first"
    assert ["query", "down", "direct", "18", "1.98", "kB"] in lines


def test_a_long_table_ends_with_how_to_see_the_rest(folder: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_tables, "_MAX_LINES", 4)
    text = say(folder, "--by", "stage,round")
    assert "and 3 lines more, counted in the total: --format csv has them all" in text
    (total,) = (line.split() for line in text.splitlines() if line.startswith("total"))
    assert total[1] == "36"


# ---- data


def test_the_rows_of_the_ledger_are_the_same_in_every_format(folder: Path, say: Say, tmp_path: Path) -> None:
    wanted = sqlite3.connect(folder / "run.db").execute("SELECT COUNT(*), SUM(vectors) FROM ledger WHERE useful").fetchone()
    listed = [json.loads(line) for line in say(folder, "--format", "jsonl").splitlines()]
    assert (len(listed), sum(line["vectors"] for line in listed)) == wanted
    assert tuple(listed[0]) == ROW_COLUMNS
    say(folder, "--output", tmp_path / "rows.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == listed
    written = data(say(folder, "--format", "csv"))
    assert [{**line, "users": json.loads(line["users"]) if line["users"] else None} for line in written] == [
        {key: value if key == "users" else str(value) for key, value in line.items()} for line in listed
    ]
    assert {line["stage"] for line in listed} == {"stage-0", "stage-1", "session"}


def test_groups_are_the_same_in_every_format(folder: Path, say: Say, tmp_path: Path) -> None:
    by = ("--by", "stage,step,direction")
    listed = [json.loads(line) for line in say(folder, *by, "--format", "jsonl").splitlines()]
    assert tuple(listed[0]) == ("stage", "step", "direction", *MEASURES, "closed_form")
    assert (listed[0]["vectors"], listed[0]["closed_form"], listed[2]["closed_form"]) == (9, 9.0, None)
    say(folder, *by, "--format", "parquet", "--output", tmp_path / "groups")
    assert pyarrow.parquet.read_table(tmp_path / "groups").to_pylist() == listed
    written = data(say(folder, *by, "--format", "csv"))
    assert written == [{key: "" if value is None else str(value) for key, value in line.items()} for line in listed]


@pytest.mark.parametrize("by", KEYS)
def test_every_key_has_a_place_in_a_parquet_file(folder: Path, say: Say, tmp_path: Path, by: str) -> None:
    say(folder, "--by", by, "--output", tmp_path / "groups.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "groups.parquet").num_rows > 0


def test_many_rows_are_written_batch_by_batch(folder: Path, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_tables, "_BATCH_ROWS", 10)
    say(folder, "--output", tmp_path / "rows.parquet")
    found = pyarrow.parquet.ParquetFile(tmp_path / "rows.parquet")
    assert (found.metadata.num_rows, found.metadata.num_row_groups) == (37, 4)


def test_without_pyarrow_there_is_one_sentence(folder: Path, refuse: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'coterie[frames]'" in refuse(2, folder, "--output", tmp_path / "rows.parquet")
    assert list(tmp_path.glob("rows.parquet*")) == []


def test_what_is_refused_leaves_no_file(folder: Path, refuse: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(2, folder, "--output", tmp_path / "rows.csv", "--member", "u9")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert "cannot write" in refuse(3, folder, "--output", folder / "run.db" / "rows.csv")


def test_a_table_goes_to_a_file_too(folder: Path, say: Say, tmp_path: Path) -> None:
    text = say(folder, "--by", "step")
    assert say(folder, "--by", "step", "--output", tmp_path / "table.txt") == ""
    assert (tmp_path / "table.txt").read_text() == text


# ---- the page of a whole run


def test_a_run_of_many_stages_shows_its_final_one_and_how_to_see_all(tmp_path: Path, say: Say) -> None:
    text = say(made(tmp_path / "many", n_stages=30))
    titles = [line for line in text.splitlines() if line.startswith(("stage", "session", "all "))]
    assert [title.split(":")[0].strip() for title in titles] == ["stage stage-29", "all stages", "all 30 stages"]
    assert f"coterie ledger {tmp_path}/many --by stage,step,direction\n" in text
    assert len(text.splitlines()) < 45
    assert "stage stage-3\n" in say(tmp_path / "many", "--stage", "stage-3").replace(" \n", "\n").replace("  ", "")


def test_the_session_is_a_stage_that_can_be_named(folder: Path, say: Say) -> None:
    text = say(folder, "--stage", "session")
    assert "session (hello, heartbeats, books)" in text
    assert "stage stage-0" not in text
    assert " 500 B" in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_what_compression_saved_fits_the_terminal_with_whole_headings(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width)
    saved = [Saving("evaluation", "down", "direct", 249_000, 264, 1_990_000, 249_000, 40_000, 131_000)]
    console.print(savings_table(saved, narrow=is_narrow(console), tiny=is_tiny(console)))
    _, headings, row = out.getvalue().splitlines()
    assert headings.split()[-1] == "fewer"
    assert row.rstrip().endswith("8.0 times")
    assert ("without" in headings) == (width > 40)
    assert ("40.0 kB  131 kB" in row) == (width == 80)


def test_large_books_are_not_compared_on_the_page(folder: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "The books of one, two did not arrive." in say(folder)
    monkeypatch.setattr("coterie_deploy.read.ledger_page._MAX_COMPARED", 10)
    assert "coterie ledger --verify says whether" in say(folder)


def test_a_run_of_an_older_version_is_one_sentence(folder: Path, refuse: Say) -> None:
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection:
        connection.execute("DROP TABLE rounds")
    assert "was written by an older version of coterie: its run.db has no table 'rounds'" in refuse(2, folder)
    (folder / "run.db").write_bytes(b"")
    assert "nothing has been written to it yet" in refuse(2, folder, "--by", "step")


def test_options_that_contradict_each_other_are_refused_and_none_is_passed_over(folder: Path, refuse: Say) -> None:
    for other in (("--by", "step"), ("--stage", "stage-0"), ("--total",), ("--format", "csv", "--output", "x.csv")):
        assert "--verify judges the whole run, want it without other options" in refuse(2, folder, "--verify", *other)
    assert "--total is all stages together, want it without --stage stage-0" in refuse(2, folder, "--total", "--stage", "stage-0")
