"""argmin_x f_i(x) + ridge_i/2 |x|^2 - tilt_i.x for all users of a block: damped semismooth Newton, each user by itself.

Users share the calls and nothing else. Each has its own step lengths and its own last iteration, after which it leaves
the batch; what remains is cut down to the others, and a block gives the same bits for any subset of its users.

A user is done when its gradient norm is at most

    max(1e-12 (1 + |tilt|), 64 eps ((L + ridge) |x| + pull + |tilt|)),

L and pull being the block's scales. The second term is the level at which rounding in the gradient itself takes over: in the direction of
the largest curvature. Where others are far smaller (a patient number beside an intercept), much can be left to gain below it, so users
without a useful curvature bound go on for a few steps there.
Users whose curvature has no useful positive bound get the regularised Newton step of Li, Fukushima, Qi and Yamashita
(2004), with a damping proportional to the gradient norm: fast where the Hessian turns singular (ridge = 0). Acceptance
is the Armijo rule, or the approximate Wolfe rule of Hager and Zhang (2005) where values agree to rounding; a step of the
others that ends within the first term of the bound is accepted as it is.
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
_WEAK = 1e-8  # curvature bounds below this share of L are no help
_POLISH = 12  # steps of a weak user below the level of rounding
_FAR = 1e10  # a user this many natural lengths away, without curvature to hold it, is on its way to infinity


@dataclass(frozen=True)
class _Batch:
    """The users still at work and what does not change for them."""

    block: Block
    tilt: Array  # (k, d)
    ridge: Array  # (k,)
    tolerance: Array  # (k,), without the part that grows with |x|
    stiffness: Array  # (k,), L + ridge, or 1 where that is 0
    pull: Array  # (k,), pull + |tilt|
    weak: Array  # (k,), 1 where the step needs damping, else 0
    limit: Array  # (k,), of |x|

    def take(self, rows: Indices) -> _Batch:
        return _Batch(
            self.block.take(rows),
            self.tilt[rows],
            self.ridge[rows],
            self.tolerance[rows],
            self.stiffness[rows],
            self.pull[rows],
            self.weak[rows],
            self.limit[rows],
        )


class Start(NamedTuple):
    """What does not depend on the tilt: of the objective at x, and of the scales of the users' problems."""

    x: Array  # (k, d)
    seen: Array
    gradient: Array  # (k, d)
    hessian: Array | None  # (k, d, d), where nobody needs damping
    stiffness: Array  # (k,), as in `_Batch`
    weak: Array  # (k,)
    is_damped: bool  # any of them


class _Point(NamedTuple):
    """Where the users are."""

    x: Array  # (k, d)
    seen: Array
    gradient: Array  # (k, d), of the whole objective

    def take(self, rows: Indices) -> _Point:
        return _Point(*(field[rows] for field in self))


class _Height(NamedTuple):
    """The whole objective there."""

    value: Array  # (k,)
    size: Array  # (k,), the magnitudes that cancel in `value`

    def take(self, rows: Indices) -> _Height:
        return _Height(self.value[rows], self.size[rows])


def start_at(block: Block, x: Array, ridge: Array, *, wants_hessian: bool = False) -> Start:
    """What `minimise` needs where it starts; x C-contiguous (k, d), ridge (k,)."""
    stiffness = block.steepness + ridge
    if not (stiffness > 0.0).all():
        stiffness = np.where(stiffness > 0.0, stiffness, 1.0)
    weak = block.floor + ridge < _WEAK * stiffness
    is_damped = bool(weak.any())
    with np.errstate(all="ignore"):  # a start may be too far away for its numbers
        seen = block.look(x)
        hessian = _with_ridge(block.hessian(x, seen), ridge) if wants_hessian and not is_damped else None
        gradient = block.gradient(x, seen) + ridge[:, None] * x
    return Start(x, seen, gradient, hessian, stiffness, weak.astype(np.float64), is_damped)


def minimise(block: Block, tilt: Array, ridge: Array, start: Array, known: Start | None = None) -> tuple[Array, Flags]:
    """Minimisers (k, d), and (k,) booleans telling which users converged; the others' rows are their last iterate.

    tilt, start: C-contiguous (k, d). ridge: (k,), not negative. known: `start_at` the start, which saves the time. Users with a closed
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
        height: _Height | None = None  # of the point, where it has been computed
        stuck: Flags | None = None
        damped = _Damped.fresh(len(tilt))
        left: _Left | None = None  # nobody has left yet
        for step in range(MAX_STEPS + 1):
            slope = norm(point.gradient)
            goal = np.maximum(batch.tolerance, 64.0 * _EPS * (batch.stiffness * norm(point.x) + batch.pull))
            # Mostly nobody leaves before all do, which for all but the damped takes a glance.
            if start.is_damped or stuck is not None or step == MAX_STEPS or not ((slope > goal).all() and slope.max() < np.inf):
                lost = ~(norm(point.x) <= batch.limit) | ~np.isfinite(slope)
                done = (slope <= goal) & ~lost
                if start.is_damped:
                    done &= ~damped.goes_on(batch, done, slope)
                leave = done | lost if stuck is None else done | lost | stuck
                leave = leave if step < MAX_STEPS else np.ones_like(done)
                # No step lowers a stuck user's objective: that is the floor of rounding, if the slope agrees.
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
                ridge = batch.ridge + _damping(batch, slope, damped.caution) if start.is_damped else batch.ridge
                hessian = _with_ridge(batch.block.hessian(point.x, point.seen), ridge)
            direction, fall = _direction(batch, point, hessian)
            hessian = None
            trial = _look(batch, point.x + direction)
            # Who has arrived at a minimum needs no comparison of heights; mostly all have, after one step from a start nearby.
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
    """What damped users carry from step to step."""

    caution: Array  # (k,), the share of the slope that damps
    n_steps: Indices  # (k,), those of weak users below the level of rounding
    gain: Array  # (k,), what the latest step promised, as a share of the magnitudes that cancel in the value

    @staticmethod
    def fresh(n: int) -> _Damped:
        return _Damped(np.full(n, 1e-3), np.zeros(n, dtype=np.int64), np.full(n, np.inf))

    def take(self, rows: Indices) -> _Damped:
        return _Damped(self.caution[rows], self.n_steps[rows], self.gain[rows])

    def note(self, refused: Flags, fall: Array, height: _Height) -> None:
        """A step has been taken from this height."""
        self.gain = -fall / np.maximum(height.size, np.finfo(np.float64).tiny)
        self.caution = np.clip(np.where(refused, 10.0 * self.caution, 0.1 * self.caution), 1e-12, 1.0)

    def goes_on(self, batch: _Batch, done: Flags, slope: Array) -> Flags:
        """Who of those that are done goes on, which is counted."""
        early: Flags = done & (batch.weak > 0.0) & (slope > batch.tolerance) & (self.n_steps < _POLISH) & (self.gain > _EPS)
        self.n_steps = self.n_steps + early
        return early


@dataclass
class _Left:
    """Where users ended, and who is still at work."""

    x: Array  # (n, d), the start of those at work
    converged: Flags  # (n,)
    order: Indices  # (k,), the places of those at work

    @staticmethod
    def nobody(start: Array) -> _Left:
        n = len(start)
        return _Left(start.copy(), np.zeros(n, dtype=np.bool_), np.arange(n))

    def add(self, who: Flags, x: Array, converged: Flags) -> None:
        """Those of the k at work."""
        places = self.order[who]
        self.x[places], self.converged[places], self.order = x[who], converged[who], self.order[~who]


def _batch(block: Block, tilt: Array, ridge: Array, start: Start) -> _Batch:
    tilt_norm = norm(tilt)
    pull, limit = block.pull + tilt_norm, np.full(len(tilt), np.inf)
    if start.is_damped:
        limit = np.where(start.weak > 0.0, _FAR * (norm(start.x) + pull / start.stiffness), np.inf)
    return _Batch(block, tilt, ridge, 1e-12 * (1.0 + tilt_norm), start.stiffness, pull, start.weak, limit)


def _damping(batch: _Batch, slope: Array, caution: Array) -> Array:
    """(k,) beside the ridge, 0 for those who need none."""
    damping: Array = batch.weak * batch.stiffness * np.maximum(caution * np.minimum(slope / batch.pull, 1.0), _EPS)
    return damping


def _look(batch: _Batch, x: Array) -> _Point:
    seen = batch.block.look(x)
    return _Point(x, seen, batch.block.gradient(x, seen) + batch.ridge[:, None] * x - batch.tilt)


def _height(batch: _Batch, point: _Point) -> _Height:
    x, loss = point.x, batch.block.value(point.x, point.seen)
    pulled, tied = np.vecdot(batch.tilt, x), 0.5 * batch.ridge * np.vecdot(x, x)
    return _Height(loss + tied - pulled, np.abs(loss) + tied + np.abs(pulled))


def _with_ridge(hessian: Array, ridge: Array) -> Array:
    """The Hessians (k, d, d), which are overwritten, with their ridges (k,)."""
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
    """(k, d), NaN for a singular matrix; a singular matrix must not stop the other users."""
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
    """Shorter steps for those who were refused the full one, put in the place of their trial; tells who of them found none."""
    rows, stuck = np.flatnonzero(refused), np.zeros(len(fall), dtype=np.bool_)
    *found, stuck[rows] = _search(batch.take(rows), at[0].take(rows), at[1].take(rows), direction[rows], fall[rows])
    for field, new in zip((*trial[0], *trial[1]), itertools.chain(*found), strict=True):
        field[rows] = new
    return stuck


def _search(batch: _Batch, point: _Point, height: _Height, direction: Array, fall: Array) -> tuple[_Point, _Height, Flags]:
    """A bisection for the weak Wolfe rules below a refused full step, each user by itself; points, and who found none.

    Halving alone stops far short of the minimum along the line where rows enter or leave the curved part of their
    loss, and then crawls.
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
