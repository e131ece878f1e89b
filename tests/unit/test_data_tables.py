"""The table readers: CSV, Parquet and NumPy archives, their agreement, their walls, and every sentence of their errors."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie.experiment.tables import CsvData
from coterie.findings import Finding
from coterie_client.data import UserData, UserHead, list_users, load_users

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)

TABLE = """user,group,x,y,label
u2,b,1.5,-2,1
u10,a,3,4.25,-1
u2,b,0.1,1e-3,-1
u1,a,7,8,1
u2,b,5,6,1
u10,a,9,10,1
u2,b,11,12,-1
u2,b,13,14,-1
"""


def config(source: str = "csv", path: str = "t.csv", **more: Any) -> Any:
    columns = {"user_column": "user", "target_column": "label", "cluster_column": "group"}
    chosen = {key: value for key, value in (columns | more).items() if value is not None}
    return ADAPTER.validate_python({"source": source, "path": path, **chosen})


def write(folder: Path, text: str = TABLE, name: str = "t.csv") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")


def write_parquet(folder: Path, text: str = TABLE, name: str = "t.parquet", **more: Any) -> None:
    header, *rows = (line.split(",") for line in text.splitlines())
    columns: dict[str, Any] = dict(zip(header, zip(*rows, strict=True), strict=True))
    table = {k: list(v) if k in ("user", "group") else [float(cell) for cell in v] for k, v in columns.items()}
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), folder / name, row_group_size=more.get("row_group_size", 3))


def same(a: UserData, b: UserData) -> None:
    assert (a.name, a.cluster) == (b.name, b.cluster)
    for part in ("features", "target", "test_features", "test_target"):
        mine, other = getattr(a, part), getattr(b, part)
        assert mine.shape == other.shape
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", ["policy.yaml", "policy.key", "accepted.json", "pseudonyms.key", "a.pseudonyms.json"])
@pytest.mark.parametrize("pattern", [False, True], ids=["by name", "by pattern"])
def test_the_clients_own_files_are_no_data(name: str, pattern: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text("user,x\nSECRET,1\n")
    path, column = (f"{{user}}.{name.rpartition('.')[2]}", None) if pattern else (name, "user")
    data = CsvData(source="csv", path=path, user_column=column, target_column="x")
    with pytest.raises(ConfigError, match="is a file of the client itself, want one with data") as caught:
        load_users(data, 0, None, tmp_path)
    assert caught.value.finding.sentence == Finding("D2", place="data.path").sentence


def test_a_table_gives_its_users_in_natural_order_with_their_rows_in_file_order(tmp_path: Path) -> None:
    write(tmp_path)
    users = load_users(config(test_fraction=0), 0, None, tmp_path)
    assert [(user.name, user.cluster, len(user.features)) for user in users] == [("u1", "a", 1), ("u2", "b", 5), ("u10", "a", 2)]
    assert users[1].features.tolist() == [[1.5, -2], [0.1, 0.001], [5, 6], [11, 12], [13, 14]]
    assert users[1].target.tolist() == [1, -1, 1, -1, -1]
    assert users[1].test_features.shape == (0, 2)
    assert not users[1].features.flags.writeable


def test_heads_tell_the_number_of_training_rows_of_every_source(tmp_path: Path) -> None:
    write(tmp_path)
    write_parquet(tmp_path)
    for data in (config(test_fraction=0.4), config("parquet", "t.parquet", test_fraction=0.4)):
        heads = list_users(data, 0, tmp_path)
        assert heads == [UserHead("u1", "a", 1), UserHead("u2", "b", 3), UserHead("u10", "a", 2)]
        assert [head.n_rows for head in heads] == [len(user.features) for user in load_users(data, 0, None, tmp_path)]


def test_csv_gzip_parquet_npz_and_one_file_per_user_agree_to_the_bit(tmp_path: Path) -> None:
    write(tmp_path)
    write_parquet(tmp_path)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    header, *rows = TABLE.splitlines()
    cells = [row.split(",") for row in rows]
    np.savez(
        tmp_path / "t.npz",
        features=np.array([[float(c[2]), float(c[3])] for c in cells]),
        target=np.array([int(c[4]) for c in cells]),
        user=np.array([c[0] for c in cells]),
        group=np.array([c[1] for c in cells]),
    )
    for user in {c[0] for c in cells}:
        text = "\n".join([header, *(row for row in rows if row.startswith(user + ","))]) + "\n"
        text = "\n".join(line.split(",", 1)[1] for line in text.splitlines()) + "\n"
        write(tmp_path, text, f"users/{user}.csv")
        write_parquet(tmp_path, text, f"folders/{user}/rows.parquet", row_group_size=1)
    expected = load_users(config(), 3, None, tmp_path)
    npz = ADAPTER.validate_python({"source": "npz", "path": "t.npz", "cluster": "group"})
    others = [
        config(path="t.csv.gz"),
        config("parquet", "t.parquet"),
        config("parquet", "folders/{user}/rows.parquet", user_column=None),
        config(path="users/{user}.csv", user_column=None),
        config(path="users", user_column=None),
        config(feature_columns=("x", "y")),
        npz,
    ]
    for other in others:
        found = load_users(other, 3, None, tmp_path)
        assert len(found) == len(expected) == 3
        for mine, theirs in zip(found, expected, strict=True):
            same(mine, theirs)
        assert list_users(other, 3, tmp_path) == list_users(config(), 3, tmp_path)


def test_many_interleaved_rows_stay_in_file_order_in_every_format(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    owner, x = draws.integers(0, 7, 3000), draws.normal(size=3000)
    write(tmp_path, "user,x,label\n" + "".join(f"{u},{float(v)!r},{i}\n" for i, (u, v) in enumerate(zip(owner, x, strict=True))))
    pq.write_table(pa.table({"user": owner, "x": x, "label": np.arange(3000)}), tmp_path / "t.parquet", row_group_size=700)
    np.savez(tmp_path / "t.npz", user=owner, features=x[:, np.newaxis], target=np.arange(3000))
    csv_users, parquet_users = (load_users(config(s, f"t.{s}", cluster_column=None), 0, None, tmp_path) for s in ("csv", "parquet"))
    npz_users = load_users(ADAPTER.validate_python({"source": "npz", "path": "t.npz"}), 0, None, tmp_path)
    assert len(csv_users) == 7
    for a, b, c in zip(csv_users, parquet_users, npz_users, strict=True):
        same(a, b)
        same(a, c)
        assert (np.diff(a.target) > 0).all()


def test_a_user_has_the_same_data_whichever_users_are_loaded(tmp_path: Path) -> None:
    write(tmp_path)
    everyone = {user.name: user for user in load_users(config(), 1, None, tmp_path)}
    for names in (["u2"], ["u10", "u2"], ["u10", "u1", "u10"], []):
        some = load_users(config(), 1, names, tmp_path)
        assert [user.name for user in some] == [name for name in everyone if name in names]
        for user in some:
            same(user, everyone[user.name])


def test_only_ones_own_rows_are_kept_in_memory(tmp_path: Path) -> None:
    rows = "".join(f"other{i % 50},g,{i},{i},1\n" for i in range(100_000))
    write(tmp_path, TABLE + rows)
    tracemalloc.start()
    users = load_users(config(), 0, ["u1"], tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [user.name for user in users] == ["u1"]
    assert peak_bytes < 100_000 * 3 * 8 / 2


def test_the_values_of_other_users_are_not_checked_but_their_own_host_finds_them(tmp_path: Path) -> None:
    write(tmp_path, TABLE + "u3,c,poison,1,1\n")
    assert len(load_users(config(), 0, ["u1", "u2"], tmp_path)) == 2
    assert [head.name for head in list_users(config(), 0, tmp_path)] == ["u1", "u2", "u3", "u10"]
    with pytest.raises(ConfigError, match=r"^t.csv line 10, column 'x': 'poison' is not a finite number, want one$"):
        load_users(config(), 0, ["u3"], tmp_path)


def test_without_a_target_all_targets_are_zero(tmp_path: Path) -> None:
    write(tmp_path)
    (user,) = load_users(config(target_column=None, test_fraction=0), 0, ["u1"], tmp_path)
    assert user.features.tolist() == [[7, 8, 1]]
    assert user.target.tolist() == [0]


def test_text_columns_are_no_features_and_all_rows_decide_whoever_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, "user,note,x\nu1,hello,1\nu2,5,2\n")
    data = config(target_column=None, cluster_column=None)
    assert [user.features.tolist() for user in load_users(data, 0, ["u2"], tmp_path)] == [[[2]]]


def test_quotes_blank_lines_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'\xef\xbb\xbfuser,x\r\n"a, b",1\r\n\r\n"a, b",2\r\n\r\n')
    (user,) = load_users(config(target_column=None, cluster_column=None, test_fraction=0), 0, None, tmp_path)
    assert (user.name, user.features.tolist()) == ("a, b", [[1], [2]])


def test_feature_columns_come_in_the_order_of_the_configuration(tmp_path: Path) -> None:
    write(tmp_path)
    (user,) = load_users(config(feature_columns=("y", "x")), 0, ["u1"], tmp_path)
    assert user.features.tolist() == [[8, 7]]


CSV_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "t.csv is empty, want a header and rows"),
    ("user,group,x,label\n", {}, "t.csv has 0 rows, want at least one"),
    ("user,group,x,label\n", {"feature_columns": ("x",)}, "t.csv has 0 rows, want at least one"),
    (
        TABLE + "u1,a,nan,1,1\n",
        {},
        "t.csv line 10, column 'x': the cell is missing, want a value, or data.missing: drop_rows, mean or indicator",
    ),
    (TABLE + "u1,a,1,-inf,1\n", {}, "t.csv line 10, column 'y': '-inf' is not a finite number, want one"),
    (TABLE + "u1,a,1,1,yes\n", {}, "t.csv line 10, column 'label': 'yes' is not a finite number, want one"),
    (
        TABLE + "u1,a,1,,1\n",
        {},
        "t.csv line 10, column 'y': the cell is missing, want a value, or data.missing: drop_rows, mean or indicator",
    ),
    (TABLE + "u1,a,1,1_0,1\n", {}, "t.csv line 10, column 'y': '1_0' is not a finite number, want one"),
    (TABLE + "u1,a,1e999,1,1\n", {}, "t.csv line 10, column 'x': '1e999' is not a finite number, want one"),
    (TABLE + "u1,a,1,1\n", {}, "t.csv line 10 has 4 fields, want the 5 of the header"),
    (TABLE + "u1,a,1,1,1,1\n", {}, "t.csv line 10 has 6 fields, want the 5 of the header"),
    ("user,group,x,label\nu1,a,1\n", {}, "t.csv line 2 has 3 fields, want the 4 of the header"),
    (TABLE + ",a,1,1,1\n", {}, "t.csv line 10, column 'user': the cell is missing, want a value, or data.missing: drop_rows"),
    (TABLE + "u1 ,a,1,1,1\n", {}, "t.csv line 10, column 'user': the name 'u1 ' has spaces around it"),
    (TABLE + "u1,b,1,1,1\n", {}, "t.csv line 10, column 'group': user 'u1' has cluster 'b' here and 'a' before, want one per user"),
    (TABLE + "u4,,1,1,1\n", {}, "t.csv line 10, column 'group': the cell is missing, want a value, or data.missing: drop_rows"),
    (TABLE, {"user_column": None}, "t.csv: user_column is absent, want the name of a column, or a path with one file per user"),
    (TABLE, {"user_column": "who"}, "t.csv: column 'who' is missing, found 'user', 'group', 'x', 'y', 'label'"),
    (TABLE, {"target_column": "z"}, "t.csv: column 'z' is missing, found"),
    (TABLE, {"cluster_column": "z"}, "t.csv: column 'z' is missing, found"),
    (TABLE, {"feature_columns": ("x", "z")}, "t.csv: column 'z' is missing, found"),
    (TABLE, {"feature_columns": ("x",), "target_column": "y", "user_column": "x2"}, "t.csv: column 'x2' is missing, found"),
    ("user,group,x,x,label\nu1,a,1,2,1\n", {}, "t.csv: the column name 'x' occurs 2 times, want once"),
    ("user,group,x,label\nu1,a,b,1\n", {}, "t.csv: 0 numeric columns are left for features (not used: 'x'), want at least one"),
    ("user,group,x,,label\nu1,a,1,7,1\n", {}, "t.csv: column 4 has no name, want a name, or feature_columns to be listed"),
    ("user,group,x,label\nu1,a,,1\n", {}, "t.csv: 0 numeric columns are left for features (not used: 'x'), want at least one"),
    ('user,group,x,label\nu1,a,"1,1\n', {}, "t.csv line 2: unexpected end of data, want text in columns between ','"),
]


@pytest.mark.parametrize(("text", "more", "message"), CSV_ERRORS)
def test_a_wrong_text_table_is_refused_with_one_sentence(tmp_path: Path, text: str, more: dict[str, Any], message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load_users(config(**more), 0, None, tmp_path)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"user,x\nu\xff,1\n")
    with pytest.raises(ConfigError, match=r"^t.csv line 2 has the byte 0xff at the wrong place, want UTF-8, or data.csv.encoding$"):
        load_users(config(), 0, None, tmp_path)
    for content in (b"user,x\n", gzip.compress(TABLE.encode())[:-20]):
        (tmp_path / "t.csv.gz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^t.csv.gz cannot be read \(.*\), want .csv or .csv.gz text$"):
            load_users(config(path="t.csv.gz"), 0, None, tmp_path)


def test_one_file_per_user_has_its_own_errors(tmp_path: Path) -> None:
    data = config(path="users/{user}.csv", user_column=None, cluster_column=None)
    with pytest.raises(ConfigError, match=r"^data folder 'users' is missing, want a folder with one file per user$"):
        list_users(data, 0, tmp_path)
    (tmp_path / "users").mkdir()
    with pytest.raises(ConfigError, match=r"^data path 'users/{user}.csv' matches 0 files, want one file per user$"):
        list_users(data, 0, tmp_path)
    write(tmp_path, "x,label\n1,1\n", "users/a.csv")
    write(tmp_path, "x,label\n", "users/b.csv")
    write(tmp_path, "z,label\n1,1\n", "users/c.csv")
    write(tmp_path, "never read", "users/.hidden.csv")
    assert [user.name for user in load_users(data, 0, ["a"], tmp_path)] == ["a"]
    with pytest.raises(ConfigError, match=r"^users/b.csv has 0 rows for user 'b', want at least one$"):
        load_users(data, 0, ["a", "b"], tmp_path)
    with pytest.raises(ConfigError, match=r"^users/c.csv: column 'x' is missing, found 'z', 'label'$"):
        load_users(data, 0, ["c"], tmp_path)
    write(tmp_path, "x,label\n1,1\n", "users/a.csv.gz")
    with pytest.raises(ConfigError, match=r"^user 'a' has the files 'users/a.csv' and 'users/a.csv.gz', want one$"):
        load_users(config(path="users", user_column=None), 0, None, tmp_path)
    write(tmp_path, "x,user\n1,u\n", "more/a.csv")
    with pytest.raises(ConfigError, match=r"^more/a.csv is the file of one user, and user_column is 'user', want no user_column$"):
        load_users(config(path="more"), 0, None, tmp_path)


def test_an_unknown_user_is_named_with_similar_ones(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"^user 'u3' is not in the data, want one like 'u2', 'u1'$"):
        load_users(config(), 0, ["u1", "u3"], tmp_path)


@pytest.mark.parametrize("source", ["csv", "parquet", "npz"])
def test_no_path_leaves_the_data_folder(tmp_path: Path, source: str) -> None:
    inside, outside = tmp_path / "in", tmp_path / "in2"  # a name that begins like the folder's
    write(outside, TABLE, f"t.{source}")
    write(inside, TABLE, "users/u1.csv")
    os.symlink(outside / f"t.{source}", inside / f"link.{source}")
    os.symlink(outside, inside / "linked")

    def data(path: str) -> Any:
        if source == "npz":
            return ADAPTER.validate_python({"source": "npz", "path": path})
        return config(source, path)

    for path in (f"../in2/t.{source}", str(outside / f"t.{source}"), f"link.{source}", f"linked/t.{source}", f"users/../../in2/t.{source}"):
        for question in (lambda path: list_users(data(path), 0, inside), lambda path: load_users(data(path), 0, None, inside)):
            with pytest.raises(ConfigError, match=f"^data path {re.escape(repr(path))} leaves the data folder, want a path inside it$"):
                question(path)


def test_a_pattern_does_not_follow_links_out_of_the_data_folder(tmp_path: Path) -> None:
    write(tmp_path, "x\n1\n", "out/secret.csv")
    write(tmp_path, "x\n1\n", "in/users/u1.csv")
    os.symlink(tmp_path / "out/secret.csv", tmp_path / "in/users/u2.csv")
    os.symlink(tmp_path / "out", tmp_path / "in/far")
    for path in ("users/{user}.csv", "users", "far/{user}.csv", "far", "../out/{user}.csv"):
        data = config(path=path, user_column=None, target_column=None, cluster_column=None)
        with pytest.raises(ConfigError, match="leaves the data folder"):
            load_users(data, 0, None, tmp_path / "in")


def test_paths_inside_the_data_folder_are_allowed_however_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, TABLE, "deep/t.csv")
    os.symlink(tmp_path / "deep/t.csv", tmp_path / "link.csv")
    for path in ("deep/../deep/t.csv", str(tmp_path / "deep/t.csv"), "link.csv"):
        assert len(list_users(config(path=path), 0, tmp_path)) == 3
    monkeypatch.chdir(tmp_path / "deep")
    for path in ("t.csv", "../link.csv", str(tmp_path / "deep/t.csv")):
        assert len(list_users(config(path=path), 0)) == 3


def test_paths_that_are_no_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data file 't.csv' is missing, want a readable file$"):
        list_users(config(), 0, tmp_path)
    with pytest.raises(ConfigError, match=r"^data folder '.*gone' is missing, want an existing folder$"):
        list_users(config(), 0, tmp_path / "gone")
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=r"^data file 't.csv' is not a regular file, want a readable file$"):
        list_users(config(), 0, tmp_path)
    os.symlink("b", tmp_path / "a")
    os.symlink("a", tmp_path / "b")
    for path in ("a", "x" * 3000):
        with pytest.raises(ConfigError, match=f"^data (path|file) '{path}' "):
            list_users(config(path=path), 0, tmp_path)


def _table(**columns: Any) -> Callable[[Path], None]:
    whole = {"user": ["u1", "u1"], "group": ["a", "a"], "x": [1.0, 2.0], "label": [1.0, -1.0]} | columns
    return lambda folder: pq.write_table(pa.table({k: v for k, v in whole.items() if v is not None}), folder / "t.parquet")


PARQUET_ERRORS: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [
    (lambda folder: (folder / "t.parquet").write_text("no"), {}, "t.parquet cannot be read ("),
    (lambda _: None, {}, "data file 't.parquet' is missing, want a readable file"),
    (_table(x=[1.0, None]), {}, "t.parquet row 2, column 'x': the cell is missing, want a value, or data.missing"),
    (_table(x=[1, None]), {}, "t.parquet row 2, column 'x': the cell is missing, want a value, or data.missing"),
    (_table(x=[1.0, float("nan")]), {}, "t.parquet row 2, column 'x': the cell is missing, want a value"),
    (_table(x=[-float("inf"), 1.0]), {}, "t.parquet row 1, column 'x': -inf is not a finite number, want one"),
    (_table(x=["a", "b"]), {"feature_columns": ("x",)}, "t.parquet: column 'x' has type string, want numbers"),
    (_table(x=["a", "b"]), {}, "t.parquet: 0 numeric columns are left for features, want at least one"),
    (_table(user=[1.0, 2.0]), {}, "t.parquet, column 'user' has type double, want integers or text"),
    (_table(user=["u1", None]), {}, "t.parquet row 2, column 'user': the cell is missing, want a value, or data.missing: drop_rows"),
    (_table(user=["u1", ""]), {}, "t.parquet row 2, column 'user': the cell is missing, want a value"),
    (_table(group=["a", "b"]), {}, "t.parquet row 2, column 'group': user 'u1' has cluster 'b' here and 'a' before, want one per user"),
    (_table(group=["a", None]), {}, "t.parquet row 2, column 'group': the cell is missing, want a value"),
    (_table(user=None), {}, "t.parquet: column 'user' is missing, found 'group', 'x', 'label'"),
    (_table(), {"user_column": None}, "t.parquet: user_column is absent"),
    (_table(**{k: pa.array([], pa.float64()) for k in ("user", "group", "x", "label")}), {}, "t.parquet has 0 rows, want at least one"),
]


@pytest.mark.parametrize(("make", "more", "message"), PARQUET_ERRORS)
def test_a_wrong_parquet_table_is_refused_with_one_sentence(
    tmp_path: Path, make: Callable[[Path], Any], more: dict[str, Any], message: str
) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load_users(config("parquet", "t.parquet", **more), 0, None, tmp_path)


def test_parquet_users_may_be_integers_and_dictionaries_and_clusters_agree_across_row_groups(tmp_path: Path) -> None:
    table = pa.table({"user": [10, 2, 2], "group": pa.array(["a", "b", "b"]).dictionary_encode(), "x": pa.array([1, 2, 3], pa.int8())})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    users = load_users(config("parquet", "t.parquet", target_column=None, test_fraction=0), 0, None, tmp_path)
    assert [(user.name, user.cluster, user.features.tolist()) for user in users] == [("2", "b", [[2], [3]]), ("10", "a", [[1]])]
    write_parquet(tmp_path, TABLE + "u1,z,1,1,1\n")
    with pytest.raises(ConfigError, match=r"^t.parquet row 9, column 'group': user 'u1' has cluster 'z' here and 'a' before"):
        list_users(config("parquet", "t.parquet"), 0, tmp_path)


def test_parquet_rows_are_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    write_parquet(tmp_path, TABLE + "u7,a,nan,1,1\nu8,a,1,1,1\nu8,b,1,1,1\nu9,a,1,1,1\n", row_group_size=6)
    data = config("parquet", "t.parquet")
    with pytest.raises(ConfigError, match=r"^t.parquet row 9, column 'x': the cell is missing"):
        load_users(data, 0, ["u7"], tmp_path)
    with pytest.raises(ConfigError, match=r"^t.parquet row 11, column 'group': user 'u8' has cluster 'b' here and 'a' before"):
        load_users(data, 0, ["u8"], tmp_path)


def test_parquet_values_of_other_users_are_not_checked(tmp_path: Path) -> None:
    _table(user=["u1", "u2"], x=[1.0, None], group=["a", None])(tmp_path)
    data = config("parquet", "t.parquet")
    assert [user.features.tolist() for user in load_users(data, 0, ["u1"], tmp_path)] == [[[1]]]
    with pytest.raises(ConfigError, match=r"row 2"):
        load_users(data, 0, ["u2"], tmp_path)


def test_parquet_row_groups_without_ones_users_are_not_read_but_for_the_user_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path, row_group_size=1)
    read: list[tuple[int, str]] = []
    original = pq.ParquetFile.iter_batches

    def counted(self: Any, size: int, groups: list[int], columns: list[str], **more: Any) -> Any:
        read.extend((group, column) for group in groups for column in columns)
        return original(self, size, groups, columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    load_users(config("parquet", "t.parquet", feature_columns=("x",)), 0, ["u1"], tmp_path)
    assert [what for what in read if what[1] != "user"] == [(3, "group"), (3, "x"), (3, "label")]


def test_reading_parquet_without_nulls_imports_no_pandas(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    code = f"""
import sys
from tests.unit.test_data_tables import config, load_users
sys.modules.pop("pandas", None)
load_users(config("parquet", {str(tmp_path / "t.parquet")!r}), 0, None)
assert "pandas" not in sys.modules, "pandas takes 40 MB of each host"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"^t.parquet, a Parquet file, needs pyarrow, which is not installed: pip install 'coterie\[data\]'$"
    ):
        list_users(config("parquet", "t.parquet"), 0, tmp_path)


GOOD = {"features": np.ones((2, 1)), "target": np.ones(2), "user": np.array(["a", "b"]), "group": np.array(["g", "h"])}
NPZ_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"features": np.array([[1.0], [np.nan]])}, "t.npz row 2, column 'features[:, 0]': nan is not a finite number, want one"),
    ({"target": np.array([np.inf, 1])}, "t.npz row 1, column 'target': inf is not a finite number, want one"),
    ({"features": np.ones(2)}, "t.npz: array 'features' has shape (2,), want (2, p), or more axes"),
    ({"features": np.ones((3, 1))}, "t.npz: array 'features' has shape (3, 1), want (2, p), or more axes"),
    ({"features": np.ones((2, 0))}, "t.npz: array 'features' has shape (2, 0), want at least one column"),
    ({"features": np.array([["x"], ["y"]])}, "t.npz: array 'features' has dtype <U1, want integers or floating-point numbers"),
    ({"features": np.array([[object()]])}, "t.npz: array 'features' cannot be read ("),
    ({"target": np.ones((2, 1))}, "t.npz: array 'target' has shape (2, 1), want (2,)"),
    ({"target": np.ones(3)}, "t.npz: array 'target' has shape (3,), want (2,)"),
    ({"target": None}, "t.npz: array 'target' is missing, found 'features', 'user', 'group'"),
    ({"user": np.ones(2)}, "t.npz: array 'user' has dtype float64, want integers or text"),
    ({"user": np.ones((2, 1), int)}, "t.npz: array 'user' has shape (2, 1), want (n,)"),
    ({"user": np.array(["a", ""])}, "t.npz row 2, array 'user': the name is empty"),
    ({"user": np.array(["a", "a"])}, "t.npz row 2: user 'a' has cluster 'h' here and 'g' before, want one per user"),
    ({"group": np.array([1, 2, 3])}, "t.npz: array 'group' has shape (3,), want (2,)"),
    (
        {"user": np.array([], int), "features": np.ones((0, 1)), "target": np.ones(0), "group": np.array([], int)},
        "t.npz has 0 rows, want at least one",
    ),
]


@pytest.mark.parametrize(("arrays", "message"), NPZ_ERRORS)
def test_a_wrong_archive_is_refused_with_one_sentence(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "t.npz", **{name: array for name, array in (GOOD | arrays).items() if array is not None})
    data = ADAPTER.validate_python({"source": "npz", "path": "t.npz", "cluster": "group"})
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load_users(data, 0, None, tmp_path)


def test_files_that_are_no_archives_are_refused(tmp_path: Path) -> None:
    data = ADAPTER.validate_python({"source": "npz", "path": "t.npz"})
    with pytest.raises(ConfigError, match=r"^data file 't.npz' is missing"):
        list_users(data, 0, tmp_path)
    for content in (b"", b"text", b"PK\x03\x04broken"):
        (tmp_path / "t.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^t.npz cannot be read \(.*\), want an .npz archive of arrays$"):
            list_users(data, 0, tmp_path)
    with (tmp_path / "t.npz").open("wb") as file:
        np.save(file, np.ones(2))
    with pytest.raises(ConfigError, match=r"^t.npz is a single array, want an .npz archive of named arrays$"):
        list_users(data, 0, tmp_path)


def test_an_archive_with_integer_users_and_no_target_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", features=np.array([[1], [2], [3]], np.float32), user=np.array([10, 2, 10]))
    data = ADAPTER.validate_python({"source": "npz", "path": "t.npz", "target": None, "test_fraction": 0})
    users = load_users(data, 0, ["10"], tmp_path)
    assert [(u.name, u.cluster, u.features.tolist(), u.target.tolist()) for u in users] == [("10", None, [[1], [3]], [0, 0])]
    assert list_users(data, 0, tmp_path) == [UserHead("2", None, 1), UserHead("10", None, 2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "csv", "path": "a/{user}.csv", "user_column": "u"}, "names the user, and user_column 'u' names it again"),
        ({"source": "csv", "path": "{user}/{user}.csv"}, "has 2 places for {user}, want at most one"),
        ({"source": "csv", "path": "a", "user_column": "u", "feature_columns": ["u"]}, "column 'u' is in user_column and again in feature"),
        ({"source": "csv", "path": "a", "target_column": "t", "feature_columns": ["t"]}, "column 't' is in target_column and again"),
        ({"source": "csv", "path": "a", "feature_columns": ["x", "x"]}, "column 'x' is in feature_columns and again in feature_columns"),
        ({"source": "csv", "path": "a", "feature_columns": []}, "at least 1 item"),
        ({"source": "csv", "path": "a\x00b"}, "should match pattern"),
        ({"source": "csv", "path": "a", "test_fraction": 1}, "less than 1"),
        ({"source": "csv", "path": "a", "test_fraction": -0.1}, "greater than or equal to 0"),
        ({"source": "csv", "path": "a", "test_fraction": float("nan")}, "finite number"),
        ({"source": "csv", "path": "a", "colour": 1}, "Extra inputs are not permitted"),
        ({"source": "ellipses", "test_fraction": 0.2}, "Extra inputs are not permitted"),
        ({"source": "ellipses", "rows_per_user": 1}, "greater than or equal to 2"),
        ({"source": "ellipses", "rows_per_user": 201}, "rows_per_user is 201, want at most the 200 points"),
        ({"source": "hsb", "feature_columns": ["mAch"]}, "Input should be 'minority'"),
        ({"source": "hsb", "feature_columns": ["ses", "ses"]}, "feature_columns names 'ses' more than once"),
        ({"source": "python", "path": "module.function"}, "data source 'module.function' is unknown: want an import path"),
        ({"source": "python", "path": "m:f", "options": {"x": object()}}, "JSON"),
        ({"source": "excel"}, "does not match any of the expected tags"),
    ],
)
def test_a_wrong_configuration_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        ADAPTER.validate_python(fields)


def test_configurations_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().path = "other.csv"


def test_importing_the_data_package_imports_no_heavy_library() -> None:
    heavy = "('pyarrow', 'pandas', 'scipy', 'torch', 'grpc', 'vl_convert')"
    code = f"import sys, coterie_client.data; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_archives_of_single_users_have_test_rows_of_their_own_without_their_names(tmp_path: Path) -> None:
    content = {"source": "npz", "path": "{user}/rows.npz", "test_features": "more", "test_target": "truth"}
    for name in ("ann", "bob"):
        (tmp_path / name).mkdir()
        arrays = {"features": np.ones((3, 2)), "target": np.ones(3), "more": np.zeros((2, 2)), "truth": np.zeros(2)}
        np.savez(tmp_path / name / "rows.npz", **arrays)
    users = load_users(ADAPTER.validate_python(content), 0, None, tmp_path)
    assert [(user.name, len(user.target), user.test_target.tolist()) for user in users] == [("ann", 3, [0, 0]), ("bob", 3, [0, 0])]
    with pytest.raises(ValidationError, match="test_user is missing, want the users of these rows, or one archive per user"):
        ADAPTER.validate_python({**content, "path": "rows.npz"})
