"""`coterie predict`: the model of one user, applied to the rows of a table, or of a network also to those of an archive."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.experiment.data import NpzData
from coterie_client.data.archive import Archive
from coterie_client.data.new_rows import read_new_rows
from coterie_client.data.paths import one_file
from coterie_client.data.tables.features import as_rows
from coterie_client.hosting.build import build_network
from coterie_client.problems.resolve import resolve_row_loss
from coterie_deploy.read.models import (
    FinishedRun,
    Tensors,
    check_predicts,
    finished_run,
    models_of,
    predicted,
    stage_models,
    with_kept,
)
from coterie_deploy.read.shipped import frozen_in
from coterie_deploy.read.tabular import write_table
from coterie_server.record import summary
from coterie_server.record.rundb import read_run

ROW, PREDICTION = "row", "prediction"
_Columns = tuple[list[str], list[list[str]], list[str]]  # the header and the cells of a table, and what is predicted for its rows


def predict(folder: Path, user: str, table: Path, stage: str | None, out: Path | None, stdout: IO[str], state: Path | None = None) -> None:
    """Writes the table with a column "prediction": a class, the label -1 or 1, or a value; of an archive, beside the row's number.

    `state` is where a host elsewhere has left what a user keeps to itself. Raises ConfigError.
    """
    experiment = frozen_in(folder)
    if experiment.model is None:
        header, rows, said = _by_linear_model(experiment, folder, user, table, stage, state)
    else:
        header, rows, said = _by_network(folder, user, table, state)
    write_table(out, stdout, [*header, PREDICTION], [[*cells, value] for cells, value in zip(rows, said, strict=True)])


def _by_linear_model(experiment: Experiment, folder: Path, user: str, table: Path, stage: str | None, state: Path | None) -> _Columns:
    check_predicts(experiment)
    with read_run(folder) as connection:
        name = summary.facts(connection).get("final_stage") if stage is None else summary.stage_named(connection, stage).name
    if name is None:
        raise ConfigError(f"the run in {folder} has not finished, so it has no models yet")
    models = with_kept(stage_models(folder, name), folder, state, user)
    wanted = models.model_of(user).size - experiment.problem.has_intercept
    rows = read_new_rows(experiment.data, table, models.columns)
    if not rows.cells:
        return list(rows.header), [], []
    if rows.features.shape[1] != wanted:
        raise ConfigError(f"{table} has {rows.features.shape[1]} numeric columns for features, the model wants {wanted}")
    is_classifier = resolve_row_loss(experiment.problem).is_classifier
    values = predicted(experiment, models, user, rows.features)
    return list(rows.header), rows.cells, [f"{value:g}" if is_classifier else repr(float(value)) for value in values]


def _by_network(folder: Path, user: str, table: Path, state: Path | None) -> _Columns:
    run = finished_run(folder)
    tensors = models_of(run, state, [user])[user]
    if table.suffix == ".npz":
        features = _archived(run.experiment, table)
        header, rows = [ROW], [[str(number)] for number in range(len(features))]
    else:
        read = read_new_rows(run.experiment.data, table, getattr(run.experiment.data, "feature_columns", None) or ())
        header, rows, features = list(read.header), read.cells, read.features
    said = _said(run.experiment, _outputs(run, tensors, features, f"rows of {table}")) if len(features) else []
    return header, rows, said


def predictions(folder: Path, user: str, features: NDArray[Any], state: Path | None = None) -> NDArray[Any]:
    """(m,) what a user's network says of rows (m, ...): the class, or the value of a regression. Raises ConfigError."""
    run = finished_run(folder)
    outputs = _outputs(run, models_of(run, state, [user])[user], features, "rows")
    return outputs[:, 0].astype(np.float64) if run.experiment.problem.loss == "least_squares" else outputs.argmax(axis=1)


def _outputs(run: FinishedRun, tensors: Tensors, features: NDArray[Any], what: str) -> NDArray[np.float32]:
    """(m, c) of the network. ConfigError when the rows are not of its shape."""
    network = build_network(run.experiment, features.shape[1:])
    if network.tensors != run.tensors:
        raise ConfigError(f"the {what} have shape {list(features.shape[1:])}, for which the model is another than the run's")
    return network.outputs(tensors, features)


def _archived(experiment: Experiment, path: Path) -> NDArray[Any]:
    """The features of an archive, called and read as those of the run."""
    data = experiment.data
    name, read_as, channels = (data.features, data.read_as, data.channels) if isinstance(data, NpzData) else ("features", None, None)
    return as_rows(Archive(one_file(str(path), None)).read(name), f"array {name!r} of {path}", read_as, channels)


def _said(experiment: Experiment, outputs: NDArray[np.float32]) -> list[str]:
    if experiment.problem.loss == "least_squares":
        return [repr(float(value)) for value in outputs[:, 0]]
    partition = getattr(experiment.data, "partition", None)
    classes = partition.classes if partition is not None and partition.classes and partition.relabel else None
    return [str(place if classes is None else classes[place]) for place in outputs.argmax(axis=1).tolist()]
