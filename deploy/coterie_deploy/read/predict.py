"""`coterie predict`: one user's model, applied to the rows of a table or, for networks, of an archive."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.experiment.data import NpzData
from coterie.text.names import normal, unknown_user
from coterie_client.data.archive import Archive
from coterie_client.data.new_rows import read_new_rows
from coterie_client.data.paths import one_file
from coterie_client.data.tables.features import as_rows
from coterie_client.hosting.build import build_network
from coterie_client.problems.losses import resolve_row_loss
from coterie_deploy.read.coefficients import members_of
from coterie_deploy.read.models import (
    FinishedRun,
    StageModels,
    Tensors,
    check_predicts,
    finished_run,
    models_of,
    predictions_of,
    scores,
    stage_models,
    with_kept,
)
from coterie_deploy.read.shared_models import Whose, shared_model
from coterie_deploy.read.shipped import frozen_in
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_server.record import summary
from coterie_server.record.rundb import read_run

ROW, MODEL, PROBABILITY, PREDICTION = "row", "model", "probability", "prediction"

_Table = tuple[list[str], list[list[str]]]  # header and rows


def predict(folder: Path, whose: Whose, table: Path, out: Path | None, stdout: IO[str], state: Path | None = None) -> None:
    """Writes the table with the columns "model" and "prediction": a class, the label -1 or 1, or a value. Rows of an archive are numbered.

    For loss logistic there is also a column "probability", that of the label 1; the prediction of loss poisson is the expected count.
    `state`: the state folder of a host elsewhere, with the user's private tensors. Raises ConfigError.
    """
    experiment = frozen_in(folder)
    if experiment.model is None:
        header, rows = _by_linear_model(experiment, folder, whose, table, state)
    else:
        header, rows = _by_network(folder, user_of(whose), table, state)
    text = csv_text(header, rows)
    if out is None:
        stdout.write(text)
    else:
        write_text(out, text)


def _by_linear_model(experiment: Experiment, folder: Path, whose: Whose, table: Path, state: Path | None) -> _Table:
    check_predicts(experiment)
    models, x, name = _linear_model(experiment, folder, whose, state)
    wanted = x.size - experiment.problem.has_intercept
    rows = read_new_rows(experiment.data, table, models.columns)
    is_logistic = experiment.problem.loss == "logistic"
    header = [*rows.header, MODEL, *([PROBABILITY] if is_logistic else []), PREDICTION]
    if not rows.cells:
        return header, []
    if rows.features.shape[1] != wanted:
        raise ConfigError(f"{table} has {rows.features.shape[1]} numeric columns for features, the model wants {wanted}")
    is_classifier = resolve_row_loss(experiment.problem).is_classifier
    found = scores(experiment, models, x, rows.features)
    said = [f"{value:g}" if is_classifier else repr(float(value)) for value in predictions_of(experiment, found)]
    odds = [[repr(float(chance))] if is_logistic else [] for chance in 0.5 * (1.0 + np.tanh(found / 2))]
    return header, [[*cells, name, *chance, value] for cells, chance, value in zip(rows.cells, odds, said, strict=True)]


def _linear_model(experiment: Experiment, folder: Path, whose: Whose, state: Path | None) -> tuple[StageModels, Array, str]:
    """The stage, the model x (d,), and whose it is."""
    with read_run(folder) as connection:
        final, members = summary.facts(connection).get("final_stage"), members_of(connection)
        listed = [stage.name for stage in summary.stages(connection)]
        stage = final if whose.stage is None else summary.stage_named(connection, whose.stage).name
    if stage is None:
        raise ConfigError(f"the run in {folder} has not finished, so it has no models yet")
    if whose.user is not None:
        if normal(whose.user) not in members.names:
            raise not_seen(whose.user, members.names)
        models = with_kept(stage_models(folder, stage), folder, state, whose.user)
        return models, models.model_of(whose.user), f"user {normal(whose.user)}"
    found = shared_model(experiment, members, whose, stage, listed, partial(stage_models, folder))
    return found.stage, found.x, found.whose


def user_of(whose: Whose) -> str:
    """The user whose network predicts. ConfigError for a cluster, or everyone."""
    if whose.user is None:
        raise ConfigError("networks predict for their own users alone, want a user's: see coterie adapt for new users")
    return whose.user


def not_seen(user: str, names: Sequence[str]) -> ConfigError:
    """The error for a user whom the run does not know."""
    known = str(unknown_user(user, names)).replace("is not in the data", "is not in the run")
    return ConfigError(f"{known}, or for a user that the run has not seen --cluster CLUSTER or --global")


def _by_network(folder: Path, user: str, table: Path, state: Path | None) -> _Table:
    run = finished_run(folder)
    tensors = models_of(run, state, [user])[user]
    if table.suffix == ".npz":
        features = _archived(run.experiment, table)
        header, rows = [ROW], [[str(number)] for number in range(len(features))]
    else:
        read = read_new_rows(run.experiment.data, table, getattr(run.experiment.data, "feature_columns", None) or ())
        header, rows, features = list(read.header), read.cells, read.features
    said = _said(run.experiment, _outputs(run, tensors, features, f"rows of {table}")) if len(features) else []
    return [*header, MODEL, PREDICTION], [[*cells, f"user {user}", value] for cells, value in zip(rows, said, strict=True)]


def predictions(folder: Path, user: str, features: NDArray[Any], state: Path | None = None) -> NDArray[Any]:
    """(m,) predictions of a user's network for rows (m, ...): the class, or the value of a regression. Raises ConfigError."""
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
    """The features of an archive, with the array's name and the way of reading that the run has."""
    data = experiment.data
    name, read_as, channels = (data.features, data.read_as, data.channels) if isinstance(data, NpzData) else ("features", None, None)
    return as_rows(Archive(one_file(str(path), None)).read(name), f"array {name!r} of {path}", read_as, channels)


def _said(experiment: Experiment, outputs: NDArray[np.float32]) -> list[str]:
    if experiment.problem.loss == "least_squares":
        return [repr(float(value)) for value in outputs[:, 0]]
    partition = getattr(experiment.data, "partition", None)
    classes = partition.classes if partition is not None and partition.classes and partition.relabel else None
    return [str(place if classes is None else classes[place]) for place in outputs.argmax(axis=1).tolist()]
