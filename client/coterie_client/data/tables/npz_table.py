"""Reads NumPy archives: arrays of features, targets, users and clusters with one row per example, or one archive per user.

Labels are read whole. Features are read and checked only for the rows of requested users.
"""

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.data import Encoded, NpzData
from coterie.experiment.settings import USER
from coterie.findings import Finding
from coterie.text.names import check_name
from coterie_client.data.archive import Archive, Header
from coterie_client.data.paths import DataFile, data_files, one_file, resolve
from coterie_client.data.pictures import Pictures
from coterie_client.data.pool import Pool
from coterie_client.data.tables.features import as_rows
from coterie_client.data.tables.heads import check_finite, no_rows, one_cluster, rows_by_user

Rows = Callable[[Indices], NDArray[Any]]


def pools(config: NpzData, data_dir: Path | None, names: Collection[str] | None) -> Iterator[Pool]:
    """One pool with the rows of all users, or one pool for each user in `names` (None: all)."""
    if USER not in config.path and not resolve(config.path, data_dir).is_dir():
        yield _pool(config, one_file(config.path, data_dir), data_dir)
        return
    if config.partition is not None or config.test_path is not None:
        raise ConfigError(f"path {config.path!r} has one archive per user, want neither partition nor test_path")
    for file in data_files(config.path, data_dir, (".npz",)):
        if names is None or file.user in names:
            yield _pool(config, file, data_dir)


def _pool(config: NpzData, file: DataFile, data_dir: Path | None) -> Pool:
    test = None
    if config.has_test_rows:
        test_file = file if config.test_path is None else one_file(config.test_path, data_dir)
        test = _rows_of(config, test_file, is_test=True)
    return _rows_of(config, file, test=test)


def _rows_of(config: NpzData, file: DataFile, *, is_test: bool = False, test: Pool | None = None) -> Pool:
    archive = Archive(file)
    user = None
    # With a partition and no `test_user`, test rows may go to anyone.
    if file.user is None and config.is_by_user and (not is_test or config.partition is None or config.test_user is not None):
        user = (config.test_user or config.user) if is_test else config.user
    n_rows = _n_rows(config, archive, user, is_test)
    users: dict[str, Indices] | None = None if file.user is None else {file.user: np.arange(n_rows)}
    clusters: dict[str, str] = {}
    if user is not None:
        users = rows_by_user(_labels(archive, user, n_rows))
        for name, rows in users.items():
            check_name(name, f"{archive.label} row {rows[0] + 1}, array {user!r}")
    if config.cluster is not None and users is not None and not is_test:
        of_row = _labels(archive, config.cluster, n_rows)
        clusters = {name: one_cluster(name, of_row, rows, file.label) for name, rows in users.items()}
    features = _images(config.encoded, archive, n_rows) if config.encoded else _features(config, archive, n_rows, is_test)
    target_name = (config.test_target or config.target) if is_test else config.target
    target = np.zeros(n_rows) if target_name is None else _numbers(archive, target_name, n_rows)

    def checked(indices: Indices) -> NDArray[Any]:
        check_finite(target[indices][:, np.newaxis], indices, [str(target_name)], file.label)
        return features(indices)

    return Pool(file.label, target, checked, users, clusters, test=test)


def _n_rows(config: NpzData, archive: Archive, user: str | None, is_test: bool) -> int:
    """The number of rows: the length of the array of users, of image offsets, or of features."""
    if user is not None:
        name, header = user, _header(archive, user, "iuU", "integers or text")
    elif config.encoded is not None:
        name, header = config.encoded.offsets, _header(archive, config.encoded.offsets, "iu", "integers")
    else:
        name = _features_name(config, is_test)
        header = _header(archive, name, "iuf", "integers or floating-point numbers")
    if len(header.shape) != 1 and (user is not None or config.encoded is not None):
        raise _wrong_shape(archive, name, header, "(n,)" if user is not None else "(n + 1,)")
    n_rows = (header.shape or (0,))[0] - (user is None and config.encoded is not None)
    if n_rows < 1:
        raise no_rows(archive.label, archive.file.user)
    return n_rows


def _features_name(config: NpzData, is_test: bool) -> str:
    return (config.test_features or config.features) if is_test else config.features


def _features(config: NpzData, archive: Archive, n_rows: int, is_test: bool) -> Rows:
    name = _features_name(config, is_test)
    header = _header(archive, name, "iuf", "integers or floating-point numbers")
    if len(header.shape) < 2 or header.shape[0] != n_rows:
        raise _wrong_shape(archive, name, header, f"({n_rows}, p), or more axes")
    if 0 in header.shape[1:]:
        raise _wrong_shape(archive, name, header, "at least one column")

    def rows(indices: Indices) -> NDArray[Any]:
        array = archive.rows(name, indices)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            flat = array.reshape(len(array), math.prod(array.shape[1:]))
            check_finite(flat, indices, [f"{name}[:, {column}]" for column in range(flat.shape[1])], archive.label)
        return as_rows(array, f"{archive.label}: array {name!r}", config.read_as, config.channels)

    return rows


def _images(encoded: Encoded, archive: Archive, n_rows: int) -> Rows:
    """A function from row numbers to images, which are JPEG or PNG files in the archive."""
    header = _header(archive, encoded.offsets, "iu", "integers")
    if header.shape != (n_rows + 1,):
        raise _wrong_shape(archive, encoded.offsets, header, f"({n_rows + 1},): one more than rows")
    offsets = archive.read(encoded.offsets).astype(np.int64)

    def rows(indices: Indices) -> NDArray[Any]:
        pictures = Pictures(archive.label)
        for _, first in archive.pieces(encoded.bytes, offsets[:1], offsets[1:2]):
            pictures.begin(first, "row 1", len(indices))
        for place, data in archive.pieces(encoded.bytes, offsets[indices], offsets[indices + 1]):
            pictures.put(place, data, f"row {indices[place] + 1}")
        return pictures.block

    return rows


def _numbers(archive: Archive, name: str, n_rows: int) -> Array:
    header = _header(archive, name, "iuf", "integers or floating-point numbers")
    if header.shape != (n_rows,):
        raise _wrong_shape(archive, name, header, f"({n_rows},)")
    return archive.read(name).astype(np.float64)


def _labels(archive: Archive, name: str, n_rows: int) -> NDArray[np.str_]:
    header = _header(archive, name, "iuU", "integers or text")
    if header.shape != (n_rows,):
        raise _wrong_shape(archive, name, header, f"({n_rows},)")
    return archive.read(name).astype(np.str_)


def _header(archive: Archive, name: str, kinds: str, wanted: str) -> Header:
    header = archive.header(name)
    if header.dtype.kind not in kinds:
        raise ConfigError(f"{archive.label}: array {name!r} has dtype {header.dtype}, want {wanted}", Finding("N2", role="array"))
    return header


def _wrong_shape(archive: Archive, name: str, header: Header, wanted: str) -> ConfigError:
    return ConfigError(f"{archive.label}: array {name!r} has shape {header.shape}, want {wanted}", Finding("N2", role="array"))
