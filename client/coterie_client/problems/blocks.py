"""The interface between solvers and losses: the losses of the users of one stack.

Row k of every result is a function of row k of the arguments and of user k's own rows, to the last bit. Stacked `matmul`, `vecdot`, `solve`
and `eigvalsh` guarantee this: they make one BLAS or LAPACK call per user on arrays of one layout, so only (R, d) sets the order of
summation. `einsum` is avoided: its iterator chooses the order, and sees the axis of users too.

Local steps ask for the same users thousands of times in a row, so `Subsets` caches the last sorting of users into stacks. The second
time in a row, the users' rows are copied out of the stacks, and kept until other users are requested.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Block(Protocol):
    """The losses f_i of k users with the same padded row count R. Arguments x are C-contiguous (k, d)."""

    rows: Array  # (k, R, d) design rows, or points
    targets: Array  # (k, R)
    weights: Array  # (k, R), zero for padding
    counts: Array  # (k,) the m_i
    share: Array  # (k,) m_i times the weight of a row, in exact arithmetic: 1 or m_i
    steepness: Array  # (k,) the scale of the curvature of f_i near its minimiser, cheap to compute; for most losses an upper bound
    pull: Array  # (k,) the scale of the gradient of f_i near the origin, without its penalty
    floor: Array  # (k,) a lower bound on the curvature of f_i everywhere, cheap to compute

    def take(self, rows: Indices | slice) -> Self:
        """The block of these users."""
        names = ("rows", "targets", "weights", "counts", "share", "steepness", "pull", "floor")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def batch(self, places: Indices, share: Array) -> Self:
        """For each of k users with this share (k,): the mean of f_il over the rows l at these places (k, b) in the block, where f_i is
        the mean over all.

        Supports value and gradient.
        """
        (k, b), (n, size, d) = places.shape, self.rows.shape
        weights = np.repeat(share / b, b).reshape(k, b)
        return replace(self, rows=self.rows.reshape(n * size, d).take(places, axis=0), targets=self.targets.take(places), weights=weights)

    def look(self, x: Array) -> Array:
        """The values that the three functions below share, from rows and models: (k, R) or (k, R, d)."""

    def value(self, x: Array, seen: Array) -> Array:
        """(k,) f_i(x_i)."""

    def gradient(self, x: Array, seen: Array) -> Array:
        """(k, d)."""

    def hessian(self, x: Array, seen: Array) -> Array:
        """(k, d, d), an element of the generalised Hessian where f_i is not twice differentiable; a fresh array."""

    def closed_form(self, tilt: Array, ridge: Array) -> Array | None:  # noqa: ARG002 - for those who have one
        """(k, d) argmin f_i + ridge_i/2 |x|^2 - tilt_i.x, NaN for users without a closed form; None if no user has one."""
        return None

    def curvatures(self) -> tuple[Array, Array]:
        """(k,) the largest curvature of f_i: the least Lipschitz constant of the gradient that holds for all targets. And (k,) the largest
        known mu_i for which f_i - mu_i/2 |x|^2 is convex."""

    def row_gradient(self, x: Array, users: Indices, rows: Indices) -> Array:
        """(n, d) gradients at x_i, for user users[i] of the block: m_i times the part of row rows[i] in f_i, plus the full penalty.

        Its mean over a user's rows is the gradient of f_i. Row indices must be below m_i; this is not checked.
        """

    def row_smoothness(self) -> Array:
        """(k,) the largest curvature of any of these row functions."""

    def row_strong_convexity(self) -> Array:
        """(k,) a lower bound on the curvature of all these row functions."""


def gathered(rows: Array, users: Indices, numbers: Indices) -> Array:
    """(n, d) row numbers[i] of user users[i], from (k, R, d): one flat gather, whatever R."""
    k, size, d = rows.shape
    found: Array = rows.reshape(k * size, d).take(users * size + numbers, axis=0)
    return found


def diagonal(matrices: Array) -> Array:
    """(k, d), a writable view of the diagonals of fresh (k, d, d) matrices."""
    k, d, _ = matrices.shape
    return matrices.reshape(k, d * d)[:, :: d + 1]


def spectrum(matrices: Array) -> Array:
    """(k, d) eigenvalues, ascending, of symmetric (k, d, d) matrices."""
    return np.linalg.eigvalsh(matrices).astype(np.float64, copy=False)


def norm(x: Array) -> Array:
    """(k,) Euclidean norms of the rows of x (k, d)."""
    length: Array = np.sqrt(np.vecdot(x, x))
    return length


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
        if is_repeated and sum(block.rows.size for _, block in found) <= MAX_KEPT:
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
