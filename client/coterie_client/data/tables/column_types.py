"""Infers column types from all cells of a table, whichever users they belong to.

A column has a type if at least four in five of its non-missing cells have it; the others are counted as bad cells. Otherwise the column is
text. TRUE and FALSE make a boolean. A column with only T or only F is text, since the letter may be a code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from coterie.arrays import Array
from coterie_client.data.tables.cells import Spelling, other_spelling

Found = Literal["number", "boolean", "date", "text", "empty"]
MOST: Final = 0.8  # of the cells that are not missing


@dataclass
class Tally:
    """Counts of what the cells of one column look like."""

    kinds: Counter[str] = field(default_factory=Counter)
    spelled: Counter[str] = field(default_factory=Counter)  # numbers in another dialect, by the key to change
    example: str = ""  # one of these cells
    letters: set[str] = field(default_factory=set)  # single letters among the booleans; "-": there are words too

    def add_numbers(self, values: Array) -> None:
        """Adds numbers; NaN counts as missing."""
        n_missing = int(np.isnan(values).sum())
        self.kinds["missing"] += n_missing
        self.kinds["number"] += len(values) - n_missing

    def add_cells(self, cells: Sequence[str], spelling: Spelling) -> None:
        """Adds cells as they stand in the table."""
        for cell, n in Counter(cells).items():
            kind = spelling.kind(cell)
            self.kinds[kind] += n
            if kind == "boolean":
                word = cell.strip().lower()
                self.letters.add(word if len(word) == 1 else "-")
            elif kind == "text" and (key := other_spelling(cell, spelling)) is not None:
                self.spelled[key] += n
                self.example = self.example or cell

    def add(self, other: Tally) -> None:
        """Adds the counts of another file."""
        self.kinds += other.kinds
        self.spelled += other.spelled
        self.letters |= other.letters
        self.example = self.example or other.example

    @property
    def n_present(self) -> int:
        return self.kinds.total() - self.kinds["missing"]

    @property
    def found(self) -> Found:
        """The type of the column."""
        if not self.n_present:
            return "empty"
        kinds: tuple[Literal["number", "boolean", "date"], ...] = ("number", "boolean", "date")
        for kind in kinds:
            if self.kinds[kind] >= MOST * self.n_present:
                return "text" if kind == "boolean" and self.letters in ({"t"}, {"f"}) else kind
        return "text"

    @property
    def respelled(self) -> str | None:
        """The key of the dialect ("decimal" or "thousands") to change so that the column becomes numeric, or None."""
        numbers = self.kinds["number"] + self.spelled.total()
        if not self.spelled or numbers < MOST * self.n_present or (self.found == "number" and self.spelled.total() < self.n_present / 20):
            return None
        return "decimal" if self.spelled["decimal"] >= self.spelled["thousands"] else "thousands"
