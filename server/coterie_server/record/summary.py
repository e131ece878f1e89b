"""Questions to the database of a run, finished or under way: stages, figures, traffic beside its closed form, and whether both books agree.

Plain SQL on a connection of `coterie_server.record.rundb.open_run`. Units are those of `coterie.record.ledger`. A broadcast counts once in
vectors and scalars, and once for each receiving host in bytes and frames; what is one for each cluster counts once for each host of the
cluster. A link below an aggregator is called AGGREGATOR/HOST; its exchanges are numbered by the aggregator.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import StopRule
from coterie.record.ledger import UP, link_below, step_of
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_server.interface.expected import Expected
from coterie_server.interface.half import CONVERGED
from coterie_server.record.query import ABOVE, Group, Query, numbered_totals, stored_forms
from coterie_server.record.query import SESSION as SESSION  # noqa: PLC0414 - a word of this module too
from coterie_server.record.rundb import DIRECT, WITHIN

_LIMIT = re.compile(r"\d+ rounds|\S+ s")  # outcomes of stages that something else should have ended


@dataclass(frozen=True)
class StageSummary:
    """One stage: `outcome` says why it ended, "" while it is under way; `results` are its closing figures.

    `seconds` are those of the attempt that ended it; while it is under way, those from its start to the end of its latest round.
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
    left_out: frozenset[str] = frozenset()  # those of the absent without which the run has gone on, so that their books may stay away

    @property
    def agree(self) -> bool:
        """Whether nothing is left unexplained."""
        return self.n_differences == 0


def facts(connection: sqlite3.Connection) -> dict[str, str]:
    """What the run says about itself: run_id, name, status, attempt, version, final_stage, ..."""
    return dict(connection.execute("SELECT key, value FROM run"))


def hosts(connection: sqlite3.Connection) -> dict[str, int]:
    """How many users each host has, in member order of their first users."""
    return dict(connection.execute("SELECT host, COUNT(*) FROM members GROUP BY host ORDER BY MIN(position)"))


@dataclass(frozen=True)
class Shortfall:
    """A stage that ran into a limit before the rule held that should have ended it."""

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
    return [
        StageSummary(number, name, method, rounds, outcome, seconds if outcome else _so_far(connection, number), results.get(number, {}))
        for number, name, method, rounds, outcome, seconds in rows.fetchall()
    ]


def _so_far(connection: sqlite3.Connection, stage: int) -> float:
    """The seconds from the start of a stage to the end of its latest round."""
    (seconds,) = connection.execute("SELECT COALESCE(MAX(at) - MIN(at), 0.0) FROM rounds WHERE stage = ?", (stage,)).fetchone()
    return float(seconds)


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
    raise ConfigError(f"the run has no stage {name!r}, want one of {', '.join(stage.name for stage in listed) or 'none yet'}")


def final_stage(connection: sqlite3.Connection) -> StageSummary:
    """The stage whose models are the run's result, or else the one that has begun last; ConfigError when none has."""
    listed, final = stages(connection), facts(connection).get("final_stage")
    if not listed:
        raise ConfigError("the run has no stage yet")
    return next((stage for stage in listed if stage.name == final), listed[-1])


def method_stage(listed: Sequence[StageSummary], final: StageSummary | None, method: str) -> StageSummary | None:
    """Of the stages of a run, that in which its method worked: its result, or what the result refits; or else the latest one.

    `final` is the stage of the result, None where there is none yet; `method` the name of the experiment's method.
    """
    own = [stage for stage in listed if stage.method == method]
    main = final or (listed[-1] if listed else None)
    if main is None or main in own or not own:
        return main
    point = main.name.partition("-")[2]  # a refit is called after the penalty whose clusters it takes
    return next((stage for stage in own if stage.name.partition("-")[2] == point), own[-1])


def goal_stage(connection: sqlite3.Connection) -> StageSummary:
    """The stage that a goal is about, see `method_stage`: a refit reaches nothing on the way. ConfigError when none has begun."""
    found, listed = facts(connection), stages(connection)
    final = next((stage for stage in listed if stage.name == found.get("final_stage")), None)
    stage = method_stage(listed, final, json.loads(found.get("experiment", "{}")).get("method", {}).get("name", ""))
    if stage is None:
        raise ConfigError("the run has no stage yet")
    return stage


def history(connection: sqlite3.Connection, stage: int) -> list[dict[str, float]]:
    """The figures of each round of a stage, with its number as "round"."""
    rounds: dict[int, dict[str, float]] = {}
    rows = connection.execute("SELECT round, name, value FROM figures WHERE stage = ? ORDER BY round", (stage,))
    for number, name, value in rows:
        rounds.setdefault(number, {"round": float(number)})[name] = float("nan") if value is None else value
    return list(rounds.values())


def shortfalls(connection: sqlite3.Connection, stop: StopRule) -> list[Shortfall]:
    """The stages whose models are not those of the optimum. A stage that has only a limit to end it, and knows of no other end, is none."""
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


# ---- traffic


def traffic(connection: sqlite3.Connection, *, repeats: bool = False) -> list[Traffic]:
    """Totals by stage, step, direction and scope, in order of first appearance, with the closed form beside the measured vectors.

    With `repeats`, instead, what was sent again, came too late or was repeated by a resumed run; a closed form has no such traffic.
    """
    query = Query(("stage", "step", "direction", "scope"), useful=not repeats)
    measured = [_traffic_of(group) for group in numbered_totals(connection, query)]
    if repeats:
        return measured
    forms = stored_forms(connection)
    listed, seen = [], set()
    for row in measured:
        # What an aggregator passes on is in two scopes, often with the same closed form in each.
        key = next((key for scope in (row.scope, "") if (key := (row.stage, row.step, row.direction, scope)) in forms), None)
        listed.append(row if key is None else _beside(row, forms[key]))
        seen.add(key)
    left = [(key, form) for key, form in forms.items() if key not in seen and (form.vectors or form.drawn or form.scalars)]
    missing = [_beside(Traffic(*key[:3], scope=key[3] or DIRECT), form) for key, form in left]
    return sorted([*listed, *missing], key=lambda row: row.stage)


def _traffic_of(group: Group) -> Traffic:
    measures = (group.vectors, group.scalars, group.payload_bytes, group.message_bytes, group.frames)
    return Traffic(*group.keys, *map(int, measures))


def _beside(row: Traffic, form: Expected) -> Traffic:
    return replace(row, expected=form.vectors, spread=form.spread, drawn=form.drawn, expected_scalars=form.scalars)


def total(rows: Sequence[Traffic], *, stage: int = SESSION, step: str = "total", direction: str = "", scope: str = "") -> Traffic:
    """The sum of some rows; its closed form is that of the rows that have one."""
    expected = [row.expected for row in rows if row.expected is not None]
    return Traffic(
        stage,
        step,
        direction,
        scope,
        vectors=sum(row.vectors for row in rows),
        scalars=sum(row.scalars for row in rows),
        payload_bytes=sum(row.payload_bytes for row in rows),
        message_bytes=sum(row.message_bytes for row in rows),
        frames=sum(row.frames for row in rows),
        expected=sum(expected) if expected else None,
        spread=sum(row.spread for row in rows),
    )


def by_step(rows: Sequence[Traffic]) -> list[Traffic]:
    """The same traffic summed over stages, in order of first appearance."""
    groups: dict[tuple[str, str, str], list[Traffic]] = {}
    for row in rows:
        groups.setdefault((row.step, row.direction, row.scope), []).append(row)
    return [total(listed, step=step, direction=direction, scope=scope) for (step, direction, scope), listed in groups.items()]


# ---- the two books

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
_LOST = f"SELECT {_AT}, {_HOST}, json_extract(data, '$.book') FROM events WHERE kind = 'lost'"  # noqa: S608 - constants of ours
_ATTEMPTS = f"SELECT {ABOVE}, MAX(attempt) FROM ledger WHERE scope = '{WITHIN}' GROUP BY 1"  # noqa: S608 - constants of ours
_MAX_SENTENCES = 5


def reconcile(connection: sqlite3.Connection) -> Books:
    """Compares the books on (link, exchange, attempt, resending, direction, kind), to the byte.

    Rows that only one side has are no differences where that side alone survived. A host that lost its process or its stream forgets what
    it booked since its last snapshot; tasks and replies that were on their way are booked by their sender alone; a killed coordinator
    forgets what it had not yet written. While a run has not finished, hosts have yet to bring what the coordinator alone has.
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
        is_killed = row_attempt < attempts.get(above, attempt)
        n_rows = sum(numbers[0] for numbers in found.values())
        if found.keys() == {"parent"} and (link in unsteady or above in incomplete or is_killed):
            lost_by_host[link] += n_rows
        elif found.keys() == {"parent"} and not is_finished:
            not_brought[link] += n_rows
        elif found.keys() == {"host"} and is_killed:
            lost_by_parent[link] += n_rows
        elif found.keys() == {"host"} and direction == UP and link in unsteady:
            on_the_way[link] += n_rows
        else:
            n_differences += n_rows
            where = f"exchange {seq}, link {link!r}, step {step_of(kind)} ({kind}, {direction})"
            sentences.append(f"{where}: {_said_apart(link, found)}")
    absent = tuple(sorted(links - with_books))
    listed, left_out = tuple(sentences[:_MAX_SENTENCES]), _left_out(connection).intersection(absent)
    return Books(n_agreed, lost_by_host, lost_by_parent, absent, n_differences, listed, on_the_way, not_brought, left_out)


def _left_out(connection: sqlite3.Connection) -> frozenset[str]:
    """The hosts without which some exchange went on."""
    values = connection.execute("SELECT value FROM decisions WHERE kind IN ('skip', 'pass')")
    return frozenset(str(name) for (value,) in values for name in json.loads(value))


def _interrupted(connection: sqlite3.Connection) -> tuple[set[str], set[str]]:
    """Links that were lost for a time, and the aggregators whose books have not come whole, neither their own nor those of their hosts."""
    unsteady, incomplete = set(), set()
    for at, host, is_book in connection.execute(_LOST):
        unsteady.add(host if at is None else link_below(at, host))
        if is_book and at is None:
            incomplete.add(link_below(host, ""))
    return unsteady, incomplete


def _said_apart(link: str, found: Mapping[str, tuple[int, ...]]) -> str:
    """What each side booked, of the measures in which they differ; of one that booked nothing, the other's bytes."""
    nothing = (0,) * len(_MEASURES)
    parent, host = found.get("parent", nothing), found.get("host", nothing)
    apart = [place for place in range(1, len(_MEASURES)) if parent[place] != host[place]] if len(found) > 1 else [_MEASURES.index("bytes")]
    above, below, name = link.partition("/")
    who = f"aggregator {above!r}" if below else "the coordinator"
    measures = [f"{parent[place]:,} {_MEASURES[place]}, host {name or link!r} {host[place]:,}" for place in apart or [0]]
    rows = f" in {parent[0]} rows and {host[0]}" if parent[0] != host[0] and len(found) > 1 else ""
    alone = "" if len(found) > 1 else f" ({'the host' if 'host' in found else who} alone has it)"
    return f"{who} booked {'; '.join(measures)}{rows}{alone}"
