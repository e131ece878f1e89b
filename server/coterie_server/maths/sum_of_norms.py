"""Convex clustering of points on a graph, the function `coterie.sum_of_norms`; `ssnal` has the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array, issparse

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie_server.maths import sieving, ssnal


@dataclass(frozen=True)
class SumOfNorms:
    """A solution of `sum_of_norms`, with its proof."""

    x: Array  #: (N, d) one point for each point given
    clusters: Indices  #: (N,) of points that are joined along pairs with equal x, numbered by the first member
    gap: float  #: The value is at most this share above the minimum: the duality gap over the value.
    iterations: int  #: Newton steps
    objective: float  #: the value
    lam: float  #: the penalty LAM
    z: Array = field(repr=False)  #: (m, d) the dual of each pair with a weight, in lexicographic order


def sum_of_norms(
    a: ArrayLike,
    weights: Any = None,
    lam: float = 1.0,
    *,
    hessians: ArrayLike | None = None,
    tolerance: float = 1e-6,
    start: SumOfNorms | None = None,
    limit: int = 2000,
) -> SumOfNorms:
    """The sum-of-norms clustering of points a_i, the rows of `a` (N, d).

    It minimises `sum_i (x_i - a_i)' H_i (x_i - a_i) / 2 + LAM sum_(i,j) w_ij |x_i - x_j|` over x (N, d), each pair once. Larger penalties
    LAM join more points.

    `weights` are a symmetric or triangular sparse matrix (N, N), or a tuple of pairs (m, 2) and weights (m,). None is a weight of 1 for
    each pair. `hessians` (N, d, d) are the positive definite H_i, by default identities. `start` is a solution for another LAM with the
    same points and weights: along a path of penalties each solution is a good start for the next.

    It ends when the relative duality gap is at most `tolerance`. The same input gives the same bits, whatever the number of threads.
    Raises ConfigError for input that is not as above, and RunError when `limit` Newton steps, or rounding, leave a larger gap.
    """
    points = np.array(a, float)
    if points.ndim != 2 or 0 in points.shape:
        raise ConfigError(f"the points have shape {points.shape}, want (N, d) with at least one point and one coordinate")
    if not np.isfinite(points).all():
        raise ConfigError("the points contain NaN or infinity, want finite numbers")
    if not 0 <= lam < np.inf:
        raise ConfigError(f"lam is {lam}, want a finite number of at least 0")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}, want a number between 0 and 1")
    n, d = points.shape
    graph = graph_of(n, weights)
    curvatures = np.broadcast_to(np.eye(d), (n, d, d)) if hessians is None else _definite(np.asarray(hessians, float), n, d)
    centre = points.mean(axis=0)
    shifted = points - centre
    linear = np.einsum("nij,nj->ni", curvatures, shifted)
    x, z = shifted, None
    if start is not None:
        if start.x.shape != points.shape or start.z.shape != (graph.m, d):
            found = f"{start.x.shape[0]} points of {start.x.shape[1]} coordinates and {len(start.z)} pairs"
            raise ConfigError(f"start has {found}, want those of this problem: {n}, {d} and {graph.m}")
        x, z = start.x - centre, moved_along(start.z, graph.weights, start.lam, lam)
    # Points that differ by rounding alone are one point: the objective of such a problem is rounding too.
    rounding = float(np.einsum("nii->", curvatures)) * (np.finfo(float).eps * float(np.abs(points).max())) ** 2
    found_ = sieving.minimise(graph, curvatures, linear, lam, x, z, relative=tolerance, absolute=rounding, limit=limit)
    gap = found_.gap / found_.objective if found_.gap > rounding else 0.0
    if gap > tolerance:
        raise RunError(f"sum_of_norms has a relative gap of {gap:.1e} after {found_.n_newton} Newton steps, want at most {tolerance:g}")
    return SumOfNorms(found_.x + centre, found_.clusters, gap, found_.n_newton, found_.objective, lam, found_.z)


def moved_along(z: Array, weights: Array, before: float, penalty: float) -> Array:
    """The dual z (m, d) of penalty `before` as a start for another: of pairs that are apart it grows with the penalty."""
    if before == 0:
        return z
    is_apart = np.linalg.norm(z, axis=1) >= before * weights * (1 - 1e-9)
    return np.where(is_apart[:, None], z * (penalty / before), z)


def graph_of(n: int, weights: Any) -> ssnal.Graph:
    """The graph of n points with weights in one of the forms that `sum_of_norms` takes. ConfigError where they are in none."""
    if weights is None:
        return ssnal.Graph.complete(n)
    if issparse(weights):
        return _graph(n, *_pairs_of_matrix(n, weights))
    if not isinstance(weights, Sequence) or len(weights) != 2:
        raise ConfigError(f"the weights are a {type(weights).__name__}, want a sparse matrix or a tuple of pairs and weights")
    pairs, values = np.asarray(weights[0]), np.asarray(weights[1], float)
    if pairs.size == 0:
        pairs = pairs.reshape(0, 2).astype(int)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or values.shape != (len(pairs),) or not np.issubdtype(pairs.dtype, np.integer):
        raise ConfigError(f"the pairs have shape {pairs.shape} and the weights {values.shape}, want integers (m, 2) and numbers (m,)")
    return _graph(n, pairs, values)


def _pairs_of_matrix(n: int, matrix: Any) -> tuple[NDArray[Any], Array]:
    if matrix.shape != (n, n):
        raise ConfigError(f"the matrix of weights has shape {matrix.shape}, want {(n, n)}, one row and column for each point")
    entries = coo_array(matrix)
    entries.sum_duplicates()
    rows, columns = entries.coords
    values = np.asarray(entries.data, float)
    upper, lower = rows < columns, rows > columns
    if upper.any() and lower.any():
        if abs(entries - entries.T).max() > 1e-12 * abs(values).max():
            raise ConfigError("the matrix of weights is not symmetric, want a symmetric or a triangular one")
        lower = np.zeros_like(lower)
    kept = upper | lower
    return np.stack([rows[kept], columns[kept]], axis=1), values[kept]


def _graph(n: int, pairs: NDArray[Any], values: Array) -> ssnal.Graph:
    first, second = pairs[:, 0], pairs[:, 1]
    if len(pairs) and not (pairs.min() >= 0 and pairs.max() < n):
        wrong = pairs.min() if pairs.min() < 0 else pairs.max()
        raise ConfigError(f"a pair has point {wrong}, want points from 0 to {n - 1}")
    if (first == second).any():
        raise ConfigError(f"a pair joins point {first[first == second][0]} to itself, want two different points")
    if not (np.isfinite(values).all() and (values >= 0).all()):
        wrong = values[~(np.isfinite(values) & (values >= 0))][0]
        raise ConfigError(f"a weight is {wrong}, want finite weights of at least 0")
    return ssnal.Graph.of(n, first, second, values)


def _definite(hessians: Array, n: int, d: int) -> Array:
    if hessians.shape != (n, d, d):
        raise ConfigError(f"the Hessians have shape {hessians.shape}, want {(n, d, d)}")
    symmetric = np.asarray((hessians + hessians.transpose(0, 2, 1)) / 2)
    if not np.isfinite(hessians).all() or np.abs(hessians - symmetric).max() > 1e-9 * np.abs(hessians).max():
        raise ConfigError("a Hessian is not a symmetric matrix of finite numbers")
    bad = np.flatnonzero(np.linalg.eigvalsh(symmetric)[:, 0] <= 0)
    if bad.size:
        raise ConfigError(f"the Hessian of point {bad[0]} is not positive definite")
    return symmetric
