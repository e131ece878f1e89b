"""Who gets which of the labelled rows: properties of the three partitions, the digits and archives of images, and every error."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from coterie.draws.streams import stream
from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from, experiment_to_json
from coterie.experiment.data import DataConfig
from coterie.experiment.partition import Partition
from coterie_client.data import UserData, UserHead, count_users, list_users, load_users, summarize_users, totals
from coterie_client.data.partition import apportion, classes_of_users, deal, log_gamma
from coterie_client.data.pool import Pool, Share

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
PARTS = ("features", "target", "test_features", "test_target")


def pool_of(labels: Any, test: Any = None, users: Any = None, **more: Any) -> Pool:
    """A pool whose row i is the number i."""
    target = np.asarray(labels, dtype=np.float64)
    owners = None if users is None else {str(name): np.flatnonzero(np.array(users) == name) for name in sorted(set(users))}
    return Pool("t", target, lambda rows: rows[:, np.newaxis], owners, test=None if test is None else pool_of(test), **more)


def shares_of(pool: Pool, seed: int = 0, test_fraction: float = 0.0, **partition: Any) -> list[Share]:
    return deal(pool, Partition(**partition), test_fraction, seed)


def dealt(shares: list[Share]) -> list[int]:
    return [row for share in shares for row in [*share.rows.tolist(), *share.test_rows.tolist()]]


def bits(user: UserData) -> tuple[Any, ...]:
    return (user.name, *((getattr(user, part).dtype.str, getattr(user, part).shape, getattr(user, part).tobytes()) for part in PARTS))


# ---- by classes


@given(n_users=st.integers(1, 40), n_classes=st.integers(1, 12), per_user=st.integers(1, 12), seed=st.integers(0, 5))
def test_users_have_distinct_classes_and_classes_equally_many_users(n_users: int, n_classes: int, per_user: int, seed: int) -> None:
    per_user = min(per_user, n_classes)
    holds = classes_of_users(n_users, per_user, n_classes, stream(seed, "test"))
    assert (holds.sum(axis=1) == per_user).all()
    assert holds.max() == 1
    assert np.ptp(holds.sum(axis=0)) <= 1


def test_the_classes_of_users_are_drawn_anew_for_each_seed() -> None:
    first, second = (classes_of_users(20, 2, 10, stream(seed, "test")) for seed in (1, 2))
    assert not np.array_equal(first, second)
    assert len({tuple(np.flatnonzero(row)) for row in first}) > 10


def test_a_hundred_users_with_two_classes_are_as_in_the_paper() -> None:
    """Section 5.2: "we randomly allocate the data among 100 users so that each has S classes", 50,000/n and 10,000/n rows; a tenth here."""
    train, test = np.repeat(np.arange(10), 500), np.repeat(np.arange(10), 100)
    shares = shares_of(pool_of(train, test), by="classes", users=100, classes_per_user=2)
    for share in shares:
        labels = Counter(train[share.rows].tolist())
        assert sorted(labels.values()) == [25, 25]
        assert Counter(test[share.test_rows].tolist()) == dict.fromkeys(labels, 5)
    assert sorted(row for share in shares for row in share.rows.tolist()) == list(range(5000))
    assert sorted(row for share in shares for row in share.test_rows.tolist()) == list(range(1000))
    assert [share.name for share in shares] == [f"u{number}" for number in range(100)]


@given(
    sizes=st.lists(st.integers(6, 60), min_size=2, max_size=6),
    n_users=st.integers(1, 6),
    per_user=st.integers(1, 6),
    more=st.sampled_from([{}, {"equal_rows": False}, {"sizes": {"lognormal": 1.0}}, {"rows_per_user": 4, "test_rows_per_user": 1}]),
    has_test=st.booleans(),
    seed=st.integers(0, 3),
)
def test_by_classes_no_row_goes_to_two_users_and_test_rows_are_of_the_same_classes(
    sizes: list[int], n_users: int, per_user: int, more: dict[str, Any], has_test: bool, seed: int
) -> None:
    per_user = min(per_user, len(sizes))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    test = np.repeat(np.arange(len(sizes)), 12) if has_test else None
    fraction = 0.0 if has_test else 0.25
    shares = shares_of(pool_of(labels, test), seed, fraction, by="classes", users=n_users, classes_per_user=per_user, **more)
    mine = [row for share in shares for row in share.rows.tolist()]
    tests = [row for share in shares for row in share.test_rows.tolist()]
    assert len(set(mine)) == len(mine)
    assert len(set(tests)) == len(tests)
    if test is None:
        assert not set(mine) & set(tests)
        source = labels
    else:
        source = test
    for share in shares:
        assert (np.diff(share.rows) > 0).all()
        classes = set(labels[share.rows].tolist())
        assert len(share.rows) >= min(per_user, 2)
        assert len(share.rows) <= more.get("rows_per_user", len(labels))
        assert len(share.test_rows) <= more.get("test_rows_per_user", 1000)
        if has_test and "rows_per_user" not in more:
            assert len(classes) == per_user
            assert set(source[share.test_rows].tolist()) <= classes
    if not more and has_test:
        assert len({len(share.rows) for share in shares}) == 1
    n_classes_used = len(sizes) if n_users * per_user >= len(sizes) else 0
    if more == {"equal_rows": False} and n_classes_used:
        assert sorted(mine + (tests if test is None else [])) == list(range(len(labels)))


def test_log_normal_sizes_make_users_unequal_and_leave_no_row_behind() -> None:
    labels = np.repeat(np.arange(10), 300)
    few, many = (
        np.array(
            [
                len(share.rows)
                for share in shares_of(pool_of(labels), by="classes", users=50, classes_per_user=2, sizes={"lognormal": sigma})
            ]
        )
        for sigma in (0.1, 1.5)
    )
    assert few.sum() == many.sum() == 3000
    assert many.std() > 4 * few.std() > 0
    assert many.min() >= 4


def test_classes_can_be_chosen_and_relabelled(tmp_path: Path) -> None:
    """Figure 6: digits 0-4 are the training task, 5-9 the new users' task; relabelled, they are five classes again."""
    labels = np.repeat(np.arange(10), 20)
    np.savez(tmp_path / "t.npz", features=np.arange(200)[:, np.newaxis], target=labels)
    chosen = {"by": "classes", "users": 4, "classes_per_user": 2, "classes": [9, 5, 6, 7, 8], "relabel": True}
    data = ADAPTER.validate_python({"source": "npz", "path": "t.npz", "partition": chosen})
    for user in load_users(data, 0, None, tmp_path):
        digits = user.features[:, 0] // 20
        assert digits.min() >= 5
        assert [[9, 5, 6, 7, 8][int(label)] for label in user.target] == digits.tolist()
        assert [[9, 5, 6, 7, 8][int(label)] for label in user.test_target] == (user.test_features[:, 0] // 20).tolist()
    assert {label for user in summarize_users(data, 0, tmp_path) for label in user.labels or ()} == {0, 1, 2, 3, 4}


# ---- by Dirichlet


@settings(max_examples=30)
@given(alpha=st.sampled_from([0.2, 0.5, 1.0, 50.0]), n_users=st.integers(1, 8), least=st.integers(1, 3), seed=st.integers(0, 5))
def test_dirichlet_deals_every_row_once_and_leaves_nobody_without(alpha: float, n_users: int, least: int, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 5, 300)
    shares = shares_of(pool_of(labels), seed, by="dirichlet", users=n_users, alpha=alpha, min_rows=least)
    assert sorted(row for share in shares for row in share.rows.tolist()) == list(range(300))
    assert min(len(share.rows) for share in shares) >= least


def test_a_small_alpha_makes_users_differ_and_a_large_one_makes_them_alike() -> None:
    labels = np.repeat(np.arange(10), 100)

    def largest(alpha: float) -> float:
        shares = shares_of(pool_of(labels), by="dirichlet", users=10, alpha=alpha)
        return float(np.mean([max(Counter(labels[share.rows].tolist()).values()) / len(share.rows) for share in shares]))

    assert largest(0.1) > 0.4
    assert largest(1000.0) < 0.15


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.5])
def test_gamma_numbers_have_the_moments_of_the_distribution(alpha: float) -> None:
    numbers = np.exp(log_gamma(alpha, 40_000, stream(1, "test")))
    # Mean alpha and variance alpha; the variance of the sample variance is (mu4 - alpha^2) / n, mu4 = 3 alpha^2 + 6 alpha.
    assert abs(numbers.mean() - alpha) < 5 * np.sqrt(alpha / 40_000)
    assert abs(numbers.var() - alpha) < 5 * np.sqrt((2 * alpha**2 + 6 * alpha) / 40_000)


def test_gamma_numbers_of_a_tiny_alpha_have_finite_logarithms() -> None:
    assert np.isfinite(log_gamma(1e-4, 1000, stream(1, "test"))).all()


# ---- by natural user


def test_natural_users_keep_their_rows_and_those_with_few_are_left_out() -> None:
    pool = pool_of([0, 1, 0, 1, 1, 0], users=["b", "a", "b", "c", "b", "c"])
    assert [(share.name, share.rows.tolist()) for share in shares_of(pool, by="user")] == [("a", [1]), ("b", [0, 2, 4]), ("c", [3, 5])]
    assert [share.name for share in shares_of(pool, by="user", min_rows=2)] == ["b", "c"]
    assert [share.rows.tolist() for share in shares_of(pool, by="user", classes=[0])] == [[0, 2], [5]]


def test_natural_users_are_drawn_each_by_its_own_lot() -> None:
    names = [f"w{number}" for number in range(30)]
    everyone = pool_of(np.zeros(30), users=names)
    drawn = [share.name for share in shares_of(everyone, by="user", max_users=12)]
    assert len(drawn) == 12
    fewer = pool_of(np.zeros(29), users=names[:-1])
    assert set(drawn) - {share.name for share in shares_of(fewer, by="user", max_users=12)} <= {"w29"}
    assert drawn != [share.name for share in shares_of(everyone, 1, by="user", max_users=12)]


def test_a_writer_keeps_the_rows_of_three_of_its_digits() -> None:
    labels = np.tile(np.arange(10), 40)
    users = np.repeat([f"w{number}" for number in range(8)], 50)
    shares = shares_of(pool_of(labels, users=users), by="user", classes_per_user=3)
    classes = [frozenset(labels[share.rows].tolist()) for share in shares]
    assert all(len(mine) == 3 and len(share.rows) == 15 for mine, share in zip(classes, shares, strict=True))
    assert len(set(classes)) > 3


def test_sizes_thin_out_natural_users() -> None:
    users = np.repeat(np.arange(40), 50)
    counts = [len(share.rows) for share in shares_of(pool_of(np.zeros(2000), users=users), by="user", sizes={"lognormal": 1.0}, min_rows=2)]
    assert 2 <= min(counts) < 15
    assert max(counts) == 50


def test_test_rows_without_users_follow_the_classes_of_natural_users() -> None:
    pool = pool_of([0] * 8 + [1] * 4 + [1] * 12, test=[0] * 4 + [1] * 8, users=["a"] * 12 + ["b"] * 12)
    a, b = shares_of(pool, by="user")
    assert (len(a.test_rows), len(b.test_rows)) == (6, 6)
    assert [int(row >= 4) for row in a.test_rows] == [0, 0, 0, 0, 1, 1]
    assert min(b.test_rows) >= 4
    assert not set(a.test_rows) & set(b.test_rows)


# ---- what all have in common


def test_the_proportions_of_a_cut_are_those_of_the_rows() -> None:
    (share,) = shares_of(pool_of([0] * 60 + [1] * 30 + [2] * 10), by="classes", users=1, classes_per_user=3,
                         equal_rows=False, rows_per_user=10)  # fmt: skip
    assert [int(row >= 60) + int(row >= 90) for row in share.rows] == [0] * 6 + [1] * 3 + [2]


def test_a_cut_favours_no_label_where_all_differ() -> None:
    pool = pool_of(np.arange(100) / 7, users=["a"] * 100)
    (share,) = shares_of(pool, by="user", rows_per_user=10)
    assert len(share.rows) == 10
    assert share.rows.max() > 50 > share.rows.min()


@given(total=st.integers(0, 100), weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_apportioned_numbers_sum_to_the_total_and_are_within_one_of_their_share(total: int, weights: list[float]) -> None:
    numbers = apportion(total, np.array(weights))
    assert numbers.sum() == total
    assert np.abs(numbers - total * np.array(weights) / np.sum(weights)).max() < 1 + 1e-9


PARTITIONS = [
    {"by": "classes", "users": 6, "classes_per_user": 2},
    {"by": "classes", "users": 6, "classes_per_user": 3, "sizes": {"lognormal": 0.7}, "rows_per_user": 20},
    {"by": "dirichlet", "users": 6, "alpha": 0.5, "seed": 4},
]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_users_rows_do_not_depend_on_who_is_loaded(partition: dict[str, Any]) -> None:
    data = ADAPTER.validate_python({"source": "digits", "partition": partition})
    everyone = {user.name: bits(user) for user in load_users(data, 3, None)}
    assert list(everyone) == [f"u{number}" for number in range(6)]
    for names in (["u4"], ["u5", "u0"], ["u1", "u2", "u3"]):
        assert [bits(user) for user in load_users(data, 3, names)] == [everyone[name] for name in sorted(names)]
    assert list_users(data, 3) == [UserHead(user.name, None, len(user.target)) for user in load_users(data, 3, None)]


def test_the_partitions_seed_is_its_own_or_the_experiments() -> None:
    def rows(seed: int, own: int | None = None) -> list[Any]:
        partition = Partition(by="classes", users=6, classes_per_user=1, seed=own)
        return [share.rows.tolist() for share in deal(pool_of(np.arange(60) % 3), partition, 0.0, seed)]

    assert rows(0, own=7) == rows(7)
    assert rows(7) != rows(0)


def test_the_partitions_of_seed_three_are_pinned() -> None:
    labels = np.arange(24) % 4
    by_classes = shares_of(pool_of(labels), 3, by="classes", users=4, classes_per_user=2)
    by_dirichlet = shares_of(pool_of(labels), 3, by="dirichlet", users=3, alpha=1)
    assert [share.rows.tolist() for share in by_classes] == [
        [0, 4, 5, 9, 12, 21],
        [2, 3, 14, 15, 18, 23],
        [1, 6, 10, 13, 17, 22],
        [7, 8, 11, 16, 19, 20],
    ]
    assert [share.rows.tolist() for share in by_dirichlet] == [
        [4, 5, 9, 14, 15, 18, 21],
        [0, 1, 2, 3, 8, 12, 13, 17, 20, 22],
        [6, 7, 10, 11, 16, 19, 23],
    ]


def test_a_partition_survives_the_experiments_json() -> None:
    content = {
        "name": "digits",
        "data": {"source": "digits", "partition": {"by": "dirichlet", "users": 5, "alpha": 1}},
        "model": {"name": "mlp", "classes": 10},
        "method": {"name": "fedrep"},
    }
    experiment = experiment_from(content)
    assert experiment_from(json.loads(experiment_to_json(experiment))) == experiment


WRONG_PARTITIONS = [
    ({"by": "classes", "users": 5}, "by is 'classes' and classes_per_user is missing, want users and classes_per_user"),
    ({"by": "dirichlet", "users": 5}, "by is 'dirichlet' and alpha is missing, want users and alpha"),
    ({"by": "user", "alpha": 1}, "alpha is 1.0 and by is 'user', want it with by: dirichlet"),
    ({"by": "user", "users": 3}, "users is 3 and by is 'user', want it with by: classes or dirichlet"),
    ({"by": "user", "relabel": True}, "relabel is true without classes, want the list of classes"),
    ({"by": "user", "classes": [1, 1]}, "classes is [1, 1], want each class once"),
]


@pytest.mark.parametrize(("partition", "message"), WRONG_PARTITIONS)
def test_a_partition_whose_keys_disagree_is_refused(partition: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        Partition.model_validate(partition)


def test_natural_users_are_refused_where_rows_know_none() -> None:
    with pytest.raises(ValidationError, match="the rows of this source have no users"):
        ADAPTER.validate_python({"source": "digits", "partition": {"by": "user"}})


BY_CLASSES = {"by": "classes", "users": 2, "classes_per_user": 1}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([0, 2, 2], BY_CLASSES, "class 1 has 0 rows in t, whose labels go up to 2: want a row of each, or partition.classes with those to use"),
    ([0, 1.5, 1], BY_CLASSES, "t row 2 has the label 1.5, want a whole number from 0"),
    ([0, 1, -1], BY_CLASSES, "t row 3 has the label -1, want a whole number from 0"),
    ([0, np.nan, 1], BY_CLASSES, "t row 2 has the label nan, want a whole number from 0"),
    ([0, 10**9, 1], BY_CLASSES, "t has the label 1000000000 among 3 rows, want labels from 0 on, or partition.classes"),
    ([0, 1], {**BY_CLASSES, "classes_per_user": 3}, "partition.classes_per_user is 3, want at most the 2 classes of t"),
    ([0, 1], {**BY_CLASSES, "users": 3}, "partition.users is 3, but t has 2 rows for them: want at least one for each"),
    ([0, 1, 1, 1], {"by": "classes", "users": 2, "classes_per_user": 2}, "class 0 has 1 rows in t for the 2 users that are to have it"),
    ([0, 1], {**BY_CLASSES, "classes": [0, 7]}, "class 7 of partition.classes has 0 rows in t, want at least one"),
    (
        [0, 1],
        {**BY_CLASSES, "classes": ["cat"]},
        "class 'cat' of partition.classes is not in t, want one of the whole numbers of its labels",
    ),
    ([0, 1], {"by": "user"}, "partition.by is 'user', but the rows of t have no users: want classes or dirichlet"),
    (
        [0] * 9,
        {"by": "dirichlet", "users": 8, "alpha": 0.01},
        "rows after 100 draws with alpha 0.01, want at least 2 for each of 8 users: a larger alpha, fewer users or a smaller min_rows",
    ),
]


@pytest.mark.parametrize(("labels", "partition", "message"), REFUSED)
def test_labels_that_cannot_be_dealt_are_refused_with_one_sentence(labels: Any, partition: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        shares_of(pool_of(labels), **partition)
    assert "\n" not in str(caught.value)


def test_test_rows_that_do_not_fit_the_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^class 1 has 0 test rows in t, want at least one for the users that train on it$"):
        shares_of(pool_of([0, 0, 1, 1], test=[0, 0]), **BY_CLASSES)
    with pytest.raises(ConfigError, match=r"^t row 2 has the label 2, want 0 to 1 as training rows have$"):
        shares_of(pool_of([0, 0, 1, 1], test=[0, 2]), **BY_CLASSES)
    with pytest.raises(ConfigError, match=r"^no user of t has 5 rows of the partition's classes"):
        shares_of(pool_of([0, 1], users=["a", "b"]), by="user", min_rows=5)


# ---- the digits


def test_the_digits_are_scikit_learns_as_bytes() -> None:
    """The data set's first image begins 0 0 5 13 9 1 0 0 and is a zero; there are 1,797 rows, of each digit 174 to 183."""
    data = ADAPTER.validate_python(
        {"source": "digits", "partition": {"by": "classes", "users": 1, "classes_per_user": 10, "equal_rows": False}}
    )
    (user,) = load_users(data.model_copy(update={"test_fraction": 0.0}), 0, None)
    assert user.features.shape == (1797, 1, 8, 8)
    assert user.features.dtype == np.uint8
    assert user.target[0] == 0
    assert np.abs(user.features[0, 0, 0] / 255 * 16 - [0, 0, 5, 13, 9, 1, 0, 0]).max() < 0.032
    assert (user.features.min(), user.features.max()) == (0, 255)
    counts = Counter(user.target.tolist())
    assert (min(counts.values()), max(counts.values()), len(counts)) == (174, 183, 10)


def test_missing_scikit_learn_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    data = ADAPTER.validate_python({"source": "digits", "partition": BY_CLASSES})
    with pytest.raises(ConfigError, match=r"^source digits needs scikit-learn, which is not installed: pip install 'coterie\[data\]'$"):
        list_users(data, 0)


def test_users_are_counted_without_files_where_that_is_possible() -> None:
    partition = {"by": "classes", "users": 7, "classes_per_user": 2}
    assert count_users(ADAPTER.validate_python({"source": "images", "path": "nowhere", "partition": partition}), 0) == 7
    assert count_users(ADAPTER.validate_python({"source": "roles", "path": "nowhere"}), 0) is None
    assert count_users(ADAPTER.validate_python({"source": "csv", "path": "nowhere"}), 0) is None
    assert count_users(ADAPTER.validate_python({"source": "ellipses"}), 0) == 60


# ---- archives of rows for networks


def npz(folder: Path, **arrays: Any) -> None:
    np.savez(folder / "t.npz", **arrays)


def config(**more: Any) -> Any:
    return ADAPTER.validate_python({"source": "npz", "path": "t.npz", "test_fraction": 0, **more})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_bytes_stay_bytes_with_their_channels_first(tmp_path: Path, save: Any) -> None:
    images = np.random.default_rng(1).integers(0, 256, (9, 5, 4, 3), np.uint8)
    for array, wanted in ((images, images.transpose(0, 3, 1, 2)), (images[..., 0], images[:, np.newaxis, ..., 0])):
        for stored in (array, np.asfortranarray(array)):
            save(tmp_path / "t.npz", features=stored, target=np.arange(9) % 2, user=np.arange(9) % 4)
            users = load_users(config(), 0, None, tmp_path)
            assert [user.name for user in users] == ["0", "1", "2", "3"]
            for number, user in enumerate(users):
                assert user.features.dtype == np.uint8
                assert np.array_equal(user.features, wanted[number::4])
                assert user.features.flags.c_contiguous
                assert not user.features.flags.writeable


def test_how_rows_are_read_can_be_said(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    npz(tmp_path, features=rng.integers(0, 200, (4, 6), np.uint8), user=np.zeros(4, int), target=np.zeros(4))
    for read_as, dtype in ((None, np.float64), ("numbers", np.float64), ("bytes", np.uint8), ("symbols", np.int64)):
        (user,) = load_users(config(read_as=read_as), 0, None, tmp_path)
        assert (user.features.dtype, user.features.shape) == (dtype, (4, 6))
    npz(tmp_path, features=rng.standard_normal((4, 3, 5, 6)).astype(np.float32), user=np.zeros(4, int), target=np.zeros(4))
    (user,) = load_users(config(), 0, None, tmp_path)
    assert (user.features.dtype, user.features.shape) == (np.float64, (4, 3, 5, 6))
    npz(tmp_path, features=rng.integers(0, 9, (4, 3, 5), np.int32), user=np.zeros(4, int), target=np.zeros(4))
    (user,) = load_users(config(), 0, None, tmp_path)
    assert (user.features.dtype, user.features.shape) == (np.int64, (4, 3, 5))
    with pytest.raises(ConfigError, match=r"^t.npz: array 'features' has dtype int32, want uint8 to be read as bytes$"):
        load_users(config(read_as="bytes"), 0, None, tmp_path)


def test_only_the_rows_of_the_users_asked_for_are_looked_at(tmp_path: Path) -> None:
    features = np.ones((6, 2, 2, 2))
    features[3, 1, 1, 1] = np.nan
    npz(tmp_path, features=features, target=np.zeros(6), user=np.arange(6) // 2)
    assert [user.name for user in load_users(config(), 0, ["0", "2"], tmp_path)] == ["0", "2"]
    with pytest.raises(ConfigError, match=r"^t.npz row 4, column 'features\[:, 7\]': nan is not a finite number, want one$"):
        load_users(config(), 0, ["1"], tmp_path)


def test_test_rows_of_an_archive_go_to_the_users_they_name(tmp_path: Path) -> None:
    npz(
        tmp_path,
        x=np.arange(6)[:, np.newaxis],
        y=np.arange(6),
        u=["a", "b"] * 3,
        tx=np.array([[10], [11], [12]]),
        ty=[1, 2, 3],
        tu=["b", "a", "b"],
    )
    names = {"features": "x", "target": "y", "user": "u", "test_features": "tx", "test_target": "ty", "test_user": "tu"}
    a, b = load_users(config(**names, test_fraction=0.5), 0, None, tmp_path)
    assert (a.target.tolist(), a.test_features.tolist(), a.test_target.tolist()) == ([0, 2, 4], [[11]], [2])
    assert (b.target.tolist(), b.test_features.tolist(), b.test_target.tolist()) == ([1, 3, 5], [[10], [12]], [1, 3])
    with pytest.raises(ValidationError, match="test_features is 'tx' and test_user is missing, want the users of these rows"):
        config(**{**names, "test_user": None})


def test_a_folder_of_archives_has_a_user_in_each(tmp_path: Path) -> None:
    for name in ("bo", "al"):
        np.savez(tmp_path / f"{name}.npz", features=np.full((3, 1, 2, 2), len(name), np.uint8), target=np.arange(3))
    (tmp_path / "al.npz").chmod(0o644)
    for path in (".", "{user}.npz"):
        data = ADAPTER.validate_python({"source": "npz", "path": path, "test_fraction": 0})
        assert list_users(data, 0, tmp_path) == [UserHead("al", None, 3), UserHead("bo", None, 3)]
    (tmp_path / "bo.npz").write_bytes(b"damaged")
    assert [user.name for user in load_users(data, 0, ["al"], tmp_path)] == ["al"]
    with pytest.raises(ConfigError, match=r"^bo.npz cannot be read"):
        load_users(data, 0, None, tmp_path)
    partitioned = ADAPTER.validate_python({"source": "npz", "path": ".", "partition": BY_CLASSES})
    with pytest.raises(ConfigError, match=r"^path '.' has one archive per user, want neither partition nor test_path$"):
        list_users(partitioned, 0, tmp_path)


def encoded(images: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
    files = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, kind)
        files.append(buffer.getvalue())
    return {"blob": np.frombuffer(b"".join(files), np.uint8), "at": np.cumsum([0, *map(len, files)])}


ENCODED = {"encoded": {"bytes": "blob", "offsets": "at"}, "target": "label"}


def test_encoded_images_are_decoded_for_their_users_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    images, tests = rng.integers(0, 256, (12, 4, 5, 3), np.uint8), rng.integers(0, 256, (6, 4, 5, 3), np.uint8)
    npz(tmp_path, **encoded(images, "PNG"), label=np.arange(12) % 3)
    np.savez_compressed(tmp_path / "test.npz", **encoded(tests, "PNG"), label=np.arange(6) % 3)
    partition = {"by": "classes", "users": 3, "classes_per_user": 1}
    data = config(**ENCODED, test_path="test.npz", partition=partition)
    users = load_users(data, 0, None, tmp_path)
    for user in users:
        mine = np.flatnonzero(np.arange(12) % 3 == user.target[0])
        assert np.array_equal(user.features, images[mine].transpose(0, 3, 1, 2))
        assert np.array_equal(user.test_features, tests[int(user.target[0]) :: 3].transpose(0, 3, 1, 2))
    arrays = encoded(images, "PNG")
    broken = int(np.flatnonzero(np.arange(12) % 3 == users[0].target[0])[1])
    arrays["blob"] = arrays["blob"].copy()
    arrays["blob"][arrays["at"][broken] : arrays["at"][broken] + 8] = 0
    npz(tmp_path, **arrays, label=np.arange(12) % 3)
    assert bits(load_users(data, 0, ["u1"], tmp_path)[0]) == bits(users[1])
    with pytest.raises(ConfigError, match=rf"^t.npz: row {broken + 1} cannot be decoded \(cannot identify\), want a JPEG or PNG image$"):
        load_users(data, 0, ["u0"], tmp_path)


def test_jpeg_images_are_decoded_as_pillow_does(tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (3, 8, 8), np.uint8)
    arrays = encoded(images, "JPEG")
    npz(tmp_path, **arrays, label=np.zeros(3, int), user=np.zeros(3, int))
    (user,) = load_users(config(**ENCODED), 0, None, tmp_path)
    for row in range(3):
        with Image.open(io.BytesIO(arrays["blob"][arrays["at"][row] : arrays["at"][row + 1]].tobytes())) as image:
            assert np.array_equal(user.features[row, 0], np.asarray(image))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": np.array([0, 69, 66, 207])}, "t.npz: a row is bytes 69 to 66 of array 'blob', want some of its 207"),
        ({"at": np.array([0, 69, 138, 10**9])}, "t.npz: a row is bytes 138 to 1000000000 of array 'blob', want some of its 207"),
        ({"at": np.array([0, 69, 69, 207])}, "t.npz: a row is bytes 69 to 69 of array 'blob', want some of its 207"),
        ({"at": np.zeros((2, 2), int)}, "t.npz: array 'at' has shape (2, 2), want (n + 1,)"),
        ({"at": np.array([0])}, "t.npz has 0 rows, want at least one"),
        ({"blob": np.zeros(300)}, "t.npz: array 'blob' is float64 (300,), want bytes: uint8 (total,)"),
        ({"label": np.zeros(2)}, "t.npz: array 'label' has shape (2,), want (3,)"),
    ],
)
def test_a_wrong_archive_of_images_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {**encoded(np.zeros((3, 8, 8), np.uint8), "PNG"), "label": np.zeros(3)}
    npz(tmp_path, **(arrays | change))
    with pytest.raises(ConfigError, match=rf"^{re.escape(message)}"):
        load_users(config(**ENCODED, partition={"by": "classes", "users": 1, "classes_per_user": 1}), 0, None, tmp_path)


def test_offsets_that_do_not_fit_the_users_are_refused(tmp_path: Path) -> None:
    npz(tmp_path, **encoded(np.zeros((3, 8, 8), np.uint8), "PNG"), label=np.zeros(4), user=np.zeros(4, int))
    with pytest.raises(ConfigError, match=r"^t.npz: array 'at' has shape \(4,\), want \(5,\): one more than rows$"):
        list_users(config(**ENCODED), 0, tmp_path)


def test_images_of_two_sizes_are_refused(tmp_path: Path) -> None:
    small, large = encoded(np.zeros((1, 8, 8), np.uint8), "PNG"), encoded(np.zeros((1, 9, 8), np.uint8), "PNG")
    blob = np.concatenate([small["blob"], large["blob"]])
    npz(tmp_path, blob=blob, at=np.array([0, small["at"][1], len(blob)]), label=[0, 0], user=[0, 1])
    assert load_users(config(**ENCODED), 0, ["0"], tmp_path)[0].features.shape == (1, 1, 8, 8)
    with pytest.raises(ConfigError, match=r"^t.npz: row 2 has 9x8 pixels and row 1 has 8x8, want one size$"):
        load_users(config(**ENCODED), 0, ["1"], tmp_path)


def test_folds_keep_bytes() -> None:
    data = ADAPTER.validate_python({"source": "digits", "partition": PARTITIONS[0], "fold": {"number": 1, "of": 3}})
    for user in load_users(data, 0, None):
        assert user.features.dtype == user.test_features.dtype == np.uint8
        assert len(user.test_target) > len(user.target) / 4
    assert [user.n_rows for user in summarize_users(data, 0)] == [head.n_rows for head in list_users(data, 0)]


def test_rows_that_are_no_tables_cannot_be_standardised() -> None:
    users = load_users(ADAPTER.validate_python({"source": "digits", "partition": PARTITIONS[0]}), 0, ["u0"])
    with pytest.raises(
        ConfigError, match=r"^user 'u0' has rows of shape \[1, 8, 8\], want rows of p numbers .*: rows of other shapes need a model$"
    ):
        totals(users)
