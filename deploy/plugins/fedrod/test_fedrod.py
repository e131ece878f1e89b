"""Against Algorithm 1 of Chen and Chao (2022), by hand: the balanced risk moves what is shared, the empirical risk the personal head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import coterie
from coterie import ConfigError

LR, DECAY, CLASSES = 0.1, 0.01, 4
LABELS = np.array([0] * 7 + [1] * 3 + [2] * 2)  # of unequal counts, and no 3
HEAD = ("head.weight", "head.bias")


def content(folder: Path, **method: Any) -> dict[str, Any]:
    """One user with full batches, so that nothing is drawn and the server's mean is what the user returns."""
    plain: dict[str, Any] = {
        "batch_size": None,
        "participation": 1.0,
        "fine_tune": [],
        "optimizer": {"lr": LR, "momentum": 0.0, "weight_decay": DECAY},
    }
    return {
        "name": "by-hand",
        "data": {"source": "npz", "path": str(folder / "rows.npz"), "test_fraction": 0.0},
        "model": {"name": "mlp", "hidden": [6], "classes": CLASSES},
        "method": {**plain, **method},
        "stop": {"rounds": 2},
    }


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    found = np.random.default_rng(1).normal(size=(len(LABELS), 5))
    np.savez(tmp_path / "rows.npz", features=found, target=LABELS, user=np.array(["a"] * len(LABELS)))
    return found


def finished(folder: Path, place: str, **method: Any) -> tuple[Any, Any]:
    """What is shared after a run, and the model of the user."""
    coterie.run(content(folder, **method), output=folder / place)
    run = coterie.load_run(folder / place)
    return run.shared, run.networks()["a"]


def test_steps_are_those_of_the_algorithm(rows: Any, tmp_path: Path) -> None:
    untrained, _ = finished(tmp_path, "untrained", name="fedavg", epochs=0)
    shared = {name: torch.tensor(array).requires_grad_() for name, array in untrained.items()}  # theta and psi
    own = {name: torch.zeros_like(shared[name]).requires_grad_() for name in HEAD}  # phi
    x, y = torch.tensor(rows, dtype=torch.float32), torch.tensor(LABELS)
    counts = torch.bincount(y, minlength=CLASSES).float()
    for _ in range(2 * 3):  # rounds of three epochs, of one batch each
        first, bias = (shared[name] for name in shared if name not in HEAD)
        z = torch.relu(x @ first.T + bias)
        generic = z @ shared[HEAD[0]].T + shared[HEAD[1]]
        powers = counts * generic.exp()
        balanced = -(powers[torch.arange(len(y)), y] / powers.sum(dim=1)).log().mean()
        empirical = cross_entropy(generic.detach() + z.detach() @ own[HEAD[0]].T + own[HEAD[1]], y)
        g, h = torch.autograd.grad(balanced, list(shared.values())), torch.autograd.grad(empirical, list(own.values()))
        shared, own = stepped(shared, g), stepped(own, h)

    found, personal = finished(tmp_path, "run", name="fedrod:METHOD", epochs=3)
    for name, array in shared.items():
        np.testing.assert_allclose(found[name], array.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name in HEAD:
        np.testing.assert_allclose(personal[name], (shared[name] + own[name]).detach().numpy(), rtol=1e-5, atol=1e-6)


def stepped(tensors: dict[str, Any], gradients: Any) -> dict[str, Any]:
    """A step of gradient descent with weight decay."""
    pairs = zip(tensors.items(), gradients, strict=True)
    return {name: (array - LR * (g + DECAY * array)).detach().requires_grad_() for (name, array), g in pairs}


@pytest.mark.usefixtures("rows")
def test_without_gamma_what_is_shared_is_that_of_fedavg(tmp_path: Path) -> None:
    found, personal = finished(tmp_path, "plain", name="fedrod:METHOD", gamma=0.0)
    wanted, _ = finished(tmp_path, "fedavg", name="fedavg")
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
    assert any((personal[name] != wanted[name]).any() for name in HEAD)


@pytest.mark.usefixtures("rows")
def test_users_who_judge_by_the_generic_head_have_the_model_of_all(tmp_path: Path) -> None:
    found, judged = finished(tmp_path, "generic", name="fedrod:METHOD", judge="generic")
    for name, array in found.items():
        np.testing.assert_array_equal(judged[name], array)


@pytest.mark.usefixtures("rows")
def test_a_head_that_is_not_linear_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one linear layer with a bias, but this one has 0"):
        coterie.run({**content(tmp_path, name="fedrod:METHOD"), "model": {"build": "test_fedrod_nets:flat", "head": ["0"]}})


def test_the_experiment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's claim: one method, two good models. Here the personal one must beat the generic one on the users' own rows."""
    monkeypatch.chdir(Path(__file__).parent)
    accuracy = {
        judge: coterie.run("experiment.yaml", overrides=["stop.rounds=20", f"method.judge={judge}"]).metrics["fedrod"]["personal_accuracy"]
        for judge in ("personal", "generic")
    }
    assert accuracy["personal"] > accuracy["generic"] + 0.3
