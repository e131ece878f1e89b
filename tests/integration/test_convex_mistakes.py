"""What is wrong with a convex run of local updates is told in a sentence: the experiment, a user's rows, steps that run away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie_client.data import load_users
from coterie_deploy.cli import app as cli
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.run.coordinator import Finished
from tests.convex import METHODS, convex_experiment, write_rows


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "users.npz")


def ran(experiment: Experiment) -> Finished:
    return asyncio.run(launch(experiment, Launch("loopback")))


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        ("fedper", {}, "method 'fedper' trains a network, but there is no key 'model': want one"),
        ("per_fedavg", {}, "method 'per_fedavg' trains a network, but there is no key 'model': want one"),
        (
            "fedavg",
            {"problem": {"loss": "cross_entropy"}},
            "method 'fedavg' has the loss 'cross_entropy', want the loss of a convex problem",
        ),
        ("scaffold", {"payload": "float16"}, "payload 'float16' is for the weights of networks, want float64 or float32"),
        ("scaffold", {"payload": "bfloat16"}, "payload 'bfloat16' is for the weights of networks, want float64 or float32"),
    ],
)
def test_experiments_that_do_not_fit_are_refused(method: str, changes: Mapping[str, Any], sentence: str, archive: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        convex_experiment(archive, {"name": method}, **changes)


def test_a_method_of_any_model_wants_one_or_a_problem(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.yaml").write_text("name: none\ndata: {source: hsb}\nmethod: {name: fedavg}\n")
    assert cli._run(["run", str(tmp_path / "none.yaml"), "--transport", "loopback"]) == 2
    found = capfd.readouterr().err
    assert "method 'fedavg' trains a network or solves a convex problem: want a key 'model', " in found
    assert "or a key 'problem', such as problem: {loss: logistic}" in found


@pytest.mark.parametrize("rows", ["features", "test_features"])
def test_a_label_that_the_loss_does_not_know_names_its_user(rows: str, tmp_path: Path) -> None:
    """Also one of a held-out row, which nobody trains on."""
    path = write_rows(tmp_path / "users.npz", "logistic")
    experiment = convex_experiment(path, {"name": "fedavg"}, problem={"loss": "logistic"}, federation={"hosts": 2})
    user = load_users(experiment.data, experiment.seed, None)[4]
    archive = dict(np.load(path))
    archive["target"][(archive["features"] == getattr(user, rows)[1]).all(axis=1)] = 2
    np.savez(path, **archive)
    with pytest.raises(ConfigError, match="user 'u4' has the label 2, labels must be -1 or \\+1"):
        ran(experiment)


def running_away(archive: Path, method: str, lr: float, rounds: int = 200) -> Experiment:
    own = {**METHODS[method], "participation": 1.0, "evaluate_every": 1, "fine_tune": [], "optimizer": {"lr": lr, "momentum": 0.0}}
    gentle = {"penalty": 0.5 / lr} if method == "l2gd" else {}  # aggregations do not step past the mean
    return convex_experiment(archive, {**own, **gentle}, stop={"rounds": rounds})


@pytest.mark.parametrize("lr", [pytest.param(10.0, marks=pytest.mark.slow), 1e300])
@pytest.mark.parametrize("method", METHODS)
def test_steps_that_run_away_name_user_and_round(method: str, lr: float, archive: Path) -> None:
    """Every warning of numpy would be an error here."""
    sentence = (
        r"user 'u\d' in round \d+: .* (has (nan|inf) after training, want finite numbers|is nan, want numbers): a smaller learning rate"
    )
    with pytest.raises(RunError, match=sentence):
        ran(running_away(archive, method, lr))


def test_models_are_judged_until_they_run_away(archive: Path) -> None:
    """Their squared errors have no spread long before they are infinite."""
    figures = ran(running_away(archive, "fedavg", 10.0, rounds=12)).outcomes["fedavg"].figures
    assert 1e160 < figures["heldout_metric"] < np.inf
    assert figures["global_squared_error_sd"] == np.inf


def test_a_run_whose_steps_run_away_ends_with_code_3_and_one_sentence(
    archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "away.yaml"
    path.write_text(
        f"name: away\ndata: {{source: npz, path: {archive}}}\nproblem: {{loss: least_squares}}\nstop: {{rounds: 9}}\n"
        "method: {name: fedavg, participation: 1.0, optimizer: {lr: 1.0e+300}}\n"
    )
    assert cli._run(["run", str(path), "--transport", "loopback", "--quiet", "--output", str(tmp_path / "run")]) == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert "user 'u2' in round 1: tensor 'x' has inf after training, want finite numbers: a smaller learning rate may help" in line
