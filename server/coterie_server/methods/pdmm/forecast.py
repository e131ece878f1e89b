"""Users' answers foretold from those before, so that only users whose answers would tell something new are asked.

An answer x_i to the vector v_i minimises f_i(x) + q/2 |x|^2 - v_i.x, which is (16) of Armacki, Bajovic, Jakovetic and Kar (2022). So it
brings the gradient of f_i at x_i, v_i - q x_i, whatever rho is. Two answers tell how f_i bends between them. The matrix H_i of second
derivatives is learned by the symmetric rank-one update (Nocedal and Wright, *Numerical Optimization*, 2006, (6.24)) from H_i = 0. It is
exact after d + 1 answers in independent directions where f_i is quadratic. The next answer is foretold with the quadratic of H_i.

None of this is in the paper. With forecasts the x-update is inexact, and the error allowed falls with the residual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coterie.arrays import Array, Indices

_LEAST = 1e-8  # cosine of a step and its surprise, below which an update of H would be all rounding
_ROUNDINGS = 100.0  # in a gradient
_TRUST = 0.1  # by which one answer lowers the error that is expected of the next forecast at most


@dataclass(frozen=True, eq=False)
class Forecasts:
    """What the server knows of each user's loss from its answers."""

    x: Array  # (n, d) the latest answers
    gradient: Array  # (n, d) of f_i there
    values: Array  # (n, d) eigenvalues of H_i, none negative
    axes: Array  # (n, d, d) its eigenvectors, in columns
    error: Array  # (n,) of H_i along the latest steps, relative to their lengths; not known before two answers
    answers: Indices  # (n,) how many there were
    are_own: Indices  # (n,) 1 where the model in the iterate is the user's own answer, 0 where it is foretold
    residual: float  # of the latest round, to which the error allowed is relative
    asked: int = 0  # users in the latest round
    exchanges: int = 0  # in it: a second one asks everyone else


def nothing(n: int, d: int) -> Forecasts:
    """Before the first answers."""
    axes, zeros = np.broadcast_to(np.eye(d), (n, d, d)).copy(), np.zeros((n, d))
    none = np.zeros(n, dtype=np.int64)
    return Forecasts(zeros, zeros, zeros, axes, np.zeros(n), none, none, 0.0)


def foretold(known: Forecasts, v: Array, q: Array | float) -> tuple[Array, Array]:
    """The answers (n, d) to v (n, d), and the error (n,) expected of the gradients there; infinite for users with less than two answers.

    `q` is one number or (n, 1).
    """
    force = v - q * known.x - known.gradient
    inside = np.einsum("nij,ni->nj", known.axes, force) / (known.values + q)
    step = np.einsum("nij,nj->ni", known.axes, inside)
    return known.x + step, np.where(known.answers < 2, np.inf, known.error * np.linalg.norm(step, axis=1))


def learned(known: Forecasts, users: Indices, v: Array, q: Array | float, x: Array, rounding: float) -> Forecasts:
    """With the answers x (n, d) of the listed users to v (n, d); `rounding` is the relative one of numbers on the wire."""
    weight = np.broadcast_to(q, (len(x), 1))[users]
    new, gradient = x[users], v[users] - weight * x[users]
    step = new - known.x[users]
    h = np.einsum("nij,nj,nkj->nik", known.axes[users], known.values[users], known.axes[users])
    surprise = gradient - known.gradient[users] - np.einsum("nij,nj->ni", h, step)
    length, size, along = np.linalg.norm(step, axis=1), np.linalg.norm(surprise, axis=1), (surprise * step).sum(axis=1)
    noise = _ROUNDINGS * rounding * (np.linalg.norm(v[users], axis=1) + weight[:, 0] * np.linalg.norm(new, axis=1))
    is_pair = (known.answers[users] > 0) & (length > 0)
    tells = is_pair & (size > noise) & (np.abs(along) > _LEAST * size * length)
    values, axes, error = known.values.copy(), known.axes.copy(), known.error.copy()
    if tells.any():
        outer = surprise[tells, :, None] * surprise[tells, None, :] / along[tells, None, None]
        found, axes[users[tells]] = np.linalg.eigh(h[tells] + outer)
        values[users[tells]] = np.maximum(found, 0.0)  # f_i is convex
    measured = np.where(size > noise, size / np.where(length > 0, length, 1.0), 0.0)
    floor = np.where(known.answers[users] > 1, _TRUST * known.error[users], 0.0)
    error[users] = np.where(is_pair, np.maximum(measured, floor), known.error[users])
    known = replace(known, values=values, axes=axes, error=error)
    where, answers = known.x.copy(), known.answers.copy()
    gradients = known.gradient.copy()
    where[users], gradients[users] = new, gradient
    answers[users] += 1
    return replace(known, x=where, gradient=gradients, answers=answers)
