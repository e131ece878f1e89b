"""Losses of the form f_i(x) = sum_r weight_r phi(a_r.x, y_r) + 1/2 sum_j c_j x_j^2 for one stack of users."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems.blocks import Block, diagonal, gathered, spectrum
from coterie_client.problems.losses import LeastSquares, Poisson, RowLoss
from coterie_client.problems.rows import Stack


def design(features: Array, intercept: bool) -> Array:
    """Features (..., p), with a last column of -1 if there is an intercept, so that a.x = <w, a> - b."""
    if not intercept:
        return features
    return np.concatenate([features, np.full((*features.shape[:-1], 1), -1.0)], axis=-1)


class Moments(NamedTuple):
    """Sums over a user's rows at a model, whatever the reduction, and without the penalty; h = d(d+1)/2."""

    hessian: Array  # (n, h), the upper triangle of sum_r phi''(s_r) a_r a_r', row by row
    outer: Array  # (n, h), that of sum_r phi'(s_r)^2 a_r a_r'
    gradient: Array  # (n, d), sum_r phi'(s_r) a_r
    residual: Array  # (n,) sum_r (s_r - y_r)^2 of least squares, else NaN


@dataclass(frozen=True)
class MarginBlock(Block):
    """Margins of k users; `rows` are design rows a_r."""

    loss: RowLoss
    shrink: Array  # (d,), the c_j: c, and 0 for the intercept

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

    def moments(self, x: Array) -> Moments:
        """Sums over the rows at x (k, d)."""
        seen, valid = self.look(x), (self.weights > 0.0).astype(np.float64)
        slopes = valid * self.loss.slope(seen, self.targets)
        upper = np.triu_indices(self.rows.shape[2])
        hessian, outer = (
            np.ascontiguousarray(np.matmul((self.rows * of_rows[:, :, None]).transpose(0, 2, 1), self.rows)[:, *upper])
            for of_rows in (valid * self.loss.curvature(seen, self.targets), slopes * slopes)
        )
        gradient = np.matmul(slopes[:, None, :], self.rows)[:, 0, :]
        squares = np.vecdot(slopes, slopes) if isinstance(self.loss, LeastSquares) else np.full(len(x), np.nan)
        return Moments(hessian, outer, gradient, squares)

    def clipped_sums(self, x: Array, clip: float, clip_hessian: float) -> tuple[Array, Array]:
        """(k, d) and (k, d, d) gradient and Hessian without the penalty, where no row's part is longer than its clip times its weight.

        Both parts of a row are shortened by one factor, so the sums are those of rows with less weight. A row that is no number counts as
        zero.
        """
        seen, squares = self.look(x), np.vecdot(self.rows, self.rows)
        slopes, bends = self.loss.slope(seen, self.targets), self.loss.curvature(seen, self.targets)
        lengths = (np.abs(slopes) * np.sqrt(squares), clip), (np.abs(bends) * squares, clip_hessian)
        first, second = (np.where(np.isfinite(length), most / np.maximum(length, most), 0.0) for length, most in lengths)
        factors = self.weights * np.minimum(first, second)
        slopes, bends = (np.where(factors > 0.0, factors * of_rows, 0.0) for of_rows in (slopes, bends))
        rows = np.where(np.isfinite(squares)[:, :, None], self.rows, 0.0)
        return np.matmul(slopes[:, None, :], rows)[:, 0, :], np.matmul((rows * bends[:, :, None]).transpose(0, 2, 1), rows)

    def curvatures(self) -> tuple[Array, Array]:
        bound, floor = self.loss.curvature_bound, self.loss.curvature_floor
        of_bound = self._extremes(bound)
        if floor == 0.0:
            return of_bound[1], self.floor
        least, most = of_bound if floor == bound else self._extremes(floor)
        # An eigenvalue at rounding level is a zero: the rows do not span the space.
        known = least > most * self.rows.shape[2] * np.finfo(np.float64).eps
        return of_bound[1], np.maximum(np.where(known, least, 0.0), self.floor)

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

    def _extremes(self, curvature: float) -> tuple[Array, Array]:
        """(k,) the least and the largest eigenvalue of M = sum_r q_r a_r a_r' + diag(c), q_r the curvature times the row's weight.

        With fewer rows than features, M is c times the identity outside of the span of the rows and of the unpenalised intercept's axis e.
        So its other eigenvalues are those of the matrix of the rows' products plus c, or, with an intercept, of Q' M Q for a basis Q of
        that span.
        """
        weights, (k, size, d), c = curvature * self.weights, self.rows.shape, self.shrink[0]
        if size + 1 >= d:
            moduli = spectrum(self._gram(weights))
            return moduli[:, 0], moduli[:, -1]
        rows = self.rows * np.sqrt(weights)[:, :, None]
        if self.shrink[-1] == c:
            return np.full(k, c), spectrum(np.matmul(rows, rows.transpose(0, 2, 1)))[:, -1] + c
        e = np.zeros((k, d, 1))
        e[:, -1] = 1.0
        basis, _ = np.linalg.qr(np.concatenate([rows.transpose(0, 2, 1), e], axis=2))
        seen, last = np.matmul(rows, basis), basis[:, -1:, :]
        inside = np.matmul(seen.transpose(0, 2, 1), seen) - c * np.matmul(last.transpose(0, 2, 1), last)
        diagonal(inside)[...] += c
        moduli = spectrum(inside)
        return np.minimum(c, moduli[:, 0]), np.maximum(c, moduli[:, -1])

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
    # The scale of a row's curvature near a minimiser: that of Poisson is about the mean, so about the counts; the bound is rarely reached.
    bends = np.minimum(reach, loss.curvature_bound) if isinstance(loss, Poisson) else loss.curvature_bound
    steepness = bends * mass + l2
    pull = bends * np.sqrt(mass * np.vecdot(weights, stack.valid)) * reach
    floor = np.full(len(rows), shrink.min())
    share = stack.counts if config.reduction == "sum" else np.ones(len(rows))
    return MarginBlock(rows, stack.targets, weights, stack.counts, share, steepness, pull, floor, loss, shrink)
