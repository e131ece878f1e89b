"""Anderson acceleration of a fixed-point iteration u <- g(u).

Type II, regularised and guarded after Fu, Zhang and Boyd, Anderson accelerated Douglas-Rachford splitting (2020): with f_t = g(u_t) - u_t
and the latest differences of f and g as columns of F and G,

    u_{t+1} = g(u_t) - G w,    w = argmin |f_t - F w|^2 + eps (|F|_F^2 + |G|_F^2) |w|^2,

as long as |f_t| stays below a multiple of |f_0| that falls with the number of such steps, fast enough to have a sum; else u_{t+1} = g(u_t).
An extrapolation so moves at most |f_t| / (2 eps). Theirs converges from anywhere where g is averaged; whether an iteration here is averaged
in its coordinates is for its method to say. Sums are made in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array

_REGULARIZATION = 1e-10  # eps
# |f_t| <= _GUARD |f_0| (1 + s / _PER)^-(1 + _EPSILON) after s extrapolations.
_GUARD, _PER, _EPSILON = 10.0, 10, 1e-6
_PART = 8192


@dataclass(frozen=True, eq=False)
class Memory:
    """The latest steps, k numbers in each vector and at most `depth` differences, oldest first."""

    value: Array  # (k,) g(u_t)
    residual: Array  # (k,) f_t
    values: tuple[Array, ...]  # (k,) each: differences of g
    residuals: tuple[Array, ...]  # (k,) each: differences of f
    products: Array  # (m, m) scalar products of the latter
    lengths: tuple[float, ...]  # squared, of the former
    first: float  # |f_0|
    taken: int  # extrapolations so far


def step(memory: Memory | None, value: Array, residual: Array, depth: int) -> tuple[Memory, Array]:
    """(memory, u_{t+1}) from g(u_t) and f_t, (k,) both, and at most `depth` differences; `memory` is None at the start."""
    if memory is None:
        return Memory(value, residual, (), (), np.zeros((0, 0)), (), float(np.sqrt(_dot(residual, residual))), 0), value
    values = (*memory.values, value - memory.value)[-depth:]
    residuals = (*memory.residuals, residual - memory.residual)[-depth:]
    kept = len(residuals) - 1
    products = np.empty((kept + 1, kept + 1))
    products[:kept, :kept] = memory.products[len(memory.products) - kept :, len(memory.products) - kept :]
    products[kept] = products[:, kept] = [_dot(one, residuals[kept]) for one in residuals]
    lengths = (*memory.lengths, _dot(values[kept], values[kept]))[-depth:]
    following, taken = value, memory.taken
    bound = _GUARD * memory.first * (1 + taken / _PER) ** -(1 + _EPSILON)
    ridge = _REGULARIZATION * (np.trace(products) + sum(lengths))
    if ridge > 0 and np.sqrt(_dot(residual, residual)) <= bound:
        system = products.copy()
        system.flat[:: kept + 2] += ridge
        weights = np.linalg.solve(system, [_dot(one, residual) for one in residuals])
        following, taken = value.copy(), taken + 1
        for weight, one in zip(weights, values, strict=True):
            following -= weight * one
    return Memory(value, residual, values, residuals, products, lengths, memory.first, taken), following


def _dot(a: Array, b: Array) -> float:
    """A dot product in parts so small that BLAS uses one thread: its sum must not depend on their number."""
    return float(sum(np.dot(a[start : start + _PART], b[start : start + _PART]) for start in range(0, len(a), _PART)))
