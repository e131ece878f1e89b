"""Sums and products of many users' rows and matrices at once, which do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csc_matrix

from coterie.arrays import Array, Indices


def sums_over(groups: Indices, k: int) -> csc_matrix:
    """(k, n): the sums over the members of each group (n,)."""
    n = len(groups)
    return csc_matrix((np.ones(n), groups, np.arange(n + 1)), shape=(k, n))


def row_norms(rows: Array) -> Array:
    return np.asarray(np.sqrt(np.einsum("md,md->m", rows, rows)))


def dot(a: Array, b: Array) -> float:
    return float((a * b).sum())


def each(matrices: Array, rows: Array) -> Array:
    """Each user's matrix (n, d, d) times its row (n, d)."""
    return np.asarray(np.einsum("nij,nj->ni", matrices, rows))
