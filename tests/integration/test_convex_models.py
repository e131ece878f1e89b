"""What becomes of a finished run of local updates on a convex problem: who has the models, and what is told of the users."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.models import finished_run, models_of
from tests.networks import network_experiment, write_users
from tests.said import refused, said
from tests.small_runs import ROWS, make_run

METHODS = ("fedavg", "ditto", "ifca", "pdmm")
NEW = np.array([[0.5, -0.2], [-0.7, 0.4], [0.1, 0.9]])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of each method by two hosts."""
    folder = tmp_path_factory.mktemp("convex")
    for method in METHODS:
        own = "{name: pdmm, penalty: 0.05}" if method == "pdmm" else f"{{name: {method}, participation: 1.0, optimizer: {{lr: 0.2}}}}"
        make_run(
            folder, folder / method, "--set", f"method={own}", "--set", "stop.rounds=5", "--set", "data.test_fraction=0.4", "--hosts", "2"
        )
    return folder


def told(runs: Path, method: str, user: str) -> list[float]:
    return [float(value) for value in coterie.load_run(runs / method).predict(user, NEW)]


def signs(runs: Path, method: str, x: Any) -> list[float]:
    """What a linear model says of the rows, by hand: standardised, with a column of -1."""
    with np.load(runs / method / "models" / f"{method}.npz") as left:
        rows = (NEW - left["mean"]) / left["scale"]
    return np.sign(rows @ x[:2] - x[2]).tolist()  # type: ignore[no-any-return]


def test_users_own_models_stay_in_their_hosts_state_and_predict_from_there(runs: Path, tmp_path: Path, capsys: Any) -> None:
    with np.load(runs / "ditto" / "models" / "ditto.npz") as left:
        assert "x" not in left
    models = models_of(finished_run(runs / "ditto"), None)
    assert len({tuple(model["x"]) for model in models.values()}) == 3
    for user, model in models.items():
        assert told(runs, "ditto", user) == signs(runs, "ditto", model["x"])
    moved = tmp_path / "run"
    shutil.copytree(runs / "ditto", moved, ignore=shutil.ignore_patterns("hosts"))
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b\n" + "".join(f"{a},{b}\n" for a, b in NEW))
    assert "no host of the run has left its state" in refused(capsys, 2, "predict", str(moved), "--user", "u1", str(rows))
    text = said(capsys, "predict", str(moved), "--user", "u1", str(rows), "--state", str(runs / "ditto" / "hosts"))
    assert [float(line.rpartition(",")[2]) for line in text.splitlines()[1:]] == told(runs, "ditto", "u1")


def test_one_model_for_all_is_in_the_run_folder(runs: Path) -> None:
    run = coterie.load_run(runs / "fedavg")
    assert all(np.array_equal(model, run.shared["x"]) for model in run.models.values())
    assert told(runs, "fedavg", "u2") == signs(runs, "fedavg", run.shared["x"])


def test_models_of_clusters_are_those_that_users_have_chosen(runs: Path) -> None:
    run = coterie.load_run(runs / "ifca")
    assert run.shared["x"].shape == (2, 3)
    kept = models_of(finished_run(runs / "ifca"), None)
    for user, model in run.models.items():
        assert np.array_equal(model, kept[user]["x"])
        assert any(np.array_equal(model, one) for one in run.shared["x"])


def test_there_is_no_head_that_new_users_could_train(runs: Path, tmp_path: Path, capsys: Any) -> None:
    rows = tmp_path / "new.csv"
    rows.write_text("user,a,b,y\n" + "".join(f"{','.join(map(str, row))}\n" for row in ROWS))
    for method in ("fedavg", "ifca"):
        sentence = refused(capsys, 2, "adapt", str(runs / method), "--data", str(rows))
        assert f"of method {method!r} has left whole linear models, which have no heads to train" in sentence
    archive = write_users(tmp_path / "users.npz")
    several = network_experiment(archive, {"name": "ifca", "clusters": 3}, stop={"rounds": 1})
    asyncio.run(launch(several, Launch(transport="loopback", folder=tmp_path / "several")))
    assert "has left 3 models, want a run with one" in refused(capsys, 2, "adapt", str(tmp_path / "several"), "--data", str(archive))


@pytest.mark.parametrize("method", ["pdmm", "local"])
def test_the_users_of_a_stage_are_told_one_by_one_and_how_they_are_spread(runs: Path, method: str) -> None:
    stage = "pdmm" if method == "pdmm" else "local"
    run = coterie.load_run(runs / "pdmm")
    results = run.user_results()
    accuracies = results[results["stage"] == stage]["heldout_accuracy"].to_numpy()
    figures = run.results().set_index("stage").loc[stage]
    assert len(accuracies) == 3
    assert figures["heldout_metric"] == pytest.approx(accuracies.mean())
    assert figures["heldout_metric_q1"] == pytest.approx(np.quantile(accuracies, 0.25))
    assert figures["heldout_metric_min"] == accuracies.min()
