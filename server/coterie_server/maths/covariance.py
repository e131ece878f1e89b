"""Covariance of an estimate that minimises a weighted sum of row losses and a ridge penalty. Pure functions of arrays.

The users of a group have one model, the minimiser of sum_i omega_i sum_r phi(s_r, y_r) + 1/2 sum_j c_j x_j^2. With H_i and G_i of
`coterie.families.inference` and A = sum_i omega_i H_i + diag(c):

    robust     A^-1 (sum_i omega_i^2 G_i) A^-1             the sandwich of Huber (1967) and White (1980), HC0 for least squares
    classical  v A^-1 (sum_i omega_i^2 H_i) A^-1           with v the variance of a row: 1 for a likelihood, s^2 for least squares

With all omega_i = 1 and without a penalty, the classical one is v H^-1. Neither includes the bias that a penalty causes.
"""

from __future__ import annotations

import numpy as np

from coterie.arrays import Array

# An eigenvalue of A this far below the largest counts as zero: some combination of coefficients is not determined.
_RANK_TOLERANCE = 1e-12


def sandwich(hessians: Array, meats: Array, weights: Array, ridge: Array, variance: float = 1.0) -> Array:
    """(d, d) covariance for the users' H_i (n, d, d), the G_i or H_i in the middle (n, d, d), omega (n,) and c (d,).

    All NaN if A is singular, or a user's sums are missing.
    """
    d = ridge.size
    bread, meat = (np.zeros((d, d)) for _ in range(2))
    for hessian, middle, weight in zip(hessians, meats, weights, strict=True):  # in member order
        bread += weight * hessian
        meat += weight * weight * middle
    bread += np.diag(ridge)
    if not np.isfinite(bread).all() or not is_definite(bread):
        return np.full((d, d), np.nan)
    half = np.linalg.solve(bread, meat)
    found = variance * np.linalg.solve(bread, half.T)
    symmetric: Array = (found + found.T) / 2
    return symmetric


def is_definite(matrix: Array) -> bool:
    """Whether a symmetric matrix (d, d) is positive definite beyond rounding, whatever the units of its rows."""
    sizes = np.diagonal(matrix)
    if not (sizes > 0.0).all():
        return False
    scale = 1.0 / np.sqrt(sizes)
    spectrum = np.linalg.eigvalsh(matrix * scale[:, None] * scale)
    return bool(spectrum[0] > _RANK_TOLERANCE * spectrum[-1])


def symmetric(triangles: Array, d: int) -> Array:
    """Symmetric matrices (n, d, d) from their upper triangles (n, d(d+1)/2)."""
    rows, columns = np.triu_indices(d)
    full = np.zeros((len(triangles), d, d))
    full[:, rows, columns] = triangles
    full[:, columns, rows] = triangles
    return full
