"""LEAF's JSON files: `{"users": [...], "user_data": {user: {"x": [[...], ...], "y": [...]}}}`, one file or a folder of them.

Labels of all users are kept, and rows of the requested users. Text data (Shakespeare, Sent140) has its own sources: `roles` and `tweets`.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, default_finding
from coterie.experiment.data import LeafData
from coterie.findings import Finding
from coterie.text.names import check_name
from coterie_client.data.paths import DataFile, one_file, resolve
from coterie_client.data.pool import Pool
from coterie_client.data.tables.heads import check_finite, no_rows

_MAX_BYTES = 1 << 30  # of a file: parsed, it takes many times as much memory
_SUFFIX = ".json"


def pool(config: LeafData, data_dir: Path | None, names: Collection[str] | None) -> Pool:
    """The rows of all files. With natural users, users outside `names` have only labels."""
    test = None if config.test_path is None else _pool(config, config.test_path, data_dir, names, None)
    return _pool(config, config.path, data_dir, names, test)


def _pool(config: LeafData, path: str, data_dir: Path | None, names: Collection[str] | None, test: Pool | None) -> Pool:
    rows_of: dict[str, NDArray[Any] | None] = {}
    labels: list[Array] = []
    users: dict[str, Indices] = {}
    start = 0
    for file in _files(path, data_dir):
        for user, record in _users(file):
            where = f"{file.label} user {user!r}"
            if user in users:
                raise ConfigError(f"{where} is in another file too, or twice in one, want each user once", Finding("D1"))
            is_kept = names is None or not config.is_by_user or user in names
            y = _numbers(record, "y", where, "label")
            x = _rows(config, record, where, len(y)) if is_kept else None
            with default_finding(Finding("N3", role="label")):
                check_finite(y[:, np.newaxis], np.arange(len(y)), ["y"], where)
            users[user] = np.arange(start, start + len(y))
            rows_of[user] = x
            labels.append(y)
            start += len(y)
    if not start:
        raise no_rows(path, None)
    width = next((rows.shape[1:] for rows in rows_of.values() if rows is not None and len(rows)), (0,))
    for user, mine in rows_of.items():
        if mine is not None and len(mine) and mine.shape[1:] != width:
            said = f"{path}: user {user!r} has rows of shape {list(mine.shape[1:])}, want {list(width)} as the first user"
            raise ConfigError(said, Finding("N2", role="feature"))
    starts = np.array([rows[0] for rows in users.values() if len(rows)], dtype=np.int64)
    owners = [rows_of[user] for user, rows in users.items() if len(rows)]

    def rows(indices: Indices) -> NDArray[Any]:
        owner = np.searchsorted(starts, indices, side="right") - 1
        pieces = [owners[number][row - starts[number]] for number, row in zip(owner.tolist(), indices.tolist(), strict=True)]
        return np.stack(pieces) if pieces else np.zeros((0, *width))

    return Pool(path, np.concatenate(labels), rows, users if config.is_by_user else None, test=test)


@default_finding(Finding("D2", place="data.path"))
def _files(path: str, data_dir: Path | None) -> list[DataFile]:
    """The file, or the folder's files in order of their names."""
    folder = resolve(path, data_dir)
    if not folder.is_dir():
        return [one_file(path, data_dir)]
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."))
    if not found:
        raise ConfigError(f"data folder {path!r} has 0 files that end in {_SUFFIX}, want at least one")
    return [one_file(str(Path(path) / name), data_dir) for name in found]


@default_finding(Finding("T1"))
def _users(file: DataFile) -> list[tuple[str, Mapping[str, Any]]]:
    wanted = 'want an object with "users" and "user_data"'
    try:
        size = file.path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigError(f"{file.label} has {size:,} bytes, want at most {_MAX_BYTES:,}: split it into several files of users")
        content = json.loads(file.path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file.label} cannot be read ({error}), {wanted} in JSON") from error
    data = content.get("user_data") if isinstance(content, dict) else None
    listed = content.get("users") if isinstance(content, dict) else None
    if not isinstance(data, dict) or not isinstance(listed, list) or not all(isinstance(user, str) for user in listed):
        raise ConfigError(f"{file.label} is no LEAF file, {wanted}")
    found: list[tuple[str, Mapping[str, Any]]] = []
    for user in listed:
        name = check_name(user, f"{file.label}, users")
        record = data.get(user)  # under the name before normalisation
        if not isinstance(record, dict):
            raise ConfigError(f"{file.label}: user {name!r} is in users and not in user_data, want it in both")
        found.append((name, record))
    return found


@default_finding(Finding("N2", role="label"))
def _numbers(record: Mapping[str, Any], key: str, where: str, what: str) -> Array:
    found = _array(record, key, where)
    if found.ndim != 1:
        raise ConfigError(f"{where}: {key} has shape {found.shape}, want a list with one {what} for each row")
    return found.astype(np.float64)


@default_finding(Finding("N2", role="feature"))
def _rows(config: LeafData, record: Mapping[str, Any], where: str, n_rows: int) -> NDArray[Any]:
    """(m, p) numbers, or (m, *shape)."""
    found = _array(record, "x", where)
    if len(found) != n_rows or (n_rows and found.ndim < 2):
        raise ConfigError(f"{where}: x has shape {found.shape} and y has {n_rows} labels, want a list of numbers for each label")
    if config.shape is not None:
        if found.size != n_rows * int(np.prod(config.shape)):
            raise ConfigError(f"{where}: x has shape {found.shape}, want rows of shape {list(config.shape)} (data.shape)")
        found = found.reshape(n_rows, *config.shape)
    found = found.astype(np.float64)
    with default_finding(Finding("N3", role="feature")):
        check_finite(found.reshape(n_rows, -1), np.arange(n_rows), [f"x[{i}]" for i in range(found[:1].size)], where)
    return found


def _array(record: Mapping[str, Any], key: str, where: str) -> NDArray[Any]:
    value = record.get(key)
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {key} is {'missing' if value is None else type(value).__name__}, want a list")
    try:
        found = np.array(value)
    except ValueError:
        raise ConfigError(f"{where}: {key} has rows of different lengths, want them equal") from None
    if found.dtype.kind not in "iuf" and found.size:
        raise ConfigError(f"{where}: {key} holds other than numbers, want numbers (for text see the sources roles and tweets)")
    return found
