"""Reads CSV files as a stream. Rows of users that were not requested are skipped; only their width and user name are checked."""

import csv
import gzip
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from coterie.errors import ConfigError
from coterie.experiment.columns import DELIMITERS, Dialect
from coterie.findings import Finding
from coterie.text.names import normal
from coterie_client.data.paths import DataFile
from coterie_client.data.tables.cells import Spelling, other_spelling
from coterie_client.data.tables.rows import Block, Chunk, TableFile

_ROWS = 1024  # per block


class _Rows(Block):
    columns: Mapping[str, Sequence[str]]

    def texts(self, column: str) -> Sequence[str]:
        return self.columns[column]

    def cells(self, column: str) -> Chunk:
        cells = self.texts(column)
        values = self.spelling.numbers(cells)
        return Chunk(texts=cells) if values is None else Chunk(values)


def _blocks(file: DataFile, header: Sequence[str], lines: Iterator[tuple[int, list[str]]], spelling: Spelling) -> Iterator[Block]:
    def checked() -> Iterator[tuple[int, list[str]]]:
        for line, cells in lines:
            if len(cells) != len(header):
                found = f"{file.label} line {line} has {len(cells)} fields"
                raise ConfigError(f"{found}, want the {len(header)} of the header", Finding("T8"))
            yield line, cells

    rows = checked()
    while some := list(itertools.islice(rows, _ROWS)):
        columns = dict(zip(header, zip(*(cells for _, cells in some), strict=True), strict=True))
        yield _Rows(columns, np.array([line for line, _ in some]), spelling)


@contextmanager
def opened(file: DataFile, dialect: Dialect, spelling: Spelling) -> Iterator[TableFile]:
    """A file with its header. ConfigError for a file that is not text, or uses another delimiter."""
    lines = lines_of(file, dialect)
    if dialect.names is not None:
        yield TableFile(dialect.names, _blocks(file, dialect.names, lines, spelling))
        return
    _, header = next(lines)
    if len(header) == 1:
        _check_delimiter(file, header[0], next(lines, (0, []))[1], dialect)
        lines = lines_of(file, dialect)  # start again, with the row just read
        next(lines)
    header = [normal(name) for name in header]
    hint = ""
    if any(spelling.number(name) is not None for name in header):
        hint = ": the first line must be a header, or data.csv.names says what the columns are called"
    yield TableFile(header, _blocks(file, header, lines, spelling), hint=hint)


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
            sign = dialect.comment  # comments become empty lines, so that all other lines keep their numbers
            source = text if sign is None else ("\n" if line.startswith(sign) else line for line in text)
            reader = csv.reader(source, strict=True, delimiter=dialect.delimiter, **quoting)
            for cells in reader:
                if cells:
                    n_lines += 1
                    yield reader.line_num, cells
    except csv.Error as error:
        said = f"{file.label} line {reader.line_num}: {error}, want text in columns between {dialect.delimiter!r}"
        raise ConfigError(said, Finding("T1")) from error
    except UnicodeDecodeError as error:
        found = f"{file.label}{_first_bad_line(file.path, encoding)} has the byte {error.object[error.start]:#04x} at the wrong place"
        shown = dialect.encoding.upper() if dialect.encoding.startswith("utf") else dialect.encoding
        raise ConfigError(f"{found}, want {shown}, or data.csv.encoding", Finding("T9", place="data.csv.encoding")) from error
    except UnicodeError as error:
        said = f"{file.label} is not {dialect.encoding} ({error}), want data.csv.encoding"
        raise ConfigError(said, Finding("T9", place="data.csv.encoding")) from error
    except (OSError, EOFError, zlib.error) as error:
        found = f"{file.label} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(f"{found}, want .csv or .csv.gz text", Finding("T1")) from error
    if n_lines == 0:
        raise ConfigError(f"{file.label} is empty, want a header and rows", Finding("T12"))


def open_text(path: Path, encoding: str) -> IO[str]:
    """Opens a text file, decompressing .gz."""
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding=encoding, newline="")


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
