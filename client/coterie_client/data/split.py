"""The held-out split: which of a user's rows are test rows, and which training rows a fold of a cross-validation holds out.

It depends on the seed, the user's name and the user's own rows. Other users and hosts do not matter. The number of held-out rows needs no
targets: it follows from the number of rows, and in a fold also from the user's name.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices, distinct
from coterie.draws.streams import Stream, stream
from coterie.experiment.features import Feature
from coterie.experiment.settings import Fold
from coterie_client.data.users import UserData, UserHead, frozen


def n_test_rows(n_rows: int, test_fraction: float) -> int:
    """`test_fraction` of the rows, rounded half up. At least two rows (or all) stay for training."""
    # Two, so that a user with both classes can keep both. The number needs no look at the targets.
    return max(0, min(math.floor(n_rows * test_fraction + 0.5), n_rows - 2))


def hold_out(
    name: str,
    cluster: str | None,
    features: NDArray[Any],
    target: Array,
    *,
    test_fraction: float,
    seed: int,
    schema: tuple[Feature, ...] = (),
) -> UserData:
    """Split one user's rows, features (n, ...) and target (n,), into training and test rows, both in their given order."""
    return UserData(name, cluster, *_parted(features, target, held_out_rows(name, target, test_fraction, seed)), schema)


def _parted(features: NDArray[Any], target: Array, is_test: NDArray[np.bool_]) -> tuple[NDArray[Any], Array, NDArray[Any], Array]:
    """The training rows and their targets, and those of the rows in the mask."""
    return frozen(features[~is_test]), frozen(target[~is_test]), frozen(features[is_test]), frozen(target[is_test])


def held_out_rows(name: str, target: Array, test_fraction: float, seed: int) -> NDArray[np.bool_]:
    """(n,) mask of a user's test rows; `target` (n,) is the user's.

    A target with exactly two values is split in proportion to them, and both stay in training.
    """
    is_test = np.zeros(len(target), dtype=np.bool_)
    is_test[_test_rows(name, target, n_test_rows(len(target), test_fraction), seed)] = True
    return is_test


def _test_rows(name: str, target: Array, n_test: int, seed: int) -> Indices:
    if not n_test:
        return np.zeros(0, dtype=np.int64)
    order = stream(seed, "split", name).order(len(target))
    values = distinct(target)
    if len(values) != 2:
        return order[:n_test]
    low, high = (order[target[order] == value] for value in values)
    share = math.floor(n_test * len(high) / len(target) + 0.5)
    n_high = max(n_test - (len(low) - 1), min(share, len(high) - 1))
    return np.concatenate([low[: n_test - n_high], high[:n_high]])


def fold_rows(name: str, target: Array, fold: Fold, seed: int) -> NDArray[np.bool_]:
    """(m,) mask of the training rows that the fold holds out; `target` (m,) is the user's.

    The rows are shuffled (with exactly two target values: one value after the other) and dealt to the folds in turn. So a user's folds
    differ by at most one row, and by at most one row of each of two values.

    Each user starts at a random fold. So users with fewer rows than folds are spread over all folds, and hold out nothing in some of them.
    A single row is never held out: its user always trains on it, and no fold tests it.
    """
    held_out = np.zeros(len(target), dtype=np.bool_)
    if len(target) > 1:
        draws = stream(seed, "folds", name)
        turn = _turn(draws, fold)
        order = draws.order(len(target))
        values = distinct(target)
        if len(values) == 2:
            order = np.concatenate([order[target[order] == value] for value in values])
        held_out[order[turn :: fold.of]] = True
    return held_out


def with_fold(user: UserData, fold: Fold, seed: int) -> UserData:
    """The user in this fold: the held-out training rows replace its test rows."""
    parts = _parted(user.features, user.target, fold_rows(user.name, user.target, fold, seed))
    return UserData(user.name, user.cluster, *parts, user.schema)


def head_with_fold(head: UserHead, fold: Fold, seed: int) -> UserHead:
    """The head of `with_fold`, computed without rows."""
    if head.n_rows < 2:
        return head
    turn = _turn(stream(seed, "folds", head.name), fold)
    return replace(head, n_rows=head.n_rows - len(range(turn, head.n_rows, fold.of)))


def _turn(draws: Stream, fold: Fold) -> int:
    """The position of the fold in the user's deal, from 0. Uses the first number of the user's stream."""
    first = int(draws.words.random_raw() % fold.of)
    return (fold.number - 1 - first) % fold.of
