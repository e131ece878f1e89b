"""What becomes of a finished run of users with networks: new users adapt to it, models are exported, and they predict."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from coterie.config import experiment_to_json
from coterie_deploy.cli import main
from tests.networks import CLASSES, N_USERS, WIDTH, network_experiment, write_users
from tests.simulation import query


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two hosts."""
    folder = tmp_path_factory.mktemp("adapt")
    archive = write_users(folder / "users.npz")
    experiment = network_experiment(archive, {"name": "fedrep", "head_epochs": 3, "participation": 1.0}, stop={"rounds": 10})
    content = json.loads(experiment_to_json(experiment))
    (folder / "nets.yaml").write_text(yaml.safe_dump(content))
    said(["run", str(folder / "nets.yaml"), "--transport", "loopback", "--hosts", "2", "--output", str(folder / "run"), "--quiet"])
    return folder


def said(arguments: list[str]) -> int:
    """The exit code of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    assert isinstance(code, int | None)
    return code or 0


def test_a_new_user_gets_the_representation_and_trains_a_head(run: Path, tmp_path: Path) -> None:
    new = write_users(tmp_path / "new.npz", n_users=2, rows=20)
    out = tmp_path / "adapted"
    faster = ["--epochs", "12", "--set", "method.optimizer.lr=0.5"]
    assert said(["adapt", str(run / "run"), "--data", str(new), *faster, "--output", str(out), "--quiet"]) == 0
    shared = np.load(run / "run" / "models" / "fedrep.npz")
    kept = np.load(out / "models" / "adapt.npz")
    names = [name for name in shared.files if name.startswith("shared/")]
    assert names == [name for name in kept.files if name.startswith("shared/")]
    for name in names:
        assert shared[name].tobytes() == kept[name].tobytes()
    n_shared = sum(shared[name].size for name in names)
    booked = dict(query(out, "SELECT step || ' ' || direction, SUM(scalars) FROM ledger GROUP BY step, direction"))
    assert booked["delivery down"] == 2 * n_shared
    assert "shared up" not in booked
    losses = [value for (value,) in query(out, "SELECT value FROM figures WHERE name = 'loss' ORDER BY round")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]


def test_a_new_user_with_a_table_of_its_own_is_named_after_the_file(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "newbie.csv"
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{i}" for i in range(WIDTH)), "y"])
        writer.writerows([*rng.standard_normal(WIDTH).tolist(), int(rng.integers(CLASSES))] for _ in range(12))
    out = tmp_path / "adapted"
    assert said(["adapt", str(run / "run"), "--data", str(path), "--set", "data.target_column=y", "--output", str(out), "--quiet"]) == 0
    assert query(out, "SELECT name FROM members") == [("newbie",)]


def test_what_cannot_be_adapted_is_said_in_one_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = tmp_path / "narrow.npz"
    np.savez(narrow, features=np.zeros((6, 3)), target=np.zeros(6, int), user=np.zeros(6, int))
    for data, sentence in (
        (tmp_path / "none.npz", "is no file"),
        (run / "nets.yaml", "want a file that ends in"),
        (narrow, "has shape"),
    ):
        assert said(["adapt", str(run / "run"), "--data", str(data), "--output", str(tmp_path / "out"), "--quiet"]) == 2
        assert sentence in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert said(["adapt", str(tmp_path), "--data", str(run / "users.npz")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_models_are_exported_whole_and_predict_the_same(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["models", str(run / "run"), "--output", str(tmp_path / "models")]) == 0
    assert f"{N_USERS} models" in capsys.readouterr().out
    shared = np.load(run / "run" / "models" / "fedrep.npz")
    one, other = (load_file(tmp_path / "models" / f"u{i}.safetensors") for i in (0, 1))
    assert set(one) == {"representation.1.weight", "representation.1.bias", "representation.3.weight", "representation.3.bias"} | {
        "head.weight",
        "head.bias",
    }
    for name, tensor in one.items():
        if name.startswith("representation"):
            assert tensor.tobytes() == shared[f"shared/{name}"].tobytes() == other[name].tobytes()
    assert one["head.weight"].tobytes() != other["head.weight"].tobytes()
    assert json.loads((tmp_path / "models" / "model.json").read_text())["model"]["name"] == "mlp"

    rows = np.random.default_rng(1).standard_normal((9, WIDTH))
    np.savez(tmp_path / "rows.npz", features=rows)
    assert said(["predict", str(run / "run"), "--user", "u1", str(tmp_path / "rows.npz")]) == 0
    listed = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    hidden = np.maximum(rows @ other["representation.1.weight"].T + other["representation.1.bias"], 0)
    hidden = np.maximum(hidden @ other["representation.3.weight"].T + other["representation.3.bias"], 0)
    scores = hidden @ other["head.weight"].T + other["head.bias"]
    assert listed[0] == ["row", "prediction"]
    assert [int(cells[1]) for cells in listed[1:]] == scores.argmax(axis=1).tolist()


def test_models_of_unknown_users_and_states_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["models", str(run / "run"), "--user", "nobody", "--output", str(tmp_path)]) == 2
    assert "nobody" in capsys.readouterr().err
    assert said(["models", str(run / "run"), "--state", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "no host of the run has left its state" in capsys.readouterr().err
    np.savez(tmp_path / "rows.npz", features=np.zeros((2, WIDTH + 1)))
    assert said(["predict", str(run / "run"), "--user", "u1", str(tmp_path / "rows.npz")]) == 2
    assert "have shape" in capsys.readouterr().err
