"""Minimize K independent smooth convex functions at once when each look at them costs a federated round.

The solver behind the reference methods of Armacki et al. (2022): `global` (1) is one group of all users, `oracle` one group per known
cluster, and `squared` (4) one group on the Moreau envelopes of the users. Damped Newton when the users send Hessians; L-BFGS (Nocedal
and Wright, Numerical Optimization, Algorithm 7.4) with a memory of 10 when they do not. Armijo backtracking (their Algorithm 3.1).

A convex function without a minimiser (a logistic loss of separable classes, counts that are all 0) has arbitrarily small gradients far
out. There Newton's step does not shrink, see `State.unbounded`.

A round engine calls `step` and may store the state between rounds: it holds arrays and one round number, nothing else. Groups are
independent: the iterates of one group have the same bits whatever the others do.

`minimize_model` is the server's own part of the coupled problem (5), where a sum of norms pulls the groups together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie_server.maths.clusters import incidence, partition

MEMORY = 10
_ARMIJO = 1e-4
_SHORTEST = 1e-12  # a step this short without descent means that values and gradients do not fit together
_TINY = float(np.finfo(float).tiny)
_LONG = 1e-3  # relative to the point: a longer next step at the end of the descent means that there is no minimiser
_MATTERS = 1e-12  # relative to the first value: a smaller decrease is rounding
_FLAT = 1e-12  # relative to the first curvature: less counts as none
_ROUNDING = 1e-14  # relative to a value: the precision of a sum of tens of thousands of terms


@dataclass(frozen=True)
class State:
    """Where the K groups stand between two rounds; `query` is the point to ask next."""

    points: Array  # (K, d), the best so far
    query: Array  # (K, d), equal to the point where a group has converged
    values: Array  # (K,), at points; infinite before the first answer
    gradients: Array  # (K, d), at points
    directions: Array  # (K, d), from points
    step_lengths: Array  # (K,), query = points + step_lengths * directions
    first_norms: Array  # (K,), gradient norm at the first point
    first_values: Array  # (K,)
    units: Array  # (K, d), roots of the first Hessian's diagonal, 1 without one: coordinates times these have no units
    moves: Array  # (memory, K, d), differences of points, newest last, zeros where none; empty until L-BFGS
    turns: Array  # (memory, K, d), differences of gradients
    converged: NDArray[np.bool_]  # (K,): no further descent is possible
    unbounded: NDArray[np.bool_]  # (K,), of the converged: there is no minimiser, the next step does not shrink
    flat: NDArray[np.bool_]  # (K,), of the converged: there are many minimisers along some direction; known with Hessians
    n_rounds: int


def begin(start: Array) -> State:
    """The state before the first round, at `start` (K, d)."""
    start = np.array(start, float)
    n_groups, nothing = len(start), np.zeros_like(start)
    none = np.zeros(n_groups, bool)
    memory = np.zeros((0, *start.shape))
    return State(
        points=start, query=start, values=np.full(n_groups, np.inf), gradients=nothing, directions=nothing,
        step_lengths=np.zeros(n_groups), first_norms=np.zeros(n_groups), first_values=np.zeros(n_groups), units=np.ones_like(start),
        moves=memory, turns=memory, converged=none, unbounded=none, flat=none, n_rounds=0,
    )  # fmt: skip


def step(state: State, values: Array, gradients: Array, hessians: Array | None = None, tolerance: float = 1e-9) -> State:
    """The state after the answers (K,), (K, d), (K, d, d) or None at `state.query`; answers of converged groups are ignored.

    A group has converged when its gradient norm is at most `tolerance * (1 + its first gradient norm)` and its next step promises next to
    nothing beside the first value, whatever the units, or when rounding hides any further descent. Raises RunError when a group's first
    value is not finite or no step along its direction descends.
    """
    accepted, stalled = _judge(state, values, gradients)
    taken = accepted[:, None]
    first_norms, first_values, units = state.first_norms, state.first_values, state.units
    if state.n_rounds == 0:
        first_norms, first_values = np.linalg.norm(gradients, axis=1), np.abs(values)
        if hessians is not None:
            units = np.sqrt(np.maximum(np.diagonal(hessians, axis1=1, axis2=2), 0.0))
    small = np.linalg.norm(gradients, axis=1) <= tolerance * (1 + first_norms)
    moves, turns = _remember(state, accepted, gradients) if hessians is None else (state.moves, state.turns)
    fresh = _quasi_newton(gradients, moves, turns) if hessians is None else _newton(gradients, hessians, units)
    promised = -(gradients * fresh).sum(axis=1)
    converged = state.converged | (accepted & small & (promised <= _MATTERS * first_values)) | stalled
    directions = np.where(taken, fresh, state.directions)
    points = np.where(taken, state.query, state.points)
    lengths = np.where(accepted, 1.0, _shorter(state, values))
    ended = converged & ~state.converged
    unbounded = state.unbounded | (ended & _is_long(directions, points, units, first_values))
    is_flat = np.zeros_like(ended) if hessians is None else _is_flat(hessians, units)
    return State(
        points=points, query=np.where(converged[:, None], points, points + lengths[:, None] * directions),
        values=np.where(accepted, values, state.values), gradients=np.where(taken, gradients, state.gradients), directions=directions,
        step_lengths=lengths, first_norms=first_norms, first_values=first_values, units=units, moves=moves, turns=turns,
        converged=converged, unbounded=unbounded, flat=state.flat | (ended & is_flat & ~unbounded), n_rounds=state.n_rounds + 1,
    )  # fmt: skip


def _judge(state: State, values: Array, gradients: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which groups take their query as the new point, and which can descend no further for rounding; both (K,)."""
    active = ~state.converged
    finite = np.isfinite(values) & np.isfinite(gradients).all(axis=1)
    if state.n_rounds == 0:
        if not finite.all():
            raise RunError(f"the value of group {int(np.argmin(finite))} is not finite at the first point")
        return active, np.zeros_like(active)
    slope = state.step_lengths * (state.gradients * state.directions).sum(axis=1)
    rounding = _ROUNDING * np.abs(state.values)
    hidden = -slope <= rounding
    descends = finite & ~hidden & (values <= state.values + _ARMIJO * slope)
    # Where rounding exceeds the decrease that Armijo asks for, the gradient is the better judge.
    blurred = finite & (-_ARMIJO * slope <= rounding) & (values <= state.values + 4 * rounding)
    flatter = np.linalg.norm(gradients, axis=1) <= 0.9 * np.linalg.norm(state.gradients, axis=1)
    accepted = active & (descends | (blurred & flatter))
    stalled = active & ~accepted & hidden
    stuck = active & ~accepted & ~stalled & (state.step_lengths < _SHORTEST)
    if stuck.any():
        raise RunError(f"no step descends from the point of group {int(np.argmax(stuck))}: its gradient is not its value's")
    return accepted, stalled


def _shorter(state: State, values: Array) -> Array:
    """The next step length (K,) after a refusal: the parabola's minimum, kept within [0.1, 0.5] of the refused one."""
    slope = state.step_lengths * (state.gradients * state.directions).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        factor = -slope / (2 * (values - state.values - slope))
    return np.asarray(state.step_lengths * np.clip(np.where(np.isfinite(factor), factor, 0.1), 0.1, 0.5))


def _newton(gradients: Array, hessians: Array, units: Array) -> Array:
    """Newton directions (K, d), made in coordinates without units.

    Curvatures are kept above 1e-10 of the largest: a squared hinge without active rows has none.
    """
    finite = np.asarray(np.isfinite(hessians).all(axis=(1, 2)) & np.isfinite(gradients).all(axis=1))
    curvatures, axes = np.linalg.eigh(np.where(finite[:, None, None], _without_units(hessians, units), 0.0))
    floor = np.maximum(1e-10 * np.abs(curvatures).max(axis=1, keepdims=True), np.finfo(float).tiny ** 0.5)
    scales = _scales(units)
    coordinates = np.einsum("kdj,kd->kj", axes, np.where(finite[:, None], gradients, 0.0) / scales)
    return np.asarray(-np.einsum("kdj,kj->kd", axes, coordinates / np.maximum(np.abs(curvatures), floor)) / scales)


def _scales(units: Array) -> Array:
    """The units, 1 for a coordinate without effect."""
    return np.where(units > 0.0, units, 1.0)


def _without_units(hessians: Array, units: Array) -> Array:
    scales = _scales(units)
    return np.asarray(hessians / scales[:, :, None] / scales[:, None, :])


def _is_long(directions: Array, points: Array, units: Array, first_values: Array) -> NDArray[np.bool_]:
    """(K,) whether the next step is long relative to the point, and more than rounding."""
    step, size = (np.linalg.norm(units * rows, axis=1) for rows in (directions, points))
    return np.asarray((step > _LONG * size) & (step**2 > _MATTERS * first_values))


def _is_flat(hessians: Array, units: Array) -> NDArray[np.bool_]:
    """(K,) whether some direction has no curvature here, in coordinates without units."""
    scaled = _without_units(hessians, units)
    finite = np.asarray(np.isfinite(scaled).all(axis=(1, 2)))
    least = np.linalg.eigvalsh(np.where(finite[:, None, None], scaled, np.eye(scaled.shape[1])))[:, 0]
    return np.asarray(least <= _FLAT)


def _remember(state: State, accepted: NDArray[np.bool_], gradients: Array) -> tuple[Array, Array]:
    """The memory (MEMORY, K, d) of moves and turns, with the pair of this round in the groups that moved along positive curvature."""
    if state.n_rounds == 0:
        empty = np.zeros((MEMORY, *state.points.shape))
        return empty, empty
    move, turn = state.query - state.points, gradients - state.gradients
    useful = accepted & ((move * turn).sum(axis=1) > 0)
    return (
        np.where(useful[:, None], np.concatenate([state.moves[1:], move[None]]), state.moves),
        np.where(useful[:, None], np.concatenate([state.turns[1:], turn[None]]), state.turns),
    )


def _quasi_newton(gradients: Array, moves: Array, turns: Array) -> Array:
    """L-BFGS directions (K, d); without memory the gradient, shortened to norm 1 at most."""
    curvature = (moves * turns).sum(axis=2)  # (memory, K), 0 where nothing is remembered
    inverse = np.divide(1.0, curvature, out=np.zeros_like(curvature), where=curvature > 0)
    direction: Array = -gradients
    weights = np.zeros_like(curvature)
    for m in range(len(moves) - 1, -1, -1):
        weights[m] = inverse[m] * (moves[m] * direction).sum(axis=1)
        direction = direction - weights[m][:, None] * turns[m]
    square = (turns[-1] ** 2).sum(axis=1)
    cautious = 1 / np.maximum(1.0, np.linalg.norm(gradients, axis=1))
    scale = np.divide(curvature[-1], square, out=cautious, where=square > 0)
    direction = scale[:, None] * direction
    for m in range(len(moves)):
        back = inverse[m] * (turns[m] * direction).sum(axis=1)
        direction = direction + (weights[m] - back)[:, None] * moves[m]
    return direction


def minimize_model(w: Array, gradients: Array, hessians: Array, lengths: Array, dual: Array) -> tuple[Array, Indices, Array]:
    """Minimizer (K, d) of the quadratic model at `w` plus sum_p lengths_p |w_i - w_j|, its merged labels (K,), its pair dual (m, d).

    ADMM (Boyd et al. 2011, section 3) on the pair differences; on complete graphs the linear system is K blocks and a rank-d coupling.
    """
    n, d = w.shape
    net, first, second = incidence(n)
    mean_curvature = max(float(np.trace(hessians, axis1=1, axis2=2).mean()) / d, _TINY**0.5)
    rho, linear, z = mean_curvature / n, np.einsum("kde,ke->kd", hessians, w) - gradients, w[first] - w[second]
    size, force = 1e-11 * (1 + np.abs(w).max()), 1e-11 * (np.abs(linear).max() + mean_curvature)
    for iteration in range(20000):
        if iteration % 50 == 0:
            # The ridge stands for curvature that a squared hinge without active rows does not have.
            inverses = np.linalg.inv(hessians + (rho * n + 1e-12 * mean_curvature) * np.eye(d))
            coupling = rho * np.linalg.inv(np.eye(d) - rho * inverses.sum(axis=0))
        alone = np.einsum("kde,ke->kd", inverses, linear + net @ (rho * z - dual))
        w = alone + inverses @ (coupling @ alone.sum(axis=0))
        difference = w[first] - w[second]
        relaxed = 1.6 * difference - 0.6 * z + dual / rho
        norms = np.maximum(np.linalg.norm(relaxed, axis=1), _TINY)
        before, z = z, relaxed * np.maximum(0.0, 1 - lengths / (rho * norms))[:, None]
        dual = rho * (relaxed - z)
        gap, drift = np.abs(difference - z).max(initial=0.0), rho * np.abs(net @ (z - before)).max(initial=0.0)
        if gap <= size and drift <= force:
            break
        if iteration % 50 == 49 and iteration < 2000:
            rho *= np.clip((gap / size / max(drift / force, 1e-300)) ** 0.5, 0.2, 5.0)
    merged = partition(w, np.asarray(~z.any(axis=1)), tolerance=1e-9, scale=float(np.linalg.norm(w, axis=1).max()))
    return np.stack([w[merged == label].mean(axis=0) for label in merged]), merged, dual
