"""Questions to the ledger of a run: totals in any grouping, of any part of it.

Measures: `vectors` (d-vectors), `scalars`, `payload_bytes` (scalars x item size), `message_bytes` (protobuf), `wire_bytes` (message and 5
bytes of gRPC header for each frame), `frames`. In each group a broadcast counts once in vectors and scalars, however many hosts it went to,
and once for each host in bytes and frames. Users behind one host share the bytes of its messages equally, and each of them counts the
vectors of its rows, and those of every broadcast, as its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.ledger import of_ranges
from coterie.wire import GRPC_FRAME_HEADER_BYTES
from coterie_server.rundb import WITHIN

KEYS = ("stage", "round", "step", "kind", "direction", "scope", "cluster", "link", "user", "attempt")
MEASURES = ("vectors", "scalars", "payload_bytes", "message_bytes", "wire_bytes", "frames")
SESSION = -1  # the "stage" of traffic outside all exchanges: hello, welcome, heartbeats, books, finish
SESSION_NAME = "session"
_ABOVE = f"CASE WHEN scope = '{WITHIN}' THEN substr(link, 1, instr(link, '/')) ELSE '' END"  # the aggregator of a link below one
_STAGE = f"CASE WHEN seq = 0 THEN {SESSION} ELSE stage END"


@dataclass(frozen=True)
class Query:
    """What is asked: `by` the keys of a group, of `KEYS`; of the others an empty one, or None, limits nothing.

    `useful` False asks for what was sent again, came too late or was repeated by a resumed run, None for both. Rounds are those of a stage;
    the start of a stage is round 0.
    """

    by: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    first_round: int | None = None
    last_round: int | None = None
    steps: tuple[str, ...] = ()
    directions: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    useful: bool | None = True


@dataclass
class Group:
    """The total of one group; `keys` has the values of `Query.by`, in its order. Numbers are no integers where users share a message."""

    keys: tuple[Any, ...]
    vectors: float = 0
    scalars: float = 0
    payload_bytes: float = 0
    message_bytes: float = 0
    frames: float = 0
    first: int = field(default=1 << 62, repr=False)  # the earliest row of the ledger in it

    @property
    def wire_bytes(self) -> float:
        """Message bytes and the header of each gRPC frame."""
        return self.message_bytes + GRPC_FRAME_HEADER_BYTES * self.frames

    def add(self, sums: Sequence[float], first: int, share: float = 1, share_of_bytes: float = 1) -> None:
        """Adds (vectors, scalars, payload bytes, message bytes, frames)."""
        vectors, scalars, payload, message, frames = sums
        self.vectors += share * vectors
        self.scalars += share * scalars
        self.payload_bytes += share_of_bytes * payload
        self.message_bytes += share_of_bytes * message
        self.frames += share_of_bytes * frames
        self.first = min(self.first, first)


def totals(connection: sqlite3.Connection, query: Query) -> list[Group]:
    """The groups, in order of stage and round where these are keys, then of first appearance in the ledger.

    ConfigError for a key, stage, step, direction, scope, cluster, link or user that the run does not have.
    """
    _check(connection, query)
    groups = _by_user(connection, query) if query.users or "user" in query.by else _plain(connection, query)
    names = _stage_names(connection)
    if "stage" in query.by:
        place = query.by.index("stage")
        for group in groups:
            group.keys = (*group.keys[:place], names[group.keys[place]], *group.keys[place + 1 :])
    order = {name: len(names) if number == SESSION else number for number, name in names.items()}
    leading = [place for place, key in enumerate(query.by) if key in ("stage", "round")]

    def rank(group: Group) -> tuple[Any, ...]:
        return (*(order[value] if isinstance(value, str) else value for value in map(group.keys.__getitem__, leading)), group.first)

    return sorted(groups, key=rank)


def _plain(connection: sqlite3.Connection, query: Query) -> list[Group]:
    """The sums of whole messages."""
    groups: dict[tuple[Any, ...], Group] = {}
    n = len(query.by)
    for row in _sums(connection, query, query.by):
        groups.setdefault(row[:n], Group(row[:n])).add(row[n : n + 5], row[n + 5])
    return list(groups.values())


def _by_user(connection: sqlite3.Connection, query: Query) -> list[Group]:
    """The sums with the messages of each link shared out among its users."""
    place = query.by.index("user") if "user" in query.by else None
    others = tuple(key for key in query.by if key != "user")
    names = [name for (name,) in connection.execute("SELECT name FROM members ORDER BY position")]
    wanted = np.isin(np.array(names), query.users) if query.users else np.ones(len(names), dtype=bool)
    members_of = _Owners(connection)
    groups: dict[tuple[Any, ...], Group] = {}
    n = len(others)
    for row in _sums(connection, query, others, owners=True):
        link, user_set, is_broadcast = row[n + 6 :]
        users = members_of(link, user_set)
        share = 1.0 if is_broadcast else 1.0 / max(users.size, 1)
        for user in users[wanted[users]].tolist():
            keys = row[:n] if place is None else (*row[:place], names[user], *row[place:n])
            groups.setdefault(keys, Group(keys)).add(row[n : n + 5], row[n + 5], share, 1.0 / users.size)
    return list(groups.values())


class _Owners:
    """Which members a row of the ledger is about: those of its set, or all behind its link."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sets = {number: of_ranges(text) for number, text in connection.execute("SELECT id, members FROM user_sets")}
        self._behind: dict[str, Indices] = {}
        by_host: dict[str, list[int]] = {}
        for position, host in connection.execute("SELECT position, host FROM members ORDER BY position"):
            by_host.setdefault(host, []).append(position)
        self._hosts = {host: np.array(positions, dtype=np.int64) for host, positions in by_host.items()}

    def __call__(self, link: str, user_set: int | None) -> Indices:
        if user_set is not None:
            return self._sets[user_set]
        return self._hosts.get(link, np.zeros(0, dtype=np.int64))


def _sums(connection: sqlite3.Connection, query: Query, by: Sequence[str], *, owners: bool = False) -> Iterable[tuple[Any, ...]]:
    """(*keys, vectors, scalars, payload bytes, message bytes, frames, first row), and with `owners` link, set of users and is_broadcast.

    Broadcasts apart, since only they need to be looked at exchange by exchange.
    """
    where, values = _where(connection, query)
    keys = [f"{_expression(key)} AS {key}_" for key in by] + (["link AS link__", "user_set", "is_broadcast"] if owners else [])
    names = [f"{key}_" for key in by] + (["link__", "user_set", "is_broadcast"] if owners else [])
    n = len(by)
    clusters = ""
    if "cluster" in by or query.clusters:
        pairs = _clusters_of_links(connection)
        marks = ",".join(["(?,?)"] * len(pairs)) or "(NULL,NULL)"
        clusters = f"WITH cluster_of(of_link, cluster) AS (VALUES {marks})"
        values = [*(text for pair in pairs.items() for text in pair), *values]
    table = "ledger LEFT JOIN cluster_of ON of_link = link" if clusters else "ledger"
    listed = ", ".join([*keys, ""])
    measures = "SUM(vectors) AS v, SUM(scalars) AS s, SUM(payload_bytes) AS p, SUM(message_bytes) AS m, SUM(frames) AS f"
    measures += ", MIN(ledger.rowid) AS first"
    single = f"{clusters} SELECT {listed}{measures} FROM {table} WHERE {where} AND NOT is_broadcast"  # noqa: S608 - columns are ours
    once = measures.replace("SUM(vectors)", "MAX(vectors)").replace("SUM(scalars)", "MAX(scalars)")
    each = ", ".join([*names, _ABOVE, "seq", "attempt", "resent", "kind"])
    inner = f"SELECT {listed}{once} FROM {table} WHERE {where} AND is_broadcast GROUP BY {each}"  # noqa: S608 - columns are ours
    outer = ", ".join([*names, "SUM(v), SUM(s), SUM(p), SUM(m), SUM(f), MIN(first)"])
    several = f"{clusters} SELECT {outer} FROM ({inner})"  # noqa: S608 - columns are ours
    group_by = f" GROUP BY {', '.join(names)}" if names else ""
    for statement in (single, several):
        for row in connection.execute(statement + group_by, values):
            if row[-1] is not None:
                yield (*row[:n], *row[n + 3 :], *row[n : n + 3]) if owners else row


def _expression(key: str) -> str:
    return {"stage": _STAGE, "cluster": "COALESCE(cluster, '')"}.get(key, key)


def _where(connection: sqlite3.Connection, query: Query) -> tuple[str, list[Any]]:
    terms, values = ["1"], list[Any]()
    if query.useful is not None:
        terms.append("useful = ?")
        values.append(int(query.useful))
    if query.first_round is not None:
        terms.append("seq > 0 AND round >= ?")
        values.append(query.first_round)
    if query.last_round is not None:
        terms.append("seq > 0 AND round <= ?")
        values.append(query.last_round)
    numbers = {name: number for number, name in _stage_names(connection).items()}
    listed: list[tuple[str, Sequence[Any]]] = [
        (_STAGE, [numbers[name] for name in query.stages]),
        ("step", query.steps),
        ("direction", query.directions),
        ("scope", query.scopes),
        ("COALESCE(cluster, '')", query.clusters),
        ("link", query.links),
    ]
    for expression, wanted in listed:
        if wanted:
            terms.append(f"{expression} IN ({','.join('?' * len(wanted))})")
            values.extend(wanted)
    return " AND ".join(f"({term})" for term in terms), values


def _stage_names(connection: sqlite3.Connection) -> dict[int, str]:
    return dict(connection.execute("SELECT number, name FROM stages ORDER BY number")) | {SESSION: SESSION_NAME}


def _clusters_of_links(connection: sqlite3.Connection) -> dict[str, str]:
    """The known cluster behind each link, where there is one and only one."""
    of_host = dict(connection.execute("SELECT host, MIN(cluster) FROM members GROUP BY host HAVING MIN(cluster) = MAX(cluster)"))
    links = [link for (link,) in connection.execute("SELECT DISTINCT link FROM ledger")]
    found = {link: of_host.get(link, of_host.get(link.partition("/")[0].replace("%2F", "/").replace("%25", "%"))) for link in links}
    return {link: cluster for link, cluster in found.items() if cluster}


def _check(connection: sqlite3.Connection, query: Query) -> None:
    """ConfigError for what the run does not have."""
    for key in query.by:
        if key not in KEYS:
            raise ConfigError(f"the ledger cannot be grouped by {key!r}, want one of {', '.join(KEYS)}")
    if len(set(query.by)) < len(query.by):
        raise ConfigError(f"the ledger is grouped by {', '.join(query.by)}, want each key once")
    columns = {"step": query.steps, "direction": query.directions, "scope": query.scopes, "link": query.links}
    known: dict[str, Iterable[str]] = {"stage": _stage_names(connection).values()} if query.stages else {}
    known |= {column: _distinct(connection, "ledger", column) for column, wanted in columns.items() if wanted}
    if query.clusters:
        known["cluster"] = _distinct(connection, "members", "cluster")
    if query.users:
        known["user"] = _distinct(connection, "members", "name")
    asked: Mapping[str, Sequence[str]] = {**columns, "stage": query.stages, "cluster": query.clusters, "user": query.users}
    for what, values in known.items():
        listed = list(values)
        for value in asked[what]:
            if value not in listed:
                raise ConfigError(f"the run's ledger has no {what} {value!r}, want {_one_of(listed)}")


_MAX_LISTED = 12


def _one_of(values: Sequence[str]) -> str:
    shown = ", ".join(values[:_MAX_LISTED]) or "none: it is empty"
    return f"one of {shown}" + (f", ... ({len(values)})" if len(values) > _MAX_LISTED else "")


def _distinct(connection: sqlite3.Connection, table: str, column: str) -> list[str]:
    return [value for (value,) in connection.execute(f"SELECT DISTINCT {column} FROM {table} ORDER BY rowid")]  # noqa: S608 - fixed names
