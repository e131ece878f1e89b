"""Distances to a user's points: f_i(x) = sum_r weight_r h(|x - a_r|) + c/2 |x|^2 for one stack of users.

h(t) is t^2/2, which with the sum-of-norms penalty gives plain convex clustering, or the Huber function of t.
"""

from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems.blocks import Block, diagonal, gathered, norm
from coterie_client.problems.losses import huber
from coterie_client.problems.rows import Stack


@dataclass(frozen=True)
class DistanceBlock(Block):
    """Distances of k users; `rows` are points, and `steepness` is the sum of weights plus c."""

    delta: float | None  # None: squared distances
    l2: float  # c

    def look(self, x: Array) -> Array:  # (k, R, d), x - a_r
        return x[:, None, :] - self.rows

    def value(self, x: Array, seen: Array) -> Array:
        squares = np.vecdot(seen, seen)
        costs = 0.5 * squares if self.delta is None else huber(np.sqrt(squares), self.delta)
        value: Array = np.vecdot(self.weights, costs) + 0.5 * self.l2 * np.vecdot(x, x)
        return value

    def gradient(self, x: Array, seen: Array) -> Array:
        pulls = self.weights if self.delta is None else self.weights * _shortening(seen, self.delta)
        gradient: Array = np.matmul(pulls[:, None, :], seen)[:, 0, :] + self.l2 * x
        return gradient

    def hessian(self, x: Array, seen: Array) -> Array:
        if self.delta is None:
            isotropic = np.zeros((*x.shape, x.shape[1]))
            diagonal(isotropic)[...] = self.steepness[:, None]
            return isotropic
        # Beyond delta the Huber function of the distance r is linear along the ray: (delta/r)(I - u u').
        ratio = _shortening(seen, self.delta)
        along = np.where(ratio < 1.0, self.weights * ratio * ratio * ratio, 0.0) / (self.delta * self.delta)
        hessian: Array = np.matmul((seen * -along[:, :, None]).transpose(0, 2, 1), seen)
        diagonal(hessian)[...] += (np.vecdot(self.weights, ratio) + self.l2)[:, None]
        return hessian

    def closed_form(self, tilt: Array, ridge: Array) -> Array | None:
        if self.delta is None:
            total = np.matmul(self.weights[:, None, :], self.rows)[:, 0, :]
            return _quotient(total + tilt, self.steepness + ridge)
        single = self.counts == 1.0
        if not single.any():
            return None
        return np.where(single[:, None], self._nearest_to_one(tilt, ridge, self.delta), np.nan)

    def curvatures(self) -> tuple[Array, Array]:
        return self.steepness, self.floor

    def row_gradient(self, x: Array, users: Indices, rows: Indices) -> Array:
        away = x - gathered(self.rows, users, rows)
        share = self.share[users]
        pulls = share if self.delta is None else share * _shortening(away, self.delta)
        away *= pulls[:, None]
        away += self.l2 * x
        return away

    def row_smoothness(self) -> Array:
        return self.share + self.l2

    def row_strong_convexity(self) -> Array:
        return self.share + self.l2 if self.delta is None else self.floor

    def _nearest_to_one(self, tilt: Array, ridge: Array, delta: float) -> Array:
        """For users with one point, the Huber distance to it: a shrunken step towards tilt/k."""
        a, k = self.rows[:, 0, :], (self.l2 + ridge)[:, None]
        e = tilt - k * a
        far = np.maximum(norm(e)[:, None] - delta * (1.0 + k), 0.0)
        # Within delta, r = |e| / (1+k). Beyond, k r = |e| - delta, written so that both agree at the border exactly.
        stretch = np.where(far > 0.0, delta + _quotient(far, k[:, 0]), norm(e)[:, None] / (1.0 + k))
        return a + stretch * _quotient(e, np.maximum(norm(e), np.finfo(np.float64).tiny))


def _shortening(seen: Array, delta: float) -> Array:  # (..., d) -> (...,), min(1, delta/r)
    ratio: Array = delta / np.maximum(np.sqrt(np.vecdot(seen, seen)), delta)
    return ratio


def _quotient(x: Array, k: Array) -> Array:  # (k, d) by (k,), NaN where the divisor is zero: no minimiser
    return x / np.where(k > 0.0, k, np.nan)[:, None]


def distance_block(stack: Stack, config: ProblemConfig, l2: float) -> DistanceBlock:
    """The block of one stack. `l2` is c; it is separate from the config because evaluation uses 0."""
    weights = stack.weights(config.reduction)
    total = np.ones(len(weights)) if config.reduction == "mean" else stack.counts
    reach = np.sqrt(np.vecdot(stack.features, stack.features).max(axis=1))
    delta = None if config.loss == "squared_distance" else config.huber_delta
    floor = total + l2 if delta is None else np.full(len(weights), l2)
    share = stack.counts if config.reduction == "sum" else np.ones(len(weights))
    return DistanceBlock(stack.features, stack.targets, weights, stack.counts, share, total + l2, total * reach, floor, delta, l2)
