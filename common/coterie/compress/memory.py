"""What an end of a link remembers of each user's vectors from one message to the next, for error feedback.

With `feedback` a user remembers e <- x + e - C(x + e), what its answer C(x + e) lost (Seide and others, 2014). With `against: last` both
ends remember g <- g + C(x - g), the server's copy of the user's vector x (EF21: Richtarik, Sokolov and Fatkhullin, 2021, algorithm 2).

The rows of a user are replaced and never changed. A parent may have to say what it remembered after an earlier exchange, so it keeps what
was replaced in the round under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.wire.precision import AnyArray

Key = tuple[str, int]  # the field of a kind, and the number of a user in the run


@dataclass
class Memory:
    """A vector for each field and user that has one. `begin` says in which exchange and round changes are made."""

    rows: dict[Key, AnyArray] = field(default_factory=dict)
    _replaced: list[tuple[int, Key, AnyArray | None]] = field(default_factory=list)  # exchange, and the row before it
    _seq: int = 0
    _round: tuple[int, int] = (0, 0)

    def begin(self, seq: int, at: tuple[int, int]) -> None:
        """Changes from now on are made in exchange `seq`, in this stage and round."""
        if at != self._round:
            self._replaced, self._round = [], at
        self._seq = seq

    def of(self, name: str, numbers: Indices) -> Sequence[AnyArray | None]:
        """The rows of a field for these users; None for a user without one."""
        return [self.rows.get((name, number)) for number in numbers.tolist()]

    def put(self, name: str, numbers: Indices, rows: AnyArray) -> None:
        """Replaces the rows of these users."""
        for number, row in zip(numbers.tolist(), rows, strict=True):
            if self._seq:
                self._replaced.append((self._seq, (name, number), self.rows.get((name, number))))
            self.rows[name, number] = np.array(row)

    def tree(self, seq: int | None = None) -> dict[str, Any]:
        """As a snapshot tree; with `seq`, as it was after that exchange."""
        rows = dict(self.rows)
        for one, key, before in reversed(self._replaced):
            if seq is not None and one > seq:
                if before is None:
                    rows.pop(key, None)
                else:
                    rows[key] = before
        found: dict[str, Any] = {}
        for name in sorted({name for name, _ in rows}):
            numbers = sorted(number for one, number in rows if one == name)
            found[name] = {"numbers": np.array(numbers, np.int64), "rows": [rows[name, number] for number in numbers]}
        return found

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> Memory:
        """The inverse of `tree`."""
        listed = ((name, *found) for name, one in tree.items() for found in zip(one["numbers"].tolist(), one["rows"], strict=True))
        return Memory({(name, number): row for name, number, row in listed})
