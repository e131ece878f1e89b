"""The command line: what it says, and that a mistake is one sentence with the right exit code. Runs are loopback runs in this process."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie import __version__
from coterie.errors import MISTAKE_CODE, ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.read.shipped import load, shipped
from coterie_deploy.roles.client import Client, _check_code, store_of

ROWS = [
    ("u0", 0.9, 0.1, 1), ("u0", -0.8, 0.3, -1), ("u0", 0.4, -0.2, 1), ("u0", -0.1, 0.5, 1), ("u0", 0.2, 0.2, -1),
    ("u1", 0.7, -0.4, 1), ("u1", -0.9, 0.2, -1), ("u1", 0.1, 0.1, -1), ("u1", 0.3, 0.6, 1), ("u1", -0.2, -0.1, 1),
    ("u2", 0.5, 0.4, 1), ("u2", -0.6, -0.3, -1), ("u2", 0.2, -0.5, -1), ("u2", -0.3, 0.1, 1), ("u2", 0.1, 0.7, 1),
]  # fmt: skip
EXPERIMENT = """
name: small
data: {source: csv, path: rows.csv, user_column: user, target_column: y, feature_columns: [a, b], standardize: true}
problem: {loss: logistic, l2: 0.01}
method: {name: global}
references: [local]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small experiment and its table; a terminal of 60 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    write_rows(tmp_path / "rows.csv", ROWS)
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    return tmp_path


def write_rows(path: Path, rows: Sequence[tuple[object, ...]], header: str = "user,a,b,y") -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """The sentence of a command that fails with this exit code: one line, no traceback."""
    assert cli._run(list(arguments)) == code
    lines = capsys.readouterr().err.splitlines()
    sentences = [line for line in lines if line.startswith("error: ")]
    assert len(sentences) == 1
    assert lines[-1] == sentences[0]
    assert "Traceback" not in "\n".join(lines)
    return sentences[0]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    assert cli._run(list(arguments)) == 0
    return capsys.readouterr().out


RUN = ("run", "small.yaml", "--transport", "loopback", "--quiet")


# ---- what it says


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == f"coterie {__version__}\n"


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Data and privacy:" in said(capsys)


def test_the_shipped_experiments_are_listed(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    listed = said(capsys, "experiments")
    assert all(name in listed for name in shipped())
    assert max(map(len, listed.splitlines())) <= 60


def test_the_list_of_experiments_keeps_whole_words_in_a_small_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    listed = said(capsys, "experiments")
    assert max(map(len, listed.splitlines())) <= 40
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in shipped())
    assert "without room in 40 columns: method, users" in " ".join(listed.split())


def test_a_run_reports_users_rounds_metrics_traffic_and_its_folder(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    report = said(capsys, *RUN)
    assert report.startswith("small finished: 3 users, 1 host, ")
    assert all(word in report for word in ("local", "global *", "accuracy", "gradient", "formula", "wire"))
    assert report.rstrip().endswith("run folder: runs/small")
    assert max(map(len, report.splitlines())) <= 60
    assert (here / "runs/small/models/global.npz").is_file()


def test_the_ledger_prints_measured_beside_expected_vectors_and_that_the_books_agree(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    said(capsys, *RUN)
    text = said(capsys, "ledger", "runs/small", "--stage", "local")
    row = next(line.split() for line in text.splitlines() if line.startswith("model") and " up " in line)
    assert row[:4] == ["model", "up", "3", "3"]
    assert "to the byte" in text
    assert "DIFFER" not in text
    assert "query" not in text
    assert "query" in said(capsys, "ledger", "runs/small")
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize(
    ("columns", "ledger", "events", "data"),
    [(40, "closed form, scalars, payload, message", True, True), (60, "scalars", True, False), (80, "", False, False)],
)
def test_columns_without_room_are_named(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch, columns: int, ledger: str, events: bool, data: bool
) -> None:
    said(capsys, *RUN)
    monkeypatch.setenv("COLUMNS", str(columns))
    start = f"without room in {columns} columns: "
    for command, left_out in (("ledger", ledger), ("events", "time (UTC), level" if events else "")):
        text = " ".join(said(capsys, command, "runs/small").split())
        assert (f"{start}{left_out}" in text) if left_out else ("without room" not in text)
    text = " ".join(said(capsys, "data", "small.yaml").split())
    assert (f"{start}25 %, 75 %" in text) == data


def test_the_ledger_in_total_has_one_table_and_names_the_steps(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    text = said(capsys, "ledger", "runs/small", "--total")
    assert text.count("closed form") == 1
    assert text.count("formula") == 2  # the heading of one table, and the note under it
    assert "all stages" in text
    assert "hello, heartbeats" in text
    assert "to the byte" in text


def test_a_finished_run_that_is_resumed_reports_again(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    first = said(capsys, *RUN)
    assert said(capsys, "run", "runs/small", "--resume", "--transport", "loopback", "--quiet") == first


def test_set_and_seed_are_part_of_the_frozen_experiment(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN, "--set", "problem.l2=0.5", "--seed", "7", "--hosts", "3", "--output", "elsewhere")
    frozen = json.loads((here / "elsewhere/experiment.json").read_text())
    assert (frozen["problem"]["l2"], frozen["seed"], frozen["federation"]["hosts"]) == (0.5, 7, 3)


def test_decisions_of_the_clock_are_repeated(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    pdmm = (*RUN, "--set", "method={name: pdmm, penalty: 0.1}", "--set", "stop={rounds: 1000000, residual: null}")
    first = said(capsys, *pdmm, "--set", "stop.wall_time_s=0.05", "--output", "first")
    # Without the decisions of the first run the clock would have to strike at the same round by chance.
    second = said(capsys, *pdmm, "--set", "stop.wall_time_s=0.05", "--output", "second", "--replay-decisions", "first")
    rounds = [re.search(r"^pdmm \S+ time +([0-9,]+) ", report, re.MULTILINE) for report in (first, second)]
    assert rounds[0] is not None
    assert rounds[1] is not None
    assert rounds[0][1] == rounds[1][1] != "1,000,000"


# ---- what it says of the result


LEAST_SQUARES = ("--set", "problem.loss=least_squares", "--set", "problem.l2=0.1")


def path_run(capsys: pytest.CaptureFixture[str]) -> str:
    """The report of a run of pdmm over 12 penalties, with refits."""
    penalties = ", ".join(f"{0.3 / 1.5**place:.4f}" for place in range(12))
    method = f"method={{name: pdmm, path: [{penalties}], refit: true}}"
    return said(capsys, *RUN, "--set", method, "--set", "references=[local, global]", "--set", "stop.residual=0.001", *LEAST_SQUARES)


def stages_in(report: str) -> dict[str, list[str]]:
    """The rows of the table of stages by name."""
    lines = report.partition("ended by")[2].partition("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: line.split() for line in lines if line.startswith(("local", "global", "pdmm", "refit"))}


def test_a_report_is_closed_by_the_held_out_error_of_result_and_references(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    sentence = " ".join(path_run(capsys).rpartition("held-out mean")[2].split())
    assert re.match(r"squared error: personalized \S+ \((pdmm|refit)-\S+\)", sentence)
    assert ", global " in sentence
    assert ", local " in sentence


@pytest.mark.parametrize("columns", [60, 80, 110])
def test_a_report_fits_the_terminal_and_shows_references_start_result_and_best_refit(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = path_run(capsys)
    assert max(map(len, report.splitlines())) <= columns
    rows, whole = stages_in(report), stages_in(said(capsys, "show", "runs/small"))
    assert "all 26 stages: coterie show runs/small" in report
    assert len(whole) == 26
    assert len(rows) == 12
    refits = {name: float(row[-1]) for name, row in whole.items() if name.startswith("refit")}
    best = {name for name, error in refits.items() if error == min(refits.values())}  # of the printed digits: there may be several
    assert best & rows.keys()
    assert {"local", "global"} <= rows.keys()
    assert any("*" in row for row in rows.values())
    assert {"residual", "converged"} == {row[2] if row[1] == "*" else row[1] for row in rows.values()}


def test_the_held_out_loss_is_left_out_where_it_is_half_of_the_error(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert re.search(r"clusters +squared error$", said(capsys, *RUN, *LEAST_SQUARES), re.MULTILINE)
    assert re.search(r"clusters +loss +accuracy$", said(capsys, *RUN, "--output", "other"), re.MULTILINE)


def test_as_many_clusters_as_users_are_no_clusters_found(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    report = said(capsys, *RUN, "--set", "method={name: pdmm, penalty: 1.0e-6}", "--set", "stop.residual=1.0e-4", *LEAST_SQUARES)
    assert "every user has its own model" in " ".join(report.split())
    assert "clusters found" not in report


def test_a_run_that_stopped_before_its_residual_warns_in_every_view(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    limits = ("--set", "stop={rounds: 3, residual: 1.0e-9}", "--set", "method={name: pdmm, path: [0.1, 0.05]}")
    views = [said(capsys, *RUN, *limits), said(capsys, "show", "runs/small"), said(capsys, "ledger", "runs/small")]
    for view in views:
        text = " ".join(view.split())
        assert re.search(r"warning: pdmm-0.1, pdmm-0.05 stopped at 3 rounds with residual up to \S+ \(wanted 1e-09\): models and", text)
    assert views[0].count("max rounds!") == 2


def test_a_run_without_a_rule_to_miss_has_no_warning(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    pdmm = ("--set", "method={name: pdmm, penalty: 0.1}")
    report = said(capsys, *RUN, "--set", "stop={rounds: 3, residual: null}", *pdmm)
    assert "warning" not in report
    assert "!" not in report
    text = " ".join(said(capsys, *RUN, "--set", "stop.rounds=3", *pdmm, "--output", "other").split())
    assert re.search(r"warning: pdmm stopped at 3 rounds with residual \S+ \(wanted 1e-06\)", text), "the default rule was missed"


def test_pdmm_stops_at_a_small_residual_without_being_told(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    report = said(capsys, *RUN, "--set", "method={name: pdmm, penalty: 0.1}")
    assert re.search(r"^pdmm \* +residual +\d+ ", report, re.MULTILINE)
    assert "warning" not in report


def test_stages_are_judged_on_held_out_rows_only_where_there_are_some(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    report = said(capsys, *RUN)
    assert "judged on held-out rows" in report
    assert "20 % of each user's rows are held out (data.test_fraction)" in report
    for report in (said(capsys, *RUN, "--set", "data.test_fraction=0", "--output", "all"), said(capsys, "show", "all")):
        assert "Stages (* the result)" in report
        assert "judged" not in report
        assert "accuracy" not in report


@pytest.mark.parametrize(
    ("path", "said_of_it"),
    [
        ("[3.0e-6, 2.0e-6]", "3e-06, is the largest of the path: add larger ones, which may be better"),
        ("[0.5, 0.4]", "0.4, is the smallest of the path: add smaller ones, which may be better"),
        ("[0.5, 0.2, 2.0e-6]", ""),
        ("[50.0, 2.0e-6]", ""),  # one cluster, as at every larger penalty
    ],
)
def test_a_best_penalty_at_an_end_of_the_path_is_pointed_out(
    capsys: pytest.CaptureFixture[str], here: Path, path: str, said_of_it: str
) -> None:
    text = " ".join(said(capsys, *RUN, "--set", f"method={{name: pdmm, path: {path}}}", *LEAST_SQUARES).split())
    expected = f"warning: the best penalty of method.path, {said_of_it}" if said_of_it else ""
    assert expected in text
    assert ("best penalty" in text) == bool(said_of_it), text


def test_a_path_that_clusters_nobody_or_is_not_judged_says_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    slopes = {"u0": -3, "u1": 0, "u2": 3}
    write_rows(here / "rows.csv", [(user, a, a * a, slope * a) for user, slope in slopes.items() for a in (-2, -1, -0.5, 0.5, 1, 2)])
    alone = ("--set", "method={name: pdmm, path: [0.02, 0.01], refit: true}", "--set", "problem.loss=least_squares")
    text = " ".join(said(capsys, *RUN, *alone).split())
    assert re.search(r"\(refit-\S+\)", text), text
    assert re.search(r"warning: nothing was clustered: in the best stage, refit-\S+, each of the 3 users is on its own", text), text
    assert "best penalty" not in text, "the users alone are the refit of every smaller penalty too"
    text = " ".join(said(capsys, *RUN, *alone, "--set", "data.test_fraction=0", "--output", "all").split())
    assert "warning: no held-out rows chose among the penalties of method.path: the result refit-0.01 is only the last" in text
    text = " ".join(said(capsys, "show", "all").split())
    assert "no held-out rows chose" in text


def test_clusters_that_are_not_clear_yet_are_said_and_clear_ones_are_not(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    slopes = {f"u{i}": slope for i, slope in enumerate((-3, -2.9, -2.7, 0, 0.1, 0.3, 3, 3.1, 3.3))}
    write_rows(here / "rows.csv", [(user, a, a * a, slope * a) for user, slope in slopes.items() for a in (-2, -1, -0.5, 0.5, 1, 2)])
    options = ("--set", "method={name: pdmm, penalty: 0.05}", "--set", "problem.loss=least_squares")
    early = " ".join(said(capsys, *RUN, *options, "--set", "stop={rounds: 8}", "--output", "early").split())
    assert re.search(r"warning: pdmm ended before the clusters were clear: a model is up to \S+ times as far", early), early
    late = said(capsys, *RUN, *options, "--set", "stop.residual=1e-9", "--output", "late")
    assert "clusters were clear" not in late
    assert "every user has its own model" in " ".join(late.split())
    few = said(capsys, *RUN, *options, "--set", "method.penalty=0.2", "--set", "stop.residual=1e-6", "--output", "few")
    assert "4 clusters found" in " ".join(few.split())
    assert "clusters were clear" not in few


# ---- show


def test_show_names_the_members_of_each_cluster(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    write_rows(here / "rows.csv", [(f"{row[0]}-{copy}", *row[1:]) for copy in range(9) for row in ROWS])
    said(capsys, *RUN, "--set", "references=[]")
    text = said(capsys, "show", "runs/small")
    assert re.search(r"^small, run [0-9a-f]{16}: finished$", text, re.MULTILINE)
    assert re.search(r"^  27 users: u0-0, u0-1, .*, \d+ more$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 60
    assert "  all of them: coterie show RUN --all, or --format csv" in text
    text = said(capsys, "show", "runs/small", "--all")
    names = sorted(f"u{user}-{copy}" for user in range(3) for copy in range(9))
    (listed,) = re.findall(r"^  27 users: (.*)$", text, re.MULTILINE)
    assert sorted(listed.split(", ")) == names
    rows = said(capsys, "show", "runs/small", "--format", "csv").splitlines()
    assert rows[0] == "user,cluster"
    assert sorted(rows[1:]) == [f"{name},0" for name in names]
    lines = [json.loads(line) for line in said(capsys, "show", "runs/small", "--format", "jsonl").splitlines()]
    assert [f"{line['user']},{line['cluster']}" for line in lines] == rows[1:]


def test_show_lists_users_on_their_own_together_and_takes_a_stage(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN, "--set", "method={name: pdmm, path: [5.0, 1.0e-6]}", "--set", "stop.residual=1.0e-4", *LEAST_SQUARES)
    assert "  3 users: u0, u1, u2\n" in said(capsys, "show", "runs/small", "--stage", "pdmm-5.0")
    assert "  3 on their own: u0, u1, u2\n" in said(capsys, "show", "runs/small", "--stage", "pdmm-1e-06")
    for command in ("show", "ledger"):
        sentence = refused(capsys, 2, command, "runs/small", "--stage", "pdmm-5")
        assert "no stage 'pdmm-5', want one of local, " in sentence
        assert sentence.endswith("; did you mean 'pdmm-5.0'?")


def test_show_has_something_to_say_of_a_run_that_has_not_finished(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    with contextlib.closing(sqlite3.connect(here / "runs/small/run.db")) as connection, connection:
        connection.execute("UPDATE run SET value = 'running' WHERE key = 'status'")
        connection.execute("DELETE FROM run WHERE key = 'final_stage'")
        connection.execute("UPDATE stages SET outcome = '', rounds = 0 WHERE name = 'global'")
    text = said(capsys, "show", "runs/small")
    assert ": stopped, can be resumed\n" in text, "nobody holds its lock"
    assert ", stopped, can be resumed\n" in said(capsys, "ledger", "runs/small")
    with (here / "runs/small/run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        working = said(capsys, "show", "runs/small")
    assert ": running\n" in working
    assert "under way" in working
    assert "when the run has finished\n" in working
    assert ["global", "stopped"] in [line.split()[:2] for line in text.splitlines()]
    assert "under way" not in text
    assert "when the run has finished: it can be resumed\n" in text
    with contextlib.closing(sqlite3.connect(here / "runs/small/run.db")) as connection, connection:
        connection.executescript("DELETE FROM members; DELETE FROM stages")
    assert "stopped before all hosts were there\n" in said(capsys, "show", "runs/small")


def test_what_happened_on_the_way_is_shown(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    with contextlib.closing(sqlite3.connect(here / "runs/small/run.db")) as connection, connection:
        connection.execute("INSERT INTO events VALUES (0, 'numerics', 'bits may differ', '{}')")
    assert "note: bits may differ" in said(capsys, "show", "runs/small")


# ---- certify


def test_users_without_known_clusters_are_told_of_both_ways_to_give_them(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    sentence = refused(capsys, 2, "certify", "small.yaml")
    assert all(word in sentence for word in ("'u0'", "data.cluster_column", "--partition RUN"))


def test_clusters_are_certified_of_data_elsewhere(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "elsewhere").mkdir()
    write_rows(here / "elsewhere/rows.csv", [(*row, "k" if row[0] == "u0" else "m") for row in ROWS], "user,a,b,y,known")
    (here / "rows.csv").unlink()
    text = said(capsys, "certify", "small.yaml", "--data", "elsewhere", "--set", "data.cluster_column=known")
    assert text.startswith("2 clusters of 3 users: ")


def test_clusters_that_no_penalty_gives_have_no_ends(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    rows = [(user, 0.3 * row, 0.1 * (row % 3), slope * 0.3 * row + 0.01 * (row % 2), known) for row in range(6) for user, slope, known in
            (("u0", 5, "k"), ("u1", -5, "k"), ("u2", 5, "m"), ("u3", -5, "m"))]  # fmt: skip
    write_rows(here / "rows.csv", rows, "user,a,b,y,known")
    text = said(capsys, "certify", "small.yaml", *LEAST_SQUARES, "--set", "data.cluster_column=known")
    assert text.startswith("2 clusters of 4 users: no penalty recovers them exactly\n")
    assert "lower end" not in text
    assert "inf" not in text


# ---- predict


def predictions(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_predict_applies_the_users_model_with_the_runs_standardisation(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    (here / "new.csv").write_text("b,note,a\n0.1,x,5\n0.2,y,-5\n")
    found = predictions(said(capsys, "predict", "runs/small", "new.csv", "--user", "u1"))
    with np.load(here / "runs/small/models/global.npz") as arrays:
        x, mean, scale = arrays["x"][1], arrays["mean"], arrays["scale"]
    scores = [float(((np.array(row) - mean) / scale) @ x[:2] - x[2]) for row in ([5, 0.1], [-5, 0.2])]
    assert [row["prediction"] for row in found] == ["1" if score >= 0 else "-1" for score in scores]
    assert [row["note"] for row in found] == ["x", "y"]


def test_predict_writes_values_of_another_stage_to_a_file(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN, "--set", "problem.loss=least_squares")
    assert said(capsys, "predict", "runs/small", "rows.csv", "--user", "u0", "--stage", "local", "--out", "out.csv") == ""
    found = predictions((here / "out.csv").read_text())
    with np.load(here / "runs/small/models/local.npz") as arrays:
        x, mean, scale = arrays["x"][0], arrays["mean"], arrays["scale"]
    assert float(found[0]["prediction"]) == pytest.approx(((np.array([0.9, 0.1]) - mean) / scale) @ x[:2] - x[2], rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["nowhere", "rows.csv", "--user", "u0"], "nowhere is not a run folder"),
        (["runs/small", "rows.csv", "--user", "u9"], "user 'u9' is not in the run"),
        (["runs/small", "gone.csv", "--user", "u0"], "gone.csv"),
        (["runs/small", "short.csv", "--user", "u0"], "column 'b' is missing"),
        (["runs/small", "nan.csv", "--user", "u0"], "nan.csv line 3, column 'a': the cell is missing, want a value"),
        (["runs/small", "rows.csv", "--user", "u0", "--stage", "refit"], "no stage 'refit'"),
    ],
)
def test_what_cannot_be_predicted_is_named(capsys: pytest.CaptureFixture[str], here: Path, arguments: list[str], culprit: str) -> None:
    said(capsys, *RUN)
    (here / "short.csv").write_text("a\n1\n")
    (here / "nan.csv").write_text("a,b\n1,2\nnan,1\n")
    assert culprit in refused(capsys, 2, "predict", *arguments)


# ---- mistakes on the command line and in the experiment


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["rnu"], "'rnu'"),
        (["run", "small.yaml", "--hots", "2"], "--hots"),
        (["run"], "EXPERIMENT"),
        (["run", "small.yaml", "--hosts", "0"], "--hosts"),
        (["run", "small.yaml", "--transport", "pigeon"], "pigeon"),
        (["run", "smal"], "no experiment 'smal'"),
        (["run", "."], "experiment.json"),
        ([*RUN, "--set", "method.penatly=1"], "method.penatly: unknown key"),
        ([*RUN, "--set", "colour=red"], "colour: unknown key"),
        ([*RUN, "--set", "problem.l2=.nan"], "problem.l2"),
        ([*RUN, "--set", "method.name=magic"], "'magic'"),
        ([*RUN, "--set", "oops"], "'oops'"),
        ([*RUN, "--hosts", "4"], "4 hosts for 3 users"),
        (["run", "small.yaml", "--hosts", "4"], "4 hosts for 3 users"),
        ([*RUN, "--resume"], "no run to resume"),
        ([*RUN, "--replay-decisions", "nowhere"], "nowhere is not a run folder"),
        (["run", "small.yaml", "--engine", "slurm", "--otlp", "http://c:4317"], "--otlp does not go together with --engine slurm"),
        (["run", "small.yaml", "--engine", "slurm", "--trace-every", "2"], "--trace-every does not go together with --engine slurm"),
        (["ledger", "nowhere"], "nowhere is not a run folder"),
        (["client", "--server", "nowhere"], "--server is 'nowhere'"),
        (["client", "--server", "10.0.0.1:7000"], "--insecure"),
        (["server", "small.yaml", "--listen", "nowhere"], "'nowhere'"),
        (["server", "small.yaml", "--listen", "0.0.0.0:0"], "insecure"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(
    capsys: pytest.CaptureFixture[str], here: Path, arguments: list[str], culprit: str
) -> None:
    assert culprit in refused(capsys, 2, *arguments)
    assert not (here / "runs").exists() or not any((here / "runs").iterdir())


def test_a_broken_yaml_file_is_named(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "broken.yaml").write_text("name: [")
    assert "broken.yaml" in refused(capsys, 2, "run", "broken.yaml")


def test_a_used_run_folder_is_left_alone(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    before = (here / "runs/small/run.db").read_bytes()
    sentence = refused(capsys, 2, *RUN, "--output", "runs/small")
    assert all(word in sentence for word in ("runs/small", "--output", "--overwrite", "--resume"))
    for number in (2, 3):
        assert cli._run([*RUN]) == 0
        printed = capsys.readouterr()
        assert f"note: runs/small has a run, so this one is in runs/small-{number} (--overwrite replaces" in printed.err
        assert printed.out.endswith(f"run folder: runs/small-{number}\n")
    assert (here / "runs/small/run.db").read_bytes() == before


def test_a_run_is_replaced_where_that_is_asked_for_and_stays_if_the_new_one_cannot_begin(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert said(capsys, *RUN, "--overwrite").endswith("run folder: runs/small\n"), "there was none"
    assert (here / "runs/small").stat().st_mode & 0o777 == 0o700, "it holds what users have sent"
    said(capsys, "report", "runs/small")
    assert said(capsys, *RUN, "--overwrite", "--seed", "5").endswith("run folder: runs/small\n")
    assert load("runs/small").seed == 5
    assert not (here / "runs/small/report.html").exists()
    write_rows(here / "rows.csv", [("u0", "x", 1, 1)])
    refused(capsys, 2, *RUN, "--overwrite", "--seed", "6")
    assert load("runs/small").seed == 5
    assert [path.name for path in (here / "runs").iterdir()] == ["small"]


def test_nothing_but_a_run_that_is_over_is_replaced(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine/notes.txt").touch()
    assert "mine is not a run folder: it has no experiment.json" in refused(capsys, 2, *RUN, "--overwrite", "--output", "mine")
    said(capsys, *RUN)
    with (here / "runs/small/run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "the run in runs/small is under way" in refused(capsys, 2, *RUN, "--overwrite")
    (here / "runs/small/notes.txt").touch()
    assert "runs/small, which has 'notes.txt', which no run writes" in refused(capsys, 2, *RUN, "--overwrite")
    assert "want one of the two" in refused(capsys, 2, *RUN, "--overwrite", "--resume")
    (here / "runs/small/notes.txt").unlink()
    (here / "runs/.small.replaced").mkdir()
    assert "runs/.small.replaced has an earlier run" in refused(capsys, 2, *RUN, "--overwrite")
    assert (here / "runs/small/run.db").is_file()


def test_a_run_is_not_resumed_with_another_experiment(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    unfinish(here / "runs/small")
    sentence = refused(capsys, 2, *RUN, "--resume", "--set", "problem.l2=0.5")
    assert "problem.l2 is 0.5, but runs/small was started with 0.01" in sentence
    assert sentence.endswith("resume it with `coterie run runs/small --resume`")


def test_resume_alone_goes_on_with_the_frozen_experiment(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN, "--set", "problem.l2=0.5", "--seed", "3", "--hosts", "2")
    unfinish(here / "runs/small")
    assert cli._run([*RUN, "--resume"]) == 0
    out, err = capsys.readouterr()
    assert "2 hosts" in out
    assert err == "note: problem.l2 stays 0.5: the run goes on as frozen in runs/small/experiment.json, not with 0.01\n"


def test_an_experiment_of_another_name_does_not_resume_a_run(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    (here / "other.yaml").write_text(EXPERIMENT.replace("name: small", "name: other"))
    sentence = refused(capsys, 2, "run", "other.yaml", "--resume", "--output", "runs/small")
    assert 'name is "other", but runs/small was started with "small"' in sentence


def test_a_server_that_cannot_resume_names_its_own_command(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    sentence = refused(capsys, 2, "server", "small.yaml", "--listen", "127.0.0.1:0", "--resume", "--seed", "9")
    assert sentence.endswith("`coterie server --listen 127.0.0.1:0 runs/small --resume`")


def unfinish(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        connection.execute("UPDATE run SET value = 'running' WHERE key = 'status'")


# ---- mistakes in the data


def changed(row: int, column: int, value: object) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = list(ROWS)
    rows[row] = (*rows[row][:column], value, *rows[row][column + 1 :])
    return rows


@pytest.mark.parametrize(
    ("rows", "header", "culprit"),
    [
        (changed(6, 1, "nan"), "user,a,b,y", "rows.csv line 8, column 'a': the cell is missing"),
        (changed(6, 2, "many"), "user,a,b,y", "rows.csv line 8, column 'b': 'many'"),
        (changed(6, 3, 3), "user,a,b,y", "user 'u1' has the label 3"),
        (list(ROWS), "person,a,b,y", "column 'user' is missing"),
        ([], "user,a,b,y", "rows.csv has 0 rows"),
        ([(*row[:3], 1) if row[0] == "u2" else row for row in ROWS], "user,a,b,y", "user 'u2': all its rows have the label +1"),
    ],
)
def test_wrong_data_is_named_and_leaves_no_folder_behind(
    capsys: pytest.CaptureFixture[str], here: Path, rows: list[tuple[object, ...]], header: str, culprit: str
) -> None:
    write_rows(here / "rows.csv", rows, header)
    assert culprit in refused(capsys, 2, *RUN)
    assert not (here / "runs/small").exists()
    write_rows(here / "rows.csv", ROWS)
    said(capsys, *RUN)


def test_a_missing_table_is_named(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "rows.csv").unlink()
    assert "rows.csv" in refused(capsys, 2, *RUN)


def test_users_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "elsewhere").mkdir()
    assert "rows.csv" in refused(capsys, 2, *RUN, "--data", "elsewhere")


# ---- what others have written


@pytest.mark.parametrize("file", ["run.db", "experiment.json"])
@pytest.mark.parametrize("command", ["show", "ledger"])
def test_a_damaged_run_is_not_shown(capsys: pytest.CaptureFixture[str], here: Path, command: str, file: str) -> None:
    said(capsys, *RUN)
    path = here / "runs/small" / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3])
    if (command, file) == ("ledger", "experiment.json"):
        said(capsys, command, "runs/small")  # does without
    else:
        refused(capsys, 3 if file == "run.db" else 2, command, "runs/small")


def test_names_and_reasons_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert cli._failed("host \x1b[2J said\n\u202eno \x07", 3) == 3
    assert capsys.readouterr().err == "error: host \\x1b[2J said \\u202eno \\x07\n"
    said(capsys, *RUN)
    with contextlib.closing(sqlite3.connect(here / "runs/small/run.db")) as connection, connection:
        connection.execute("UPDATE run SET value = 'failed: \x1b[2J' WHERE key = 'status'")
    assert "failed: \\x1b[2J" in said(capsys, "show", "runs/small")
    assert "failed: \\x1b[2J" in said(capsys, "ledger", "runs/small", "--total")


def test_a_run_id_cannot_lead_a_host_out_of_its_state_folder(tmp_path: Path) -> None:
    for run_id in ("../../x", "/etc/x", "a/b", "x" * 5000):
        name = store_of(tmp_path, "h:0-9", run_id).name
        assert "/" not in name
        assert len(name) < 100
    assert store_of(tmp_path, "h", "0123456789abcdef").name == "h.0123456789abcdef"
    assert store_of(tmp_path, "h:0-9", "0123456789abcdef").name == "h_0-9-abb2e423.0123456789abcdef"
    assert store_of(tmp_path, "h:0-9", "r").name != store_of(tmp_path, "h/0-9", "r").name, "names that look alike when cleaned do not meet"


CODE = {
    "data={source: python, path: 'mine:users'}": "'mine:users'",
    "problem.loss=mine:Loss": "'mine:Loss'",
}


@pytest.mark.parametrize("override", CODE)
def test_a_client_imports_what_the_experiment_names_only_when_it_is_allowed_or_launched(override: str) -> None:
    experiment = load("ellipses", [override])
    client = Client("127.0.0.1:1", None, None, None, Path("state"), 1.0, insecure=False, launched=False)
    with pytest.raises(ConfigError, match=f"wants to import {CODE[override]} on this machine; allow it with --allow-code$"):
        _check_code(client, experiment)
    _check_code(replace(client, launched=True), experiment)
    _check_code(replace(client, allow_code=True), experiment)
    _check_code(client, load("ellipses"))


@pytest.mark.parametrize(("option", "is_there"), [((), False), (("--allow-code",), True), (("--launched",), True)])
def test_the_folder_of_a_client_is_importable_only_with_the_same_leave(
    option: tuple[str, ...], is_there: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("coterie_deploy.roles.client.run_client", lambda _: 0)
    assert cli._run(["client", "--server", "127.0.0.1:9", *option]) == 0
    assert (str(here) in sys.path) is is_there


# ---- the environment


def test_a_client_waits_no_longer_than_its_patience(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    sentence = refused(capsys, 3, "client", "--server", "127.0.0.1:9", "--patience", "0.2")
    assert "127.0.0.1:9" in sentence


@pytest.mark.parametrize("command", ["show", "ledger"])
def test_a_reader_that_has_seen_enough_ends_the_command_silently(capsys: pytest.CaptureFixture[str], here: Path, command: str) -> None:
    said(capsys, *RUN)
    run = subprocess.Popen([sys.executable, "-P", "-m", "coterie", command, "runs/small"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    with run.stderr:
        assert run.stderr.read() == b""
    assert run.wait(timeout=30) in (0, 141)


def test_a_client_imports_neither_server_nor_heavy_libraries() -> None:
    code = """
import sys
from coterie_deploy.cli import commands
from coterie_deploy.roles import client
from coterie.registry import methods
from coterie_client.interface.half import client_half
from coterie_client.interface.local_update import local_update
for name in (*methods('convex'), "prepare", "evaluation", "consensus"):
    client_half(name)
    local_update(name)
heavy = {"coterie_server", "scipy", "vl_convert", "pandas", "pyarrow", "torch", "rich"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("asked", "code"), [(None, 2), ("0", 0), ("7", 7), ("nonsense", 2), ("300", 2), ("", 2)])
def test_the_environment_says_how_a_mistake_ends_for_supervisors_that_go_by_zero(
    asked: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(MISTAKE_CODE, raising=False)
    if asked is not None:
        monkeypatch.setenv(MISTAKE_CODE, asked)
    assert cli._for_supervisors(cli._run_to_the_last_line(["run", "no-such-experiment"])) == code
    assert capsys.readouterr().err.startswith("error: there is no experiment 'no-such-experiment'")
    assert cli._for_supervisors(3) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hosts", "0.2"), "--hosts is '0.2', want a whole number (see coterie attack --help)"),
        (("--hosts", "0"), "--hosts is '0', want at least 1 (see coterie attack --help)"),
        (("--strength", "x"), "--strength is 'x', want a number (see coterie attack --help)"),
        (("--strength", "-1"), "--strength is '-1', want at least 0 (see coterie attack --help)"),
    ],
)
def test_a_value_that_the_parser_refuses_is_said(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, 2, "attack", "digits", *arguments) == f"error: {said}"
