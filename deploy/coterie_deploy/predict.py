"""`coterie predict`: the model of one user, applied to the rows of a table."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from coterie.arrays import Array
from coterie.config import Experiment, load_experiment
from coterie.errors import ConfigError
from coterie.names import unknown_user
from coterie_client.problems.resolve import resolve_row_loss
from coterie_deploy import predict_network
from coterie_deploy.shipped import FROZEN
from coterie_deploy.tabular import features_of, is_number, read_table, write_table
from coterie_server import summary
from coterie_server.rundb import open_run

PREDICTION = "prediction"


@dataclass(frozen=True)
class Model:
    """A user's final model and the constants that its features were standardised with."""

    x: Array  # (d,)
    mean: Array | None  # (p,)
    scale: Array | None  # (p,)
    columns: tuple[str, ...]  # the names of the p features, in order; empty where the data named none

    def features_wanted(self, experiment: Experiment) -> int:
        """p."""
        return len(self.x) - experiment.problem.has_intercept


def predict(folder: Path, user: str, table: Path, stage: str | None, out: Path | None, stdout: IO[str], state: Path | None = None) -> None:
    """Writes the table with a column "prediction": the label -1 or 1 of a classifier, else the value. Raises ConfigError.

    `state` is where a host elsewhere has left the private tensors of a user with a network.
    """
    path = folder / FROZEN
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {FROZEN}")
    experiment = load_experiment(path)
    if experiment.model is not None:
        predict_network.predict(folder, user, table, state, out, stdout)
        return
    if experiment.problem.is_distance:
        raise ConfigError(f"the loss {experiment.problem.loss} makes no predictions: its models are points")
    model = _model(folder, user, stage)
    header, rows = read_table(table)
    columns = _named(model.columns, table, header) if model.columns else _numeric(experiment, table, header, rows, model)
    features = features_of(table, header, rows, columns)
    if model.mean is not None and model.scale is not None:
        features = (features - model.mean) / model.scale
    if experiment.problem.has_intercept:
        features = np.column_stack([features, np.full(len(rows), -1.0)])
    loss = resolve_row_loss(experiment.problem)
    predictions = loss.predict((features * model.x).sum(axis=1))
    said = [f"{value:g}" if loss.is_classifier else repr(float(value)) for value in predictions]
    write_table(out, stdout, [*header, PREDICTION], [[*cells, value] for (_, cells), value in zip(rows, said, strict=True)])


def _model(folder: Path, user: str, stage: str | None) -> Model:
    with contextlib.closing(open_run(folder)) as connection:
        name = summary.facts(connection).get("final_stage") if stage is None else summary.stage_named(connection, stage).name
    if name is None:
        raise ConfigError(f"the run in {folder} has not finished, so it has no models yet")
    path = folder / "models" / f"{name}.npz"
    if not path.is_file():
        raise ConfigError(f"stage {name!r} has left no models in {folder}")
    with np.load(path) as arrays:
        users = [str(known) for known in arrays["users"]]
        if user not in users:
            raise unknown_user(user, users)
        if "x" not in arrays:
            raise ConfigError(f"the models of stage {name!r} have stayed with their users")
        constants = [arrays.get(key) for key in ("mean", "scale")]
        columns = tuple(str(column) for column in arrays["features"])
        return Model(arrays["x"][users.index(user)], constants[0], constants[1], columns)


def _named(columns: tuple[str, ...], table: Path, header: list[str]) -> list[str]:
    """The features that the model was trained on, wherever they stand in the table."""
    missing = [column for column in columns if column not in header]
    if missing:
        raise ConfigError(f"{table}: column {missing[0]!r} is missing, found {', '.join(map(repr, header))}")
    return list(columns)


def _numeric(experiment: Experiment, table: Path, header: list[str], rows: list[tuple[int, list[str]]], model: Model) -> list[str]:
    """For a model whose features have no names: all numeric columns that have no other role, in their order."""
    wanted = model.features_wanted(experiment)
    roles = {getattr(experiment.data, role, None) for role in ("user_column", "cluster_column", "target_column")}
    first = rows[0][1] if rows else header
    found = [column for column, cell in zip(header, first, strict=True) if column not in roles and is_number(cell)]
    if rows and len(found) != wanted:
        raise ConfigError(f"{table} has {len(found)} numeric columns for features ({', '.join(found) or 'none'}), the model wants {wanted}")
    return found
