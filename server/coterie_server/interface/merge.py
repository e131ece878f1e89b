"""Splits a parent's messages over hosts and merges the hosts' answers in member order. Pure functions of arrays.

The result never depends on how users are spread over hosts nor on the order of arrival.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ProtocolError, RunError
from coterie.wire.fixed_point import added
from coterie.wire.messages import Message, PerCluster, PerHost, Rows, Total, select, select_clusters
from coterie.wire.precision import first_bad

_MAX_SHOWN = 4


class Layout:
    """Which members live on which host, and of which known clusters they are."""

    def __init__(self, own: Mapping[str, Indices], n_members: int, cluster_of: Indices | None = None) -> None:
        self.own = dict(own)  # host -> its member indices, ascending
        none = np.full(n_members, -1, dtype=np.int64)
        found = {host: np.unique((none if cluster_of is None else cluster_of)[indices]) for host, indices in self.own.items()}
        self.clusters = {host: numbers[numbers >= 0] for host, numbers in found.items()}  # host -> numbers of its clusters, ascending
        self.hosts = tuple(self.own)
        self.host_of = np.full(n_members, -1, dtype=np.int64)
        for place, indices in enumerate(self.own.values()):
            self.host_of[indices] = place
        self.slices = {host: _as_slice(indices) for host, indices in self.own.items()}

    def hosts_of(self, members: Indices | None) -> list[str]:
        """The hosts of these members (all hosts for None), in a fixed order."""
        if members is None:
            return list(self.hosts)
        return [self.hosts[place] for place in np.unique(self.host_of[members])]

    def part_for(self, host: str, message: Message) -> Message | None:
        """The part of `message` for `host`, or None."""
        if isinstance(message, PerCluster):
            return select_clusters(message, self.clusters[host])
        if not isinstance(message, Rows):
            return message
        if message.users is None:
            return message if len(self.hosts) == 1 else select(message, self.slices[host], None)
        rows = np.flatnonzero(self.host_of[message.users] == self.hosts.index(host))
        return select(message, rows, message.users[rows]) if rows.size else None


def _as_slice(indices: Indices) -> Indices | slice:
    """A slice where possible: its rows are then a view, not a copy."""
    if indices.size and indices[-1] - indices[0] == indices.size - 1:
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


def check_owners(host: str, message: Message, own: Indices, clusters: Indices) -> None:
    """ProtocolError unless every row belongs to a user, or to a cluster, of the host."""
    if isinstance(message, PerCluster) and not np.array_equal(message.clusters, clusters):
        raise ProtocolError(f"host {host!r} sent {message.kind} for clusters {message.clusters.tolist()}, wanted {clusters.tolist()}")
    users = message.users if isinstance(message, Rows) else None
    if users is None or users.size == 0:
        return
    places = np.searchsorted(own, users)
    wrong = users[(places == own.size) | (own[np.minimum(places, own.size - 1)] != users)]
    if wrong.size:
        raise ProtocolError(f"host {host!r} sent {message.kind} for member {wrong[0]}, which is not one of its users")


def check_kinds(host: str, messages: Sequence[Message]) -> None:
    """ProtocolError unless every message of a reply has owners, and none came twice; messages with weights may come for each user."""
    found: set[type[Message]] = set()
    for message in messages:
        cls = type(message)
        if not isinstance(message, Rows | PerCluster | PerHost | Total):
            raise ProtocolError(f"host {host!r} sent {cls.kind}, but a host's messages must have owners")
        if isinstance(message, Total) and (np.diff(message.groups) <= 0).any():
            raise ProtocolError(f"host {host!r} sent {cls.kind} for groups that are not ascending")
        if cls in found and not cls.carries_weights:
            raise ProtocolError(f"host {host!r} sent {cls.kind} twice in one reply")
        found.add(cls)


def check_finite(host: str, message: Message, own: Indices, names: Sequence[str], round_number: int) -> None:
    """RunError that names host, user, field and round of a NaN or an infinity."""
    if (bad := first_bad(message)) is None:
        return
    users = message.users if isinstance(message, Rows) else None
    member = own[0] if bad.row is None else (own if users is None else users)[bad.row]
    place = f"{message.kind}.{bad.field} in round {round_number}"
    whose = f"cluster {message.clusters[0]}" if isinstance(message, PerCluster) else f"user {names[member]!r}"
    raise RunError(f"host {host!r} returned {bad.value} for {whose} in {place}, wanted finite numbers")


def weights_of(answers: Mapping[str, Sequence[Message]], layout: Layout) -> dict[type[Message], list[Message]]:
    """The messages with weights in member order: one for each run of users whose rows came side by side. Their rows are views.

    ProtocolError for one that came twice for a user.
    """
    found: dict[type[Message], list[tuple[str, Rows]]] = {}
    for host in layout.hosts:
        for message in answers.get(host, ()):
            if isinstance(message, Rows) and type(message).carries_weights:
                found.setdefault(type(message), []).append((host, message))
    return {cls: _in_runs(parts, layout) for cls, parts in found.items()}


def _in_runs(parts: Sequence[tuple[str, Rows]], layout: Layout) -> list[Message]:
    for name, _ in parts[0][1].specs:
        _check_rows_agree(name, parts)
    of_parts = [layout.own[host] if message.users is None else message.users for host, message in parts]
    sizes = [users.size for users in of_parts]
    users, part_of = np.concatenate(of_parts), np.repeat(np.arange(len(parts)), sizes)
    row_of = np.concatenate([np.arange(size) for size in sizes])
    order = np.argsort(users, kind="stable")
    users, part_of, row_of = users[order], part_of[order], row_of[order]
    if (twice := np.flatnonzero(users[1:] == users[:-1])).size:
        host, message = parts[part_of[twice[0] + 1]]
        raise ProtocolError(f"host {host!r} sent {message.kind} twice for one user in one reply")
    breaks = np.flatnonzero((np.diff(part_of) != 0) | (np.diff(row_of) != 1)) + 1
    ends = [0, *breaks.tolist(), users.size] if users.size else []
    return [
        select(parts[part_of[start]][1], slice(row_of[start], row_of[start] + end - start), users[start:end])
        for start, end in itertools.pairwise(ends)
    ]


def one_by_one(runs: Sequence[Message]) -> Iterator[Message]:
    """A message for each user of such messages."""
    for message in runs:
        assert isinstance(message, Rows) and message.users is not None  # noqa: S101, PT018 - see `weights_of`
        for row in range(message.users.size):
            yield select(message, slice(row, row + 1), message.users[row : row + 1])


def merged(answers: Mapping[str, Sequence[Message]], layout: Layout) -> dict[type[Message], Message]:
    """One message of each kind from the hosts' messages, its rows in member order; users=None when everyone answered. Totals are added.

    Each host's messages have passed `check_kinds`. Those with weights are left to `weights_of`.
    """
    by_kind: dict[type[Message], list[tuple[str, Rows]]] = {}
    by_cluster: dict[type[Message], list[tuple[str, PerCluster]]] = {}
    totals: dict[type[Total], list[tuple[str, Total]]] = {}
    for host in layout.hosts:
        for message in answers.get(host, ()):
            if isinstance(message, PerCluster):
                by_cluster.setdefault(type(message), []).append((host, message))
            elif isinstance(message, Total):
                totals.setdefault(type(message), []).append((host, message))
            elif isinstance(message, Rows) and not type(message).carries_weights:
                by_kind.setdefault(type(message), []).append((host, message))
    in_member_order = {cls: _merge_kind(cls, parts, layout) for cls, parts in by_kind.items()}
    in_member_order |= {cls: _merge_clusters(cls, parts) for cls, parts in by_cluster.items()}
    return in_member_order | {cls: _added(cls, parts) for cls, parts in totals.items()}


def _added(cls: type[Total], parts: Sequence[tuple[str, Total]]) -> Message:
    """The sums over the members. They have the same bits in any order."""
    columns: dict[str, Indices] = {}
    groups = parts[0][1].groups
    for name, _ in cls.specs:
        if name != "groups":
            _check_rows_agree(name, parts)
            groups, columns[name] = added([(message.groups, getattr(message, name)) for _, message in parts])
    return cls(groups=groups, **columns)


def _merge_clusters(cls: type[Message], parts: Sequence[tuple[str, PerCluster]]) -> Message:
    """The aggregators' rows in cluster order. Each row is of a cluster of its aggregator: `check_owners` has checked it."""
    numbers = np.concatenate([message.clusters for _, message in parts])
    if np.unique(numbers).size < numbers.size:
        raise ProtocolError(f"{cls.kind} came twice for one cluster, wanted it once")
    order = np.argsort(numbers)
    for name, _ in cls.specs:
        _check_rows_agree(name, parts)
    return cls(**{name: np.concatenate([getattr(message, name) for _, message in parts])[order] for name, _ in cls.specs})


def check_senders(kind: str, found: Sequence[int] | Indices | None, wanted: Indices) -> None:
    """ProtocolError unless the members found are exactly those wanted (sorted); None: the message does not name them."""
    if found is None or not np.array_equal(found, wanted):
        came = "for members that it does not name" if found is None else f"for members {list(map(int, found[:_MAX_SHOWN]))}"
        raise ProtocolError(f"{kind} came {came}, wanted it once for each of {wanted[:_MAX_SHOWN].tolist()}, {wanted.size} in all")


def _merge_kind(cls: type[Message], parts: Sequence[tuple[str, Rows]], layout: Layout) -> Message:
    complete = len(parts) == len(layout.hosts) and all(message.users is None for _, message in parts)
    if complete and len(parts) == 1:
        return parts[0][1]
    if complete:
        return cls(**{name: _interleaved(name, parts, layout) for name, _ in cls.specs})
    users = np.concatenate([layout.own[host] if message.users is None else message.users for host, message in parts])
    order = np.argsort(users, kind="stable")
    for name, _ in cls.specs:
        _check_rows_agree(name, parts)
    arrays = {name: np.concatenate([getattr(message, name) for _, message in parts])[order] for name, _ in cls.specs}
    return cls(users=users[order], **arrays)  # type: ignore[call-arg]


def _interleaved(name: str, parts: Sequence[tuple[str, Rows]], layout: Layout) -> np.ndarray[Any, Any]:
    first = _check_rows_agree(name, parts)
    result = np.empty((layout.host_of.size, *first.shape[1:]), dtype=first.dtype)
    for host, message in parts:
        result[layout.slices[host]] = getattr(message, name)
    result.flags.writeable = False
    return result


def _check_rows_agree(name: str, parts: Sequence[tuple[str, Message]]) -> np.ndarray[Any, Any]:
    """The first host's array. ProtocolError where another's rows have another shape."""
    first: np.ndarray[Any, Any] = getattr(parts[0][1], name)
    for host, message in parts:
        shape = getattr(message, name).shape
        if shape[1:] != first.shape[1:]:
            raise ProtocolError(f"host {host!r} sent {message.kind}.{name} with rows of shape {shape[1:]}, wanted {first.shape[1:]}")
    return first
