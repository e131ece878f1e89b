"""Array types. All arithmetic is in float64; only the codec decides the payload dtype of the wire."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


def distinct(values: NDArray[T]) -> NDArray[T]:
    """The distinct values, ascending.

    Plain numpy.unique would look for masked arrays, and so load 2 MB of numpy that a small machine may lack.
    """
    found: NDArray[T] = np.unique(values, return_counts=True)[0]
    return found
