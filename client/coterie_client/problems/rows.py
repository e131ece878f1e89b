"""Rows of many users in a few rectangular stacks.

Users of one stack have the same padded row count, which depends only on a user's own row count. So other users on the host affect neither
the shapes of a user's arithmetic nor the order of its sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.findings import Finding, Role

MIN_ROWS = 8


def padded_rows(m: int) -> int:
    """The next power of two or three quarters of one, at least `MIN_ROWS`. There are few sizes, and less than half is padding."""
    power = 1 << (m - 1).bit_length()
    return max(MIN_ROWS, power if m > 3 * power // 4 else 3 * power // 4)


@dataclass(frozen=True)
class Stack:
    """k users whose rows are padded to R. All arrays are C-contiguous.

    A padding row repeats its user's first row (a point where any loss is defined) and has weight 0.
    """

    members: Indices  # (k,) positions among the host's users, ascending
    features: Array  # (k, R, p)
    targets: Array  # (k, R)
    counts: Array  # (k,) the m_i, as float
    valid: Array  # (k, R) 1 for a row, 0 for padding

    def weights(self, reduction: str) -> Array:  # (k, R)
        """The weight of each row: 1/m_i or 1, and 0 for padding."""
        return self.valid / self.counts[:, None] if reduction == "mean" else self.valid


def stack_rows(features: Sequence[Array], targets: Sequence[Array]) -> list[Stack]:
    """Stacks by padded row count, ascending, without users that have no rows.

    features: (m_i, p) for each user. targets: (m_i,) for each user.
    """
    by_size: dict[int, list[int]] = {}
    for position, a in enumerate(features):
        if len(a):
            by_size.setdefault(padded_rows(len(a)), []).append(position)
    return [_stack(by_size[size], size, features, targets) for size in sorted(by_size)]


def _stack(members: list[int], size: int, features: Sequence[Array], targets: Sequence[Array]) -> Stack:
    counts = np.array([len(features[i]) for i in members], dtype=np.int64)
    a = np.empty((len(members), size, features[members[0]].shape[1]))
    y = np.empty((len(members), size))
    for k, i in enumerate(members):
        m = len(features[i])
        a[k, :m], a[k, m:] = features[i], features[i][0]
        y[k, :m], y[k, m:] = targets[i], targets[i][0]
    valid = (np.arange(size) < counts[:, None]).astype(np.float64)
    return Stack(np.array(members, dtype=np.int64), a, y, counts.astype(np.float64), valid)


def joined(arrays: Sequence[Array]) -> tuple[Array, Indices]:
    """All rows in one array (n, ...), and where each user's begin. No copy if they lie in one piece of memory, as those of a pool do."""
    first, width = arrays[0], arrays[0].itemsize * math.prod(arrays[0].shape[1:])
    starts = np.array([array.__array_interface__["data"][0] for array in arrays])
    ends = starts + [array.nbytes for array in arrays]
    starts -= starts.min()
    is_one = first.base is not None and all(array.base is first.base and array.flags.c_contiguous for array in arrays)
    if is_one and not (starts % width).any():
        lowest = arrays[int(starts.argmin())]
        shape = ((int(ends.max()) - lowest.__array_interface__["data"][0]) // width, *first.shape[1:])
        return as_strided(lowest, shape, (width, *first.strides[1:]), writeable=False), starts // width
    counts = np.array([len(array) for array in arrays])
    return np.concatenate(arrays), np.cumsum(counts) - counts


def read_features(names: Sequence[str], features: Sequence[Array], width: int | None) -> list[Array]:
    """Features as float64 (m_i, p), or `ConfigError` naming the user. `width` is p if it is known. Otherwise each user needs a row."""
    need_rows = width is None
    read: list[Array] = []
    for name, given in zip(names, features, strict=True):
        a = np.asarray(given, dtype=np.float64)
        if a.ndim != 2:
            raise ConfigError(f"user {name!r} has features of shape {a.shape}, wanted (rows, columns): rows of other shapes need a model")
        if not len(a) and need_rows:
            raise ConfigError(f"user {name!r} has no rows, it needs at least one", Finding("D4"))
        width = a.shape[1] if width is None else width
        if a.shape[1] != width:
            raise ConfigError(f"user {name!r} has rows of {a.shape[1]} features, the problem has {width}")
        if not np.isfinite(a).all():
            row, column = np.argwhere(~np.isfinite(a))[0]
            said = f"user {name!r} has {a[row, column]} in row {row}, feature {column}: wanted finite numbers"
            raise ConfigError(said, _not_finite(a, "feature"))
        read.append(a)
    return read


def read_targets(names: Sequence[str], targets: Sequence[Array], features: Sequence[Array]) -> list[Array]:
    """Targets as float64 (m_i,), or `ConfigError` naming the user."""
    read: list[Array] = []
    for name, given, a in zip(names, targets, features, strict=True):
        y = np.asarray(given, dtype=np.float64)
        if y.shape != (len(a),):
            raise ConfigError(f"user {name!r} has targets of shape {y.shape}, wanted {(len(a),)}: one for each row")
        if not np.isfinite(y).all():
            row = np.argmin(np.isfinite(y))
            raise ConfigError(f"user {name!r} has the target {y[row]} in row {row}: wanted finite numbers", _not_finite(y, "target"))
        read.append(y)
    return read


def _not_finite(array: Array, role: Role) -> Finding:
    return Finding("N3", int(np.count_nonzero(~np.isfinite(array))), role)
