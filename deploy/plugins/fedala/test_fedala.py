"""Against Algorithm 1 of Zhang et al. (2023), by hand: weights are learnt between what came and what the user had, and then it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import coterie

LR, RATE, CLASSES, ROUNDS, PASSES = 0.2, 2.0, 3, 4, 3
SIZES = {"a": 9, "b": 15}
UPPER = ("head.weight", "head.bias")  # p = 1


@pytest.fixture
def data(tmp_path: Path) -> dict[str, tuple[Any, Any]]:
    """Rows and labels of each user, of classes in unequal proportions, which are also in a file."""
    draws = np.random.default_rng(1)
    shares = {"a": [0.7, 0.2, 0.1], "b": [0.1, 0.3, 0.6]}
    found = {user: (draws.normal(size=(m, 5)), draws.choice(CLASSES, m, p=shares[user])) for user, m in SIZES.items()}
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


def gradients(tensors: dict[str, Any], rows: Any, labels: Any) -> dict[str, Any]:
    """Of the mean cross entropy of a network with one hidden layer."""
    moved = {name: array.clone().requires_grad_() for name, array in tensors.items()}
    first, bias = (moved[name] for name in moved if name not in UPPER)
    z = torch.relu(torch.tensor(rows, dtype=torch.float32) @ first.T + bias)
    loss = cross_entropy(z @ moved[UPPER[0]].T + moved[UPPER[1]], torch.tensor(labels))
    return dict(zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True))


def mixed(sent: dict[str, Any], own: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """(5)."""
    return {**sent, **{name: own[name] + (sent[name] - own[name]) * weights[name] for name in UPPER}}


def test_rounds_are_those_of_the_algorithm(data: dict[str, tuple[Any, Any]], tmp_path: Path) -> None:
    coterie.run(content(tmp_path, name="fedavg", epochs=0), output=tmp_path / "untrained")
    sent = {name: torch.tensor(array) for name, array in coterie.load_run(tmp_path / "untrained").shared.items()}
    own = dict.fromkeys(data, sent)
    weights = {user: {name: torch.ones_like(sent[name]) for name in UPPER} for user in data}
    for number in range(1, ROUNDS + 1):
        for user, (rows, labels) in data.items():
            for _ in range({1: 0, 2: PASSES}.get(number, 1)):  # lines 8 to 15: none without a model of one's own, then many, then one
                g = gradients(mixed(sent, own[user], weights[user]), rows, labels)
                moves = {name: weights[user][name] - RATE * g[name] * (sent[name] - own[user][name]) for name in UPPER}
                weights[user] = {name: array.clip(0, 1) for name, array in moves.items()}
            model = mixed(sent, own[user], weights[user])
            g = gradients(model, rows, labels)
            own[user] = {name: array - LR * g[name] for name, array in model.items()}  # line 17
        total = sum(SIZES.values())
        sent = {name: torch.stack([SIZES[user] / total * own[user][name] for user in data]).sum(dim=0) for name in sent}  # line 20
    assert min(float(array.min()) for mine in weights.values() for array in mine.values()) < 0.9, "they have been learnt"

    learning = {"rows": 100, "rate": RATE, "passes": PASSES, "tolerance": 1e-12}
    coterie.run(content(tmp_path, name="fedala:METHOD", **learning), output=tmp_path / "run")
    run = coterie.load_run(tmp_path / "run")
    for name, array in sent.items():
        np.testing.assert_allclose(run.shared[name], array.numpy(), rtol=1e-4, atol=1e-6)
    for user, network in run.networks().items():
        for name, array in mixed(sent, own[user], weights[user]).items():
            np.testing.assert_allclose(network[name], array.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("data")
def test_it_moves_the_bytes_of_fedavg(tmp_path: Path) -> None:
    books = [coterie.run(content(tmp_path, name=name)).ledger() for name in ("fedala:METHOD", "fedavg")]
    moved = [sum(row["payload_bytes"] for row in book) for book in books]
    assert moved[0] == moved[1] > 0


@pytest.mark.usefixtures("data")
def test_more_layers_are_weighed_where_p_says_so(tmp_path: Path) -> None:
    found = {}
    for layers in (1, 2):
        coterie.run(content(tmp_path, name="fedala:METHOD", layers=layers, rate=RATE), output=tmp_path / str(layers))
        run = coterie.load_run(tmp_path / str(layers))
        found[layers] = {name for name, array in run.shared.items() if (run.networks()["a"][name] != array).any()}
    assert found[1] == set(UPPER)
    assert found[2] > found[1]


def test_the_experiment_beats_the_model_that_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's claim, in small: users judge what they make of the model better than the model, which took the same bytes."""
    monkeypatch.chdir(Path(__file__).parent)
    found = coterie.run("experiment.yaml", overrides=["stop.rounds=20"]).metrics["fedala"]
    plain = coterie.run("experiment.yaml", overrides=["stop.rounds=20", "method.name=fedavg"]).metrics["fedavg"]
    assert found["personal_accuracy"] > plain["global_accuracy"] + 0.1
