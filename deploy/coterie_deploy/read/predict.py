"""`coterie predict`: the model of one user, applied to the rows of a table."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from coterie.errors import ConfigError
from coterie.experiment.config import load_experiment
from coterie_client.data.new_rows import read_new_rows
from coterie_client.problems.resolve import resolve_row_loss
from coterie_deploy.read import predict_network
from coterie_deploy.read.left import Left, check_predicts, left_in, predicted
from coterie_deploy.read.shipped import FROZEN
from coterie_deploy.read.tabular import write_table
from coterie_deploy.read.user_models import with_kept
from coterie_server.record import summary
from coterie_server.record.rundb import no_run_folder, read_run

PREDICTION = "prediction"


def predict(folder: Path, user: str, table: Path, stage: str | None, out: Path | None, stdout: IO[str], state: Path | None = None) -> None:
    """Writes the table with a column "prediction": the label -1 or 1 of a classifier, else the value. Raises ConfigError.

    `state` is where a host elsewhere has left what a user keeps to itself.
    """
    path = folder / FROZEN
    if not path.is_file():
        raise no_run_folder(folder, FROZEN)
    experiment = load_experiment(path)
    if experiment.model is not None:
        predict_network.predict(folder, user, table, state, out, stdout)
        return
    check_predicts(experiment)
    left = _left(folder, user, stage, state)
    rows = read_new_rows(experiment.data, table, left.columns)
    if not rows.cells:
        write_table(out, stdout, [*rows.header, PREDICTION], [])
        return
    wanted = left.model_of(user).size - experiment.problem.has_intercept
    if rows.features.shape[1] != wanted:
        raise ConfigError(f"{table} has {rows.features.shape[1]} numeric columns for features, the model wants {wanted}")
    predictions = predicted(experiment, left, user, rows.features)
    loss = resolve_row_loss(experiment.problem)
    said = [f"{value:g}" if loss.is_classifier else repr(float(value)) for value in predictions]
    write_table(out, stdout, [*rows.header, PREDICTION], [[*cells, value] for cells, value in zip(rows.cells, said, strict=True)])


def _left(folder: Path, user: str, stage: str | None, state: Path | None) -> Left:
    """What the stage has left, with a model for this user."""
    with read_run(folder) as connection:
        name = summary.facts(connection).get("final_stage") if stage is None else summary.stage_named(connection, stage).name
    if name is None:
        raise ConfigError(f"the run in {folder} has not finished, so it has no models yet")
    left = with_kept(left_in(folder, name), folder, state, user)
    left.model_of(user)
    return left
