"""Reads the users of a table, in any format: the user of each row, the columns in use, and notes on what was left out."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from coterie.errors import ConfigError
from coterie.experiment.columns import Levels
from coterie.findings import Finding, Role
from coterie.text.names import check_name, normal
from coterie.text.quoting import some
from coterie_client.data.paths import DataFile
from coterie_client.data.split import hold_out, n_test_rows
from coterie_client.data.tables.cells import Spelling
from coterie_client.data.tables.heads import (
    MOST_LISTED,
    Fault,
    Roles,
    Table,
    check_header,
    check_user_column,
    error_of,
    modes_of,
    no_rows,
    roles_of,
    same_cluster,
)
from coterie_client.data.tables.rows import Block, Codes, ColumnRows, Kept, TableFile, joined
from coterie_client.data.tables.typed import Typed, decided, typed
from coterie_client.data.users import Note, Reading, UserData, UserHead

_MOST_NAMED = 12  # columns in a note


@dataclass(frozen=True)
class Format:
    spelling: Spelling
    what: str  # places are called: "line" or "row"
    opened: Callable[[DataFile], AbstractContextManager[TableFile]]


@dataclass
class _Table:
    config: Table
    roles: Roles
    names: Collection[str] | None  # the users asked for
    kept: Kept
    clusters: dict[int, str] = field(default_factory=dict)  # by the user's code
    nameless: list[Fault] = field(default_factory=list)  # rows without user or cluster
    nameless_places: list[str] = field(default_factory=list)
    n_nameless: int = 0


def heads(config: Table, files: Sequence[DataFile], how: Format) -> list[UserHead]:
    """All users of the files. One pass that keeps no values, unless rows with missing cells are dropped."""
    if config.missing == "drop_rows":
        users = load(config, files, how, 0, None).users
        return [UserHead(user.name, user.cluster, len(user.target)) for user in users]
    table, _, _ = _read(config, files, how, None, keep_values=False)
    _check_named(table)
    heads = []
    for name, code in table.kept.users.items():
        n_rows = table.kept.counts[code]
        heads.append(UserHead(name, table.clusters.get(code), n_rows - n_test_rows(n_rows, config.test_fraction)))
    return heads


def load(config: Table, files: Sequence[DataFile], how: Format, seed: int, names: Collection[str] | None) -> Reading:
    """The users in `names` (None: all) that the files have."""
    table, label, unused = _read(config, files, how, names, keep_values=True)
    _check_named(table)
    kinds = decided(table.roles, table.kept, label, unused)
    if not table.kept.users:
        return Reading([])
    found = typed(label, config, table.roles, table.kept, kinds)
    codes = np.concatenate(table.kept.codes)[found.is_row]
    table.kept.codes.clear()
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(table.kept.users)))
    users: list[UserData] = []
    for (name, code), rows in zip(table.kept.users.items(), np.split(order, ends[:-1]), strict=True):
        if not len(rows):
            said = f"{label}: user {name!r} has 0 rows left, for all of them have missing cells: want users with rows"
            raise ConfigError(said, Finding("T12", role="user"))
        features, target = found.features[rows], found.target[rows]
        cluster = table.clusters.get(code)
        users.append(hold_out(name, cluster, features, target, test_fraction=config.test_fraction, seed=seed, schema=found.schema))
    n_dropped = int((~found.is_row).sum()) + table.n_nameless
    return Reading(users, tuple(_notes(label, table, kinds, unused, n_dropped)))


def load_rows(config: Table, roles: Roles, file: DataFile, how: Format) -> Typed:
    """The rows of all users in one file, with the columns in `roles`."""
    table, label, unused = _read(config, [file], how, None, keep_values=True, roles=roles)
    return typed(label, config, roles, table.kept, decided(roles, table.kept, label, unused))


def _notes(label: str, table: _Table, kinds: Mapping[str, str], unused: Sequence[str], n_dropped: int) -> Iterator[Note]:
    if unused:
        names = some(unused, _MOST_NAMED)
        said = f"{label}: column {names} is not used" if len(unused) == 1 else f"{label}: {len(unused)} columns are not used: {names}"
        yield Note(
            f"{said} (data.columns can say what {'it is' if len(unused) == 1 else 'they are'}, or ignore)",
            Finding("T18", count=len(unused)),
        )
    if n_dropped:
        rows = "1 row with a missing cell was dropped" if n_dropped == 1 else f"{n_dropped} rows with missing cells were dropped"
        yield Note(f"{label}: {rows}", Finding("T17", count=n_dropped))
    converted = [f"{name!r} ({kind})" for name, kind in kinds.items() if kind != "number"]
    if converted and table.roles.formula is None:
        columns = "1 column was" if len(converted) == 1 else f"{len(converted)} columns were"
        shown = ", ".join(converted[:_MOST_NAMED]) + (" ..." if len(converted) > _MOST_NAMED else "")
        yield Note(f"{label}: {columns} converted to numbers: {shown}", Finding("T19", count=len(converted)))


def _read(
    config: Table, files: Sequence[DataFile], how: Format, names: Collection[str] | None, *, keep_values: bool, roles: Roles | None = None
) -> tuple[_Table, str, list[str]]:
    """The kept rows, the table's name in messages, and the columns that are not used."""
    roles = roles_of(config) if roles is None else roles
    with how.opened(files[0]) as first:  # decides for all, even if its user is not requested: data must not depend on who is loaded
        check_user_column(files[0].label, config, per_user=files[0].user is not None)
        check_header(files[0].label, first.header, roles, first.hint)
        modes = modes_of(files[0].label, config, roles, first.header, first.known)
        if "" in modes:
            said = f"{files[0].label}: column {first.header.index('') + 1} has no name, want a name, or feature_columns to be listed"
            raise ConfigError(said, Finding("T2"))
        if not any(name != roles.target for name in modes):
            raise ConfigError(f"{files[0].label}: 0 numeric columns are left for features, want at least one", Finding("T13"))
        used = {*roles.users, *roles.clusters, *modes}
        unused = [repr(column) for column in first.header if column not in used and config.columns.get(column) != "ignore"]
    columns = {name: ColumnRows(mode) for name, mode in modes.items()} if keep_values else {}
    table = _Table(config, roles, names, Kept(columns, how.spelling, how.what, roles.named))
    needs_all = any(_is_of_all_rows(config, name, column) for name, column in columns.items())
    absent: list[tuple[str, ConfigError]] = []
    for file in files:
        is_mine = file.user is None or names is None or file.user in names
        if is_mine or needs_all:
            _read_file(file, how, table, absent, is_mine=is_mine)
    label = files[0].label if len(files) == 1 else config.path
    for column, error in absent:  # of files of this host
        found = table.kept.columns[column]
        if found.mode != "found" or found.tally.found not in ("text", "empty"):
            raise error
    return table, label, unused


def _is_of_all_rows(config: Table, name: str, column: ColumnRows) -> bool:
    """Whether cells of other users affect the column."""
    return column.mode == "found" or (column.mode == "category" and not isinstance(config.columns.get(name), Levels))


def _read_file(file: DataFile, how: Format, table: _Table, absent: list[tuple[str, ConfigError]], *, is_mine: bool) -> None:
    """Reads one file. If it holds another host's user, only its column types are read, as far as possible."""
    kept, roles = table.kept, table.roles
    try:
        with how.opened(file) as opened:
            check_header(file.label, opened.header, roles, opened.hint)
            lacking = [column for column in kept.columns if column not in opened.header]
            if lacking and not is_mine:
                return
            for column in lacking:
                said = f"{file.label}: column {column!r} is missing, found {', '.join(map(repr, opened.header))}{opened.hint}"
                absent.append((column, ConfigError(said, Finding("T2"))))
            has_rows = False
            for block in opened.blocks:
                has_rows = True
                _add_block(file, table, block, is_mine=is_mine)
            if not has_rows:
                raise no_rows(file.label, file.user)
    except ConfigError:
        if is_mine:
            raise


def _add_block(file: DataFile, table: _Table, block: Block, *, is_mine: bool) -> None:
    lines = block.lines
    if table.roles.users:
        names, at = joined([block.coded(column) for column in table.roles.users])
        firsts = np.empty(len(names), np.int64)
        firsts[at[::-1]] = lines[::-1]  # of rows with the same name the first is written last
        of_name = np.array([_user_code(file, table, parts, row) for parts, row in zip(names, firsts.tolist(), strict=True)], np.int32)
        codes = of_name[at]
    else:
        codes = np.full(len(lines), table.kept.code_of(file.user or "") if is_mine else -1, np.int32)
    is_kept = codes >= 0
    nameless = codes == -2
    if nameless.any():
        _note_nameless(file, table, "user", table.roles.users[-1], lines[nameless])
    if table.roles.clusters and is_kept.any():
        is_kept &= ~_clusters(file, table, block, codes, is_kept, lines)
    for code, n in zip(*np.unique(codes[is_kept], return_counts=True), strict=True):
        table.kept.counts[int(code)] = table.kept.counts.get(int(code), 0) + int(n)
    if table.kept.columns:
        table.kept.add(file.label, block, codes, is_kept)


def _user_code(file: DataFile, table: _Table, parts: tuple[str | None, ...], row: int) -> int:
    """The code of a user, whose first row in the block is given; -1 if not requested, -2 without a name."""
    if None in parts:
        return -2
    name = normal("/".join(map(str, parts)))
    if name in table.kept.users:
        return table.kept.users[name]
    for column, part in zip(table.roles.users, map(str, parts), strict=True):
        where = f"{file.label} {table.kept.what} {row}, column {column!r}"
        _check_part(part, where, "user", is_level=len(parts) > 1)
    return table.kept.code_of(name) if table.names is None or name in table.names else -1


def _check_part(name: str, where: str, role: Role, *, is_level: bool) -> None:
    try:
        check_name(name, where)
    except ConfigError as error:
        raise ConfigError(str(error), Finding("T10", role=role)) from None
    if is_level and "/" in name:
        raise ConfigError(f"{where}: the name {name!r} has a slash in it, which joins the levels: want none", Finding("T10", role=role))


def _clusters(file: DataFile, table: _Table, block: Block, codes: Codes, is_kept: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """(n,) mask of kept rows without a cluster. Stores each user's cluster. ConfigError if the user's rows disagree."""
    roles, names = table.roles, {code: name for name, code in table.kept.users.items()}
    labels, at = joined([block.coded(column) for column in roles.clusters])
    column = roles.clusters[-1]
    is_nameless = np.zeros(len(lines), np.bool_)
    rows = np.flatnonzero(is_kept)
    _, firsts = np.unique(codes[rows].astype(np.int64) * len(labels) + at[rows], return_index=True)
    for first in np.sort(firsts).tolist():
        row = rows[first]
        code, parts = int(codes[row]), labels[at[row]]
        where = f"{file.label} {table.kept.what} {lines[row]}"
        if None in parts:
            is_nameless |= is_kept & (codes == code) & (at == at[row])
            continue
        for part in parts:
            _check_part(str(part), f"{where}, column {column!r}", "cluster", is_level=False)
        found = normal("/".join(map(str, parts)))
        same_cluster(names[code], table.clusters.get(code), found, f"{where}, column {column!r}")
        table.clusters[code] = found
    if is_nameless.any():
        _note_nameless(file, table, "cluster", column, lines[is_nameless])
    return is_nameless


def _note_nameless(file: DataFile, table: _Table, role: Role, column: str, lines: Iterable[int]) -> None:
    listed = [f"{file.label} {table.kept.what} {line}" for line in lines]
    start = len(table.nameless_places)
    table.nameless_places += listed[:MOST_LISTED]
    first = tuple((start + number, "") for number in range(len(listed[:MOST_LISTED])))
    table.nameless.append(Fault("missing", role, column, len(listed), first))
    table.n_nameless += len(listed)


def _check_named(table: _Table) -> None:
    """ConfigError for rows without user or cluster, unless rows with missing cells are dropped."""
    if table.nameless and table.config.missing != "drop_rows":
        raise error_of(table.nameless, lambda number: table.nameless_places[number])
