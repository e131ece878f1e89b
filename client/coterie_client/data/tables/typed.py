"""Turns the kept cells of a table into features and targets.

Missing cells are refused, or dropped with their rows, or left as NaN for means that the members agree on (`missing: mean` or `indicator`).
Rows keep the order of their file. A category becomes one feature per level, except for the first level, the reference.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.columns import Levels
from coterie.experiment.features import Feature
from coterie.findings import Finding, Role
from coterie.text.quoting import quoted
from coterie_client.data.tables import formula
from coterie_client.data.tables.cells import Spelling, day, truth
from coterie_client.data.tables.heads import MOST_LISTED, Fault, Roles, Table, error_of, no_type
from coterie_client.data.tables.rows import Chunk, Kept

MOST_LEVELS: Final = 10_000  # of a category


@dataclass(frozen=True)
class Column:
    """A column of the kept rows: numbers, NaN if missing; for a category the index of the level, -1 if missing."""

    name: str
    kind: str  # number, boolean, date or category
    values: NDArray[Any]  # float64, or int32 of a category
    levels: tuple[str, ...] = ()

    @property
    def is_missing(self) -> NDArray[np.bool_]:
        """(n,) mask of missing values."""
        is_missing: NDArray[np.bool_] = self.values == -1 if self.kind == "category" else np.isnan(self.values)
        return is_missing


@dataclass(frozen=True)
class Typed:
    """Kept rows as numbers."""

    features: Array  # (n, p)
    target: Array  # (n,)
    schema: tuple[Feature, ...]
    is_row: NDArray[np.bool_]  # (kept rows,) mask of the n rows


def decided(roles: Roles, kept: Kept, label: str, unused: list[str]) -> dict[str, str]:
    """The kind of each used column. Columns that are not numeric are added to `unused`, unless the experiment names them."""
    kinds: dict[str, str] = {}
    for name, column in kept.columns.items():
        if column.mode != "found":
            kinds[name] = column.mode
            continue
        found = column.tally.found
        if (key := column.tally.respelled) is not None:
            n, what = column.tally.spelled.total(), "a decimal comma" if key == "decimal" else "a thousands sign"
            looks = "1 cell looks like a number" if n == 1 else f"{n} cells look like numbers"
            said = f"{label}: column {name!r}: {looks} with {what}, such as {quoted(column.tally.example)}"
            wanted = f"want data.csv.{key}, or data.columns to say what the column is"
            raise ConfigError(f"{said}: {wanted}", Finding("T9", place=f"data.csv.{key}"))
        if name in roles.named:
            if found == "text":
                raise no_type(f"{label}: column {name!r} is text", roles.named[name], name)
            kinds[name] = "number" if found == "empty" else found
        elif found in ("text", "empty"):
            n = column.tally.kinds["number"]
            unused.append(f"{name!r} ({n} of {column.tally.n_present} cells are numbers)" if n else repr(name))
        else:
            kinds[name] = found
    if roles.features is None and roles.formula is None and not any(name != roles.target for name in kinds):
        why = f" (not used: {', '.join(unused[:MOST_LISTED])})" if unused else ""
        raise ConfigError(f"{label}: 0 numeric columns are left for features{why}, want at least one", Finding("T13"))
    return kinds


def typed(label: str, config: Table, roles: Roles, kept: Kept, kinds: dict[str, str]) -> Typed:
    """The kept rows as numbers. ConfigError that counts all bad cells."""
    faults: list[Fault] = []
    columns = {}
    for name, kind in kinds.items():
        role: Role = "target" if name == roles.target else "feature"
        columns[name] = (
            _category(label, config, name, role, kept, faults) if kind == "category" else _numbers(name, kind, role, kept, faults)
        )
    is_row = np.ones(kept.n_rows, np.bool_)
    fills = config.missing in ("mean", "indicator")
    for name, column in columns.items():
        if fills and name != roles.target:
            continue
        is_missing = column.is_missing
        if not is_missing.any():
            continue
        if config.missing == "drop_rows":
            is_row &= ~is_missing
        else:
            at = np.flatnonzero(is_missing)
            role = "target" if name == roles.target else "feature"
            faults.append(Fault("missing", role, name, len(at), tuple((int(row), "") for row in at[:MOST_LISTED])))
    if faults:
        raise error_of(faults, lambda row: f"{kept.place(row)[0]} {kept.what} {kept.place(row)[1]}")
    if not is_row.all():
        columns = {name: Column(name, one.kind, one.values[is_row], one.levels) for name, one in columns.items()}
    n = int(is_row.sum())
    target = np.zeros(n) if roles.target is None else columns[roles.target].values.astype(np.float64)
    schema, features = _features(config, roles, columns, n)
    return Typed(features, target, schema, is_row)


def _features(config: Table, roles: Roles, columns: dict[str, Column], n: int) -> tuple[tuple[Feature, ...], Array]:
    """The features (n, p) and their descriptions."""
    if roles.formula is not None:
        assert config.formula is not None  # noqa: S101 - roles come from it
        numbers = {name: column.values for name, column in columns.items() if column.kind != "category"}
        categories = {name: (column.levels, column.values) for name, column in columns.items() if column.kind == "category"}
        return formula.terms(config.formula, numbers, categories)
    used = [column for name, column in columns.items() if name != roles.target]
    schema = schema_of(config, used)
    features = np.empty((n, len(schema)))
    for place, values in enumerate(_encoded(config, used)):
        features[:, place] = values
    return schema, features


def schema_of(config: Table, columns: Sequence[Column]) -> tuple[Feature, ...]:
    """The descriptions of these columns' features."""
    features: list[Feature] = []
    for column in columns:
        if column.kind == "category":
            features += [Feature(f"{column.name}={level}", "category", column.name) for level in column.levels[1:]]
        else:
            features.append(Feature(column.name, column.kind))  # type: ignore[arg-type]
    features += [Feature(f"{column.name} is missing", "indicator", column.name) for column in columns if _has_indicator(config, column)]
    return tuple(features)


def _encoded(config: Table, columns: Sequence[Column]) -> Iterator[Array]:
    for column in columns:
        if column.kind == "category":
            is_missing = column.is_missing
            for code in range(1, len(column.levels)):
                yield np.where(is_missing, math.nan, column.values == code)
        else:
            yield column.values
    for column in columns:
        if _has_indicator(config, column):
            yield column.is_missing.astype(np.float64)


def _has_indicator(config: Table, column: Column) -> bool:
    """Decided without looking at these rows: all hosts must have the same features."""
    return config.missing == "indicator" and (config.indicator_columns is None or column.name in config.indicator_columns)


def _numbers(name: str, kind: str, role: Role, kept: Kept, faults: list[Fault]) -> Column:
    """A column of numbers, booleans or dates. Bad cells are added to `faults`."""
    parts: list[Array] = []
    bad: list[tuple[int, str]] = []
    n_bad = start = 0
    convert = {"number": kept.spelling.number, "boolean": truth, "date": day}[kind]
    for chunk in kept.columns[name].unpacked():
        values, wrong = _converted(chunk, kind, convert, kept.spelling)
        bad += [(start + row, cell) for row, cell in wrong[: MOST_LISTED - len(bad)]]
        n_bad, start = n_bad + len(wrong), start + len(values)
        parts.append(values)
    kept.columns[name].chunks.clear()
    if n_bad:
        faults.append(Fault(kind, role, name, n_bad, tuple(bad)))
    return Column(name, kind, np.concatenate(parts) if parts else np.empty(0))


def _converted(chunk: Chunk, kind: str, convert: Callable[[str], float | None], spelling: Spelling) -> tuple[Array, list[tuple[int, str]]]:
    """Numbers, and the rows and texts of bad cells."""
    if chunk.values is not None:
        values = chunk.values
        wrong = np.isinf(values)
        if kind != chunk.kind and kind == "boolean":
            wrong = ~np.isnan(values) & (values != 0) & (values != 1)
        elif kind != chunk.kind and kind == "date":
            wrong = ~np.isnan(values)
        return values, [(int(row), f"{float(values[row]):g}") for row in np.flatnonzero(wrong)]
    if kind == "number" and (quick := spelling.numbers(chunk.texts)) is not None:
        return quick, []
    filled, bad = np.full(len(chunk.texts), math.nan), []
    for row, cell in enumerate(chunk.texts):
        if spelling.is_missing(cell):
            continue
        value = convert(cell)
        if value is None:
            bad.append((row, quoted(cell)))
        filled[row] = math.inf if value is None else value  # so that a bad cell is not missing
    return filled, bad


def _category(label: str, config: Table, name: str, role: Role, kept: Kept, faults: list[Fault]) -> Column:
    """A column of levels. Cells with undeclared levels are added to `faults`."""
    column = kept.columns[name]
    found = {code: level for level, code in column.levels.items() if code >= 0}
    declared = config.columns.get(name)
    levels = declared.category if isinstance(declared, Levels) else tuple(sorted(set(found.values())))
    if not 2 <= len(levels) <= MOST_LEVELS:
        wanted = f"want 2 to {MOST_LEVELS}, or the column ignored (data.columns: {{{name}: ignore}})"
        raise ConfigError(
            f"{label}: column {name!r} has {len(levels)} level{'s' if len(levels) != 1 else ''}, {wanted}",
            Finding("T15", place=kept.named.get(name, "data.columns")),
        )
    codes = np.concatenate([np.asarray(chunk) for chunk in column.chunks]) if column.chunks else np.empty(0, np.int32)
    column.chunks.clear()
    place = {level: number for number, level in enumerate(levels)}
    table = np.full(max(found, default=0) + 2, -2, np.int32)  # the last entry is for code -1
    table[-1] = -1
    for code, level in found.items():
        table[code] = place.get(level, -2)
    values = table[codes]
    unknown = np.flatnonzero(values == -2)
    if len(unknown):
        first = tuple((int(row), quoted(found[int(codes[row])])) for row in unknown[:MOST_LISTED])
        faults.append(Fault("category", role, name, len(unknown), first, tuple(levels)))
    return Column(name, "category", values, levels)
