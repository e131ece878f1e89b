"""The bundled tables: their facts, their known clusters, the held-out split, and standardised targets. Facts of hsb: test_data_sources."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig, ExamsData, GrowthData, HsbData, IleaData
from coterie_client.data import UserData, UserHead, list_users, load_users

SOURCES = ["hsb", "exams", "growth"]
EXAMS = ExamsData(source="exams", test_fraction=0)
GROWTH = GrowthData(source="growth", test_fraction=0)
ADAPTER: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
PARTS = ("features", "target", "test_features", "test_target")


@cache
def everyone(source: str) -> list[UserData]:
    return load_users(ADAPTER.validate_python({"source": source}), 0, None)


def bits(user: UserData) -> tuple[Any, ...]:
    return (user.name, user.cluster, user.columns, *(getattr(user, part).tobytes() for part in PARTS))


def rows(users: list[UserData]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([user.features for user in users]), np.concatenate([user.target for user in users])


def test_exams_has_the_schools_with_ten_students_or_more() -> None:
    users = load_users(EXAMS, 0, None)
    sizes = [len(user.target) for user in users]
    assert (len(users), len({user.cluster for user in users}), sum(sizes), min(sizes)) == (1091, 129, 24963, 10)
    features, label = rows(users)
    assert users[0].columns == ("female", "age", "gcsescore")
    assert Counter(label) == {1.0: 11_554, -1.0: 13_409}
    assert sum(len(set(user.target)) == 2 for user in users) == 1067
    assert set(features[:, 0]) == {0, 1}
    assert (features[:, 1].min(), features[:, 1].max(), features[:, 2].max()) == (-6, 5, 8)


def test_the_first_school_of_exams_is_as_in_the_source() -> None:
    """`Chem97` begins: F 3 6.625 with score 4; F -3 7.625, F -4 7.25 and F -2 7.5 with score 10; F -1 6.444 with score 8."""
    (school,) = load_users(EXAMS, 0, ["s1"])
    assert school.cluster == "a1"
    assert school.features[:5].tolist() == [[1, 3, 6.625], [1, -3, 7.625], [1, -4, 7.25], [1, -2, 7.5], [1, -1, 6.444]]
    assert school.target[:5].tolist() == [-1, 1, 1, 1, 1]


def test_growth_has_the_children_with_four_tests_or_more() -> None:
    users = load_users(GROWTH, 0, None)
    sizes = Counter(len(user.target) for user in users)
    assert (len(users), len({user.cluster for user in users})) == (1174, 57)
    assert sizes == {4: 328, 5: 794, 6: 52}
    year, math = rows(users)
    assert users[0].columns == ("year",)
    assert set(year[:, 0]) == {-2.5, -1.5, -0.5, 0.5, 1.5, 2.5}
    assert (math.min(), math.max()) == (-5.219, 5.766)


def test_the_first_child_of_growth_is_as_in_the_source() -> None:
    """`egsingle` begins with a child of 3 tests, then child 273030991 of school 2020, in years -1.5 to 2.5."""
    (child,) = load_users(GROWTH, 0, ["c273030991"])
    assert child.cluster == "s2020"
    assert child.features[:, 0].tolist() == [-1.5, -0.5, 0.5, 1.5, 2.5]
    assert child.target[:2].tolist() == [-1.303, 0.439]
    with pytest.raises(ConfigError, match=r"^user 'c273026452' is not in the data"):
        load_users(GROWTH, 0, ["c273026452"])


def test_only_year_grade_and_retained_vary_within_a_child() -> None:
    columns = ("year", "grade", "retained", "female", "black", "hispanic", "size", "lowinc", "mobility")
    users = load_users(GrowthData(source="growth", feature_columns=columns, test_fraction=0), 0, None)
    varies = np.any([np.ptp(user.features, axis=0) > 0 for user in users], axis=0)
    assert [column for column, does in zip(columns, varies, strict=True) if does] == ["year", "grade", "retained"]
    by_school = {(user.cluster, *user.features[0, 6:]) for user in users}
    assert len(by_school) == 57
    features, _ = rows(users)
    assert set(features[:, 2:6].ravel()) == {0, 1}


@pytest.mark.parametrize("source", SOURCES)
def test_names_are_unique_and_heads_tell_name_cluster_and_training_rows(source: str) -> None:
    users = everyone(source)
    assert len({user.name for user in users}) == len(users)
    assert list_users(ADAPTER.validate_python({"source": source}), 0) == [
        UserHead(user.name, user.cluster, len(user.target)) for user in users
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_a_bundled_user_has_the_same_bits_whoever_else_is_loaded(source: str, tmp_path: Path) -> None:
    for chosen in (everyone(source)[3:4], everyone(source)[-9::4]):
        loaded = load_users(ADAPTER.validate_python({"source": source}), 0, [user.name for user in chosen], tmp_path)
        assert [bits(user) for user in loaded] == [bits(user) for user in chosen]


@pytest.mark.parametrize("source", SOURCES)
def test_training_and_held_out_rows_are_together_the_users_rows(source: str) -> None:
    """As multisets, so that no row is in both parts unless the table has it twice."""
    whole = load_users(ADAPTER.validate_python({"source": source, "test_fraction": 0}), 0, None)
    for user, complete in zip(everyone(source), whole, strict=True):
        train, test = (
            Counter(map(tuple, np.column_stack(part).tolist()))
            for part in ((user.features, user.target), (user.test_features, user.test_target))
        )
        assert train + test == Counter(map(tuple, np.column_stack((complete.features, complete.target)).tolist()))
        assert test.total() == int(0.2 * len(complete.target) + 0.5)  # the rule of `split`: half up


def test_schools_with_both_labels_keep_both_for_training() -> None:
    both = {user.name for user in load_users(EXAMS, 0, None) if len(set(user.target)) == 2}
    assert {user.name for user in everyone("exams") if len(set(user.target)) == 2} == both


@pytest.mark.parametrize(("make", "mean", "scale"), [(HsbData, 12.748, 6.878), (GrowthData, -0.450, 1.531)])
def test_a_standardised_target_has_mean_0_and_deviation_1_over_the_whole_table(make: Any, mean: float, scale: float) -> None:
    source = "hsb" if make is HsbData else "growth"
    plain = everyone(source)
    users = load_users(make(source=source, standardize_target=True), 0, None)
    target = np.concatenate([np.concatenate([user.target, user.test_target]) for user in users])
    assert abs(target.mean()) < 5e-4
    assert abs(target.std(ddof=1) - 1) < 5e-4
    for user, before in zip(users, plain, strict=True):
        assert user.features.tobytes() == before.features.tobytes()
        assert (user.target.tolist(), user.test_target.tolist()) == (
            ((before.target - mean) / scale).tolist(),
            ((before.test_target - mean) / scale).tolist(),
        )
        assert not user.target.flags.writeable
    chosen = load_users(make(source=source, standardize_target=True), 0, [users[5].name])
    assert [bits(user) for user in chosen] == [bits(users[5])]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "exams", "feature_columns": ["score"]}, "Input should be 'female', 'age' or 'gcsescore'"),
        ({"source": "exams", "feature_columns": ["a_or_b"]}, "Input should be 'female', 'age' or 'gcsescore'"),
        ({"source": "exams", "feature_columns": ["age", "age"]}, "feature_columns names 'age' more than once, want it once"),
        ({"source": "exams", "feature_columns": []}, "at least 1 item"),
        ({"source": "exams", "standardize_target": True}, "Extra inputs are not permitted"),  # labels are labels
        ({"source": "growth", "feature_columns": ["math"]}, "Input should be 'year', 'grade'"),
        ({"source": "growth", "feature_columns": ["year", "year"]}, "feature_columns names 'year' more than once, want it once"),
        ({"source": "growth", "test_fraction": 1}, "less than 1"),
    ],
)
def test_a_wrong_configuration_of_a_bundled_table_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        ADAPTER.validate_python(fields)


def test_every_bundled_file_is_small_reproducible_and_has_its_origin_told() -> None:
    folder = files("coterie_client.data") / "files"
    origin = (folder / "ORIGIN.md").read_text(encoding="utf-8")
    tables = [file for file in folder.iterdir() if file.name != "ORIGIN.md"]
    assert sorted(table.name for table in tables) == ["chem97.csv.gz", "egsingle.csv.gz", "hsb82.csv.gz", "school_ilea.npz"]
    for table in tables:
        content = table.read_bytes()
        assert len(content) < 100_000
        assert table.name.endswith(".npz") or content[3:8] == bytes(5), f"{table.name} has a file name or a time in its gzip header"
        assert f"# {table.name}\n" in origin


def test_ilea_has_139_schools_whose_features_are_scaled_by_their_own_training_rows() -> None:
    whole = load_users(IleaData(source="ilea", test_fraction=0, standardize_own=False), 0, None)
    assert (len(whole), sum(len(user.target) for user in whole), len(whole[0].columns)) == (139, 15_362, 28)
    features, target = rows(whole)
    assert (target.min(), target.max()) == (0, 1)
    assert features[0, :5].tolist() == [1, 0, 0, 24, 18]
    for user in everyone("ilea")[::10]:
        varies = np.ptp(user.features, axis=0) > 0
        np.testing.assert_allclose(user.features.mean(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(user.features.std(axis=0)[varies], 1)
        assert len(user.test_target) == int(0.3 * (len(user.target) + len(user.test_target)) + 0.5)
