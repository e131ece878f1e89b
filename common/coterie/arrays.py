"""Array types. All arithmetic is in float64; the payload dtype of the wire is decided at the codec alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
