"""Array types. All arithmetic is in float64; the payload dtype of the wire is decided at the codec alone."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


def distinct(values: NDArray[T]) -> NDArray[T]:
    """The distinct values, ascending.

    numpy.unique by itself would look for masked arrays, which nothing here uses, and so load 2 MB of numpy that a small machine may lack.
    """
    found: NDArray[T] = np.unique(values, return_counts=True)[0]
    return found
