"""Small tables that differ from a plain one in one thing each: the values, or the sentence of the host and the finding that others hear."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie_client.data import Reading, UserData, list_users, load_users, read_users

CASES = Path(__file__).resolve().parents[1] / "fixtures" / "cases"
ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
ROLES = {"user_column": "school", "target_column": "score", "cluster_column": "region"}
WARDS = {"user_column": ["hospital", "ward"], "cluster_column": None}


def config(name: str, **more: Any) -> Any:
    return ADAPTER.validate_python({"source": "csv", "path": f"{name}.csv", **ROLES, **more})


def read(name: str, **more: Any) -> Reading:
    return read_users(config(name, **more), 0, None, CASES)


def refused(name: str, **more: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        read(name, **more)
    assert not re.search(r"SECRET|s0|0\.041|NA", caught.value.finding.sentence.replace("DATA", ""))
    return str(caught.value), caught.value.finding.sentence


def same(mine: Reading, other: Reading) -> None:
    assert [(user.name, user.cluster) for user in mine.users] == [(user.name, user.cluster) for user in other.users]
    for a, b in zip(mine.users, other.users, strict=True):
        assert a.schema == b.schema
        for part in ("features", "target", "test_features", "test_target"):
            assert getattr(a, part).tobytes() == getattr(b, part).tobytes()


def rows(user: UserData) -> set[tuple[float, ...]]:
    features = np.concatenate([user.features, user.test_features])
    return {tuple(row) for row in features.tolist()}


def test_a_plain_table_needs_no_notes() -> None:
    reading = read("plain")
    assert len(reading.users) == 6
    assert reading.users[0].columns == ("ses", "hours")
    assert reading.notes == ()


def test_a_missing_first_cell_is_counted_and_the_column_stays() -> None:
    said, heard = refused("na-first-cell")
    assert (
        said == "na-first-cell.csv line 2, column 'hours': the cell is missing, want a value, or data.missing: drop_rows, mean or indicator"
    )
    assert heard == "1 cell of a feature is missing (rule T4)"


def test_a_row_with_a_missing_cell_can_be_dropped_and_that_is_said(tmp_path: Path) -> None:
    reading = read("na-first-cell", missing="drop_rows")
    lines = (CASES / "plain.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "plain.csv").write_text("".join(lines[:1] + lines[2:]), encoding="utf-8")
    same(reading, read_users(config("plain"), 0, None, tmp_path))
    assert [note.sentence for note in reading.notes] == ["na-first-cell.csv: 1 row with a missing cell was dropped"]
    assert [note.finding.sentence for note in reading.notes] == ["1 row with a missing cell was dropped (rule T17)"]
    heads = list_users(config("na-first-cell", missing="drop_rows"), 0, CASES)
    assert [head.n_rows for head in heads] == [len(user.target) for user in reading.users]


def test_missing_cells_are_left_for_means_and_indicators_do_not_depend_on_the_rows() -> None:
    mean = read("na-first-cell", missing="mean").users
    assert sum(int(np.isnan(np.concatenate([user.features, user.test_features])).sum()) for user in mean) == 1
    marked = read("na-first-cell", missing="indicator").users
    assert marked[0].columns == ("ses", "hours", "ses is missing", "hours is missing")
    assert [feature.kind for feature in marked[0].schema] == ["number", "number", "indicator", "indicator"]
    assert sum(np.concatenate([user.features, user.test_features])[:, 2:].sum() for user in marked) == 1
    assert read("plain", missing="indicator").users[0].schema == marked[0].schema
    assert read("plain", missing="indicator", indicator_columns=["hours"]).users[0].columns == ("ses", "hours", "hours is missing")


def test_true_and_false_are_one_and_zero() -> None:
    reading = read("true-false")
    assert [(one.name, one.kind) for one in reading.users[0].schema] == [("ses", "number"), ("hours", "number"), ("fee", "boolean")]
    assert {row[2] for user in reading.users for row in rows(user)} == {0.0, 1.0}
    assert [note.sentence for note in reading.notes] == ["true-false.csv: 1 column was converted to numbers: 'fee' (boolean)"]


def test_a_decimal_comma_is_named_and_read_where_it_is_declared() -> None:
    said, heard = refused("decimal-comma")
    assert (
        said
        == "decimal-comma.csv: the header has 1 column; with ';' it would have 5: want data.csv.delimiter: ';' and data.csv.decimal: ','"
    )
    assert heard == "its data file has another format than declared (data.csv.delimiter) (rule T9)"
    said, heard = refused("decimal-comma", csv={"delimiter": ";"})
    assert said.startswith(
        "decimal-comma.csv: column 'ses': 120 cells look like numbers with a decimal comma, such as '0,041': want data.csv.decimal"
    )
    assert heard == "its data file has another format than declared (data.csv.decimal) (rule T9)"
    same(read("decimal-comma", csv={"delimiter": ";", "decimal": ","}), read("plain"))


def test_an_ignored_patient_number_gives_the_plain_table() -> None:
    assert read("patient-number").users[0].columns == ("pid", "ses", "hours")
    same(read("patient-number", columns={"pid": "ignore"}), read("plain"))


def test_names_that_look_alike_are_one_user_however_they_are_written() -> None:
    reading = read("cafe-twice")
    assert [user.name for user in reading.users] == ["Café", "s1", "s2", "s3", "s4", "s5"]
    decomposed = unicodedata.normalize("NFD", "Café")
    assert decomposed != "Café"
    assert [user.name for user in load_users(config("cafe-twice"), 0, [decomposed], CASES)] == ["Café"]


def test_a_bad_cell_is_shown_at_its_own_host_alone() -> None:
    said, heard = refused("marker")
    assert said == "marker.csv line 6, column 'ses': 'SECRET-MARKER' is not a finite number, want one"
    assert heard == "1 cell of a feature is not a number (rule T3)"


def test_a_file_without_a_header_says_so_and_can_have_names() -> None:
    said, heard = refused("headerless")
    assert said.startswith("headerless.csv: column 'school' is missing (and 2 more), found 's0', '0', '0.041'")
    assert said.endswith("the first line must be a header, or data.csv.names says what the columns are called")
    assert heard == "3 columns that the experiment names are missing (data.user_column) (rule T2)"
    same(read("headerless", csv={"names": ["school", "region", "ses", "hours", "score"]}), read("plain"))


def test_wards_of_hospitals_are_users_whose_cluster_is_the_hospital() -> None:
    reading = read("wards", **WARDS)
    assert [(user.name, user.cluster) for user in reading.users] == [(f"h{h}/w{w}", f"h{h}") for h in range(2) for w in range(3)]
    assert [note.sentence for note in reading.notes] == ["wards.csv: column 'sex' is not used (data.columns can say what it is, or ignore)"]


def test_a_category_is_a_feature_for_each_level_but_the_first() -> None:
    found = read("wards", **WARDS, columns={"sex": "category"}).users
    assert [(one.name, one.kind, one.column) for one in found[0].schema] == [("age", "number", ""), ("sex=m", "category", "sex")]
    declared = read("wards", **WARDS, columns={"sex": {"category": ["m", "f"]}}).users
    assert declared[0].columns == ("age", "sex=f")
    for mine, other in zip(found, declared, strict=True):
        assert (mine.features[:, 1] == 1 - other.features[:, 1]).all()
    said, heard = refused("wards", **WARDS, columns={"sex": {"category": ["f", "x"]}})
    assert re.match(
        r"\d+ cells are not declared levels: wards.csv line 5, column 'sex': 'm'; .*; and \d+ more; want 'f', 'x' \(data.columns\)", said
    )
    assert re.fullmatch(r"\d+ cells of a feature have undeclared levels \(rule T7\)", heard)


def test_a_formula_gives_terms_whoever_is_loaded() -> None:
    data = {**WARDS, "target_column": None, "formula": "score ~ age*C(sex) + log(age)"}
    everyone = read("wards", **data).users
    assert everyone[0].columns == ("age", "C(sex)[T.m]", "log(age)", "age:C(sex)[T.m]")
    assert {one.kind for one in everyone[0].schema} == {"term"}
    assert (everyone[0].features[:, 3] == everyone[0].features[:, 0] * everyone[0].features[:, 1]).all()
    (alone,) = load_users(config("wards", **data), 0, ["h1/w2"], CASES)
    assert alone.features.tobytes() == everyone[-1].features.tobytes()
    assert alone.target.tobytes() == everyone[-1].target.tobytes()


@pytest.mark.parametrize(
    "formula", ["score ~ age + I(age**2.5)", "score ~ (age + C(sex))**2", "score ~ C(sex)/age", "score ~ I(age**2 / 3 + 2*age*age*age)"]
)
def test_a_formula_of_usual_size_is_read(formula: str) -> None:
    assert read("wards", **WARDS, target_column=None, formula=formula).users[0].columns


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("score ~ center(age)", "has center(), which depends on the rows of a host"),
        ("score ~ scale(age)", "has scale(), which depends on the rows of a host"),
        ("score ~ bs(age, df=3)", "has bs(), which depends on the rows of a host"),
        ("score ~ age + {__import__('os').getcwd()}", "has __import__('os').getcwd(), want C() or one of"),
        ("score ~ np.log(age)", "has np.log(), want C() or one of"),
        ("score ~ {age.__class__}", "has age.__class__, want columns"),
        ("score ~ I(9**9**9)", "has the power"),
        ("score ~ C(age, levels=[1])", "want C(column)"),
        ("score ~ score + age", "has the target 'score' on its right side"),
        ("score + age ~ sex", "has another left side than one column"),
        ("score ~ age +* sex", "cannot be read"),
        ("score ~ log(age - 1000)", "is no finite number in"),
        ("score ~ 1", "has no column on its right side"),
        (f"score ~ ({' + '.join('abcdefghijklmnopqrstuvw')})**8", "may have too many terms"),
        (f"score ~ {'*'.join('abcdefghijklmnopqrstuvw')}", "may have too many terms"),
        ("score ~ (age + sex)**2**2**2**2**2**2", "may have too many terms"),
        ("score ~ (age + sex)**999", "has the power"),
    ],
)
def test_a_formula_that_hosts_would_not_agree_on_or_that_is_code_is_refused(formula: str, said: str) -> None:
    sentence, heard = refused("wards", **WARDS, target_column=None, formula=formula)
    assert said in sentence
    assert heard == "the formula cannot be used (data.formula) (rule T22)"


def test_a_formula_has_no_column_that_names_the_users() -> None:
    sentence, heard = refused("wards", **WARDS, target_column=None, formula="score ~ age + C(ward)")
    assert "has column 'ward', which names the users" in sentence
    assert heard == "the formula cannot be used (data.formula) (rule T22)"


def new_rows(tmp_path: Path, text: str, features: tuple[str, ...], **more: Any) -> Any:
    from coterie_client.data.new_rows import read_new_rows

    (tmp_path / "new.csv").write_text(text, encoding="utf-8")
    return read_new_rows(config("wards", **{**WARDS, **more}), tmp_path / "new.csv", features)


def test_new_rows_are_read_by_the_types_dialect_and_levels_of_the_run(tmp_path: Path) -> None:
    more = {"columns": {"sex": {"category": ["f", "m"]}, "seen": "date"}, "csv": {"delimiter": ";", "decimal": ","}}
    read = new_rows(tmp_path, "seen;sex;age;note\n1970-01-03;m;1,5;x\n1970-01-02;f;2;y\n", ("age", "sex=m", "seen"), **more)
    assert read.features.tolist() == [[1.5, 1, 2], [2, 0, 1]]
    assert read.header == ("seen", "sex", "age", "note")
    assert read.cells[0] == ["1970-01-03", "m", "1,5", "x"]
    with pytest.raises(ConfigError, match=r"new.csv line 2, column 'sex': 'q' is not a declared level"):
        new_rows(tmp_path, "sex;age\nq;1\n", ("age", "sex=m"), **{**more, "columns": {"sex": {"category": ["f", "m"]}}})


def test_new_rows_have_the_levels_of_the_model_where_none_were_declared(tmp_path: Path) -> None:
    more = {"columns": {"sex": "category"}}
    read = new_rows(tmp_path, "age,sex\n1,m\n2,x\n", ("age", "sex=f", "sex=m"), **more)
    assert read.features.tolist() == [[1, 0, 1], [2, 0, 0]]
    with pytest.raises(ConfigError, match=r"column 'sex' has the levels 'x', 'y', which the model has no features for"):
        new_rows(tmp_path, "age,sex\n1,y\n2,x\n", ("age", "sex=f", "sex=m"), **more)


def test_new_rows_of_a_formula_need_no_target_and_a_single_row_has_all_terms(tmp_path: Path) -> None:
    data = {**WARDS, "target_column": None, "formula": "score ~ age*C(sex)", "columns": {"sex": {"category": ["f", "m"]}}}
    features = read("wards", **data).users[0].columns
    assert new_rows(tmp_path, "sex,age\nm,3\n", features, **data).features.tolist() == [[3, 1, 3]]
    assert new_rows(tmp_path, "sex,age\nm,3\n", features, **{**data, "columns": {}}).features.tolist() == [[3, 1, 3]]


def test_a_missing_cell_of_a_new_row_is_refused_or_left_for_the_means_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"new.csv line 3, column 'age': the cell is missing \(and cells of 1 more rows\), want a value"):
        new_rows(tmp_path, "age\n1\nNA\nNA\n2\n", ("age",))
    assert np.isnan(new_rows(tmp_path, "age\n1\nNA\n", ("age",), missing="mean").features).tolist() == [[False], [True]]
    marked = new_rows(tmp_path, "age\n1\nNA\n", ("age", "age is missing"), missing="indicator").features
    assert marked[:, 1].tolist() == [0, 1]


def test_the_schema_of_a_table_reads_it_as_it_says(tmp_path: Path) -> None:
    import yaml

    from coterie_deploy.cli.data_schema import schema_of

    text = schema_of(CASES / "decimal-comma.csv")
    section = yaml.safe_load(text)["data"]
    assert section["csv"] == {"delimiter": ";", "decimal": ","}
    assert section["columns"]["ses"] == "number"
    assert section["columns"]["school"] == {"category": [f"s{number}" for number in range(6)]}
    users = load_users(ADAPTER.validate_python({**section, "target_column": "score", "cluster_column": "region"}), 0, None)
    assert [user.features.tobytes() for user in users] == [user.features.tobytes() for user in read("plain").users]
    assert "pid: ignore  # as many values as rows: likely an identifier" in schema_of(CASES / "patient-number.csv")
    assert "fee: boolean" in schema_of(CASES / "true-false.csv")
    assert "hours: number  # 1 of 120 cells are missing" in schema_of(CASES / "na-first-cell.csv")
    (tmp_path / "t.csv").write_text(
        "user;x;d\na;1.234,5;2020-01-02\nb;2,5;2020-01-03\na;3,5;2020-01-03\nb;4,5;2020-01-03\n", encoding="cp1252"
    )
    assert yaml.safe_load(schema_of(tmp_path / "t.csv"))["data"]["csv"] == {"delimiter": ";", "decimal": ",", "thousands": "."}


def small(tmp_path: Path, text: str, **more: Any) -> Reading:
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    fields = {"source": "csv", "path": "t.csv", "user_column": "u", "test_fraction": 0, **more}
    return read_users(ADAPTER.validate_python(fields), 0, None, tmp_path)


def test_a_declared_column_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^t.csv: column 'sess' is missing, found 'u', 'ses'$") as caught:
        small(tmp_path, "u,ses\na,1\n", columns={"sess": "number"})
    assert caught.value.finding.sentence == "a column that the experiment names is missing (data.columns) (rule T2)"
    assert len(small(tmp_path, "u,ses\na,1\n", columns={"id": "ignore"}).users) == 1


def test_a_column_that_is_partly_numbers_says_how_many(tmp_path: Path) -> None:
    (note,) = small(tmp_path, "u,x,z\na,1,1\na,low,2\na,3,3\na,high,4\n").notes
    assert note.sentence == "t.csv: column 'x' (2 of 4 cells are numbers) is not used (data.columns can say what it is, or ignore)"
    with pytest.raises(ConfigError, match=r"0 numeric columns are left for features \(not used: 'x' \(2 of 4 cells are numbers\)\)"):
        small(tmp_path, "u,x\na,1\na,low\na,3\na,high\n")


def test_a_lone_letter_is_no_boolean_but_both_letters_are(tmp_path: Path) -> None:
    assert small(tmp_path, "u,sex,x\na,F,1\na,F,2\n").users[0].columns == ("x",)
    assert small(tmp_path, "u,won,x\na,F,1\na,T,2\n").users[0].features.tolist() == [[0, 1], [1, 2]]


def test_a_number_can_mean_missing_and_na_can_be_a_name(tmp_path: Path) -> None:
    assert np.isnan(small(tmp_path, "u,x\na,-9\na,9\n", missing="mean", csv={"missing": ["-9"]}).users[0].features[0, 0])
    with pytest.raises(ConfigError, match=r"^t.csv line 2, column 'u': the cell is missing, want a value, or data.missing: drop_rows$"):
        small(tmp_path, "u,x\nNA,1\n")
    assert small(tmp_path, "u,x\nNA,1\n", csv={"missing": [""]}).users[0].name == "NA"


def test_a_user_without_rows_left_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^t.csv: user 'a' has 0 rows left, for all of them have missing cells") as caught:
        small(tmp_path, "u,x\na,NA\nb,2\n", missing="drop_rows")
    assert caught.value.finding.rule == "T12"


def test_at_most_five_of_many_bad_cells_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    rows = "".join(f"a,bad{number},no\n" if number % 10 == 0 else f"a,{number},{number}\n" for number in range(200))
    with pytest.raises(ConfigError) as caught:
        small(tmp_path, "u,x,y\n" + rows, target_column="y")
    said = str(caught.value)
    assert said.startswith(
        "40 cells are not finite numbers: t.csv line 2, column 'x': 'bad0'; t.csv line 2, column 'y': 'no'; t.csv line 12"
    )
    assert said.endswith("; and 35 more; want numbers")
    assert said.count(" line ") == 5
    assert caught.value.finding.sentence == "20 cells of a feature are not numbers (rule T3)"


def test_types_do_not_depend_on_who_is_loaded_with_a_file_for_each_user(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    for name, cell in (("a", "TRUE"), ("b", "3"), ("c", "FALSE")):
        (tmp_path / "f" / f"{name}.csv").write_text(f"x,z\n1,{cell}\n", encoding="utf-8")
    data = ADAPTER.validate_python({"source": "csv", "path": "f"})
    assert [user.columns for user in load_users(data, 0, None, tmp_path)] == [("x",)] * 3
    assert [user.columns for user in load_users(data, 0, ["a"], tmp_path)] == [("x",)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"csv": {"delimiter": ".", "decimal": ","}, "columns": {"x": {"category": ["a"]}}}, "at least 2 items"),
        ({"columns": {"x": {"category": [True, False]}}}, "write it in quotes"),
        ({"columns": {"x": {"category": ["a", "a"]}}}, "want each once"),
        ({"csv": {"decimal": ",", "thousands": ","}}, "are both ',', want two signs"),
        ({"csv": {"encoding": "klingon"}}, "encoding is 'klingon', want a known one"),
        ({"csv": {"encoding": "rot13"}}, "encoding is 'rot13', want a known one"),
        ({"csv": {"delimiter": "ab"}}, "at most 1 character"),
        ({"formula": "y ~ x", "target_column": "y"}, "formula and target_column are both given"),
        ({"formula": "y + x"}, "want a target, a tilde and terms"),
        ({"formula": "y ~ x", "missing": "mean"}, "want refuse or drop_rows"),
        ({"indicator_columns": ["x"]}, "want missing: indicator"),
        ({"user_column": ["a"]}, "at least 2 items"),
        ({"target_column": "y", "columns": {"y": "ignore"}}, "columns says to ignore it"),
    ],
)
def test_a_wrong_data_section_of_a_table_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ADAPTER.validate_python({"source": "csv", "path": "t.csv", "user_column": "u", **fields})


def test_a_frame_with_the_columns_of_the_table_gives_the_features_of_its_file() -> None:
    import pandas as pd
    import polars as pl

    from coterie_client.data.new_rows import frame_rows, read_new_rows

    data = config("wards", **WARDS, columns={"sex": {"category": ["f", "m"]}})
    from_file = read_new_rows(data, CASES / "wards.csv", ("age", "sex=m")).features
    for library in (pd, pl):
        frame = library.read_csv(CASES / "wards.csv")
        assert frame_rows(data, frame, ("age", "sex=m")).features.tobytes() == from_file.tobytes()


def test_the_schema_of_an_experiment_keeps_what_it_declares(tmp_path: Path) -> None:
    import yaml

    from coterie_deploy.cli.data_schema import schema_of_data

    lines = [f"s{i % 3};{i};{i % 2};{'low' if i % 2 else 'high'};{i / 4:g};{i}".replace(".", ",") for i in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["ward;number;score;dose;age;note", *lines]) + "\n")
    section = {
        "source": "csv", "path": "t.csv", "user_column": "ward", "target_column": "score", "feature_columns": ["number", "dose"],
        "test_fraction": 0.25, "csv": {"delimiter": ";", "decimal": ","}, "columns": {"dose": {"category": ["low", "high"]}},
    }  # fmt: skip
    text = schema_of_data(ADAPTER.validate_python(section), tmp_path)
    found = yaml.safe_load(text)["data"]
    assert {key: value for key, value in found.items() if key != "columns"} == {
        key: value for key, value in section.items() if key != "columns"
    }
    # The user column needs no type, and a column with a role is never ignored, whatever it looks like.
    assert found["columns"] == {"score": "number", "dose": {"category": ["low", "high"]}, "age": "number", "note": "ignore"}
    assert "    # number: ignore  # as many values as rows: likely an identifier" in text
    assert load_users(ADAPTER.validate_python(found), 0, None, tmp_path)[0].features.shape == (3, 2)


def test_the_schema_of_a_table_says_how_dates_have_to_be_written(tmp_path: Path) -> None:
    from coterie_deploy.cli.data_schema import schema_of

    (tmp_path / "t.csv").write_text("day;score\n" + "".join(f"{i % 28 + 1:02}.03.2024;{i % 9}\n" for i in range(60)))
    assert "day: ignore  # dates must be written like 2024-01-31" in schema_of(tmp_path / "t.csv")
