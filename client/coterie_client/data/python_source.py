"""Users made by a function of the client's own code.

The experiment may come from the coordinator, and naming any function of any module would let it run any of them
("subprocess:call"). So a function must be marked with `@user_source` by whoever wrote it to be callable from an experiment.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import JsonValue

from coterie.arrays import Array
from coterie.errors import ConfigError, otherwise
from coterie.experiment.data import PythonData
from coterie.findings import Finding
from coterie.text.names import check_name
from coterie_client.data.split import hold_out
from coterie_client.data.tables.features import as_rows
from coterie_client.data.users import UserData, UserHead, frozen
from coterie_client.user_code import user_code

_MARK = "__coterie_user_source__"


class UserRecord(Protocol):
    """One user as a source returns it; `UserData` is one, any object with these attributes will do.

    Features are numbers (n, p), or, for networks, rows with more axes: bytes (n, channels, height, width) stay bytes.
    `target` (n,), `cluster`, `test_features` (m_test, ...) and `test_target` (m_test,) may be None or absent. Without test rows, some of
    the n rows are held out by the experiment's `test_fraction`.
    """

    @property
    def name(self) -> str: ...
    @property
    def features(self) -> ArrayLike:  # (n, p) or (n, ...)
        ...


class UserSource(Protocol):
    """Makes all users. The same options and seed must give the same users, in any process."""

    def __call__(self, options: dict[str, JsonValue], seed: int) -> Iterable[UserRecord]: ...


F = TypeVar("F", bound=Callable[..., Iterable[Any]])


def user_source(function: F) -> F:
    """Mark a `UserSource`: experiments may call it."""
    setattr(function, _MARK, True)
    return function


def heads(config: PythonData, seed: int) -> list[UserHead]:
    """All users; the function has to make them for this."""
    return [UserHead(user.name, user.cluster, len(user.features)) for user in load(config, seed, None)]


def load(config: PythonData, seed: int, names: Collection[str] | None) -> list[UserData]:
    """The users in `names` (None: all) that the function returns; records of others are checked for their name only."""
    function = _function(config)
    with user_code(f"{config.path}", Finding("L3", place="data.path"), ConfigError):
        return _loaded(config, seed, names, function(dict(config.options), seed))


def _loaded(config: PythonData, seed: int, names: Collection[str] | None, records: Any) -> list[UserData]:
    if not isinstance(records, Iterable):
        raise ConfigError(f"{config.path} returned {_kind(records)}, want an iterable of user records")
    seen: set[str] = set()
    loaded: list[UserData] = []
    for number, record in enumerate(records):
        name = getattr(record, "name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{config.path} record {number} is {_kind(record)} with the name {name!r}, want text as its name")
        name = check_name(name, f"{config.path} record {number}")
        if name in seen:
            raise ConfigError(f"{config.path} record {number}: user {name!r} is there twice, want each user once")
        seen.add(name)
        if names is None or name in names:
            loaded.append(_user(record, name, config, seed, f"{config.path} user {name!r}"))
            _same_width(loaded[0], loaded[-1], config)
    if not seen:
        raise ConfigError(f"{config.path} returned 0 users, want at least one")
    return loaded


@otherwise(Finding("L4", place="data.path"))
def _function(config: PythonData) -> UserSource:
    module_name, _, function_name = config.path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{config.path}: module {error.name!r} cannot be found, want one this client can import") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may fail in any way of its own, and even exit
        raise ConfigError(f"{config.path}: the module cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{config.path}: {function_name!r} is {_kind(function)}, want a function")
    if getattr(function, _MARK, False) is not True:
        raise ConfigError(f"{config.path}: the function is not marked as a source, want @coterie.user_source on it")
    return cast(UserSource, function)


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
    """The values as they are, with one axis or with at least two."""
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


def _same_width(first: UserData, user: UserData, config: PythonData) -> None:
    if user.features.shape[1:] != first.features.shape[1:]:
        found = f"{config.path} user {user.name!r}: features has {_widths(user.features, first.features)}"
        raise ConfigError(f"{found} of user {first.name!r}")


def _widths(found: NDArray[Any], wanted: NDArray[Any]) -> str:
    if found.ndim == wanted.ndim == 2:
        return f"{found.shape[1]} columns, want the {wanted.shape[1]}"
    return f"rows of shape {list(found.shape[1:])}, want the {list(wanted.shape[1:])}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
