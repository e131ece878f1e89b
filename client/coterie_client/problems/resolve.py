"""Resolves the name of a loss: built in, from a package, or from the user's own code."""

from __future__ import annotations

import math
from typing import Any, cast

from coterie.arrays import Array
from coterie.errors import ConfigError, default_finding
from coterie.experiment import plugins
from coterie.experiment.problem import ProblemConfig
from coterie.findings import Finding
from coterie_client.problems.losses import Huber, LeastSquares, Logistic, Poisson, RowLoss, SquaredHinge
from coterie_client.user_code import user_code

_FUNCTIONS = ("value", "slope", "curvature", "check_targets", "predict")
_RAISED = Finding("L1", place="problem.loss")
_BOUNDS = ("curvature_bound", "curvature_floor")


@default_finding(Finding("L4", place="problem.loss"))
def resolve_row_loss(config: ProblemConfig) -> RowLoss:
    """The row loss that `config.loss` names. A class is called without arguments.

    Raises `ConfigError` when it cannot be imported or is not a `RowLoss`.
    """
    match config.loss:
        case "squared_hinge":
            return SquaredHinge()
        case "logistic":
            return Logistic()
        case "least_squares":
            return LeastSquares()
        case "huber":
            return Huber(config.huber_delta)
        case "poisson":
            return Poisson(config.log_mean_limit)
        case path:
            return _own(path)


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
    return _Guarded(cast(RowLoss, found), path)


class _Guarded:
    """A loss from outside, whose exceptions become errors that blame the loss. Other attributes are passed through."""

    def __init__(self, loss: RowLoss, path: str) -> None:
        self._loss, self._what = loss, f"loss {path!r}"
        self.is_classifier = loss.is_classifier
        self.curvature_bound = loss.curvature_bound
        self.curvature_floor = loss.curvature_floor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask before there is a loss
            raise AttributeError(name)
        return getattr(self._loss, name)

    def value(self, s: Array, y: Array) -> Array:
        with user_code(self._what, _RAISED):
            return self._loss.value(s, y)

    def slope(self, s: Array, y: Array) -> Array:
        with user_code(self._what, _RAISED):
            return self._loss.slope(s, y)

    def curvature(self, s: Array, y: Array) -> Array:
        with user_code(self._what, _RAISED):
            return self._loss.curvature(s, y)

    def check_targets(self, y: Array, user: str) -> None:
        with user_code(self._what, _RAISED, ConfigError), default_finding(Finding("L6", role="target", place="problem.loss")):
            self._loss.check_targets(y, user)

    def predict(self, s: Array) -> Array:
        with user_code(self._what, _RAISED):
            return self._loss.predict(s)


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
