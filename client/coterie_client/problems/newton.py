"""argmin_x f_i(x) + ridge_i/2 |x|^2 - tilt_i.x for all users of a block: damped semismooth Newton, each user by itself.

Users share the calls and nothing else. Each has its own step lengths and its own last iteration, after which it leaves
the batch; what remains is cut down to the others, and a block gives the same bits for any subset of its users.

A user is done when its gradient norm is at most

    max(1e-12 (1 + |tilt|), 64 eps ((L + ridge) |x| + pull + |tilt|)),

L and pull being the block's scales. The second term is the level at which rounding in the gradient itself takes over.
Users whose curvature has no useful positive bound get the regularised Newton step of Li, Fukushima, Qi and Yamashita
(2004), with a damping proportional to the gradient norm: fast where the Hessian turns singular (ridge = 0). Acceptance
is the Armijo rule, or the approximate Wolfe rule of Hager and Zhang (2005) where values agree to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie_client.problems.blocks import Block, Flags, diagonal, norm

MAX_STEPS = 1000
_MAX_TRIALS = 60
_EPS = float(np.finfo(np.float64).eps)
_WEAK = 1e-8  # curvature bounds below this share of L are no help
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


class _Point(NamedTuple):
    """Where the users are."""

    x: Array  # (k, d)
    seen: Array
    value: Array  # (k,), of the whole objective
    size: Array  # (k,), the magnitudes that cancel in `value`
    gradient: Array  # (k, d)

    def take(self, rows: Indices) -> _Point:
        return _Point(*(field[rows] for field in self))


def minimise(block: Block, tilt: Array, ridge: Array, start: Array) -> tuple[Array, Flags]:
    """Minimisers (k, d), and (k,) booleans telling which users converged; the others' rows are their last iterate.

    tilt, start: C-contiguous (k, d). ridge: (k,), not negative. Users with a closed form need no steps.
    """
    exact = block.closed_form(tilt, ridge)
    if exact is None:
        return _newton(block, tilt, ridge, start)
    known = ~np.isnan(exact[:, 0])
    rest = np.flatnonzero(~known)
    if rest.size:
        exact[rest], known[rest] = _newton(block.take(rest), tilt[rest], ridge[rest], start[rest])
    return exact, known


def _newton(block: Block, tilt: Array, ridge: Array, start: Array) -> tuple[Array, Flags]:
    batch = _batch(block, tilt, ridge, start)
    result = start.copy()
    converged = np.zeros(len(start), dtype=np.bool_)
    order = np.arange(len(start))
    caution = np.full(len(start), 1e-3)
    is_damped = bool(batch.weak.any())
    with np.errstate(all="ignore"):  # a diverging user is reported, not warned about
        point = _at(batch, start)
        stuck = np.zeros(len(start), dtype=np.bool_)
        for step in range(MAX_STEPS + 1):
            slope, length = norm(point.gradient), norm(point.x)
            goal = np.maximum(batch.tolerance, 64.0 * _EPS * (batch.stiffness * length + batch.pull))
            lost = ~(length <= batch.limit) | ~np.isfinite(slope)
            done = (slope <= goal) & ~lost
            leave = done | lost | stuck if step < MAX_STEPS else np.ones_like(done)
            if leave.any():
                # No step lowers a stuck user's objective: that is the floor of rounding, if the slope agrees.
                done |= leave & ~lost & (slope <= 100.0 * goal)
                result[order[leave]], converged[order[leave]] = point.x[leave], done[leave]
                stay = np.flatnonzero(~leave)
                if not stay.size:
                    break
                batch, point, order, caution, slope = (
                    batch.take(stay),
                    point.take(stay),
                    order[stay],
                    caution[stay],
                    slope[stay],
                )
            if not is_damped:
                point, _, stuck = _step(batch, point, np.zeros_like(slope))
                continue
            damping = batch.weak * batch.stiffness * np.maximum(caution * np.minimum(slope / batch.pull, 1.0), _EPS)
            point, refused, stuck = _step(batch, point, damping)
            caution = np.clip(np.where(refused, 10.0 * caution, 0.1 * caution), 1e-12, 1.0)
    return result, converged


def _batch(block: Block, tilt: Array, ridge: Array, start: Array) -> _Batch:
    tilt_norm = norm(tilt)
    stiffness = block.steepness + ridge
    stiffness = np.where(stiffness > 0.0, stiffness, 1.0)
    pull = block.pull + tilt_norm
    weak = block.floor + ridge < _WEAK * stiffness
    limit = np.where(weak, _FAR * (norm(start) + pull / stiffness), np.inf)
    return _Batch(block, tilt, ridge, 1e-12 * (1.0 + tilt_norm), stiffness, pull, weak.astype(np.float64), limit)


def _at(batch: _Batch, x: Array) -> _Point:
    block = batch.block
    seen = block.look(x)
    loss, pulled, tied = block.value(x, seen), np.vecdot(batch.tilt, x), 0.5 * batch.ridge * np.vecdot(x, x)
    gradient = block.gradient(x, seen) + batch.ridge[:, None] * x - batch.tilt
    return _Point(x, seen, loss + tied - pulled, np.abs(loss) + tied + np.abs(pulled), gradient)


def _direction(batch: _Batch, point: _Point, damping: Array) -> tuple[Array, Array]:
    """Newton directions (k, d) and their directional derivatives (k,), all negative."""
    hessian = batch.block.hessian(point.x, point.seen)
    diagonal(hessian)[...] += (batch.ridge + damping)[:, None]
    direction = -_solve(hessian, point.gradient)
    fall = np.vecdot(point.gradient, direction)
    uphill = ~(fall < 0.0)
    if uphill.any():  # singular to working precision: fall back on a gradient step
        steepest = -point.gradient / batch.stiffness[:, None]
        direction = np.where(uphill[:, None], steepest, direction)
        fall = np.where(uphill, np.vecdot(point.gradient, steepest), fall)
    return direction, fall


def _solve(matrices: Array, right: Array) -> Array:
    """(k, d), NaN for a singular matrix; a singular matrix must not stop the other users."""
    try:
        return _solve_each(matrices, right)
    except np.linalg.LinAlgError:
        rows = [_solve_or_nan(matrices[k : k + 1], right[k : k + 1]) for k in range(len(right))]
        return np.concatenate(rows)


def _solve_or_nan(matrix: Array, right: Array) -> Array:
    try:
        return _solve_each(matrix, right)
    except np.linalg.LinAlgError:
        return right * np.nan


def _solve_each(matrices: Array, right: Array) -> Array:
    solution: Array = np.linalg.solve(matrices, right[:, :, None]).astype(np.float64, copy=False)[:, :, 0]
    return solution


def _step(batch: _Batch, point: _Point, damping: Array) -> tuple[_Point, Flags, Flags]:
    """The next points, who was refused the full Newton step, and who of these found no shorter one."""
    direction, fall = _direction(batch, point, damping)
    trial = _at(batch, point.x + direction)
    refused = ~_accepted(point, trial, direction, fall, 1.0)
    stuck = np.zeros(len(fall), dtype=np.bool_)
    if refused.any():
        rows = np.flatnonzero(refused)
        found, stuck[rows] = _search(batch.take(rows), point.take(rows), direction[rows], fall[rows])
        for field, new in zip(trial, found, strict=True):
            field[rows] = new
    return trial, refused, stuck


def _search(batch: _Batch, point: _Point, direction: Array, fall: Array) -> tuple[_Point, Flags]:
    """A bisection for the weak Wolfe rules below a refused full step, each user by itself; points, and who found none.

    Halving alone stops far short of the minimum along the line where rows enter or leave the curved part of their
    loss, and then crawls.
    """
    low, high, t = np.zeros(len(fall)), np.ones(len(fall)), np.full(len(fall), 0.5)
    best = _Point(*(field.copy() for field in point))
    rows = np.arange(len(fall))
    for _ in range(_MAX_TRIALS):
        old, way, drop = point.take(rows), direction[rows], fall[rows]
        new = _at(batch.take(rows), old.x + t[rows, None] * way)
        fine = _accepted(old, new, way, drop, t[rows])
        for field, better in zip(best, new, strict=True):
            field[rows[fine]] = better[fine]
        low[rows[fine]], high[rows[~fine]] = t[rows[fine]], t[rows[~fine]]
        rows = rows[~fine | (np.vecdot(new.gradient, way) < 0.5 * drop)]
        if not rows.size:
            break
        t[rows] = 0.5 * (low[rows] + high[rows])
    return best, low == 0.0


def _accepted(old: _Point, new: _Point, direction: Array, fall: Array, t: Array | float) -> Flags:
    armijo: Flags = new.value <= old.value + 1e-4 * t * fall
    if armijo.all():
        return armijo
    level = new.value <= old.value + 32.0 * _EPS * old.size
    accepted: Flags = armijo | (level & (np.vecdot(new.gradient, direction) <= -0.5 * fall))
    return accepted
