"""The interface between solvers and losses: the losses of the users of one stack.

Row k of every result is a function of row k of the arguments and of user k's own rows, to the last bit. Stacked `matmul`, `vecdot`, `solve`
and `eigvalsh` guarantee this: they make one BLAS or LAPACK call per user on arrays of one layout, so only (R, d) sets the order of
summation. `einsum` is avoided: its iterator chooses the order, and sees the axis of users too.
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
        """Number of entries in the users' rows, padding included."""

    @property
    def steepness(self) -> Array:
        """(k,) the scale of the curvature of f_i near its minimiser, cheap to compute; for most losses an upper bound."""

    @property
    def pull(self) -> Array:
        """(k,) the scale of the gradient of f_i near the origin, without its penalty."""

    @property
    def floor(self) -> Array:
        """(k,) a lower bound on the curvature of f_i everywhere, cheap to compute."""

    def take(self, rows: Indices) -> Self:
        """The block of these users."""

    def batch(self, rows: Indices) -> Self:
        """For a block of one user: the mean of f_il over these rows l, where f_i is the mean over all. Supports value and gradient."""

    def look(self, x: Array) -> Array:
        """The values that the three functions below share, from rows and models: (k, R) or (k, R, d)."""

    def value(self, x: Array, seen: Array) -> Array:
        """(k,) f_i(x_i)."""

    def gradient(self, x: Array, seen: Array) -> Array:
        """(k, d)."""

    def hessian(self, x: Array, seen: Array) -> Array:
        """(k, d, d), an element of the generalised Hessian where f_i is not twice differentiable; a fresh array."""

    def closed_form(self, tilt: Array, ridge: Array) -> Array | None:
        """(k, d) argmin f_i + ridge_i/2 |x|^2 - tilt_i.x, NaN for users without a closed form; None if no user has one."""

    def smoothness(self) -> Array:
        """(k,) the largest curvature of f_i: the least Lipschitz constant of the gradient that holds for all targets."""

    def strong_convexity(self) -> Array:
        """(k,) the largest known mu_i for which f_i - mu_i/2 |x|^2 is convex."""

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
