"""Reads Parquet files with pyarrow, by row group: only columns in use, and rows of requested users.

Column types come from the file: integers, floats, decimals, booleans, dates and timestamps. Text is a category if the experiment declares
it. Of other users' rows only the user name is checked. pyarrow is imported on first use.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.findings import Finding
from coterie.text.names import normal
from coterie_client.data.paths import DataFile
from coterie_client.data.tables.cells import MICROSECONDS_A_DAY
from coterie_client.data.tables.rows import Chunk, Codes, codes_of


@dataclass(frozen=True)
class _Group:
    """A row group; columns are read on demand."""

    file: DataFile
    table: Any  # pyarrow.parquet.ParquetFile
    group: int
    stored: dict[str, str]  # normalised column name -> name in the file
    start: int
    n_rows: int

    @cached_property
    def lines(self) -> NDArray[np.int64]:
        return np.arange(self.start + 1, self.start + self.n_rows + 1)

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        pa = _pyarrow(self.file.label)[0]
        values = self._read([column])[column]
        kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            said = f"{self.file.label}, column {column!r} has type {values.type}, want integers or text"
            raise ConfigError(said, Finding("T15", place="data.user_column"))
        names, codes = codes_of(values.to_pylist())
        return [None if name is None or name == "" else str(name) for name in names], codes

    def chunks(self, columns: Sequence[str], texts: Collection[str]) -> dict[str, Chunk]:
        present = [column for column in columns if column in self.stored]
        if not present:
            return {}
        read = self._read(present)
        return {name: _as_text(values) if name in texts else _as_numbers(self.file, values) for name, values in read.items()}

    def _read(self, columns: Sequence[str]) -> dict[str, Any]:
        block = self.table.read_row_group(self.group, columns=[self.stored[column] for column in columns])
        return {column: block.column(self.stored[column]) for column in columns}


@dataclass
class _File:
    file: DataFile
    table: Any
    header: list[str]
    known: dict[str, str]
    hint: str = ""

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> Iterator[_Group]:  # noqa: ARG002 - read when they are asked for
        stored = dict(zip(self.header, self.table.schema_arrow.names, strict=True))
        start = 0
        for group in range(self.table.num_row_groups):
            n_rows = self.table.metadata.row_group(group).num_rows
            if n_rows:
                yield _Group(self.file, self.table, group, stored, start, n_rows)
            start += n_rows


@contextmanager
def opened(file: DataFile) -> Iterator[_File]:
    """A file with its columns. Damage found later also raises ConfigError."""
    pa, pq = _pyarrow(file.label)
    try:
        with pq.ParquetFile(file.path) as table:
            header = [normal(name) for name in table.schema_arrow.names]
            known = {name: _kind(pa, field.type) for name, field in zip(header, table.schema_arrow, strict=True)}
            yield _File(file, table, header, known)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file.label} cannot be read ({error}), want a Parquet file", Finding("T1")) from error


def _kind(pa: Any, kind: Any) -> str:
    """The kind of a column; the name of its type if it needs declaring."""
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
        return "number"
    return "date" if types.is_date(kind) or types.is_timestamp(kind) else str(kind)


def _plain(values: Any) -> Any:
    """A column with its dictionary encoding removed."""
    return values.cast(values.type.value_type) if hasattr(values.type, "value_type") and hasattr(values.type, "index_type") else values


def _as_numbers(file: DataFile, values: Any) -> Chunk:
    pa = _pyarrow(file.label)[0]
    values = _plain(values)
    kind = _kind(pa, values.type)
    if pa.types.is_decimal(values.type):
        # A cast may be one bit off; `float` gives the value that the number has as text.
        return Chunk(np.array([math.nan if cell is None else float(cell) for cell in values.to_pylist()]))
    if kind == "boolean":
        return Chunk(_floats(values.cast(pa.uint8())), kind="boolean")
    if kind == "date":
        moments = _floats(values.cast(pa.timestamp("us"), safe=False).cast(pa.int64()))
        return Chunk(moments / MICROSECONDS_A_DAY, kind="date")
    return Chunk(_floats(values)) if kind == "number" else _as_text(values)


def _floats(values: Any) -> Array:
    """(n,) float64, NaN for nulls."""
    if str(values.type) == "null":
        return np.full(len(values), math.nan)
    found: Array = values.to_numpy().astype(np.float64, copy=False)
    return found


def _as_text(values: Any) -> Chunk:
    return Chunk(texts=["" if cell is None else _text(cell) for cell in _plain(values).to_pylist()])


def _text(cell: Any) -> str:
    if isinstance(cell, float):  # whole numbers become floats if one is missing
        return "" if math.isnan(cell) else str(int(cell)) if cell.is_integer() else repr(cell)
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


def _pyarrow(label: str) -> tuple[Any, Any]:
    # Imported late: pyarrow is optional, and takes tens of megabytes.
    try:
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        said = f'{label} is a Parquet file and pyarrow is not installed, want `pip install "coterie[data]"`'
        raise ConfigError(said, Finding("T21")) from error
    return pa, pq
