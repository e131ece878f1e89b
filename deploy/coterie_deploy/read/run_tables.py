"""The tables of a run, finished or under way, as columns for `coterie.load_run` and the exporters.

Units are those of `coterie.record.ledger`: bytes are wire bytes, and sums count useful ones. Read them inside one transaction (`reading`),
so that all tables of a running run are of one moment.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.record.ledger import DOWN, UP, of_ranges
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_deploy.read.frames import Coded, Column, Times, coded, partial
from coterie_server.record import summary
from coterie_server.record.curves import Curves, curves
from coterie_server.record.query import MEASURES, SESSION_NAME, Query, totals
from coterie_server.record.rundb import BETWEEN, PEERS, WITHIN

_CHUNK_ROWS = 50_000
_KINDS: dict[Any, tuple[str, ...]] = {
    np.int64: ("seq", "vectors", "scalars", "payload_bytes", "message_bytes"),
    np.int32: ("attempt", "resent", "round", "frames"),
    np.bool_: ("useful", "is_broadcast"),
}
_NUMBERS = {name: kind for kind, names in _KINDS.items() for name in names}
_TEXTS = ("step", "kind", "direction", "scope", "link")
_ORDER = ("seq", "attempt", "resent", "useful", "stage", "round", *_TEXTS, "users", "n_users", "is_broadcast")


@contextlib.contextmanager
def reading(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """One consistent view of the database inside the block."""
    connection.execute("BEGIN")
    try:
        yield connection
    finally:
        connection.execute("ROLLBACK")


# ---- the ledger


def ledger(connection: sqlite3.Connection) -> dict[str, Column]:
    """All rows of the parents' books. `users` are the users of a row in member order; a..b means all from a to b."""
    n_rows = connection.execute("SELECT COUNT(*) FROM ledger_rows").fetchone()[0]
    numbers = {name: np.empty(n_rows, dtype=kind) for name, kind in _NUMBERS.items()}
    texts = {name: (dict[Any, int](), np.empty(n_rows, dtype=np.int32)) for name in (*_TEXTS, "stage", "users")}
    # The stage of what is outside all exchanges, and the users of what is for all behind a link, are not in their columns.
    stage, users = "CASE WHEN seq = 0 THEN -1 ELSE stage END", "COALESCE(user_set, link)"
    columns = (*_NUMBERS, *_TEXTS, stage, users)
    rows = connection.execute(f"SELECT {', '.join(columns)} FROM ledger ORDER BY row")  # noqa: S608 - columns are ours
    start = 0
    while chunk := rows.fetchmany(_CHUNK_ROWS):
        there = slice(start, start + len(chunk))
        values = list(zip(*chunk, strict=True))
        for array, column in zip(numbers.values(), values, strict=False):
            array[there] = column
        for (places, codes), column in zip(texts.values(), values[len(numbers) :], strict=True):
            codes[there] = [places.setdefault(value, len(places)) for value in column]
        start += len(chunk)
    found: dict[str, Column] = {**numbers}
    found |= {name: Coded(codes, list(places)) for name, (places, codes) in texts.items() if name in _TEXTS}
    found["stage"] = _recoded(*texts["stage"], _stage_names(connection))
    found["users"], found["n_users"] = _users(connection, *texts["users"])
    found["wire_bytes"] = numbers["message_bytes"] + GRPC_FRAME_HEADER_BYTES * numbers["frames"].astype(np.int64)
    return {name: found[name] for name in (*_ORDER, *MEASURES)}


def _stage_names(connection: sqlite3.Connection) -> dict[int, str]:
    """The names of all stages by number, and last that of the session."""
    return {stage.number: stage.name for stage in summary.stages(connection)} | {summary.SESSION: SESSION_NAME}


def _recoded(places: dict[Any, int], codes: NDArray[np.int32], names: dict[int, str]) -> Coded:
    """Codes in the order of `names`."""
    order = {number: place for place, number in enumerate(names)}
    return Coded(np.array([order[number] for number in places], dtype=np.int32)[codes], list(names.values()))


def _users(connection: sqlite3.Connection, places: dict[Any, int], codes: NDArray[np.int32]) -> tuple[Coded, NDArray[np.int32]]:
    """The sets of users by their ids, or by the links behind which they are, as text and as numbers of them."""
    members = list(connection.execute("SELECT name, host FROM members ORDER BY position"))
    names = np.array([name for name, _ in members], dtype=object)
    sets: dict[Any, NDArray[np.int64]] = {
        number: of_ranges(text) for number, text in connection.execute("SELECT id, members FROM user_sets")
    }
    for host in {host for _, host in members}:
        sets[host] = np.flatnonzero([other == host for _, other in members])
    chosen = [sets.get(key, np.zeros(0, dtype=np.int64)) for key in places]
    text = coded(_listed(one, names) for one in chosen)
    sizes = np.array([one.size for one in chosen], dtype=np.int32)
    return Coded(text.codes[codes], text.values), sizes[codes]


def _listed(positions: NDArray[np.int64], names: NDArray[np.object_]) -> str:
    """Names in member order, runs of more than two of them as a..b."""
    pieces = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    ends = [f"{names[piece[0]]}..{names[piece[-1]]}" if piece.size > 2 else ", ".join(names[piece]) for piece in pieces if piece.size]
    return ", ".join(ends)


def traffic(connection: sqlite3.Connection, query: Query) -> dict[str, Column]:
    """The totals of a query: a column for each key and each measure. Measures are integers unless users share messages."""
    groups = totals(connection, query)
    is_shared = bool(query.users) or "user" in query.by
    found: dict[str, Column] = {}
    for place, key in enumerate(query.by):
        values = [group.keys[place] for group in groups]
        found[key] = np.array(values, dtype=np.int64) if key in ("round", "attempt") else coded(values)
    for measure in MEASURES:
        found[measure] = np.array([getattr(group, measure) for group in groups], dtype=np.float64 if is_shared else np.int64)
    return found


# ---- rounds


def metrics(connection: sqlite3.Connection, stages: Sequence[summary.StageSummary]) -> dict[str, Column]:
    """One row for each round of each stage: seconds since the stage began, useful wire bytes so far, and all figures.

    Round 0 is the start of a stage. NaN if a stage has no such figure.
    """
    parts = [curves(connection, stage) for stage in stages]
    names = dict.fromkeys(name for part in parts for name in part.figures)
    codes = np.repeat(np.arange(len(parts), dtype=np.int32), [part.rounds.size for part in parts])
    return {
        "stage": Coded(codes, [part.stage.name for part in parts]),
        "round": _joined([part.rounds for part in parts], np.int64),
        "seconds": _joined([part.seconds for part in parts]),
        **_bytes(parts),
        **{name: _joined([part.figures.get(name, np.full(part.rounds.size, np.nan)) for part in parts]) for name in names},
    }


def metrics_long(connection: sqlite3.Connection, stages: Sequence[summary.StageSummary]) -> dict[str, Column]:
    """The same with one row for each figure of each round that has it: its name in `figure`, its value in `value`."""
    wide = metrics(connection, stages)
    n_axes = list(wide).index("bytes") + sum(name.startswith("bytes_") for name in wide) + 1
    axes, figures = dict(list(wide.items())[:n_axes]), dict(list(wide.items())[n_axes:])
    values = np.array([*figures.values()], dtype=np.float64).reshape(len(figures), -1)
    which, rows = np.nonzero(~np.isnan(values))
    order = np.lexsort((which, rows))
    which, rows = which[order], rows[order]
    found = {
        name: Coded(axis.codes[rows], axis.values) if isinstance(axis, Coded) else np.asarray(axis)[rows] for name, axis in axes.items()
    }
    return {**found, "figure": Coded(which.astype(np.int32), list(figures)), "value": values[which, rows]}


def _bytes(parts: Sequence[Curves]) -> dict[str, Column]:
    """All bytes, then those of each direction, of each scope where there are two tiers, and those between peers where there are peers."""
    ways: dict[str, dict[str, str]] = {"bytes": {}, **{f"bytes_{direction}": {"direction": direction} for direction in (UP, DOWN)}}
    if any(part.is_two_tier for part in parts):
        ways |= {f"bytes_{scope.partition('-')[0]}": {"scope": scope} for scope in (WITHIN, BETWEEN)}
    if any(scope == PEERS for part in parts for _, scope in part.wire_bytes):
        ways["bytes_peers"] = {"scope": PEERS}
    return {name: _joined([part.bytes_by(**way) for part in parts], np.int64) for name, way in ways.items()}


def _joined(arrays: Sequence[NDArray[Any]], kind: Any = np.float64) -> NDArray[Any]:
    return np.concatenate(arrays).astype(kind) if arrays else np.zeros(0, dtype=kind)


# ---- stages, users, events


def results(connection: sqlite3.Connection) -> dict[str, Column]:
    """One row for each stage: how it ended, and its closing figures, which may be missing. `is_final`: whether its models are the run's."""
    stages, final = summary.stages(connection), summary.facts(connection).get("final_stage")
    names = dict.fromkeys(name for stage in stages for name in stage.results)
    return {
        "stage": [stage.name for stage in stages],
        "method": [stage.method for stage in stages],
        "rounds": np.array([stage.rounds for stage in stages], dtype=np.int64),
        "outcome": [stage.outcome for stage in stages],
        "seconds": np.array([stage.seconds for stage in stages], dtype=np.float64),
        "is_final": np.array([stage.name == final for stage in stages], dtype=np.bool_),
        **{name: partial([stage.results.get(name) for stage in stages]) for name in names},
    }


def user_results(connection: sqlite3.Connection) -> dict[str, Column]:
    """One row for each stage and user with figures; some of them may be missing."""
    users = [name for (name,) in connection.execute("SELECT name FROM members ORDER BY position")]
    rows = list(connection.execute("SELECT stage, member, name, value FROM user_results ORDER BY stage, member"))
    place = {key: row for row, key in enumerate(dict.fromkeys((stage, member) for stage, member, _, _ in rows))}
    figures: dict[str, list[float | None]] = {}
    for stage, member, name, value in rows:
        figures.setdefault(name, [None] * len(place))[place[stage, member]] = value
    names = _stage_names(connection)
    return {
        "stage": coded((names[stage] for stage, _ in place), [*names.values()][:-1]),
        "user": coded((users[member] for _, member in place), users),
        **{name: partial(values) for name, values in figures.items()},
    }


def members(connection: sqlite3.Connection) -> dict[str, Column]:
    """One row for each user, in member order: its known cluster, "" for none, and the host that brought it."""
    rows = list(connection.execute("SELECT name, cluster, host FROM members ORDER BY position"))
    return {
        "user": [name for name, _, _ in rows],
        "cluster": coded(cluster for _, cluster, _ in rows),
        "host": coded(host for _, _, host in rows),
    }


def memberships(connection: sqlite3.Connection) -> dict[str, Column]:
    """The clusters that a method has found: one row for each user and each round in which any of them changed."""
    users = [name for (name,) in connection.execute("SELECT name FROM members ORDER BY position")]
    rows = list(connection.execute("SELECT stage, round, labels FROM memberships ORDER BY stage, round"))
    labels = [np.array(json.loads(text), dtype=np.int64) for _, _, text in rows]
    names = _stage_names(connection)
    stages = coded((names[stage] for stage, _, _ in rows), [*names.values()][:-1])
    return {
        "stage": Coded(np.repeat(stages.codes, len(users)), stages.values),
        "round": np.repeat(np.array([number for _, number, _ in rows], dtype=np.int64), len(users)),
        "user": Coded(np.tile(np.arange(len(users), dtype=np.int32), len(rows)), users),
        "cluster": _joined(labels, np.int64),
    }


def events(connection: sqlite3.Connection) -> dict[str, Column]:
    """The events in order of writing; `data` is the JSON of an object."""
    rows = list(connection.execute("SELECT at, kind, text, data FROM events ORDER BY rowid"))
    return {
        "at": Times(np.array([at for at, _, _, _ in rows], dtype=np.float64)),
        "kind": coded(kind for _, kind, _, _ in rows),
        "text": [text for _, _, text, _ in rows],
        "data": [data for _, _, _, data in rows],
    }
