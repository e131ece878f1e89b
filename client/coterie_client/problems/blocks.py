"""What a loss must offer for the users of one stack: the seam between the solvers and the losses.

Row k of every result is a function of row k of the arguments and of user k's own rows, to the last bit. What holds
that: stacked `matmul`, `vecdot`, `solve` and `eigvalsh`, which do one BLAS or LAPACK call for each user on arrays of
one layout, its order of summation set by (R, d) alone. `einsum` is avoided: its order is the choice of an iterator that
sees the axis of users too.
"""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices

Flags = NDArray[np.bool_]


class Block(Protocol):
    """The losses f_i of k users with the same padded row count R. Arguments x are C-contiguous (k, d)."""

    @property
    def size(self) -> int:
        """How many numbers the users' rows are, padding included."""

    @property
    def steepness(self) -> Array:
        """(k,) the size of the curvature of f_i near its minimiser, cheap to have; a scale, and for most losses a bound."""

    @property
    def pull(self) -> Array:
        """(k,) the size of the row part's gradient near the origin; a scale."""

    @property
    def floor(self) -> Array:
        """(k,) a lower bound on the curvature of f_i everywhere, cheap to have."""

    def take(self, rows: Indices) -> Self:
        """The block of some of its users."""

    def batch(self, rows: Indices) -> Self:
        """Of a block of one user, the mean over these rows of the f_il, whose mean over all is f_i: for its value and its gradient."""

    def look(self, x: Array) -> Array:
        """What the rows see of the models, shared by the three functions below: (k, R) or (k, R, d)."""

    def value(self, x: Array, seen: Array) -> Array:
        """(k,) f_i(x_i)."""

    def gradient(self, x: Array, seen: Array) -> Array:
        """(k, d)."""

    def hessian(self, x: Array, seen: Array) -> Array:
        """(k, d, d), an element of the generalised Hessian where f_i is not twice differentiable; a fresh array."""

    def closed_form(self, tilt: Array, ridge: Array) -> Array | None:
        """(k, d) argmin f_i + ridge_i/2 |x|^2 - tilt_i.x, NaN for users without a closed form; None if none has."""

    def smoothness(self) -> Array:
        """(k,) the largest curvature of f_i: the least Lipschitz constant of the gradient that holds for any targets."""

    def strong_convexity(self) -> Array:
        """(k,) the largest known mu_i such that f_i - mu_i/2 |x|^2 is convex."""

    def row_gradient(self, x: Array, users: Indices, rows: Indices) -> Array:
        """(n, d) for user users[i] of the block at x_i: the gradient of m_i times the part of row rows[i] in f_i, the penalty in full.

        Its mean over a user's rows is the gradient of f_i. A row index is below the user's m_i; this is not checked here.
        """

    def row_smoothness(self) -> Array:
        """(k,) the largest curvature that any of these functions of the user's rows can have."""

    def row_strong_convexity(self) -> Array:
        """(k,) a lower bound on the curvature of all of them."""


def gathered(rows: Array, users: Indices, numbers: Indices) -> Array:
    """(n, d) row numbers[i] of user users[i], out of (k, R, d): one flat gather, whatever R."""
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
    """(k,) Euclidean norms of the rows of x (k, d), each row by itself."""
    length: Array = np.sqrt(np.vecdot(x, x))
    return length
