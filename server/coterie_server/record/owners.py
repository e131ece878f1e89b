"""The users of a row of the ledger, those behind its link or those of its set, and their shares in a message."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Sequence

import numpy as np

from coterie.arrays import Indices
from coterie.record.ledger import of_ranges, peers_of
from coterie_server.record.rundb import WITHIN


class Owners:
    """The members of a row of the ledger: those of its set, or all behind its link."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        members = connection.execute("SELECT name, cluster, host FROM members ORDER BY position").fetchall()
        self.names = [name for name, _, _ in members]
        self.clusters = [cluster for _, cluster, _ in members]
        by_host: dict[str, list[int]] = {}
        for position, (_, _, host) in enumerate(members):
            by_host.setdefault(host, []).append(position)
        self._behind_hosts = {host: np.array(positions, dtype=np.int64) for host, positions in by_host.items()}

    def of(self, link: str, user_set: int | None) -> Indices:
        """The positions of the members."""
        if user_set is not None:
            return self._sets[user_set]
        aggregator = link.partition("/")[0].replace("%2F", "/").replace("%25", "%")
        found = self._behind.get(link)
        if found is None and (ends := peers_of(link)) is not None:
            return np.unique(np.concatenate([self.of(end, None) for end in ends]))
        return found if found is not None else self._behind.get(aggregator, np.zeros(0, dtype=np.int64))

    @functools.cached_property
    def _sets(self) -> dict[int, Indices]:
        return {number: of_ranges(text) for number, text in self._connection.execute("SELECT id, members FROM user_sets")}

    @functools.cached_property
    def _behind(self) -> dict[str, Indices]:
        """The users behind each link. For a link below an aggregator they are in the sets of its rows: all are in that of its session."""
        below = "SELECT DISTINCT link, user_set FROM ledger WHERE scope = ? AND user_set IS NOT NULL"
        sets_of: dict[str, list[Indices]] = {}
        for link, number in self._connection.execute(below, (WITHIN,)):
            sets_of.setdefault(link, []).append(self._sets[number])
        return self._behind_hosts | {link: np.unique(np.concatenate(listed)) for link, listed in sets_of.items()}

    @functools.cached_property
    def clusters_of_links(self) -> dict[str, str] | None:
        """The known cluster of each link; None where users of several clusters share a link."""
        links = [link for (link,) in self._connection.execute("SELECT DISTINCT link FROM ledger")]
        found = {link: {self.clusters[user] for user in self.of(link, None).tolist()} for link in links}
        return {link: min(those) for link, those in found.items()} if all(len(those) == 1 for those in found.values()) else None


class Parts:
    """The users of a row of the ledger, divided by user, by cluster, or not at all.

    `by` has the keys of the groups. Users and clusters that are not listed are left out; an empty list leaves nobody out.
    """

    def __init__(self, owners: Owners, by: Sequence[str], users: Sequence[str], clusters: Sequence[str]) -> None:
        self._owners = owners
        self.has_filter = bool(users or clusters)
        self._is_wanted = np.ones(len(owners.names), dtype=bool)
        for listed, of_each in ((users, owners.names), (clusters, owners.clusters)):
            if listed:
                self._is_wanted &= np.isin(np.array(of_each, dtype=object), listed)
        labels = {"user": owners.names, "cluster": owners.clusters}
        self._labels = {key: labels[key] for key in by if key in labels}
        self._known: dict[tuple[str, int | None], list[tuple[dict[str, str], float]]] = {}

    def of(self, link: str, user_set: int | None) -> list[tuple[dict[str, str], float]]:
        """The parts, by the labels that are keys of the query, and the share of each in a message."""
        found = self._known.get((link, user_set))
        if found is None:
            found = self._known[link, user_set] = self._divided(self._owners.of(link, user_set))
        return found

    def _divided(self, users: Indices) -> list[tuple[dict[str, str], float]]:
        if users.size == 0:  # no user is known behind the link
            return [] if self.has_filter else [(dict.fromkeys(self._labels, ""), 1.0)]
        counts: dict[tuple[str, ...], int] = {}
        for user in users[self._is_wanted[users]].tolist():
            label = tuple(of_each[user] for of_each in self._labels.values())
            counts[label] = counts.get(label, 0) + 1
        return [(dict(zip(self._labels, label, strict=True)), count / users.size) for label, count in counts.items()]

    def of_any(self, rows: str) -> list[dict[str, str]]:
        """The parts of the users of several rows, each once; `rows` is a JSON array of [link, set of users]."""
        found = {tuple(part.items()): part for link, user_set in json.loads(rows) for part, _ in self.of(link, user_set)}
        return list(found.values())
