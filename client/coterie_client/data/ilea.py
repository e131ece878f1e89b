"""The examination scores of the Inner London Education Authority, of pupils in 139 schools. files/ORIGIN.md says where they are from."""

import functools
from collections.abc import Collection
from pathlib import Path

import numpy as np

from coterie.arrays import Array
from coterie.experiment.data import IleaData
from coterie.experiment.features import Feature
from coterie_client.data.split import hold_out, n_test_rows
from coterie_client.data.standardize import standardize
from coterie_client.data.users import UserData, UserHead

_FILE = Path(__file__).parent / "files" / "school_ilea.npz"
_LEAST, _MOST = 1, 70  # scores: public constants


def heads(config: IleaData, *_rest: object) -> list[UserHead]:
    return [UserHead(name, None, len(y) - n_test_rows(len(y), config.test_fraction)) for name, (_, y) in _schools().items()]


def load(config: IleaData, seed: int, names: Collection[str] | None, *_rest: object) -> list[UserData]:
    """The schools in `names` (None: all)."""
    found = []
    for name, (features, target) in _schools().items():
        if names is None or name in names:
            schema = tuple(Feature(f"x{number}", "number", f"x{number}") for number in range(1, features.shape[1] + 1))
            user = hold_out(name, None, features, target, test_fraction=config.test_fraction, seed=seed, schema=schema)
            found.append(_scaled(user) if config.standardize_own else user)
    return found


def _scaled(user: UserData) -> UserData:
    """The user with features centred and scaled by its own training rows; those that are constant there are only centred."""
    scale = user.features.std(axis=0)
    return standardize(user, user.features.mean(axis=0), np.where(scale > 0, scale, 1.0))


@functools.cache
def _schools() -> dict[str, tuple[Array, Array]]:
    with np.load(_FILE) as archive:
        features, target, names = archive["features"].astype(np.float64), archive["target"], archive["user"]
    scaled = (target - _LEAST) / (_MOST - _LEAST)
    return {str(name): (features[names == name], scaled[names == name]) for name in np.unique(names)}
