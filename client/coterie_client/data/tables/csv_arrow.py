"""Reads large CSV files with pyarrow, if it is installed: the values of `csv_table`, several times as fast.

pyarrow rounds numbers correctly, as Python does, so both readers give the same bits. `csv_table` reads files that pyarrow may read
differently (with quotes, thousands signs, comments), and files that pyarrow rejects, since its errors name lines.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.experiment.columns import Dialect
from coterie_client.data.paths import DataFile
from coterie_client.data.tables import csv_table
from coterie_client.data.tables.cells import Spelling
from coterie_client.data.tables.rows import Chunk, Codes

LARGE_BYTES: Final = 4 << 20  # csv_table reads smaller files before pyarrow would be loaded
_BLOCK_BYTES = 4 << 20


class Unread(Exception):  # noqa: N818 - not a failure
    """`csv_table` has to read the file."""


def reads(files: Sequence[DataFile], dialect: Dialect, spelling: Spelling) -> bool:
    """Whether pyarrow is worth loading for these files, and certain to read the same values."""
    if dialect.comment is not None or dialect.thousands is not None or dialect.encoding != "utf-8" or not dialect.delimiter.isascii():
        return False
    if spelling.has_numeric_missing or importlib.util.find_spec("pyarrow") is None:
        return False
    if any(file.path.suffix == ".gz" or not file.path.is_file() or file.path.stat().st_size < LARGE_BYTES for file in files):
        return False
    return dialect.quote is None or not any(_has(file.path, dialect.quote.encode()) for file in files)


def _has(path: Path, sign: bytes) -> bool:
    with path.open("rb") as data:
        return any(sign in block for block in iter(lambda: data.read(_BLOCK_BYTES), b""))


@dataclass(frozen=True)
class _Block:
    batch: Any  # pyarrow.RecordBatch
    lines: NDArray[np.int64]  # do not count blank lines, so not for messages
    spelling: Spelling

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        cells = self.batch.column(column).dictionary_encode()
        names = [None if self.spelling.is_missing(name) else name for name in cells.dictionary.to_pylist()]
        return names, cells.indices.to_numpy().astype(np.int32, copy=False)

    def chunks(self, columns: Sequence[str], texts: Collection[str]) -> dict[str, Chunk]:
        return {column: self._chunk(column, is_text=column in texts) for column in columns if column in self.batch.schema.names}

    def _chunk(self, column: str, *, is_text: bool) -> Chunk:
        cells = self.batch.column(column)
        if str(cells.type) == "string":
            found = cells.to_pylist()
            values = None if is_text else self.spelling.numbers(found)
            return Chunk(texts=found) if values is None else Chunk(values)
        values = cells.to_numpy(zero_copy_only=False)
        if len(values) - int(np.isfinite(values).sum()) != cells.null_count:
            raise Unread
        return Chunk(values)


@dataclass
class _File:
    file: DataFile
    header: list[str]
    known: dict[str, str]
    hint: str
    n_header_lines: int
    dialect: Dialect
    spelling: Spelling

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> Iterator[_Block]:
        import pyarrow as pa  # noqa: PLC0415 - heavy, and for large files alone
        import pyarrow.csv as arrow_csv  # noqa: PLC0415

        numbers = self._numbers(columns, texts)
        types = {column: pa.float64() if column in numbers else pa.string() for column in columns}
        try:
            reader = arrow_csv.open_csv(
                self.file.path,
                arrow_csv.ReadOptions(block_size=_BLOCK_BYTES, column_names=self.header, skip_rows=self.n_header_lines),
                arrow_csv.ParseOptions(delimiter=self.dialect.delimiter, quote_char=False),
                arrow_csv.ConvertOptions(
                    column_types=types,
                    include_columns=list(dict.fromkeys(columns)),
                    null_values=list(self.dialect.missing),
                    decimal_point=self.dialect.decimal,
                ),
            )
            start = 1
            for batch in reader:
                if batch.num_rows:
                    yield _Block(batch, np.arange(start, start + batch.num_rows), self.spelling)
                start += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise Unread from error

    def _numbers(self, columns: Sequence[str], texts: Collection[str]) -> set[str]:
        """Columns whose first block is numeric. If a later block is not, `csv_table` reads the file again."""
        with csv_table.opened(self.file, self.dialect, self.spelling) as first:
            block = next(iter(first.blocks(columns, texts)), None)
        if block is None:
            return set()
        chunks = block.chunks([column for column in columns if column not in texts], texts)
        return {column for column, chunk in chunks.items() if chunk.values is not None}


@contextmanager
def opened(file: DataFile, dialect: Dialect, spelling: Spelling) -> Iterator[_File]:
    """A file with the header that `csv_table` reads."""
    with csv_table.opened(file, dialect, spelling) as plain:
        header, hint, n_lines = plain.header, plain.hint, plain.n_header_lines
    yield _File(file, header, {}, hint, n_lines, dialect, spelling)
