"""Rows of a table as they stream by in blocks: whose each row is, and of each column in use the cells of the users that are kept.

Types are found from the cells of all rows, also of users that nobody asked for: they must not depend on who is loaded. Columns whose types
are known beforehand are looked at in kept rows only, so that one user's bad row stops the host that holds this user, and no other.
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
    """Cells of one column: numbers of a kind, NaN where one is missing; or text as it stands in the table, "" where it is null."""

    values: Array | None = None
    texts: Sequence[str] = ()
    kind: str = "number"  # of the values

    def at(self, rows: NDArray[np.bool_]) -> Chunk:
        """Those of some rows."""
        if self.values is not None:
            return Chunk(self.values[rows], kind=self.kind)
        return Chunk(texts=[cell for cell, is_kept in zip(self.texts, rows.tolist(), strict=True) if is_kept])


class Block(Protocol):
    """Some hundreds of rows, one after the other."""

    @property
    def lines(self) -> NDArray[np.int64]:
        """(n,) where the rows stand: lines of a text, or rows from 1."""
        ...

    def coded(self, column: str) -> tuple[list[str | None], Codes]:
        """Distinct texts of a column, None where it is missing, and which one each row has."""
        ...

    def chunks(self, columns: Sequence[str], texts: Collection[str]) -> dict[str, Chunk]:
        """Cells of these columns; of those in `texts` as text."""
        ...


@dataclass
class ColumnRows:
    """What is kept of one column."""

    mode: Mode
    tally: Tally = field(default_factory=Tally)
    chunks: list[Chunk | str | Codes] = field(default_factory=list)  # texts are one text, with a sign between them
    levels: dict[str, int] = field(default_factory=dict)  # codes of a category's levels, of all rows
    spellings: dict[str, int] = field(default_factory=dict)  # the same of the cells as they stand; -1: missing

    def keep(self, chunk: Chunk) -> None:
        """Some rows' cells; those of a category are coded already."""
        if chunk.values is not None:
            self.chunks.append(chunk)
            return
        text = _END.join(chunk.texts)
        self.chunks.append(text if text.count(_END) == len(chunk.texts) - 1 else Chunk(texts=tuple(chunk.texts)))

    def unpacked(self) -> Iterable[Chunk]:
        """What was kept, in order."""
        for chunk in self.chunks:
            if isinstance(chunk, str):
                yield Chunk(texts=chunk.split(_END))
            elif isinstance(chunk, Chunk):
                yield chunk


@dataclass
class Kept:
    """The rows of the users that were asked for, from all files, and what is known of the columns of all rows."""

    columns: dict[str, ColumnRows]
    spelling: Spelling
    what: str  # places are called: "line" or "row"
    named: dict[str, str] = field(default_factory=dict)  # columns that the experiment names, with their places in it
    users: dict[str, int] = field(default_factory=dict)  # name -> its code
    counts: dict[int, int] = field(default_factory=dict)  # kept rows of a user, by its code
    codes: list[Codes] = field(default_factory=list)  # the users of the rows, block by block
    places: list[tuple[str, NDArray[np.int64]]] = field(default_factory=list)  # label of the file, and the rows' lines

    def add(self, label: str, block: Block, codes: Codes, is_kept: NDArray[np.bool_]) -> None:
        """One block; `codes` (n,) are the users of its rows."""
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
        """How many rows are kept."""
        return sum(map(len, self.codes))

    def place(self, row: int) -> tuple[str, int]:
        """Label of the file and line of a kept row."""
        for label, lines in self.places:
            if row < len(lines):
                return label, int(lines[row])
            row -= len(lines)
        raise IndexError(row)


def _coded(texts: Sequence[str], column: ColumnRows, spelling: Spelling) -> Codes:
    """(n,) the codes of levels, new ones numbered as they come; -1 where one is missing."""
    spellings, levels = column.spellings, column.levels
    for text in set(texts) - spellings.keys():
        spellings[text] = -1 if spelling.is_missing(text) else levels.setdefault(normal(text.strip()), len(levels))
    return np.fromiter(map(spellings.__getitem__, texts), np.int32, len(texts))


def codes_of(texts: Sequence[Any]) -> tuple[list[Any], Codes]:
    """Distinct values in the order of their first rows, and which one each row has."""
    index: dict[Any, int] = {}
    codes = np.fromiter((index.setdefault(text, len(index)) for text in texts), np.int32, len(texts))
    return list(index), codes


def joined(parts: Sequence[tuple[list[str | None], Codes]]) -> tuple[list[tuple[str | None, ...]], Codes]:
    """Several coded columns as one, of the combinations that there are."""
    names: list[tuple[str | None, ...]] = [(name,) for name in parts[0][0]]
    codes = parts[0][1]
    for more, at in parts[1:]:
        pairs, inverse = np.unique(codes.astype(np.int64) * len(more) + at, return_inverse=True)
        names = [(*names[pair // len(more)], more[pair % len(more)]) for pair in pairs.tolist()]
        codes = inverse.astype(np.int32)
    return names, codes
