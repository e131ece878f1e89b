"""Variance components of linear models of users in known clusters, and conditional covariances, from sufficient statistics alone.

The model is y_i = X_i (beta + b_cluster + b_user) + e with b_cluster ~ N(0, tau_c^2 I), b_user ~ N(0, tau_u^2 I), e ~ N(0, sigma^2), as in
Lyu, Hanzely and Kolar (2022), with common variances. A user's statistics are S = X'X, r = X'y, y'y and its number of rows.

With rho = tau^2 / sigma^2, Woodbury's identity eliminates a random effect b ~ N(0, tau^2 I) from statistics (S, r, q):

    S <- (I + rho S)^-1 S,   r <- (I + rho S)^-1 r,   q <- q - rho r'(I + rho S)^-1 r,   log det += log det(I + rho S).

First the users' effects are eliminated, then, from sums over their users, the clusters'. The sums (S, r, q) over all clusters give
beta = S^-1 r and the residual q - r'beta, so sigma^2 has a closed form, and minus twice the log-likelihood is a function of two ratios.
REML (Patterson and Thompson, 1971) has N - d degrees of freedom and the extra term log det S. No matrix is larger than d x d.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices
from coterie_server.maths.covariance import is_definite

_GRID = tuple(10.0**power for power in range(-4, 5))  # ratios to start from, relative to 1 / the size of S
_SIMPLEX = {"xatol": 1e-6, "fatol": 1e-9, "maxiter": 1000}


@dataclass(frozen=True)
class Statistics:
    """Sufficient statistics of n users."""

    gram: Array  # (n, d, d) X'X
    moment: Array  # (n, d) X'y
    squares: Array  # (n,) y'y
    n_rows: Indices  # (n,)
    cluster_of: Indices  # (n,) from 0 to k - 1

    @property
    def n_clusters(self) -> int:
        return int(self.cluster_of.max()) + 1


@dataclass(frozen=True)
class Components:
    """Estimated variances; `criterion` is minus twice the (restricted) log-likelihood."""

    cluster: float  # tau_cluster^2
    user: float  # tau_user^2
    error: float  # sigma^2
    criterion: float


@dataclass(frozen=True)
class Conditional:
    """Given the data and the variances: means and covariances of the common model, the clusters' and the users'."""

    common: Array  # (d,)
    clusters: Array  # (k, d)
    users: Array  # (n, d)
    common_covariance: Array  # (d, d)
    cluster_covariances: Array  # (k, d, d)
    user_covariances: Array  # (n, d, d)


@dataclass(frozen=True)
class _Profile:
    residual: float  # q - r'S^-1 r of the sums over clusters
    log_determinants: float  # of all eliminated effects
    log_information: float  # log det S of the sums


def estimated(told: Statistics, *, restricted: bool = True) -> Components:
    """REML estimates, or with `restricted` False those of maximum likelihood. All NaN if X'X of all rows is singular, or N <= d."""
    n_rows, d = int(told.n_rows.sum()), told.moment.shape[1]
    if n_rows <= d or not is_definite(told.gram.sum(axis=0)):
        return Components(*[math.nan] * 4)
    free = n_rows - d if restricted else n_rows

    users = _Spectra.of(told.gram, told.moment, told.squares)

    @functools.cache  # a grid of ratios has each ratio of the users several times
    def without_users(ratio: float) -> _Rest:
        return _by_cluster(users.without_effect(np.full(len(told.n_rows), ratio)), told.cluster_of)

    def profile(user: float, cluster: float) -> _Profile:
        return _profile(without_users(user), np.full(told.n_clusters, cluster))

    def criterion(user: float, cluster: float) -> float:
        found = profile(user, cluster)
        if not found.residual > 0.0:
            return math.inf
        value = free * (math.log(2 * math.pi * found.residual / free) + 1.0) + found.log_determinants
        return float(value + (found.log_information if restricted else 0.0))

    user, cluster = _least(criterion, _unit(told.gram), _unit(_summed(told.gram, told.cluster_of)))
    found = profile(user, cluster)
    error = found.residual / free
    return Components(cluster * error, user * error, error, criterion(user, cluster))


def error_variance(told: Statistics, gamma: Array, lam: Array) -> float:
    """The REML estimate of sigma^2 for given gamma_i = sigma^2/tau_i^2 (n,) and lambda_j = sigma^2/tau_j^2 (k,), positive or infinite."""
    n_free = int(told.n_rows.sum()) - int(told.moment.shape[1])
    users = _Spectra.of(told.gram, told.moment, told.squares).without_effect(1.0 / gamma)
    return _profile(_by_cluster(users, told.cluster_of), 1.0 / lam).residual / n_free


def conditional(told: Statistics, gamma: Array, lam: Array, variance: float, ridge: Array) -> Conditional:
    """Means and covariances for gamma (n,) and lambda (k,), positive or infinite, sigma^2, and a ridge penalty (d,) of each user's model.

    The covariances are sigma^2 times blocks of the inverse Hessian of (2.3): the variances are taken as known, beta has a flat prior.
    NaN if the common model is not determined.
    """
    d = told.moment.shape[1]
    curvature = told.gram + np.diag(ridge)
    below, slope, lift = _eliminated(curvature, told.moment, gamma)
    middle, middle_slope = _summed(below, told.cluster_of), _summed(slope, told.cluster_of)
    top, top_slope, top_lift = _eliminated(middle, middle_slope, lam)
    information = top.sum(axis=0)
    if not is_definite(information):
        empty = [np.full(shape, np.nan) for shape in ((d,), middle_slope.shape, slope.shape, (d, d), middle.shape, below.shape)]
        return Conditional(*empty)
    common = np.linalg.solve(information, top_slope.sum(axis=0))
    covariance = variance * np.linalg.inv(information)
    clusters, of_clusters = _settled(middle_slope, lam, top_lift, np.broadcast_to(common, middle_slope.shape), covariance, variance)
    users, of_users = _settled(told.moment, gamma, lift, clusters[told.cluster_of], of_clusters[told.cluster_of], variance)
    return Conditional(common, clusters, users, covariance, of_clusters, of_users)


@dataclass(frozen=True)
class _Rest:
    """Statistics without the random effects of a level, and the sum of the log determinants so far."""

    gram: Array  # (n, d, d)
    moment: Array  # (n, d)
    squares: Array  # (n,)
    log_determinants: float


@dataclass(frozen=True)
class _Spectra:
    """Statistics in the eigenvectors of each X'X, in which random effects of any ratio are eliminated number by number."""

    vectors: Array  # (n, d, d) as columns
    values: Array  # (n, d)
    moment: Array  # (n, d)
    squares: Array  # (n,)

    @classmethod
    def of(cls, gram: Array, moment: Array, squares: Array) -> _Spectra:
        values, vectors = np.linalg.eigh(gram)
        return cls(vectors, np.maximum(values, 0.0), np.matmul(moment[:, None, :], vectors)[:, 0, :], squares)

    def without_effect(self, ratio: Array) -> _Rest:
        """For the ratios (n,)."""
        spread = ratio[:, None] * self.values
        moment = self.moment / (1.0 + spread)
        gram = np.matmul(self.vectors * (self.values / (1.0 + spread))[:, None, :], self.vectors.transpose(0, 2, 1))
        rest = self.squares - ratio * np.vecdot(self.moment, moment)
        return _Rest(gram, np.matmul(self.vectors, moment[:, :, None])[:, :, 0], rest, float(np.log1p(spread).sum()))


def _by_cluster(users: _Rest, cluster_of: Indices) -> _Rest:
    gram, moment, squares = (_summed(part, cluster_of) for part in (users.gram, users.moment, users.squares))
    return _Rest(gram, moment, squares, users.log_determinants)


def _profile(clusters: _Rest, ratio: Array) -> _Profile:
    """For statistics of clusters without the effects of their users, and the ratios rho of the clusters (k,)."""
    rest = _Spectra.of(clusters.gram, clusters.moment, clusters.squares).without_effect(ratio)
    whole, total = rest.gram.sum(axis=0), rest.moment.sum(axis=0)
    _, log_information = np.linalg.slogdet(whole)
    residual = float(rest.squares.sum() - total @ np.linalg.solve(whole, total))
    return _Profile(residual, clusters.log_determinants + rest.log_determinants, float(log_information))


def _eliminated(curvature: Array, slope: Array, weight: Array) -> tuple[Array, Array, Array]:
    """min_x x'Tx/2 - e'x + weight/2 |x - z|^2 as quadratics in z, and c (T + cI)^-1. No weight (n,) is 0."""
    identity = np.eye(slope.shape[1])
    ratio = (1.0 / weight)[:, None, None]
    lift = np.linalg.inv(identity + ratio * curvature).astype(np.float64, copy=False)
    return np.matmul(lift, curvature), np.matmul(lift, slope[:, :, None])[:, :, 0], lift


def _settled(slope: Array, weight: Array, lift: Array, above: Array, covariance: Array, variance: float) -> tuple[Array, Array]:
    """The x (n, d) for the points `above` (n, d) of this covariance, and their own covariances."""
    own = (1.0 / weight)[:, None, None] * lift  # (T + cI)^-1
    x = np.matmul(own, slope[:, :, None])[:, :, 0] + np.matmul(lift, above[:, :, None])[:, :, 0]
    found = variance * own + np.matmul(np.matmul(lift, covariance), lift.transpose(0, 2, 1))
    return x, (found + found.transpose(0, 2, 1)) / 2


def _summed(values: Array, group_of: Indices) -> Array:
    sums = np.zeros((int(group_of.max()) + 1, *values.shape[1:]))
    np.add.at(sums, group_of, values)
    return sums


def _unit(gram: Array) -> float:
    """The ratio at which an effect counts about as much as the error."""
    return float(gram.shape[1] / np.trace(gram, axis1=1, axis2=2).mean())


def _least(criterion: Callable[[float, float], float], user_unit: float, cluster_unit: float) -> tuple[float, float]:
    """The ratios of the users and of the clusters, both >= 0, with the smallest criterion, found inside and on the edges."""
    users, clusters = ([size * unit for size in _GRID] for unit in (user_unit, cluster_unit))
    inside = _polished(criterion, [(user, cluster) for user in users for cluster in clusters])
    no_clusters = _polished(lambda user: criterion(user, 0.0), [(user,) for user in users])
    no_users = _polished(lambda cluster: criterion(0.0, cluster), [(cluster,) for cluster in clusters])
    found = [(0.0, 0.0), (0.0, no_users[0]), (no_clusters[0], 0.0), (inside[0], inside[1])]
    least = min(criterion(*pair) for pair in found)
    # A variance of zero comes out as a tiny one inside. The edge is then as good up to rounding, and comes first.
    return next(pair for pair in found if criterion(*pair) <= least + 1e-10 * (1.0 + abs(least)))


def _polished(criterion: Callable[..., float], starts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The ratios > 0 with the smallest criterion, by a simplex on their logarithms from the best of the starts."""
    from scipy.optimize import minimize  # noqa: PLC0415 - slow to import

    start = np.log(min(starts, key=lambda ratios: criterion(*ratios)))
    found = minimize(lambda logs: criterion(*np.exp(np.clip(logs, -300.0, 300.0))), start, method="Nelder-Mead", options=_SIMPLEX)
    return tuple(float(ratio) for ratio in np.exp(np.clip(found.x, -300.0, 300.0)))
