"""One user's rows in memory, the head that describes them without the rows, and notes on what was left out of the data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.experiment.features import Feature
from coterie.findings import Finding

A = TypeVar("A", bound=NDArray[Any])


@dataclass(frozen=True)
class UserHead:
    """What others may know of a user: `n_rows` is the number of training rows, `len(UserData.features)`."""

    name: str
    cluster: str | None
    n_rows: int


@dataclass(frozen=True, eq=False)
class UserData:
    """One user's private rows. All arrays are read-only, and users may share them.

    There are m training rows and m_test test rows (possibly 0). Targets are 0 if the data has none; class labels are 0, 1, ... as floats.
    Features are float64 (m, p). For networks they may have any shape: images are uint8 (m, channels, height, width), symbol sequences are
    int64 (m, T).
    """

    name: str
    cluster: str | None  # the known label, if the data has one
    features: NDArray[Any]  # (m, ...)
    target: Array  # (m,)
    test_features: NDArray[Any]  # (m_test, ...)
    test_target: Array  # (m_test,)
    schema: tuple[Feature, ...] = ()  # the p features, if the data names them

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the features."""
        return tuple(feature.name for feature in self.schema)


@dataclass(frozen=True)
class Note:
    """On data before the first round: the sentence goes to the host's own log, the finding to the coordinator."""

    sentence: str
    finding: Finding


@dataclass(frozen=True)
class Reading:
    """Users with their rows, in natural order of names, and notes on all that was left out, dropped or converted."""

    users: Sequence[UserData]
    notes: tuple[Note, ...] = ()


def frozen(array: A) -> A:
    """A read-only copy in C order."""
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy  # type: ignore[return-value]
