"""What becomes of a finished run of users with networks: new users adapt to it, models are exported, and they predict."""

from __future__ import annotations

import asyncio
import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

import coterie
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import experiment_to_json, load_experiment
from coterie.methods import fedavg
from coterie.record.snapshot import SnapshotFile
from coterie_client.data import load_users
from coterie_deploy.cli.app import main
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.models import finished_run, models_of
from coterie_server.interface.half import Outcome
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


def arrays_in(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an archive, which is closed again."""
    with np.load(path) as arrays:
        return dict(arrays)


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
    shared = arrays_in(run / "run" / "models" / "fedrep.npz")
    kept = arrays_in(out / "models" / "adapt.npz")
    names = [name for name in shared if name.startswith("shared/")]
    assert names == [name for name in kept if name.startswith("shared/")]
    for name in names:
        assert shared[name].tobytes() == kept[name].tobytes()
    n_shared = sum(shared[name].size for name in names)
    booked = dict(query(out, "SELECT step || ' ' || direction, SUM(scalars) FROM ledger GROUP BY step, direction"))
    assert booked["delivery down"] == 2 * n_shared
    assert "shared up" not in booked
    losses = [value for (value,) in query(out, "SELECT value FROM figures WHERE name = 'loss' ORDER BY round")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]


def write_table(path: Path) -> Path:
    """The rows of a user without a column that names it."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{i}" for i in range(WIDTH)), "y"])
        writer.writerows([*rng.standard_normal(WIDTH).tolist(), int(rng.integers(CLASSES))] for _ in range(12))
    return path


def test_new_users_gather_the_statistics_that_stayed_with_the_users_of_the_run(tmp_path: Path) -> None:
    """With `batch_norm: private`. The rows are far from where a new network's statistics begin, at mean 0 and variance 1."""
    for name, n_users in (("users", N_USERS), ("new", 3)):
        rows = arrays_in(write_users(tmp_path / f"{name}.npz", n_users=n_users, rows=40))
        np.savez(tmp_path / f"{name}.npz", **{**rows, "features": rows["features"][:, :4] * 20 + 50})  # type: ignore[arg-type]
    method = {"name": "fedrep", "head_epochs": 1, "participation": 1.0, "batch_norm": "private"}
    model = {"build": "tests.fixture_nets:normed"}
    experiment = network_experiment(tmp_path / "users.npz", method, model=model, stop={"rounds": 1})
    (tmp_path / "nets.yaml").write_text(yaml.safe_dump(json.loads(experiment_to_json(experiment))))
    assert said(["run", str(tmp_path / "nets.yaml"), "--transport", "loopback", "--output", str(tmp_path / "run"), "--quiet"]) == 0
    new, out = str(tmp_path / "new.npz"), tmp_path / "adapted"
    assert said(["adapt", str(tmp_path / "run"), "--data", new, "--epochs", "10", "--output", str(out), "--quiet"]) == 0
    adapted, shared = models_of(finished_run(out), None), finished_run(tmp_path / "run").shared
    users = load_users(load_experiment(out / "experiment.json").data, 5, None)
    for user in users:
        tensors = adapted[user.name]
        sums = user.features.astype(np.float32) @ tensors["representation.0.weight"].T
        assert np.allclose(tensors["representation.1.running_mean"], sums.mean(axis=0), atol=sums.std(axis=0).max())
        for name, array in shared.items():  # nothing else has moved
            assert tensors[name].tobytes() == array.tobytes()


def test_new_users_whose_run_was_stopped_go_on_from_there(run: Path, tmp_path: Path) -> None:
    path, whole, stopped = write_table(tmp_path / "newbie.csv"), tmp_path / "whole", tmp_path / "stopped"
    assert said(["adapt", str(run / "run"), "--data", str(path), "--set", "data.target_column=y", "--output", str(whole), "--quiet"]) == 0

    stop = asyncio.Event()
    how = Launch(
        transport="loopback",
        folder=stopped,
        start=Outcome(None, shared=finished_run(run / "run").shared),
        observer=lambda progress: stop.set() if progress.round == 4 else None,
        stop=stop,
    )
    with pytest.raises(RunError, match="stopped by a signal"):
        asyncio.run(launch(load_experiment(whole / "experiment.json"), how))
    assert said(["run", str(stopped), "--resume", "--quiet"]) == 0
    one, other = (models_of(finished_run(folder), None)["newbie"] for folder in (whole, stopped))
    assert {name: array.tobytes() for name, array in one.items()} == {name: array.tobytes() for name, array in other.items()}
    figures = "SELECT round, name, value FROM figures ORDER BY round, name"
    assert query(stopped, figures) == query(whole, figures)


def test_a_new_user_with_a_table_of_its_own_is_named_after_the_file(run: Path, tmp_path: Path) -> None:
    path, out = write_table(tmp_path / "newbie.csv"), tmp_path / "adapted"
    assert said(["adapt", str(run / "run"), "--data", str(path), "--set", "data.target_column=y", "--output", str(out), "--quiet"]) == 0
    assert query(out, "SELECT name FROM members") == [("newbie",)]


@pytest.mark.parametrize("suffix", ["parquet", "dta"])
def test_a_table_of_another_format_adapts_as_its_text_does(run: Path, tmp_path: Path, suffix: str) -> None:
    found = []
    frame = pd.read_csv(write_table(tmp_path / "newbie.csv"))
    if suffix == "parquet":
        frame.to_parquet(tmp_path / "newbie.parquet")
    else:
        frame.to_stata(tmp_path / "newbie.dta", write_index=False)
    for name in ("csv", suffix):
        out = tmp_path / f"from-{name}"
        arguments = ["--data", str(tmp_path / f"newbie.{name}"), "--set", "data.target_column=y", "--output", str(out), "--quiet"]
        assert said(["adapt", str(run / "run"), *arguments]) == 0
        assert query(out, "SELECT name FROM members") == [("newbie",)]
        found.append(query(out, "SELECT round, name, value FROM figures ORDER BY round, name"))
    assert found[0] == found[1]


def test_the_targets_of_a_table_are_called_as_in_the_run_or_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).standard_normal((12, WIDTH)).tolist()
    for name, column in (("named", "target"), ("unnamed", "label")):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([[*(f"x{i}" for i in range(WIDTH)), column], *([*row, i % CLASSES] for i, row in enumerate(rows))])
    arguments = ["adapt", str(run / "run"), "--quiet", "--data"]
    assert said([*arguments, str(tmp_path / "named.csv"), "--output", str(tmp_path / "a")]) == 0
    assert said([*arguments, str(tmp_path / "unnamed.csv"), "--output", str(tmp_path / "b")]) == 2
    assert "column 'target' is missing" in capsys.readouterr().err
    assert said(["predict", str(run / "run"), "--user", "u1", str(tmp_path / "named.csv")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 13


def test_a_new_user_with_an_archive_of_its_own_is_named_after_the_file(run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((12, WIDTH)), rng.integers(CLASSES, size=12)
    np.savez(tmp_path / "solo.npz", features=rows, target=labels)
    np.savez(tmp_path / "two.npz", features=rows, target=labels, who=np.repeat(["one", "two"], 6))
    for name, more, users in (("solo", [], [("solo",)]), ("two", ["--set", "data.user=who"], [("one",), ("two",)])):
        out = tmp_path / f"{name}-adapted"
        assert said(["adapt", str(run / "run"), "--data", str(tmp_path / f"{name}.npz"), *more, "--output", str(out), "--quiet"]) == 0
        assert query(out, "SELECT name FROM members ORDER BY position") == users


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
    wide = write_table(tmp_path / "wide.csv")  # its labels are called otherwise than the run's
    assert said(["adapt", str(run / "run"), "--data", str(wide), "--output", str(tmp_path / "out"), "--quiet"]) == 2
    assert "column 'target' is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert said(["adapt", str(run / "run"), "--data", str(wide), "--output", str(run / "run"), "--quiet"]) == 2
    assert "is already used" in capsys.readouterr().err
    assert not (run / "run" / "new-users").exists()
    assert said(["adapt", str(tmp_path), "--data", str(run / "users.npz")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_models_are_exported_whole_and_predict_the_same(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["models", str(run / "run"), "--output", str(tmp_path / "models")]) == 0
    assert f"{N_USERS} models" in capsys.readouterr().out
    shared = arrays_in(run / "run" / "models" / "fedrep.npz")
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
    assert listed[0] == ["row", "model", "prediction"]
    assert {cells[1] for cells in listed[1:]} == {"user u1"}
    assert [int(cells[2]) for cells in listed[1:]] == scores.argmax(axis=1).tolist()
    loaded = coterie.load_run(run / "run")
    assert loaded.predict("u1", rows).tolist() == scores.argmax(axis=1).tolist()
    assert loaded.networks(["u1"])["u1"]["head.weight"].tobytes() == other["head.weight"].tobytes()
    assert loaded.shared["representation.1.bias"].tobytes() == other["representation.1.bias"].tobytes()
    with pytest.raises(ConfigError, match=r"the rows have shape \[2\], for which the model is another than the run's"):
        loaded.predict("u1", rows[:, :2])


def test_a_run_folder_is_a_folder_with_states(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["models", str(run / "run"), "--state", str(run / "run"), "--output", str(tmp_path)]) == 0
    assert f"{N_USERS} models" in capsys.readouterr().out


def test_users_who_share_nothing_have_models_but_nothing_for_new_users(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ["--set", "method={name: local_network}", "--set", "stop.rounds=1", "--transport", "loopback", "--quiet"]
    assert said(["run", str(run / "nets.yaml"), *alone, "--output", str(tmp_path / "alone")]) == 0
    assert said(["models", str(tmp_path / "alone"), "--output", str(tmp_path / "models")]) == 0
    one, other = (load_file(tmp_path / "models" / f"u{i}.safetensors") for i in (0, 1))
    for name, tensor in one.items():
        assert tensor.tobytes() != other[name].tobytes()
    capsys.readouterr()
    assert said(["adapt", str(tmp_path / "alone"), "--data", str(run / "users.npz")]) == 2
    assert "has shared nothing that new users could start from" in capsys.readouterr().err


def test_kinds_of_layers_stay_with_their_users_where_a_method_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such layers are in the users' models alone, on both sides of the head; new users are told that they could not train them apart."""
    monkeypatch.setattr(fedavg, "METHOD", replace(fedavg.METHOD, private_layers=("BatchNorm1d",)))
    rows = arrays_in(write_users(tmp_path / "users.npz"))
    np.savez(tmp_path / "users.npz", **{**rows, "features": rows["features"][:, :4]})  # type: ignore[arg-type]
    model = {"build": "tests.fixture_nets:normed"}
    experiment = network_experiment(tmp_path / "users.npz", {"name": "fedavg", "participation": 1.0}, model=model, stop={"rounds": 2})
    (tmp_path / "nets.yaml").write_text(yaml.safe_dump(json.loads(experiment_to_json(experiment))))
    assert said(["run", str(tmp_path / "nets.yaml"), "--transport", "loopback", "--output", str(tmp_path / "run"), "--quiet"]) == 0
    shared = finished_run(tmp_path / "run").shared
    assert set(shared) == {"representation.0.weight", "head.1.weight", "head.1.bias"}
    one, other = (models_of(finished_run(tmp_path / "run"), None)[user] for user in ("u0", "u1"))
    assert {name for name in one if np.array_equal(one[name], other[name])} == {*shared, *(n for n in one if n.endswith("_tracked"))}
    capsys.readouterr()
    assert said(["adapt", str(tmp_path / "run"), "--data", str(tmp_path / "users.npz")]) == 2
    assert "has kept layers of its users (BatchNorm1d)" in capsys.readouterr().err


def test_every_user_has_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "users.npz"
    rows = np.random.default_rng(0).standard_normal((24, WIDTH))
    names = ["a/b", "user-1", "../x", "x" * 240]
    np.savez(path, features=rows, target=np.arange(24) % CLASSES, user=np.repeat(names, 6))
    experiment = network_experiment(path, {"name": "fedrep", "head_epochs": 1}, stop={"rounds": 1})
    (tmp_path / "nets.yaml").write_text(yaml.safe_dump(json.loads(experiment_to_json(experiment))))
    said(["run", str(tmp_path / "nets.yaml"), "--transport", "loopback", "--output", str(tmp_path / "run"), "--quiet"])
    assert said(["models", str(tmp_path / "run"), "--output", str(tmp_path / "models")]) == 0
    files = sorted(file.name for file in (tmp_path / "models").glob("*.safetensors"))
    assert files == [f"user-{number}.safetensors" for number in (1, 2, 3, 4)]
    found = []
    for file in files:
        with safe_open(tmp_path / "models" / file, "np") as opened:
            found.append(opened.metadata()["user"])
    assert sorted(found) == sorted(names)
    assert found[0] == "user-1"


def test_states_from_before_the_end_are_not_taken_for_models(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host that was killed after its last answer has left what it knew some rounds before."""
    shutil.copytree(run / "run" / "hosts", tmp_path / "hosts")
    (newest,) = (tmp_path / "hosts" / "host-1").glob("*.snapshot")
    store = SnapshotFile(newest.parent, newest.name.removesuffix(".snapshot"))
    tree = store.load()
    assert tree is not None
    store.save({**tree, "last_seq": tree["last_seq"] - 1})
    assert said(["models", str(run / "run"), "--state", str(tmp_path / "hosts"), "--output", str(tmp_path / "models")]) == 2
    assert "the state of user 'u0' is from before the end of the run" in capsys.readouterr().err


def test_a_snapshot_that_cannot_be_read_matters_only_to_users_who_are_not_found(run: Path, tmp_path: Path) -> None:
    """A state folder may be that of many runs, also of other versions."""
    states = shutil.copytree(run / "run" / "hosts", tmp_path / "hosts")
    (states / "other.snapshot").write_bytes(b"of another version")
    finished = finished_run(run / "run")
    assert models_of(finished, states).keys() == models_of(finished, None).keys()
    with pytest.raises(RunError, match=r"no snapshot can be read: .*other\.snapshot"):
        models_of(finished, states, ["nobody"])


def test_models_without_the_extra_name_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert said(["models", str(run / "run"), "--output", str(tmp_path)]) == 2
    assert "need safetensors, which is not installed: pip install 'coterie[torch]'" in capsys.readouterr().err


def test_models_of_unknown_users_and_states_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["models", str(run / "run"), "--user", "nobody", "--output", str(tmp_path)]) == 2
    assert "nobody" in capsys.readouterr().err
    assert said(["models", str(run / "run"), "--state", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "no host of the run has left its state" in capsys.readouterr().err
    np.savez(tmp_path / "rows.npz", features=np.zeros((2, WIDTH + 1)))
    assert said(["predict", str(run / "run"), "--user", "u1", str(tmp_path / "rows.npz")]) == 2
    assert "have shape" in capsys.readouterr().err
