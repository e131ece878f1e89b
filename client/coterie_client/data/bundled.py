"""The bundled tables, read as CSV files. files/ORIGIN.md lists their sources and what was changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from coterie.arrays import Array
from coterie.experiment.data import ExamsData, GrowthData, HsbData
from coterie.experiment.tables import CsvData
from coterie_client.data.tables import formats
from coterie_client.data.users import UserData, UserHead, frozen

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
# Mean and standard deviation of the target over the whole table, in its own units. They are public constants, so no user has to reveal
# anything about its targets, and they do not depend on the held-out split.
_TARGET_SCALES = {"hsb": (12.748, 6.878), "growth": (-0.450, 1.531)}


def heads(config: Bundled) -> list[UserHead]:
    return formats.heads(_as_csv(config), None)


def load(config: Bundled, seed: int, names: Collection[str] | None) -> list[UserData]:
    """The users in `names` (None: all) that the table has."""
    users = list(formats.load(_as_csv(config), seed, names, None).users)
    if isinstance(config, ExamsData) or not config.standardize_target:
        return users
    mean, scale = _TARGET_SCALES[config.source]

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
