"""`coterie tune` from its command line to its files. Runs are loopback runs in this process."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from coterie.experiment.config import experiment_from, load_experiment
from coterie_deploy.cli import app as cli
from coterie_deploy.engines.api import run
from coterie_deploy.studies import progress
from coterie_deploy.studies.tune import result
from coterie_deploy.studies.tune.plan import SERIES
from coterie_deploy.view.report_page import write_figure
from coterie_server.run.engine import Progress
from coterie_server.run.plan import stages_of
from tests.said import refused, said, without_plots
from tests.slow import slow_after

ELLIPSES = """
name: small
seed: 3
data: {source: ellipses, users_per_cluster: 2, rows_per_user: 12, test_per_class: 20}
problem: {loss: squared_hinge, l2: 0.01}
method: {name: squared, penalty: 5.0}
references: [local]
"""
# Theorem 5.1: with unit variances gamma_i = 1/sigma_user^2 = 1 and lambda_j = 1/sigma_cluster^2 = 1 are the best weights.
HLM = """
name: hlm
seed: 1
data: {source: hlm, clusters: 8, users_per_cluster: 6, d: 4, rows_per_user: 12, test_per_user: 5}
problem: {loss: least_squares, reduction: sum, intercept: false, l2: 0.0}
method: {name: hlm_exact, gamma: 3.0, lam: 3.0}
"""
METHODS = {
    "squared": ("small.yaml", "{name: squared, penalty: 5.0}", ["--grid", "method.penalty=0.003..1:3"]),
    "hlm_exact": ("hlm.yaml", "{name: hlm_exact, gamma: 3.0, lam: 3.0}", ["--grid", "method.gamma=0.01..1:4", "--grid", "method.lam=1,10"]),
    "async_al2sgd": (
        "ridge.yaml",
        "{name: async_al2sgd, gamma: 3.0, lam: 3.0, iterations: 150}",
        ["--grid", "method.gamma=0.1,1", "--grid", "method.lam=1,10"],
    ),
    "async_l2gd": (
        "hlm.yaml",
        "{name: async_l2gd, gamma: 3.0, lam: 3.0, iterations: 150}",
        ["--grid", "method.gamma=0.1,1", "--grid", "method.lam=1,10"],
    ),
}
TUNE = ("--transport", "loopback", "--quiet", "--output", "out")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three experiments; a terminal of 60 columns; no plots, which take a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    without_plots(monkeypatch)
    (tmp_path / "small.yaml").write_text(ELLIPSES)
    (tmp_path / "hlm.yaml").write_text(HLM)
    (tmp_path / "ridge.yaml").write_text(HLM.replace("l2: 0.0", "l2: 0.1"))  # row losses that are strongly convex
    return tmp_path


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    """The lines of a tuned.csv by point."""
    with path.open(newline="") as file:
        return {row["point"]: row for row in csv.DictReader(file)}


def query(folder: Path, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection:
        return connection.execute(sql).fetchall()


# ---- from end to end


@pytest.mark.parametrize("method", METHODS)
def test_a_tune_chooses_the_point_with_the_smallest_mean_loss_and_writes_an_experiment_that_runs(
    capsys: pytest.CaptureFixture[str], here: Path, method: str
) -> None:
    file, settings, grid = METHODS[method]
    report = said(capsys, "tune", file, "--set", f"method={settings}", *grid, "--folds", "3", *TUNE)
    assert max(map(len, report.splitlines())) <= 60
    rows = rows_of(here / "out/tuned.csv")
    for row in rows.values():
        losses = [float(row[f"loss_fold_{number}"]) for number in (1, 2, 3)]
        assert float(row["heldout_loss"]) == pytest.approx(np.mean(losses), rel=1e-12)
        assert float(row["standard_error"]) == pytest.approx(np.std(losses, ddof=1) / np.sqrt(3), rel=1e-12)
    best = min(rows, key=lambda point: float(rows[point]["heldout_loss"]))
    assert f"chosen: {best}, held-out loss" in " ".join(report.split())
    chosen = load_experiment(here / "out/tuned.yaml")
    assert chosen.data.fold is None
    assert chosen.method.grid is None
    for key in ("penalty", "gamma", "lam"):
        if key in rows[best]:
            assert getattr(chosen.method, key) == float(rows[best][key])
    written = load_experiment(here / file, [f"method={settings}"])
    same = {"method": chosen.method}
    assert chosen == written.model_copy(update=same)
    assert "run folder: final" in said(capsys, "run", "out/tuned.yaml", "--transport", "loopback", "--quiet", "--output", "final")


def test_the_losses_of_a_fold_are_those_of_a_run_of_its_own(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """Neither the warm start nor the other points change what an exact method finds."""
    said(capsys, "tune", "small.yaml", "--grid", "method.penalty=1,0.03", "--folds", "2", *TUNE)
    rows = rows_of(here / "out/tuned.csv")
    for penalty in ("1", "0.03"):
        for fold in (1, 2):
            experiment = load_experiment(here / "small.yaml", [f"method.penalty={penalty}", f"data.fold={{number: {fold}, of: 2}}"])
            alone = run(experiment).metrics["squared"]["heldout_loss"]
            assert float(rows[f"penalty={penalty}"][f"loss_fold_{fold}"]) == pytest.approx(alone, rel=1e-8)


def test_test_rows_play_no_part(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    grid = ("--grid", "method.gamma=0.1,1", "--folds", "2", "--transport", "loopback", "--quiet")
    said(capsys, "tune", "hlm.yaml", *grid, "--output", "with")
    said(capsys, "tune", "hlm.yaml", *grid, "--output", "without", "--set", "data.test_per_user=0")
    assert (here / "with/tuned.csv").read_text() == (here / "without/tuned.csv").read_text()


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_best_weights_of_theorem_5_1_are_found(capsys: pytest.CaptureFixture[str], here: Path, seed: str) -> None:
    grid = ("--grid", "method.gamma=0.01..100:3", "--grid", "method.lam=1,100")
    report = said(capsys, "tune", "hlm.yaml", *grid, "--seed", seed, *TUNE)
    method = load_experiment(here / "out/tuned.yaml").method
    assert (method.gamma, method.lam) == (1.0, 1.0)
    text = " ".join(report.split())
    assert "warning: the chosen lam, 1, is the smallest of the grid: smaller ones may be better" in text
    assert "the chosen gamma" not in text


@pytest.mark.parametrize(("end", "sentence"), [("largest", "larger ones may be better"), ("smallest", "smaller ones may be better")])
def test_a_choice_at_an_edge_of_the_grid_is_said(capsys: pytest.CaptureFixture[str], here: Path, end: str, sentence: str) -> None:
    values = "0.0001,0.001" if end == "largest" else "20,200"
    text = " ".join(said(capsys, "tune", "small.yaml", "--grid", f"method.penalty={values}", "--folds", "2", *TUNE).split())
    assert re.search(rf"warning: the chosen penalty, \S+, is the {end} of the grid: {sentence}", text)


def test_the_grid_may_be_in_the_experiment(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    grid = "method.grid=[{penalty: 0.1}, {penalty: null, gamma_eq4: 0.01}]"
    report = said(capsys, "tune", "small.yaml", "--set", grid, "--folds", "2", *TUNE)
    assert re.search(r"^penalty +gamma_eq4 +loss", report, re.MULTILINE)
    assert list(rows_of(here / "out/tuned.csv")) == ["penalty=0.1", "penalty=null gamma_eq4=0.01"]


def test_only_the_best_points_of_many_are_printed(capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "MAX_ROWS", 2)
    report = said(capsys, "tune", "small.yaml", "--grid", "method.penalty=0.003..1:4", "--folds", "2", *TUNE)
    assert "these are the best 2 of 4 points: out/tuned.csv has all" in report
    rows = rows_of(here / "out/tuned.csv")
    best = sorted(rows, key=lambda point: float(rows[point]["heldout_loss"]))
    printed = re.findall(r"^([\d.]+) +\d", report, re.MULTILINE)
    assert sorted(printed) == sorted(rows[point]["penalty"] for point in best[:2])


def test_where_the_library_is_there_is_a_plot(capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said(capsys, "tune", "small.yaml", "--grid", "method.penalty=0.1,1", "--folds", "2", *TUNE)
    assert not (here / "out/tuned.png").exists()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    said(capsys, "tune", "out", "--resume", "--quiet")
    assert (here / "out/tuned.png").read_bytes().startswith(b"\x89PNG")


# ---- what travels


@pytest.mark.parametrize("method", ["async_l2gd", "async_al2sgd"])
def test_no_model_of_a_user_goes_to_the_coordinator_to_be_judged(capsys: pytest.CaptureFixture[str], here: Path, method: str) -> None:
    """Users judge the models that they hold, and send numbers: up there is nothing else but the method's own messages."""
    file, settings, grid = METHODS[method]
    said(capsys, "tune", file, "--set", f"method={settings}", *grid, "--folds", "2", *TUNE)
    for fold in (1, 2):
        sent = "SELECT step, kind, SUM(vectors), SUM(scalars) FROM ledger WHERE direction = 'up' GROUP BY step, kind"
        by_step: dict[str, list[int]] = {}
        for step, kind, vectors, scalars in query(here / f"out/fold-{fold}", sent):
            assert not re.search(r"evaluation|FinalModels", kind)
            found = by_step.setdefault(step, [0, 0])
            by_step[step] = [found[0] + vectors, found[1] + scalars]
        averages = {f"{scope}-{what}" for scope in ("within", "between") for what in ("average", "anchor")}
        assert by_step.keys() <= {"control", "describe", "smoothness", "parameters", "trace", "evaluate", "gap"} | averages
        assert by_step["gap"][0] == 0  # four numbers of each user, and no vector
        assert by_step["evaluate"] == [0, 4 * 48 * 3]  # 4 points, 48 users: loss on training rows, held-out loss and metric
        with np.load(here / f"out/fold-{fold}/models/gamma=1 lam=1.npz") as arrays:
            assert "x" not in arrays


def test_a_fold_of_hlm_exact_sends_statistics_once_and_losses(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """X'X and X'y, d(d+3)/2 numbers of each user, do not depend on the weights."""
    file, settings, grid = METHODS["hlm_exact"]
    said(capsys, "tune", file, "--set", f"method={settings}", *grid, "--folds", "2", *TUNE)
    sent = "SELECT step, SUM(vectors), SUM(scalars) FROM ledger WHERE direction = 'up' AND step != 'control' GROUP BY step"
    found = {step: (vectors, scalars) for step, vectors, scalars in query(here / "out/fold-1", sent)}
    n, d, n_points = 48, 4, 8
    assert found.pop("statistics") == (n, n * d * (d + 3) // 2)
    assert found.pop("evaluate") == (0, n_points * n * 3)
    assert found.keys() == {"describe"}
    ledger = said(capsys, "ledger", "out/fold-1", "--total")
    assert re.search(r"^statist\S* +up +48 +48 ", ledger, re.MULTILINE)


# ---- interrupted


def interrupt_in(monkeypatch: pytest.MonkeyPatch, fold: int, stage: int) -> None:
    """Sends this process SIGINT, as Ctrl-C does, after the first round of one point of one fold."""
    observe: Callable[..., None] = progress.SeriesDisplay.__call__

    def observe_and_interrupt(self: progress.SeriesDisplay, latest: Progress) -> None:
        observe(self, latest)
        if (self.number, latest.number, latest.round) == (fold, stage, 1):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(progress.SeriesDisplay, "__call__", observe_and_interrupt)


@pytest.mark.parametrize("method", slow_after(1, METHODS))
@pytest.mark.parametrize("again", ["the folder", "the command"])
def test_an_interrupted_tune_goes_on_to_the_same_table_and_repeats_no_finished_fold(
    capsys: pytest.CaptureFixture[str], here: Path, method: str, again: str
) -> None:
    file, settings, grid = METHODS[method]
    command = ("tune", file, "--set", f"method={settings}", *grid, "--folds", "3", *TUNE)
    report = said(capsys, *command)
    undisturbed = (here / "out/tuned.csv").read_text()
    (here / "out").rename(here / "first")
    with pytest.MonkeyPatch.context() as patch:
        without_plots(patch)
        interrupt_in(patch, fold=2, stage=0)
        sentence = refused(capsys, 130, *command)
    assert "stopped by a signal in stage" in sentence
    assert sentence.endswith("coterie tune out --resume")
    assert not (here / "out/tuned.csv").exists()
    assert not (here / "out/fold-3").exists()
    first = (here / "out/fold-1/run.db").read_bytes()
    resumed = ("tune", "out", "--resume", "--quiet", "--transport", "loopback") if again == "the folder" else (*command, "--resume")
    assert said(capsys, *resumed) == report
    assert (here / "out/tuned.csv").read_text() == undisturbed
    assert (here / "out/fold-1/run.db").read_bytes() == first
    assert query(here / "out/fold-2", "SELECT value FROM run WHERE key = 'attempt'") == [("2",)]


def test_a_tune_that_is_asked_to_stop_at_the_end_of_a_fold_does_not_begin_the_next(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_in(monkeypatch, fold=1, stage=1)  # its last round: the request comes when the run has nothing left to stop
    sentence = refused(capsys, 130, "tune", "hlm.yaml", "--grid", "method.gamma=0.1,1", "--folds", "2", *TUNE)
    assert sentence == "error: stopped by SIGINT before fold 2: coterie tune out --resume"
    assert [path.name for path in (here / "out").glob("fold-*")] == ["fold-1"]


def test_a_finished_tune_that_is_resumed_reports_again(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    report = said(capsys, "tune", "small.yaml", "--grid", "method.penalty=0.1,1", "--folds", "2", *TUNE)
    assert said(capsys, "tune", "out", "--resume", "--quiet") == report


def test_a_tune_remembers_what_it_is(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    said(capsys, "tune", "small.yaml", "--grid", "method.penalty=1,0.1", "--folds", "2", "--hosts", "3", *TUNE)
    tuning = SERIES.read(here / "out")
    assert (tuning.folds, dict(tuning.federation)) == (2, {"hosts": 3})
    fold = tuning.fold(2)
    assert fold == experiment_from(json.loads((here / "out/fold-2/experiment.json").read_text()))
    assert [stage.name for stage in stages_of(fold)] == ["penalty=1", "penalty=0.1"]
    assert len(query(here / "out/fold-2", "SELECT DISTINCT host FROM members")) == 3


def test_hosts_do_not_change_the_table(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    grid = ("--grid", "method.gamma=0.1,1", "--folds", "2", "--transport", "loopback", "--quiet")
    said(capsys, "tune", "hlm.yaml", *grid, "--output", "one")
    said(capsys, "tune", "hlm.yaml", *grid, "--output", "five", "--hosts", "5")
    assert (here / "one/tuned.csv").read_text() == (here / "five/tuned.csv").read_text()


@pytest.mark.slow
def test_hosts_and_aggregators_in_processes_of_their_own_give_the_same_table(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    file, settings, grid = METHODS["async_l2gd"]
    command = ("tune", file, "--set", f"method={settings}", "--set", "data.clusters=3", *grid, "--folds", "2", "--quiet")
    said(capsys, *command, "--transport", "loopback", "--output", "one")
    said(capsys, *command, "--hosts", "2", "--output", "flat")
    said(capsys, *command, "--topology", "clusters", "--output", "tiers")
    table = (here / "one/tuned.csv").read_text()
    assert [(here / name / "tuned.csv").read_text() == table for name in ("flat", "tiers")] == [True, True]
    assert (here / "tiers/tuned.yaml").read_text() == (here / "one/tuned.yaml").read_text()


# ---- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("small.yaml",), "the grid has 0 points, want at least 2: --grid method.setting=values, or method.grid in the experiment"),
        (("small.yaml", "--grid", "method.pena=1,2"), "method.pena: unknown key"),
        (("small.yaml", "--grid", "method.penalty="), "--grid 'method.penalty=' has no values, want at least one"),
        (("small.yaml", "--grid", "method.penalty=1,-2"), "method.grid.entry 2.penalty: is -2, want more than 0"),
        (("small.yaml", "--grid", "method.penalty=1,2", "--folds", "1"), "folds is 1, want 2 to 1000"),
        (
            ("small.yaml", "--grid", "method.penalty=1,2", "--set", "data.fold={number: 1, of: 2}"),
            "small.yaml has data.fold, want none: a tune makes the folds itself",
        ),
        (
            ("small.yaml", "--grid", "method.penalty=1,2", "--set", "method={name: pdmm, penalty: 1}"),
            "method 'pdmm' cannot be tuned: one run tries the values of method.path itself; coterie tune wants one of async_al2sgd, ",
        ),
        (("small.yaml", "--resume", "--grid", "method.penalty=1,2"), "there is no tune to resume in out: it has no tune.json"),
        (("small.yaml", "--grid", "method.penalty=1,2", "--hosts", "60"), "60 hosts for 6 users: want at most one host for each user"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], here: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused(capsys, 2, "tune", *arguments, *TUNE)
    assert not (here / "out").exists()


def test_a_folder_that_is_used_is_left_alone(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    command = ("tune", "small.yaml", "--grid", "method.penalty=1,0.1", "--folds", "2", *TUNE)
    said(capsys, *command)
    quiet = ("--quiet", "--transport", "loopback")
    assert "the folder out is used by another tune: choose another one with --output, or" in refused(capsys, 2, *command)
    assert "out is the folder of a tune, want --resume to go on with it" in refused(capsys, 2, "tune", "out", *quiet)
    for change, key in (
        (("--folds", "3"), "data.fold.of is 3"),
        (("--hosts", "2"), "federation.hosts is 2"),
        (("--seed", "9"), "seed is 9"),
    ):
        sentence = refused(capsys, 2, "tune", "out", "--resume", *change, *quiet)
        assert key in sentence
        assert sentence.endswith("go on with `coterie tune out --resume`")
    assert "method.grid is [" in refused(capsys, 2, "tune", "out", "--resume", "--grid", "method.penalty=3,2", *quiet)
    output = ("--output", "out/fold-1")
    assert "out/fold-1 is that of a run" in refused(capsys, 2, *command[:-2], *output)
    (here / "out/tune.json").write_text("{")
    assert "out/tune.json is damaged" in refused(capsys, 2, "tune", "out", "--resume", *quiet)


def test_users_with_one_row_each_cannot_be_tuned_on(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    one = ("--set", "data.rows_per_user=1", "--set", "problem.l2=0.1", "--grid", "method.gamma=0.1,1", "--folds", "2")
    sentence = refused(capsys, 3, "tune", "hlm.yaml", *one, *TUNE)
    assert "no user has held-out rows in any of the 2 folds, want users with at least 2 training rows" in sentence


# ---- progress


def test_one_bar_counts_the_points_of_all_folds_and_fits_the_terminal(here: Path) -> None:
    tuning_points, folds = 4, 3
    grid = [{"penalty": 10.0**-place} for place in range(tuning_points)]
    method = {"name": "squared", "penalty": 1.0, "grid": grid}
    stages = stages_of(experiment_from({"name": "x", "data": {"source": "hsb"}, "problem": {"loss": "least_squares"}, "method": method}))
    shown = progress.SeriesDisplay([f"fold {number}/{folds}" for number in range(1, folds + 1)], tuning_points)
    done = []
    shown.skip(1)
    assert shown.done == tuning_points
    for fold in (2, 3):
        if fold == 3:
            shown.end(2)
        shown.begin(fold)
        done.append(shown.done)
        for number, stage in enumerate(stages):
            shown(Progress(stage, number, len(stages), 1, {}, 1 / stage.stop.rounds))
            done.append(shown.done)
            shown(Progress(stage, number, len(stages), stage.stop.rounds, {}, 1.0))
            done.append(shown.done)
    assert done == sorted(done)
    assert done[0] == tuning_points
    assert done[-1] == tuning_points * folds
    console = Console(width=60, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(shown.picture())
    (line,) = capture.get().splitlines()
    assert len(line) <= 60
    assert line.startswith("fold 3/3  penalty=0.001")
    assert "12/12" in line


def test_without_a_terminal_each_fold_is_a_line(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    command = ("tune", "small.yaml", "--grid", "method.penalty=0.1,1", "--folds", "2", "--transport", "loopback", "--output", "out")
    assert cli._run(list(command)) == 0
    assert capsys.readouterr().err.splitlines() == ["fold 1/2: 2 points", "fold 2/2: 2 points"]
    assert cli._run([*command, "--resume"]) == 0
    assert capsys.readouterr().err.splitlines() == ["fold 1/2 was finished before", "fold 2/2 was finished before"]


# ---- the plot


@pytest.mark.parametrize(
    "entries",
    [
        [{"variant": "a"}, {"variant": "b"}],
        [{"lam": {"c0": 1.0}}, {"lam": 2.0}, {"lam": None, "alpha": 0.5}],
        [{"gamma": 0.0, "lam": float(lam)} for lam in range(3)],
        [{"gamma": 10.0**place, "lam": float(lam)} for place in range(4) for lam in range(20)],
    ],
    ids=["text", "mixed", "zero", "many"],
)
def test_any_grid_can_be_drawn(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    losses = np.random.default_rng(0).uniform(1, 2, (len(entries), 3))
    points = [result.Point(f"point-{place}", entry, row, row) for place, (entry, row) in enumerate(zip(entries, losses, strict=True))]
    write_figure(result.chart(result.Tuned(points, 0, 0), 3), tmp_path / "tuned.png")
    assert (tmp_path / "tuned.png").stat().st_size > 10_000
