"""Features and notes of a hello: what is refused, in which words, and what the parent writes down."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.experiment.features import Feature, from_plain, listed, named_columns, numbers, to_plain
from coterie.experiment.tables import CsvData
from coterie.findings import Finding
from coterie.session.failures import finding_frame, finding_of
from coterie.v1 import session_pb2
from coterie_server.session.refusal import Refusal
from coterie_server.session.schemas import MAX_FINDINGS, check_schema, schema_of, why_not

BEFORE = (Feature("ses"), Feature("sex=f", "category", "sex"), Feature("sex=m", "category", "sex"), Feature("seen", "date"))


def hello(**more: Any) -> session_pb2.Hello:
    return session_pb2.Hello(host="b", **more)


def test_named_columns_are_those_of_the_experiment() -> None:
    data = CsvData(source="csv", path="t.csv", user_column="school", target_column="score", feature_columns=("ses", "hours"))
    assert named_columns(data) == {"school", "score", "ses", "hours"}


class _Declared:
    columns = {"ses": "number"}  # noqa: RUF012
    formula = "score ~ ses + C(sector) + `hours a day`:ses"
    user_column = ["hospital", "ward"]  # noqa: RUF012


def test_columns_formulas_and_levels_of_users_name_columns() -> None:
    assert named_columns(_Declared()) >= {"ses", "score", "sector", "hours a day", "hospital", "ward"}


CASES = [
    (BEFORE[1:], "it has no feature of column 'ses'"),
    ((*BEFORE, Feature("age")), "the hosts before have no feature of column 'age'"),
    ((Feature("ses", "boolean"), *BEFORE[1:]), "column 'ses' is a boolean, the hosts before have a number"),
    ((*BEFORE[:2], BEFORE[3]), "column 'sex' has other levels: declare them in data.columns"),
    ((BEFORE[0], BEFORE[2], BEFORE[1], BEFORE[3]), "the levels of column 'sex' are in another order"),
    (BEFORE[::-1], "the levels of column 'sex' are in another order"),
]


@pytest.mark.parametrize(("found", "sentence"), CASES)
def test_a_column_that_the_experiment_names_is_named_with_what_differs(found: tuple[Feature, ...], sentence: str) -> None:
    assert why_not(found, BEFORE, {"ses", "sex", "seen", "age"}) == sentence


def test_equal_features_fit_each_other() -> None:
    assert why_not(BEFORE, BEFORE, ()) == ""


def test_another_order_names_columns_only_where_the_experiment_does() -> None:
    found, before = numbers(["b", "a"]), numbers(["a", "b"])
    assert why_not(found, before, {"a", "b"}) == (
        "its features are in another order: feature 1 is of column 'b', the hosts before have 'a'"
    )
    assert why_not(found, before, {"a"}) == (
        "its features are in another order than those of the hosts before, from feature 1 on: "
        "list data.feature_columns, or declare data.columns"
    )


MARKER = "SECRET-HEADER"


@pytest.mark.parametrize("extra", [1, 3])
def test_columns_that_the_experiment_does_not_name_are_counted_not_named(extra: int) -> None:
    more = numbers(f"{MARKER}{i}" for i in range(extra))
    here, there = why_not((*BEFORE, *more), BEFORE, {"ses"}), why_not(BEFORE, (*BEFORE, *more), {"ses"})
    assert MARKER not in here + there
    remedy = "list data.feature_columns, or declare data.columns"
    assert here == f"{extra} of its features {'is' if extra == 1 else 'are'} not those of the hosts before: {remedy}"
    assert there == f"{extra} feature{'' if extra == 1 else 's'} of the hosts before {'is' if extra == 1 else 'are'} missing: {remedy}"


def test_levels_of_cells_are_in_no_refusal() -> None:
    found = (BEFORE[0], Feature(f"sex={MARKER}", "category", "sex"), BEFORE[2], BEFORE[3])
    assert MARKER not in why_not(found, BEFORE, {"sex"}) + why_not(BEFORE, found, {"sex"})
    assert MARKER not in why_not(found, BEFORE, ()) + why_not(BEFORE, found, ())


WRONG = [
    ({"schema": [session_pb2.Feature(name="a", kind="nonsense")]}, "has a feature of kind 'nonsense'"),
    ({"schema": [session_pb2.Feature(name="a" * 1001, kind="number")]}, "longest feature name of host 'b' has 1001 characters"),
    ({"schema": [session_pb2.Feature(name="a", kind="number", column="a" * 1001)]}, "1001 characters, wanted at most 1000"),
    ({"schema": [session_pb2.Feature(name="a", kind="number")] * 2}, "two features of the same name"),
    ({"findings": [session_pb2.Finding(rule="T3")] * (MAX_FINDINGS + 1)}, "1001 notes on its data, wanted at most 1000"),
]


@pytest.mark.parametrize(("fields", "sentence"), WRONG)
def test_what_is_no_schema_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        check_schema("b", hello(**fields))


def test_a_schema_is_the_same_at_the_other_end() -> None:
    assert schema_of(hello(schema=[session_pb2.Feature(name=one.name, kind=one.kind, column=one.column) for one in BEFORE])) == BEFORE
    assert from_plain(to_plain(BEFORE)) == BEFORE


def test_a_finding_is_the_same_at_the_other_end_and_one_in_no_table_is_none() -> None:
    finding = Finding("T3", 2, "feature", "data.feature_columns[1]")
    assert finding_of(finding_frame(finding)) == finding
    for wrong in (
        {"rule": "T99999"},
        {"rule": "T3", "role": "secret"},
        {"rule": "T3", "place": "my cell!"},
        {"rule": "T3", "count": 2**63},
    ):
        assert finding_of(session_pb2.Finding(**wrong)) is None


def test_plain_numbers_are_listed_in_one_line_others_line_by_line() -> None:
    assert listed(numbers(["ses", "hours", "female"])) == ["features (3): ses, hours, female"]
    assert listed(BEFORE) == [
        "features (4):",
        "  ses    number",
        "  sex=f  category from column sex",
        "  sex=m  category from column sex",
        "  seen   date",
    ]


def test_thousands_of_features_are_listed_up_to_a_bound() -> None:
    many = numbers(f"x{i}" for i in range(1000))
    (line,) = listed(many)
    assert line.endswith("x18, x19, ... and 980 more")
    assert line.startswith("features (1,000): x0, x1")
    dates = [Feature(feature.name, "date") for feature in many]
    assert (len(listed(dates)), listed(dates)[-1]) == (22, "  ... and 980 more")
