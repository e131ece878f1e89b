"""Estimators for linear models of users in known clusters: the minimiser of (2.1) in closed form, and simpler ones to compare with.

Lyu, Hanzely and Kolar, *Personalized Federated Learning with Multiple Known Clusters* (2022), sections 5 and 6.1. Pure functions of arrays;
n users, k clusters, d parameters. A user's loss is theta'A theta/2 - b'theta, up to a constant, with A = X'X/sigma^2 and b = X'y/sigma^2.

The multi-task form (2.3) is solved level by level:

    min  sum_j ( lambda_j/2 |w_j - wbar|^2 + sum_{i in I_j} ( f_i(theta_i) + gamma_i/2 |theta_i - w_j|^2 ) )

A quadratic T, e stands for theta'T theta/2 - e'theta. Tied to a point with weight c and minimised, it leaves a quadratic in that point,
with c (T + cI)^{-1} T and c (T + cI)^{-1} e. So theta_i, then w_j are eliminated, and no system is larger than d x d. Nothing divides by T,
which may be singular; a singular quadratic that is tied to nothing has its minimiser of least norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices

# An eigenvalue of X'X this far below the largest is a zero: the rows do not span the space. Rounding leaves some 1e-15.
_RANK_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Quadratics:
    """theta'A theta/2 - b'theta for each of n users, or for each cluster."""

    curvature: Array  # (n, d, d), the A, symmetric
    slope: Array  # (n, d), the b


@dataclass(frozen=True)
class Minimizer:
    """Of (2.3), and for alpha_j = lambda_j / (lambda_j + Gamma_j), Gamma_j = sum gamma_i, the theta of (2.1)."""

    theta: Array  # (n, d)
    w: Array  # (k, d)
    wbar: Array  # (d,)


def quadratics(features: Sequence[Array], targets: Sequence[Array], variance: float = 1.0) -> Quadratics:
    """The users' losses |y - X theta|^2 / (2 variance) from features (m_i, d) and targets (m_i,)."""
    curvature = np.stack([x.T @ x for x in features]) / variance
    slope = np.stack([x.T @ y for x, y in zip(features, targets, strict=True)]) / variance
    return Quadratics(curvature, slope)


def nearest_convex(curvature: Array) -> Array:
    """The symmetric matrices (n, d, d), in which noise may have left negative eigenvalues, with 0 instead of these."""
    values, axes = np.linalg.eigh(curvature)
    found: Array = np.matmul(axes * np.maximum(values, 0.0)[:, None, :], axes.transpose(0, 2, 1))
    return found


def local(users: Quadratics) -> Array:
    """(n, d): each user on its own, of least norm where its rows do not span the space."""
    inverse: Array = np.linalg.pinv(users.curvature, rcond=_RANK_TOLERANCE, hermitian=True).astype(np.float64, copy=False)
    return _applied(inverse, users.slope)


def single_model(users: Quadratics) -> Array:
    """(d,): one model for all, of least norm where their rows do not span the space."""
    return np.asarray(local(_sums(users, np.zeros(len(users.slope), dtype=np.int64), 1))[0])


def single_cluster(users: Quadratics, gamma: float | Array) -> Array:
    """(n, d): models tied to one common point with gamma (of all, or (n,)), as by (2.1) with one cluster."""
    n = len(users.slope)
    return known_clusters(users, np.zeros(n, dtype=np.int64), np.broadcast_to(gamma, n), np.array([np.inf])).theta


def known_clusters(users: Quadratics, cluster_of: Indices, gamma: Array, lam: Array) -> Minimizer:
    """The minimiser of (2.3) for users of the clusters `cluster_of` (n,), gamma (n,) and lambda (k,); infinity makes w_j = wbar."""
    clusters = _sums(_eliminated(users, gamma), cluster_of, len(lam))
    everyone = _sums(_eliminated(clusters, lam), np.zeros(len(lam), dtype=np.int64), 1)
    wbar = local(everyone)[0]
    w = _settled(clusters, lam, np.broadcast_to(wbar, clusters.slope.shape))
    return Minimizer(_settled(users, gamma, w[cluster_of]), w, wbar)


def lambda_of(alpha: Array, gamma_sums: Array) -> Array:
    """lambda_j (k,) of (2.3) for alpha_j of (2.1) and Gamma_j: alpha_j Gamma_j / (1 - alpha_j)."""
    lam = np.full(len(alpha), np.inf)
    np.divide(alpha * gamma_sums, 1.0 - alpha, out=lam, where=alpha < 1.0)
    return lam


def penalty(theta: Array, cluster_of: Indices, gamma: Array, alpha: Array) -> float:
    """What (2.1) adds to the losses of models theta (n, d), for gamma (n,) and alpha (k,)."""
    shares = alpha[cluster_of]
    centres = _means(theta, gamma, cluster_of, len(alpha))
    centre = _means(theta, shares * gamma, np.zeros(len(theta), dtype=np.int64), 1)
    within, between = (np.square(theta - point).sum(axis=1) for point in (centres[cluster_of], centre))
    return float((gamma / 2 * ((1.0 - shares) * within + shares * between)).sum())


def cross_validated(features: Sequence[Array], targets: Sequence[Array], penalties: Sequence[float], n_folds: int = 5) -> float:
    """The gamma of `single_cluster` with the smallest squared error on rows left out, each once; the first of equals.

    Row r of user i is left out in fold (r + i) mod n_folds, so that of users with a single row most are left in.
    """
    errors = np.zeros(len(penalties))
    whole = quadratics(features, targets)
    for fold in range(n_folds):
        kept = [(np.arange(len(x)) + i) % n_folds != fold for i, x in enumerate(features)]
        rows, values = ([array[these] for array, these in zip(arrays, kept, strict=True)] for arrays in (features, targets))
        rest = quadratics(rows, values)
        left_out = Quadratics(whole.curvature - rest.curvature, whole.slope - rest.slope)
        errors += [_values(left_out, single_cluster(rest, gamma)).sum() for gamma in penalties]
    return float(penalties[int(np.argmin(errors))])


def _eliminated(below: Quadratics, weight: Array) -> Quadratics:
    """min_x [ x'Tx/2 - e'x + weight/2 |x - z|^2 ] as quadratics in z; weight (n,), 0 and infinity included."""
    ties = np.isfinite(weight)[:, None, None]
    c = np.where(np.isfinite(weight), weight, 0.0)[:, None, None]
    parts = np.concatenate([below.curvature, below.slope[:, :, None]], axis=2)
    parts = np.where(ties, c * _solved(below, weight, parts), parts)
    return Quadratics(parts[:, :, :-1], parts[:, :, -1])


def _settled(below: Quadratics, weight: Array, above: Array) -> Array:
    """The x (n, d) of `_eliminated` for the points `above` (n, d)."""
    c = np.where(np.isfinite(weight), weight, 0.0)[:, None]
    x = _solved(below, weight, (below.slope + c * above)[:, :, None])[:, :, 0]
    x = np.where(np.isfinite(weight)[:, None], x, above)
    free = np.flatnonzero(weight == 0.0)
    x[free] = local(Quadratics(below.curvature[free], below.slope[free]))
    return x


def _solved(below: Quadratics, weight: Array, right: Array) -> Array:
    """(T + weight I)^{-1} right; where the weight is 0 or infinite, `right` itself, which its callers do not use."""
    identity = np.eye(below.slope.shape[1])
    tied = ((weight > 0.0) & np.isfinite(weight))[:, None, None]
    c = np.where(tied, weight[:, None, None], 0.0)
    return np.linalg.solve(np.where(tied, below.curvature + c * identity, identity), right).astype(np.float64, copy=False)


def _sums(below: Quadratics, group_of: Indices, n_groups: int) -> Quadratics:
    """The quadratics of groups: sums in member order."""
    d = below.slope.shape[1]
    curvature, slope = np.zeros((n_groups, d, d)), np.zeros((n_groups, d))
    np.add.at(curvature, group_of, below.curvature)
    np.add.at(slope, group_of, below.slope)
    return Quadratics(curvature, slope)


def _means(theta: Array, weights: Array, group_of: Indices, n_groups: int) -> Array:
    """(n_groups, d) weighted means of the rows of theta; 0 for a group without weight."""
    sums, totals = np.zeros((n_groups, theta.shape[1])), np.zeros(n_groups)
    np.add.at(sums, group_of, weights[:, None] * theta)
    np.add.at(totals, group_of, weights)
    return np.divide(sums, totals[:, None], out=np.zeros_like(sums), where=totals[:, None] > 0)


def _values(users: Quadratics, theta: Array) -> Array:
    return np.asarray((theta * (_applied(users.curvature, theta) / 2 - users.slope)).sum(axis=1))


def _applied(matrices: Array, vectors: Array) -> Array:
    return np.asarray(np.matmul(matrices, vectors[:, :, None])[:, :, 0])
