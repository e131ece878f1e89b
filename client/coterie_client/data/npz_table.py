"""One NumPy archive: arrays of features, targets, users and clusters with a row per example.

Arrays are read whole, and only the rows of the users that were asked for are kept and checked. Pickled objects are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data import NpzData
from coterie.errors import ConfigError
from coterie.names import check_name
from coterie_client.data.paths import DataFile, one_file
from coterie_client.data.split import hold_out, n_test_rows
from coterie_client.data.tables import check_finite, no_rows, one_cluster, rows_by_user
from coterie_client.data.users import UserData, UserHead


def heads(config: NpzData, data_dir: Path | None) -> list[UserHead]:
    """All users of the archive; only the arrays of users and clusters are read."""
    file = one_file(config.path, data_dir)
    wanted = [config.user] + ([] if config.cluster is None else [config.cluster])
    arrays = _read(file, wanted)
    heads = []
    names = _labels(file, config.user, arrays)
    clusters = None if config.cluster is None else _labels(file, config.cluster, arrays, len(names))
    for name, rows in _users(file, config, names).items():
        cluster = None if clusters is None else one_cluster(name, clusters, rows, file.label)
        heads.append(UserHead(name, cluster, len(rows) - n_test_rows(len(rows), config.test_fraction)))
    return heads


def load(config: NpzData, seed: int, names: Collection[str] | None, data_dir: Path | None) -> list[UserData]:
    """The users in `names` (None: all) that the archive has."""
    file = one_file(config.path, data_dir)
    wanted = [config.user, config.features]
    wanted += [array for array in (config.target, config.cluster) if array is not None]
    arrays = _read(file, wanted)
    of_row = _labels(file, config.user, arrays)
    clusters = None if config.cluster is None else _labels(file, config.cluster, arrays, len(of_row))
    features = _numbers(file, config.features, arrays, len(of_row), n_axes=2)
    target = None if config.target is None else _numbers(file, config.target, arrays, len(of_row), n_axes=1)
    loaded = []
    for name, rows in _users(file, config, of_row).items():
        if names is not None and name not in names:
            continue
        mine = features[rows].astype(np.float64)
        columns = [f"{config.features}[:, {column}]" for column in range(mine.shape[1])]
        check_finite(mine, rows, columns, file.label)
        mine_target = np.zeros(len(rows)) if target is None else target[rows].astype(np.float64)
        check_finite(mine_target[:, np.newaxis], rows, [str(config.target)], file.label)
        cluster = None if clusters is None else one_cluster(name, clusters, rows, file.label)
        loaded.append(hold_out(name, cluster, mine, mine_target, test_fraction=config.test_fraction, seed=seed))
    return loaded


def _read(file: DataFile, wanted: list[str]) -> dict[str, NDArray[Any]]:
    # Opened here and not by NumPy, which leaves the file open when it is no archive.
    with _damage(f"{file.label} cannot be read", "an .npz archive of arrays"), file.path.open("rb") as data:
        archive = np.load(data, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ConfigError(f"{file.label} is a single array, want an .npz archive of named arrays")
        arrays = {}
        for name in wanted:
            if name not in archive.files:
                raise ConfigError(f"{file.label}: array {name!r} is missing, found {', '.join(map(repr, archive.files))}")
            with _damage(f"{file.label}: array {name!r} cannot be read", "numbers or text"):
                arrays[name] = archive[name]
    return arrays


@contextmanager
def _damage(what: str, wanted: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{what} ({getattr(error, 'strerror', None) or error}), want {wanted}") from error


def _users(file: DataFile, config: NpzData, of_row: NDArray[np.str_]) -> dict[str, Any]:
    if len(of_row) == 0:
        raise no_rows(file.label, None)
    users = rows_by_user(of_row)
    for name, rows in users.items():
        check_name(name, f"{file.label} row {rows[0] + 1}, array {config.user!r}")
    return users


def _labels(file: DataFile, name: str, arrays: dict[str, NDArray[Any]], n_rows: int | None = None) -> NDArray[np.str_]:
    array = arrays[name]
    if array.dtype.kind not in "iuU":
        raise ConfigError(f"{file.label}: array {name!r} has dtype {array.dtype}, want integers or text")
    _check_shape(file, name, array, n_rows, n_axes=1)
    return array.astype(np.str_)


def _numbers(file: DataFile, name: str, arrays: dict[str, NDArray[Any]], n_rows: int, *, n_axes: int) -> NDArray[Any]:
    array = arrays[name]
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"{file.label}: array {name!r} has dtype {array.dtype}, want integers or floating-point numbers")
    _check_shape(file, name, array, n_rows, n_axes)
    if 0 in array.shape[1:]:
        raise ConfigError(f"{file.label}: array {name!r} has shape {array.shape}, want at least one column")
    return array


def _check_shape(file: DataFile, name: str, array: NDArray[Any], n_rows: int | None, n_axes: int) -> None:
    rows = "n" if n_rows is None else str(n_rows)
    if array.ndim != n_axes or (n_rows is not None and len(array) != n_rows):
        wanted = f"({rows},)" if n_axes == 1 else f"({rows}, p)"
        raise ConfigError(f"{file.label}: array {name!r} has shape {array.shape}, want {wanted}")
