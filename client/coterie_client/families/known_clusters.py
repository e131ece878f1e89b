"""What the client halves for known clusters share: what users tell of their models for the objective and at the end.

Bounds the distance of a user's model from the optimum of F of (2.1), from its gradient and the curvature of its own loss.

With g_i = grad f_i(theta_i) + gamma_i (theta_i - alpha_j bar - (1-alpha_j) bar_j) the user's part of F's gradient, and H_i the Hessian of
f_i, F's Hessian lies between the blocks H_i and H_i + gamma_i I: the pull towards averages is convex, and a variance is at most the mean
square. So a Newton step from here lowers F by

    sum_i g_i' (H_i + gamma_i I)^-1 g_i / 2   at least, and by   sum_i g_i' H_i^-1 g_i / 2   at most,

exactly for quadratic losses, and approximately if H_i changes little. If H_i has a direction without curvature, there is no upper bound,
and the user is called flat. The vectors stay here; four numbers are sent.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from coterie.arrays import Array, Indices
from coterie.families.cluster_messages import ClusterMessages
from coterie.wire.fixed_point import BOUND
from coterie.wire.messages import Message
from coterie_client.families.evaluation import judged
from coterie_client.interface.half import Inbox, Local
from coterie_client.problems import ConvexProblem

_MAX_HESSIANS = 1 << 18  # numbers in Hessians that are decomposed together: 2 MiB
_FLAT = 1e-10  # relative to the largest curvature: less counts as 0
_LARGEST = 1e200  # so that a diverging run can still send its numbers


def terms(vectors: Array, gamma: Array, *, is_exact: bool) -> Array:
    """(n, d) what users with gamma (n,) send of their vectors (n, d) for an average: these, or in exact sums gamma_i times them."""
    return gamma[:, None] * vectors if is_exact else vectors


def gaps(problem: ConvexProblem, models: Array, gamma: Array, centre: Array) -> tuple[Array, Array, Array, Array]:
    """(n,) each: |g_i|^2, the least and the most decrease, and 1 for flat users, whose most is 0. `models` and `centre` are (n, d)."""
    n = len(models)
    squared, least, most, is_flat = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
    with np.errstate(all="ignore"):
        gradient = problem.gradient(models) + gamma[:, None] * (models - centre)
        for i, (curvature, directions) in enumerate(_decomposed(problem, models)):
            g = gradient[i]
            if not (np.isfinite(curvature).all() and np.isfinite(g).all()):
                squared[i], least[i], is_flat[i] = _LARGEST, _LARGEST, 1.0
                continue
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


def _decomposed(problem: ConvexProblem, models: Array) -> Iterator[tuple[Array, Array]]:
    """Eigenvalues (d,), ascending, and eigenvectors of each user's Hessian; NaN where that is not finite. Few at a time, for memory."""
    n, d = models.shape
    step = max(1, _MAX_HESSIANS // d**2)
    for first in range(0, n, step):
        users = np.arange(first, min(first + step, n))
        hessians = problem.hessian(models[users], users)
        lost = ~np.isfinite(hessians).all(axis=(1, 2))
        hessians[lost] = 0.0  # LAPACK refuses others
        curvatures, directions = np.linalg.eigh(hessians)
        curvatures[lost] = np.nan
        yield from zip(curvatures, directions, strict=True)


def told(
    inbox: Inbox, messages: ClusterMessages, local: Local, models: Array, gamma: Array, place: Indices, *, is_exact: bool
) -> Sequence[Message]:
    """The answer about the users' models (n, d), with gamma and the place (n,) of their clusters. TypeError for others."""
    if messages.ask_state in inbox:
        return [messages.user_state(local.problem.value(models), terms(models, gamma, is_exact=is_exact))]
    if (centre := inbox.get(messages.cluster_centre)) is not None:
        return [messages.user_spread(gamma / 2 * ((models - centre.average[place]) ** 2).sum(axis=1))]
    if (sent := inbox.get(messages.gap_centre)) is not None:
        found = gaps(local.problem, models, gamma, sent.centre[place])
        return [messages.user_gap(*(np.minimum(part, 2.0**BOUND) if is_exact else part for part in found))]
    if messages.judge in inbox:
        return [messages.judgement(local.problem.value(models), *judged(models, local))]
    if messages.collect in inbox:
        return [messages.final_models(models)]
    raise TypeError(f"no step of this method for {list(inbox.messages)}")
