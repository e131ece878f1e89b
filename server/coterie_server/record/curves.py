"""The figures of a stage round by round, with the seconds and bytes that they had cost by then."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie_server.record.query import Query, totals
from coterie_server.record.rundb import BETWEEN, WITHIN
from coterie_server.record.summary import StageSummary

GAP = "gap"  # the relative gap of "objective"
RESIDUAL = "residual"  # the larger of the primal and the dual one, as a stop rule means it
_RISING = re.compile(r"accuracy|performance_ratio")  # figures of which more is better
_GOAL = re.compile(r"\s*(\w+)\s*=\s*(\S+)\s*")


@dataclass(frozen=True)
class Curves:
    """A stage round by round. Place 0 of `rounds`, `seconds` and `wire_bytes` is the start of the stage, with the traffic of its set-up."""

    stage: StageSummary
    rounds: Indices  # (t,) ascending, from 0
    seconds: Array  # (t,) since the stage began, including the time before a killed run was resumed; NaN where it is not known
    figures: Mapping[str, Array] = field(default_factory=dict)  # (t,) each, NaN in rounds without it
    wire_bytes: Mapping[tuple[str, str], Array] = field(default_factory=dict)  # by (direction, scope): (t,) useful bytes so far
    has_reference: bool = False  # whether "gap" is from the reference objective of the stop rule, not the stage's own smallest
    is_untraced: bool = False  # whether method.trace_every would have made the objective known

    def bytes_by(self, *, direction: str | None = None, scope: str | None = None) -> Array:
        """(t,) useful wire bytes so far, of one direction or scope, or of all."""
        chosen = [array for (way, where), array in self.wire_bytes.items() if direction in (None, way) and scope in (None, where)]
        return np.sum(chosen, axis=0) if chosen else np.zeros(self.rounds.size)

    @property
    def is_two_tier(self) -> bool:
        """Whether there is traffic within and between clusters."""
        return any(scope in (WITHIN, BETWEEN) for _, scope in self.wire_bytes)


@dataclass(frozen=True)
class Goal:
    """A value that a figure is to reach: from above, or from below for accuracies."""

    figure: str
    value: float

    @property
    def is_rising(self) -> bool:
        """Whether more is better."""
        return _RISING.search(self.figure) is not None

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.is_rising else '<='} {self.value:g}"


def goal_from(text: str) -> Goal:
    """FIGURE=VALUE, such as gap=1e-3 or accuracy=0.9. ConfigError when it is not that."""
    found = _GOAL.fullmatch(text)
    try:
        value = float(found[2]) if found else float("nan")
    except ValueError:
        value = float("nan")
    if found is None or not np.isfinite(value):
        raise ConfigError(f"the goal is {text!r}, want FIGURE=VALUE such as gap=1e-3 or accuracy=0.9")
    return Goal(found[1], value)


def curves(connection: sqlite3.Connection, stage: StageSummary, *, with_bytes: bool = True) -> Curves:
    """A stage round by round, finished or under way; the bytes of a large ledger take seconds, the rest does not."""
    at = dict(connection.execute("SELECT round, at FROM rounds WHERE stage = ? ORDER BY round", (stage.number,)))
    last = max((number for number in at), default=stage.rounds)
    rounds = np.arange(last + 1)
    seconds = np.full(rounds.size, np.nan)
    seconds[list(at)] = list(at.values())
    figures: dict[str, Array] = {}
    rows = connection.execute("SELECT name, round, value FROM figures WHERE stage = ? AND value IS NOT NULL", (stage.number,))
    for name, number, value in rows:
        if number <= last:
            if name not in figures:  # setdefault would make an array for each value
                figures[name] = np.full(rounds.size, np.nan)
            figures[name][number] = value
    wire_bytes = _bytes(connection, stage, last) if with_bytes else {}
    made = Curves(stage, rounds, seconds - seconds[0], figures, wire_bytes)
    row = connection.execute("SELECT value FROM run WHERE key = 'experiment'").fetchone()
    return with_gap(made, "{}" if row is None else row[0])


def _bytes(connection: sqlite3.Connection, stage: StageSummary, last: int) -> dict[tuple[str, str], Array]:
    sums: dict[tuple[str, str], Array] = {}
    for group in totals(connection, Query(("round", "direction", "scope"), stages=(stage.number,), last_round=last)):
        number, direction, scope = group.keys
        if (direction, scope) not in sums:
            sums[direction, scope] = np.zeros(last + 1)
        sums[direction, scope][number] += group.wire_bytes
    return {key: np.cumsum(array) for key, array in sums.items()}


def with_gap(made: Curves, experiment: str) -> Curves:
    """With (F - F*) / |F*|, F* the reference objective of the frozen experiment's stop rule, or else the smallest value of the stage.

    That objective is the method's own, not that of a reference stage. A stage without an objective stays as it is.
    """
    frozen = json.loads(experiment)
    method = frozen.get("method", {})
    is_of_method = method.get("name") == made.stage.method
    if "objective" not in made.figures:
        return replace(made, is_untraced=is_of_method and "trace_every" in method)
    reference = frozen.get("stop", {}).get("reference_objective") if is_of_method else None
    objective = made.figures["objective"]
    best = float(np.nanmin(objective)) if reference is None else float(reference)
    with np.errstate(invalid="ignore"):  # the objective may never have been finite
        gap = (objective - best) / max(abs(best), np.finfo(float).tiny)
    return replace(made, figures={**made.figures, GAP: gap}, has_reference=reference is not None)


def residual_of(curves: Curves) -> Array | None:
    """(t,) the larger of the primal and the dual residual; None when the method has none."""
    found = [curves.figures[name] for name in ("primal_residual", "dual_residual") if name in curves.figures]
    return np.fmax.reduce(found) if found else None


def with_figure_of(goal: Goal, made: Curves) -> Curves:
    """With the residual, where a goal asks for it; the curves have all other figures."""
    residual = residual_of(made) if goal.figure == RESIDUAL else None
    return made if residual is None else replace(made, figures={**made.figures, RESIDUAL: residual})


def reached(made: Curves, goal: Goal) -> int | None:
    """The first round in which a goal is reached, None where it is not. ConfigError when the stage has no such figure.

    A gap to the stage's own smallest objective counts only if an earlier round has reached it: the round of the smallest objective always
    has gap 0.
    """
    return None if is_by_definition(made, goal) else _first(made, goal)


def is_by_definition(made: Curves, goal: Goal) -> bool:
    """Whether no round before that of the stage's smallest objective has reached a goal that is a gap to that objective."""
    is_own = goal.figure == GAP and not made.has_reference
    return is_own and _first(made, goal) == _first(made, Goal(GAP, 0.0)) is not None


def _first(made: Curves, goal: Goal) -> int | None:
    values = _values(made, goal)
    is_there = values >= goal.value if goal.is_rising else values <= goal.value
    return int(made.rounds[np.argmax(is_there)]) if is_there.any() else None


def why_not_reached(made: Curves, goal: Goal) -> str:
    """A sentence on a goal for which `reached` has no round."""
    stage, (number, best) = made.stage, closest(made, goal)
    so_far = "" if stage.outcome else f"; the stage has not ended: it was looked at after round {stage.rounds}"
    if is_by_definition(made, goal):
        until = f"round {number} of {stage.rounds}, the first that has {goal}, is that of the objective from which the gap is measured"
        wanted = "want a larger gap, or an experiment with stop.reference_objective"
        return f"stage {stage.name!r} says nothing of {goal}: {until}, the smallest of the stage itself; {wanted}{so_far}"
    return f"stage {stage.name!r} has not reached {goal}: it came to {best:.3g} in round {number} of {stage.rounds}{so_far}"


def closest(made: Curves, goal: Goal) -> tuple[int, float]:
    """The first round with the best value of a goal's figure, and that value. ConfigError when the stage has no such figure."""
    values = _values(made, goal)
    place = int(np.nanargmax(values) if goal.is_rising else np.nanargmin(values))
    return int(made.rounds[place]), float(values[place])


def _values(made: Curves, goal: Goal) -> Array:
    values = made.figures.get(goal.figure)
    if values is None or np.isnan(values).all():
        known = ", ".join(sorted(made.figures)) or "none"
        is_traced_elsewhere = made.is_untraced and goal.figure in (GAP, "objective")
        more = "; a run with method.trace_every=100, say, knows its objective and gap every 100 iterations" if is_traced_elsewhere else ""
        raise ConfigError(f"stage {made.stage.name!r} has no figure {goal.figure!r} of its rounds, want one of: {known}{more}")
    return values
