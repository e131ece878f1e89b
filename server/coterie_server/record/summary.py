"""Queries on the database of a run, finished or under way: stages, figures, traffic with its closed form, and whether both books agree.

Plain SQL on a connection of `coterie_server.record.rundb.open_run`. Units are those of `coterie.record.ledger`. A broadcast counts once in
vectors and scalars, and once for each receiving host in bytes and frames. A message for a cluster counts once for each host of the cluster.
A link below an aggregator is called AGGREGATOR/HOST; the aggregator numbers its exchanges.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import StopRule
from coterie.record.ledger import UP, link_below, peers_of, step_of
from coterie.text.suggestions import suggestion
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_server.interface.expected import Expected
from coterie_server.interface.half import CONVERGED
from coterie_server.record.query import ABOVE, Query, numbered_totals, stored_forms
from coterie_server.record.query import SESSION as SESSION  # noqa: PLC0414 - a word of this module too
from coterie_server.record.rundb import DIRECT, WITHIN, worked_s

_LIMIT = re.compile(r"\d+ rounds|\S+ s")  # outcomes of stages that a limit has ended
_SUMMED = ("vectors", "scalars", "payload_bytes", "message_bytes", "frames")


@dataclass(frozen=True)
class StageSummary:
    """One stage: `outcome` says why it ended, "" while it is under way; `results` are its closing figures.

    `seconds` are those of all its attempts, without rounds that were repeated; while it is under way, to the end of its latest round.
    """

    number: int
    name: str
    method: str
    rounds: int
    outcome: str
    seconds: float
    results: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """What one step moved in one direction. `expected` is the closed form in d-vectors, None where there is none.

    A closed form that is a mean over random coins has a standard deviation, `spread`, or a bound of it; `drawn` is the count for the coins
    that were drawn. `expected_scalars` is the closed form in scalars, where there is one.
    """

    stage: int
    step: str
    direction: str
    scope: str
    vectors: int = 0
    scalars: int = 0
    payload_bytes: int = 0
    message_bytes: int = 0
    frames: int = 0
    expected: float | None = None
    spread: float = 0.0
    drawn: float | None = None
    expected_scalars: float | None = None

    @property
    def wire_bytes(self) -> int:
        """Message bytes and the header of each gRPC frame."""
        return self.message_bytes + GRPC_FRAME_HEADER_BYTES * self.frames


@dataclass(frozen=True)
class Books:
    """The parent's book against those of the hosts. Rows are counted; `differences` are sentences."""

    n_agreed: int
    lost_by_host: Mapping[str, int]  # booked by the parent alone: the host's process or connection was lost
    lost_by_parent: Mapping[str, int]  # booked by the host alone: in an attempt whose coordinator was killed
    absent: tuple[str, ...]  # hosts whose books have not arrived
    n_differences: int
    differences: tuple[str, ...]  # the first few
    lost_on_the_way: Mapping[str, int] = field(default_factory=dict)  # booked by the host alone: its stream was lost with them
    not_brought: Mapping[str, int] = field(default_factory=dict)  # booked by the parent alone, in a run that has not finished
    left_out: frozenset[str] = frozenset()  # absent hosts that the run has gone on without: their books may be missing

    @property
    def agree(self) -> bool:
        """Whether every difference is explained."""
        return self.n_differences == 0


def facts(connection: sqlite3.Connection) -> dict[str, str]:
    """What the run says about itself: run_id, name, status, attempt, version, final_stage, ..."""
    return dict(connection.execute("SELECT key, value FROM run"))


def hosts(connection: sqlite3.Connection) -> dict[str, int]:
    """How many users each host has, in member order of their first users."""
    return dict(connection.execute("SELECT host, COUNT(*) FROM members GROUP BY host ORDER BY MIN(position)"))


@dataclass(frozen=True)
class Shortfall:
    """A stage that reached a limit before the rule held that should have ended it."""

    stage: str
    limit: str  # "2000 rounds", "5 s"
    rule: str  # "residual" or "objective gap"; "" when the method itself says whether it has converged
    found: float = 0.0
    wanted: float = 0.0


def stages(connection: sqlite3.Connection) -> list[StageSummary]:
    """All stages that have begun, in order; one that is under way, or was when the run was killed, has the rounds made so far."""
    results: dict[int, dict[str, float]] = {}
    for number, name, value in connection.execute("SELECT stage, name, value FROM results WHERE value IS NOT NULL"):
        results.setdefault(number, {})[name] = value
    made = "CASE WHEN outcome = '' THEN (SELECT COALESCE(MAX(round), 0) FROM figures WHERE stage = number) ELSE rounds END"
    rows = connection.execute(f"SELECT number, name, method, {made}, outcome, seconds FROM stages ORDER BY number")  # noqa: S608 - ours
    listed = [replace(StageSummary(*row), results=results.get(row[0], {})) for row in rows]
    return [stage if stage.outcome else replace(stage, seconds=worked_s(connection, stage.number)) for stage in listed]


def printed(connection: sqlite3.Connection) -> dict[int, dict[str, float]]:
    """Vectors by direction, for each stage whose paper prints a count of its own: an upper bound of the closed form."""
    found: dict[int, dict[str, float]] = {}
    for stage, direction, vectors in connection.execute("SELECT stage, direction, vectors FROM printed ORDER BY stage, direction DESC"):
        found.setdefault(stage, {})[direction] = vectors
    return found


def stage_named(connection: sqlite3.Connection, name: str) -> StageSummary:
    """The stage of this name; ConfigError when the run has none."""
    listed = stages(connection)
    for stage in listed:
        if stage.name == name:
            return stage
    raise unknown_stage(name, [stage.name for stage in listed])


def unknown_stage(name: str, names: Collection[str]) -> ConfigError:
    """The error for a stage that is not among the `names` of a run's stages."""
    return ConfigError(f"the run has no stage {name!r}, want one of {', '.join(names) or 'none yet'}{suggestion(name, names)}")


def final_stage(connection: sqlite3.Connection) -> StageSummary:
    """The stage whose models are the run's result, or else the one that has begun last; ConfigError when none has."""
    listed, final = stages(connection), facts(connection).get("final_stage")
    if not listed:
        raise ConfigError("the run has no stage yet")
    return next((stage for stage in listed if stage.name == final), listed[-1])


def history(connection: sqlite3.Connection, stage: int) -> list[dict[str, float]]:
    """The figures of each round of a stage, with its number as "round"."""
    rounds: dict[int, dict[str, float]] = {}
    rows = connection.execute("SELECT round, name, value FROM figures WHERE stage = ? ORDER BY round", (stage,))
    for number, name, value in rows:
        rounds.setdefault(number, {"round": float(number)})[name] = float("nan") if value is None else value
    return list(rounds.values())


def shortfalls(connection: sqlite3.Connection, stop: StopRule) -> list[Shortfall]:
    """The stages that ended before their models were optimal. A stage without another rule than a limit is not one of them."""
    found = [_shortfall(connection, stage, stop) for stage in stages(connection) if _LIMIT.fullmatch(stage.outcome)]
    return [shortfall for shortfall in found if shortfall is not None]


def _shortfall(connection: sqlite3.Connection, stage: StageSummary, stop: StopRule) -> Shortfall | None:
    # SQLite takes a bare column from the row of the maximum, so this is the last value of each figure.
    rows = connection.execute("SELECT name, value, MAX(round) FROM figures WHERE stage = ? GROUP BY name", (stage.number,))
    last = {name: float("nan") if value is None else value for name, value, _ in rows}
    residuals = [last[name] for name in ("primal_residual", "dual_residual") if name in last]
    if CONVERGED in last:
        return Shortfall(stage.name, stage.outcome, "")
    if stop.residual is not None and residuals:
        return Shortfall(stage.name, stage.outcome, "residual", max(residuals), stop.residual)
    if stop.objective_gap is not None and stop.reference_objective is not None and "objective" in last:
        gap = (last["objective"] - stop.reference_objective) / max(abs(stop.reference_objective), sys.float_info.min)
        return Shortfall(stage.name, stage.outcome, "objective gap", gap, stop.objective_gap)
    return None


def has_rounds(connection: sqlite3.Connection) -> bool:
    """Whether any round has been made."""
    return connection.execute("SELECT 1 FROM figures LIMIT 1").fetchone() is not None


def traffic(connection: sqlite3.Connection, *, repeats: bool = False) -> list[Traffic]:
    """Totals by stage, step, direction and scope, in order of first appearance, measured and in closed form.

    With `repeats`, only what was sent again, came too late or was repeated by a resumed run, which has no closed form.
    """
    query = Query(("stage", "step", "direction", "scope"), useful=not repeats)
    measured = [Traffic(*group.keys, *(int(getattr(group, name)) for name in _SUMMED)) for group in numbered_totals(connection, query)]
    if repeats:
        return measured
    forms = stored_forms(connection)
    listed, seen = [], set()
    for row in measured:
        # A message that an aggregator passes on is in two scopes, often with the same closed form in each.
        key = next((key for scope in (row.scope, "") if (key := (row.stage, row.step, row.direction, scope)) in forms), None)
        listed.append(row if key is None else _beside(row, forms[key]))
        seen.add(key)
    left = [(key, form) for key, form in forms.items() if key not in seen and (form.vectors or form.drawn or form.scalars)]
    missing = [_beside(Traffic(*key[:3], scope=key[3] or DIRECT), form) for key, form in left]
    return sorted([*listed, *missing], key=lambda row: row.stage)


def _beside(row: Traffic, form: Expected) -> Traffic:
    return replace(row, expected=form.vectors, spread=form.spread, drawn=form.drawn, expected_scalars=form.scalars)


def total(rows: Sequence[Traffic], *, stage: int = SESSION, step: str = "total", direction: str = "", scope: str = "") -> Traffic:
    """The sum of some rows; its closed form is that of the rows that have one."""
    expected = [row.expected for row in rows if row.expected is not None]
    sums = {name: sum(getattr(row, name) for row in rows) for name in _SUMMED}
    spread = sum(row.spread for row in rows)
    return Traffic(stage, step, direction, scope, **sums, expected=sum(expected) if expected else None, spread=spread)


def by_step(rows: Sequence[Traffic]) -> list[Traffic]:
    """The same traffic summed over stages, in order of first appearance."""
    groups: dict[tuple[str, str, str], list[Traffic]] = {}
    for row in rows:
        groups.setdefault((row.step, row.direction, row.scope), []).append(row)
    return [total(listed, step=step, direction=direction, scope=scope) for (step, direction, scope), listed in groups.items()]


_KEY = "link, seq, attempt, resent, direction, kind"
_SUMS = "COUNT(*) AS n, SUM(vectors) AS v, SUM(scalars) AS s, SUM(payload_bytes) AS p, SUM(message_bytes) AS m, SUM(frames) AS f"
_MEASURES = ("rows", "vectors", "scalars", "bytes of payload", "bytes", "frames")
_BOTH = f"""
WITH parent AS (SELECT {_KEY}, {_SUMS} FROM ledger WHERE seq > 0 GROUP BY {_KEY}),
     host AS (SELECT {_KEY}, {_SUMS} FROM host_ledger GROUP BY {_KEY}),
     same AS (SELECT * FROM parent INTERSECT SELECT * FROM host)
SELECT 'same', '', 0, 0, 0, '', '', SUM(n), 0, 0, 0, 0, 0 FROM same
UNION ALL SELECT 'parent', * FROM (SELECT * FROM parent EXCEPT SELECT * FROM host)
UNION ALL SELECT 'host', * FROM (SELECT * FROM host EXCEPT SELECT * FROM parent)
"""  # noqa: S608 - constants of ours
_HOST, _AT = "json_extract(data, '$.host')", "json_extract(data, '$.aggregator')"
_PEER = "json_extract(data, '$.peer')"
_LOST = f"SELECT {_AT}, {_HOST}, {_PEER}, json_extract(data, '$.book') FROM events WHERE kind = 'lost'"  # noqa: S608 - constants of ours
_ATTEMPTS = f"SELECT {ABOVE}, MAX(attempt) FROM ledger WHERE scope = '{WITHIN}' GROUP BY 1"  # noqa: S608 - constants of ours
_MAX_SENTENCES = 5


def reconcile(connection: sqlite3.Connection) -> Books:
    """Compares the books on (link, exchange, attempt, resending, direction, kind), to the byte.

    Some rows of one side alone are explained. A host that lost its process or its stream forgets what it booked since its last snapshot.
    Tasks and replies that were on their way are booked by their sender alone. A killed coordinator forgets what it had not yet written.
    While a run has not finished, hosts have yet to bring the rows that the coordinator alone has.
    """
    about = facts(connection)
    attempt = int(about.get("attempt", "1"))
    is_finished = about.get("status", "finished") == "finished"
    unsteady, incomplete = _interrupted(connection)
    attempts = dict(connection.execute(_ATTEMPTS))
    with_books = {link for (link,) in connection.execute("SELECT DISTINCT link FROM host_ledger")}
    links = {link for (link,) in connection.execute("SELECT DISTINCT link FROM ledger WHERE seq > 0")}
    one_sided: dict[tuple[Any, ...], dict[str, tuple[int, ...]]] = {}
    n_agreed = 0
    for side, *key, n_rows, vectors, scalars, payload, message, frames in connection.execute(_BOTH):
        if side == "same":
            n_agreed = n_rows or 0
        elif key[0] in with_books:
            one_sided.setdefault(tuple(key), {})[side] = (n_rows, vectors, scalars, payload, message, frames)
    lost_by_host, lost_by_parent, on_the_way, not_brought = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    sentences: list[str] = []
    n_differences = 0
    for (link, seq, row_attempt, _, direction, kind), found in one_sided.items():
        above = "".join(str(link).partition("/")[:2])
        ends = peers_of(link)
        is_unsteady = link in unsteady or (ends is not None and not unsteady.isdisjoint((*ends, frozenset(ends))))
        is_killed = row_attempt < attempts.get(above, attempt)
        n_rows = sum(numbers[0] for numbers in found.values())
        if found.keys() == {"parent"} and (is_unsteady or above in incomplete or is_killed):
            lost_by_host[link] += n_rows
        elif found.keys() == {"parent"} and not is_finished:
            not_brought[link] += n_rows
        elif found.keys() == {"host"} and is_killed:
            lost_by_parent[link] += n_rows
        elif found.keys() == {"host"} and direction == UP and is_unsteady:
            on_the_way[link] += n_rows
        else:
            n_differences += n_rows
            where = f"exchange {seq}, link {link!r}, step {step_of(kind)} ({kind}, {direction})"
            sentences.append(f"{where}: {_said_apart(link, found)}")
    absent, listed = tuple(sorted(links - with_books)), tuple(sentences[:_MAX_SENTENCES])
    decided = connection.execute("SELECT value FROM decisions WHERE kind IN ('skip', 'pass')")
    left_out = frozenset(str(name) for (value,) in decided for name in json.loads(value)).intersection(absent)
    return Books(n_agreed, lost_by_host, lost_by_parent, absent, n_differences, listed, on_the_way, not_brought, left_out)


def _interrupted(connection: sqlite3.Connection) -> tuple[set[str | frozenset[str]], set[str]]:
    """Links that were lost for a time, and the aggregators that have not brought their own books and those of their hosts whole.

    A link between two aggregators is the set of their names; it is also lost where one of them was.
    """
    unsteady: set[str | frozenset[str]] = set()
    incomplete = set()
    for at, host, peer, is_book in connection.execute(_LOST):
        if peer is not None:
            unsteady.add(frozenset((at, peer)))
            continue
        unsteady.add(host if at is None else link_below(at, host))
        if is_book and at is None:
            incomplete.add(link_below(host, ""))
    return unsteady, incomplete


def _said_apart(link: str, found: Mapping[str, tuple[int, ...]]) -> str:
    """What each side booked, in the measures that differ; if one side booked nothing, the bytes of the other."""
    nothing = (0,) * len(_MEASURES)
    parent, host = found.get("parent", nothing), found.get("host", nothing)
    apart = [place for place in range(1, len(_MEASURES)) if parent[place] != host[place]] if len(found) > 1 else [_MEASURES.index("bytes")]
    above, below, name = link.partition("/")
    who = f"aggregator {above!r}" if below else "the coordinator"
    other = f"host {name or link!r}"
    if (ends := peers_of(link)) is not None:
        who, other = (f"aggregator {end!r}" for end in ends)
    measures = [f"{parent[place]:,} {_MEASURES[place]}, {other} {host[place]:,}" for place in apart or [0]]
    rows = f" in {parent[0]} rows and {host[0]}" if parent[0] != host[0] and len(found) > 1 else ""
    alone = "" if len(found) > 1 else f" ({'the host' if 'host' in found else who} alone has it)"
    return f"{who} booked {'; '.join(measures)}{rows}{alone}"
