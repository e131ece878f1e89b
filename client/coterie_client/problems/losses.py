"""Row losses phi(s, y): the loss of one row for prediction s and target y.

The squared hinge (without a factor 1/2) is from section V of Armacki, Bajovic, Jakovetic, Kar (2022). All functions are elementwise, so a
row's value cannot depend on other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.findings import Finding


class RowLoss(Protocol):
    """A convex, once differentiable function phi(s, y) of the prediction s, with bounded curvature.

    s, y and the result have the same shape, and each entry depends only on its own s and y. A classifier's targets are -1 or +1, and its
    loss is flat only towards the right label. Any other loss must grow both ways. `coercive` relies on this.
    """

    @property
    def is_classifier(self) -> bool:
        """Whether targets are labels -1 and +1. The metric is then accuracy, else squared error."""

    @property
    def curvature_bound(self) -> float:
        """Supremum of the second derivative in s."""

    @property
    def curvature_floor(self) -> float:
        """Infimum of the second derivative in s. 0 is always valid; only a strongly convex loss has a positive one."""

    def value(self, s: Array, y: Array) -> Array:
        """phi(s, y)."""

    def slope(self, s: Array, y: Array) -> Array:
        """Derivative of phi in s."""

    def curvature(self, s: Array, y: Array) -> Array:
        """Second derivative of phi in s, or an element of the generalised derivative."""

    def check_targets(self, y: Array, user: str) -> None:
        """Raise `ConfigError`, naming `user` and the value found, when a target is outside the loss's domain."""

    def predict(self, s: Array) -> Array:
        """The prediction in the units of y: a label -1 or +1, or s itself."""


def check_labels(y: Array, user: str) -> None:
    """Raise `ConfigError` unless each target is -1 or +1."""
    wrong = y[np.abs(y) != 1.0]
    if wrong.size:
        finding = Finding("L6", wrong.size, "label", "problem.loss")
        raise ConfigError(f"user {user!r} has the label {wrong[0]:g}, labels must be -1 or +1", finding)


def _sign(s: Array) -> Array:
    sign: Array = np.where(s >= 0.0, 1.0, -1.0)
    return sign  # never 0, which would be no label


@dataclass(frozen=True)
class SquaredHinge:
    """phi = max(0, 1 - y s)^2."""

    is_classifier: bool = True
    curvature_bound: float = 2.0
    curvature_floor: float = 0.0

    def value(self, s: Array, y: Array) -> Array:
        short = np.maximum(1.0 - y * s, 0.0)
        return short * short

    def slope(self, s: Array, y: Array) -> Array:
        return -2.0 * y * np.maximum(1.0 - y * s, 0.0)

    def curvature(self, s: Array, y: Array) -> Array:
        curvature: Array = np.multiply(2.0, y * s < 1.0)
        return curvature

    def check_targets(self, y: Array, user: str) -> None:
        check_labels(y, user)

    def predict(self, s: Array) -> Array:
        return _sign(s)


@dataclass(frozen=True)
class Logistic:
    """phi = log(1 + exp(-y s))."""

    is_classifier: bool = True
    curvature_bound: float = 0.25
    curvature_floor: float = 0.0

    def value(self, s: Array, y: Array) -> Array:
        margin = y * s
        return np.log1p(np.exp(-np.abs(margin))) + np.maximum(-margin, 0.0)

    def slope(self, s: Array, y: Array) -> Array:
        slope: Array = y / (-1.0 - np.exp(np.minimum(y * s, 700.0)))  # beyond, exp overflows; the slope is practically 0
        return slope

    def curvature(self, s: Array, y: Array) -> Array:
        e = np.exp(-np.abs(y * s))
        return e / ((1.0 + e) * (1.0 + e))

    def check_targets(self, y: Array, user: str) -> None:
        check_labels(y, user)

    def predict(self, s: Array) -> Array:
        return _sign(s)


@dataclass(frozen=True)
class LeastSquares:
    """phi = (s - y)^2 / 2."""

    is_classifier: bool = False
    curvature_bound: float = 1.0
    curvature_floor: float = 1.0

    def value(self, s: Array, y: Array) -> Array:
        miss = s - y
        return 0.5 * miss * miss

    def slope(self, s: Array, y: Array) -> Array:
        return s - y

    def curvature(self, s: Array, y: Array) -> Array:  # noqa: ARG002 (the protocol's signature)
        return np.ones_like(s)

    def check_targets(self, y: Array, user: str) -> None:
        pass

    def predict(self, s: Array) -> Array:
        return s


@dataclass(frozen=True)
class Huber:
    """phi = t^2 / 2 for t = |s - y| <= delta, and delta (t - delta/2) beyond."""

    delta: float = 1.0
    is_classifier: bool = False
    curvature_bound: float = 1.0
    curvature_floor: float = 0.0

    def value(self, s: Array, y: Array) -> Array:
        return huber(np.abs(s - y), self.delta)

    def slope(self, s: Array, y: Array) -> Array:
        slope: Array = np.clip(s - y, -self.delta, self.delta)
        return slope

    def curvature(self, s: Array, y: Array) -> Array:
        curvature: Array = np.multiply(1.0, np.abs(s - y) <= self.delta)
        return curvature

    def check_targets(self, y: Array, user: str) -> None:
        pass

    def predict(self, s: Array) -> Array:
        return s


@dataclass(frozen=True)
class Poisson:
    """phi = exp(s) - y s, the negative log-likelihood of a count y with mean exp(s), without the term log y!.

    Its curvature exp(s) is unbounded, and so no step size would be safe. So beyond s = log_mean_limit, the exponential continues as its
    parabola, with curvature exp(log_mean_limit). Counts in training rows may not exceed exp(log_mean_limit), since their fit would not be a
    Poisson regression.
    """

    log_mean_limit: float = 5.0
    is_classifier: bool = False
    curvature_floor: float = 0.0

    @property
    def curvature_bound(self) -> float:
        return math.exp(self.log_mean_limit)

    def value(self, s: Array, y: Array) -> Array:
        beyond = np.maximum(s - self.log_mean_limit, 0.0)
        value: Array = self.curvature(s, y) * (1.0 + beyond * (1.0 + 0.5 * beyond)) - y * s
        return value

    def slope(self, s: Array, y: Array) -> Array:
        beyond = np.maximum(s - self.log_mean_limit, 0.0)
        slope: Array = self.curvature(s, y) * (1.0 + beyond) - y
        return slope

    def curvature(self, s: Array, y: Array) -> Array:  # noqa: ARG002 (the protocol's signature)
        curvature: Array = np.exp(np.minimum(s, self.log_mean_limit))
        return curvature

    def check_targets(self, y: Array, user: str) -> None:
        wrong = np.flatnonzero((y < 0) | (y != np.floor(y)))
        if wrong.size:
            row = wrong[0]
            found = f"user {user!r} has the count {y[row]:g} in row {row}, targets of loss 'poisson' must be 0, 1, 2, ..."
            raise ConfigError(found, Finding("L6", wrong.size, "target", "problem.loss"))

    def check_limit(self, y: Array, user: str) -> None:
        """Raise `ConfigError` when a training count is above exp(log_mean_limit)."""
        above = np.flatnonzero(y > self.curvature_bound)
        if above.size:
            row = above[0]
            raise ConfigError(
                f"user {user!r} has the count {y[row]:g} in row {row}, above exp(log_mean_limit) = {self.curvature_bound:.4g}: "
                f"wanted a log_mean_limit of {math.log(y.max()):.4g} or more",
                Finding("L6", above.size, "target", "problem.log_mean_limit"),
            )

    def predict(self, s: Array) -> Array:
        """The mean exp(s), at most exp(700), so that sums over rows stay finite."""
        mean: Array = np.exp(np.minimum(s, 700.0))
        return mean

    def deviance(self, s: Array, y: Array) -> Array:
        """2 (y log(y/mean) - (y - mean)) with mean = `predict(s)`: twice the log-likelihood lost against a perfect prediction."""
        s = np.minimum(s, 700.0)
        deviance: Array = 2.0 * (np.exp(s) - y * s - y * (1.0 - np.log(np.maximum(y, 1.0))))
        return np.maximum(deviance, 0.0)  # a value below 0 is a rounding error


def huber(t: Array, delta: float) -> Array:
    """The Huber function of t >= 0, without a difference of two large squares."""
    inner = np.minimum(t, delta)
    return inner * (t - 0.5 * inner)
