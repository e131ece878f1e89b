"""Parquet files through pyarrow, by row group: of the columns in use, the rows of the users that were asked for.

As with text, rows of other users are checked for their user's name only. Types decide which columns are numeric: integers and
floating-point numbers. pyarrow is imported here, on first use, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.data import ParquetData
from coterie.errors import ConfigError
from coterie.features import numbers
from coterie.names import check_name
from coterie_client.data.paths import DataFile, data_files
from coterie_client.data.split import hold_out, n_test_rows
from coterie_client.data.tables import (
    Columns,
    check_finite,
    choose_columns,
    no_rows,
    one_cluster,
    rows_by_user,
    same_cluster,
)
from coterie_client.data.users import UserData, UserHead


@dataclass
class _Rows:
    """What is kept of one user while its row groups stream by."""

    columns: tuple[str, ...]  # the names of the features
    cluster: str | None = None
    n_rows: int = 0
    blocks: list[Array] = field(default_factory=list)  # (rows of one group, p or p + 1), the target last


def heads(config: ParquetData, data_dir: Path | None) -> list[UserHead]:
    """All users of the files; only the columns of user and cluster are read."""
    users = _read(config, data_dir, names=None, keep_values=False)
    return [UserHead(name, rows.cluster, rows.n_rows - n_test_rows(rows.n_rows, config.test_fraction)) for name, rows in users.items()]


def load(config: ParquetData, seed: int, names: Collection[str] | None, data_dir: Path | None) -> list[UserData]:
    """The users in `names` (None: all) that the files have."""
    loaded = []
    for name, rows in _read(config, data_dir, names, keep_values=True).items():
        table = np.concatenate(rows.blocks)
        features, target = (table, np.zeros(len(table))) if config.target_column is None else (table[:, :-1], table[:, -1])
        schema = numbers(rows.columns)
        loaded.append(hold_out(name, rows.cluster, features, target, test_fraction=config.test_fraction, seed=seed, schema=schema))
    return loaded


def _read(config: ParquetData, data_dir: Path | None, names: Collection[str] | None, *, keep_values: bool) -> dict[str, _Rows]:
    files = data_files(config.path, data_dir, (".parquet",))
    with _opened(files[0]) as first:
        columns = _columns(files[0], first.schema_arrow, config)
    users: dict[str, _Rows] = {}
    for file in files:
        if file.user is None or names is None or file.user in names:
            with _opened(file) as table:
                _read_file(file, table, config, columns, names, users, keep_values=keep_values)
    return users


def _read_file(
    file: DataFile,
    table: Any,  # pyarrow.parquet.ParquetFile
    config: ParquetData,
    columns: Columns,
    names: Collection[str] | None,
    users: dict[str, _Rows],
    *,
    keep_values: bool,
) -> None:
    schema = table.schema_arrow
    choose_columns(file.label, schema.names, columns.features, config, per_user=file.user is not None)
    value_columns = [*columns.features] + ([] if columns.target is None else [columns.target])
    for column in value_columns:
        if not _is_number(file, schema.field(column).type):
            raise ConfigError(f"{file.label}, column {column!r} has type {schema.field(column).type}, want numbers")
    if table.metadata.num_rows == 0:
        raise no_rows(file.label, file.user)
    for start, group, n_rows in _groups(table):
        of_row = _user_of_rows(file, table, group, n_rows, start, columns)
        mine = {name: rows for name, rows in rows_by_user(of_row).items() if names is None or name in names}
        if not mine:
            continue
        clusters = None
        if columns.cluster is not None:
            clusters = _text(file, table, group, columns.cluster, start, np.concatenate(list(mine.values())))
        values = _values(file, table, group, value_columns, mine, start) if keep_values else {}
        for name, at in mine.items():
            rows = users.setdefault(name, _Rows(columns.features))
            rows.n_rows += len(at)
            if clusters is not None:
                found = one_cluster(name, clusters, at, file.label, first_row=start)
                same_cluster(name, rows.cluster, found, f"{file.label} row {start + at[0] + 1}")
                rows.cluster = check_name(found, f"{file.label} row {start + at[0] + 1}, column {columns.cluster!r}")
            if keep_values:
                rows.blocks.append(values[name])


def _groups(table: Any) -> Iterator[tuple[int, int, int]]:
    """First row (from 0), number and size of each row group that is not empty."""
    start = 0
    for group in range(table.num_row_groups):
        n_rows = table.metadata.row_group(group).num_rows
        if n_rows:
            yield start, group, n_rows
        start += n_rows


def _user_of_rows(file: DataFile, table: Any, group: int, n_rows: int, start: int, columns: Columns) -> NDArray[np.str_]:
    if columns.user is None:
        return np.full(n_rows, file.user)
    of_row = _text(file, table, group, columns.user, start)
    for name, at in rows_by_user(of_row).items():
        check_name(name, f"{file.label} row {start + at[0] + 1}, column {columns.user!r}")
    return of_row


def _text(file: DataFile, table: Any, group: int, column: str, start: int, rows: Indices | None = None) -> NDArray[np.str_]:
    """One column of names or labels, integers or text, as text; empty cells matter in `rows` only (None: in all)."""
    pa, _ = _pyarrow(file.label)
    values = table.read_row_group(group, columns=[column]).column(column)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ConfigError(f"{file.label}, column {column!r} has type {values.type}, want integers or text")
    _check_no_null(file, values, column, start, rows)
    return np.array([str(value) for value in values.to_pylist()])


def _values(file: DataFile, table: Any, group: int, columns: list[str], mine: dict[str, Indices], start: int) -> dict[str, Array]:
    """The rows of each user in `mine` (name -> rows of the group), (rows, len(columns))."""
    block = table.read_row_group(group, columns=columns)
    wanted = np.sort(np.concatenate(list(mine.values())))
    for column in columns:
        _check_no_null(file, block.column(column), column, start, wanted)
    filled = np.column_stack([block.column(column).to_numpy().astype(np.float64, copy=False) for column in columns])
    check_finite(filled[wanted], wanted + start, columns, file.label)
    return {name: filled[at] for name, at in mine.items()}


def _check_no_null(file: DataFile, values: Any, column: str, start: int, rows: Indices | None) -> None:
    if values.null_count == 0:
        return
    missing = np.flatnonzero(values.is_null().to_numpy())
    for row in missing if rows is None else np.intersect1d(missing, rows):
        raise ConfigError(f"{file.label} row {start + row + 1}, column {column!r} is empty (null), want a value")


def _columns(file: DataFile, schema: Any, config: ParquetData) -> Columns:
    numeric = [field.name for field in schema if _is_number(file, field.type)]
    return choose_columns(file.label, schema.names, numeric, config, per_user=file.user is not None)


def _is_number(file: DataFile, kind: Any) -> bool:
    pa, _ = _pyarrow(file.label)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


@contextmanager
def _opened(file: DataFile) -> Iterator[Any]:
    """The file as a pyarrow.parquet.ParquetFile; damage found while it is read is a ConfigError."""
    pa, pq = _pyarrow(file.label)
    try:
        with pq.ParquetFile(file.path) as table:
            yield table
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file.label} cannot be read ({error}), want a Parquet file") from error


def _pyarrow(label: str) -> tuple[Any, Any]:
    # Imported late: tens of megabytes that a client without Parquet files must not pay, and an optional dependency.
    try:
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f'{label} is a Parquet file and pyarrow is not installed, want `pip install "coterie[data]"`') from error
    return pa, pq
