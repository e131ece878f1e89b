"""`coterie compare` from its command line to its files. Runs are loopback runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import coterie
from coterie.registry import method as registered
from coterie.registry import methods
from coterie_deploy.cli import app as cli
from coterie_deploy.studies import progress
from coterie_deploy.studies.compare import vary
from coterie_deploy.studies.compare.chart import front, pareto_chart
from coterie_server.run.engine import Progress
from tests.networks import CLASSES, write_users
from tests.said import refused, said, without_plots
from tests.small_runs import write_experiment

COMPARE = ("--quiet", "--output", "out")
NETWORK = {
    "name": "net",
    "data": {"source": "npz", "path": "users.npz", "test_fraction": 0.3},
    "model": {"name": "mlp", "hidden": [4], "classes": CLASSES},
    "method": {
        "name": "fedrep",
        "head_epochs": 1,
        "participation": 0.5,
        "batch_size": 5,
        "evaluate_every": 1,
        "optimizer": {"lr": 0.05},
        "fine_tune": ["head", "all"],
        "fine_tune_epochs": 1,
    },
    "stop": {"rounds": 3},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a convex experiment and a network; a terminal of 60 columns; no plots."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    without_plots(monkeypatch)
    write_experiment(tmp_path)
    write_users(tmp_path / "users.npz")
    (tmp_path / "net.yaml").write_text(yaml.safe_dump(NETWORK))
    return tmp_path


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The lines of a compare.csv by method and fine-tuning, without the time, which is another one each time."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["method"], row["fine_tuned"]): {key: value for key, value in row.items() if key != "seconds"} for row in rows}


def query(folder: Path, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection:
        return connection.execute(sql).fetchall()


# ---- the table


def test_the_table_is_what_the_databases_of_the_runs_say(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = said(capsys, "compare", "net.yaml", "--methods", "fedrep,fedavg", "--seeds", "0:2", "--target", "accuracy=0.35", *COMPARE)
    assert max(map(len, report.splitlines())) <= 60
    rows = rows_of(here / "out/compare.csv")
    names = {"": "", "head": "_ft_head", "all": "_ft_all"}
    assert list(rows) == [(method, tuned) for method in ("fedrep", "fedavg") for tuned in names]
    for (method, tuned), row in rows.items():
        name = f"{'personal' if method == 'fedrep' else 'global'}{names[tuned]}_accuracy"
        users, useful, rounds = [], [], []
        for seed in (0, 1):
            folder = here / f"out/{method}-{seed}"
            users.append([value for (value,) in query(folder, f"SELECT value FROM user_results WHERE name = '{name}'")])
            sums = "SELECT direction, SUM(message_bytes + 5 * frames) FROM ledger WHERE useful AND seq > 0 GROUP BY direction"
            useful.append(dict(query(folder, sums)))
            rounds += query(folder, "SELECT MIN(round) FROM figures WHERE name = 'accuracy' AND value >= 0.35")[0]
        means = np.mean(users, axis=1)
        assert [float(row[f"accuracy{which}"]) for which in ("", "_least", "_most")] == pytest.approx([means.mean(), *sorted(means)])
        assert float(row["accuracy_min"]) == pytest.approx(np.min(users, axis=1).mean())
        for which, quantile in (("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
            assert float(row[f"accuracy_{which}"]) == pytest.approx(np.quantile(users, quantile, axis=1).mean())
        for way in ("up", "down"):
            assert float(row[f"bytes_{way}"]) == np.mean([sent[way] for sent in useful])
        found = [number for number in rounds if number is not None]
        if not tuned:
            assert row["seeds_at_target"] == str(len(found))
            assert row["rounds_to_target"] == (str(float(np.mean(found))) if found else "")
    monkeypatch.setenv("COLUMNS", "40")
    again = ("--methods", "fedrep,fedavg", "--seeds", "0:2", "--target", "accuracy=0.35", "--resume")
    tiny = said(capsys, "compare", "net.yaml", *again, *COMPARE)
    assert max(map(len, tiny.splitlines())) <= 40
    assert re.search(rf"^fedrep +{float(rows['fedrep', '']['accuracy']):.3f} +\d\.\d{{3}} *\n \+head tuned ", tiny, re.MULTILINE)
    assert "without room in 40 columns: median, range, q1, q3, passes, rounds to, bytes to" in " ".join(tiny.split())
    printed = f"{float(rows['fedrep', 'head']['accuracy']):.3f}"
    assert re.search(rf"^fedrep .*\n \+head tuned +{printed} ", report, re.MULTILINE)


def test_without_a_target_it_is_the_accuracy_that_all_runs_reach(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    report = said(capsys, "compare", "net.yaml", "--methods", "fedper,local_network", "--seeds", "3", *COMPARE)
    best = [query(here / f"out/{method}-3", "SELECT MAX(value) FROM figures WHERE name = 'accuracy'")[0][0] for method in NETWORKS]
    assert f"to: accuracy ≥ {min(best):.4g}" in " ".join(report.split())
    rows = rows_of(here / "out/compare.csv")
    for method in NETWORKS:
        row, folder = rows[method, ""], here / f"out/{method}-3"
        at = query(folder, f"SELECT MIN(round) FROM figures WHERE name = 'accuracy' AND value >= {min(best)!r}")[0][0]
        spent = f"SELECT SUM(message_bytes + 5 * frames) FROM ledger WHERE useful AND seq > 0 AND round <= {at} AND stage <= 0"
        assert (float(row["rounds_to_target"]), float(row["bytes_to_target"])) == (at, query(folder, spent)[0][0])


NETWORKS = ("fedper", "local_network")


def test_methods_of_convex_problems_are_compared_too_and_the_table_fits(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = said(
        capsys, "compare", "small.yaml", "--methods", "global,squared", "--seeds", "0:1", "--set", "squared:method.penalty=0.05", *COMPARE
    )
    assert max(map(len, text.splitlines())) <= 120
    heads = next(line for line in text.splitlines() if line.startswith("method"))
    assert heads.split() == ["method", "accuracy", "q1", "median", "q3", "worst", "up", "down", "time"], "no passes: users minimise exactly"
    assert "rounds to" not in text  # objectives of different methods are different functions
    assert "Settings of pdmm left out for global, squared, where they are unknown or mean something else: penalty." in text
    assert query(here / "out/global-0", "SELECT name FROM stages") == [("global",)]  # the references of the experiment are not run again


def test_the_chart_has_the_front_of_those_that_no_other_one_beats(here: Path) -> None:
    points = [("a", "", 1.0, 0.5), ("b", "", 2.0, 0.4), ("c", "", 3.0, 0.9), ("c", "all tuned", 3.0, 0.95), ("d", "", 0.5, 0.5)]
    assert front(points, is_rising=True) == [points[4], points[3]]
    assert front(points, is_rising=False) == [points[4], points[1]]
    chart = pareto_chart(points, "accuracy", is_rising=True)
    assert [row[-1] for row in chart.rows] == [False, False, False, True, True]
    for alone in (points[:1], [("a", "", 1.0, 0.0)]):
        text = json.dumps(pareto_chart(alone, "accuracy", is_rising=True).spec)
        assert "NaN" not in text


def stairs_and_axes(points: list[Any], *, is_rising: bool = True) -> tuple[list[tuple[float, float]], Any, Any]:
    """The corners of the front's line, and the two axes, in a chart."""
    layers: Any = pareto_chart(points, "accuracy", is_rising=is_rising).spec["layer"]
    line = next(layer for layer in layers if layer["mark"]["type"] == "line")
    corners = [(corner["megabytes"], corner["accuracy"]) for corner in line["data"]["values"]]
    return corners, line["encoding"]["x"], line["encoding"]["y"]


def test_the_line_of_the_front_goes_to_the_sides_of_the_chart_and_axes_begin_at_zero_or_say_so() -> None:
    few = [("a", "", 1.0, 0.2), ("b", "", 4.0, 0.9), ("c", "", 5.0, 0.5)]
    corners, x, y = stairs_and_axes(few)
    assert corners == [(1.0, 0.0), (1.0, 0.2), (4.0, 0.9), (x["scale"]["domain"][1], 0.9)]
    assert (x["scale"]["type"], x["scale"]["domain"][0], y["scale"]["domain"][0]) == ("linear", 0.0, 0.0)
    assert (x["title"], y["title"]) == ("megabytes on the wire, up and down", "accuracy")
    corners, x, y = stairs_and_axes([("a", "", 0.01, 0.8), ("b", "", 40.0, 0.9)])
    assert x["scale"]["type"] == "log"
    assert x["title"].endswith("(logarithmic)")
    assert y["title"] == "accuracy (axis from 0.79, not 0)"
    marks = [layer["mark"]["type"] for layer in pareto_chart(few, "accuracy", is_rising=True).spec["layer"]]
    broken = [layer["mark"]["type"] for layer in pareto_chart(few[1:2], "accuracy", is_rising=True).spec["layer"]]
    assert broken.count("rule") - marks.count("rule") == 2
    first, top = stairs_and_axes(few, is_rising=False)[0][0]
    assert (first, top) == pytest.approx((1.0, 0.99))


@pytest.mark.slow
def test_where_the_library_is_there_is_a_plot(capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(here)
    said(capsys, "compare", "small.yaml", "--methods", "local,global", "--seeds", "0", *COMPARE)
    assert (here / "out/pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (here / "out/pareto.svg").read_text()


# ---- what each method is given


def test_a_method_takes_over_the_settings_that_it_knows_and_those_for_it_alone(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    sets = ("--set", "method.batch_size=7", "--set", "fedavg:method.optimizer.lr=0.125", "--set", "stop.rounds=1", "--hosts", "2")
    text = said(capsys, "compare", "net.yaml", "--methods", "fedrep,fedavg", "--seeds", "4", *sets, *COMPARE)
    assert "Settings of fedrep left out for fedavg, where they are unknown or mean something else: head_epochs." in " ".join(text.split())
    frozen = {method: json.loads((here / f"out/{method}-4/experiment.json").read_text()) for method in ("fedrep", "fedavg")}
    assert [content["method"]["optimizer"]["lr"] for content in frozen.values()] == [0.05, 0.125]
    for method, content in frozen.items():
        assert content["method"]["name"] == method
        assert (content["method"]["batch_size"], content["method"]["evaluate_every"]) == (7, 1)
        assert (content["stop"]["rounds"], content["seed"], content["federation"]["hosts"]) == (1, 4, 2)
    assert "head_epochs" not in frozen["fedavg"]["method"]


def test_warnings_are_told_once_with_their_runs_and_so_is_a_run_that_cannot_be_made(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    content = {**NETWORK, "method": {"name": "fedper", "participation": 0.1}, "stop": {"rounds": 1}}
    (here / "few.yaml").write_text(yaml.safe_dump(content))
    text = " ".join(said(capsys, "compare", "few.yaml", "--methods", "fedper,fedavg", "--seeds", "0", *COMPARE).split())
    assert text.count("users is one user a round: want more, or users_per_round (fedper-0 and 1 more)") == 1
    assert "is one user a round" in " ".join(said(capsys, "show", "out/fedavg-0").split())
    assert "fedper-0: " in refused(
        capsys, 2, "compare", "few.yaml", "--methods", "fedper", "--set", "model.classes=2", "--quiet", "--output", "other"
    )


def test_users_who_share_nothing_are_drawn_as_the_others_are_unless_each_has_its_own_settings(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    command = ("compare", "net.yaml", "--methods", "fedper,local_network", "--seeds", "0", "--set", "stop.rounds=1", "--quiet")
    for budget, shares in (("same", [0.5, 0.5]), ("own", [0.5, 1.0])):
        text = " ".join(said(capsys, *command, "--budget", budget, "--output", budget).split())
        parts = [method_of(here / f"{budget}/{method}-0") for method in ("fedper", "local_network")]
        assert [part["participation"] for part in parts] == shares
        assert [part["batch_size"] for part in parts] == [5, 5]
        assert ("in the whole run differ: " in text) == (budget == "own")
        assert ("left out for local_network, where they are unknown or mean something else: participation" in text) == (budget == "own")


def test_a_penalty_of_another_sense_is_not_taken_over(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    text = said(capsys, "compare", "small.yaml", "--methods", "pdmm,ditto", "--seeds", "0", "--set", "stop.rounds=1", *COMPARE)
    assert "left out for ditto, where they are unknown or mean something else: penalty." in " ".join(text.split())
    assert json.loads((here / "out/ditto-0/experiment.json").read_text())["method"]["penalty"] == 1.0
    assert json.loads((here / "out/pdmm-0/experiment.json").read_text())["method"]["penalty"] == 0.05


TWICE = ("--vary", "stop.rounds=1,2", "--vary", "stop.rounds=3,4")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("net.yaml", "--methods", "fedrep,pdmm"), "method 'pdmm' does not fit an experiment with a network, want some of apfl, ditto"),
        (("small.yaml", "--methods", "pdmm,fedper"), "method 'fedper' does not fit an experiment with a convex problem, want some of apfl"),
        (("net.yaml", "--methods", "fedrep,fedpre"), "the method 'fedpre' is unknown, want "),
        (("net.yaml", "--methods", "fedrep,fedrep"), "--methods has 'fedrep' twice, want each once"),
        (("net.yaml", "--methods", "fedrep,adapt"), "method 'adapt' does not fit"),
        (("net.yaml",), f"there are no methods to compare, want --methods with some of {methods('network')[1]}, "),
        (("small.yaml", "--methods", "pdmm,hlm_exact"), "the experiment with method 'hlm_exact': "),
        (("net.yaml", "--methods", "fedavg", "--seeds", "3:3"), "--seeds is 3:3, want 1 to 1000 seeds"),
        (("net.yaml", "--methods", "fedavg", "--seeds", "a"), "--seeds is 'a', want FIRST:END such as 0:3"),
        (("net.yaml", "--methods", "fedavg", "--seeds", "1,1"), "--seeds is 1,1, want each seed once"),
        (("net.yaml", "--methods", "fedavg", "--target", "good"), "the goal is 'good', want FIGURE=VALUE"),
        (("net.yaml", "--methods", "fedavg", "--set", "fedper:method.x=1"), "is for a method that is not compared, want one of fedavg"),
        (("net.yaml", "--methods", "fedavg", "--set", "fedavg:method.x=1"), "the experiment with method 'fedavg': method.x: unknown key"),
        (("net.yaml", "--vary", "method.head_epoch=1,2"), "method.head_epoch: unknown key; did you mean 'head_epochs'?"),
        (
            ("net.yaml", "--vary", "method.head_epochs=1,x"),
            "with method 'fedrep' and method.head_epochs x: method.head_epochs: is 'x', want",
        ),
        (
            ("net.yaml", "--vary", "method.head_epochs=1,2", "--methods", "fedrep,fedavg"),
            "'fedavg' and method.head_epochs 1: method.head_ep",
        ),
        (("net.yaml", "--vary", "method.head_epochs"), "--vary 'method.head_epochs' wants the form KEY=V1,V2"),
        (("net.yaml", "--vary", "method..x=1,2"), "--vary has the key 'method..x', want one such as method.penalty"),
        (("net.yaml", "--vary", "method.head_epochs=2"), "--vary method.head_epochs has only the value 2, want at least two"),
        (("net.yaml", "--vary", "method.head_epochs=[]"), "--vary method.head_epochs has no value, want at least two"),
        (("net.yaml", "--vary", "method.head_epochs=1,2,1"), "--vary method.head_epochs has '1' twice, want each value once"),
        (("net.yaml", "--vary", "method.optimizer.lr=1e-1,0.1"), "lr=1e-1 and lr=0.1 are the same experiment, want values that differ"),
        (("net.yaml", "--vary", "method.head_epochs=[1,"), "--vary 'method.head_epochs=[1,': the list of values is not YAML: "),
        (("net.yaml", "--vary", "federation.hosts=1,2", "--hosts", "3"), "--vary has federation.hosts, but --hosts 3 sets it: want one"),
        (("net.yaml", "--vary", "seed=1,2"), "--vary cannot have seed: want --seeds"),
        (("net.yaml", "--vary", "method.name=fedavg,fedper"), "--vary cannot have method.name: want --methods"),
        (("net.yaml", *TWICE), "--vary has 'stop.rounds' twice, want each key once"),
        (("net.yaml", "--vary", "stop.rounds=1,2", "--set", "stop.rounds=3"), "--vary has stop.rounds, but --set 'stop.rounds=3' sets it"),
        (
            ("net.yaml", "--vary", "stop.rounds=1,2", "--vary", "stop={rounds: 3},{rounds: 4}"),
            "--vary has stop and stop.rounds, which is a",
        ),
        (("small.yaml", "--vary", "federation.topology=flat,clusters"), "topology=clusters: transport 'loopback' has one process, want"),
        (
            ("net.yaml", "--vary", "stop.rounds=1,2", "--seeds", "0:501"),
            "2 settings of fedrep from 501 seeds are 1002 runs, want at most 1000",
        ),
        (("net.yaml", "--methods", "fedavg", "--resume"), "there is no comparison to resume in out: it has no compare.json"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_before_anything_runs(
    capsys: pytest.CaptureFixture[str], here: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused(capsys, 2, "compare", *arguments, *COMPARE)
    assert not (here / "out").exists()


# ---- the same work for all


def method_of(folder: Path) -> Any:
    return json.loads((folder / "experiment.json").read_text())["method"]


def test_every_method_has_the_work_of_the_experiments_own_one_unless_told_otherwise(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    sets = ("--set", "method.head_epochs=3", "--set", "fedavg:method.epochs=2", "--set", "stop.rounds=1")
    command = ("compare", "net.yaml", "--methods", "fedrep,fedper,fedavg,l2gd,local_network", "--seeds", "0", *sets)
    text = " ".join(said(capsys, *command, *COMPARE).split())
    assert [method_of(here / f"out/{name}-0")["epochs"] for name in ("fedper", "fedavg", "local_network")] == [4, 2, 4]
    assert "They are 4 passes, as of fedrep in the experiment. fedavg has 2 passes: set for it alone." in text
    assert "l2gd has 10 batches: it cannot have the same." in text
    ((n_users,),) = query(here / "out/fedper-0", "SELECT COUNT(*) FROM members")
    share = round(n_users / 2) / n_users  # of the users
    assert f"differ: fedrep {4 * share:.4g}, fedper {4 * share:.4g}, fedavg {2 * share:.4g}, local_network {4 * share:.4g}." in text
    assert "Equal passes do not take equal time" in text
    assert "accuracy: of the final models, after the last round" in text
    assert "Left at defaults that are not tuned to these data: l2gd penalty 1 (--set METHOD:method.KEY=VALUE)." in text
    rows = rows_of(here / "out/compare.csv")
    assert [rows[name, ""]["passes"] for name in ("fedrep", "fedper", "fedavg", "l2gd")] == ["4.0", "4.0", "2.0", "0.0"]
    assert json.loads((here / "out/compare.json").read_text())["work"]["fedavg"] == "2 passes"
    text = " ".join(said(capsys, *command[:5], "0", *sets, "--budget", "own", "--quiet", "--output", "other").split())
    assert [method_of(here / f"other/{name}-0").get("epochs") for name in ("fedper", "local_network")] == [None, None]
    assert "fedper has 1 pass: its own setting." in text
    assert "--budget is 'half', want same or own" in refused(capsys, 2, "compare", "net.yaml", "--methods", "fedavg", "--budget", "half")


@pytest.mark.parametrize(
    ("own", "other", "keys", "expected"),
    [
        ("fedrep", "fedper", {"head_epochs": 3}, {"epochs": 4}),
        ("fedrep", "ditto", {"head_epochs": 10}, {"epochs": 6, "personal_epochs": 5}),
        ("fedavg", "ditto", {"epochs": 1}, {"epochs": 1, "personal_epochs": 1}),
        ("fedrep", "apfl", {"head_epochs": 3}, {"epochs": 2}),
        ("fedrep", "per_fedavg", {"head_epochs": 3}, {"epochs": 2}),
        ("fedavg", "pfedme", {"epochs": 6}, {"epochs": 2}),
        ("fedavg", "fedrep", {"epochs": 5}, {"head_epochs": 4, "representation_epochs": 1}),
        ("fedavg", "fedrep", {"epochs": 1}, {"head_epochs": 1, "representation_epochs": 1}),
        ("fedavg", "ditto", {"updates": 8}, {"updates": 4}),
        ("ditto", "fedavg", {"epochs": 2, "personal_epochs": 5}, {"epochs": 7}),
        ("fedrep", "fedavg", {"head_updates": 7}, {}),
        ("fedavg", "fedrep", {"updates": 7}, {}),
        ("fedavg", "l2gd", {"epochs": 3}, {}),
    ],
)
def test_the_keys_for_the_same_work(own: str, other: str, keys: dict[str, Any], expected: dict[str, int]) -> None:
    config: Any = registered(own).config(**keys)
    found: Any = registered(other).config
    assert (found().keys_for(config.work) or {}) == expected
    if expected and own != "fedavg":
        assert found(**expected).work == config.work


def test_with_a_target_users_evaluate_on_the_way_and_without_figures_it_was_not_measured(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    content: Any = {**NETWORK, "method": {"name": "fedavg", "participation": 0.5, "evaluate_last": 2}, "stop": {"rounds": 60}}
    (here / "late.yaml").write_text(yaml.safe_dump(content))
    said(capsys, "compare", "late.yaml", "--methods", "fedavg", "--seeds", "0", "--target", "accuracy=0.1", *COMPARE)
    assert method_of(here / "out/fedavg-0")["evaluate_every"] == 2
    row = rows_of(here / "out/compare.csv")["fedavg", ""]
    assert (row["rounds_measured"], row["rounds_to_target"]) == ("31.0", "2.0")
    booked = "SELECT COUNT(DISTINCT round) FROM ledger WHERE kind LIKE '%Trial' OR kind LIKE '%trial'"
    assert query(here / "out/fedavg-0", booked) == [(31,)], "as evaluation"
    text = " ".join(said(capsys, "compare", "late.yaml", "--methods", "fedavg", "--seeds", "0", "--quiet", "--output", "b").split())
    assert "Rounds to a target were not measured: users judged in few rounds." in text
    assert "rounds to bytes to" not in text
    mixed = ("compare", "small.yaml", "--methods", "pdmm,fedavg", "--seeds", "0", "--set", "stop.rounds=4", "--target", "accuracy=0.01")
    text = said(capsys, *mixed, "--quiet", "--output", "c")
    assert re.search(r"^pdmm .* not +measured *$", text, re.MULTILINE)
    assert rows_of(here / "c/compare.csv")["pdmm", ""]["rounds_measured"] == "0.0"


# ---- settings as rows


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_settings_of_a_method_are_rows_named_by_what_varies_and_the_runs_are_those_with_these_settings(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ("--vary", "method.penalty=0.05,0.2", "--vary", "payload=[float64, float32]")
    text = said(capsys, "compare", "small.yaml", *grid, "--seeds", "0", "--set", "stop.rounds=3", *COMPARE)
    assert max(map(len, text.splitlines())) <= 60
    settings = [(penalty, payload) for penalty in ("0.05", "0.2") for payload in ("float64", "float32")]
    heads = text.splitlines()
    assert heads[0].strip() == "Accuracy of the users by pdmm, mean of 1 seed"
    assert heads[1].split()[:2] == ["setting", "accuracy"]
    assert re.findall(r"^penalty=(\S+)\s[^=]*payload=(\w+)", text, re.MULTILINE) == settings * 2
    rows = lines_of(here / "out/compare.csv")
    assert [(row["method"], row["method.penalty"], row["payload"]) for row in rows] == [("pdmm", *pair) for pair in settings]
    for row, (penalty, payload) in zip(rows, settings, strict=True):
        folder = here / f"out/pdmm-penalty={penalty},payload={payload}-0"
        frozen = json.loads((folder / "experiment.json").read_text())
        assert (frozen["method"]["penalty"], frozen["payload"], frozen["stop"]["rounds"]) == (float(penalty), payload, 3)
        ((up,),) = query(folder, "SELECT SUM(message_bytes + 5 * frames) FROM ledger WHERE useful AND seq > 0 AND direction = 'up'")
        assert float(row["bytes_up"]) == up
    assert float(rows[1]["bytes_up"]) < float(rows[0]["bytes_up"])
    kept = json.loads((here / "out/compare.json").read_text())
    assert (kept["vary"], kept["methods"]) == ({"method.penalty": [0.05, 0.2], "payload": ["float64", "float32"]}, ["pdmm"])
    monkeypatch.setenv("COLUMNS", "40")
    tiny = said(capsys, "compare", "out", "--resume", "--quiet")
    assert max(map(len, tiny.splitlines())) <= 40
    assert re.search(r"^penalty=0.2 +0\.\d{3} +0\.\d{3} *\npayload=float32 *$", tiny, re.MULTILINE)


def test_the_number_of_runs_is_said_before_they_start_and_a_grid_of_methods_and_settings_is_whole(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    grid = ("--methods", "fedrep,fedavg", "--vary", "method.optimizer={lr: 0.05},{lr: 0.5}")
    assert cli._run(["compare", "net.yaml", *grid, "--seeds", "0", "--set", "stop.rounds=1", "--jobs", "1", "--output", "out"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("2 methods with 2 settings each from 1 seed: 4 runs\n")
    assert "fedavg optimizer={lr:" in captured.out
    drawn = {(row["method"], row["method.optimizer"]) for row in lines_of(here / "out/compare.csv")}
    assert drawn == {(name, lr) for name in ("fedrep", "fedavg") for lr in ("{lr: 0.05}", "{lr: 0.5}")}
    folders = sorted((here / "out").glob("fedavg-*-0"))
    found = [method_of(folder) for folder in folders]
    assert sorted(one["optimizer"]["lr"] for one in found) == [0.05, 0.5]
    assert {one["epochs"] for one in found} == {2}, "as many passes as fedrep"
    assert all(re.fullmatch(r"[\w.,=+-]+", folder.name, re.ASCII) for folder in folders)


def test_settings_of_local_work_vary_too_and_the_notes_say_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    command = ("compare", "net.yaml", "--vary", "method.head_epochs=1,3", "--seeds", "0", "--set", "stop.rounds=1")
    text = " ".join(said(capsys, *command, *COMPARE).split())
    assert [row["passes"] for row in lines_of(here / "out/compare.csv")[::3]] == ["2.0", "4.0"]
    assert "They are 2 passes. head_epochs=3 has 4 passes: it varies." in text


def test_a_comparison_of_settings_goes_on_with_more_values_and_no_other_keys(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    command = ("compare", "small.yaml", "--seeds", "0", "--set", "stop.rounds=2", *COMPARE)
    said(capsys, *command, "--vary", "method.penalty=0.05,0.2")
    first = (here / "out/pdmm-penalty=0.2-0/run.db").read_bytes()
    said(capsys, *command, "--resume", "--vary", "method.penalty=0.2,0.1")
    assert [row["method.penalty"] for row in lines_of(here / "out/compare.csv")] == ["0.2", "0.1"]
    said(capsys, *command, "--resume")
    assert [row["method.penalty"] for row in lines_of(here / "out/compare.csv")] == ["0.2", "0.1"]
    assert (here / "out/pdmm-penalty=0.2-0/run.db").read_bytes() == first
    other = refused(capsys, 2, *command, "--resume", "--vary", "problem.l2=0.1,0.2")
    assert "--vary has problem.l2, but the comparison in out varies method.penalty: go on with `coterie compare out --resume`" in other


def test_settings_that_an_experiment_lacks_may_come_from_what_varies(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    newton = ("--set", "method={name: son_newton}", "--set", "stop.rounds=1")
    said(capsys, "compare", "small.yaml", *newton, "--vary", "method.penalty=0.05,0.2", "--seeds", "0", *COMPARE)
    assert len(lines_of(here / "out/compare.csv")) == 2


def test_names_of_settings_take_as_few_parts_of_their_keys_as_tell_them_apart_and_folders_are_safe() -> None:
    assert vary.short_names(["method.penalty", "payload"]) == {"method.penalty": "penalty", "payload": "payload"}
    assert vary.short_names(["a.b.lr", "a.c.lr"]) == {"a.b.lr": "b.lr", "a.c.lr": "c.lr"}
    assert vary.short_names(["x", "method.x"]) == {"x": "x", "method.x": "method.x"}
    rows = vary.rows_of(["pdmm"], {"data.path": ["../a b.csv", "../a_b.csv", None]})
    assert [row.name for row in rows] == ["path=../a b.csv", "path=../a_b.csv", "path=null"]
    assert len({row.folder for row in rows}) == 3
    assert not [row.folder for row in rows if "/" in row.folder or " " in row.folder]


def test_names_in_the_picture_differ_though_they_are_long(here: Path) -> None:
    names = [f"compress={{quantize: {{bits: {bits}, stochastic: true, rotate: hadamard}}}} end={end}" for bits in (2, 4) for end in (1, 2)]
    values: Any = pareto_chart([(name, "", 1.0, 0.5) for name in names], "accuracy", is_rising=True, what="setting").spec
    labels = {point["label"] for point in values["data"]["values"]}
    assert len(labels) == 4
    assert max(map(len, labels)) <= 40
    assert all(label.startswith(("\N{HORIZONTAL ELLIPSIS}bits: 2", "\N{HORIZONTAL ELLIPSIS}bits: 4")) for label in labels)


# ---- interrupted, resumed


def test_the_display_names_the_run_and_nothing_is_done_before_the_first_one() -> None:
    shown = progress.SeriesDisplay(["fedrep-0 (1/2)", "fedavg-0 (2/2)"])
    assert (shown.place(), shown.done) == ("fedrep-0 (1/2)  starting", 0)
    shown.skip(1)
    assert shown.done == 1
    shown.begin(2)
    assert (shown.place(), shown.done) == ("fedavg-0 (2/2)  starting", 1)


def interrupt_in(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    """Sends this process SIGINT, as Ctrl-C does, after the first round of a run."""
    observe: Callable[..., None] = progress.SeriesDisplay.__call__

    def observe_and_interrupt(self: progress.SeriesDisplay, latest: Progress) -> None:
        observe(self, latest)
        if (self.number, latest.round) == (run, 1):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(progress.SeriesDisplay, "__call__", observe_and_interrupt)


def test_an_interrupted_comparison_goes_on_to_the_same_table_and_repeats_no_finished_run(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    command = ("compare", "net.yaml", "--methods", "fedrep,fedavg", "--seeds", "0:1", "--set", "stop.rounds=10", *COMPARE)
    said(capsys, *command)
    undisturbed = rows_of(here / "out/compare.csv")
    (here / "out").rename(here / "first")
    with pytest.MonkeyPatch.context() as patch:
        without_plots(patch)
        interrupt_in(patch, 2)
        assert refused(capsys, 130, *command).endswith("coterie compare out --resume")
    assert not (here / "out/compare.csv").exists()
    finished = (here / "out/fedrep-0/run.db").read_bytes()
    said(capsys, "compare", "out", "--resume", "--quiet")
    assert rows_of(here / "out/compare.csv") == undisturbed
    assert (here / "out/fedrep-0/run.db").read_bytes() == finished
    assert query(here / "out/fedavg-0", "SELECT value FROM run WHERE key = 'attempt'") == [("2",)]


def test_a_folder_is_for_one_comparison_which_may_grow(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    command = ("compare", "small.yaml", "--methods", "local", "--seeds", "0", *COMPARE)
    said(capsys, *command)
    assert "the folder out is used by another comparison" in refused(capsys, 2, *command)
    assert "out is the folder of a comparison, want --resume" in refused(capsys, 2, "compare", "out", "--quiet")
    other = refused(capsys, 2, *command, "--resume", "--set", "problem.l2=0.5")
    assert "problem.l2 is 0.5, but out/local-0 was started with 0.01: go on with `coterie compare out --resume`" in other
    first = (here / "out/local-0/run.db").read_bytes()
    said(capsys, "compare", "out", "--resume", "--methods", "local,global", "--quiet")
    assert list(rows_of(here / "out/compare.csv")) == [("local", ""), ("global", "")]
    assert (here / "out/local-0/run.db").read_bytes() == first
    assert "want one of: " in refused(capsys, 2, "compare", "out", "--resume", "--target", "speed=1", "--quiet")


@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_table(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    command = ("compare", "net.yaml", "--methods", "fedrep,fedavg", "--seeds", "0:2", "--set", "stop.rounds=60", *COMPARE)
    said(capsys, *command)
    undisturbed = rows_of(here / "out/compare.csv")
    (here / "out").rename(here / "first")
    process = subprocess.Popen([sys.executable, "-m", "coterie", *command])
    deadline = time.monotonic() + 120
    while not (here / "out/fedrep-1/checkpoints").is_dir():  # two more runs are to come, so that it cannot have ended
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert not (here / "out/compare.csv").exists()
    said(capsys, "compare", "out", "--resume", "--quiet")
    assert rows_of(here / "out/compare.csv") == undisturbed


# ---- from Python


@pytest.mark.parametrize("frames", ["pandas", "polars"])
def test_a_comparison_from_python_has_the_columns_of_the_file(here: Path, frames: Any) -> None:
    asked: dict[str, Any] = {**NETWORK, "data": {**NETWORK["data"], "path": "users.npz"}}
    found = coterie.compare(asked, ["fedrep", "fedavg"], seeds=[0, 1], output="out", target="accuracy=0.35", overrides=["stop.rounds=2"])
    assert (found.methods, found.seeds, found.folder) == (("fedrep", "fedavg"), (0, 1), Path("out"))
    with (here / "out/compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = found.table(frames=frames)
    assert list(table.columns) == list(rows[0])
    for name in table.columns:
        cells = ["" if value is None or value is pd.NA else str(value) for value in table[name].to_list()]
        if name != "seeds_at_target":
            assert cells == [row[name] for row in rows], name
    assert list(found.run("fedavg", 1, frames=frames).metrics("fedavg")["round"]) == [0, 1, 2]


def test_settings_from_python_are_rows_of_the_table_and_name_their_runs(here: Path) -> None:
    settings: dict[str, Any] = {"method.penalty": np.array([0.05, 0.2]), "problem.l2": (0.01, 0.1)}
    found = coterie.compare("small.yaml", vary=settings, seeds=[0], output="out", overrides=["stop.rounds=2"])
    assert found.methods == ("pdmm",)
    assert found.rows == tuple(f"penalty={penalty} l2={l2}" for penalty in (0.05, 0.2) for l2 in (0.01, 0.1))
    table = found.table()
    assert table["method.penalty"].tolist() == [0.05, 0.05, 0.2, 0.2]
    assert table["problem.l2"].tolist() == [0.01, 0.1, 0.01, 0.1]
    assert found.run("penalty=0.2 l2=0.1", 0).run_id
    with pytest.raises(coterie.ConfigError, match=r"the comparison has no row 'pdmm', want one of penalty=0\.05 l2=0\.01; "):
        found.run("pdmm", 0)
    with pytest.raises(coterie.ConfigError, match="--vary payload has 'float32', want a list of values"):
        coterie.compare("small.yaml", vary={"payload": "float32"}, output="other")
    with pytest.raises(coterie.ConfigError, match="--vary payload has a value that an experiment cannot hold: one of type object"):
        coterie.compare("small.yaml", vary={"payload": [object(), 1]}, output="other")
    with pytest.raises(coterie.ConfigError, match=r"--vary method\.penalty has a number that is not finite, want finite numbers"):
        coterie.compare("small.yaml", vary={"method.penalty": [math.nan, 1]}, output="other")


async def in_a_loop(*arguments: Any, **options: Any) -> coterie.Comparison:
    return coterie.compare(*arguments, **options)


def test_a_comparison_goes_on_in_its_folder_and_from_inside_of_an_event_loop(here: Path) -> None:
    convex = coterie.load_experiment(here / "small.yaml", ["stop.rounds=3"])
    first = coterie.compare(convex, ["local"], seeds=[3], output=here / "out")
    identity = first.run("local", 3).run_id
    with pytest.raises(coterie.ConfigError, match="is used by another comparison"):
        coterie.compare(convex, ["local"], seeds=[3], output=here / "out")
    more = asyncio.run(in_a_loop(here / "out", ["local", "global"], output=here / "out", resume=True))
    assert (more.methods, more.seeds) == (("local", "global"), (3,))
    assert more.run("local", 3).run_id == identity
    assert more.table().method.tolist() == ["local", "global"]
    with pytest.raises(coterie.ConfigError, match="is not a run folder"):
        more.run("local", 4)
    with pytest.raises(coterie.ConfigError, match="the method 'fedrepp' is unknown"):
        coterie.compare(convex, ["fedrepp"], output=here / "other")
