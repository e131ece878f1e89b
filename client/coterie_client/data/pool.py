"""Labelled rows that a partition gives to users.

A source lists its labels first and decodes rows on demand, so a client decodes only the rows of its own users. Labels, seed and partition
alone decide who gets which rows. The users that a client loads do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.partition import Partition
from coterie_client.data.users import UserData


@dataclass(frozen=True, eq=False)
class Pool:
    """Rows 0 to n - 1 with their labels. `rows` maps distinct row numbers, in any order, to their features (len, ...)."""

    where: str  # the name of the source in messages
    target: Array  # (n,)
    rows: Callable[[Indices], NDArray[Any]]
    users: Mapping[str, Indices] | None = None  # the rows of each natural user, ascending
    clusters: Mapping[str, str] = field(default_factory=dict)  # of those natural users whose cluster is known
    class_names: Sequence[str] = ()  # of labels 0, 1, ..., if they have names
    test: Pool | None = None  # the source's own test rows; None: each user holds out some of its rows


@dataclass(frozen=True, eq=False)
class Share:
    """The rows of the pool that one user gets, ascending, and its test rows. Test rows belong to `Pool.test` if there is one."""

    name: str
    cluster: str | None
    rows: Indices
    test_rows: Indices


@dataclass(frozen=True)
class UserSummary:
    name: str
    n_rows: int
    n_test: int
    labels: Mapping[float, int] | None  # number of training rows by label; None: some target is not a whole number


def load_shares(pool: Pool, partition: Partition | None, shares: Sequence[Share], names: Collection[str] | None) -> list[UserData]:
    """The users in `names` (None: all) with their rows, which are read in one batch."""
    mine = [share for share in shares if names is None or share.name in names]
    if not mine:
        return []
    relabelled = relabelling(pool, partition)
    source = pool.test or pool
    of_users, tests_of_users = [share.rows for share in mine], [share.test_rows for share in mine]
    train, test = _features(pool, of_users), _features(source, tests_of_users)
    if not any(map(len, test)):
        test = [block[:0] for block in train]
    for block in test:
        if block.shape[1:] != train[0].shape[1:]:
            said = f"{source.where} has test rows of shape {list(block.shape[1:])}, want {list(train[0].shape[1:])} as training rows"
            raise ConfigError(said)
    targets = _split(relabelled(pool.target[np.concatenate(of_users)]), of_users)
    test_targets = _split(relabelled(source.target[np.concatenate(tests_of_users)]), tests_of_users)
    both = zip(mine, train, targets, test, test_targets, strict=True)
    return [UserData(share.name, share.cluster, x, y, test_x, test_y) for share, x, y, test_x, test_y in both]


def _features(pool: Pool, of_users: Sequence[Indices]) -> list[NDArray[Any]]:
    block = np.ascontiguousarray(pool.rows(np.concatenate(of_users)))
    block.flags.writeable = False
    return _split(block, of_users)


def _split(block: NDArray[Any], of_users: Sequence[Indices]) -> list[NDArray[Any]]:
    """The rows of each user, as views of one block."""
    return np.split(block, np.cumsum([len(rows) for rows in of_users])[:-1])


def chosen_classes(pool: Pool, partition: Partition | None) -> Array | None:
    """The labels in `partition.classes`, in its order; None: all. ConfigError for a class without rows."""
    if partition is None or partition.classes is None:
        return None
    chosen = []
    for given in partition.classes:
        label = given
        if isinstance(given, str):
            if given not in pool.class_names:
                some = ", ".join(map(repr, pool.class_names[:10])) + (", ..." if len(pool.class_names) > 10 else "")
                wanted = f"want one of {some or 'the whole numbers of its labels'}"
                raise ConfigError(f"class {given!r} of partition.classes is not in {pool.where}, {wanted}")
            label = pool.class_names.index(given)
        if not (pool.target == label).any():
            raise ConfigError(f"class {given!r} of partition.classes has 0 rows in {pool.where}, want at least one")
        chosen.append(float(label))
    return np.array(chosen)


def relabelling(pool: Pool, partition: Partition | None) -> Callable[[Array], Array]:
    """A function from labels of the pool to labels of the users. It returns read-only arrays."""
    chosen = chosen_classes(pool, partition) if partition is not None and partition.relabel else None

    def relabelled(target: Array) -> Array:
        labels = target.copy()
        if chosen is not None:
            order = np.argsort(chosen)
            labels = order[np.searchsorted(chosen[order], target)].astype(np.float64)
        labels.flags.writeable = False
        return labels

    return relabelled


def summaries(pool: Pool, partition: Partition | None, shares: Sequence[Share]) -> list[UserSummary]:
    """Counts for each user; no rows are read."""
    relabelled = relabelling(pool, partition)
    return [summary(share.name, relabelled(pool.target[share.rows]), len(share.test_rows)) for share in shares]


def summary(name: str, target: Array, n_test: int) -> UserSummary:
    """Counts for a user with these targets (m,)."""
    is_whole = bool(np.equal(target, np.floor(target)).all())
    return UserSummary(name, len(target), n_test, Counter(target.tolist()) if is_whole else None)
