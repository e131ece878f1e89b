"""Reads Parquet files with pyarrow, a piece of a row group at a time: only columns in use, and rows of requested users.

Column types come from the file: integers, floats, decimals, booleans, dates and timestamps. Text is a category if the experiment declares
it. Of other users' rows only the user name is checked. pyarrow is imported on first use.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.extras import needed
from coterie.findings import Finding
from coterie.text.names import normal
from coterie_client.data.paths import DataFile
from coterie_client.data.tables.cells import MICROSECONDS_A_DAY, Spelling
from coterie_client.data.tables.rows import Block, Chunk, Codes, TableFile, as_text

_ROWS: Final = 1 << 16  # per block
_BUFFER_BYTES: Final = 1 << 16  # of a column's file at a time, instead of all of its row group


@dataclass
class _Column:
    """A column of a row group, read forwards."""

    pieces: Iterator[Any]  # pyarrow.Array, of any lengths
    held: list[Any] = field(default_factory=list)  # the latest pieces
    end: int = 0  # of the held pieces

    def rows(self, pa: Any, start: int, n: int) -> Any:
        """The values of n rows, as a pyarrow.Array without dictionary. `start` may not decrease."""
        while self.end < start + n:
            if self.end <= start:
                self.held.clear()
            self.held.append(next(self.pieces))
            self.end += len(self.held[-1])
        return _plain(pa.chunked_array(self.held).slice(start - (self.end - sum(map(len, self.held))), n)).combine_chunks()


@dataclass(frozen=True)
class _Rows(Block):
    """Some rows of a row group. Columns are read on demand."""

    label: str
    table: Any  # pyarrow.parquet.ParquetFile
    group: int
    start: int  # in the group
    opened: dict[str, _Column]  # of the group

    def texts(self, column: str) -> Sequence[str]:
        return _as_text(self._read(column)).texts

    def cells(self, column: str) -> Chunk:
        return _as_numbers(self.label, self._read(column))

    def distinct(self, column: str) -> tuple[list[str], Codes]:
        values = self._read(column)
        if not _is_name(_pyarrow(self.label), values.type):
            return super().distinct(column)
        coded = values.dictionary_encode()
        texts, at = [as_text(cell) for cell in coded.dictionary.to_pylist()], coded.indices
        return (texts, _numpy(at)) if not at.null_count else ([*texts, ""], _numpy(at.fill_null(len(texts))))

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        pa, kind = _pyarrow(self.label), self.table.schema_arrow.field(self.columns[column]).type
        if not _is_name(pa, kind.value_type if pa.types.is_dictionary(kind) else kind):
            said = f"{self.label}, column {column!r} has type {kind}, want integers or text"
            raise ConfigError(said, Finding("T15", place="data.user_column"))
        return super().coded(column)

    def _read(self, column: str) -> Any:
        stored = self.columns[column]
        if stored not in self.opened:
            batches = self.table.iter_batches(_ROWS, [self.group], [stored])
            self.opened[stored] = _Column(batch.column(stored) for batch in batches)
        return self.opened[stored].rows(_pyarrow(self.label), self.start, len(self.lines))


def _blocks(label: str, table: Any, header: Sequence[str], spelling: Spelling) -> Iterator[Block]:
    first, stored = 1, dict(zip(header, table.schema_arrow.names, strict=True))
    for group in range(table.num_row_groups):
        n_rows, opened = table.metadata.row_group(group).num_rows, dict[str, _Column]()
        for start in range(0, n_rows, _ROWS):
            lines = np.arange(first + start, first + min(start + _ROWS, n_rows))
            yield _Rows(stored, lines, spelling, label, table, group, start, opened)
        first += n_rows


@contextmanager
def opened(file: DataFile, spelling: Spelling) -> Iterator[TableFile]:
    """A file with its columns. Damage found later also raises ConfigError."""
    pa = _pyarrow(file.label)
    try:
        with _needed("pyarrow.parquet", file.label).ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            header = [normal(name) for name in table.schema_arrow.names]
            known = {name: _kind(pa, field.type) for name, field in zip(header, table.schema_arrow, strict=True)}
            yield TableFile(header, _blocks(file.label, table, header, spelling), known)
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


def _is_name(pa: Any, kind: Any) -> bool:
    """Whether values of this type can name users."""
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _plain(values: Any) -> Any:
    """A column with its dictionary encoding removed."""
    return values.cast(values.type.value_type) if hasattr(values.type, "value_type") and hasattr(values.type, "index_type") else values


def _as_numbers(label: str, values: Any) -> Chunk:
    pa = _pyarrow(label)
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
    return _numpy(values).astype(np.float64, copy=False)


def _numpy(values: Any) -> NDArray[Any]:
    """(n,) the values, NaN for nulls."""
    # pyarrow imports pandas to make an array, which takes 40 MB.
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False) if values.null_count else np.from_dlpack(values)
    return found


def _as_text(values: Any) -> Chunk:
    return Chunk(texts=["" if cell is None else as_text(cell) for cell in values.to_pylist()])


def _pyarrow(label: str) -> Any:
    return _needed("pyarrow", label)  # which takes tens of megabytes


def _needed(module: str, label: str) -> Any:
    return needed(module, "data", f"{label}, a Parquet file, needs pyarrow", finding=Finding("T21"))
