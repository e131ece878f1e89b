"""Parses cells of text tables: numbers, dates, booleans and missing values, by the table's dialect.

A number is whatever Python's `float` reads, except infinities, underscores between digits, and signs that the dialect does not declare. So
every reader of text must give the bits of `float`. Dates are ISO 8601 and become days since 1970-01-01, in UTC unless they name a zone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import numpy as np

from coterie.arrays import Array
from coterie.experiment.columns import Dialect

Kind = Literal["missing", "number", "boolean", "date", "text"]
TRUE: Final = frozenset({"true", "t", "yes"})
FALSE: Final = frozenset({"false", "f", "no"})

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d{1,9})?)?([Zz]|[+-]\d{2}:?\d{2})?)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
MICROSECONDS_A_DAY: Final = 86_400_000_000


def day(cell: str) -> float | None:
    """Days since 1970-01-01 of an ISO 8601 date, with or without a time."""
    text = cell.strip()
    if _DATE.fullmatch(text) is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return ((moment - _EPOCH) // _MICROSECOND) / MICROSECONDS_A_DAY


def truth(cell: str) -> float | None:
    """1 for true, yes, t and 1; 0 for false, no, f and 0; else None."""
    word = cell.strip().lower()
    return 1.0 if word in TRUE or word == "1" else 0.0 if word in FALSE or word == "0" else None


@dataclass(frozen=True)
class Spelling:
    """How a table writes numbers and missing values."""

    missing: frozenset[str]
    decimal: str = "."
    thousands: str | None = None

    @staticmethod
    def of(dialect: Dialect) -> Spelling:
        return Spelling(frozenset(word.strip() for word in dialect.missing), dialect.decimal, dialect.thousands)

    def is_missing(self, cell: str) -> bool:
        return cell.strip() in self.missing

    def number(self, cell: str) -> float | None:
        """The finite number in a cell, or None."""
        text = cell.strip()
        if self.thousands is not None and self.thousands in text:
            between, point = re.escape(self.thousands), re.escape(self.decimal)
            if not re.fullmatch(rf"[+-]?[1-9][0-9]{{0,2}}({between}[0-9]{{3}})+({point}[0-9]*)?([eE][+-]?[0-9]+)?", text):
                return None
            text = text.replace(self.thousands, "")
        if self.decimal != ".":
            if "." in text:
                return None
            text = text.replace(self.decimal, ".")
        try:
            value = float(text)
        except ValueError:
            return None
        return value if math.isfinite(value) and "_" not in text else None

    def numbers(self, cells: Sequence[str]) -> Array | None:
        """(n,) the numbers of many cells, NaN for missing ones; None if any cell is something else. Fast for whole blocks."""
        if self.thousands is not None or any(self.number(word) is not None for word in self.missing):  # some number is a code for missing
            return self._each(cells)
        text = "\0".join(cells)
        if "_" in text:
            return self._each(cells)
        if self.decimal != ".":
            if "." in text or text.count("\0") != len(cells) - 1:
                return self._each(cells)
            cells = text.replace(self.decimal, ".").split("\0")
        try:
            values = np.fromiter(map(float, cells), np.float64, len(cells))
            return values if np.isfinite(values).all() else self._with_missing(cells)
        except ValueError:
            return self._with_missing(cells)

    def _with_missing(self, cells: Sequence[str]) -> Array | None:
        """As `numbers`, for numbers with a decimal point and missing cells."""
        missing = self.missing
        present = [cell for cell in cells if cell not in missing]
        try:
            found = np.fromiter(map(float, present), np.float64, len(present))
        except ValueError:
            return self._each(cells) if self.decimal == "." else None
        if not np.isfinite(found).all():
            return None
        values = np.full(len(cells), math.nan)
        values[[cell not in missing for cell in cells]] = found
        return values

    def _each(self, cells: Sequence[str]) -> Array | None:
        values = np.empty(len(cells))
        for place, cell in enumerate(cells):
            value = math.nan if cell.strip() in self.missing else self.number(cell)
            if value is None:
                return None
            values[place] = value
        return values

    def kind(self, cell: str) -> Kind:
        if self.is_missing(cell):
            return "missing"
        if self.number(cell) is not None:
            return "number"
        word = cell.strip().lower()
        if word in TRUE or word in FALSE:
            return "boolean"
        return "text" if day(cell) is None else "date"


PLAIN: Final = Spelling(frozenset())
_COMMA, _GROUPED, _GROUPED_COMMA = (replace(PLAIN, decimal=sign, thousands=group) for sign, group in ((",", None), (".", ","), (",", ".")))


def other_spelling(cell: str, spelling: Spelling = PLAIN) -> str | None:
    """The key of the dialect ("decimal" or "thousands") to change so that this text becomes a number, or None."""
    if spelling.decimal == ",":
        return "thousands" if _GROUPED_COMMA.number(cell) is not None else "decimal" if PLAIN.number(cell) is not None else None
    if _GROUPED.number(cell) is not None and "." not in cell and spelling.thousands is None and "," in cell:
        return "thousands"  # 1,000 may also mean 1; 0,041 may not mean 41
    if _COMMA.number(cell) is not None and "," in cell:
        return "decimal"
    if _GROUPED.number(cell) is not None and "," in cell:
        return "thousands"
    return "decimal" if _GROUPED_COMMA.number(cell) is not None and "," in cell else None
