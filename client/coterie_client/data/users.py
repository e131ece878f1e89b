"""One user's rows in memory, and the head that describes them without the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.experiment.features import Feature

A = TypeVar("A", bound=NDArray[Any])


@dataclass(frozen=True)
class UserHead:
    """What the others may know of a user: `n_rows` is its number of training rows, `len(UserData.features)`."""

    name: str
    cluster: str | None
    n_rows: int


@dataclass(frozen=True, eq=False)
class UserData:
    """One user's private rows. All arrays are read-only, and may be shared between users.

    m training rows, m_test test rows (possibly 0); targets are 0 where the data has none. Features are float64 (m, p), or, for networks,
    rows of any shape: images as uint8 (m, channels, height, width), sequences of symbols as int64 (m, T). Classes are 0, 1, ... as floats.
    """

    name: str
    cluster: str | None  # the known label, where the data has one
    features: NDArray[Any]  # (m, ...)
    target: Array  # (m,)
    test_features: NDArray[Any]  # (m_test, ...)
    test_target: Array  # (m_test,)
    schema: tuple[Feature, ...] = ()  # the p features, where the data has names

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the features."""
        return tuple(feature.name for feature in self.schema)


def frozen(array: A) -> A:
    """The same values as a read-only, C-ordered array of its own."""
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy  # type: ignore[return-value]
