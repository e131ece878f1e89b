"""Row losses phi(s, y): the loss of one row for prediction s and target y; built in, from a package, or from the user's own code.

The squared hinge (without a factor 1/2) is from section V of Armacki, Bajovic, Jakovetic, Kar (2022). All functions are elementwise, so a
row's value cannot depend on other rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError, default_finding
from coterie.experiment import plugins
from coterie.experiment.problem import ProblemConfig
from coterie.findings import Finding
from coterie.user_code import user_code


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


class _BuiltIn:
    """What the built-in losses have in common, unless they say otherwise."""

    is_classifier = False
    curvature_floor = 0.0

    def check_targets(self, y: Array, user: str) -> None:
        if self.is_classifier:
            check_labels(y, user)

    def predict(self, s: Array) -> Array:
        return np.where(s >= 0.0, 1.0, -1.0) if self.is_classifier else s  # never 0, which would be no label


@dataclass(frozen=True)
class SquaredHinge(_BuiltIn):
    """phi = max(0, 1 - y s)^2."""

    is_classifier = True
    curvature_bound = 2.0

    def value(self, s: Array, y: Array) -> Array:
        short = np.maximum(1.0 - y * s, 0.0)
        return short * short

    def slope(self, s: Array, y: Array) -> Array:
        return -2.0 * y * np.maximum(1.0 - y * s, 0.0)

    def curvature(self, s: Array, y: Array) -> Array:
        return np.multiply(2.0, y * s < 1.0)


@dataclass(frozen=True)
class Logistic(_BuiltIn):
    """phi = log(1 + exp(-y s))."""

    is_classifier = True
    curvature_bound = 0.25

    def value(self, s: Array, y: Array) -> Array:
        margin = y * s
        return np.log1p(np.exp(-np.abs(margin))) + np.maximum(-margin, 0.0)

    def slope(self, s: Array, y: Array) -> Array:
        return y / (-1.0 - np.exp(np.minimum(y * s, 700.0)))  # beyond, exp overflows; the slope is practically 0

    def curvature(self, s: Array, y: Array) -> Array:
        e = np.exp(-np.abs(y * s))
        return e / ((1.0 + e) * (1.0 + e))


@dataclass(frozen=True)
class LeastSquares(_BuiltIn):
    """phi = (s - y)^2 / 2."""

    curvature_bound = 1.0
    curvature_floor = 1.0

    def value(self, s: Array, y: Array) -> Array:
        miss = s - y
        return 0.5 * miss * miss

    def slope(self, s: Array, y: Array) -> Array:
        return s - y

    def curvature(self, s: Array, y: Array) -> Array:  # noqa: ARG002 (the protocol's signature)
        return np.ones_like(s)


@dataclass(frozen=True)
class Huber(_BuiltIn):
    """phi = t^2 / 2 for t = |s - y| <= delta, and delta (t - delta/2) beyond."""

    delta: float = 1.0
    curvature_bound = 1.0

    def value(self, s: Array, y: Array) -> Array:
        return huber(np.abs(s - y), self.delta)

    def slope(self, s: Array, y: Array) -> Array:
        return np.clip(s - y, -self.delta, self.delta)

    def curvature(self, s: Array, y: Array) -> Array:
        return np.multiply(1.0, np.abs(s - y) <= self.delta)


@dataclass(frozen=True)
class Poisson(_BuiltIn):
    """phi = exp(s) - y s, the negative log-likelihood of a count y with mean exp(s), without the term log y!.

    Its curvature exp(s) is unbounded, and so no step size would be safe. So beyond s = log_mean_limit, the exponential continues as its
    parabola, with curvature exp(log_mean_limit). Counts in training rows may not exceed exp(log_mean_limit), since their fit would not be a
    Poisson regression.
    """

    log_mean_limit: float = 5.0

    @property
    def curvature_bound(self) -> float:
        return math.exp(self.log_mean_limit)

    def value(self, s: Array, y: Array) -> Array:
        beyond = np.maximum(s - self.log_mean_limit, 0.0)
        return self.curvature(s, y) * (1.0 + beyond * (1.0 + 0.5 * beyond)) - y * s

    def slope(self, s: Array, y: Array) -> Array:
        beyond = np.maximum(s - self.log_mean_limit, 0.0)
        return self.curvature(s, y) * (1.0 + beyond) - y

    def curvature(self, s: Array, y: Array) -> Array:  # noqa: ARG002 (the protocol's signature)
        return np.exp(np.minimum(s, self.log_mean_limit))

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
        return np.exp(np.minimum(s, 700.0))

    def deviance(self, s: Array, y: Array) -> Array:
        """2 (y log(y/mean) - (y - mean)) with mean = `predict(s)`: twice the log-likelihood lost against a perfect prediction."""
        s = np.minimum(s, 700.0)
        deviance: Array = 2.0 * (np.exp(s) - y * s - y * (1.0 - np.log(np.maximum(y, 1.0))))
        return np.maximum(deviance, 0.0)  # a value below 0 is a rounding error


def huber(t: Array, delta: float) -> Array:
    """The Huber function of t >= 0, without a difference of two large squares."""
    inner = np.minimum(t, delta)
    return inner * (t - 0.5 * inner)


_FUNCTIONS = ("value", "slope", "curvature", "check_targets", "predict")
_RAISED = Finding("L1", place="problem.loss")
_BOUNDS = ("curvature_bound", "curvature_floor")


@default_finding(Finding("L4", place="problem.loss"))
def resolve_row_loss(config: ProblemConfig) -> RowLoss:
    """The row loss that `config.loss` names. A class is called without arguments.

    Raises `ConfigError` when it cannot be imported or is not a `RowLoss`.
    """
    built_in: dict[str, Callable[[], RowLoss]] = {
        "squared_hinge": SquaredHinge,
        "logistic": Logistic,
        "least_squares": LeastSquares,
        "huber": lambda: Huber(config.huber_delta),
        "poisson": lambda: Poisson(config.log_mean_limit),
    }
    return built_in[config.loss]() if config.loss in built_in else _own(config.loss)


def _own(path: str) -> RowLoss:
    found = plugins.load("loss", path)
    if isinstance(found, type):
        try:
            found = found()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ConfigError(f"loss {path!r} cannot be made, its class must take no arguments: {type(error).__name__}: {error}") from error
    _check_is_row_loss(found, path)
    return cast(RowLoss, _Guarded(cast(RowLoss, found), path))


class _Guarded:
    """A loss from outside, whose exceptions become errors that blame the loss. Other attributes are passed through."""

    def __init__(self, loss: RowLoss, path: str) -> None:
        self._loss, self._what = loss, f"loss {path!r}"
        vars(self).update({name: getattr(loss, name) for name in ("is_classifier", *_BOUNDS)})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask before there is a loss
            raise AttributeError(name)
        found = getattr(self._loss, name)
        return partial(self._called, name, found) if name in _FUNCTIONS else found

    def _called(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        if name != "check_targets":
            with user_code(self._what, _RAISED):
                return function(*given)
        with user_code(self._what, _RAISED, ConfigError), default_finding(Finding("L6", role="target", place="problem.loss")):
            return function(*given)


def _check_is_row_loss(found: object, path: str) -> None:
    missing = [f"{name}()" for name in _FUNCTIONS if not callable(getattr(found, name, None))]
    missing += [name for name in ("is_classifier", *_BOUNDS) if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"loss {path!r} is a {type(found).__name__} without {', '.join(missing)}: wanted all of a RowLoss")
    if not isinstance(flag := getattr(found, "is_classifier"), bool):  # noqa: B009 (found is an object here)
        raise ConfigError(f"loss {path!r} has is_classifier {flag!r}, it must be True or False")
    for name in _BOUNDS:
        bound = getattr(found, name)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound) or bound < 0:
            raise ConfigError(f"loss {path!r} has {name} {bound!r}, it must be a finite number, not negative")
    low, high = getattr(found, "curvature_floor"), getattr(found, "curvature_bound")  # noqa: B009
    if low > high or high == 0:
        raise ConfigError(f"loss {path!r} has curvature from {low!r} to {high!r}, wanted floor <= bound and bound > 0")
