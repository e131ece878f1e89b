"""The command line: what it says, and that a mistake is one sentence with the right exit code. Runs are loopback runs in this process."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from coterie import __version__
from coterie_deploy import cli
from coterie_deploy.shipped import shipped

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
    assert "Commands:" in said(capsys)


def test_the_shipped_experiments_are_listed(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    listed = said(capsys, "experiments")
    assert all(name in listed for name in shipped())
    assert max(map(len, listed.splitlines())) <= 60


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


def test_a_finished_run_that_is_resumed_reports_again(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    first = said(capsys, *RUN)
    assert said(capsys, "run", "runs/small", "--resume", "--transport", "loopback", "--quiet") == first


def test_set_and_seed_are_part_of_the_frozen_experiment(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN, "--set", "problem.l2=0.5", "--seed", "7", "--hosts", "3", "--output", "elsewhere")
    frozen = json.loads((here / "elsewhere/experiment.json").read_text())
    assert (frozen["problem"]["l2"], frozen["seed"], frozen["federation"]["hosts"]) == (0.5, 7, 3)


def test_decisions_of_the_clock_are_repeated(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    pdmm = (*RUN, "--set", "method={name: pdmm, penalty: 0.1}", "--set", "stop.rounds=1000000")
    first = said(capsys, *pdmm, "--set", "stop.wall_time_s=0.05", "--output", "first")
    # Without the decisions of the first run the clock would have to strike at the same round by chance.
    second = said(capsys, *pdmm, "--set", "stop.wall_time_s=0.05", "--output", "second", "--replay-decisions", "first")
    rounds = [re.search(r"^pdmm \S+ +([0-9,]+) ", report, re.MULTILINE) for report in (first, second)]
    assert rounds[0] is not None
    assert rounds[1] is not None
    assert rounds[0][1] == rounds[1][1] != "1,000,000"


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
        (["runs/small", "rows.csv", "--user", "u9"], "user 'u9' is not in the data"),
        (["runs/small", "gone.csv", "--user", "u0"], "gone.csv"),
        (["runs/small", "short.csv", "--user", "u0"], "column 'b' is missing"),
        (["runs/small", "nan.csv", "--user", "u0"], "nan.csv line 3, column 'a': 'nan'"),
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
    sentence = refused(capsys, 2, *RUN)
    assert "runs/small" in sentence
    assert "--resume" in sentence
    assert (here / "runs/small/run.db").read_bytes() == before


def test_a_run_is_not_resumed_with_another_experiment(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, *RUN)
    unfinish(here / "runs/small")
    assert "experiment.json" in refused(capsys, 2, *RUN, "--resume", "--set", "problem.l2=0.5")


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
        (changed(6, 1, "nan"), "user,a,b,y", "rows.csv line 8, column 'a': 'nan'"),
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


# ---- the environment


def test_a_client_waits_no_longer_than_its_patience(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    sentence = refused(capsys, 3, "client", "--server", "127.0.0.1:9", "--patience", "0.2")
    assert "127.0.0.1:9" in sentence


def test_a_client_imports_neither_server_nor_heavy_libraries() -> None:
    code = """
import sys
from coterie_deploy import commands, client
from coterie.config import METHODS, method_module
for name in (*METHODS, "prepare", "evaluation", "consensus"):
    try:
        method_module("coterie_client", name)
    except ModuleNotFoundError:
        pass
heavy = {"coterie_server", "scipy", "matplotlib", "pandas", "pyarrow", "torch", "rich"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_itself_imports_neither_side() -> None:
    code = "import sys, coterie_deploy; print(sorted({n.partition('.')[0] for n in sys.modules} & {'coterie_server', 'coterie_client'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
