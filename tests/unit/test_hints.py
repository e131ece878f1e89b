"""Features that look like identifiers are pointed out, and covariates are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.arrays import Array
from coterie.experiment.data import HsbData
from coterie.experiment.features import Feature, named_columns, numbers
from coterie.experiment.tables import CsvData
from coterie_client.data import UserData, load_users
from coterie_client.data.hints import likely_identifiers, unlike_sizes

TABLES = Path(__file__).parent.parent / "fixtures" / "tables"


def user(name: str, *columns: list[float], schema: tuple[Feature, ...] = ()) -> UserData:
    rows: Array = np.array(columns, dtype=np.float64).T
    held_out = rows[:1]
    names = schema or numbers(f"x{i}" for i in range(len(columns)))
    return UserData(name, None, rows[1:], np.zeros(len(rows) - 1), held_out, np.zeros(1), names)


def test_a_patient_number_is_pointed_out_and_counted_without_its_name() -> None:
    data = CsvData(source="csv", path="patient-number.csv", user_column="school", target_column="score", cluster_column="region")
    users = load_users(data, 0, None, TABLES)
    (note,) = likely_identifiers(users, named_columns(data))
    assert note.sentence == (
        "column 'pid' has a different whole number in every row: is it an identifier? "
        "list data.feature_columns, or declare it ignore in data.columns"
    )
    assert (note.finding.rule, note.finding.count, note.finding.role) == ("T40", 1, "feature")
    assert note.finding.sentence == (
        "a feature that is not declared has a different whole number in every row, as an identifier has (rule T40)"
    )


def test_a_feature_that_the_experiment_names_is_meant() -> None:
    data = CsvData(source="csv", path="patient-number.csv", user_column="school", target_column="score", feature_columns=("pid", "ses"))
    assert likely_identifiers(load_users(data, 0, None, TABLES), named_columns(data)) == []


def test_a_code_of_the_user_is_pointed_out() -> None:
    users = [user(f"u{i}", [100.0 + 7 * i] * 6, list(np.arange(6) / 3)) for i in range(4)]
    (note,) = likely_identifiers(users, ())
    assert note.sentence.startswith("column 'x0' is one whole number in all rows of a user: is it an identifier of users?")
    assert note.finding.rule == "T41"


def test_several_are_in_one_note() -> None:
    users = [user(f"u{i}", *([100.0 + 7 * i + k] * 6 for k in range(7))) for i in range(4)]
    (note,) = likely_identifiers(users, ())
    assert note.sentence.startswith("columns 'x0', 'x1', 'x2', 'x3', 'x4' and 2 more are one whole number")
    assert note.finding.count == 7


COVARIATES = {
    "a yes or no of the user": [[float(i % 2)] * 6 for i in range(4)],
    "a mean of the user": [[0.25 + i] * 6 for i in range(4)],
    "a count that repeats": [[float(k % 3) for k in range(6)] for _ in range(4)],
    "measurements": [[k + i / 10 + 0.05 for k in range(6)] for i in range(4)],
}


@pytest.mark.parametrize("columns", COVARIATES.values(), ids=COVARIATES)
def test_a_covariate_is_not_pointed_out(columns: list[list[float]]) -> None:
    assert likely_identifiers([user(f"u{i}", column) for i, column in enumerate(columns)], ()) == []


def test_few_rows_are_not_looked_at() -> None:
    assert likely_identifiers([user("a", [1.0, 2.0, 3.0]), user("b", [4.0, 5.0, 6.0])], ()) == []


def test_a_number_that_repeats_after_thousands_of_rows_is_none() -> None:
    values = [float(i) for i in range(3000)]
    assert len(likely_identifiers([user("a", values)], ())) == 1
    assert likely_identifiers([user("a", [*values, 2999.0])], ()) == []


def test_dates_and_booleans_are_not_looked_at() -> None:
    schema = (Feature("seen", "date"),)
    assert likely_identifiers([user("a", [float(i) for i in range(30)], schema=schema)], ()) == []


def test_the_schools_of_high_school_and_beyond_give_no_hints() -> None:
    data = HsbData(source="hsb")
    assert likely_identifiers(load_users(data, 0, None), named_columns(data)) == []


def test_features_of_very_different_sizes_are_pointed_out() -> None:
    days, ages = [19_723.0 + k for k in range(9)], [40.0 + k for k in range(9)]
    (note,) = unlike_sizes([user("a", days, ages)])
    assert note.sentence == (
        "features are of very different sizes ('x0' about 1e4 and 'x1' about 1e1, the intercept 1): models may have few right digits; "
        "want data.standardize: true"
    )
    assert (note.finding.rule, note.finding.count) == ("T42", 2)
    assert len(unlike_sizes([user("a", [4e-9 * age for age in ages])])) == 1


def test_features_of_like_sizes_or_without_effect_are_not() -> None:
    assert unlike_sizes([user("a", [9.0 * k for k in range(9)], [0.0] * 9, [float("nan"), *[0.01] * 8])]) == []
    assert unlike_sizes([]) == []
