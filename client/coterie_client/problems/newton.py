"""argmin_x f_i(x) + ridge_i/2 |x|^2 - tilt_i.x for all users of a block: damped semismooth Newton, each user by itself.

Users share the calls and nothing else. Each has its own step lengths and stops by itself; then the batch shrinks. So a block gives the same
bits for any subset of its users.

A user is done when its gradient norm is at most

    max(1e-12 (1 + |tilt|), 64 eps ((L + ridge) |x| + pull + |tilt|)),

where L and pull are the block's scales. The second term is the rounding level of the gradient in the direction of largest curvature. If
other curvatures are far smaller (a patient number beside an intercept), steps below this level still gain much. So users without a useful
curvature bound take a few more steps.

These users take the regularised Newton step of Li, Fukushima, Qi and Yamashita (2004). Its damping is proportional to the gradient norm, so
it is fast where the Hessian becomes singular (ridge = 0). Steps are accepted by the Armijo rule, or, where values agree to rounding, by the
approximate Wolfe rule of Hager and Zhang (2005). An undamped step that ends within the first term of the bound is always accepted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie_client.problems.blocks import Block, Flags, diagonal, norm

MAX_STEPS = 1000
_MAX_TRIALS = 60
_EPS = float(np.finfo(np.float64).eps)
_WEAK = 1e-8  # curvature bounds below this share of L do not help
_POLISH = 12  # steps of a weak user below the rounding level
_FAR = 1e10  # a weak user this many natural lengths away diverges


class _Batch(NamedTuple):
    """The unfinished users, and what is constant for them."""

    block: Block
    tilt: Array  # (k, d)
    ridge: Array  # (k,)
    tolerance: Array  # (k,), without the part that grows with |x|
    stiffness: Array  # (k,), L + ridge, or 1 where that is 0
    pull: Array  # (k,), pull + |tilt|
    weak: Array  # (k,), 1 where the step needs damping, else 0
    limit: Array  # (k,), of |x|

    def take(self, rows: Indices) -> _Batch:
        block, *fields = self
        return _Batch(block.take(rows), *(field[rows] for field in fields))


class Start(NamedTuple):
    """The part of the start that does not depend on the tilt."""

    x: Array  # (k, d)
    seen: Array
    gradient: Array  # (k, d)
    hessian: Array | None  # (k, d, d), if no user needs damping
    stiffness: Array  # (k,), as in `_Batch`
    weak: Array  # (k,)
    is_damped: bool  # whether any user is weak


class _Point(NamedTuple):
    x: Array  # (k, d)
    seen: Array
    gradient: Array  # (k, d), of the whole objective

    def take(self, rows: Indices) -> _Point:
        return _Point(*(field[rows] for field in self))


class _Height(NamedTuple):
    value: Array  # (k,)
    size: Array  # (k,), the magnitudes that cancel in `value`

    def take(self, rows: Indices) -> _Height:
        return _Height(self.value[rows], self.size[rows])


def start_at(block: Block, x: Array, ridge: Array, *, wants_hessian: bool = False) -> Start:
    """The start of `minimise`; x C-contiguous (k, d), ridge (k,)."""
    stiffness = block.steepness + ridge
    if not (stiffness > 0.0).all():
        stiffness = np.where(stiffness > 0.0, stiffness, 1.0)
    weak = block.floor + ridge < _WEAK * stiffness
    is_damped = bool(weak.any())
    with np.errstate(all="ignore"):  # a distant start may overflow
        seen = block.look(x)
        hessian = _with_ridge(block.hessian(x, seen), ridge) if wants_hessian and not is_damped else None
        gradient = block.gradient(x, seen) + ridge[:, None] * x
    return Start(x, seen, gradient, hessian, stiffness, weak.astype(np.float64), is_damped)


def minimise(block: Block, tilt: Array, ridge: Array, start: Array, known: Start | None = None) -> tuple[Array, Flags]:
    """Minimisers (k, d), and (k,) flags of the users that converged. The others' rows are their last iterate.

    tilt, start: C-contiguous (k, d). ridge: (k,), not negative. known: `start_at` of the start, if already computed. Users with a closed
    form need no steps.
    """
    exact = block.closed_form(tilt, ridge)
    if exact is None:
        return _newton(block, tilt, ridge, known or start_at(block, start, ridge))
    converged = ~np.isnan(exact[:, 0])
    rest = np.flatnonzero(~converged)
    if rest.size:
        part = block.take(rest)
        exact[rest], converged[rest] = _newton(part, tilt[rest], ridge[rest], start_at(part, start[rest], ridge[rest]))
    return exact, converged


def _newton(block: Block, tilt: Array, ridge: Array, start: Start) -> tuple[Array, Flags]:
    with np.errstate(all="ignore"):  # a diverging user is reported, not warned about
        batch = _batch(block, tilt, ridge, start)
        point, hessian = _Point(start.x, start.seen, start.gradient - tilt), start.hessian
        height: _Height | None = None  # at the point, once computed
        stuck: Flags | None = None
        damped = _Damped.fresh(len(tilt))
        left: _Left | None = None  # no user has left yet
        for step in range(MAX_STEPS + 1):
            slope = norm(point.gradient)
            goal = np.maximum(batch.tolerance, 64.0 * _EPS * (batch.stiffness * norm(point.x) + batch.pull))
            # Usually all undamped users finish in the same step, which a quick test recognises.
            if start.is_damped or stuck is not None or step == MAX_STEPS or not ((slope > goal).all() and slope.max() < np.inf):
                lost = ~(norm(point.x) <= batch.limit) | ~np.isfinite(slope)
                done = (slope <= goal) & ~lost
                if start.is_damped:
                    done &= ~damped.goes_on(batch, done, slope)
                leave = done | lost if stuck is None else done | lost | stuck
                leave = leave if step < MAX_STEPS else np.ones_like(done)
                # A stuck user's objective is at the rounding level, if the slope agrees.
                done |= leave & ~lost & (slope <= 100.0 * goal)
                left = left or _Left.nobody(start.x)
                left.add(leave, point.x, done)
                stay = np.flatnonzero(~leave)
                if not stay.size:
                    break
                if stay.size < leave.size:
                    batch, point, damped, slope = batch.take(stay), point.take(stay), damped.take(stay), slope[stay]
                    hessian = None if hessian is None else hessian[stay]
                    height = None if height is None else height.take(stay)
            if hessian is None:
                ridge = batch.ridge
                if start.is_damped:
                    ridge = ridge + batch.weak * batch.stiffness * np.maximum(damped.caution * np.minimum(slope / batch.pull, 1.0), _EPS)
                hessian = _with_ridge(batch.block.hessian(point.x, point.seen), ridge)
            direction, fall = _direction(batch, point, hessian)
            hessian = None
            trial = _look(batch, point.x + direction)
            # A user at a minimum needs no comparison of heights. From a close start, most users arrive after one step.
            arrived: Flags = norm(trial.gradient) <= batch.tolerance
            if start.is_damped:
                arrived &= batch.weak == 0.0
            if arrived.all():
                if left is None:
                    return trial.x, arrived
                left.add(arrived, trial.x, arrived)
                break
            height = height or _height(batch, point)
            new = _height(batch, trial)
            accepted = _accepted(height, new, trial.gradient, direction, fall, 1.0)
            refused = ~(accepted | arrived)
            stuck = _search_where(refused, batch, (point, height), (trial, new), direction, fall) if refused.any() else None
            if start.is_damped:
                damped.note(refused, fall, height)
            point, height = trial, new
    assert left is not None  # noqa: S101 - the last step makes everybody leave
    return left.x, left.converged


@dataclass
class _Damped:
    """State of damped users between steps."""

    caution: Array  # (k,), damping per relative slope
    n_steps: Indices  # (k,), steps below the rounding level
    gain: Array  # (k,), predicted gain of the latest step, relative to the size of the value

    @staticmethod
    def fresh(n: int) -> _Damped:
        return _Damped(np.full(n, 1e-3), np.zeros(n, dtype=np.int64), np.full(n, np.inf))

    def take(self, rows: Indices) -> _Damped:
        return _Damped(self.caution[rows], self.n_steps[rows], self.gain[rows])

    def note(self, refused: Flags, fall: Array, height: _Height) -> None:
        """Records a step from this height."""
        self.gain = -fall / np.maximum(height.size, np.finfo(np.float64).tiny)
        self.caution = np.clip(np.where(refused, 10.0 * self.caution, 0.1 * self.caution), 1e-12, 1.0)

    def goes_on(self, batch: _Batch, done: Flags, slope: Array) -> Flags:
        """Finished users that continue for a few steps, which are counted."""
        early: Flags = done & (batch.weak > 0.0) & (slope > batch.tolerance) & (self.n_steps < _POLISH) & (self.gain > _EPS)
        self.n_steps = self.n_steps + early
        return early


@dataclass
class _Left:
    """Results of finished users, and positions of the others."""

    x: Array  # (n, d), the start for unfinished users
    converged: Flags  # (n,)
    order: Indices  # (k,), positions of unfinished users

    @staticmethod
    def nobody(start: Array) -> _Left:
        n = len(start)
        return _Left(start.copy(), np.zeros(n, dtype=np.bool_), np.arange(n))

    def add(self, who: Flags, x: Array, converged: Flags) -> None:
        """Adds users among the k unfinished ones."""
        places = self.order[who]
        self.x[places], self.converged[places], self.order = x[who], converged[who], self.order[~who]


def _batch(block: Block, tilt: Array, ridge: Array, start: Start) -> _Batch:
    tilt_norm = norm(tilt)
    pull, limit = block.pull + tilt_norm, np.full(len(tilt), np.inf)
    if start.is_damped:
        limit = np.where(start.weak > 0.0, _FAR * (norm(start.x) + pull / start.stiffness), np.inf)
    return _Batch(block, tilt, ridge, 1e-12 * (1.0 + tilt_norm), start.stiffness, pull, start.weak, limit)


def _look(batch: _Batch, x: Array) -> _Point:
    seen = batch.block.look(x)
    return _Point(x, seen, batch.block.gradient(x, seen) + batch.ridge[:, None] * x - batch.tilt)


def _height(batch: _Batch, point: _Point) -> _Height:
    x, loss = point.x, batch.block.value(point.x, point.seen)
    pulled, tied = np.vecdot(batch.tilt, x), 0.5 * batch.ridge * np.vecdot(x, x)
    return _Height(loss + tied - pulled, np.abs(loss) + tied + np.abs(pulled))


def _with_ridge(hessian: Array, ridge: Array) -> Array:
    """The Hessians (k, d, d) plus their ridges (k,), in place."""
    diagonal(hessian)[...] += ridge[:, None]
    return hessian


def _direction(batch: _Batch, point: _Point, hessian: Array) -> tuple[Array, Array]:
    """Newton directions (k, d) and their directional derivatives (k,), all negative."""
    direction = -_solve(hessian, point.gradient)
    fall = np.vecdot(point.gradient, direction)
    downhill = fall < 0.0
    if not downhill.all():  # singular to working precision: fall back on a gradient step
        uphill = ~downhill
        steepest = -point.gradient / batch.stiffness[:, None]
        direction = np.where(uphill[:, None], steepest, direction)
        fall = np.where(uphill, np.vecdot(point.gradient, steepest), fall)
    return direction, fall


def _solve(matrices: Array, right: Array) -> Array:
    """(k, d), NaN for a singular matrix, which must not stop the other users."""
    try:
        solution: Array = np.linalg.solve(matrices, right[:, :, None]).astype(np.float64, copy=False)[:, :, 0]
    except np.linalg.LinAlgError:
        if len(right) == 1:
            return right * np.nan
        return np.concatenate([_solve(matrices[k : k + 1], right[k : k + 1]) for k in range(len(right))])
    return solution


def _search_where(
    refused: Flags, batch: _Batch, at: tuple[_Point, _Height], trial: tuple[_Point, _Height], direction: Array, fall: Array
) -> Flags:
    """Replaces refused trials by shorter steps. Returns the users for whom none was found."""
    rows, stuck = np.flatnonzero(refused), np.zeros(len(fall), dtype=np.bool_)
    *found, stuck[rows] = _search(batch.take(rows), at[0].take(rows), at[1].take(rows), direction[rows], fall[rows])
    for field, new in zip((*trial[0], *trial[1]), itertools.chain(*found), strict=True):
        field[rows] = new
    return stuck


def _search(batch: _Batch, point: _Point, height: _Height, direction: Array, fall: Array) -> tuple[_Point, _Height, Flags]:
    """A bisection for the weak Wolfe rules below a refused full step, each user by itself. Returns points, and the users without one.

    Plain halving stops far short of the minimum along the line if rows enter or leave the curved part of their loss, and then crawls.
    """
    low, high, t = np.zeros(len(fall)), np.ones(len(fall)), np.full(len(fall), 0.5)
    best, highest = _Point(*(field.copy() for field in point)), _Height(*(field.copy() for field in height))
    rows = np.arange(len(fall))
    for _ in range(_MAX_TRIALS):
        part, old, way, drop = batch.take(rows), height.take(rows), direction[rows], fall[rows]
        new = _look(part, point.x[rows] + t[rows, None] * way)
        level = _height(part, new)
        fine = _accepted(old, level, new.gradient, way, drop, t[rows])
        for field, better in zip((*best, *highest), (*new, *level), strict=True):
            field[rows[fine]] = better[fine]
        low[rows[fine]], high[rows[~fine]] = t[rows[fine]], t[rows[~fine]]
        rows = rows[~fine | (np.vecdot(new.gradient, way) < 0.5 * drop)]
        if not rows.size:
            break
        t[rows] = 0.5 * (low[rows] + high[rows])
    return best, highest, low == 0.0


def _accepted(old: _Height, new: _Height, gradient: Array, direction: Array, fall: Array, t: Array | float) -> Flags:
    armijo: Flags = new.value <= old.value + 1e-4 * t * fall
    if armijo.all():
        return armijo
    level = new.value <= old.value + 32.0 * _EPS * old.size
    accepted: Flags = armijo | (level & (np.vecdot(gradient, direction) <= -0.5 * fall))
    return accepted
