"""Shared by the table formats: column roles, rows grouped by user, and error messages.

The message for the host counts all bad cells and names the first ones; the finding for others names none.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.tables import CsvData, ParquetData, SpssData, StataData
from coterie.findings import Finding, Role
from coterie.text.names import normal
from coterie.text.quoting import quoted, some
from coterie_client.data.tables.cells import other_spelling
from coterie_client.data.tables.formula import Asked, asked_by
from coterie_client.data.tables.rows import Mode

MOST_LISTED: Final = 5
_MOST_LEVELS: Final = 10
Place = Callable[[int], str]  # position of a kept row, such as "t.csv line 5"

# For each kind: the rule, the phrase for one cell, for several, and the wanted values.
_KINDS: Final = {
    "missing": ("T4", "is missing", "are missing", "values, or data.missing: drop_rows, mean or indicator"),
    "number": ("T3", "is not a finite number", "are not finite numbers", "numbers"),
    "date": ("T5", "is not an ISO 8601 date", "are not ISO 8601 dates", "dates such as 2024-05-31"),
    "boolean": ("T6", "is not true or false", "are not true or false", "TRUE and FALSE, or 1 and 0"),
    "category": ("T7", "is not a declared level", "are not declared levels", ""),
}
_SINGLE: Final = {"missing": "a value, or data.missing: drop_rows, mean or indicator", "number": "one", "date": "one such as 2024-05-31"}
_NO_FILLING: Final = ("target", "user", "cluster")  # roles whose cells are never filled in


@dataclass(frozen=True)
class Fault:
    """Cells of one column that are wrong in the same way."""

    kind: str
    role: Role
    column: str
    count: int
    first: tuple[tuple[int, str], ...]  # row and cell text; at most MOST_LISTED
    levels: tuple[str, ...] = ()  # the allowed levels of a category


def error_of(faults: Sequence[Fault], place: Place) -> ConfigError:
    """One error for all faults."""
    total, cells = sum(fault.count for fault in faults), [(row, text, fault) for fault in faults for row, text in fault.first]
    listed = sorted(cells, key=lambda one: one[0])[:MOST_LISTED]
    row, text, fault = listed[0]
    n_here = sum(one.count for one in faults if (one.kind, one.role) == (fault.kind, fault.role))
    finding = Finding(_KINDS[fault.kind][0], count=n_here, role=fault.role)
    if total == 1:
        where = f"{place(row)}, column {fault.column!r}"
        _, is_wrong, _, wanted = _KINDS[fault.kind]
        wanted = _levels([fault]) if fault.kind == "category" else _SINGLE.get(fault.kind, wanted)
        if fault.kind == "missing" and fault.role in _NO_FILLING:
            wanted = "a value, or data.missing: drop_rows"
        cell = "the cell" if fault.kind == "missing" else text
        return ConfigError(f"{where}: {cell} {is_wrong}, want {wanted}{_hint(listed)}", finding)
    kinds = list(dict.fromkeys(one.kind for one in faults))
    counted = []
    for kind in kinds:
        n = sum(one.count for one in faults if one.kind == kind)
        counted.append(f"{n} cell{'s' if n > 1 else ''} {_KINDS[kind][1 if n == 1 else 2]}")
    places = "; ".join(f"{place(row)}, column {one.column!r}" + ("" if one.kind == "missing" else f": {text}") for row, text, one in listed)
    more = f"; and {total - len(listed)} more" if total > len(listed) else ""
    fillable = any(one.role not in _NO_FILLING for one in faults if one.kind == "missing")
    wants = {kind: _KINDS[kind][3] for kind in kinds}
    if "category" in wants:
        wants["category"] = _levels(faults)
    if "missing" in wants and not fillable:
        wants["missing"] = "values, or data.missing: drop_rows"
    wanted = "; ".join(wants.values())
    return ConfigError(f"{' and '.join(counted)}: {places}{more}; want {wanted}{_hint(listed)}", finding)


def _levels(faults: Sequence[Fault]) -> str:
    levels = next(fault.levels for fault in faults if fault.kind == "category")
    return f"{some(list(map(quoted, levels)), _MOST_LEVELS)} (data.columns)"


def _hint(listed: Sequence[tuple[int, str, Fault]]) -> str:
    for _, text, fault in listed:
        if fault.kind == "number" and (key := other_spelling(text.strip("'\""))) is not None:
            return f" ({text} would be a number with another data.csv.{key})"
    return ""


Table = CsvData | ParquetData | StataData | SpssData


@dataclass(frozen=True)
class Roles:
    users: tuple[str, ...]
    clusters: tuple[str, ...]
    target: str | None
    features: tuple[str, ...] | None  # None: all columns of numbers, booleans or dates
    formula: Asked | None = None
    declared: tuple[str, ...] = ()  # columns with a declared type, which must exist; empty if features are listed

    @property
    def named(self) -> dict[str, str]:
        """The columns that the experiment names, each with where it names them."""
        places = dict.fromkeys(self.users, "data.user_column")
        places |= {column: "data.cluster_column" for column in self.clusters if column not in self.users}
        if self.formula is not None:
            return places | dict.fromkeys(self.formula.columns, "data.formula")
        places |= {} if self.target is None else {self.target: "data.target_column"}
        places |= {column: f"data.feature_columns[{number}]" for number, column in enumerate(self.features or ())}
        return places | {column: "data.columns" for column in self.declared if column not in places}


def roles_of(config: Table) -> Roles:
    """The columns that the experiment names. ConfigError for a formula that is not allowed."""
    users = config.user_columns
    clusters = users[:-1] if config.cluster_column is None else (config.cluster_column,)
    if config.formula is not None:
        asked = asked_by(config.formula)
        if named := sorted(set(asked.columns) & (set(users) - set(clusters))):  # its levels would name all users
            sentence = f"formula {config.formula!r} has column {named[0]!r}, which names the users, want other columns there"
            raise ConfigError(sentence, Finding("T22", place="data.formula"))
        return Roles(users, clusters, asked.target, None, asked)
    declared = tuple(column for column, kind in config.columns.items() if kind != "ignore") if config.feature_columns is None else ()
    return Roles(users, clusters, config.target_column, config.feature_columns, declared=declared)


def check_header(label: str, header: Sequence[str], roles: Roles, hint: str = "") -> None:
    """ConfigError for a header that lacks a column, or repeats one. `hint` says what may be wrong with the file."""
    twice = sorted(column for column, n in Counter(header).items() if n > 1)
    if twice:
        found = f"{label}: the column name {twice[0]!r} occurs {header.count(twice[0])} times"
        raise ConfigError(f"{found}, want once", Finding("T14", count=len(twice)))
    there = set(header)
    missing = {column: place for column, place in roles.named.items() if column not in there}
    if missing:
        column, place = next(iter(missing.items()))
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        said = f"{label}: column {column!r} is missing{more}, found {', '.join(map(repr, header))}{hint}"
        raise ConfigError(said, Finding("T2", count=len(missing), place=place))


def check_user_column(label: str, config: Table, *, per_user: bool) -> None:
    """ConfigError if both the file and a column name users, or neither does."""
    finding = Finding("T16", place="data.user_column")
    if per_user and config.user_column is not None:
        found = f"{label} is the file of one user, and user_column is {config.user_column!r}"
        raise ConfigError(f"{found}, want no user_column", finding)
    if not per_user and config.user_column is None:
        raise ConfigError(f"{label}: user_column is absent, want the name of a column, or a path with one file per user", finding)


def modes_of(label: str, config: Table, roles: Roles, header: Sequence[str], known: Mapping[str, str]) -> dict[str, Mode]:
    """How each column that may be a feature or the target is read, in file order. `known` are types that the file declares."""
    others = {*roles.users, *roles.clusters}
    if roles.formula is not None:
        used: Collection[str] = roles.formula.columns
    elif roles.features is not None:
        used = {*roles.features, *([] if roles.target is None else [roles.target])}
    else:
        used = {column for column in header if column not in others}
    named = roles.named
    modes: dict[str, Mode] = {}
    for column in [*dict.fromkeys([*(roles.features or ()), *header])]:
        declared = config.columns.get(column)
        if column not in used or (declared == "ignore" and column not in named):
            continue
        if declared is not None and declared != "ignore":
            modes[column] = declared if isinstance(declared, str) else "category"
        elif roles.formula is not None and column in roles.formula.categories:
            modes[column] = "category"
        elif (kind := known.get(column)) is None:
            modes[column] = "found"
        elif kind in ("number", "boolean", "date"):
            modes[column] = kind  # type: ignore[assignment]
        elif column in roles.named:
            raise no_type(f"{label}: column {column!r} has type {kind}", roles.named[column], column)
    return modes


def no_type(found: str, place: str, column: str) -> ConfigError:
    """The error for a column that cannot be turned into numbers."""
    wanted = f"want numbers, dates, TRUE and FALSE, or a category (data.columns: {{{column}: category}})"
    return ConfigError(f"{found}, {wanted}", Finding("T15", place=place))


def same_cluster(user: str, known: str | None, found: str, where: str) -> None:
    """ConfigError if a user's rows disagree about its cluster."""
    if known is not None and known != found:
        said = f"{where}: user {user!r} has cluster {found!r} here and {known!r} before, want one per user"
        raise ConfigError(said, Finding("T11", role="cluster"))


def rows_by_user(names: NDArray[np.str_]) -> dict[str, Indices]:
    """Row numbers of each user, ascending; `names` (n,) is the user of each row. Names that normalise to the same text are one user."""
    distinct, first_code = np.unique(names, return_inverse=True)
    spelled = [normal(str(name)) for name in distinct]
    if len(set(spelled)) < len(spelled) or any(map(str.__ne__, spelled, map(str, distinct))):
        distinct, again = np.unique(np.array(spelled), return_inverse=True)
        first_code = again[first_code]
    order = np.argsort(first_code, kind="stable")
    ends = np.cumsum(np.bincount(first_code, minlength=len(distinct)))
    return {str(name): rows for name, rows in zip(distinct, np.split(order, ends[:-1]), strict=True)}


def one_cluster(user: str, labels: NDArray[np.str_], rows: Indices, where: str) -> str:
    """The cluster that all `rows` of a user agree on; `labels` (n,) is the cluster of each row. ConfigError if they disagree."""
    first, *others = dict.fromkeys(labels[rows].tolist())
    for other in others:
        row = rows[labels[rows] == other][0]
        same_cluster(user, normal(first), normal(other), f"{where} row {row + 1}")
    return normal(first)


def check_finite(values: Array, rows: Indices, columns: Sequence[str], where: str) -> None:
    """ConfigError for the first NaN or infinity in `values` (len(rows), len(columns)); `rows` count from 0."""
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0]
        said = f"{where} row {rows[row] + 1}, column {columns[column]!r}: {float(values[row, column])} is not a finite number, want one"
        raise ConfigError(said)


def no_rows(label: str, user: str | None) -> ConfigError:
    """The error for a table, or a user's file, without rows."""
    return ConfigError(f"{label} has 0 rows{f' for user {user!r}' if user else ''}, want at least one", Finding("T12"))
