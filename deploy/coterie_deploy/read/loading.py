"""Runs in notebooks and scripts: `coterie.load_run` and the `Run` that it gives, whose tables are data frames.

import coterie
run = coterie.load_run("runs/demo")
run.traffic(by=["step", "direction"])
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.columns import Levels
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.features import Feature
from coterie_deploy.read import run_tables
from coterie_deploy.read.frames import Columns, Frame, Library, Maker, maker_of
from coterie_deploy.read.ledger_page import status_of
from coterie_deploy.read.models import (
    StageModels,
    check_predicts,
    finished_run,
    models_of,
    predicted,
    predictions_of,
    scores,
    stage_models,
    with_kept,
)
from coterie_deploy.read.run_tables import reading
from coterie_deploy.read.sentences import features_in
from coterie_deploy.read.shipped import frozen_in
from coterie_server.interface.half import Members
from coterie_server.record import summary
from coterie_server.record.query import Query
from coterie_server.record.rundb import read_run

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from coterie_deploy.read.coefficients import Asked
    from coterie_deploy.read.coefficients import Table as CoefficientTable

_BY = ("stage", "step", "direction", "scope")
_MAX_STAGES = 6  # listed in a line
_LIMITS = tuple(one.name for one in fields(Query) if one.name != "by")


@dataclass(frozen=True, repr=False)
class Run(Generic[Frame]):
    """A run, finished or under way. Each answer is read from its database at that moment.

    Bytes are wire bytes: protobuf messages and 5 bytes for each gRPC frame. Frames are of the library that the run was loaded with.
    """

    folder: Path | None  #: The run folder; None for a run in memory.
    experiment: Experiment  #: The frozen experiment.
    _open: Callable[[], AbstractContextManager[sqlite3.Connection]] = field(repr=False)
    _stage: Callable[[str], StageModels] = field(repr=False)
    _frame: Maker[Frame] = field(repr=False)

    def __repr__(self) -> str:
        stages = self.stages
        listed = stages if len(stages) <= _MAX_STAGES else (*stages[: _MAX_STAGES - 1], f"... ({len(stages)})")
        return f"Run({self.name!r}, {self.method}, {self.status}, stages: {', '.join(listed) or 'none yet'})"

    # ---- facts

    @property
    def facts(self) -> Mapping[str, str]:
        """The facts of the run: run_id, name, status, attempt, version, final_stage, ..."""
        with self._open() as connection:
            found = summary.facts(connection)
        return found if self.folder is None else {**found, "status": status_of(self.folder, found)}

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def method(self) -> str:
        return str(self.experiment.method.name)

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def run_id(self) -> str:
        return self.facts.get("run_id", "")

    @property
    def status(self) -> str:
        """ "running", "finished", "stopped, can be resumed", or "failed: " and why."""
        return self.facts.get("status", "?")

    @property
    def version(self) -> str:
        """The version of Coterie that started or resumed the run."""
        return self.facts.get("version", "?")

    @property
    def stages(self) -> tuple[str, ...]:
        with self._open() as connection:
            return tuple(stage.name for stage in summary.stages(connection))

    @property
    def final_stage(self) -> str | None:
        """The stage whose models are the result; None while the run has not finished."""
        return self.facts.get("final_stage")

    @property
    def users(self) -> tuple[str, ...]:
        """Names of the users, in member order."""
        with self._open() as connection:
            return tuple(name for (name,) in connection.execute("SELECT name FROM members ORDER BY position"))

    @property
    def features(self) -> tuple[Feature, ...]:
        """Name, kind and column of each feature, in the order of the models' weights; empty if the data names none."""
        return features_in(self.facts)

    # ---- tables

    def ledger(self) -> Frame:
        """Every row of the parents' books: one for each exchange, link, kind of message and direction.

        Sums count a broadcast once for each host, and repeated messages each time (see `useful`): for totals use `traffic`.
        """
        return self._table(run_tables.ledger)

    def traffic(self, by: Sequence[str] = _BY, **limits: Any) -> Frame:
        """Totals of the ledger, grouped by keys of `coterie_server.record.query.KEYS`; `limits` are fields of its `Query`.

        A broadcast counts once in vectors and scalars. ConfigError for an unknown key, limit or value.
        """
        for unknown in (name for name in limits if name not in _LIMITS):
            raise ConfigError(f"the ledger cannot be limited by {unknown!r}, want one of {', '.join(_LIMITS)}")
        texts = {name: (value,) if isinstance(value, str) else value for name, value in limits.items()}
        listed: dict[str, Any] = {name: tuple(value) if isinstance(value, Sequence) else value for name, value in texts.items()}
        query = Query((by,) if isinstance(by, str) else tuple(by), **listed)
        return self._table(lambda connection: run_tables.traffic(connection, query))

    def metrics(self, stage: str | None = None, *, long: bool = False) -> Frame:
        """The rounds of all stages or of one: seconds since the stage began, bytes so far, and the figures of the method.

        One row for each round, or with `long` one for each of its figures (`figure`, `value`). Round 0 is the start of a stage.
        ConfigError if there is no such stage.
        """

        def columns(connection: sqlite3.Connection) -> Columns:
            chosen = summary.stages(connection) if stage is None else [summary.stage_named(connection, stage)]
            return (run_tables.metrics_long if long else run_tables.metrics)(connection, chosen)

        return self._table(columns)

    def results(self) -> Frame:
        """A row for each stage: its method, rounds, why and after how many seconds it ended, and its closing figures."""
        return self._table(run_tables.results)

    def user_results(self) -> Frame:
        """The users' own judgement of their models, for the stages and users with such figures."""
        return self._table(run_tables.user_results)

    def members(self) -> Frame:
        """Users in member order, with their known clusters and their hosts."""
        return self._table(run_tables.members)

    def memberships(self) -> Frame:
        """The clusters found, user by user, in each round in which one changed."""
        return self._table(run_tables.memberships)

    def events(self) -> Frame:
        """The events: joins, losses, warnings, resumes, the end."""
        return self._table(run_tables.events)

    def _table(self, columns: Callable[[sqlite3.Connection], Columns]) -> Frame:
        with self._open() as connection, reading(connection):
            found = columns(connection)
        return self._frame(found)

    # ---- models

    @property
    def models(self) -> dict[str, Array]:
        """Each user's final model (d,). ConfigError if there is none yet, or models stay with their users."""
        return self.models_of(self._final())

    def models_of(self, stage: str) -> dict[str, Array]:
        """Each user's model (d,) after a stage. ConfigError when there is no such stage, or its models stay with their users."""
        return self._after(stage).by_user()

    @property
    def clusters(self) -> dict[str, int] | None:
        """Each user's cluster in the final stage, numbered by first member; None for a method without clusters."""
        return self._after(self._final()).clusters()

    def coefficients(self, stage: str | None = None, **asked: Any) -> Frame:
        """Coefficients in natural units, a row for each model and coefficient: `model` (user, cluster, everyone), `name`, `cluster`,
        `coefficient`, `estimate`, `standard_error`, `low`, `high`, `n_rows`.

        `asked` are fields of `coterie_deploy.read.coefficients.Asked`: users, cluster, level (0.95), errors ("classical" or "robust").
        Standard errors are missing in runs without `inference: true`. ConfigError for an unknown stage, user or cluster.
        """
        from coterie_deploy.read.coefficients import asked_for  # noqa: PLC0415 - only here

        return self._frame(self.coefficient_table(stage, asked_for(asked)).columns())

    def coefficient_table(self, stage: str | None = None, asked: Asked | None = None) -> CoefficientTable:
        """As `coefficients`, with the notes and the variance components. ConfigError likewise."""
        from coterie_deploy.read.coefficients import Asked, coefficients  # noqa: PLC0415 - only here

        return coefficients(self.experiment, self._after(stage or self._final()), self._members(), asked or Asked())

    @property
    def shared(self) -> Mapping[str, NDArray[Any]]:
        """Shared arrays of the final stage by name: tensors of a network, or a representation. Empty for other methods."""
        return self._after(self._final()).shared

    def networks(
        self, users: Sequence[str] | None = None, state: str | os.PathLike[str] | None = None
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """All tensors of users' networks, shared and private, by name.

        `state` is the state folder of hosts that were started apart from the run. ConfigError if the tensors are not there.
        """
        return models_of(finished_run(self._folder()), None if state is None else Path(state), users)

    def predict(
        self, user: str | None, rows: Any, stage: str | None = None, *, cluster: str | None = None, global_: bool = False
    ) -> NDArray[Any]:
        """(m,) predictions for new rows: the class, or the value of a regression.

        The model is the user's. For users that the run has not seen, `user` is None, and it is that of a `cluster`, or with `global_`
        everyone's; as in `coterie predict`, the final stage's or that of its reference.

        `rows` is a frame with columns of the features or of the data's table, or an array (m, ...) of features in their order, as they are
        in the data. Missing cells (NaN) are filled as in training, if the run fills them. ConfigError for an unknown user and wrong rows.
        """
        from coterie_deploy.read.shared_models import Whose, shared_model  # noqa: PLC0415 - only here

        whose = Whose(user, cluster, global_, stage)
        if self.experiment.model is not None:
            from coterie_deploy.read.predict import predictions, user_of  # noqa: PLC0415 - for networks alone

            return predictions(self._folder(), user_of(whose), np.asarray(rows))
        check_predicts(self.experiment)
        if user is None:
            found = shared_model(self.experiment, self._members(), whose, self._final(), self.stages, self._after)
            features = self._features(found.stage, rows, found.x.size)
            return predictions_of(self.experiment, scores(self.experiment, found.stage, found.x, features))
        models = self._after(stage or self._final())
        if self.folder is not None:
            models = with_kept(models, self.folder, None, user)
        return predicted(self.experiment, models, user, self._features(models, rows, models.model_of(user).size))

    def _features(self, models: StageModels, rows: Any, d: int) -> Array:
        """(m, p) numbers, NaN where the run fills in missing cells. ConfigError for missing columns, another p, and other values."""
        if hasattr(rows, "columns") and models.columns:
            missing = next((name for name in models.columns if name not in rows.columns), None)
            is_text = missing is None and any(np.asarray(rows[name]).dtype.kind not in "iufb" for name in models.columns)
            if (missing is not None and self._has_made_features) or (is_text and any(one.kind != "number" for one in self.features)):
                from coterie_client.data.new_rows import frame_rows  # noqa: PLC0415 - a machine that only looks at runs reads no rows

                rows = frame_rows(self.experiment.data, rows, models.columns).features
            elif missing is not None:
                raise ConfigError(f"the rows have no column {missing!r}, want {', '.join(models.columns)}")
            else:
                rows = rows[list(models.columns)]
        try:
            features = np.asarray(rows, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the rows are not all numbers: {error}") from None
        p = d - self.experiment.problem.has_intercept
        if features.ndim != 2 or features.shape[1] != p:
            raise ConfigError(f"the rows have shape {features.shape}, want (m, {p})")
        if not (np.isfinite(features) | (np.isnan(features) & (models.fill is not None))).all():
            raise ConfigError("the rows have values that are not finite, want numbers")
        return features

    @property
    def _has_made_features(self) -> bool:
        """Whether features are made of columns: levels, indicators, terms."""
        data = self.experiment.data
        makes = any(kind == "category" or isinstance(kind, Levels) for kind in getattr(data, "columns", {}).values())
        return makes or getattr(data, "formula", None) is not None or getattr(data, "missing", "refuse") == "indicator"

    def _members(self) -> Members:
        from coterie_deploy.read.coefficients import members_of  # noqa: PLC0415 - only here

        with self._open() as connection:
            return members_of(connection)

    def _final(self) -> str:
        final = self.final_stage
        if final is None:
            raise ConfigError(f"the run {self.name!r} has not finished, so it has no models yet")
        return final

    def _after(self, stage: str) -> StageModels:
        if stage not in self.stages:
            raise summary.unknown_stage(stage, self.stages)
        return self._stage(stage)

    def _folder(self) -> Path:
        if self.folder is None:
            raise ConfigError("the run is in memory alone, want one with an output folder, where its hosts leave the users' networks")
        return self.folder


@overload
def load_run(path: str | os.PathLike[str], *, frames: Literal["pandas"] = "pandas") -> Run[pd.DataFrame]: ...
@overload
def load_run(path: str | os.PathLike[str], *, frames: Literal["polars"]) -> Run[pl.DataFrame]: ...
def load_run(path: str | os.PathLike[str], *, frames: Library = "pandas") -> Run[Any]:
    """Opens a run folder, of a run that has finished or is under way. Tables are data frames of pandas or polars (the extra `frames`).

    ConfigError if it is no run folder, or the library is not installed.
    """
    folder, frame = Path(path), maker_of(frames)

    def opened() -> AbstractContextManager[sqlite3.Connection]:
        return read_run(folder)

    with opened():
        pass  # raises an error if there is no run
    return Run(folder, frozen_in(folder), opened, lambda stage: stage_models(folder, stage), frame)


def run_in_memory(
    opened: Callable[[], AbstractContextManager[sqlite3.Connection]], stage: Callable[[str], StageModels], frames: Library
) -> Run[Any]:
    with opened() as connection:
        experiment = experiment_from(json.loads(summary.facts(connection)["experiment"]))
    return Run(None, experiment, opened, stage, maker_of(frames))
