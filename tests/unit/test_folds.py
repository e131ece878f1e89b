"""`data.fold`: a fold of a cross-validation on the users, instead of the held-out split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.experiment.data import DataConfig
from coterie.experiment.settings import Fold
from coterie_client.data import list_users, load_users
from coterie_client.data.split import fold_rows
from coterie_client.data.users import UserData

SEED = 3
FOLDS = 5
# Users by number of rows, some with more rows than folds and some with fewer.
SIZES = {"a": 40, "b": 23, "c": 7, "d": 3, "e": 2, "f": 1}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table whose feature is the number of the row; labels -1 for about a third of them."""
    numbers = iter(range(1000))
    rows = [f"{user},{(number := next(numbers))},{-1 if number % 3 == 0 else 1}" for user, size in SIZES.items() for _ in range(size)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,number,y", *rows]) + "\n")
    return tmp_path


def config(fold: int | None = None, of: int = FOLDS, **more: Any) -> DataConfig:
    content = {"source": "csv", "path": "rows.csv", "user_column": "user", "target_column": "y", **more}
    if fold is not None:
        content["fold"] = {"number": fold, "of": of}
    adapter: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
    return adapter.validate_python(content)


def numbers(features: Any) -> set[int]:
    return {int(number) for number in features[:, 0]}


def loaded(here: Path, fold: int | None = None, names: list[str] | None = None, seed: int = SEED) -> Mapping[str, UserData]:
    return {user.name: user for user in load_users(config(fold), seed, names, here)}


def test_the_folds_of_a_user_partition_its_training_rows(table: Path) -> None:
    whole, folds = loaded(table), [loaded(table, fold) for fold in range(1, FOLDS + 1)]
    for name in set(SIZES) - {"f"}:
        training = numbers(whole[name].features)
        held_out = [numbers(fold[name].test_features) for fold in folds]
        assert set.union(*held_out) == training
        assert sum(map(len, held_out)) == len(training)
        assert max(map(len, held_out)) - min(map(len, held_out)) <= 1
        for fold, out in zip(folds, held_out, strict=True):
            assert numbers(fold[name].features) == training - out


def test_a_fold_never_has_a_row_that_the_experiment_holds_out(table: Path) -> None:
    whole = loaded(table)
    assert any(len(user.test_features) for user in whole.values())
    for fold in range(1, FOLDS + 1):
        for name, user in loaded(table, fold).items():
            assert not numbers(whole[name].test_features) & (numbers(user.features) | numbers(user.test_features))


def test_targets_go_with_their_rows_and_rows_stay_in_order(table: Path) -> None:
    for user in loaded(table, 2).values():
        for features, target in ((user.features, user.target), (user.test_features, user.test_target)):
            np.testing.assert_array_equal(target, np.where(features[:, 0] % 3 == 0, -1.0, 1.0))
            assert list(features[:, 0]) == sorted(features[:, 0])
            assert not features.flags.writeable


@pytest.mark.parametrize("names", [["c"], ["e", "a"], ["f", "d", "b"]])
def test_a_fold_is_the_same_whoever_is_loaded(table: Path, names: list[str]) -> None:
    everybody = loaded(table, 4)
    for name, user in loaded(table, 4, names).items():
        np.testing.assert_array_equal(user.features, everybody[name].features)
        np.testing.assert_array_equal(user.test_features, everybody[name].test_features)


def test_both_labels_are_dealt_evenly() -> None:
    target = np.where(np.arange(37) % 4 == 0, -1.0, 1.0)  # 10 and 27
    for name in ("u0", "u1", "u2"):
        counts = []
        for number in range(1, FOLDS + 1):
            out = target[fold_rows(name, target, Fold(number=number, of=FOLDS), SEED)]
            counts.append([int((out == label).sum()) for label in (-1.0, 1.0)])
        assert all(column.max() - column.min() <= 1 for column in np.array(counts).T)


def test_a_user_with_one_row_always_trains_on_it_and_one_with_two_never_loses_both(table: Path) -> None:
    folds = [loaded(table, fold) for fold in range(1, FOLDS + 1)]
    assert [(len(fold["f"].features), len(fold["f"].test_features)) for fold in folds] == [(1, 0)] * FOLDS
    assert sorted(len(fold["e"].features) for fold in folds) == [1, 1, 2, 2, 2]
    assert all(len(user.features) for fold in folds for user in fold.values())


def test_the_rows_of_small_users_are_spread_over_all_folds() -> None:
    target = np.zeros(2)
    fold_of = [
        [number for number in range(1, 6) if fold_rows(f"u{user}", target, Fold(number=number, of=5), SEED).any()] for user in range(300)
    ]
    assert {len(folds) for folds in fold_of} == {2}
    counts = np.bincount(np.ravel(fold_of), minlength=6)[1:]
    assert counts.min() > 80  # 120 in the mean, and a standard deviation of 8.5
    assert counts.max() < 160


def test_the_folds_depend_on_seed_and_name() -> None:
    target = np.zeros(30)

    def first(name: str, seed: int) -> bytes:
        return fold_rows(name, target, Fold(number=1, of=5), seed).tobytes()

    assert len({first("u0", 3), first("u1", 3), first("u0", 4)}) == 3


def test_the_folds_are_the_same_on_every_machine() -> None:
    """NumPy guarantees the words of Philox; a tune that is resumed elsewhere goes on with the same folds."""
    held_out = [np.flatnonzero(fold_rows("u0", np.zeros(7), Fold(number=number, of=3), SEED)).tolist() for number in (1, 2, 3)]
    assert held_out == [[0, 2], [1, 5, 6], [3, 4]]


SOURCES: list[dict[str, Any]] = [
    {"source": "ellipses", "users_per_cluster": 3, "rows_per_user": 9, "test_per_class": 20},
    {"source": "hlm", "clusters": 2, "users_per_cluster": 3, "d": 2, "rows_per_user": 8, "test_per_user": 4},
    {"source": "hsb"},
]


@pytest.mark.parametrize("content", SOURCES, ids=lambda content: str(content["source"]))
def test_every_source_has_folds_and_its_heads_know_how_many_rows_are_left(content: dict[str, Any]) -> None:
    adapter: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
    whole = load_users(adapter.validate_python(content), SEED, None)
    n_held_out = np.zeros(len(whole), dtype=int)
    for number in (1, 2, 3):
        folded = adapter.validate_python({**content, "fold": {"number": number, "of": 3}})
        users = load_users(folded, SEED, None)
        assert [(head.name, head.n_rows) for head in list_users(folded, SEED)] == [(user.name, len(user.features)) for user in users]
        for place, (user, before) in enumerate(zip(users, whole, strict=True)):
            n_held_out[place] += len(user.test_features)
            assert len(user.features) + len(user.test_features) == len(before.features)
            assert user.cluster == before.cluster
    assert list(n_held_out) == [len(user.features) for user in whole]


def test_heads_of_a_table_know_how_many_rows_are_left(table: Path) -> None:
    for number in range(1, FOLDS + 1):
        users = loaded(table, number)
        assert {head.name: head.n_rows for head in list_users(config(number), SEED, table)} == {
            n: len(u.features) for n, u in users.items()
        }


@pytest.mark.parametrize(
    ("fold", "sentence"),
    [
        ({"number": 4, "of": 3}, r"data\.fold: number is 4, want 1 to the 3 folds there are"),
        ({"number": 0, "of": 3}, r"data\.fold\.number: is 0, want at least 1"),
        ({"number": 1, "of": 1}, r"data\.fold\.of: is 1, want at least 2"),
        ({"number": 1}, r"data\.fold\.of: is missing"),
        ({"number": 1, "of": 2, "seed": 3}, r"data\.fold\.seed: unknown key"),
    ],
)
def test_a_wrong_fold_is_said(fold: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        experiment_from(
            {"name": "x", "data": {"source": "hsb", "fold": fold}, "problem": {"loss": "least_squares"}, "method": {"name": "global"}}
        )
