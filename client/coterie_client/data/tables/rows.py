"""Collects the rows of a table block by block: the user of each row, and the used columns of the requested users.

Types are inferred from all rows, also those of other users, because types must not depend on who is loaded. Columns with known types are
read only in requested rows. So one user's bad row stops only the host of this user.

A column has a type if at least four in five of its non-missing cells have it; the others are counted as bad cells. Otherwise the column is
text. TRUE and FALSE make a boolean. A column with only T or only F is text, since the letter may be a code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.text.names import normal
from coterie_client.data.tables.cells import Spelling, other_spelling

Codes = NDArray[np.int32]
Mode = Literal["found", "number", "boolean", "date", "category"]
Found = Literal["number", "boolean", "date", "text", "empty"]
MOST: Final = 0.8  # of the cells that are not missing
_END = "\0"


@dataclass(frozen=True)
class Chunk:
    """Cells of one column: numbers of a kind, NaN if missing; or text as in the table, "" if null."""

    values: Array | None = None
    texts: Sequence[str] = ()
    kind: str = "number"  # of the values

    def at(self, rows: NDArray[np.bool_]) -> Chunk:
        """The cells of the rows in this mask."""
        if self.values is not None:
            return Chunk(self.values[rows], kind=self.kind)
        return Chunk(texts=[cell for cell, is_kept in zip(self.texts, rows.tolist(), strict=True) if is_kept])


def as_text(cell: Any) -> str:
    """A cell of a typed format. Whole numbers have no decimals: they are stored as floats if one is missing."""
    if isinstance(cell, float):
        return "" if math.isnan(cell) else str(int(cell)) if cell.is_integer() else repr(cell)
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


@dataclass(frozen=True)
class Block(ABC):
    """Some hundreds of consecutive rows; a format says how it gets the cells of a column."""

    columns: Mapping[str, Any]  # by name: what the format reads the cells from
    lines: NDArray[np.int64]  # (n,) positions of the rows: lines of a text file, else rows from 1
    spelling: Spelling

    @abstractmethod
    def texts(self, column: str) -> Sequence[str]:
        """The cells as text."""

    @abstractmethod
    def cells(self, column: str) -> Chunk:
        """The cells as numbers, or as text if some are no numbers."""

    def distinct(self, column: str) -> tuple[list[str], Codes]:
        """The texts of a column in order of appearance, and the index of each row's text."""
        texts = self.texts(column)
        index = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        return list(index), np.fromiter(map(index.__getitem__, texts), np.int32, len(texts))

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        """As `distinct`, with None for missing."""
        texts, codes = self.distinct(column)
        return [None if self.spelling.is_missing(text) else text for text in texts], codes


@dataclass(frozen=True)
class TableFile:
    header: Sequence[str]
    blocks: Iterable[Block]
    known: Mapping[str, str] = field(default_factory=dict)  # types that the file declares
    hint: str = ""  # what may be wrong with the file if a column is missing; ends the message


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


@dataclass
class ColumnRows:
    mode: Mode
    tally: Tally = field(default_factory=Tally)
    chunks: list[Chunk | str | Codes] = field(default_factory=list)  # texts are joined by _END
    levels: dict[str, int] = field(default_factory=dict)  # a category's level -> its code, over all rows
    spellings: dict[str, int] = field(default_factory=dict)  # cell as it stands -> the code of its level; -1: missing

    def keep(self, chunk: Chunk) -> None:
        """Keeps numbers or texts. Codes of categories are appended directly."""
        if chunk.values is not None:
            self.chunks.append(chunk)
            return
        text = _END.join(chunk.texts)
        self.chunks.append(text if text.count(_END) == len(chunk.texts) - 1 else Chunk(texts=tuple(chunk.texts)))

    def unpacked(self) -> Iterable[Chunk]:
        """The kept numbers and texts, in order."""
        for chunk in self.chunks:
            if isinstance(chunk, str):
                yield Chunk(texts=chunk.split(_END))
            elif isinstance(chunk, Chunk):
                yield chunk


@dataclass
class Kept:
    """The rows of requested users from all files, and what all rows say about the columns."""

    columns: dict[str, ColumnRows]
    spelling: Spelling
    what: str  # places are called: "line" or "row"
    named: dict[str, str] = field(default_factory=dict)  # columns named in the experiment -> where it names them
    users: dict[str, int] = field(default_factory=dict)  # name -> its code
    counts: dict[int, int] = field(default_factory=dict)  # number of kept rows by user code
    codes: list[Codes] = field(default_factory=list)  # user code of each kept row, by block
    places: list[tuple[str, NDArray[np.int64]]] = field(default_factory=list)  # file label and row positions, by block

    def add(self, label: str, block: Block, codes: Codes, is_kept: NDArray[np.bool_]) -> None:
        """Adds one block; `codes` (n,) are the users of its rows."""
        keeps_all, keeps_some = bool(is_kept.all()), bool(is_kept.any())
        wanted = [name for name, column in self.columns.items() if keeps_some or column.mode in ("found", "category")]
        for name in wanted:
            if name in block.columns:
                self._add_column(self.columns[name], name, block, is_kept, keeps_all=keeps_all, keeps_some=keeps_some)
        if keeps_some:
            self.codes.append(codes if keeps_all else codes[is_kept])
            self.places.append((label, block.lines if keeps_all else block.lines[is_kept]))

    def _add_column(
        self, column: ColumnRows, name: str, block: Block, is_kept: NDArray[np.bool_], *, keeps_all: bool, keeps_some: bool
    ) -> None:
        if column.mode == "category":
            codes = _coded(*block.distinct(name), column, self.spelling)
            if keeps_some:
                column.chunks.append(codes[is_kept])
            return
        chunk = block.cells(name)
        if column.mode == "found":
            if chunk.values is None:
                column.tally.add_cells(chunk.texts, self.spelling)
            else:
                column.tally.add_numbers(chunk.values)
        if keeps_some:
            column.keep(chunk if keeps_all else chunk.at(is_kept))

    def code_of(self, user: str) -> int:
        return self.users.setdefault(user, len(self.users))

    @property
    def n_rows(self) -> int:
        """The number of kept rows."""
        return sum(map(len, self.codes))

    def place(self, row: int) -> tuple[str, int]:
        """File label and position of a kept row."""
        for label, lines in self.places:
            if row < len(lines):
                return label, int(lines[row])
            row -= len(lines)
        raise IndexError(row)


def _coded(texts: Sequence[str], at: Codes, column: ColumnRows, spelling: Spelling) -> Codes:
    """(n,) codes of levels, numbered in order of appearance; -1 for missing. Row i has the text `texts[at[i]]`."""
    spellings, levels = column.spellings, column.levels
    for text in texts:
        if text not in spellings:
            spellings[text] = -1 if spelling.is_missing(text) else levels.setdefault(normal(text.strip()), len(levels))
    return np.array([spellings[text] for text in texts], np.int32)[at]


def joined(parts: Sequence[tuple[list[str | None], Codes]]) -> tuple[list[tuple[str | None, ...]], Codes]:
    """Several coded columns combined into one; only combinations that occur get a code."""
    names: list[tuple[str | None, ...]] = [(name,) for name in parts[0][0]]
    codes = parts[0][1]
    for more, at in parts[1:]:
        pairs, inverse = np.unique(codes.astype(np.int64) * len(more) + at, return_inverse=True)
        names = [(*names[pair // len(more)], more[pair % len(more)]) for pair in pairs.tolist()]
        codes = inverse.astype(np.int32)
    return names, codes
