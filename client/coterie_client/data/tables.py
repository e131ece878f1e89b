"""What the table formats share: the roles of the columns, gathering rows by user, and the sentences of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.data import CsvData, ParquetData
from coterie.errors import ConfigError


@dataclass(frozen=True)
class Columns:
    """The columns of a table by role."""

    user: str | None
    cluster: str | None
    target: str | None
    features: tuple[str, ...]


def choose_columns(label: str, header: Sequence[str], numeric: Sequence[str], config: CsvData | ParquetData, *, per_user: bool) -> Columns:
    """The columns that `config` asks for, found in `header`; `numeric` are candidates for features where it names none."""
    _check_user_column(label, config.user_column, per_user=per_user)
    for column in sorted(set(header)):
        if header.count(column) > 1:
            raise ConfigError(f"{label}: the column name {column!r} is there {header.count(column)} times, want once")
    roles = (config.user_column, config.cluster_column, config.target_column)
    features = config.feature_columns or tuple(column for column in numeric if column not in roles)
    for wanted in (*roles, *features):
        if wanted is not None and wanted not in header:
            raise ConfigError(f"{label}: column {wanted!r} is missing, found {', '.join(map(repr, header))}")
    if not features:
        raise ConfigError(f"{label}: 0 numeric columns are left for features, want at least one")
    if "" in features:
        raise ConfigError(f"{label}: column {header.index('') + 1} has no name, want a name, or feature_columns to be listed")
    return Columns(config.user_column, config.cluster_column, config.target_column, features)


def _check_user_column(label: str, user_column: str | None, *, per_user: bool) -> None:
    if per_user and user_column is not None:
        raise ConfigError(f"{label} is the file of one user, and user_column is {user_column!r}, want no user_column")
    if not per_user and user_column is None:
        raise ConfigError(f"{label}: user_column is absent, want the name of a column, or a path with one file per user")


def same_cluster(user: str, known: str | None, found: str, where: str) -> None:
    """Raise ConfigError where a user's rows disagree about its cluster."""
    if known is not None and known != found:
        raise ConfigError(f"{where}: user {user!r} has cluster {found!r} here and {known!r} before, want one per user")


def rows_by_user(names: NDArray[np.str_]) -> dict[str, Indices]:
    """Row numbers of each user, ascending; `names` (n,) is the user of each row."""
    distinct, first_code = np.unique(names, return_inverse=True)
    order = np.argsort(first_code, kind="stable")
    ends = np.cumsum(np.bincount(first_code, minlength=len(distinct)))
    return {str(name): rows for name, rows in zip(distinct, np.split(order, ends[:-1]), strict=True)}


def one_cluster(user: str, labels: NDArray[np.str_], rows: Indices, where: str, first_row: int = 0) -> str:
    """The cluster that all `rows` of a user agree on; `labels` (n,) is the cluster of each row.

    `rows` count from 0, and messages from 1 for the row `first_row` of the file.
    """
    cluster = str(labels[rows[0]])
    for row in rows[labels[rows] != cluster][:1]:
        same_cluster(user, cluster, str(labels[row]), f"{where} row {first_row + row + 1}")
    return cluster


def check_finite(values: Array, rows: Indices, columns: Sequence[str], where: str) -> None:
    """Raise ConfigError for the first NaN or infinity in `values` (len(rows), len(columns)); `rows` count from 0."""
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0]
        raise ConfigError(
            f"{where} row {rows[row] + 1}, column {columns[column]!r}: {float(values[row, column])} is not a finite number, want one"
        )


def no_rows(label: str, user: str | None) -> ConfigError:
    """The error for a table, or a user's file, without rows."""
    return ConfigError(f"{label} has 0 rows{f' for user {user!r}' if user else ''}, want at least one")
