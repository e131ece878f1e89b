"""Collects the rows of a table block by block: the user of each row, and the used columns of the requested users.

Types are inferred from all rows, also those of other users, because types must not depend on who is loaded. Columns with known types are
read only in requested rows. So one user's bad row stops only the host of this user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.text.names import normal
from coterie_client.data.tables.cells import Spelling
from coterie_client.data.tables.column_types import Tally

Codes = NDArray[np.int32]
Mode = Literal["found", "number", "boolean", "date", "category"]
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


class Block(Protocol):
    """Some hundreds of consecutive rows."""

    @property
    def lines(self) -> NDArray[np.int64]:
        """(n,) positions of the rows: lines of a text file, else rows from 1."""

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        """Distinct texts of a column, None for missing, and the index of each row's text."""

    def chunks(self, columns: Sequence[str], texts: Collection[str]) -> dict[str, Chunk]:
        """Cells of these columns, as text for those in `texts`."""


@dataclass
class ColumnRows:
    """The kept cells of one column."""

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
        as_texts = {name for name in wanted if self.columns[name].mode == "category"}
        chunks = block.chunks(wanted, as_texts) if wanted else {}
        for name, chunk in chunks.items():
            self._add_chunk(self.columns[name], chunk, is_kept, keeps_all=keeps_all, keeps_some=keeps_some)
        if keeps_some:
            self.codes.append(codes if keeps_all else codes[is_kept])
            self.places.append((label, block.lines if keeps_all else block.lines[is_kept]))

    def _add_chunk(self, column: ColumnRows, chunk: Chunk, is_kept: NDArray[np.bool_], *, keeps_all: bool, keeps_some: bool) -> None:
        if column.mode == "category":
            codes = _coded(chunk.texts, column, self.spelling)
            if keeps_some:
                column.chunks.append(codes[is_kept])
            return
        if column.mode == "found":
            if chunk.values is None:
                column.tally.add_cells(chunk.texts, self.spelling)
            else:
                column.tally.add_numbers(chunk.values)
        if keeps_some:
            column.keep(chunk if keeps_all else chunk.at(is_kept))

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


def _coded(texts: Sequence[str], column: ColumnRows, spelling: Spelling) -> Codes:
    """(n,) codes of levels, numbered in order of appearance; -1 for missing."""
    spellings, levels = column.spellings, column.levels
    for text in set(texts) - spellings.keys():
        spellings[text] = -1 if spelling.is_missing(text) else levels.setdefault(normal(text.strip()), len(levels))
    return np.fromiter(map(spellings.__getitem__, texts), np.int32, len(texts))


def codes_of(texts: Sequence[Any]) -> tuple[list[Any], Codes]:
    """Distinct values in order of appearance, and the index of each row's value."""
    index: dict[Any, int] = {}
    codes = np.fromiter((index.setdefault(text, len(index)) for text in texts), np.int32, len(texts))
    return list(index), codes


def joined(parts: Sequence[tuple[list[str | None], Codes]]) -> tuple[list[tuple[str | None, ...]], Codes]:
    """Several coded columns combined into one; only combinations that occur get a code."""
    names: list[tuple[str | None, ...]] = [(name,) for name in parts[0][0]]
    codes = parts[0][1]
    for more, at in parts[1:]:
        pairs, inverse = np.unique(codes.astype(np.int64) * len(more) + at, return_inverse=True)
        names = [(*names[pair // len(more)], more[pair % len(more)]) for pair in pairs.tolist()]
        codes = inverse.astype(np.int32)
    return names, codes
