"""A run folder that grows round by round, as one sees it who follows a run under way. Nothing here is tested itself."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.experiment.config import experiment_from, experiment_to_json
from coterie.record.ledger import DOWN, UP, Own, Row
from coterie_server.record.rundb import BETWEEN, DIRECT, RunDatabase
from coterie_server.run.coordinator import LOCK

STAGES = ("global", "pdmm-0.5")


class GrowingRun:
    """A run of two stages; `more()` makes its next round. While `held`, a coordinator seems to be at work."""

    def __init__(self, folder: Path, *, run_id: str = "0123456789abcdef", two_tiers: bool = False, **more: Any) -> None:
        self.folder, self.two_tiers = folder, two_tiers
        folder.mkdir()
        federation = {"topology": "clusters", "hosts": 2} if two_tiers else {"hosts": 2}
        content = {
            "name": "growing",
            "data": {"source": "ellipses"},
            "problem": {"loss": "squared_hinge"},
            "method": {"name": "pdmm", "path": [0.5]},
            "federation": federation,
            **more,
        }
        experiment = experiment_to_json(experiment_from(content))
        (folder / "experiment.json").write_text(json.dumps(json.loads(experiment), indent=2))
        self.now = 1_000_000.0
        self.database = RunDatabase(folder / "run.db", clock=lambda: self.now, scope=BETWEEN if two_tiers else DIRECT)
        facts = {"run_id": run_id, "name": "growing", "status": "running", "version": "9", "attempt": "1", "experiment": experiment}
        for key, value in facts.items():
            self.database.put(key, value)
        self.database.event("start", "attempt 1 starts")
        self.seq = self.stage = self.round = 0
        self._below: list[tuple[Row, Own]] = []  # that an aggregator brings at the end

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with (self.folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def begin(self, stage: int) -> None:
        self.stage, self.round = stage, 0
        self.database.stage(stage, STAGES[stage], "pdmm", 0, "", 0.0)
        self.database.figures(stage, 0, {})
        self._book(100)

    def more(self, **figures: float) -> None:
        """A round of a second, at the end of which there are these figures."""
        self.round += 1
        self.now += 1.0
        self._book(1000 + self.round)
        self.database.figures(self.stage, self.round, figures)
        self.database.flush()

    def end(self, **results: float) -> None:
        """The stage under way has ended, after an exchange about its models."""
        self._book(50)
        self.database.result(self.stage, results, {})
        self.database.stage(self.stage, STAGES[self.stage], "pdmm", self.round, "converged", 2.0)
        self.database.flush()

    def finish(self, status: str = "finished") -> None:
        self.database.put("status", status)
        self.database.book_within("a/h", self._below, [])
        self.database.flush()

    def _book(self, n_bytes: int) -> None:
        self.seq += 1
        for direction, size in ((DOWN, n_bytes), (UP, 2 * n_bytes)):
            row = Row(self.seq, 1, 0, direction, "consensus.GroupModel", 1, 3, 24, size, 1)
            self.database.book("h", (self.stage, self.round), [(row, None)], True)
        if self.two_tiers:
            self._below.append((Row(self.seq, 1, 0, UP, "consensus.GroupModel", 1, 3, 24, 7, 1), Own(1, self.stage, self.round, 0)))

    def query(self, sql: str, *values: Any) -> list[Any]:
        self.database.flush()
        return self.database.connection.execute(sql, values).fetchall()

    def by_round(self, stage: str, figure: str) -> list[tuple[int, float]]:
        """(round, value), from the database."""
        number = STAGES.index(stage)
        return self.query(
            "SELECT round, value FROM figures WHERE stage = ? AND name = ? AND value IS NOT NULL ORDER BY round", number, figure
        )

    def by_bytes(self, stage: str, figure: str) -> list[tuple[int, float]]:
        """(useful wire bytes of the stage up to and with the round, value), from the database."""
        number = STAGES.index(stage)
        sums = "SELECT SUM(message_bytes + 5 * frames) FROM ledger WHERE useful AND stage = ? AND round <= ?"
        return [(self.query(sums, number, place)[0][0], value) for place, value in self.by_round(stage, figure)]

    def times(self, stage: str) -> Mapping[int, float]:
        return dict(self.query("SELECT round, at FROM rounds WHERE stage = ?", STAGES.index(stage)))


def finished_run(folder: Path, **more: Any) -> GrowingRun:
    """A whole one."""
    run = GrowingRun(folder, **more)
    for stage in range(2):
        run.begin(stage)
        for number in range(1, 5):
            figures = {"objective": 1.0 / number + stage, "clusters": float(number)}
            run.more(**(figures if number != 2 else {"objective": 0.3, "clusters": float("nan")}))
        run.end(heldout_loss=0.25 + stage)
    run.finish()
    return run
