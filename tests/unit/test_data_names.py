"""Natural order of user names and the `--users` selection."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.experiment.tables import CsvData
from coterie.text.names import check_name, natural_key, parse_users
from coterie_client.data import list_users
from coterie_deploy.engines.shares import divided

TABLES = Path(__file__).parent.parent / "fixtures" / "tables"
NAMES = [f"u{i}" for i in range(60)]


def test_numbers_in_names_sort_as_numbers() -> None:
    names = ["u10", "u2", "u", "v1", "u2b", "10", "9", "u02", "u1", "a1b10", "a1b9"]
    assert sorted(names, key=natural_key) == ["9", "10", "a1b9", "a1b10", "u", "u1", "u02", "u2", "u2b", "u10", "v1"]


def test_a_name_of_five_thousand_digits_has_a_place() -> None:
    assert natural_key("9" * 5000) < natural_key("1" + "0" * 5000)


@given(st.lists(st.text(alphabet="ab0129-", max_size=6), unique=True))
def test_the_natural_order_is_total_and_does_not_depend_on_the_order_given(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)
    assert len({natural_key(name) for name in names}) == len(names)


@given(st.integers(0, 10**30), st.integers(0, 10**30))
def test_the_natural_order_agrees_with_integers(a: int, b: int) -> None:
    assert (natural_key(f"u{a}") < natural_key(f"u{b}")) == (a < b)


def test_positions_names_and_ranges_are_united_in_natural_order_and_each_once() -> None:
    chosen = parse_users("u30..u32, #25,#0..#2,#1 , u2,u59", reversed(NAMES))
    assert chosen == ["u0", "u1", "u2", "u25", "u30", "u31", "u32", "u59"]


def test_positions_count_in_natural_order_not_in_the_order_given() -> None:
    assert parse_users("#1..#2", ["u10", "u2", "u1"]) == ["u2", "u10"]


def test_a_name_is_the_same_however_its_accents_are_written() -> None:
    assert parse_users("Cafe\u0301", ["Caf\u00e9", "Bar"]) == ["Caf\u00e9"]


IDS = ["3", "5", "7", "007", "12", "40"]


def test_an_experiment_and_files_spell_names_as_tables_do(tmp_path: Path) -> None:
    apart = "Cafe\u0301"
    for method in (
        {"name": "async_l2gd", "gamma": {apart: 1.0, "Bar": 2.0}, "lam": {apart: 1.0, "Bar": 2.0}, "p": {apart: 0.5, "Bar": 0.5}},
        {"name": "certify", "labels": {apart: apart, "Bar": "Bar"}},
    ):
        data = {"source": "csv", "path": "{user}.csv"}
        config = experiment_from({"name": "x", "data": data, "problem": {"loss": "least_squares"}, "method": method}).method.model_dump()
        assert {name for value in config.values() if isinstance(value, dict) for name in value} == {"Caf\u00e9", "Bar"}
    (tmp_path / f"{apart}.csv").write_text("a\n1\n")
    assert [user.name for user in list_users(CsvData(source="csv", path="{user}.csv"), 0, tmp_path)] == ["Caf\u00e9"]


def test_an_integer_is_a_name_and_a_position_has_a_sign() -> None:
    assert parse_users("7", IDS) == ["7"]
    assert parse_users("007", IDS) == ["007"]
    assert parse_users("3..12", IDS) == ["3", "5", "007", "7", "12"]
    assert parse_users("#0", IDS) == ["3"]
    assert parse_users("#3..#5,7", IDS) == ["7", "12", "40"]


def test_the_users_of_a_table_with_numbers_for_names_are_chosen_by_these_numbers() -> None:
    data = CsvData(source="csv", path="ids.csv", user_column="school", target_column="score", feature_columns=("ses",))
    names = [head.name for head in list_users(data, 0, TABLES)]
    assert set(names) == set(IDS)
    for name in names:
        assert parse_users(name, names) == [name]


def test_a_share_is_that_of_the_host_which_a_run_on_one_machine_would_start() -> None:
    for n_hosts in (1, 7, 8, 60):
        wanted = [[NAMES[place] for place in share] for share in divided(range(len(NAMES)), n_hosts)]
        assert [parse_users(f"{number}/{n_hosts}", NAMES) for number in range(1, n_hosts + 1)] == wanted
    assert parse_users("1/2", ["1/2", "a"]) == ["1/2"], "a name is meant first"


def test_names_with_hyphens_can_be_chosen_and_ranged() -> None:
    names = ["site-1", "site-2", "site-3", "x"]
    assert parse_users("site-2", names) == ["site-2"]
    assert parse_users("site-1..site-3", names) == ["site-1", "site-2", "site-3"]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("", "users '' has an empty part, want names, #positions or ranges between the commas"),
        ("u1,,u2", "users 'u1,,u2' has an empty part, want names, #positions or ranges between the commas"),
        ("#60", "users '#60' asks for position 60 of 60 users, want #0 to #59"),
        ("60", "user '60' is not in the data, want a name among its 60 users (#0 to #59)"),
        ("7", "user '7' is not in the data, want a name, or #7 for a position among its 60 users (#0 to #59)"),
        ("0..19", "the users '0..19' are not in the data, want a name, or #0..#19 for a position among its 60 users"),
        ("#3-#5", "users '#3-#5': want #3..#5 for a range"),
        ("u3-u5", "users 'u3-u5': want u3..u5 for a range"),
        ("#5..#60", "users '#5..#60' asks for position 60 of 60 users, want #0 to #59"),
        ("#5..#3", "users '#5..#3' is a range from 5 down to 3, want the first end before the last"),
        ("u5..u3", "users 'u5..u3' is a range from 5 down to 3, want the first end before the last"),
        ("u77..u3", "user 'u77' is not in the data, want one like 'u7'"),
        ("zebra", "user 'zebra' is not in the data, want one of its 60 users"),
        ("9/8", "users '9/8' is share 9 of 8 of 60 users, want I/N with I from 1 to N, and N at most 60"),
        ("0/8", "users '0/8' is share 0 of 8 of 60 users"),
        ("1/61", "users '1/61' is share 1 of 61 of 60 users"),
        ("u1..zebra", "user 'zebra' is not in the data, want one of its 60 users"),
    ],
)
def test_a_wrong_selection_says_what_is_wrong(selection: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        parse_users(selection, NAMES)


def test_at_most_three_similar_names_are_offered() -> None:
    with pytest.raises(ConfigError) as error:
        parse_users("u5x", NAMES)
    assert str(error.value).count("'u") == 4


@pytest.mark.parametrize("name", ["", " u1", "u1\n", "u\x00"])
def test_names_that_cannot_be_seen_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        check_name(name, "here")
