"""The users of each client host, if this machine can list all users: by position, as `--users` of a client counts them."""

import re
from collections.abc import Sequence

import numpy as np

from coterie.errors import ConfigError
from coterie.record.ledger import as_ranges
from coterie.text.names import natural_key, shares
from coterie_client.data import UserHead


def by_cluster(heads: Sequence[UserHead], wanted: Sequence[str] = ()) -> dict[str, list[int]]:
    """The positions of each known cluster's users. ConfigError when a user has none, or a cluster that is `wanted` has no users."""
    positions: dict[str, list[int]] = {}
    for position, head in enumerate(heads):
        if not head.cluster:
            raise ConfigError(
                f"user {head.name!r} has no known cluster, want one for every user: federation.topology has aggregators of clusters"
            )
        positions.setdefault(head.cluster, []).append(position)
    if missing := [name for name in wanted if name not in positions]:
        raise ConfigError(f"cluster {missing[0]!r} has no users, but federation.clusters names it")
    return {cluster: positions[cluster] for cluster in sorted(positions, key=natural_key)}


def divided(positions: Sequence[int], n_hosts: int, cluster: str | None = None) -> list[Sequence[int]]:
    """The positions (of a cluster's users) spread evenly over the hosts, in order. ConfigError when a host would have none."""
    n_users = len(positions)
    if n_hosts > n_users:
        whose = f"{n_users} users" if cluster is None else f"the {n_users} users of cluster {cluster!r}"
        raise ConfigError(f"{n_hosts} hosts for {whose}: want at most one host for each user")
    return [positions[share.start : share.stop] for share in shares(n_users, n_hosts)]


def selection(share: Sequence[int], cluster: str | None = None, n_hosts: int = 0) -> tuple[str, str]:
    """The option of a client that chooses these users; `n_hosts` is how many hosts the cluster has."""
    if cluster is not None and n_hosts == 1:
        return "--cluster", cluster
    return "--users", re.sub("[0-9]+", r"#\g<0>", as_ranges(np.array(share))).replace("-", "..")
