"""The status of a run, from its folder alone: whether it is running, its progress and speed, its members, and its traffic."""

import contextlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from
from coterie_server.interface.stages import Stage
from coterie_server.record.curves import GAP, Curves, residual_of
from coterie_server.record.follow import Added, Event, Follower
from coterie_server.record.run_file import FLUSH_S
from coterie_server.record.rundb import BETWEEN, DIRECT, PEERS, WITHIN
from coterie_server.record.summary import StageSummary
from coterie_server.run.coordinator import is_held
from coterie_server.run.plan import stages_of

RATE_OVER_S = 10.0
_RATE_FROM_S = 2.0  # that a stage has to be watched, or its rate is an accident
_UNWRITTEN_S = 2 * FLUSH_S  # of what was made in these last seconds, not all may be in the database
_FAILED = "failed: "
_FITTED_ROUNDS = 200  # at most, in which a residual's fall is measured
_LEAST_ROUNDS = 8  # for that
_SCOPES = (DIRECT, WITHIN, BETWEEN, PEERS)


class Status(StrEnum):
    running = "running"
    finished = "finished"
    failed = "failed"
    stopped = "stopped"  # killed: no coordinator is running, and none recorded an end


@dataclass(frozen=True)
class Pace:
    """Rounds and useful wire bytes per second: over the last seconds of a stage under way, or a whole ended stage. 0 if unknown."""

    rounds_per_s: float = 0.0
    bytes_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by (direction, scope)


@dataclass(frozen=True)
class Member:
    name: str
    n_users: int
    is_here: bool
    since: float  # seconds since the epoch; NaN when that is not known


@dataclass(frozen=True)
class Sent:
    """Useful traffic of all stages, in one scope and direction."""

    scope: str
    direction: str
    vectors: int
    wire_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at one moment. `reason`: why it failed."""

    name: str
    run_id: str
    attempt: int
    status: Status
    reason: str
    stages: Sequence[StageSummary]
    n_stages: int  # of the whole plan
    limit: int  # rounds that its stage may take; 0 when it is not known
    stage: StageSummary | None  # the newest, or, in a finished run, that of the result
    curves: Curves | None  # of that stage
    pace: Pace
    left_s: float  # the most that its stage will still take; NaN if unknown
    likely_s: float  # until its stop rule holds, at this speed; NaN if unknown
    noun: str  # "host" or "aggregator"
    n_wanted: int  # how many join
    members: Sequence[Member]
    sent: Sequence[Sent]
    events: Sequence[Event]

    @property
    def is_under_way(self) -> bool:
        return self.status is Status.running

    @property
    def doing(self) -> str:
        """The activity of a running run without a stage."""
        n_here = sum(member.is_here for member in self.members)
        return f"waiting for {self.noun}s: {n_here} of {self.n_wanted} here" if n_here < self.n_wanted else "preparing"

    @property
    def sentence(self) -> str:
        return ending(self.status, self.reason)


class Watcher:
    """Reads a run again and again. Threads that share it hold its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.follower, self.lock = folder, Follower(folder), threading.Lock()
        self._frozen: str | None = None
        self._experiment: Experiment | None = None
        self._plan: Sequence[Stage] = ()

    def look(self) -> tuple[RunStatus, Added]:
        """The status, and what is new. ConfigError if there is no run database, RunError if it cannot be read."""
        is_at_work = is_held(self.follower.folder)  # before what it has written: the last it writes is that it has finished
        added = self.follower.update()
        self._read_experiment()
        return self._status(is_at_work=is_at_work), added

    def _read_experiment(self) -> None:
        """An experiment that this version does not understand has no plan."""
        frozen = self.follower.facts.get("experiment")
        if frozen is None or frozen == self._frozen:
            return
        self._frozen, self._experiment, self._plan = frozen, None, ()
        with contextlib.suppress(ConfigError, ValueError, ImportError):
            self._experiment = experiment_from(json.loads(frozen))
            self._plan = stages_of(self._experiment)

    def _status(self, *, is_at_work: bool) -> RunStatus:
        follower, rules = self.follower, None if self._experiment is None else self._experiment.federation
        status, reason = status_of(follower.facts.get("status", ""), is_at_work=is_at_work)
        stage = next((one for one in follower.stages if one.name == follower.facts.get("final_stage")), follower.stage)
        curves = None if stage is None else follower.curves(stage)
        planned = next((one for one in self._plan if stage is not None and one.name == stage.name), None)
        is_live = status is Status.running and stage is not None and not stage.outcome
        now_s = time.time() - follower.began_at(stage) if stage is not None and is_live else math.nan
        pace = Pace() if curves is None else pace_of(curves, now_s)
        limit = planned.stop.rounds if planned is not None else 0
        left = max(limit - (0 if stage is None else stage.rounds), 0)
        n_likely = math.nan if curves is None or planned is None or not is_live else rounds_left(curves, planned)
        return RunStatus(
            follower.facts.get("name", follower.folder.name),
            follower.facts.get("run_id", ""),
            int(follower.facts.get("attempt", "1")),
            status,
            reason,
            follower.stages,
            max(len(self._plan), len(follower.stages)),
            limit,
            stage,
            curves,
            pace,
            left / pace.rounds_per_s if is_live and limit and pace.rounds_per_s else math.nan,
            n_likely / pace.rounds_per_s if n_likely < left and pace.rounds_per_s else math.nan,
            "host" if rules is None else rules.noun,
            len(follower.hosts) if rules is None else rules.hosts,
            [
                Member(name, follower.hosts.get(name, 0), *follower.here.get(name, (False, math.nan)))
                for name in dict.fromkeys([*follower.hosts, *follower.here])
            ],
            self._sent(pace if is_live else Pace()),
            tuple(follower.events),
        )

    def _sent(self, pace: Pace) -> list[Sent]:
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for (_, _, direction, scope), row in self.follower.traffic.items():
            vectors, n_bytes = sums.get((scope, direction), (0, 0))
            sums[scope, direction] = (vectors + row.vectors, n_bytes + row.wire_bytes)
        order = sorted(sums, key=lambda way: (_SCOPES.index(way[0]) if way[0] in _SCOPES else len(_SCOPES), way[1] != "up"))
        return [Sent(scope, way, *sums[scope, way], pace.bytes_per_s.get((way, scope), 0.0)) for scope, way in order]


def status_of(said: str, *, is_at_work: bool) -> tuple[Status, str]:
    """The status of a run, and why it failed; `said` is the last status that it recorded."""
    if said == Status.finished:
        return Status.finished, ""
    if said.startswith(_FAILED):
        return Status.failed, said.removeprefix(_FAILED)
    return (Status.running if is_at_work else Status.stopped), ""


def ending(status: Status, reason: str) -> str:
    """How a failed or stopped run ended, in a sentence."""
    if status is Status.stopped:
        return "the run was stopped, nobody is at work in its folder; it can be resumed"
    return f"the run has failed: {reason}"


def pace_of(curves: Curves, now_s: float) -> Pace:
    """The speed of a stage, unknown if it has just begun; `now_s` is the time since its start, NaN if it has ended."""
    known = np.flatnonzero(~np.isnan(curves.seconds))
    is_live = not math.isnan(now_s)
    if is_live and known.size > 0:
        known = known[1:]  # the first round begins with what the stage sets up
    if known.size < 2:
        return Pace()
    first, last, until = int(known[0]), int(known[-1]), float(curves.seconds[known[-1]])
    if is_live:
        until = max(until, now_s - _UNWRITTEN_S)
        recent = known[curves.seconds[known] >= until - RATE_OVER_S]
        first = int(recent[0]) if recent.size > 1 else int(known[-2])
    took = until - float(curves.seconds[first])
    if took <= 0 or (is_live and took < _RATE_FROM_S):
        return Pace()
    sent = {way: float(so_far[last] - so_far[first]) / took for way, so_far in curves.wire_bytes.items()}
    return Pace((last - first) / took, sent)


def rounds_left(curves: Curves, stage: Stage) -> float:
    """The rounds until the stop rule holds, extrapolated from its residual or gap; NaN if unknown."""
    values, goal = _falling(curves, stage)
    places = np.flatnonzero(np.isfinite(values) & (values > 0)) if goal else np.zeros(0, dtype=np.int64)
    places = places[-min(_FITTED_ROUNDS, places.size // 2) :]
    if places.size < _LEAST_ROUNDS:
        return math.nan
    slope, at_zero = np.polyfit(places, np.log(values[places]), 1)
    if not slope < 0:
        return math.nan
    return float(max((math.log(goal) - at_zero) / slope - places[-1], 0.0))


def _falling(curves: Curves, stage: Stage) -> tuple[Array, float]:
    """(t,) the figure of the stop rule, and the value at which it holds; 0 without such a rule."""
    if stage.stop.residual is not None and (found := residual_of(curves)) is not None:
        return found, stage.stop.residual
    if stage.stop.objective_gap is not None and GAP in curves.figures:
        return curves.figures[GAP], stage.stop.objective_gap
    return np.zeros(0), 0.0
