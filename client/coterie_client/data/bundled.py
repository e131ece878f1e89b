"""The bundled tables, read as CSV files, and scikit-learn's handwritten digits. files/ORIGIN.md says what was changed in the tables.

The digits are read from their data file: importing scikit-learn would take a second and 100 MB.
"""

import gzip
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.experiment.data import ExamsData, GrowthData, HsbData
from coterie.experiment.tables import CsvData
from coterie.extras import not_installed
from coterie.findings import Finding
from coterie_client.data.pool import Pool
from coterie_client.data.tables import formats
from coterie_client.data.users import UserData, UserHead, frozen

_DIGITS = Path("datasets") / "data" / "digits.csv.gz"
_SIDE, _DARKEST = 8, 16
_FILES = Path(__file__).parent / "files"

Bundled = HsbData | ExamsData | GrowthData


@dataclass(frozen=True)
class _Table:
    file: str
    user: str
    cluster: str
    target: str


_TABLES = {
    "hsb": _Table("hsb82.csv.gz", user="school", cluster="sector", target="mAch"),
    "exams": _Table("chem97.csv.gz", user="school", cluster="authority", target="a_or_b"),
    "growth": _Table("egsingle.csv.gz", user="child", cluster="school", target="math"),
}


def heads(config: Bundled, *_rest: object) -> list[UserHead]:
    return formats.heads(_as_csv(config), 0, None)


def load(config: Bundled, seed: int, names: Collection[str] | None, *_rest: object) -> list[UserData]:
    """The users in `names` (None: all) that the table has."""
    users = list(formats.load(_as_csv(config), seed, names, None).users)
    if config.target_scale is None:
        return users
    # Public constants, so no user has to reveal anything about its targets, and they do not depend on the held-out split.
    mean, scale = config.target_scale

    def scaled(target: Array) -> Array:
        return frozen((target - mean) / scale)

    return [replace(user, target=scaled(user.target), test_target=scaled(user.test_target)) for user in users]


def _as_csv(config: Bundled) -> CsvData:
    """The CSV source of a bundled table. Its path is the package's own, whatever the client's data folder."""
    table = _TABLES[config.source]
    return CsvData(
        source="csv",
        path=str(_FILES / table.file),
        user_column=table.user,
        cluster_column=table.cluster,
        target_column=table.target,
        feature_columns=config.feature_columns,
        columns=dict.fromkeys((*config.feature_columns, table.target), "number"),
        test_fraction=config.test_fraction,
        standardize=config.standardize,
    )


def pool(*_rest: object) -> Pool:
    """1,797 rows of uint8 (1, 8, 8)."""
    found = importlib.util.find_spec("sklearn")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    files = [place for place in (Path(folder) / _DIGITS for folder in folders) if place.is_file()]
    if not files:
        raise not_installed("source digits needs scikit-learn", "coterie[data]", Finding("T21"))
    with gzip.open(files[0], "rt") as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.int64)
    images = ((510 * table[:, :-1] + _DARKEST) // (2 * _DARKEST)).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)

    def rows(indices: Indices) -> NDArray[Any]:
        return images[indices]

    return Pool("digits", table[:, -1].astype(np.float64), rows)
