"""LEAF's JSON files: users and rows as they stand, and one sentence for what is no such file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie_client.data import list_users, load_users, summarize_users

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
X = {"f1": [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]], "f10": [[7.0, 8.0]], "f2": [[9.0, 1.5], [2.5, 3.5]]}
Y = {"f1": [0, 1, 0], "f10": [2], "f2": [1, 1]}


def leaf(names: list[str], **changes: Any) -> dict[str, Any]:
    data = {name: {"x": X[name], "y": Y[name]} for name in names}
    return {"users": names, "num_samples": [len(Y[name]) for name in names], "user_data": data, **changes}


def config(**more: Any) -> Any:
    return ADAPTER.validate_python({"source": "leaf", "path": "all.json", "test_fraction": 0, **more})


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_users_have_their_own_rows_and_labels_in_natural_order(tmp_path: Path) -> None:
    written(tmp_path, "all.json", leaf(["f10", "f2", "f1"]))
    users = load_users(config(), 0, None, tmp_path)
    assert [user.name for user in users] == ["f1", "f2", "f10"]
    for user in users:
        assert user.features.tolist() == X[user.name]
        assert user.target.tolist() == Y[user.name]
        assert user.features.dtype == np.float64
    assert [head.n_rows for head in list_users(config(), 0, tmp_path)] == [3, 2, 1]
    assert [user.labels for user in summarize_users(config(), 0, tmp_path)] == [{0: 2, 1: 1}, {1: 2}, {2: 1}]


def test_a_folder_of_files_is_one_file_and_some_users_are_read_alone(tmp_path: Path) -> None:
    written(tmp_path, "parts/a.json", leaf(["f2"]))
    written(tmp_path, "parts/b.json", leaf(["f10", "f1"]))
    written(tmp_path, "parts/notes.txt", "no JSON")
    parts = config(path="parts")
    assert [user.features.tolist() for user in load_users(parts, 0, None, tmp_path)] == [X["f1"], X["f2"], X["f10"]]
    (alone,) = load_users(parts, 0, ["f10"], tmp_path)
    assert (alone.name, alone.features.tolist()) == ("f10", X["f10"])
    with pytest.raises(ConfigError, match="user 'f3' is not in the data, want one like"):
        load_users(parts, 0, ["f3"], tmp_path)


def test_test_rows_are_those_of_the_same_users(tmp_path: Path) -> None:
    written(tmp_path, "train/a.json", leaf(["f1", "f2"]))
    test = leaf(["f1", "f2"])
    test["user_data"]["f1"] = {"x": [[6.0, 6.0]], "y": [3]}
    written(tmp_path, "test/a.json", test)
    one, two = load_users(config(path="train", test_path="test"), 0, None, tmp_path)
    assert (one.test_features.tolist(), one.test_target.tolist()) == ([[6.0, 6.0]], [3])
    assert (two.features.tolist(), two.test_features.tolist()) == (X["f2"], X["f2"])


def test_rows_can_be_images_and_can_be_dealt_by_class(tmp_path: Path) -> None:
    written(tmp_path, "all.json", leaf(["f1", "f2", "f10"]))
    images = load_users(config(shape=[1, 2, 1]), 0, None, tmp_path)
    assert images[0].features.shape == (3, 1, 2, 1)
    dealt = config(partition={"by": "dirichlet", "users": 2, "alpha": 100.0, "min_rows": 1})
    users = load_users(dealt, 0, None, tmp_path)
    assert [user.name for user in users] == ["u0", "u1"]
    rows = sorted(tuple(row) for user in users for row in user.features.tolist())
    assert rows == sorted(tuple(row) for rows in X.values() for row in rows)


def changed(user: str, **record: Any) -> dict[str, Any]:
    content = leaf(["f1", "f2"])
    content["user_data"][user] = {**content["user_data"][user], **record}
    return content


WRONG = {
    "no JSON": ("{", 'all.json cannot be read .*, want an object with "users" and "user_data" in JSON', "T1"),
    "deep": ("[" * 100_000, "all.json cannot be read", "T1"),
    "a list": ([1], "all.json is no LEAF file, want an object", "T1"),
    "a user of numbers": (leaf(["f1"], users=[3]), "all.json is no LEAF file", "T1"),
    "a user without data": (leaf(["f1"], users=["f1", "f9"]), "user 'f9' is in users and not in user_data, want it in both", "T1"),
    "a user twice": (leaf(["f1"], users=["f1", "f1"]), "user 'f1' is in another file too, or twice in one", "D1"),
    "no users": (leaf([]), "all.json has 0 rows, want at least one", "T12"),
    "text": (changed("f1", x=["to be"] * 3), "x holds other than numbers, want numbers .for text see the sources roles and tweets", "N2"),
    "labels of text": (changed("f1", y=["a", "b", "c"]), "user 'f1': y holds other than numbers", "N2"),
    "ragged": (changed("f2", x=[[1.0], [2.0, 3.0]]), "user 'f2': x has rows of different lengths, want them equal", "N2"),
    "too few labels": (changed("f2", y=[1]), r"user 'f2': x has shape \(2, 2\) and y has 1 labels", "N2"),
    "no x": (changed("f2", x=None), "user 'f2': x is missing, want a list", "N2"),
    "other widths": (changed("f2", x=[[1.0], [2.0]]), r"user 'f2' has rows of shape \[1\], want \[2\]", "N2"),
    "not finite": (changed("f2", x=[[1.0, float("nan")], [2.0, 3.0]]), "nan is not a finite number", "N3"),
    "a label that is not finite": (changed("f1", y=[0, 1, float("inf")]), "inf is not a finite number", "N3"),
}


@pytest.mark.parametrize(("content", "sentence", "rule"), WRONG.values(), ids=WRONG)
def test_what_is_no_leaf_file_is_one_sentence_and_a_finding(tmp_path: Path, content: Any, sentence: str, rule: str) -> None:
    written(tmp_path, "all.json", content)
    with pytest.raises(ConfigError, match=sentence) as error:
        load_users(config(), 0, None, tmp_path)
    assert error.value.finding.rule == rule


def test_a_wrong_row_of_another_hosts_user_stops_nobody_else(tmp_path: Path) -> None:
    written(tmp_path, "all.json", changed("f2", x=[[1.0], [2.0, 3.0]]))
    (one,) = load_users(config(), 0, ["f1"], tmp_path)
    assert one.features.tolist() == X["f1"]


def test_a_path_does_not_leave_the_data_folder(tmp_path: Path) -> None:
    written(tmp_path, "all.json", leaf(["f1"]))
    (tmp_path / "in").mkdir()
    for path in ("../all.json", ".."):
        with pytest.raises(ConfigError, match="leaves the data folder"):
            load_users(config(path=path), 0, None, tmp_path / "in")
    (tmp_path / "in" / "link.json").symlink_to(tmp_path / "all.json")
    with pytest.raises(ConfigError, match="leaves the data folder"):
        load_users(config(path="."), 0, None, tmp_path / "in")
