"""Relations between users: the matrix A (n, n) of `coterie.methods.fed_mtl`, given, learnt, applied and bounded.

Models are rows here, W' (n, d): the penalty is mu/2 tr(W A W') = mu/2 sum_i <w_i, (A W')_i>.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.methods.fed_mtl import Matrix
from coterie.text.quoting import shortened

MEAN: Array = np.zeros((0, 0))  # stands for I - 11'/n, which is applied without a matrix
_ROUNDING = 1e-9  # of the largest entry: the precision of numbers in files
_CELL_BYTES, _MORE_BYTES = 64, 65_536  # the greatest size of a file


def given(relations: Matrix | str, n: int) -> Array:
    """A as rows or in a file. ConfigError unless it can be read, is finite, (n, n), symmetric and positive semidefinite."""
    where = f"{shortened(relations)} (method.relations)" if isinstance(relations, str) else "method.relations"
    try:
        a = _read(Path(relations), n) if isinstance(relations, str) else _matrix(relations)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{where} holds no matrix of numbers: {shortened(str(error))}") from None
    _check(a, n, where)
    return np.asarray((a + a.T) / 2)


def learnt(w: Array, floor: float) -> Array:
    """A = (Omega + eps I)^{-1} for models (n, d), Omega the minimiser of tr(W (Omega + eps I)^{-1} W') over Omega >= 0 with tr Omega = n.

    Omega has the singular vectors of W. Its eigenvalues are max(0, c s_k - eps), s_k those of W, with the c of the right trace.
    """
    n = len(w)
    vectors, s, _ = np.linalg.svd(w)
    if s[0] == 0:  # every Omega is a minimiser
        return np.eye(n) / (1 + floor)
    levels = (n + floor * np.arange(1, s.size + 1)) / np.cumsum(s)  # c, if the first 1, 2, .. eigenvalues are not 0
    n_positive = int((levels * s > floor).sum())
    inverse = np.full(n, 1 / floor)
    inverse[:n_positive] = 1 / (levels[n_positive - 1] * s[:n_positive])
    a = (vectors * inverse) @ vectors.T
    return np.asarray((a + a.T) / 2)


def applied(a: Array, w: Array) -> Array:
    """A W' (n, d)."""
    return a @ w if a.size else w - w.sum(axis=0) / len(w)


def bounds(a: Array, n: int) -> Array:
    """b (n,), in proportion to the diagonal of A, the least with A <= diag(b)."""
    if not a.size:
        return np.ones(n)
    diagonal = np.diag(a).clip(min=0)
    related = diagonal > 0  # a row of a semidefinite matrix with 0 there is 0
    root = np.sqrt(diagonal[related])
    sigma = np.linalg.eigvalsh(a[np.ix_(related, related)] / np.outer(root, root))[-1] if related.any() else 0.0
    return np.asarray(sigma * diagonal)


def _read(path: Path, n: int) -> Array:
    most = _CELL_BYTES * n * n + _MORE_BYTES
    if (size := path.stat().st_size) > most:
        raise ValueError(f"it has {size} bytes, want at most {most} for {n} users")
    if path.suffix == ".npy":
        with path.open("rb") as file:
            found = np.lib.format.read_array(file, allow_pickle=False)
        if found.dtype.kind not in "iuf":
            raise ValueError(f"it holds {found.dtype}")
        return found.astype(np.float64)
    lines = path.read_text(encoding="utf-8").splitlines()
    return _matrix([[float(cell) for cell in line.split(",")] for line in lines if line.strip()])


def _matrix(rows: Sequence[Sequence[float]]) -> Array:
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(f"row {number} has {len(row)} numbers, and row 1 has {len(rows[0])}")
    return np.array(rows, dtype=np.float64)


def _check(a: Array, n: int, where: str) -> None:
    if a.shape != (n, n):
        wanted = f"[{n}, {n}]: a row and a column for each user, in the natural order of their names (u2 before u10)"
        raise ConfigError(f"{where} has the shape {list(a.shape)}, want {wanted}")
    if not np.isfinite(a).all():
        i, j = np.argwhere(~np.isfinite(a))[0].tolist()
        raise ConfigError(f"{where} has {a[i, j]} in row {i + 1}, column {j + 1}, want finite numbers")
    rounding = _ROUNDING * np.abs(a).max()
    if (np.abs(a - a.T) > rounding).any():
        i, j = np.argwhere(np.abs(a - a.T) > rounding)[0].tolist()
        found = f"{a[i, j]:g} in row {i + 1}, column {j + 1}, and {a[j, i]:g} in row {j + 1}, column {i + 1}"
        raise ConfigError(f"{where} has {found}, want a symmetric matrix")
    if (least := np.linalg.eigvalsh(a)[0]) < -n * rounding:
        raise ConfigError(f"{where} has the eigenvalue {least:.4g}, want none below 0: the penalty would have no minimum")
