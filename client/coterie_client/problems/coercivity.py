"""Finds users whose loss has no minimiser, or more than one, from their rows, before anything runs.

f_i is coercive if it grows along every direction v. For a loss of margins s_r = a_r.v, Rockafellar's recession function shows what fails.
With c > 0, only the unpenalised intercept can: for a classifier with one class, and for counts that are all 0. With c = 0, a direction
fails that the rows do not see (A v = 0), or that no row objects to. A row of a classifier objects if y_r a_r.v < 0, so this means separable
classes. A count of 0 objects if a_r.v > 0. A positive count, or a row of any other loss, objects if a_r.v is not 0.
"""

from dataclasses import replace

import numpy as np

from coterie.arrays import Array
from coterie_client.problems.blocks import Flags
from coterie_client.problems.losses import Logistic, Poisson, RowLoss
from coterie_client.problems.margins import MarginBlock
from coterie_client.problems.newton import minimise


def margin_reasons(block: MarginBlock, has_intercept: bool) -> list[str | None]:
    """For each user of the block: why its loss is not coercive, or None."""
    free = _free_intercepts(block) if has_intercept else {}
    flat = {} if block.shrink[0] > 0.0 else _flat_directions(block)
    return [free.get(k, flat.get(k)) for k in range(len(block.rows))]


def _free_intercepts(block: MarginBlock) -> dict[int, str]:
    """Users whose rows do not bound the unpenalised intercept, with the reason."""
    y = block.targets
    if block.loss.is_classifier:
        single = np.flatnonzero((y == y[:, :1]).all(axis=1)).tolist()
        return {k: f"all its rows have the label {y[k, 0]:+g} and the intercept is not penalised, wanted both labels" for k in single}
    if isinstance(block.loss, Poisson):
        empty = np.flatnonzero(~y.any(axis=1)).tolist()
        return dict.fromkeys(empty, "all its counts are 0 and the intercept is not penalised, wanted one above 0")
    return {}


def _flat_directions(block: MarginBlock) -> dict[int, str]:
    """Without a penalty: users whose loss does not grow along some direction, with the reason."""
    d = block.rows.shape[2]
    ranks = np.linalg.matrix_rank(block.rows)
    reasons = {
        k: f"its rows span {ranks[k]} of {d} dimensions and l2 is 0, wanted all of them or l2 > 0"
        for k in np.flatnonzero(ranks < d).tolist()
    }
    is_held, reason = np.ones(len(ranks), dtype=np.bool_), ""
    if block.loss.is_classifier:
        reason = "its classes are separable, or too nearly so to tell, and l2 is 0, wanted l2 > 0"
        is_held = _objected(block, Logistic(), -block.targets)
    elif isinstance(block.loss, Poisson):
        reason = "some direction lowers means of its counts of 0 and moves no other mean, or nearly so, and l2 is 0, wanted l2 > 0"
        is_held = np.linalg.matrix_rank(block.rows * (block.targets > 0.0)[:, :, None]) == d  # by the positive counts
        if not is_held.all():
            is_held |= _objected(block, block.loss, (block.targets == 0.0).astype(np.float64))
    return dict.fromkeys(np.flatnonzero(~is_held).tolist(), reason) | reasons


def _objected(block: MarginBlock, loss: RowLoss, signs: Array) -> Flags:
    """(k,) True where some row is certified to object to each direction, if the rows span the space.

    Stiemke's lemma: no v has sign_r a_r.v <= 0 for all r, < 0 for one of them, and a_r.v = 0 where sign_r is 0, if and only if some lambda
    with sign_r lambda_r > 0 (any lambda_r where sign_r is 0) has sum_r lambda_r a_r = 0. The slopes of `loss`, which have these signs, are
    such a lambda at its minimiser, up to the solver's tolerance. A projection removes the remainder.
    """
    free = replace(block, loss=loss, shrink=np.zeros_like(block.shrink), floor=np.zeros_like(block.floor))
    zero = np.zeros((len(block.rows), block.rows.shape[2]))
    x, _ = minimise(free, zero, np.zeros(len(zero)), zero)
    is_row = block.weights > 0.0
    columns = (block.rows * is_row[:, :, None]).transpose(0, 2, 1)  # (k, d, R)
    with np.errstate(all="ignore"):  # users may have no minimiser
        slopes = np.where(is_row, block.weights * loss.slope(free.look(x), block.targets), 0.0)
        duals = slopes - np.matmul(np.linalg.pinv(columns), np.matmul(columns, slopes[:, :, None]))[:, :, 0]
        smallest = np.where(is_row & (signs != 0.0), signs * duals, np.inf).min(axis=1)
        certified: Flags = smallest > 1e-9 * np.abs(slopes).max(axis=1)  # smaller duals may be rounding errors
    return certified
