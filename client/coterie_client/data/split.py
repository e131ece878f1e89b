"""The held-out split: which of a user's rows are its test rows.

It depends on the seed, the user's name and the user's own rows, never on other users or on who shares the host.
How many rows are held out depends on the number of rows alone, so that heads know it without reading targets.
"""

from __future__ import annotations

import math

import numpy as np

from coterie.arrays import Array, Indices
from coterie_client.data.draws import stream
from coterie_client.data.users import UserData, frozen


def n_test_rows(n_rows: int, test_fraction: float) -> int:
    """`test_fraction` of the rows, rounded half up, but two rows (or all there are) stay for training."""
    # Two and not one: a user with both classes keeps both, and the number needs no look at the targets.
    return max(0, min(math.floor(n_rows * test_fraction + 0.5), n_rows - 2))


def hold_out(
    name: str, cluster: str | None, features: Array, target: Array, *, test_fraction: float, seed: int, columns: tuple[str, ...] = ()
) -> UserData:
    """Split one user's rows, features (n, p) and target (n,), into training and test rows, both in their given order.

    A target with exactly two values is split in proportion to them, and both stay in training.
    """
    chosen = _test_rows(name, target, n_test_rows(len(target), test_fraction), seed)
    is_test = np.zeros(len(target), dtype=np.bool_)
    is_test[chosen] = True
    return UserData(
        name=name,
        cluster=cluster,
        features=frozen(features[~is_test]),
        target=frozen(target[~is_test]),
        test_features=frozen(features[is_test]),
        test_target=frozen(target[is_test]),
        columns=columns,
    )


def _test_rows(name: str, target: Array, n_test: int, seed: int) -> Indices:
    order = stream(seed, "split", name).order(len(target))
    values = np.unique(target)
    if len(values) != 2:
        return order[:n_test]
    low, high = (order[target[order] == value] for value in values)
    share = math.floor(n_test * len(high) / len(target) + 0.5)
    n_high = max(n_test - (len(low) - 1), min(share, len(high) - 1))
    return np.concatenate([low[: n_test - n_high], high[:n_high]])
