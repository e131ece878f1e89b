"""The interfaces of data sources and partition rules in Python. A source returns users, or labelled rows that a partition deals to users.

The experiment may come from the coordinator. If it could name any function, it could call "subprocess:call". So a source must be a
`DataSource`, or a function marked with `@user_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from coterie.arrays import Array, Indices
from coterie.draws.streams import Stream, stream
from coterie.errors import ConfigError
from coterie.experiment import plugins
from coterie.experiment.partition import Partition
from coterie.experiment.settings import Settings, validated
from coterie.findings import Finding
from coterie.text.names import check_name
from coterie.user_code import user_code
from coterie_client.data import paths

MARK = "__coterie_user_source__"
F = TypeVar("F", bound=Callable[..., Iterable[Any]])
O = TypeVar("O", bound=Settings)


class UserRecord(Protocol):
    """One user as a source returns it: a `User`, a `UserData`, or any object with these attributes.

    Features are numbers (n, p). For networks they may have more axes; bytes (n, channels, height, width) stay bytes. `target` (n,),
    `cluster`, `test_features` (m_test, ...) and `test_target` (m_test,) may be None or absent. Without test rows, the experiment's
    `test_fraction` of the n rows is held out.
    """

    @property
    def name(self) -> str: ...
    @property
    def features(self) -> ArrayLike:  # (n, p) or (n, ...)
        ...


@dataclass(frozen=True, eq=False)
class User:
    name: str
    features: ArrayLike  # (n, p) or (n, ...)
    target: ArrayLike | None = None  # (n,)
    cluster: str | None = None  # its known cluster
    test_features: ArrayLike | None = None  # (m_test, ...)
    test_target: ArrayLike | None = None  # (m_test,)


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows that the experiment's `data.partition` deals to users."""

    features: Any  # (n, ...): an array, or an object such as a memory map whose `features[rows]` is an array (len(rows), ...)
    labels: ArrayLike  # (n,) whole numbers from 0
    users: Mapping[str, ArrayLike] | None = None  # the row numbers of each natural user, from 0; None: rows have no users
    class_names: Sequence[str] = ()  # of labels 0, 1, ..., if they have names
    test: LabelledRows | None = None  # None: each user's `test_fraction` is held out


class NoOptions(Settings):
    """Accepts no options."""


@dataclass(frozen=True)
class SourceRequest(Generic[O]):
    """The input of a source. The same request must give the same users in any process."""

    options: O  # `data.options` of the experiment
    seed: int  # of the experiment
    folder: Path | None  # the client's data folder; None: the working directory, and any path is allowed

    def path(self, name: str) -> Path:
        """The resolved path of a file in the data folder. ConfigError when it lies outside: the experiment may be the coordinator's."""
        return paths.resolve(name, self.folder)


@dataclass(frozen=True)
class DataSource(Generic[O]):
    """A data source. `options` is the subclass of `Settings` that checks `data.options`."""

    read: Callable[[SourceRequest[O]], Iterable[UserRecord] | LabelledRows]
    options: type[O] = NoOptions  # type: ignore[assignment]  # which is what O then is


def user_source(function: F) -> F:
    """Marks a function (options, seed) -> all users, so that experiments may call it. The same input must give the same users anywhere."""
    setattr(function, MARK, True)
    return function


@dataclass(frozen=True)
class PartitionRequest(Generic[O]):
    """The input of a rule. The same request must give the same users in any process, so rules draw from `stream` only."""

    options: O  # `data.partition.options` of the experiment
    rows: Indices  # (n,) row numbers to deal, ascending: those of `data.partition.classes`, or all
    labels: Array  # (n,) whole numbers from 0
    n_users: int | None  # `data.partition.users`
    users: Mapping[str, Indices] | None  # the rows of each natural user among these, if the source has users
    seed: int

    def stream(self, *index: int | str) -> Stream:
        """Random numbers: the same for the same seed and index, in any process and with any version of NumPy."""
        return stream(self.seed, "partition rule", *index)


@dataclass(frozen=True)
class PartitionRule(Generic[O]):
    """A rule: `deal` returns the rows of each user. No row may go to two users; rows may be left over."""

    deal: Callable[[PartitionRequest[O]], Mapping[str, ArrayLike]]
    options: type[O] = NoOptions  # type: ignore[assignment]  # which is what O then is


def dealt(partition: Partition, rows: Indices, labels: Array, users: Mapping[str, Indices] | None, seed: int) -> dict[str, Indices]:
    """Each user's rows, ascending. ConfigError when the rule cannot be used, or its result does not divide the rows."""
    name, finding = partition.by, Finding("D5", place="data.partition.by")
    rule: PartitionRule[Any] = plugins.loaded("partition", name, PartitionRule)
    options = validated(rule.options, partition.options, "data.partition.options")
    request: PartitionRequest[Any] = PartitionRequest(options, rows, labels, partition.users, users, seed)
    with user_code(f"partition {name!r}", finding, ConfigError):
        found = {check_name(user, f"partition {name!r}"): np.asarray(mine) for user, mine in rule.deal(request).items()}
    _check(name, found, rows)
    return {user: np.sort(mine).astype(np.int64) for user, mine in found.items()}


def _check(name: str, found: Mapping[str, Any], rows: Indices) -> None:
    if not found:
        raise ConfigError(f"partition {name!r} has dealt to 0 users, want at least one")
    owners: dict[int, str] = {}
    there = set(rows.tolist())
    for user, mine in found.items():
        if mine.ndim != 1 or mine.dtype.kind not in "iu" or not mine.size:
            said = f"partition {name!r} gives user {user!r} {mine.dtype} of shape {mine.shape}, want row numbers (m,), at least one"
            raise ConfigError(said)
        for row in mine.tolist():
            if row not in there:
                raise ConfigError(f"partition {name!r} gives user {user!r} row {row}, want one of the {len(rows)} rows to deal")
            if (other := owners.setdefault(row, user)) != user:
                raise ConfigError(f"partition {name!r} gives row {row} to users {other!r} and {user!r}, want each row once")
        if len(set(mine.tolist())) < mine.size:
            raise ConfigError(f"partition {name!r} gives user {user!r} a row twice, want each row once")
