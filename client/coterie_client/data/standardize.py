"""Standardisation: per-user sums and deviations, which the federation adds up, and the transform with the common constants.

Hosts compute the constants in federated rounds of sums, so no host sees another's rows. A missing cell is NaN: it counts in no sum and gets
the common mean. The result does not depend on the units of a feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie_client.data.users import UserData, frozen

_CELLS = 1 << 20  # transposed at a time: 8 MB


class Totals(NamedTuple):
    """Sums over each user's training rows, without missing cells."""

    n_rows: Indices  # (n_users,)
    n_present: Indices  # (n_users, p)
    sums: Array  # (n_users, p)


def totals(users: Sequence[UserData]) -> Totals:
    """Counts and sums of each user's training rows, in the given order. A row of the result depends on its own user only."""
    _check(users)
    return Totals(
        n_rows=np.array([len(user.features) for user in users], dtype=np.int64),
        n_present=np.stack([(~np.isnan(user.features)).sum(axis=0, dtype=np.int64) for user in users]),
        sums=np.stack([_by_feature(user.features, _sum) for user in users]),
    )


def deviations(users: Sequence[UserData], mean: Array) -> Array:
    """(n_users, p) Euclidean norms of `features - mean` over each user's training rows; mean (p,). ConfigError for another shape.

    These are norms because squares over- or underflow for features around 1e170 or 1e-170.
    """
    _check(users)
    for user in users:
        _check_shape("mean", mean, user)
    return np.stack([_by_feature(user.features - mean, _norm) for user in users])


def filled(user: UserData, fill: Array) -> UserData:
    """The user with `fill` (p,) in the missing cells of training and test rows. ConfigError for a wrong shape."""
    _check_shape("fill", fill, user)
    train, test = (np.where(np.isnan(rows), fill, rows) for rows in (user.features, user.test_features))
    return replace(user, features=frozen(train), test_features=frozen(test))


def standardize(user: UserData, mean: Array, scale: Array) -> UserData:
    """The user with (features - mean) / scale as training and test features; mean and scale (p,).

    Raises ConfigError for a wrong shape, a mean or scale that is not finite, or a scale that is not positive.
    """
    for what, values in (("mean", mean), ("scale", scale)):
        _check_shape(what, values, user)
        for column, value in enumerate(values):
            if not np.isfinite(value) or (what == "scale" and value <= 0):
                wanted = "a positive number: is the column constant?" if what == "scale" else "a number"
                raise ConfigError(f"the {what} of column {column} is {float(value)}, want {wanted}")
    train, test = ((rows - mean) / scale for rows in (user.features, user.test_features))
    return replace(user, features=frozen(train), test_features=frozen(test))


def _check(users: Sequence[UserData]) -> None:
    if not users:
        raise ConfigError("sums were asked of 0 users, want at least one")
    for user in users:
        if user.features.ndim != 2:
            found = f"user {user.name!r} has rows of shape {list(user.features.shape[1:])}"
            raise ConfigError(f"{found}, want rows of p numbers to standardise: rows of other shapes need a model")


def _check_shape(what: str, values: Array, user: UserData) -> None:
    p = user.features.shape[1]
    if values.shape != (p,):
        raise ConfigError(f"the {what} for user {user.name!r} has shape {values.shape}, want ({p},)")


def _by_feature(rows: Array, of_features: Callable[[Array], Array]) -> Array:
    """(p,) the results of `of_features` on contiguous blocks (k, m): numpy's pairwise summation then keeps rounding errors small."""
    m, p = rows.shape
    width = max(1, _CELLS // max(1, m))
    parts = [of_features(np.ascontiguousarray(rows[:, start : start + width].T)) for start in range(0, p, width)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _sum(features: Array) -> Array:
    found: Array = np.where(np.isnan(features), 0.0, features).sum(axis=1)
    return found


def _norm(features: Array) -> Array:
    sizes = np.where(np.isnan(features), 0.0, np.abs(features))
    top = sizes.max(axis=1, initial=0.0)
    shares = sizes / np.where(top > 0.0, top, 1.0)[:, None]
    found: Array = top * np.sqrt((shares * shares).sum(axis=1))
    return found
