"""Gradients and Hessians of users in which no single row decides much: each row's part is shortened, and their sums get noise.

The part of row r in the loss f_i is phi'(s_r) a_r in the gradient, of norm at most `clip`, and phi''(s_r) a_r a_r' in the Hessian, of
Frobenius norm at most `clip_hessian`. One factor shortens both, so a row that is too long counts for less, and the two sums still belong
together. Sums get normal noise, and the penalty is added to them exactly. So a row moves each sum by one clip at most, as in AdaSSP of
Wang (2018), "Revisiting differentially private linear regression", where X'X and X'y get the noise. Away from least squares these are the
steps of Avella-Medina, Bradshaw and Loh (2023), "Differentially private inference via noisy optimization", with shortened gradients.

The epsilon of one step with noise multiplier s is that of both sums together: each has noise of sqrt(2) s times its own clip.
"""

from __future__ import annotations

import numpy as np

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.experiment.privacy import PARTS_PER_SUM, symmetric_noise
from coterie_client.interface.half import Inbox, Local


def noised(x: Array, inbox: Inbox, local: Local) -> tuple[Array, Array]:
    """(n_own, d) gradients and (n_own, d, d) Hessians of all users at x (n_own, d), with noise.

    RunError without a key for the noise.
    """
    privacy, secret = local.row_privacy, inbox.secret
    if privacy is None or privacy.clip_hessian is None or secret is None:
        raise RunError("rows are to be protected by noise, but this task has no key for it")
    problem = local.problem
    gradients, hessians, weights = problem.clipped_sums(x, privacy.clip, privacy.clip_hessian)
    for number, (name, weight) in enumerate(zip(local.names, weights.tolist(), strict=True)):
        numbers = secret.child(name).numbers()
        scale = weight * PARTS_PER_SUM * privacy.multiplier(int(problem.n_rows[number]))
        gradients[number] += scale * privacy.clip * numbers.normal(problem.d)
        hessians[number] += scale * privacy.clip_hessian * symmetric_noise(numbers, problem.d)
    shrink = problem.shrink
    return gradients + shrink * x, hessians + np.diag(shrink)
