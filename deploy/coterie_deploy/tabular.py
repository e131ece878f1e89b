"""Comma-separated tables that commands read and write: cells as text, features as numbers."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import IO

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError, RunError


def read_table(table: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header, and rows with their line numbers. Raises ConfigError."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except OSError as error:
        raise ConfigError(f"cannot read {table}: {error.strerror or error}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{table} is not comma-separated text in UTF-8: {error}") from None
    if not lines:
        raise ConfigError(f"{table} is empty, want a header and rows")
    header = lines[0][1]
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise ConfigError(f"{table} line {line} has {len(cells)} fields, want the {len(header)} of the header")
    return header, lines[1:]


def features_of(table: Path, header: list[str], rows: list[tuple[int, list[str]]], columns: list[str]) -> Array:
    """The numbers (m, p) in these columns. ConfigError for what is none."""
    places = [header.index(column) for column in columns]
    features = np.empty((len(rows), len(columns)))
    for number, (line, cells) in enumerate(rows):
        for column, place in enumerate(places):
            if not is_number(cells[place]):
                raise ConfigError(f"{table} line {line}, column {header[place]!r}: {cells[place]!r} is not a finite number, want one")
            features[number, column] = float(cells[place])
    return features


def is_number(cell: str) -> bool:
    """Whether a cell is a finite number."""
    try:
        return math.isfinite(float(cell)) and "_" not in cell
    except ValueError:
        return False


def write_table(out: Path | None, stdout: IO[str], header: list[str], rows: list[list[str]]) -> None:
    """Writes header and rows to a file, or to standard output. Raises RunError."""
    if out is None:
        csv.writer(stdout, lineterminator="\n").writerows([header, *rows])
        return
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from None
