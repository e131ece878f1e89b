"""What is exported of a run: for each stage its figures round by round, the time of each round, and the useful wire bytes so far.

With aggregators, bytes are exported only after the run: the bytes inside clusters arrive with the aggregators' books. The latest round of a
stage under way is not exported yet, because later messages may be booked in it. A relative gap to the best value so far is left out: that
value changes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.record.ledger import DOWN, UP
from coterie_deploy.read.ledger_page import status_of
from coterie_deploy.read.run_tables import reading
from coterie_deploy.read.shipped import by_dotted_key
from coterie_server.record import summary
from coterie_server.record.curves import GAP, curves
from coterie_server.record.rundb import read_run

BY_ROUND, BY_BYTES = "by_round", "by_bytes"


@dataclass(frozen=True)
class StagePoints:
    name: str
    rounds: Indices  # (t,) ascending
    at: Array  # (t,) seconds since the epoch
    n_bytes: Indices | None  # (t,) so far, in both directions; None while nobody knows
    figures: Mapping[str, Array]  # (t,) each, NaN in rounds without it
    costs: Mapping[str, Indices]  # (t,) bytes so far, by direction; empty while nobody knows
    results: Mapping[str, float]  # the closing figures
    has_ended: bool


@dataclass(frozen=True)
class Points:
    """A run at one moment."""

    folder: Path
    facts: Mapping[str, str]
    began_at: float  # seconds since the epoch
    stages: tuple[StagePoints, ...]

    @property
    def run_id(self) -> str:
        return self.facts["run_id"]

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.facts["status"] != "running"

    @property
    def settings(self) -> dict[str, Any]:
        """All values of the experiment by dotted key, without its description; lists are JSON."""
        content = json.loads(self.facts["experiment"])
        del content["description"]
        given = {key: value for key, value in by_dotted_key(content).items() if value is not None}
        return {key: json.dumps(value) if isinstance(value, list) else value for key, value in given.items()}


def points_of(folder: Path) -> Points:
    """A run, finished or under way. ConfigError when it is none, or has not begun."""
    with read_run(folder) as connection, reading(connection):
        facts = dict(summary.facts(connection))
        if "experiment" not in facts:
            raise ConfigError(f"the run in {folder} has not begun, want one with an experiment in its run.db")
        facts["status"] = status_of(folder, facts)
        content = json.loads(facts["experiment"])
        is_two_tier = content["federation"]["topology"] != "flat"
        knows_bytes = facts["status"] == "finished" or not is_two_tier
        with_gap = content["stop"]["reference_objective"] is not None
        (began_at,) = connection.execute("SELECT COALESCE(MIN(at), 0.0) FROM events").fetchone()
        stages = []
        for stage in summary.stages(connection):
            made = curves(connection, stage)
            at = dict(connection.execute("SELECT round, at FROM rounds WHERE stage = ?", (stage.number,)))
            last = made.rounds[-1] if stage.outcome else made.rounds[-1] - 1
            listed = [place for place, number in enumerate(made.rounds.tolist()) if 0 < number <= last and number in at]
            chosen = np.array(listed, dtype=np.int64)
            figures = {name: values[chosen] for name, values in made.figures.items() if name != GAP or with_gap}
            costs = {f"bytes_{way}": made.bytes_by(direction=way)[chosen].astype(np.int64) for way in (UP, DOWN)} if knows_bytes else {}
            rounds, n_bytes = made.rounds[chosen], np.sum([*costs.values()], axis=0) if costs else None
            times = np.array([at[number] for number in rounds.tolist()], dtype=np.float64)
            stages.append(StagePoints(stage.name, rounds, times, n_bytes, figures, costs, stage.results, bool(stage.outcome)))
    return Points(folder, facts, began_at, tuple(stages))
