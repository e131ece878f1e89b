"""The penalties for which a partition solves convex clustering exactly, from values, gradients and Hessians at cluster models.

Source: Armacki, Bajovic, Jakovetic and Kar (2022), Theorems 1 and 2 and problem (5). `penalty` is everywhere the lambda of (6) and (7):

    Phi(x) = sum_i f_i(x_i) + penalty * sum_{i<j} |x_i - x_j|

Theorem 1 fixes the within-cluster subgradients to (12), which is sufficient and loose; `exact_lower_end` takes the best ones. The right
side of (13) is at most the penalty by (7), so Theorem 2 certifies nothing in this scale. So `recovery_interval` takes as upper end the
penalty at which the K-block problem (5), here min_w sum_k n_k g_k(w_k) + penalty * sum_{k<l} n_k n_l |w_k - w_l|, first merges two blocks.
An oracle call is a federated round, so the solvers need few of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.spatial.distance import pdist

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie_server.maths.clusters import incidence
from coterie_server.maths.consensus import minimize_model

Oracle = Callable[[Array], Awaitable[tuple[Array, Array, Array]]]
"""Cluster models (K, d) to the sums over each cluster of f_i: values (K,), gradients (K, d), Hessians (K, d, d)."""
UserGradients = Callable[[Array], Awaitable[Array]]
"""Cluster models (K, d) to grad f_i at the model of i's cluster, (n, d) in user order."""


_TINY = float(np.finfo(float).tiny)


class Bounds(NamedTuple):
    """A number known to lie in [lower, upper]."""

    lower: float
    upper: float


@dataclass(frozen=True)
class BlockSolution:
    """A solution of (5) for one penalty."""

    w: Array  # (K, d)
    merged: Indices  # (K,), blocks with one label have merged
    gradients: Array  # (K, d), of the cluster sums at w
    objective: float
    n_asks: int


@dataclass(frozen=True)
class RecoveryInterval:
    """The penalties in [lower, upper] for which (3) has exactly the given clusters; none when lower is infinite."""

    lower: float
    upper: float  # infinite with a single cluster
    merging: float  # where two blocks of (5) merge, infinite with a single cluster
    n_asks: int  # oracle calls of both kinds


def theorem1_bound(gradients: Array, labels: Indices) -> float:
    """Right side of (6): the largest |grad f_i - grad f_j| / n_k within a cluster, from grad f_i(w_k) (n, d) and labels (n,)."""
    groups = [gradients[labels == label] for label in np.unique(labels)]
    return max(float(pdist(group).max(initial=0.0)) / len(group) for group in groups)


def theorem2_bound(block_gradients: Array, sizes: Indices) -> float:
    """Right side of (13) from grad g_k(w_k) (K, d), cluster means, and n_k (K,); infinite for one cluster."""
    if len(sizes) < 2:
        return float("inf")
    return float(pdist(block_gradients).min() / (2 * (sizes.sum() - sizes.min())))


def exact_lower_end(gradients: Array, labels: Indices, tolerance: float = 1e-6, limit: int = 20000) -> Bounds:
    """The least t for which (9) has subgradients within clusters, from grad f_i(w_k) (n, d) and labels (n,).

    That is: there are s_ij = -s_ji in R^d with |s_ij| <= t and sum_j s_ij = grad g_k - grad f_i in each cluster. With w_k the solution
    of (5), the clusters solve (3) exactly when t <= penalty. The upper bound comes from such s_ij, the lower from the dual

        t = max over u of sum_i <u_i, grad g_k - grad f_i> / sum_{i<j} |u_i - u_j|,

    so both hold even when `limit` iterations leave them further apart than `tolerance` (relative).
    """
    bounds = [_gauge(gradients[labels == label], tolerance, limit) for label in np.unique(labels)]
    return Bounds(max(b.lower for b in bounds), max(b.upper for b in bounds))


def _gauge(gradients: Array, tolerance: float, limit: int) -> Bounds:
    """`exact_lower_end` of one cluster (n, d), by Douglas-Rachford splitting between max |s_ij| and the affine sums."""
    n = len(gradients)
    demand = gradients.mean(axis=0) - gradients
    if n > 1 and demand.shape[1] > n:  # norms are those of the coordinates in the span, n at most
        demand = np.linalg.qr(demand.T)[1].T
    net, first, second = incidence(n)
    flow = (demand[first] - demand[second]) / n  # (12): the feasible choice of least square
    scale = float(np.linalg.norm(flow, axis=1).max(initial=0.0))
    if scale == 0.0:
        return Bounds(0.0, 0.0)
    demand, flow = demand / scale, flow / scale
    lower, upper = 0.0, 1.0
    for iteration in range(limit):
        shrunk = _prox_max(flow, float(n))
        excess = (net @ (2 * shrunk - flow) - demand) / n
        feasible = 2 * shrunk - flow - (excess[first] - excess[second])
        if iteration % 20 == 0:
            potential = net @ (flow - shrunk)
            length = np.linalg.norm(potential[first] - potential[second], axis=1).sum()
            if length > 0:
                lower = max(lower, float((potential * demand).sum() / length))
            upper = min(upper, float(np.linalg.norm(feasible, axis=1).max()))
            if upper - lower <= tolerance * upper:
                break
        flow = flow + 1.6 * (feasible - shrunk)
    return Bounds(min(lower, upper) * scale, upper * scale)  # rounding may cross them


def _prox_max(s: Array, sigma: float) -> Array:
    """Minimizer of sigma * max_ij |p_ij| + |p - s|^2 / 2 over p (m, d): norms are cut at the t where the cuts sum to sigma."""
    norms = np.linalg.norm(s, axis=1)
    ordered = np.sort(norms)[::-1]
    levels = (np.cumsum(ordered) - sigma) / np.arange(1, len(norms) + 1)
    level = max(0.0, float(levels[np.flatnonzero(ordered > levels)[-1]]))
    return np.asarray(s * np.minimum(1.0, level / np.maximum(norms, _TINY))[:, None])


async def solve_blocks(
    ask: Oracle, start: Array, sizes: Indices, penalty: float, tolerance: float = 1e-8, limit: int = 100
) -> BlockSolution:
    """Solve (5) by proximal Newton from `start` (K, d), sizes n_k (K,): one ask per step and per backtrack.

    Solved when the model's minimizer is within `tolerance * (1 + max |w|)` of the point, or promises less than rounding. Raises
    RunError when `limit` asks do not suffice, or no step along a model's direction descends.
    """
    _, first, second = incidence(len(start))
    lengths = penalty * (sizes[first] * sizes[second]).astype(float)

    def norms(w: Array) -> float:
        return float((lengths * np.linalg.norm(w[first] - w[second], axis=1)).sum())

    w = trial = np.array(start, float)
    dual, share, promise, objective = np.zeros((len(first), w.shape[1])), 1.0, 0.0, np.inf
    for n_asks in range(1, limit + 1):
        values, gradients, hessians = await ask(trial)
        reached = float(values.sum()) + norms(trial)
        if reached <= objective + 1e-4 * share * promise:
            w, objective, here = trial, reached, gradients
            target, merged, dual = minimize_model(w, gradients, hessians, lengths, dual)
            promise, share = float((gradients * (target - w)).sum()) + norms(target) - norms(w), 1.0
            near = np.abs(target - w).max() <= tolerance * (1 + np.abs(w).max())
            if near or -promise <= 1e-14 * abs(objective):
                return BlockSolution(w, merged, here, objective, n_asks)
        else:
            share /= 2
        if share < 1e-12 or not np.isfinite(objective):
            break
        trial = target if share == 1.0 else w + share * (target - w)
    raise RunError(f"the K-block problem at penalty {penalty} was not solved in {n_asks} asks: last step length {share}")


async def recovery_interval(
    ask: Oracle, ask_users: UserGradients, labels: Indices, start: Array, tolerance: float = 1e-3, limit: int = 60
) -> RecoveryInterval:
    """Penalties for which (3) has exactly the clusters `labels` (n,), numbered from 0, to `tolerance` relative; `start` (K, d).

    Both ends satisfy the certificate: `exact_lower_end` at the solution of (5) is at most the penalty, and no blocks have merged.
    The certificate often fails again a little below the merging penalty, and then that is the upper end.
    Raises RunError when `limit` penalties do not suffice.
    """
    sizes, w, n_asks, n_penalties = np.bincount(labels), start, 0, 0

    async def apart(penalty: float) -> float:
        """The least distance of two blocks of (5), 0 when some have merged."""
        nonlocal n_asks, w, n_penalties
        if n_penalties == limit:
            raise RunError(f"the recovery interval is not known to {tolerance} after {limit} penalties")
        solution = await solve_blocks(ask, w, sizes, penalty)
        n_asks, w, n_penalties = n_asks + solution.n_asks, solution.w, n_penalties + 1
        return float(pdist(w).min(initial=np.inf)) if len(np.unique(solution.merged)) == len(sizes) else 0.0

    async def needed(penalty: float) -> float:
        """`exact_lower_end` at the solution of (5), infinite when blocks have merged."""
        nonlocal n_asks
        if not await apart(penalty):
            return np.inf
        n_asks += 1
        return exact_lower_end(await ask_users(w), labels, tolerance / 100).upper

    below, lower = 0.0, 0.0
    # `needed` mostly grows slower than the penalty up to the lower end, so this climbs to it and passes it by half the tolerance.
    while (least := await needed(lower)) > lower:
        if least == np.inf:
            return RecoveryInterval(np.inf, 0.0, lower, n_asks)
        below, lower = lower, least * (1 + tolerance / 2)
    lower = await _bisect(needed, lower, below, tolerance)
    if len(sizes) == 1:
        return RecoveryInterval(lower, np.inf, np.inf, n_asks)
    merging = await _merging_penalty(apart, lower, tolerance)
    below = max(lower, merging * (1 - tolerance))
    upper = below if await needed(below) <= below else await _bisect(needed, lower, below, tolerance)
    return RecoveryInterval(lower, upper, merging, n_asks)


async def _bisect(needed: Callable[[float], Awaitable[float]], good: float, bad: float, tolerance: float) -> float:
    """A penalty that needs no more than itself, within `tolerance` (relative) of one that does; `good` does not, `bad` does."""
    while abs(good - bad) > tolerance * good:
        middle = (good + bad) / 2
        good, bad = (middle, bad) if await needed(middle) <= middle else (good, middle)
    return good


async def _merging_penalty(apart: Callable[[float], Awaitable[float]], low: float, tolerance: float) -> float:
    """A penalty that merges blocks, within `tolerance` (relative) of one above `low` that does not.

    The least distance falls almost linearly to 0, so secants are tried first, slightly beyond their root on alternate sides.
    """
    high = width = np.inf
    at_low, root, trial = await apart(low), np.nan, 1.2 * low or 1e-3
    while np.isinf(high) or high - low > tolerance * high:
        distance = await apart(trial)
        if distance:
            root = trial + distance * (trial - low) / (at_low - distance) if at_low > distance else np.nan
            low, at_low = trial, distance
        else:
            high = trial
        halved, width = high - low <= width / 2, high - low
        bound = high if np.isfinite(high) else 4 * low
        near = root * (1 + (tolerance if distance else -tolerance) / 3)
        trial = near if halved and low < near < bound else (low + bound) / 2
    return high
