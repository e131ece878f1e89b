"""Which users each client host serves, where all users can be listed on this machine: by position, as `--users` of a client counts them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from coterie.errors import ConfigError
from coterie.record.ledger import as_ranges
from coterie.text.names import natural_key
from coterie_client.data import UserHead


def by_cluster(heads: Sequence[UserHead], wanted: Sequence[str] = ()) -> dict[str, list[int]]:
    """The positions of each known cluster's users. ConfigError when a user has none, or a cluster that is `wanted` has no users."""
    positions: dict[str, list[int]] = {}
    for position, head in enumerate(heads):
        if not head.cluster:
            raise ConfigError(f"user {head.name!r} has no known cluster, want one for every user with federation.topology 'clusters'")
        positions.setdefault(head.cluster, []).append(position)
    missing = next((name for name in wanted if name not in positions), None)
    if missing is not None:
        raise ConfigError(f"cluster {missing!r} has no users, but federation.clusters names it")
    return {cluster: positions[cluster] for cluster in sorted(positions, key=natural_key)}


def divided(positions: Sequence[int], n_hosts: int, cluster: str | None = None) -> list[Sequence[int]]:
    """The positions (of a cluster's users) spread evenly over the hosts, in order. ConfigError when a host would have none."""
    n_users = len(positions)
    if n_hosts > n_users:
        whose = f"{n_users} users" if cluster is None else f"the {n_users} users of cluster {cluster!r}"
        raise ConfigError(f"{n_hosts} hosts for {whose}: want at most one host for each user")
    bounds = [n_users * i // n_hosts for i in range(n_hosts + 1)]
    return [positions[bounds[i] : bounds[i + 1]] for i in range(n_hosts)]


def selection(share: Sequence[int], cluster: str | None = None, n_hosts: int = 0) -> tuple[str, str]:
    """The option of a client that chooses these users; `n_hosts` is how many hosts the cluster has."""
    if cluster is not None and n_hosts == 1:
        return "--cluster", cluster
    return "--users", re.sub("[0-9]+", r"#\g<0>", as_ranges(np.array(share)))
