"""`coterie data FILE --schema`: a first `data` section for a table, with its dialect and the types of its columns, from all cells.

The owner of the table decides which columns are users, target and features. Columns that look like identifiers, and text with many values,
are ignored by default.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from coterie.errors import ConfigError
from coterie.experiment.columns import DELIMITERS, Dialect
from coterie.experiment.data import DataConfig
from coterie.experiment.tables import CsvData, TableData
from coterie_client.data.paths import DataFile, data_files, one_file
from coterie_client.data.tables.cells import Spelling
from coterie_client.data.tables.csv_table import open_text
from coterie_client.data.tables.formats import SUFFIXES, format_of, source_of
from coterie_client.data.tables.heads import roles_of
from coterie_client.data.tables.rows import TableFile, Tally
from coterie_client.data.tables.table_reader import Format

_OTHER_DATE: Final = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}( .*)?", re.ASCII)
_MOST_LEVELS = 20  # of a text column that counts as a category
_MOST_DISTINCT = 1_000_000  # values that are kept to recognise identifiers
_LEAST_ROWS = 8  # from which distinct numbers look like identifiers
_FIRST_LINES = 100  # from which the delimiter is guessed


@dataclass
class _Seen:
    tally: Tally = field(default_factory=Tally)
    levels: set[str] = field(default_factory=set)  # the first, one more than a category may have
    values: set[Any] = field(default_factory=set)
    is_distinct: bool = True  # no value occurs twice
    is_whole: bool = True  # all numbers are integers
    n_other_dates: int = 0  # cells with a date in another format than ISO 8601
    n_rows: int = 0

    def add(self, cells: Sequence[str], numbers: Any, spelling: Spelling) -> None:
        """Adds rows: as numbers if all cells are numbers or missing, else as text."""
        self.n_rows += len(cells) if numbers is None else len(numbers)
        if numbers is not None:
            self.tally.add_numbers(numbers)
            present = numbers[~np.isnan(numbers)]
            self.is_whole = self.is_whole and bool((present == np.floor(present)).all())
            found: list[Any] = present.tolist()
        else:
            self.tally.add_cells(cells, spelling)
            found = [cell.strip() for cell in cells if not spelling.is_missing(cell)]
            self.n_other_dates += sum(_OTHER_DATE.fullmatch(cell) is not None for cell in found)
        if len(self.levels) <= _MOST_LEVELS:
            self.levels |= {str(one) for one in found}
        if self.is_distinct and len(self.values) < _MOST_DISTINCT:
            before = len(self.values)
            self.values |= set(found)
            self.is_distinct = len(self.values) == before + len(found)

    def kind(self, known: str | None) -> str:
        return known if known in ("number", "boolean", "date") else self.tally.found

    def looks_like_identifier(self, known: str | None) -> bool:
        """Whether each row has another text or another integer."""
        kind = self.kind(known)
        return self.is_distinct and self.n_rows >= _LEAST_ROWS and (kind == "text" or (kind == "number" and self.is_whole))

    def may_group(self, known: str | None) -> bool:
        """Whether rows share texts, which may be names of users."""
        kind = self.described(known)[0]
        return (isinstance(kind, dict) or kind == "ignore") and len(self.levels) >= 2 and not self.is_distinct

    @property
    def has_few_values(self) -> bool:
        return len(self.levels) <= _MOST_LEVELS

    def described(self, known: str | None) -> tuple[Any, str]:
        """The type, and a comment."""
        kind = self.kind(known)
        n_missing = self.tally.kinds["missing"]
        said = f"{n_missing} of {self.n_rows} cells are missing" if n_missing and kind != "empty" else ""
        if kind == "text" and self.n_other_dates == self.tally.n_present:
            return "ignore", "dates must be written like 2024-01-31"
        if self.looks_like_identifier(known):
            return "ignore", "as many values as rows: likely an identifier"
        if kind == "empty":
            return "ignore", "all cells are missing"
        if kind == "text":
            if 2 <= len(self.levels) <= min(_MOST_LEVELS, self.n_rows // 2):
                return {"category": sorted(self.levels)}, said or "the first level is the reference"
            return "ignore", f"text with {len(self.levels) if self.has_few_values else f'more than {_MOST_LEVELS}'} values"
        n_bad = self.tally.n_present - self.tally.kinds[kind] if known is None else 0
        bad = f"{n_bad} of {self.n_rows} cells are something else" if n_bad else ""
        return kind, "; ".join(part for part in (bad, said) if part)


def is_table(place: Path) -> bool:
    """Whether the file has the ending of a table."""
    return source_of(place) is not None


def schema_of(place: Path) -> str:
    """The YAML of a table's `data` section. Raises ConfigError."""
    file, source, dialect, table, seen = _read(place)
    groups = [name for name, one in seen.items() if one.may_group(table.known.get(name))]
    which = f": {', '.join(map(_scalar, groups))}?" if groups else ""
    head = [
        f"source: {source}",
        f"path: {_scalar(file.label)}",
        f"user_column: {_scalar(groups[0]) if groups else ''}  # whose row it is{which}",
        "# target_column:  # what is to be predicted",
    ]
    return _section(head, dialect, table, seen, {}, {})


def schema_of_data(data: DataConfig, data_dir: Path | None) -> str:
    """An experiment's `data` section, with the columns of its first file; its own declarations stay. Raises ConfigError."""
    if not isinstance(data, TableData):
        raise ConfigError(f"the data come from source {data.source!r}, want a table (csv, parquet, stata or spss) for --schema")
    dialect = data.csv if isinstance(data, CsvData) else None
    file = data_files(data.path, data_dir, SUFFIXES[data.source])[0]
    table, seen = _columns(file, format_of(data.source, dialect))
    head = [f"source: {data.source}"]
    for key, value in data.model_dump(mode="json", exclude_unset=True, exclude={"source", "csv", "columns"}).items():
        head.append(f"{key}: {_flow(value) if isinstance(value, list | dict) else _scalar(value)}")
    declared = data.model_dump(mode="json", include={"columns"})["columns"]
    return _section(head, dialect, table, seen, declared, roles_of(data).named)


def columns_of(place: Path) -> dict[str, tuple[_Seen, str | None]]:
    """The columns of a table in their order, each with the type that the file itself declares. Raises ConfigError."""
    *_, table, seen = _read(place)
    return {name: (one, table.known.get(name)) for name, one in seen.items()}


def _read(place: Path) -> tuple[DataFile, str, Dialect | None, TableFile, dict[str, _Seen]]:
    file, source = one_file(str(place), None), source_of(place) or "csv"
    dialect = _dialect(file) if source == "csv" else None
    return file, source, dialect, *_columns(file, format_of(source, dialect))


# ---- the dialect


def _dialect(file: DataFile) -> Dialect:
    """The dialect of a text table: encoding and delimiter from its first lines, decimal sign and thousands sign from its cells."""
    chosen: dict[str, str] = {}
    try:
        lines = _first_lines(file.path, "utf-8-sig")
    except UnicodeDecodeError:
        chosen["encoding"] = "cp1252"
        lines = _first_lines(file.path, "cp1252")
    delimiter = max(DELIMITERS, key=lambda one: (_width(lines, one), -DELIMITERS.index(one)))
    if delimiter != ",":
        chosen["delimiter"] = delimiter
    others: list[dict[str, str]] = [{"decimal": ","}, {"decimal": ",", "thousands": "."}, {"thousands": ","}]

    def tallies(dialect: Dialect) -> list[Tally]:
        return [one.tally for one in _columns(file, format_of("csv", dialect))[1].values()]

    plain, *other = (Dialect.model_validate({**chosen, **more}) for more in ({}, *others))
    if not any(one.respelled for one in tallies(plain)):
        return plain
    return max([plain, *other], key=lambda dialect: sum(one.kinds["number"] for one in tallies(dialect)))


def _first_lines(path: Path, encoding: str) -> list[str]:
    try:
        with open_text(path, encoding) as text:
            return [line for line, _ in zip(text, range(_FIRST_LINES), strict=False)]
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read ({error}), want .csv or .csv.gz text") from None


def _width(lines: Sequence[str], delimiter: str) -> int:
    """The number of columns with this delimiter, if it is the same in all lines; else 1."""
    try:
        widths = {len(cells) for cells in csv.reader(lines, delimiter=delimiter) if cells}
    except csv.Error:
        return 1
    return widths.pop() if len(widths) == 1 else 1


# ---- columns


def _columns(file: DataFile, how: Format) -> tuple[TableFile, dict[str, _Seen]]:
    with how.opened(file) as table:
        names = list(dict.fromkeys(table.header))
        seen = {name: _Seen() for name in names}
        for block in table.blocks:
            for name in names:
                chunk = block.cells(name)
                seen[name].add(chunk.texts, chunk.values, how.spelling)
    return table, seen


def _section(
    head: Sequence[str],
    dialect: Dialect | None,
    table: TableFile,
    seen: Mapping[str, _Seen],
    declared: Mapping[str, Any],
    named: Mapping[str, str],
) -> str:
    """The YAML; `declared`: the types in an experiment; `named`: the key of the experiment that names a column."""
    n_rows = next(iter(seen.values())).n_rows if seen else 0
    lines = [f"# {n_rows} rows, {len(seen)} columns", "data:", *(f"  {line}" for line in head)]
    if dialect is not None and not dialect.is_default:
        usual = Dialect().model_dump(mode="json")
        lines.append(f"  csv: {_flow({key: value for key, value in dialect.model_dump(mode='json').items() if value != usual[key]})}")
    lines.append("  columns:")
    for name, one in seen.items():
        kind, said = one.described(table.known.get(name))
        if name in declared:
            kind = declared[name]
        elif named.get(name) in ("data.user_column", "data.cluster_column"):
            continue
        comment = f"  # {said}" if said else ""
        start = "# " if kind == "ignore" and name in named else ""  # a named column cannot be ignored
        lines.append(f"    {start}{_scalar(name)}: {_flow(kind) if isinstance(kind, dict) else kind}{comment}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True, width=100_000).removesuffix("\n").removesuffix("\n...")


def _flow(content: Any) -> str:
    return yaml.safe_dump(content, default_flow_style=True, allow_unicode=True, width=100_000, sort_keys=False).strip()
