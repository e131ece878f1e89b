"""The sources that make or bring their users: ellipses, High School and Beyond, Python; the held-out split; standardisation."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coterie.draws.streams import stream
from coterie.errors import ConfigError
from coterie.experiment.data import EllipsesData, HsbData, PythonData
from coterie_client.data import UserData, UserHead, deviations, filled, list_users, load_users, standardize, totals, user_source
from coterie_client.data.split import hold_out, n_test_rows
from tests.slow import slow_after

ELLIPSES = EllipsesData(source="ellipses")
PARTS = ("features", "target", "test_features", "test_target")


def bits(user: UserData) -> tuple[Any, ...]:
    return (user.name, user.cluster, *(getattr(user, part).tobytes() for part in PARTS))


# Ellipses


def test_the_ellipses_have_sixty_users_in_three_clusters_in_cluster_order() -> None:
    users = load_users(ELLIPSES, 3, None)
    assert [(user.name, user.cluster) for user in users] == [(f"u{i}", f"c{i // 20}") for i in range(60)]
    assert all(user.features.shape == (10, 2) and user.test_features.shape == (4000, 2) for user in users)
    assert list_users(ELLIPSES, 3) == [UserHead(f"u{i}", f"c{i // 20}", 10) for i in range(60)]


def coordinates(features: np.ndarray, target: np.ndarray, cluster: int) -> np.ndarray:
    """(n, 2) of points in the unit disc that their class's ellipse is the image of, computed by rotation."""
    angle = np.deg2rad([90, 210, 330][cluster])
    rotated = features @ np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    disc: np.ndarray = (rotated - np.column_stack([2 * target, 0 * target])) / [2.8, 1.0]
    return disc


@pytest.mark.parametrize("cluster", [0, 1, 2])
def test_each_class_is_uniform_in_its_ellipse_and_the_test_set_is_balanced(cluster: int) -> None:
    users = load_users(ELLIPSES, 3, [f"u{i}" for i in range(20 * cluster, 20 * cluster + 20)])
    for user in users:
        assert (np.linalg.norm(coordinates(user.features, user.target, cluster), axis=1) <= 1 + 1e-12).all()
        assert set(user.target) == {-1.0, 1.0}
        assert user.test_features is users[0].test_features
    test = users[0]
    assert (test.test_target == 1).sum() == (test.test_target == -1).sum() == 2000
    disc = coordinates(test.test_features, test.test_target, cluster)
    # Uniform in the disc: radius squared and angle are uniform, and independent. Tolerances are five standard errors of 4000 draws.
    radius = (disc**2).sum(axis=1)
    assert radius.max() <= 1 + 1e-12
    for uniform in (radius, (np.arctan2(disc[:, 1], disc[:, 0]) / (2 * np.pi)) % 1):
        shares = np.histogram(uniform, bins=10, range=(0, 1 + 1e-9))[0] / 4000
        assert np.abs(shares - 0.1).max() < 5 * np.sqrt(0.1 * 0.9 / 4000)
    assert abs(np.corrcoef(disc.T)[0, 1]) < 5 / np.sqrt(4000)


def test_users_draw_without_replacement_from_one_pool_of_two_hundred() -> None:
    users = load_users(ELLIPSES, 3, [f"u{i}" for i in range(20)])
    for user in users:
        assert len(np.unique(user.features, axis=0)) == 10
    seen = np.unique(np.concatenate([user.features for user in users]), axis=0)
    # 200 draws by 20 users see 200 (1 - .95^20) = 128 different points on average.
    assert 105 < len(seen) < 150
    everything = EllipsesData(source="ellipses", rows_per_user=200)
    (whole,) = load_users(everything, 3, ["u0"])
    assert (whole.target == 1).sum() == 100
    assert {tuple(row) for row in seen} <= {tuple(row) for row in whole.features}


def test_no_training_row_is_in_the_test_set() -> None:
    users = load_users(ELLIPSES, 3, None)
    train = {tuple(row) for user in users for row in user.features}
    assert train.isdisjoint(tuple(row) for user in users[::20] for row in user.test_features)


def test_a_user_with_two_rows_has_both_classes() -> None:
    for user in load_users(EllipsesData(source="ellipses", rows_per_user=2, test_per_class=0), 1, None):
        assert sorted(user.target) == [-1, 1]
        assert user.test_features.shape == (0, 2)


def test_an_ellipses_user_has_the_same_bits_whichever_users_are_loaded() -> None:
    everyone = load_users(ELLIPSES, 5, None)
    for names in (["u0"], ["u59", "u7"], [f"u{i}" for i in range(30, 50)]):
        expected = [bits(user) for user in everyone if user.name in names]
        assert [bits(user) for user in load_users(ELLIPSES, 5, names)] == expected


def test_the_ellipses_seed_is_its_own_or_the_experiments() -> None:
    own = EllipsesData(source="ellipses", seed=4)
    assert bits(load_users(own, 0, ["u1"])[0]) == bits(load_users(ELLIPSES, 4, ["u1"])[0])
    assert bits(load_users(ELLIPSES, 4, ["u1"])[0]) != bits(load_users(ELLIPSES, 5, ["u1"])[0])


def test_the_first_point_of_seed_three_is_pinned() -> None:
    (user,) = load_users(ELLIPSES, 3, ["u0"])
    assert user.features[0].tolist() == [0.3145102488936206, -0.6290747173834399]


def test_streams_with_different_names_differ_and_equal_ones_agree() -> None:
    first = [stream(*name).uniform(4).tolist() for name in ((1, "a", 2), (1, "a", "2"), (1, "a2"), (12, "a"), (2, "a", 2))]
    assert len({tuple(draws) for draws in first}) == 5
    assert stream(1, "a", 2).uniform(4).tolist() == first[0]


# High School and Beyond


def test_high_school_and_beyond_has_its_known_facts() -> None:
    users = load_users(HsbData(source="hsb", test_fraction=0), 0, None)
    assert len(users) == 160
    assert sum(len(user.features) for user in users) == 7185
    clusters = [user.cluster for user in users]
    assert (clusters.count("Public"), clusters.count("Catholic")) == (90, 70)
    target = np.concatenate([user.target for user in users])
    features = np.concatenate([user.features for user in users])
    assert round(target.mean(), 3) == 12.748
    assert round(target.std(ddof=1), 3) == 6.878
    assert features[:, 1].sum() == 1974  # minority
    assert abs(features[:, 0].mean()) < 2e-4  # ses is centred
    assert set(np.unique(features[:, 1:])) == {0, 1}
    assert (min(map(len, (u.target for u in users))), max(map(len, (u.target for u in users)))) == (14, 67)


def test_the_first_school_is_as_in_the_source() -> None:
    (school,) = load_users(HsbData(source="hsb", test_fraction=0), 0, ["s1224"])
    assert (school.cluster, len(school.target)) == ("Public", 47)
    assert school.target[:3].tolist() == [5.876, 19.708, 20.349]
    assert school.features[:3].tolist() == [[-1.528, 0, 1], [-0.588, 0, 1], [-0.528, 0, 0]]


def test_high_school_and_beyond_gives_other_columns_on_request_and_needs_no_data_folder(tmp_path: Path) -> None:
    data = HsbData(source="hsb", feature_columns=("ses", "meanses", "cses"), test_fraction=0)
    users = load_users(data, 0, None, tmp_path)
    ses, mean, centred = np.concatenate([user.features for user in users]).T
    assert np.abs(ses - mean - centred).max() < 1e-12
    assert [head.n_rows for head in list_users(data, 0, tmp_path)] == [len(user.features) for user in users]


# Python


def record(name: Any, rows: Any = ((1.0, 2.0), (3.0, 4.0)), **more: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, features=rows, **more)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("data_source_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def python(**more: Any) -> PythonData:
    return PythonData(source="python", path="data_source_of_a_test:make", **more)


def test_a_python_source_is_called_with_its_options_and_the_seed(source: Any) -> None:
    calls = []

    @user_source
    def make(options: dict[str, Any], seed: int) -> Iterator[SimpleNamespace]:
        calls.append((options, seed))
        yield record("u10", cluster="c", target=[1, -1])
        yield record("u2", test_features=[[5, 6]], test_target=[7])

    source.make = make
    users = load_users(python(options={"a": [1, None]}), 9, None)
    assert calls == [({"a": [1, None]}, 9)]
    assert [(user.name, user.cluster) for user in users] == [("u2", None), ("u10", "c")]
    assert users[0].target.tolist() == [0, 0]
    assert (users[0].test_features.tolist(), users[0].test_target.tolist()) == ([[5, 6]], [7])
    assert users[1].features.tolist() == [[1, 2], [3, 4]]
    assert list_users(python(), 9) == [UserHead("u2", None, 2), UserHead("u10", "c", 2)]
    assert bits(load_users(python(), 9, ["u10"])[0]) == bits(users[1])


def test_user_data_is_itself_a_record(source: Any) -> None:
    source.make = user_source(lambda _, seed: load_users(ELLIPSES, seed, ["u0", "u1"]))
    expected = [bits(user) for user in load_users(ELLIPSES, 2, ["u0", "u1"])]
    assert [bits(user) for user in load_users(python(), 2, None)] == expected


WHERE = "data_source_of_a_test:make"
PYTHON_ERRORS: list[tuple[Any, str]] = [
    (None, f"{WHERE} returned None, want an iterable of user records"),
    (5, f"{WHERE} returned a value of type int, want an iterable of user records"),
    ([], f"{WHERE} returned 0 users, want at least one"),
    ({"u1": 1}, f"{WHERE} record 0 is a value of type str with the name None, want text as its name"),
    ([record(3)], f"{WHERE} record 0 is a value of type SimpleNamespace with the name 3, want text as its name"),
    ([record("")], f"{WHERE} record 0: the name is empty"),
    ([record("a"), record("a")], f"{WHERE} record 1: user 'a' occurs twice, want each user once"),
    ([record("a", None)], f"{WHERE} user 'a': features have shape None, want (n, p), both positive"),
    ([record("a", np.ones((0, 2)))], f"{WHERE} user 'a': features have shape (0, 2), want (n, p), both positive"),
    ([record("a", np.ones(3))], f"{WHERE} user 'a': features has shape (3,), want (n, p)"),
    ([record("a", [[1, 2], [3]])], f"{WHERE} user 'a': features is not an array ("),
    ([record("a", [["x"]])], f"{WHERE} user 'a': features has dtype <U1, want integers or floating-point numbers"),
    ([record("a", [[1.0], [np.nan]])], f"{WHERE} user 'a': features row 2 has NaN or infinity, want numbers"),
    ([record("a", target=[1])], f"{WHERE} user 'a': target has 1 rows, want the 2 of features"),
    ([record("a", target=[[1], [2]])], f"{WHERE} user 'a': target has shape (2, 1), want (n,)"),
    ([record("a", cluster=1)], f"{WHERE} user 'a': cluster is a value of type int, want text or None"),
    ([record("a", cluster="")], f"{WHERE} user 'a', cluster: the name is empty"),
    ([record("a", test_features=[[1]])], f"{WHERE} user 'a': test_features has 1 columns, want the 2 of features"),
    ([record("a", test_target=[1])], f"{WHERE} user 'a': test_target has 1 rows, want the 0 of test_features"),
    ([record("a"), record("b", [[1]])], f"{WHERE} user 'b': features has 1 columns, want the 2 of user 'a'"),
]


@pytest.mark.parametrize(("returned", "message"), PYTHON_ERRORS)
def test_wrong_returns_of_a_python_source_are_refused_with_one_sentence(source: Any, returned: Any, message: str) -> None:
    source.make = user_source(lambda *_: returned)
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load_users(python(), 0, None)


def test_only_marked_functions_are_called(source: Any, tmp_path: Path) -> None:
    def unmarked(options: dict[str, Any], seed: int) -> list[Any]:
        raise AssertionError("called")

    source.make = unmarked
    with pytest.raises(
        ConfigError, match=r"^data source 'data_source_of_a_test:make' is a value of type function that is no source: want a coterie.plugin"
    ):
        load_users(python(), 0, None)
    trace = tmp_path / "trace"
    command = PythonData(source="python", path="subprocess:call", options={"touch": 1, str(trace): 1})
    with pytest.raises(ConfigError, match=r"^data source 'subprocess:call' is a value of type function that is no source"):
        load_users(command, 0, None)
    assert not trace.exists()


def test_missing_modules_and_functions_are_named(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"^data source 'no_such_module:f' cannot be imported: ModuleNotFoundError: No module named"):
        load_users(PythonData(source="python", path="no_such_module:f"), 0, None)
    with pytest.raises(
        ConfigError, match=r"^data source 'data_source_of_a_test:make' does not exist: module 'data_source_of_a_test' has no 'make'$"
    ):
        load_users(python(), 0, None)


@pytest.mark.parametrize("statement", ["raise SystemExit(7)", "raise BaseException('no')", "1 / 0", "import no_such_module_either", "def"])
def test_a_module_that_fails_on_import_is_named_as_a_source(statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_source.py").write_text(statement + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^data source 'failing_source:make' cannot be imported: "):
        load_users(PythonData(source="python", path="failing_source:make"), 0, None)


# The held-out split


def split(n_rows: int, fraction: float, *, target: Any = None, name: str = "u1", seed: int = 0) -> UserData:
    features = np.arange(n_rows, dtype=np.float64)[:, np.newaxis]
    values = np.arange(n_rows, dtype=np.float64) if target is None else np.asarray(target, dtype=np.float64)
    return hold_out(name, None, features, values, test_fraction=fraction, seed=seed)


@given(st.integers(1, 60), st.floats(0, 1, exclude_max=True), st.integers(0, 5))
def test_every_row_is_either_trained_on_or_tested_on(n_rows: int, fraction: float, seed: int) -> None:
    user = split(n_rows, fraction, seed=seed)
    train, test = user.features[:, 0].tolist(), user.test_features[:, 0].tolist()
    assert sorted(train + test) == list(range(n_rows))
    assert train == sorted(train)
    assert test == sorted(test)
    assert len(train) >= min(2, n_rows)
    assert user.target.tolist() == train
    assert user.test_target.tolist() == test


@pytest.mark.parametrize(
    ("n_rows", "fraction", "n_test"),
    [(10, 0.2, 2), (10, 0, 0), (1, 0.9, 0), (2, 0.5, 0), (3, 0.2, 1), (3, 0.9, 1), (47, 0.2, 9), (5, 0.5, 3)],
)
def test_the_fraction_is_rounded_to_whole_rows(n_rows: int, fraction: float, n_test: int) -> None:
    assert n_test_rows(n_rows, fraction) == n_test
    assert len(split(n_rows, fraction).test_target) == n_test


@example([-1.0, 1.0, 1.0, 1.0, 1.0], 0.6, 0)
@example([1.0, -1.0, -1.0, -1.0, -1.0], 0.6, 0)
@given(st.lists(st.sampled_from([-1.0, 1.0]), min_size=1, max_size=40), st.floats(0, 1, exclude_max=True), st.integers(0, 3))
def test_both_classes_stay_in_training_and_the_split_is_in_proportion(target: list[float], fraction: float, seed: int) -> None:
    user = split(len(target), fraction, target=target, seed=seed)
    assert set(user.target) == set(target)
    n_test = len(user.test_target)
    assert n_test == n_test_rows(len(target), fraction)
    if min(target.count(1), target.count(-1)) >= 1 and n_test < len(target) - 2:
        share = n_test * target.count(1) / len(target)
        limit = min(target.count(1), target.count(-1)) - 1
        assert abs((user.test_target == 1).sum() - share) <= 1 or limit < share or limit < n_test - share


def test_a_balanced_user_has_a_balanced_test_set() -> None:
    user = split(100, 0.2, target=[1, -1] * 50)
    assert (user.test_target == 1).sum() == 10


def test_the_split_depends_on_the_seed_and_the_name() -> None:
    tests = {tuple(split(100, 0.2, name=name, seed=seed).test_target) for name in ("a", "b") for seed in (0, 1)}
    assert len(tests) == 4
    assert split(100, 0.2, name="a").test_target.tolist() == split(100, 0.2, name="a").test_target.tolist()


def test_all_rows_are_equally_likely_to_be_held_out() -> None:
    counts = np.zeros(10)
    for seed in range(2000):
        counts[split(10, 0.2, seed=seed).test_features[:, 0].astype(int)] += 1
    # Each row is held out in 400 of 2000 splits on average; five standard errors.
    assert np.abs(counts - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


# Standardisation


def holed(name: str, rows: list[list[float]], test: list[list[float]]) -> UserData:
    return UserData(name, None, np.array(rows), np.zeros(len(rows)), np.array(test), np.zeros(len(test)))


def test_totals_and_deviations_are_over_training_rows_alone() -> None:
    users = [split(4, 0.25), split(3, 0, name="u2")]
    train = [user.features[:, 0] for user in users]
    n_rows, n_present, sums = totals(users)
    assert n_rows.tolist() == [3, 3]
    assert n_present.tolist() == [[3], [3]]
    assert sums.tolist() == [[rows.sum()] for rows in train]
    np.testing.assert_allclose(deviations(users, np.array([1.5])), [[np.linalg.norm(rows - 1.5)] for rows in train], rtol=1e-15)


def test_a_missing_cell_is_in_no_sum_and_gets_the_mean_in_training_and_test_rows() -> None:
    user = holed("u", [[1.0, np.nan], [np.nan, np.nan], [5.0, 7.0]], [[np.nan, 2.0]])
    found = totals([user])
    assert (found.n_rows.tolist(), found.n_present.tolist(), found.sums.tolist()) == ([3], [[2, 1]], [[6.0, 7.0]])
    assert deviations([user], np.array([3.0, 4.0])).tolist() == [[np.sqrt(8.0), 3.0]]
    whole = filled(user, np.array([3.0, 4.0]))
    assert whole.features.tolist() == [[1.0, 4.0], [3.0, 4.0], [5.0, 7.0]]
    assert whole.test_features.tolist() == [[3.0, 2.0]]


@pytest.mark.parametrize("exponent", [-900, -30, 30, 900])
def test_deviations_are_those_of_any_units_to_the_bit(exponent: int) -> None:
    rows = np.random.default_rng(3).normal(size=(300, 2))
    here, there = (holed("u", values.tolist(), []) for values in (rows, np.ldexp(rows, exponent)))
    mean = totals([here]).sums[0] / 300
    assert (totals([there]).sums == np.ldexp(totals([here]).sums, exponent)).all()
    assert (deviations([there], np.ldexp(mean, exponent)) == np.ldexp(deviations([here], mean), exponent)).all()


@pytest.mark.parametrize("value", slow_after(2, [0.1, 1e7 + 0.1, 1 / 3, -1e300, 1e-300]))
def test_the_rounding_of_a_mean_of_equal_values_is_below_its_bound(value: float) -> None:
    user = holed("u", np.full((200_000, 1), value).tolist(), [])
    mean = totals([user]).sums[0] / 200_000
    assert deviations([user], mean)[0, 0] <= 128 * 2.0**-52 * abs(value) * np.sqrt(200_000)


def test_totals_of_a_user_do_not_depend_on_who_shares_the_host() -> None:
    users = load_users(HsbData(source="hsb"), 0, None)
    together, mean = totals(users), np.ones(3)
    for place in (0, 77, 159):
        assert totals([users[place]]).sums.tobytes() == together.sums[place].tobytes()
        assert deviations([users[place]], mean).tobytes() == deviations(users, mean)[place].tobytes()


def test_standardised_training_rows_have_mean_zero_and_deviation_one_and_test_rows_follow() -> None:
    users = load_users(HsbData(source="hsb"), 0, None)
    found = totals(users)
    total = found.n_rows.sum()
    mean = found.sums.sum(axis=0) / total
    scale = np.sqrt((deviations(users, mean) ** 2).sum(axis=0) / total)
    after = [standardize(user, mean, scale) for user in users]
    assert np.abs(totals(after).sums.sum(axis=0) / total).max() < 1e-12
    assert np.abs((deviations(after, np.zeros(3)) ** 2).sum(axis=0) / total - 1).max() < 1e-12
    assert np.allclose(after[0].test_features * scale + mean, users[0].test_features, rtol=0, atol=1e-12)


def test_the_target_is_left_alone_and_the_user_is_not_changed() -> None:
    user = split(5, 0.2)
    before = bits(user)
    after = standardize(user, np.array([1.0]), np.array([2.0]))
    assert after.features[:, 0].tolist() == [(x - 1) / 2 for x in user.features[:, 0]]
    assert after.target.tolist() == user.target.tolist()
    assert after.test_target.tolist() == user.test_target.tolist()
    assert bits(user) == before


@pytest.mark.parametrize(
    ("mean", "scale", "message"),
    [
        ([0.0, 0.0], [1.0], "the mean for user 'u1' has shape (2,), want (1,)"),
        ([0.0], [1.0, 1.0], "the scale for user 'u1' has shape (2,), want (1,)"),
        ([np.nan], [1.0], "the mean of column 0 is nan, want a number"),
        ([0.0], [0.0], "the scale of column 0 is 0.0, want a positive number: is the column constant?"),
        ([0.0], [np.inf], "the scale of column 0 is inf, want a positive number"),
    ],
)
def test_constants_that_cannot_be_applied_are_refused(mean: list[float], scale: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        standardize(split(4, 0), np.array(mean), np.array(scale))


def test_totals_of_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sums were asked of 0 users"):
        totals([])
