"""Coterie from Python: `run` an experiment and look at its `Result`.

    import coterie
    result = coterie.run("ellipses")
    result.models["u0"]

A run promises the same bits everywhere with one BLAS thread. Commands set it; from Python, set OMP_NUM_THREADS=1 before numpy is
imported.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, as_written, experiment_from
from coterie.experiment.features import Feature
from coterie.experiment.overrides import apply_overrides
from coterie_deploy.engines.launch import TRANSPORTS, Launch, Transport, launch
from coterie_deploy.read import shipped
from coterie_deploy.read.frames import Library
from coterie_deploy.read.loading import Run, load_run, run_in_memory
from coterie_deploy.read.models import StageModels
from coterie_server.interface.half import Facts, Outcome
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.run.engine import Observer

Source = Experiment | Mapping[str, Any] | str | os.PathLike[str]  # a path, or the name of a shipped experiment
T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A run that has ended well. Its arrays are not copied."""

    folder: Path | None  #: The run folder; None if nothing was written.
    final_stage: str  #: The stage whose models are the result.
    users: tuple[str, ...]  #: Names of the users, in member order.
    outcomes: Mapping[str, Outcome] = field(repr=False)
    database: bytes = field(repr=False)  # of a run without a folder, an image of its run.db
    facts: Facts = field(repr=False)
    features: tuple[Feature, ...] = field(repr=False)  #: Name, kind and column of each feature, where the data has names.

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages, in order."""
        return tuple(self.outcomes)

    @property
    def models(self) -> dict[str, Array]:
        """Each user's final model (d,)."""
        return self.models_of(self.final_stage)

    @property
    def clusters(self) -> dict[str, int] | None:
        """Each user's cluster in the final stage, numbered by first member; None for a method without clusters."""
        return self._after(self.final_stage).clusters()

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The closing figures of each stage: objective, sum_of_losses, heldout_loss, heldout_metric, clusters, ..."""
        return {name: dict(outcome.figures) for name, outcome in self.outcomes.items()}

    def models_of(self, stage: str) -> dict[str, Array]:
        """Each user's model (d,) after a stage. ConfigError if there is no such stage, or models stay with their users."""
        return self._after(stage).by_user()

    def as_run(self, *, frames: Library = "pandas") -> Run[Any]:
        """The run as `coterie.load_run` gives it, whose tables are data frames. ConfigError when the library is not installed."""
        if self.folder is not None:
            return load_run(self.folder, frames=frames)
        return run_in_memory(self._connection, self._after, frames)

    def coefficients(self, stage: str | None = None, *, frames: Library = "pandas", **asked: Any) -> Any:
        """A data frame of the models' coefficients; for its columns and what may be `asked` see `coterie_deploy.read.loading.Run`."""
        return self.as_run(frames=frames).coefficients(stage, **asked)

    def history(self, stage: str | None = None) -> list[dict[str, float]]:
        """The figures of each round of a stage, by default the final one. The number of the round is "round"."""
        with self._connection() as connection:
            return summary.history(connection, summary.stage_named(connection, stage or self.final_stage).number)

    def ledger(self) -> list[dict[str, Any]]:
        """Traffic by stage, step, direction and scope: vectors, their closed form (`expected`), scalars, and bytes."""
        with self._connection() as connection:
            names = {stage.number: stage.name for stage in summary.stages(connection)} | {summary.SESSION: "session"}
            rows = summary.traffic(connection)
        return [{**asdict(row), "stage": names.get(row.stage, ""), "wire_bytes": row.wire_bytes} for row in rows]

    def _after(self, stage: str) -> StageModels:
        if stage not in self.outcomes:
            raise summary.unknown_stage(stage, self.outcomes)
        outcome, facts = self.outcomes[stage], self.facts
        names = tuple(feature.name for feature in self.features)
        constants = (facts.mean, facts.scale, names, outcome.shared, facts.fill)
        return StageModels(stage, self.users, outcome.models, outcome.labels, *constants, outcome.moments)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(":memory:") if self.folder is None else open_run(self.folder)
        with contextlib.closing(connection):
            if self.folder is None:
                connection.deserialize(self.database)
            yield connection


def load_experiment(config: Source, overrides: Sequence[str] = (), *, hosts: int | None = None) -> Experiment:
    """The experiment of a mapping, of a YAML file or run folder, of a shipped name, or of another `Experiment`.

    `overrides` are of the form "method.penalty=0.05"; `hosts` replaces the experiment's own number. Raises ConfigError.
    """
    listed = [*overrides] if hosts is None else [*overrides, f"federation.hosts={hosts}"]
    if isinstance(config, str | os.PathLike):
        return shipped.load(os.fspath(config), listed)
    content = as_written(config) if isinstance(config, Experiment) else config
    return experiment_from(apply_overrides(content, listed))


def run(
    config: Source,
    *,
    transport: Transport = "loopback",
    hosts: int | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    data: str | os.PathLike[str] | None = None,
    observer: Observer | None = None,
) -> Result:
    """Runs an experiment and returns its result.

    Without `output` nothing is written. `hosts` defaults to the experiment's own number, `overrides` are of the form "method.penalty=0.05",
    `data` is the folder that data paths start in, and `observer` receives the progress after each round. Inside a running event loop, a
    thread runs the experiment. Raises ConfigError, RunError, ProtocolError.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"the transport is {transport!r}, want one of {', '.join(TRANSPORTS)}")
    experiment = load_experiment(config, overrides, hosts=hosts)
    if transport == "loopback" and experiment.federation.is_two_tier:
        rules = experiment.federation.model_copy(update={"topology": "flat"})  # one process has one tier; the bits are the same
        experiment = experiment.model_copy(update={"federation": rules})
    folder, place = (None if path is None else Path(path) for path in (output, data))
    how = Launch(transport, folder, place, resume, observer=observer)
    return outside_of_loops(lambda: asyncio.run(_run(experiment, how)))


async def _run(experiment: Experiment, how: Launch) -> Result:
    finished = await launch(experiment, how)
    image = b""
    if finished.folder is None:
        finished.database.flush()
        image = finished.database.connection.serialize()
        finished.database.close()
    names, features = finished.members.names, finished.features
    return Result(finished.folder, finished.final_stage, names, finished.outcomes, image, finished.facts, features)


def outside_of_loops(work: Callable[[], T]) -> T:
    """The result of work that runs an event loop. Inside a running loop, a thread does the work."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="coterie-run") as thread:
        return thread.submit(work).result()
