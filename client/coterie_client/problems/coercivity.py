"""Whose loss has no minimiser, or no single one: decided from the rows, before anything runs.

f_i is coercive when it grows along every direction v. What fails, for a loss of margins s_r = a_r.v (Rockafellar's
recession function): with c > 0 only the unpenalised intercept can fail, and does for a classifier with one class;
with c = 0 a direction the rows do not see (A v = 0), or for a classifier one that no row objects to
(y_r a_r.v >= 0 for all r), that is, separable classes.
"""

from __future__ import annotations

import numpy as np

from coterie.arrays import Array
from coterie_client.problems.losses import Logistic, Poisson
from coterie_client.problems.margins import MarginBlock
from coterie_client.problems.newton import minimise


def margin_reasons(block: MarginBlock, has_intercept: bool) -> list[str | None]:
    """For each user of the block, why its loss is not coercive, or None."""
    penalised = block.shrink[0] > 0.0
    reasons: list[str | None] = [None] * len(block.rows)
    if block.loss.is_classifier and has_intercept:
        for k, y in enumerate(block.targets):
            if (y == y[0]).all():
                reasons[k] = f"all its rows have the label {y[0]:+g} and the intercept is not penalised, wanted both labels"
    if isinstance(block.loss, Poisson) and has_intercept:
        for k, y in enumerate(block.targets):
            if not y.any():
                reasons[k] = "all its counts are 0 and the intercept is not penalised, wanted one above 0"
    if penalised:
        return reasons
    d = block.rows.shape[2]
    is_count = isinstance(block.loss, Poisson)
    # A count of 0 objects to no direction that lowers its mean: sure growth is that of the rows with a positive count.
    ranks = np.linalg.matrix_rank(block.rows * (block.targets > 0)[:, :, None] if is_count else block.rows)
    for k, rank in enumerate(ranks):
        if rank < d and reasons[k] is None:
            rows = "its rows with a count above 0" if is_count else "its rows"
            reasons[k] = f"{rows} span {rank} of {d} dimensions and l2 is 0, wanted all of them or l2 > 0"
    if block.loss.is_classifier:
        for k, overlap in enumerate(_overlap(block)):
            if not overlap and reasons[k] is None:
                reasons[k] = "its classes are separable, or too nearly so to tell, and l2 is 0, wanted l2 > 0"
    return reasons


def _overlap(block: MarginBlock) -> Array:
    """(k,) True where the classes are certified not to be separable, not even weakly.

    Stiemke: no v has y_r a_r.v >= 0 for all r with one of them > 0 if and only if some lambda > 0 has
    sum_r lambda_r y_r a_r = 0. Minus the slopes of the logistic loss at its minimiser are such a lambda, up to the
    solver's tolerance; projecting them removes what is left.
    """
    logistic = MarginBlock(
        Logistic(),
        block.rows,
        block.targets,
        block.weights,
        np.zeros_like(block.shrink),
        block.steepness,
        block.pull,
        np.zeros_like(block.floor),
        block.counts,
    )
    zero = np.zeros((len(block.rows), block.rows.shape[2]))
    x, _ = minimise(logistic, zero, np.zeros(len(zero)), zero)
    with np.errstate(all="ignore"):
        duals = np.abs(logistic.loss.slope(logistic.look(x), block.targets))  # (k, R)
    signed = block.rows * (block.targets * (block.weights > 0.0))[:, :, None]  # (k, R, d), the y_r a_r
    excess = np.matmul(np.linalg.pinv(signed.transpose(0, 2, 1)), np.matmul(duals[:, None, :], signed).transpose(0, 2, 1))
    duals = np.where(block.weights > 0.0, duals - excess[:, :, 0], np.inf)
    largest = np.where(block.weights > 0.0, duals, 0.0).max(axis=1)
    certified: Array = duals.min(axis=1) > 1e-9 * largest
    return certified
