"""The truth behind `source: representation`: B* and the users' heads w*_i, of section 5.1 of Collins et al. (2021).

"Generated randomly by sampling and normalizing Gaussian matrices" is ambiguous. Here the rows of W* have norm sqrt(k) and the columns of B*
are orthonormal (Assumption 3). The method of moments then starts Figure 3 at distances of about .44, .21, .14 and .06 for n = 100, 500,
1000 and 5000. Scaling W* as a whole gives .58 for n = 100, and rows of norm 1 need k times the step size.

All draws are keyed by name, so a user's head does not depend on other users. The coordinator also draws B*, to measure the distance of the
learnt representation.
"""

import numpy as np

from coterie.arrays import Array
from coterie.draws.streams import normal, stream
from coterie.experiment.data import DataConfig, RepresentationData


def true_representation(config: DataConfig, seed: int) -> Array | None:
    """B* (d, k) with orthonormal columns, or None for data without such a truth; `seed` is the experiment's."""
    if not isinstance(config, RepresentationData):
        return None
    seed = seed if config.seed is None else config.seed
    gaussian = normal(stream(seed, "representation"), config.d * config.k).reshape(config.d, config.k)
    return np.linalg.qr(gaussian)[0]


def true_head(config: RepresentationData, seed: int, name: str) -> Array:
    """w*_i (k,) with norm sqrt(k) (Assumption 3)."""
    seed = seed if config.seed is None else config.seed
    gaussian = normal(stream(seed, "representation head", name), config.k)
    head: Array = gaussian * np.sqrt(config.k) / np.sqrt((gaussian * gaussian).sum())
    return head
