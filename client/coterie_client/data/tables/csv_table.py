"""Reads CSV files as a stream. Rows of users that were not requested are skipped; only their width and user name are checked."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.experiment.columns import DELIMITERS, Dialect
from coterie.findings import Finding
from coterie.text.names import normal
from coterie_client.data.paths import DataFile
from coterie_client.data.tables.cells import Spelling, other_spelling
from coterie_client.data.tables.rows import Chunk, Codes, codes_of

_ROWS = 1024  # per block


@dataclass(frozen=True)
class _Block:
    """Rows, stored by column."""

    header: Sequence[str]
    lines: NDArray[np.int64]
    columns: Sequence[Sequence[str]]
    spelling: Spelling

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        names, codes = codes_of(self.columns[self.header.index(column)])
        return [None if self.spelling.is_missing(name) else name for name in names], codes

    def chunks(self, columns: Sequence[str], texts: Collection[str]) -> dict[str, Chunk]:
        found, place = {}, {name: number for number, name in enumerate(self.header)}
        for column in columns:
            if column in self.header:
                cells = self.columns[place[column]]
                values = None if column in texts else self.spelling.numbers(cells)
                found[column] = Chunk(texts=cells) if values is None else Chunk(values)
        return found


@dataclass
class _File:
    """A file whose header has been read."""

    file: DataFile
    header: list[str]
    lines: Iterator[tuple[int, list[str]]]
    spelling: Spelling
    known: dict[str, str]
    hint: str
    n_header_lines: int

    def blocks(self, columns: Sequence[str], texts: Collection[str]) -> Iterator[_Block]:  # noqa: ARG002 - all cells are read anyway
        width = len(self.header)
        rows: list[list[str]] = []
        at: list[int] = []
        for line, cells in self.lines:
            if len(cells) != width:
                raise ConfigError(f"{self.file.label} line {line} has {len(cells)} fields, want the {width} of the header", Finding("T8"))
            rows.append(cells)
            at.append(line)
            if len(rows) == _ROWS:
                yield self._block(rows, at)
                rows, at = [], []
        if rows:
            yield self._block(rows, at)

    def _block(self, rows: list[list[str]], at: list[int]) -> _Block:
        return _Block(self.header, np.array(at), list(zip(*rows, strict=True)), self.spelling)


@contextmanager
def opened(file: DataFile, dialect: Dialect, spelling: Spelling) -> Iterator[_File]:
    """A file with its header. ConfigError for a file that is not text, or uses another delimiter."""
    lines = lines_of(file, dialect)
    if dialect.names is not None:
        yield _File(file, list(dialect.names), lines, spelling, {}, "", 0)
        return
    n_lines, header = next(lines)
    if len(header) == 1:
        _check_delimiter(file, header[0], next(lines, (0, []))[1], dialect)
        lines = lines_of(file, dialect)  # start again, with the row just read
        next(lines)
    header = [normal(name) for name in header]
    hint = ""
    if any(spelling.number(name) is not None for name in header):
        hint = ": the first line must be a header, or data.csv.names says what the columns are called"
    yield _File(file, header, lines, spelling, {}, hint, n_lines)


def _check_delimiter(file: DataFile, header: str, first: Sequence[str], dialect: Dialect) -> None:
    """ConfigError when the header has one column and another delimiter would split it. The next row may also show another decimal sign."""
    widths = {other: header.count(other) + 1 for other in DELIMITERS if other != dialect.delimiter}
    best = max(widths, key=widths.__getitem__)
    if widths[best] > 1:
        cells = dialect.delimiter.join(first).split(best)
        is_comma = dialect.decimal != "," and any(other_spelling(cell) == "decimal" for cell in cells)
        found = f"{file.label}: the header has 1 column; with {best!r} it would have {widths[best]}"
        wanted = f"data.csv.delimiter: {best!r}" + (" and data.csv.decimal: ','" if is_comma else "")
        raise ConfigError(f"{found}: want {wanted}", Finding("T9", place="data.csv.delimiter"))


def lines_of(file: DataFile, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each non-empty line, the header first. ConfigError for an empty file."""
    n_lines = 0
    encoding = "utf-8-sig" if dialect.encoding == "utf-8" else dialect.encoding
    quoting = {"quoting": csv.QUOTE_NONE} if dialect.quote is None else {"quotechar": dialect.quote}
    try:
        with open_text(file.path, encoding) as text:
            source = text if dialect.comment is None else _without_comments(text, dialect.comment)
            reader = csv.reader(source, strict=True, delimiter=dialect.delimiter, **quoting)
            for cells in reader:
                if cells:
                    n_lines += 1
                    yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(
            f"{file.label} line {reader.line_num}: {error}, want text in columns between {dialect.delimiter!r}",
            Finding("T1"),
        ) from error
    except UnicodeDecodeError as error:
        found = f"{file.label}{_first_bad_line(file.path, encoding)} has the byte {error.object[error.start]:#04x} at the wrong place"
        raise ConfigError(
            f"{found}, want {_shown(dialect.encoding)}, or data.csv.encoding", Finding("T9", place="data.csv.encoding")
        ) from error
    except UnicodeError as error:
        raise ConfigError(
            f"{file.label} is not {dialect.encoding} ({error}), want data.csv.encoding", Finding("T9", place="data.csv.encoding")
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        found = f"{file.label} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(f"{found}, want .csv or .csv.gz text", Finding("T1")) from error
    if n_lines == 0:
        raise ConfigError(f"{file.label} is empty, want a header and rows", Finding("T12"))


def open_text(path: Path, encoding: str) -> IO[str]:
    """Opens a text file, decompressing .gz."""
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding=encoding, newline="")


def _without_comments(text: IO[str], sign: str) -> Iterator[str]:
    """Comments become empty lines, so that all other lines keep their numbers."""
    return ("\n" if line.startswith(sign) else line for line in text)


def _first_bad_line(path: Path, encoding: str) -> str:
    """ " line N" for the first line that the encoding cannot decode; "" if the encoding does not split into lines by bytes."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as data:
        for number, line in enumerate(data, 1):
            try:
                line.decode(encoding)
            except UnicodeError:
                return f" line {number}" if encoding.startswith(("utf-8", "ascii", "cp", "iso", "latin")) else ""
    return ""


def _shown(encoding: str) -> str:
    return encoding.upper() if encoding.startswith("utf") else encoding
