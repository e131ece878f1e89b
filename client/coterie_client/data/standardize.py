"""Standardisation in pure pieces: per-user moments to be summed over the federation, and applying what was agreed.

The constants themselves are agreed on in a federated round of sums, so that no member sees another's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie_client.data.users import UserData, frozen


class Moments(NamedTuple):
    """Sums over each user's training rows; with the target, it is the last of p + 1 columns."""

    n_rows: Indices  # (n_users,)
    sums: Array  # (n_users, p)
    sums_of_squares: Array  # (n_users, p)


def moments(users: Sequence[UserData], *, with_target: bool = False) -> Moments:
    """Count, sums and sums of squares of each user's training rows, in the order given. A row depends on its own user alone."""
    if not users:
        raise ConfigError("moments were asked of 0 users, want at least one")
    for user in users:
        if user.features.ndim != 2:
            found = f"user {user.name!r} has rows of shape {list(user.features.shape[1:])}"
            raise ConfigError(f"{found}, want rows of p numbers to standardise: rows of other shapes need a model")
    tables = [_columns(user.features, user.target, with_target) for user in users]
    return Moments(
        n_rows=np.array([len(table) for table in tables], dtype=np.int64),
        sums=np.stack([table.sum(axis=0) for table in tables]),
        sums_of_squares=np.stack([(table * table).sum(axis=0) for table in tables]),
    )


def standardize(user: UserData, mean: Array, scale: Array, *, with_target: bool = False) -> UserData:
    """The user with training and test features turned into (features - mean) / scale; mean and scale (p,).

    With `with_target`, mean and scale are (p + 1,), and the last entry is the target's. Raises ConfigError for a wrong shape, or a
    mean or scale that is not finite, or a scale that is not positive.
    """
    n_columns = user.features.shape[1] + with_target
    for what, values in (("mean", mean), ("scale", scale)):
        if values.shape != (n_columns,):
            raise ConfigError(f"the {what} for user {user.name!r} has shape {values.shape}, want ({n_columns},)")
        for column, value in enumerate(values):
            if not np.isfinite(value) or (what == "scale" and value <= 0):
                wanted = "a positive number: is the column constant?" if what == "scale" else "a number"
                raise ConfigError(f"the {what} of column {column} is {float(value)}, want {wanted}")
    p = user.features.shape[1]
    train, test = (
        (_columns(features, target, with_target) - mean) / scale
        for features, target in ((user.features, user.target), (user.test_features, user.test_target))
    )
    return UserData(
        name=user.name,
        cluster=user.cluster,
        features=frozen(train[:, :p]),
        target=frozen(train[:, p]) if with_target else user.target,
        test_features=frozen(test[:, :p]),
        test_target=frozen(test[:, p]) if with_target else user.test_target,
        schema=user.schema,
    )


def _columns(features: Array, target: Array, with_target: bool) -> Array:
    return np.column_stack([features, target]) if with_target else features
