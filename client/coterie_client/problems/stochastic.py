"""argmin_x f_i(x) + ridge/2 |x|^2 - tilt.x of one user from few of its rows at a time, for users with many rows.

SVRG (Johnson and Zhang, 2013) and SAGA (Defazio, Bach and Lacoste-Julien, 2014), with the ridge and the tilt in a proximal step (Xiao and
Zhang, 2014). An epoch is one pass over all rows, for the gradient at a snapshot, and then steps on batches of distinct rows. There are as
many as the problem's condition asks for, and at most a pass of them. With b rows a step, gradients have the expected smoothness
(1 - 1/b) L + L_max / b (Gower and others, 2019), L that of f_i and L_max that of its worst row; the step length is a third of its inverse.

The rows are read where they were loaded, in pieces: nothing is kept but, for SAGA, one number for each row. A user's bits depend on its
rows, its stream and its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.streams import Stream
from coterie.errors import ConfigError
from coterie_client.problems.convex import ConvexProblem
from coterie_client.problems.losses import Poisson, RowLoss

ACCURACY = 1e-2  # of the gradient at the start, so the tolerance falls with the residual of the method that asks
_PIECE = 8192  # rows of a product
_POWERS = 10  # steps of the power method; L is a third too small at worst, and the step length allows for three times as much
_SETTLED = 5.0  # steps of an epoch, in those that shrink the distance by e
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Rule:
    """How to go about it."""

    name: Literal["svrg", "saga"]
    batch_size: int  # rows of a step
    epochs: int  # the most of an update


class Rows:
    """The loss of one user, and the scales of its curvature."""

    def __init__(self, problem: ConvexProblem, user: int) -> None:
        if problem.loss is None:
            raise ConfigError(f"the loss {problem.config.loss!r} has no targets, want x_update: exact, which has a closed form or few rows")
        self.loss: RowLoss = problem.loss
        self.features, self.targets = problem.features[user], problem.targets[user]
        self.m, self.d, self.has_intercept = len(self.features), problem.d, problem.config.has_intercept
        self.share = float(self.m) if problem.config.reduction == "sum" else 1.0
        self.shrink = np.full(self.d, problem.config.l2)
        if self.has_intercept:
            self.shrink[-1] = 0.0
        self.smoothness, self.row_smoothness = self._smoothness()

    def _smoothness(self) -> tuple[float, float]:
        """L and L_max. The power method begins at the mean of the absolute rows, so that it needs no random numbers."""
        peak, direction = 0.0, np.zeros(self.d)
        for rows, _ in self.pieces():
            peak = max(peak, float(np.vecdot(rows, rows).max()))
            direction += self._transposed(rows, np.ones(len(rows))) + 1e-3 * self._transposed(np.abs(rows), np.ones(len(rows)))
        stretch = 0.0
        for _ in range(_POWERS):
            direction /= max(float(np.linalg.norm(direction)), np.finfo(np.float64).tiny)
            product = np.zeros(self.d)
            for rows, _ in self.pieces():
                product += self._transposed(rows, self.margins(rows, direction))
            stretch, direction = max(stretch, float(direction @ product) / self.m), product
        reach = max(1.0, float(np.abs(self.targets).max()))
        bound = self.share * (min(reach, self.loss.curvature_bound) if isinstance(self.loss, Poisson) else self.loss.curvature_bound)
        c = float(self.shrink[0])
        return bound * stretch + c, bound * (peak + self.has_intercept) + c

    def pieces(self) -> Iterator[tuple[Array, Array]]:
        """All rows and their targets, in order."""
        for first in range(0, self.m, _PIECE):
            here = slice(first, first + _PIECE)
            yield np.ascontiguousarray(self.features[here]), self.targets[here]

    def margins(self, rows: Array, x: Array) -> Array:
        """(b,) the predictions of rows (b, p)."""
        return np.asarray(rows @ x[:-1] - x[-1] if self.has_intercept else rows @ x)

    def _transposed(self, rows: Array, numbers: Array) -> Array:
        """(d,) the sum of the design rows times their numbers (b,)."""
        found = numbers @ rows
        return np.append(found, -numbers.sum()) if self.has_intercept else np.asarray(found)

    def slopes(self, rows: Array, targets: Array, x: Array) -> Array:
        """(b,) of the rows' losses."""
        return self.share * self.loss.slope(self.margins(rows, x), targets)

    def mean(self, rows: Array, slopes: Array) -> Array:
        """(d,) the mean of the rows' gradients."""
        return self._transposed(rows, slopes) / len(rows)

    def gradient(self, x: Array, table: Array | None) -> Array:
        """(d,) of the mean over all rows at x, without the penalty; the slopes of all rows go to the table (m,)."""
        total, first = np.zeros(self.d), 0
        for rows, targets in self.pieces():
            slopes = self.slopes(rows, targets, x)
            if table is not None:
                table[first : first + len(rows)] = slopes
            total += self._transposed(rows, slopes)
            first += len(rows)
        return total / self.m


def rows_of(problem: ConvexProblem, user: int) -> Rows:
    """Those of a user, whose scales are found once."""
    found = problem.of_users.get(user)
    if not isinstance(found, Rows):
        found = problem.of_users[user] = Rows(problem, user)
    return found


def minimise(user: Rows, rule: Rule, tilt: Array, ridge: float, start: Array, draws: Callable[[int], Stream]) -> tuple[Array, float]:
    """x (d,), and its gradient norm over the tolerance: above 1 where the epochs did not suffice. `draws` gives the stream of an epoch.

    The tolerance is `ACCURACY` times the gradient norm at the start, and at least its rounding level.
    """
    weight = user.shrink + ridge  # of the quadratic part in each coordinate
    batch = min(rule.batch_size, user.m)
    smoothness = (1 - 1 / batch) * user.smoothness + user.row_smoothness / batch
    length = 1.0 / (3.0 * max(smoothness, np.finfo(np.float64).tiny))
    pulled, least = float(np.linalg.norm(tilt)), float(weight.min())
    settled = math.inf if least == 0.0 else _SETTLED * (1.0 + 1.0 / (length * least))
    n_steps = int(min(math.ceil(user.m / batch), settled))
    table = np.empty(user.m) if rule.name == "saga" else None
    x, best, lowest, tolerance = start, start, math.inf, 0.0
    for epoch in range(rule.epochs + 1):
        mean = user.gradient(x, table)
        slope = float(np.linalg.norm(mean + weight * x - tilt))
        if epoch == 0:
            tolerance = ACCURACY * slope
        if slope < lowest:
            best, lowest = x, slope
        goal = max(tolerance, 1e-12 * (1.0 + pulled), 64.0 * _EPS * ((user.smoothness + ridge) * float(np.linalg.norm(x)) + pulled))
        if slope <= goal:
            return x, slope / goal
        if epoch < rule.epochs:
            x = _steps(user, x, mean, tilt, weight, (length, n_steps, batch), table, draws(epoch))
    return best, lowest / goal


def _steps(
    user: Rows, snapshot: Array, mean: Array, tilt: Array, weight: Array, how: tuple[float, int, int], table: Array | None, stream: Stream
) -> Array:
    """The steps of one epoch; `mean` is the gradient of the references, which are those of the snapshot, or with a table the latest."""
    length, n_steps, batch = how
    x, mean = snapshot, mean.copy()
    for _ in range(n_steps):
        places: Indices = np.unique((stream.uniform(batch) * user.m).astype(np.int64))
        rows, targets = user.features[places], user.targets[places]
        new = user.slopes(rows, targets, x)
        change = new - (user.slopes(rows, targets, snapshot) if table is None else table[places])
        moved = user.mean(rows, change)
        x = (x - length * (mean + moved - tilt)) / (1.0 + length * weight)
        if table is not None:
            table[places] = new
            mean += moved * (len(places) / user.m)
    return x
