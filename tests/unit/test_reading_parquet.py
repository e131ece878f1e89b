"""Parquet tables by the types that they declare: the features of the same table as text, to the bit."""

from __future__ import annotations

import datetime
import decimal
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie_client.data import Reading, load_users, read_users
from coterie_client.data.tables import parquet_table

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
DAYS = [datetime.date(2024, 5, 31), datetime.date(1969, 12, 31), datetime.date(2000, 2, 29), datetime.date(1970, 1, 1)]
MOMENTS = [datetime.datetime(2024, 5, 31, 12, 30, 1, 5), None, datetime.datetime(1960, 1, 1), datetime.datetime(1970, 1, 1, 6)]
COLUMNS: dict[str, Any] = {
    "user": ["a", "a", "b", "b"],
    "price": pa.array(
        [decimal.Decimal("0.10"), decimal.Decimal("-12345678901234.57"), decimal.Decimal("3.33"), None], pa.decimal128(20, 2)
    ),
    "fee": [True, False, None, True],
    "day": DAYS,
    "moment": pa.array(MOMENTS, pa.timestamp("us")),
    "sex": pa.array(["f", "m", "m", "f"]).dictionary_encode(),
    "count": pa.array([1, None, 3, 4], pa.int32()),
    "text": ["x", "y", "z", "x"],
    "list": [[1], [2], [3], [4]],
    "y": [1.5, 2.5, 3.5, 4.5],
}
DATA = {"path": "t.parquet", "user_column": "user", "target_column": "y", "missing": "mean", "columns": {"sex": {"category": ["f", "m"]}}}


def config(source: str = "parquet", **more: Any) -> Any:
    return ADAPTER.validate_python({"source": source, **DATA, **more})


def read(tmp_path: Path, table: dict[str, Any], group: int = 3, **more: Any) -> Reading:
    pq.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=group)
    return read_users(config(**more), 0, None, tmp_path)


def test_decimals_booleans_dates_dictionaries_and_nulls_are_those_of_the_same_text(tmp_path: Path) -> None:
    typed = read(tmp_path, COLUMNS)
    kinds = [(one.name, one.kind) for one in typed.users[0].schema]
    wanted = [("price", "number"), ("fee", "boolean"), ("day", "date"), ("moment", "date"), ("sex=m", "category"), ("count", "number")]
    assert kinds == wanted
    rows = (row.values() for row in pa.table(COLUMNS).to_pylist())
    lines = [",".join("" if value is None else str(value).replace(",", " ") for value in row) for row in rows]
    lines = ["user,price,fee,day,moment,sex,count,text,list,y", *lines]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = read_users(config("csv", path="t.csv", columns={**DATA["columns"], "list": "ignore", "text": "ignore"}), 0, None, tmp_path)
    for mine, other in zip(typed.users, text.users, strict=True):
        assert mine.schema == other.schema
        assert mine.features.tobytes() == other.features.tobytes()
    assert typed.users[0].features[0].tolist() == [
        0.1,
        1,
        19874,
        (MOMENTS[0] - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1),
        0,
        1,
    ]
    assert typed.notes[0].sentence.startswith("t.parquet: 2 columns are not used: 'text', 'list' (data.columns can say")


def test_nulls_are_counted_or_dropped(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^4 cells are missing: t.parquet row 2, column 'moment'; t.parquet row 2, column 'count'; t.parquet row 3"
    ):
        read(tmp_path, COLUMNS, missing="refuse")
    assert [user.features.shape for user in read(tmp_path, {**COLUMNS, "user": ["a"] * 4}, missing="drop_rows").users] == [(1, 6)]


def test_whole_numbers_and_floats_can_be_categories_and_text_can_be_numbers(tmp_path: Path) -> None:
    columns = {**COLUMNS, "text": ["1.5", "", "-2", "1e3"]}
    types = {"count": {"category": [1, 3, 4]}, "text": "number", "sex": "ignore", "list": "ignore"}
    (a, b) = read(tmp_path, columns, columns=types, feature_columns=["count", "text"], test_fraction=0).users
    assert a.columns == ("count=3", "count=4", "text")
    np.testing.assert_array_equal(a.features, [[0, 0, 1.5], [np.nan] * 3])
    np.testing.assert_array_equal(b.features, [[1, 0, -2], [0, 1, 1000]])


def test_text_that_is_no_declared_category_is_no_feature(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^t.parquet: column 'text' has type string, want numbers, dates") as caught:
        read(tmp_path, COLUMNS, feature_columns=["text"])
    assert caught.value.finding.sentence.startswith("a column that the experiment names has no type that fits (data.feature_columns[0])")


def test_names_of_columns_and_users_that_look_alike_are_the_same(tmp_path: Path) -> None:
    apart = unicodedata.normalize("NFD", "Größe")
    columns = {"user": ["é", unicodedata.normalize("NFD", "é")], apart: [1.0, 2.0]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = config(target_column=None, feature_columns=["Größe"], columns={}, test_fraction=0)
    (user,) = load_users(data, 0, None, tmp_path)
    assert (user.name, user.columns, user.features.tolist()) == ("é", ("Größe",), [[1.0], [2.0]])


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_row_group_in_many_blocks_reads_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    users = pa.chunked_array([pa.array(names).dictionary_encode() for names in (["b", "a"], ["a", "c", "b"], ["c", "c", "a"])])
    values = {"price": [decimal.Decimal(place) for place in range(8)], "fee": [True, False] * 4, "sex": list("fmmffmmf")}
    columns = {"user": users, **values, "x": [None, *range(7)], "y": np.arange(8) / 7}
    whole = read(tmp_path, columns, 8)
    monkeypatch.setattr(parquet_table, "_ROWS", rows)
    parts = read(tmp_path, columns, 8)
    assert parts.notes == whole.notes
    for mine, other in zip(parts.users, whole.users, strict=True):
        assert (mine.name, mine.schema) == (other.name, other.schema)
        np.testing.assert_array_equal(mine.features, other.features)
        np.testing.assert_array_equal(mine.target, other.target)
    columns["user"] = pa.array(["b", "a", "a", None, "b", "a", "a ", "a "])
    with pytest.raises(ConfigError, match=r"^t.parquet row 7, column 'user': the name 'a ' has spaces around it"):
        read(tmp_path, columns)
    columns["user"] = pa.array(["b", "a", "a", None, "b", "a", "a", None])
    with pytest.raises(ConfigError, match=r"^2 cells are missing: t.parquet row 4, column 'user'; t.parquet row 8, column 'user'"):
        read(tmp_path, columns)
    only = load_users(config(missing="drop_rows", test_fraction=0), 0, ["a"], tmp_path)
    np.testing.assert_array_equal(only[0].target, np.array([1, 2, 5, 6]) / 7)
