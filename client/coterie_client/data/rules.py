"""Partition rules of installed packages, or of the client's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
from coterie_client.data.sources import NoOptions
from coterie_client.user_code import user_code

O = TypeVar("O", bound=Settings)


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
    rule = plugins.load("partition", name)
    if not isinstance(rule, PartitionRule):
        raise ConfigError(f"partition {name!r} is a {type(rule).__name__}, want a coterie.plugin.PartitionRule", Finding("L4"))
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
            raise ConfigError(
                f"partition {name!r} gives user {user!r} {mine.dtype} of shape {mine.shape}, want row numbers (m,), at least one"
            )
        for row in mine.tolist():
            if row not in there:
                raise ConfigError(f"partition {name!r} gives user {user!r} row {row}, want one of the {len(rows)} rows to deal")
            if (other := owners.setdefault(row, user)) != user:
                raise ConfigError(f"partition {name!r} gives row {row} to users {other!r} and {user!r}, want each row once")
        if len(set(mine.tolist())) < mine.size:
            raise ConfigError(f"partition {name!r} gives user {user!r} a row twice, want each row once")
