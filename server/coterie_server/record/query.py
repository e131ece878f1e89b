"""Queries on the ledger of a run: totals of any part in any grouping, and its rows.

Measures: `vectors` (d-vectors), `scalars`, `payload_bytes` (scalars x item size), `message_bytes` (protobuf), `wire_bytes` (message and 5
bytes of gRPC header for each frame), `frames`. In each group a broadcast counts once in vectors and scalars, however many hosts it went to,
and once for each host in bytes and frames; an aggregator that passes it on sends another. Users share equally what goes over a link for
several of them; only the vectors and scalars of a broadcast are whole for each.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.errors import ConfigError
from coterie.text.names import natural_key, similar_names
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_server.interface.expected import Expected
from coterie_server.record.owners import Owners, Parts
from coterie_server.record.rundb import DIRECT, WITHIN

KEYS = ("stage", "round", "step", "kind", "direction", "scope", "cluster", "link", "user", "attempt")
MEASURES = ("vectors", "scalars", "payload_bytes", "message_bytes", "wire_bytes", "frames")
ROW_COLUMNS = (
    "stage", "round", "seq", "attempt", "resent", "useful", "step", "kind", "direction", "scope", "link", "users", "is_broadcast",
    "vectors", "scalars", "payload_bytes", "message_bytes", "wire_bytes", "frames",
)  # fmt: skip
SESSION = -1  # the "stage" of traffic outside all exchanges: hello, welcome, heartbeats, books, finish
SESSION_NAME = "session"
ABOVE = f"CASE WHEN scope = '{WITHIN}' THEN substr(link, 1, instr(link, '/')) ELSE '' END"  # the aggregator of a link below one
_STAGE = f"CASE WHEN seq = 0 THEN {SESSION} ELSE stage END"
_SUMS = ", ".join(f"SUM({name}) AS {name[0]}_" for name in ("vectors", "scalars", "payload_bytes", "message_bytes", "frames"))
_ONCE = _SUMS.replace("SUM(vectors)", "MAX(vectors)").replace("SUM(scalars)", "MAX(scalars)")  # of the links of one broadcast
_OUTER = "SUM(v_), SUM(s_), SUM(p_), SUM(m_), SUM(f_), MIN(first_)"
_FIRST = "MIN(row) AS first_"
_EXCHANGE = f"seq, attempt, resent, kind, {ABOVE}"  # what the rows of one broadcast have in common
_KEYS_OF_CLOSED_FORMS = frozenset({"stage", "step", "direction", "scope"})


@dataclass(frozen=True)
class Query:
    """A query: `by` has the keys of a group, from `KEYS`; every other field limits the rows, unless it is empty or None.

    Stages are named, or numbered. `useful` False selects what was sent again, came too late or was repeated by a resumed run, None both.
    Rounds are those of a stage: round 0 is its start, and its end belongs to the last round.
    """

    by: tuple[str, ...] = ()
    stages: tuple[str | int, ...] = ()
    first_round: int | None = None
    last_round: int | None = None
    steps: tuple[str, ...] = ()
    directions: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    useful: bool | None = True

    @property
    def has_closed_form(self) -> bool:
        """Whether the groups can be compared with closed forms."""
        chosen = (self.first_round, self.last_round, self.clusters or None, self.links or None, self.users or None)
        return self.useful is True and _KEYS_OF_CLOSED_FORMS.issuperset(self.by) and chosen == (None,) * len(chosen)


@dataclass(kw_only=True)
class Amounts:
    """A total: d-vectors, scalars, bytes and gRPC frames; see `coterie.record.ledger`."""

    vectors: float = 0
    scalars: float = 0
    payload_bytes: float = 0
    message_bytes: float = 0
    frames: float = 0

    @property
    def wire_bytes(self) -> float:
        """Message bytes and the header of each gRPC frame."""
        return self.message_bytes + GRPC_FRAME_HEADER_BYTES * self.frames

    def add(self, sums: Sequence[float], share: float = 1) -> None:
        """Adds a share of (vectors, scalars, payload bytes, message bytes, frames)."""
        self.vectors += share * sums[0]
        self.scalars += share * sums[1]
        self.payload_bytes += share * sums[2]
        self.message_bytes += share * sums[3]
        self.frames += share * sums[4]


@dataclass
class Group(Amounts):
    """The total of one group; `keys` has the values of `Query.by`, in its order. Numbers are no integers where users share a message."""

    keys: tuple[Any, ...]
    first: int = field(default=1 << 62, repr=False)  # the earliest row of the ledger in it


def totals(connection: sqlite3.Connection, query: Query) -> list[Group]:
    """The groups, in order of stage and round where these are keys, then of first appearance in the ledger.

    ConfigError for a key, stage, step, direction, scope, cluster, link or user that the run does not have.
    """
    groups = numbered_totals(connection, query)
    if "stage" in query.by:
        place, name = query.by.index("stage"), stage_namer(connection)
        for group in groups:
            group.keys = (*group.keys[:place], name(group.keys[place]), *group.keys[place + 1 :])
    return groups


def numbered_totals(connection: sqlite3.Connection, query: Query) -> list[Group]:
    """As `totals`, with numbers of stages instead of their names, and `SESSION` for traffic outside all stages."""
    _check(connection, query)
    owners = Owners(connection)
    groups = _shared(connection, query, owners) if _has_shares(query, owners) else _plain(connection, query, owners)
    leading = [place for place, key in enumerate(query.by) if key in ("stage", "round")]

    def rank(group: Group) -> tuple[Any, ...]:
        numbers = (group.keys[place] for place in leading)
        return (*(number if number != SESSION else 1 << 62 for number in numbers), group.first)

    return sorted(groups, key=rank)


def has_shares(connection: sqlite3.Connection, query: Query) -> bool:
    """Whether the totals are of users' shares in messages for several users, rather than of whole messages."""
    return _has_shares(query, Owners(connection))


def _has_shares(query: Query, owners: Owners) -> bool:
    return bool(query.users) or "user" in query.by or (_needs_clusters(query) and owners.clusters_of_links is None)


def grand_total(connection: sqlite3.Connection, query: Query, groups: Sequence[Group]) -> Group:
    """The sum of the groups of a query; a broadcast that is in several of them counts once."""
    if not {"link", "user", "cluster"}.isdisjoint(query.by):
        return next(iter(totals(connection, replace(query, by=()))), Group(()))
    whole = Group((), first=min((group.first for group in groups), default=1 << 62))
    for group in groups:
        whole.add((group.vectors, group.scalars, group.payload_bytes, group.message_bytes, group.frames))
    return whole


def stage_namer(connection: sqlite3.Connection) -> Callable[[int], str]:
    """A function from numbers of stages to their names. A stage that has sent something before it was written has its number as name."""
    names = dict(connection.execute("SELECT number, name FROM stages")) | {SESSION: SESSION_NAME}
    return lambda number: names.get(number, str(number))


def closed_forms(connection: sqlite3.Connection, query: Query) -> dict[tuple[Any, ...], float | None]:
    """The vectors that the methods' formulas give for each group of `numbered_totals`; None where some of its vectors have no formula.

    Empty for a query whose groups are not comparable. A step that should have sent something and has not is a group too, in scope
    `DIRECT`. What an aggregator passes on is in two scopes, with the same formula in each.
    """
    if not query.has_closed_form:
        return {}
    forms_of = stored_forms(connection)
    where, values = _where(connection, query)
    asked = (_numbers_of(connection, query.stages), query.steps, query.directions, query.scopes)
    select = f"SELECT DISTINCT {_STAGE}, step, direction, scope, vectors > 0 FROM ledger WHERE {where}"  # noqa: S608 - columns are ours
    found: dict[tuple[Any, ...], bool] = {}
    for *fine, has_vectors in connection.execute(select, values):
        found[tuple(fine)] = found.get(tuple(fine), False) or bool(has_vectors)
    seen = {key for fine in found if (key := _form_of(fine, forms_of)) is not None}
    for key, form in forms_of.items():
        missing = (*key[:3], key[3] or DIRECT)
        is_asked_for = all(not listed or value in listed for value, listed in zip(missing, asked, strict=True))
        if form.vectors and key not in seen and is_asked_for:
            found[missing] = False
    forms: dict[tuple[Any, ...], list[float | None]] = {}
    for fine, has_vectors in found.items():
        keys = tuple(fine[("stage", "step", "direction", "scope").index(key)] for key in query.by)
        form_key = _form_of(fine, forms_of)
        expected = None if form_key is None else forms_of[form_key].vectors
        if expected is not None or has_vectors:
            forms.setdefault(keys, []).append(expected)
    return {keys: None if None in listed else sum(filter(None, listed)) for keys, listed in forms.items()}


def _form_of(fine: tuple[Any, ...], forms: Mapping[tuple[int, str, str, str], Expected]) -> tuple[int, str, str, str] | None:
    """The key of the closed form of (stage, step, direction, scope), None where there is none."""
    own = (fine[0], fine[1], fine[2], fine[3])
    return next((key for key in (own, (*own[:3], "")) if key in forms), None)


def stored_forms(connection: sqlite3.Connection) -> dict[tuple[int, str, str, str], Expected]:
    """The closed forms by stage, step, direction and scope, "" for all scopes. An older run does not say which of them are means."""
    if "spread" not in {name for _, name, *_ in connection.execute("PRAGMA table_info(expected)")}:
        rows = connection.execute("SELECT stage, step, direction, '', vectors, 0.0, NULL, NULL FROM expected")
    else:
        rows = connection.execute("SELECT stage, step, direction, scope, vectors, spread, drawn, scalars FROM expected")
    return {row[:4]: Expected(*row[4:]) for row in rows}


def _plain(connection: sqlite3.Connection, query: Query, owners: Owners) -> list[Group]:
    """Broadcasts have a query of their own, since only they are read exchange by exchange."""
    where, values = _where(connection, query)
    with_clusters, table, names = "", "ledger", [f"{key}_" for key in query.by]
    if _needs_clusters(query):
        with_clusters = "WITH of_links AS MATERIALIZED (SELECT value ->> 0 AS of_link, value ->> 1 AS cluster FROM json_each(?))"
        table = "ledger JOIN of_links ON of_link = link"
        values = [json.dumps(list((owners.clusters_of_links or {}).items())), *values]
        where += _among("cluster", query.clusters, values)
    keys = _selected(query.by)
    by_names = f"GROUP BY {', '.join(names)}" if names else ""
    inner_by = ", ".join([*names, _EXCHANGE])
    single = f"{with_clusters} SELECT {keys}{_SUMS}, {_FIRST} FROM {table} WHERE {where} AND NOT is_broadcast {by_names}"  # noqa: S608
    each = f"SELECT {keys}{_ONCE}, {_FIRST} FROM {table} WHERE {where} AND is_broadcast GROUP BY {inner_by}"  # noqa: S608
    several = f"{with_clusters} SELECT {''.join(f'{name}, ' for name in names)}{_OUTER} FROM ({each}) {by_names}"  # noqa: S608
    groups: dict[tuple[Any, ...], Group] = {}
    n = len(query.by)
    for statement in (single, several):
        for row in connection.execute(statement, values):
            if row[-1] is not None:
                group = groups.setdefault(row[:n], Group(row[:n]))
                group.add(row[n : n + 5])
                group.first = min(group.first, row[-1])
    return list(groups.values())


def _selected(by: Iterable[str]) -> str:
    """The keys of groups, each as its name and an underscore."""
    return "".join(f"{_STAGE if key == 'stage' else key} AS {key}_, " for key in by)


def _shared(connection: sqlite3.Connection, query: Query, owners: Owners) -> list[Group]:
    """With each message shared out among the users that it is about."""
    where, values = _where(connection, query)
    others = tuple(key for key in query.by if key not in ("user", "cluster"))
    names = "".join(f"{key}_, " for key in others)
    n = len(others)
    parts = Parts(owners, query.by, query.users, query.clusters)
    groups: dict[tuple[Any, ...], Group] = {}

    def group_of(row: Sequence[Any], part: Mapping[str, str]) -> Group:
        keys = tuple(part[key] if key in part else row[others.index(key)] for key in query.by)
        return groups.setdefault(keys, Group(keys))

    listed = f"SELECT {_selected(others)}{_SUMS}, {_FIRST}, link, user_set, is_broadcast FROM ledger WHERE {where}"  # noqa: S608
    for row in connection.execute(f"{listed} GROUP BY {names}link, user_set, is_broadcast", values):
        *sums, first, link, user_set, is_broadcast = row[n:]
        whole = (0, 0, *sums[2:]) if is_broadcast else sums
        for part, share in parts.of(link, user_set):
            group = group_of(row, part)
            group.add(whole, share)
            group.first = min(group.first, first)
    # The vectors of a broadcast count once for each part of the users that it went to, over whatever links.
    each = f"SELECT {_selected(others)}{_ONCE}, json_group_array(json_array(link, user_set)) AS to_ FROM ledger"  # noqa: S608
    each += f" WHERE {where} AND is_broadcast GROUP BY {names}{_EXCHANGE}"
    for row in connection.execute(f"SELECT {names}SUM(v_), SUM(s_), to_ FROM ({each}) GROUP BY {names}to_", values):  # noqa: S608
        for part in parts.of_any(row[-1]):
            group_of(row, part).add((row[n], row[n + 1], 0, 0, 0))
    return list(groups.values())


def rows(connection: sqlite3.Connection, query: Query) -> Iterator[tuple[Any, ...]]:
    """The rows as they were booked, one by one, with the values of `ROW_COLUMNS`; `users` is None for all users behind the link.

    A row for several users is whole if one of them is asked for. ConfigError as for `totals`.
    """
    _check(connection, query)
    return _rows(connection, query)


def _rows(connection: sqlite3.Connection, query: Query) -> Iterator[tuple[Any, ...]]:
    where, values = _where(connection, query)
    owners = Owners(connection)
    parts, name = Parts(owners, query.by, query.users, query.clusters), stage_namer(connection)
    names: dict[int | None, tuple[str, ...] | None] = {None: None}
    columns = ", ".join(ROW_COLUMNS).replace("stage", f"{_STAGE}", 1).replace("users", "user_set", 1)
    columns = columns.replace("wire_bytes", f"message_bytes + {GRPC_FRAME_HEADER_BYTES} * frames")
    link_place, users_place = ROW_COLUMNS.index("link"), ROW_COLUMNS.index("users")
    for row in connection.execute(f"SELECT {columns} FROM ledger WHERE {where} ORDER BY row", values):  # noqa: S608 - columns are ours
        user_set = row[users_place]
        if parts.has_filter and not parts.of(row[link_place], user_set):
            continue
        if user_set not in names:
            names[user_set] = tuple(owners.names[user] for user in owners.of("", user_set).tolist())
        yield (name(row[0]), *row[1:users_place], names[user_set], *row[users_place + 1 :])


def _needs_clusters(query: Query) -> bool:
    return "cluster" in query.by or bool(query.clusters)


def _where(connection: sqlite3.Connection, query: Query) -> tuple[str, list[Any]]:
    """The condition of the rows asked for, whatever their users and clusters, and its values."""
    where, values = "1", list[Any]()
    if query.useful is not None:
        where += _among("useful", (int(query.useful),), values)
    for bound, comparison in ((query.first_round, ">="), (query.last_round, "<=")):
        if bound is not None:
            where += f" AND seq > 0 AND round {comparison} ?"
            values.append(bound)
    where += _among(_STAGE, _numbers_of(connection, query.stages), values)
    where += _among("step", query.steps, values) + _among("direction", query.directions, values)
    where += _among("scope", query.scopes, values) + _among("link", query.links, values)
    return where, values


def _among(expression: str, wanted: Sequence[Any], values: list[Any]) -> str:
    """A condition, and its values after the others; "" where nothing is limited."""
    values.extend(wanted)
    return f" AND {expression} IN ({','.join('?' * len(wanted))})" if wanted else ""


def _numbers_of(connection: sqlite3.Connection, stages: Sequence[str | int]) -> list[int]:
    numbers = [stage for stage in stages if isinstance(stage, int)]
    names = [stage for stage in stages if isinstance(stage, str)]
    numbers += [SESSION] if SESSION_NAME in names else []
    if names:
        numbers += [number for number, name in connection.execute("SELECT number, name FROM stages") if name in names]
    return numbers


def _check(connection: sqlite3.Connection, query: Query) -> None:
    """ConfigError for what the run does not have."""
    for key in query.by:
        if key not in KEYS:
            raise ConfigError(f"the ledger cannot be grouped by {key!r}, want one of {', '.join(KEYS)}")
    if len(set(query.by)) < len(query.by):
        raise ConfigError(f"the ledger is grouped by {', '.join(query.by)}, want each key once")
    named = [stage for stage in query.stages if isinstance(stage, str) and stage != SESSION_NAME]
    asked: tuple[tuple[str, Sequence[str], str, str], ...] = (
        ("stage", named, "stages", "name"),
        ("step", query.steps, "ledger", "step"),
        ("direction", query.directions, "ledger", "direction"),
        ("scope", query.scopes, "ledger", "scope"),
        ("link", query.links, "ledger", "link"),
        ("cluster", query.clusters, "members", "cluster"),
        ("user", query.users, "members", "name"),
    )
    for what, wanted, table, column in asked:
        if wanted:
            known = [value for (value,) in connection.execute(f"SELECT DISTINCT {column} FROM {table}")]  # noqa: S608 - fixed names
            for value in wanted:
                if value not in known:
                    raise ConfigError(f"the run has no {what} {value!r}{_among_others(value, known)}")


_MAX_LISTED = 12


def _among_others(value: str, known: Sequence[str]) -> str:
    """The end of a sentence on what there is."""
    if not known:
        return ", nor any other yet"
    if len(known) <= _MAX_LISTED:
        return f", want one of {', '.join(known)}"
    ordered = sorted(known, key=natural_key)
    similar = similar_names(value, ordered) or [*ordered[:_MAX_LISTED], "..."]
    return f", want one of {len(known)} such as {', '.join(similar)}"
