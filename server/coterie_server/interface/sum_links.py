"""The links over which exact sums travel, for closed forms: one sum of each group goes up from each member that has users of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.arrays import Indices, distinct
from coterie_server.interface.expected import Key

# Scopes of the ledger in a run with aggregators.
_WITHIN, _BETWEEN = "within-cluster", "between-cluster"


@dataclass(frozen=True)
class SumLinks:
    """Which member of the coordinator has each user."""

    host_of: Indices  #: (n,) the number of the user's host or aggregator
    cluster_of: Indices  #: (n,) the user's known cluster, -1 for none
    hosts_below: Indices | None = None  #: (k,) in a run with aggregators, the hosts of each cluster
    has_all_groups: bool = False  #: whether a host sends a sum of every group, as with masks, which hide of which it has users
    n_shares: int = 0  #: with `privacy.where: hosts`, how many hosts a total is of at least, each with its share of the noise

    def n_sums(self, users: Indices, groups: Indices | None = None) -> int:
        """How many sums come to the coordinator from these users, given the groups (n,) of all users."""
        found = np.zeros(users.size, dtype=np.int64) if groups is None else groups[users]
        if self.has_all_groups and groups is not None:
            return distinct(self.host_of[users]).size * (int(groups.max(initial=-1)) + 1)
        return _n_pairs(self.host_of[users], found)

    def sums_up(self, step: str, times: float, groups: Indices) -> dict[Key, float]:
        """The sums of all users in these groups (n,), so many times.

        With aggregators, the hosts of a cluster are known by number alone. Where a cluster has several groups there is no closed form of
        what travels inside.
        """
        between = times * self.n_sums(np.arange(self.host_of.size), groups)
        if self.hosts_below is None:
            return {(step, "up"): between}
        counts: dict[Key, float] = {(step, "up", _BETWEEN): between}
        if _n_pairs(self.cluster_of, groups) == np.unique(self.cluster_of).size:
            counts[step, "up", _WITHIN] = times * float(self.hosts_below.sum())
        return counts


def _n_pairs(first: Indices, second: Indices) -> int:
    return len({*zip(first.tolist(), second.tolist(), strict=True)})
