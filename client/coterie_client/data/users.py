"""One user's rows in memory, and the head that describes them without the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array


@dataclass(frozen=True)
class UserHead:
    """What the others may know of a user: `n_rows` is its number of training rows, `len(UserData.features)`."""

    name: str
    cluster: str | None
    n_rows: int


@dataclass(frozen=True, eq=False)
class UserData:
    """One user's private rows. All arrays are read-only float64, and arrays may be shared between users.

    m training rows, m_test test rows (possibly 0), p features; targets are 0 where the data has none.
    """

    name: str
    cluster: str | None  # the known label, where the data has one
    features: Array  # (m, p)
    target: Array  # (m,)
    test_features: Array  # (m_test, p)
    test_target: Array  # (m_test,)
    columns: tuple[str, ...] = ()  # the names of the p features, where the data has names


def frozen(array: Array) -> Array:
    """The same values as a read-only, C-ordered float64 array."""
    copy = np.array(array, dtype=np.float64, order="C")
    copy.flags.writeable = False
    return copy
