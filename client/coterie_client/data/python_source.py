"""Users from Python code: a data source of an installed package or of the client itself (see `sources`). Its values are checked."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, default_finding
from coterie.experiment import plugins
from coterie.experiment.data import PythonData
from coterie.experiment.settings import validated
from coterie.findings import Finding
from coterie.text.names import check_name
from coterie.user_code import user_code
from coterie_client.data.partition import deal
from coterie_client.data.pool import Pool, load_shares
from coterie_client.data.sources import MARK, DataSource, LabelledRows, SourceRequest
from coterie_client.data.split import hold_out
from coterie_client.data.tables.features import as_rows
from coterie_client.data.users import UserData, UserHead, frozen


def heads(config: PythonData, seed: int, data_dir: Path | None = None) -> list[UserHead]:
    """All users. The source has to load its rows for this."""
    return [UserHead(user.name, user.cluster, len(user.features)) for user in load(config, seed, None, data_dir)]


def load(config: PythonData, seed: int, names: Collection[str] | None, data_dir: Path | None = None) -> list[UserData]:
    """The users in `names` (None: all). Records of other users are only checked for their name."""
    ask = _source(config, seed, data_dir)
    with user_code(config.path, Finding("L3", place="data.path"), ConfigError):
        found = ask()
        if not isinstance(found, LabelledRows):
            return _loaded(config, seed, names, found)
        pool = _pool(found, config.path)
    return load_shares(pool, config.partition, deal(pool, config.partition, config.test_fraction, seed), names)


def _pool(found: LabelledRows, where: str) -> Pool:
    labels = _numbers(found.labels, "labels", 1, where)
    n_rows = 0 if labels is None else len(labels)
    if labels is None or not n_rows:
        raise ConfigError(f"{where}: there are no labels, want at least one row")
    if len(found.features) != n_rows:
        raise ConfigError(f"{where}: features has {len(found.features)} rows, want the {n_rows} of labels")

    def rows(numbers: Indices) -> NDArray[Any]:
        with user_code(where, Finding("L3", place="data.path"), ConfigError):
            taken = _numbers(found.features[numbers], "features", 2, where)
        if taken is None or len(taken) != len(numbers):
            raise ConfigError(f"{where}: features gives {0 if taken is None else len(taken)} rows for {len(numbers)} numbers, want as many")
        return as_rows(taken, f"{where}: features", channels="first")

    users = None
    if found.users is not None:
        users = {}
        for given, listed in found.users.items():
            user = check_name(given, where)
            mine = np.sort(np.asarray(listed).reshape(-1))
            if mine.dtype.kind not in "iu" or not mine.size or mine[0] < 0 or mine[-1] >= n_rows or not np.diff(mine).all():
                raise ConfigError(f"{where} user {user!r}: want row numbers from 0 to {n_rows - 1}, each once and at least one")
            users[user] = mine.astype(np.int64)
    test = None if found.test is None else _pool(found.test, f"{where}, test rows")
    return Pool(where, labels.astype(np.float64), rows, users, class_names=tuple(found.class_names), test=test)


def _loaded(config: PythonData, seed: int, names: Collection[str] | None, records: Any) -> list[UserData]:
    if not isinstance(records, Iterable):
        raise ConfigError(f"{config.path} returned {_kind(records)}, want an iterable of user records")
    if config.partition is not None:
        raise ConfigError(f"{config.path} returned users, and data.partition deals labelled rows: want one of the two")
    seen: set[str] = set()
    loaded: list[UserData] = []
    for number, record in enumerate(records):
        name = getattr(record, "name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{config.path} record {number} is {_kind(record)} with the name {name!r}, want text as its name")
        name = check_name(name, f"{config.path} record {number}")
        if name in seen:
            raise ConfigError(f"{config.path} record {number}: user {name!r} occurs twice, want each user once")
        seen.add(name)
        if names is None or name in names:
            loaded.append(_user(record, name, config, seed, f"{config.path} user {name!r}"))
            first, user = loaded[0], loaded[-1]
            if user.features.shape[1:] != first.features.shape[1:]:
                found = f"{config.path} user {user.name!r}: features has {_widths(user.features, first.features)}"
                raise ConfigError(f"{found} of user {first.name!r}")
    if not seen:
        raise ConfigError(f"{config.path} returned 0 users, want at least one")
    return loaded


@default_finding(Finding("L4", place="data.path"))
def _source(config: PythonData, seed: int, data_dir: Path | None) -> Callable[[], Any]:
    """The function that returns users or labelled rows."""
    found = plugins.load("source", config.path)
    if isinstance(found, DataSource):
        options = validated(found.options, config.options, "data.options")
        return partial(found.read, SourceRequest(options, seed, data_dir))
    if not callable(found) or getattr(found, MARK, False) is not True:
        wanted = "want a coterie.plugin.DataSource, or a function marked with @coterie.user_source"
        raise ConfigError(f"data source {config.path!r} is {_kind(found)} that is no source: {wanted}")
    return partial(found, dict(config.options), seed)


def _user(record: Any, name: str, config: PythonData, seed: int, where: str) -> UserData:
    cluster = getattr(record, "cluster", None)
    if cluster is not None and not isinstance(cluster, str):
        raise ConfigError(f"{where}: cluster is {_kind(cluster)}, want text or None")
    if cluster is not None:
        cluster = check_name(cluster, f"{where}, cluster")
    features, target = _rows(record, "features", "target", where)
    if features is None or features.size == 0:
        raise ConfigError(f"{where}: features have shape {None if features is None else features.shape}, want (n, p), both positive")
    test_features, test_target = _rows(record, "test_features", "test_target", where)
    if test_features is None or len(test_features) == 0:
        return hold_out(name, cluster, features, target, test_fraction=config.test_fraction, seed=seed)
    if test_features.shape[1:] != features.shape[1:]:
        raise ConfigError(f"{where}: test_features has {_widths(test_features, features)} of features")
    return UserData(name, cluster, frozen(features), frozen(target), frozen(test_features), frozen(test_target))


def _rows(record: Any, features_name: str, target_name: str, where: str) -> tuple[NDArray[Any] | None, Array]:
    features = _numbers(getattr(record, features_name, None), features_name, 2, where)
    target = _numbers(getattr(record, target_name, None), target_name, 1, where)
    n_rows = 0 if features is None else len(features)
    features = None if features is None else as_rows(features, f"{where}: {features_name}", channels="first")
    if target is None:
        return features, np.zeros(n_rows)
    if len(target) != n_rows:
        raise ConfigError(f"{where}: {target_name} has {len(target)} rows, want the {n_rows} of {features_name}")
    return features, target.astype(np.float64)


def _numbers(values: Any, what: str, n_axes: int, where: str) -> NDArray[Any] | None:
    """The values as an array with one axis, or with at least two."""
    if values is None:
        return None
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise ConfigError(f"{where}: {what} is not an array ({error}), want rows of equal length") from error
    if found.dtype.kind not in "iuf":
        raise ConfigError(f"{where}: {what} has dtype {found.dtype}, want integers or floating-point numbers")
    if found.ndim != n_axes and not found.ndim > n_axes == 2:
        raise ConfigError(f"{where}: {what} has shape {found.shape}, want {'(n, p)' if n_axes == 2 else '(n,)'}")
    if not np.isfinite(found).all():
        raise ConfigError(f"{where}: {what} row {np.argwhere(~np.isfinite(found))[0, 0] + 1} has NaN or infinity, want numbers")
    return found


def _widths(found: NDArray[Any], wanted: NDArray[Any]) -> str:
    if found.ndim == wanted.ndim == 2:
        return f"{found.shape[1]} columns, want the {wanted.shape[1]}"
    return f"rows of shape {list(found.shape[1:])}, want the {list(wanted.shape[1:])}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
