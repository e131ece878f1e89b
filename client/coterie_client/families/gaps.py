"""Bounds the distance of a user's model from the optimum of F of (2.1), from its gradient and the curvature of its own loss.

With g_i = grad f_i(theta_i) + gamma_i (theta_i - alpha_j bar - (1-alpha_j) bar_j) the user's part of F's gradient, and H_i the Hessian of
f_i, F's Hessian lies between the blocks H_i and H_i + gamma_i I: the pull towards averages is convex, and a variance is at most the mean
square. So a Newton step from here lowers F by

    sum_i g_i' (H_i + gamma_i I)^-1 g_i / 2   at least, and by   sum_i g_i' H_i^-1 g_i / 2   at most,

exactly for quadratic losses, and approximately if H_i changes little. If H_i has a direction without curvature, there is no upper bound,
and the user is called flat. The vectors stay here; four numbers are sent.
"""

from __future__ import annotations

import numpy as np

from coterie.arrays import Array
from coterie_client.problems import Problem

_FLAT = 1e-10  # relative to the largest curvature: less counts as 0
_LARGEST = 1e200  # so that a diverging run can still send its numbers


def gaps(problem: Problem, models: Array, gamma: Array, centre: Array) -> tuple[Array, Array, Array, Array]:
    """(n,) each: |g_i|^2, the least and the most decrease, and 1 for flat users, whose most is 0. `models` and `centre` are (n, d)."""
    n = len(models)
    squared, least, most, is_flat = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
    with np.errstate(all="ignore"):
        gradient = problem.gradient(models) + gamma[:, None] * (models - centre)
        for i in range(n):  # one Hessian at a time
            g = gradient[i]
            hessian = problem.hessian(models[i : i + 1], np.array([i]))[0]
            if not (np.isfinite(hessian).all() and np.isfinite(g).all()):
                squared[i], least[i], is_flat[i] = _LARGEST, _LARGEST, 1.0
                continue
            curvature, directions = np.linalg.eigh(hessian)
            parts = (directions.T @ g) ** 2
            squared[i] = min(float(g @ g), _LARGEST)
            floor = _FLAT * max(float(curvature[-1]), 0.0)
            damped = np.maximum(curvature, floor) + gamma[i]
            least[i] = min(float((parts[damped > 0] / damped[damped > 0]).sum()) / 2, _LARGEST)
            if curvature[0] <= floor:
                is_flat[i] = 1.0
            else:
                most[i] = min(float((parts / curvature).sum()) / 2, _LARGEST)
    return squared, least, most, is_flat
