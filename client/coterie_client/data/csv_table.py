"""Comma-separated text, read as a stream: rows of users that were not asked for are passed over and not kept.

Such rows are checked for their number of fields and their user's name only. Their values are checked where they are
loaded, so that one user's bad row stops the host that holds this user, and no other.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coterie.data import CsvData
from coterie.errors import ConfigError
from coterie.features import numbers
from coterie.names import check_name
from coterie_client.data.paths import DataFile, data_files
from coterie_client.data.split import hold_out, n_test_rows
from coterie_client.data.tables import Columns, choose_columns, no_rows, same_cluster
from coterie_client.data.users import UserData, UserHead

_SUFFIXES = (".csv", ".csv.gz")


@dataclass
class _Rows:
    """What is kept of one user while its rows stream by."""

    columns: tuple[str, ...]  # the names of the features
    cluster: str | None = None
    n_rows: int = 0
    values: array[float] = field(default_factory=lambda: array("d"))  # rows one after the other: features, then target


def heads(config: CsvData, data_dir: Path | None) -> list[UserHead]:
    """All users of the table, in one pass that keeps no values."""
    users = _read(config, data_dir, names=None, keep_values=False)
    return [UserHead(name, rows.cluster, rows.n_rows - n_test_rows(rows.n_rows, config.test_fraction)) for name, rows in users.items()]


def load(config: CsvData, seed: int, names: Collection[str] | None, data_dir: Path | None) -> list[UserData]:
    """The users in `names` (None: all) that the table has."""
    users = _read(config, data_dir, names, keep_values=True)
    loaded = []
    for name, rows in users.items():
        table = np.frombuffer(rows.values).reshape(rows.n_rows, -1)
        features, target = (table, np.zeros(rows.n_rows)) if config.target_column is None else (table[:, :-1], table[:, -1])
        schema = numbers(rows.columns)
        loaded.append(hold_out(name, rows.cluster, features, target, test_fraction=config.test_fraction, seed=seed, schema=schema))
    return loaded


def _read(config: CsvData, data_dir: Path | None, names: Collection[str] | None, *, keep_values: bool) -> dict[str, _Rows]:
    files = data_files(config.path, data_dir, _SUFFIXES)
    # The first file decides the columns for all, also when its user is not asked for: data must not depend on who is loaded.
    columns = _columns(files[0], config)
    users: dict[str, _Rows] = {}
    for file in files:
        if file.user is None or names is None or file.user in names:
            _read_file(file, config, columns, names, users, keep_values=keep_values)
    return users


def _read_file(
    file: DataFile,
    config: CsvData,
    columns: Columns,
    names: Collection[str] | None,
    users: dict[str, _Rows],
    *,
    keep_values: bool,
) -> None:
    lines = _lines(file)
    _, header = next(lines)
    choose_columns(file.label, header, columns.features, config, per_user=file.user is not None)
    user_at, cluster_at, target_at = (
        None if name is None else header.index(name) for name in (columns.user, columns.cluster, columns.target)
    )
    values_at = [header.index(name) for name in columns.features] + ([] if target_at is None else [target_at])
    line = 0
    for line, cells in lines:
        _check_width(file, line, cells, header)
        user = file.user or ""
        if user_at is not None:
            user = cells[user_at]
            if user not in users:
                check_name(user, f"{file.label} line {line}, column {columns.user!r}")
        if names is not None and user not in names:
            continue
        rows = users.setdefault(user, _Rows(columns.features))
        rows.n_rows += 1
        if cluster_at is not None:
            _note_cluster(rows, user, cells[cluster_at], f"{file.label} line {line}, column {columns.cluster!r}")
        if keep_values:
            rows.values.extend(_numbers([cells[at] for at in values_at], file.label, line, header, values_at))
    if line == 0:
        raise no_rows(file.label, file.user)


def _check_width(file: DataFile, line: int, cells: list[str], header: list[str]) -> None:
    if len(cells) != len(header):
        raise ConfigError(f"{file.label} line {line} has {len(cells)} fields, want the {len(header)} of the header")


def _note_cluster(rows: _Rows, user: str, cluster: str, where: str) -> None:
    if rows.cluster is None:
        rows.cluster = check_name(cluster, where)
    same_cluster(user, rows.cluster, cluster, where)


def _columns(file: DataFile, config: CsvData) -> Columns:
    """The roles of the columns, by the header and the first row: a column is numeric when its first cell is a number."""
    lines = _lines(file)
    _, header = next(lines)
    numeric: list[str] = []
    if config.feature_columns is None:
        line, first = next(lines, (0, []))
        if line == 0:
            raise no_rows(file.label, file.user)
        _check_width(file, line, first, header)
        roles = (config.user_column, config.cluster_column, config.target_column)
        for name, cell in zip(header, first, strict=True):
            if name not in roles and not cell.strip():
                raise ConfigError(
                    f"{file.label} line {line}, column {name!r}: the cell is empty, want a number, or feature_columns to be listed"
                )
            if _is_number(cell):
                numeric.append(name)
    return choose_columns(file.label, header, numeric, config, per_user=file.user is not None)


def _lines(file: DataFile) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of the header and of each row; blank lines are passed over. There is at least a header."""
    opener = gzip.open if file.path.suffix == ".gz" else open
    n_lines = 0
    try:
        with opener(file.path, "rt", encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, strict=True)
            for cells in reader:
                if cells:
                    n_lines += 1
                    yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(f"{file.label} line {reader.line_num}: {error}, want comma-separated text") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.label} has the byte {error.object[error.start]:#04x} at the wrong place, want UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{file.label} cannot be read ({getattr(error, 'strerror', None) or error}), want .csv or .csv.gz text"
        ) from error
    if n_lines == 0:
        raise ConfigError(f"{file.label} is empty, want a header and rows")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def _numbers(cells: list[str], label: str, line: int, header: list[str], at: list[int]) -> list[float]:
    try:
        values = [float(cell) for cell in cells]
    except ValueError:
        values = [math.nan]
    # float() takes "1_000" for a number, the reader of a table should not.
    if all(map(math.isfinite, values)) and "_" not in "".join(cells):
        return values
    for cell, column in zip(cells, at, strict=True):
        if not _is_number(cell) or not math.isfinite(float(cell)):
            raise ConfigError(f"{label} line {line}, column {header[column]!r}: {cell!r} is not a finite number, want one")
    return values
