"""Losses of the form f_i(x) = sum_r weight_r phi(a_r.x, y_r) + 1/2 sum_j c_j x_j^2 for one stack of users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from coterie.arrays import Array, Indices
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems.blocks import diagonal, gathered, spectrum
from coterie_client.problems.losses import Poisson, RowLoss
from coterie_client.problems.rows import Stack


def design(features: Array, intercept: bool) -> Array:
    """Features (..., p), with a last column of -1 if there is an intercept, so that a.x = <w, a> - b."""
    if not intercept:
        return features
    return np.concatenate([features, np.full((*features.shape[:-1], 1), -1.0)], axis=-1)


@dataclass(frozen=True)
class MarginBlock:
    """A `Block` of k users; see `coterie_client.problems.blocks`."""

    loss: RowLoss
    rows: Array  # (k, R, d), design rows a_r
    targets: Array  # (k, R)
    weights: Array  # (k, R), zero for padding
    shrink: Array  # (d,), the c_j: c, and 0 for the intercept
    steepness: Array  # (k,)
    pull: Array  # (k,)
    floor: Array  # (k,)
    share: Array  # (k,), m_i times the weight of a row, in exact arithmetic: 1 or m_i

    @property
    def size(self) -> int:
        return self.rows.size

    def take(self, rows: Indices) -> Self:
        return type(self)(
            self.loss,
            self.rows[rows],
            self.targets[rows],
            self.weights[rows],
            self.shrink,
            self.steepness[rows],
            self.pull[rows],
            self.floor[rows],
            self.share[rows],
        )

    def batch(self, rows: Indices) -> Self:
        return type(self)(
            self.loss,
            self.rows[:, rows],
            self.targets[:, rows],
            np.full((1, rows.size), self.share[0] / rows.size),
            self.shrink,
            self.steepness,
            self.pull,
            self.floor,
            self.share,
        )

    def look(self, x: Array) -> Array:  # (k, R), the s_r
        s: Array = np.matmul(self.rows, x[:, :, None])[:, :, 0]
        return s

    def value(self, x: Array, seen: Array) -> Array:
        fit = np.vecdot(self.weights, self.loss.value(seen, self.targets))
        value: Array = fit + 0.5 * np.vecdot(x * self.shrink, x)
        return value

    def gradient(self, x: Array, seen: Array) -> Array:
        slopes = self.weights * self.loss.slope(seen, self.targets)
        gradient: Array = np.matmul(slopes[:, None, :], self.rows)[:, 0, :] + self.shrink * x
        return gradient

    def hessian(self, x: Array, seen: Array) -> Array:  # noqa: ARG002 (the protocol's signature)
        return self._gram(self.weights * self.loss.curvature(seen, self.targets))

    def closed_form(self, tilt: Array, ridge: Array) -> None:  # noqa: ARG002 (the protocol's signature)
        return None

    def smoothness(self) -> Array:
        largest: Array = spectrum(self._gram(self.loss.curvature_bound * self.weights))[:, -1]
        return largest

    def strong_convexity(self) -> Array:
        if self.loss.curvature_floor == 0.0:
            return self.floor
        moduli = spectrum(self._gram(self.loss.curvature_floor * self.weights))
        # An eigenvalue at rounding level is a zero: the rows do not span the space.
        known = moduli[:, 0] > moduli[:, -1] * moduli.shape[1] * np.finfo(np.float64).eps
        modulus: Array = np.maximum(np.where(known, moduli[:, 0], 0.0), self.floor)
        return modulus

    def row_gradient(self, x: Array, users: Indices, rows: Indices) -> Array:
        a = gathered(self.rows, users, rows)
        slopes = self.share[users] * self.loss.slope(np.vecdot(a, x), self.targets[users, rows])
        a *= slopes[:, None]
        a += self.shrink * x
        return a

    def row_smoothness(self) -> Array:
        """The largest eigenvalue of q a a' + diag(c), with q the largest curvature of a row. Padding repeats rows: maxima stay."""
        largest: Array = self._row_peaks(self.loss.curvature_bound).max(axis=1)
        return largest

    def row_strong_convexity(self) -> Array:
        """The smallest eigenvalue of q a a' + diag(c), with q the least curvature of a row.

        One row is flat in all directions but its own. So in two or more dimensions the minimum is c. With an unpenalised intercept it is c
        q / (the largest eigenvalue), since c q is the product of both.
        """
        c, d = self.shrink[0], self.rows.shape[2]
        q = self.loss.curvature_floor * self.share
        if self.loss.curvature_floor == 0.0:
            return self.floor
        if self.shrink[-1] == c:
            return self.floor if d > 1 else np.asarray(c + q * np.square(self.rows[:, :, 0]).min(axis=1))
        modulus: Array = c * q / self._row_peaks(self.loss.curvature_floor).max(axis=1)
        return modulus

    def _row_peaks(self, curvature: float) -> Array:
        """(k, R) the largest eigenvalue of q a a' + diag(c), where q is a curvature of phi times m_i times the row's weight.

        With an intercept, a = [w, -1] and the last c_j is 0: it is that of [[q |w|^2 + c, -q |w|], [-q |w|, q]].
        """
        q, c = curvature * self.share[:, None], self.shrink[0]
        if self.shrink[-1] == c:
            return np.asarray(q * np.vecdot(self.rows, self.rows) + c)
        features = np.ascontiguousarray(self.rows[:, :, :-1])
        w = np.sqrt(np.vecdot(features, features))
        first = q * w * w + c
        peaks: Array = 0.5 * (first + q + np.hypot(first - q, 2.0 * q * w))
        return peaks

    def _gram(self, weights: Array) -> Array:  # (k, R) -> (k, d, d), sum_r weight_r a_r a_r' + diag(c)
        gram: Array = np.matmul((self.rows * weights[:, :, None]).transpose(0, 2, 1), self.rows)
        diagonal(gram)[...] += self.shrink
        return gram


def margin_block(stack: Stack, loss: RowLoss, config: ProblemConfig, l2: float) -> MarginBlock:
    """The block of one stack. `l2` is c; it is separate from the config because evaluation uses 0."""
    rows = design(stack.features, config.has_intercept)
    weights = stack.weights(config.reduction)
    shrink = np.full(rows.shape[2], l2)
    if config.has_intercept:
        shrink[-1] = 0.0
    mass = np.vecdot(weights, np.vecdot(rows, rows))  # (k,), the trace of the Gram matrix
    reach = np.maximum(1.0, np.abs(stack.targets).max(axis=1))
    bends = _typical_curvature(loss, reach)
    steepness = bends * mass + l2
    pull = bends * np.sqrt(mass * np.vecdot(weights, stack.valid)) * reach
    floor = np.full(len(rows), shrink.min())
    share = stack.counts if config.reduction == "sum" else np.ones(len(rows))
    return MarginBlock(loss, rows, stack.targets, weights, shrink, steepness, pull, floor, share)


def _typical_curvature(loss: RowLoss, reach: Array) -> Array | float:
    """(k,) or one for all: the scale of a row's curvature near a minimiser."""
    if isinstance(loss, Poisson):  # about the mean, so about the counts; the bound is rarely reached
        return np.minimum(reach, loss.curvature_bound)
    return loss.curvature_bound
