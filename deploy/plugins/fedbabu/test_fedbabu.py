"""Against Algorithm 1 of Oh, Kim and Yun (2022), by hand: users train the body under a fixed head, and the server averages bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import coterie

LR, CLASSES, ROUNDS = 0.1, 3, 2
SIZES = {"a": 8, "b": 12}
HEAD = ("head.weight", "head.bias")


@pytest.fixture
def data(tmp_path: Path) -> dict[str, tuple[Any, Any]]:
    """Rows and labels of each user, which are also in a file."""
    draws = np.random.default_rng(1)
    found = {user: (draws.normal(size=(m, 5)), np.arange(m) % CLASSES) for user, m in SIZES.items()}
    np.savez(
        tmp_path / "rows.npz",
        features=np.concatenate([rows for rows, _ in found.values()]),
        target=np.concatenate([labels for _, labels in found.values()]),
        user=np.repeat(list(SIZES), list(SIZES.values())),
    )
    return found


def content(folder: Path, **method: Any) -> dict[str, Any]:
    """An experiment of full batches, so that nothing is drawn."""
    plain: dict[str, Any] = {"batch_size": None, "participation": 1.0, "fine_tune": [], "optimizer": {"lr": LR, "momentum": 0.0}}
    return {
        "name": "by-hand",
        "data": {"source": "npz", "path": str(folder / "rows.npz"), "test_fraction": 0.0},
        "model": {"name": "mlp", "hidden": [6], "classes": CLASSES},
        "method": {**plain, **method},
        "stop": {"rounds": ROUNDS},
    }


def test_rounds_are_those_of_the_algorithm(data: dict[str, tuple[Any, Any]], tmp_path: Path) -> None:
    untrained = coterie.run(content(tmp_path, name="fedavg", epochs=0), output=tmp_path / "untrained")
    start = {name: torch.tensor(array) for name, array in coterie.load_run(tmp_path / "untrained").shared.items()}
    body = {name: array for name, array in start.items() if name not in HEAD}
    for _ in range(ROUNDS):
        returned = {user: trained(body, start, rows, labels) for user, (rows, labels) in data.items()}
        total = sum(SIZES.values())
        body = {name: sum(SIZES[user] / total * mine[name] for user, mine in returned.items()) for name in body}

    coterie.run(content(tmp_path, name="fedbabu:METHOD", epochs=2), output=tmp_path / "run")
    run = coterie.load_run(tmp_path / "run")
    assert run.shared.keys() == body.keys(), "the head does not travel"
    for name, array in body.items():
        np.testing.assert_allclose(run.shared[name], array.numpy(), rtol=1e-5, atol=1e-6)
    for network in run.networks().values():
        for name in HEAD:
            np.testing.assert_array_equal(network[name], start[name].numpy(), err_msg="the head is as it was drawn")
    assert untrained.users == ("a", "b")


def trained(body: dict[str, Any], head: dict[str, Any], rows: Any, labels: Any) -> dict[str, Any]:
    """ClientBodyUpdate: two epochs, of one batch each, of the body alone."""
    theta = {name: array.clone().requires_grad_() for name, array in body.items()}
    for _ in range(2):
        first, *_ = [theta[name] for name in theta if name.endswith("weight")]
        bias, *_ = [theta[name] for name in theta if name.endswith("bias")]
        z = torch.relu(torch.tensor(rows, dtype=torch.float32) @ first.T + bias)
        loss = cross_entropy(z @ head[HEAD[0]].T + head[HEAD[1]], torch.tensor(labels))
        gradients = torch.autograd.grad(loss, list(theta.values()))
        theta = {name: (array - LR * g).detach().requires_grad_() for (name, array), g in zip(theta.items(), gradients, strict=True)}
    return {name: array.detach() for name, array in theta.items()}


def test_the_experiment_ends_with_heads_that_help_where_they_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 5 of the paper: fine-tuning is what personalizes, and it takes a few epochs."""
    monkeypatch.chdir(Path(__file__).parent)
    experiment = coterie.load_experiment("experiment.yaml", ["stop.rounds=20"])
    assert [phase["part"] for phase in experiment.method.phases()] == ["representation"]
    figures = coterie.run(experiment).metrics["fedbabu"]
    assert figures["personal_ft_head_accuracy"] > figures["personal_accuracy"] + 0.2
