"""Sorts a list of users into the stacks that hold their rows.

Local steps ask for the same users thousands of times in a row, so the last sorting is cached. The second time in a row, the users' rows are
copied out of the stacks, and kept until other users are requested.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie_client.problems.blocks import Block

MAX_KEPT = 1 << 22  # numbers in the copied rows of a subset: 32 MiB


class Part(NamedTuple):
    """The listed users that are in one stack."""

    listed: Indices | slice  # their positions in the list
    places: Indices  # their rows in the stack
    stack: Block

    def own(self) -> Block:
        return self.stack.take(self.places)


class Subsets:
    """The parts of any list of users. All users, or the same list again, cost little."""

    def __init__(self, stacks: tuple[tuple[Indices, Block], ...], n_users: int) -> None:
        self._blocks = tuple(block for _, block in stacks)
        self._stack_of, self._place_of = np.empty(n_users, dtype=np.int64), np.empty(n_users, dtype=np.int64)
        for number, (positions, _) in enumerate(stacks):
            self._stack_of[positions], self._place_of[positions] = number, np.arange(len(positions))
        is_single = len(stacks) == 1
        self.everyone = tuple(Part(slice(None) if is_single else users, np.arange(len(users)), block) for users, block in stacks)
        self._last: Indices = np.empty(0, dtype=np.int64)
        self._parts: tuple[Part, ...] = ()
        self._kept: list[tuple[Indices | slice, Block]] | None = None

    def parts(self, users: Indices | None) -> tuple[Part, ...]:
        """The listed users by stack; `None` lists all."""
        if users is None:
            return self.everyone
        if not np.array_equal(users, self._last):
            self._last, self._parts, self._kept = users.copy(), self._sorted(users), None
        return self._parts

    def blocks(self, users: Indices | None) -> list[tuple[Indices | slice, Block]]:
        """For each stack: the positions of its users in the list, and a block of only these users."""
        if users is None:
            return [(part.listed, part.stack) for part in self.everyone]
        is_repeated = np.array_equal(users, self._last)
        if is_repeated and self._kept is not None:
            return self._kept
        parts = self.parts(users)
        found = [(part.listed, part.own()) for part in parts]
        if is_repeated and sum(block.size for _, block in found) <= MAX_KEPT:
            self._kept = found
        return found

    def _sorted(self, users: Indices) -> tuple[Part, ...]:
        if len(self._blocks) == 1:
            return (Part(slice(None), self._place_of[users], self._blocks[0]),) if users.size else ()
        stack_of, parts = self._stack_of[users], []
        for number, block in enumerate(self._blocks):
            listed = np.flatnonzero(stack_of == number)
            if listed.size:
                parts.append(Part(listed, self._place_of[users[listed]], block))
        return tuple(parts)


def exact_layout(x: Array) -> bool:
    """Whether x is C-contiguous in the strict sense. For axes of length 1, numpy ignores the strides."""
    return x.flags.c_contiguous and x.flags.aligned and x.strides[-1] == x.itemsize and x.strides[0] == x.itemsize * x.shape[-1]
