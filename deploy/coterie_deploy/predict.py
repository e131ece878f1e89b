"""`coterie predict`: the model of one user, applied to the rows of a table."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from coterie.config import Experiment, load_experiment
from coterie.errors import ConfigError
from coterie_client.problems.resolve import resolve_row_loss
from coterie_deploy import predict_network
from coterie_deploy.left import Left, check_predicts, left_in, predicted
from coterie_deploy.shipped import FROZEN
from coterie_deploy.tabular import features_of, is_number, read_table, write_table
from coterie_deploy.user_models import with_kept
from coterie_server import summary
from coterie_server.rundb import no_run_folder, read_run

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
    header, rows = read_table(table)
    columns = _named(left.columns, table, header) if left.columns else _numeric(experiment, table, header, rows, left.model_of(user).size)
    predictions = predicted(experiment, left, user, features_of(table, header, rows, columns))
    loss = resolve_row_loss(experiment.problem)
    said = [f"{value:g}" if loss.is_classifier else repr(float(value)) for value in predictions]
    write_table(out, stdout, [*header, PREDICTION], [[*cells, value] for (_, cells), value in zip(rows, said, strict=True)])


def _left(folder: Path, user: str, stage: str | None, state: Path | None) -> Left:
    """What the stage has left, with a model for this user."""
    with read_run(folder) as connection:
        name = summary.facts(connection).get("final_stage") if stage is None else summary.stage_named(connection, stage).name
    if name is None:
        raise ConfigError(f"the run in {folder} has not finished, so it has no models yet")
    left = with_kept(left_in(folder, name), folder, state, user)
    left.model_of(user)
    return left


def _named(columns: tuple[str, ...], table: Path, header: list[str]) -> list[str]:
    """The features that the model was trained on, wherever they stand in the table."""
    missing = [column for column in columns if column not in header]
    if missing:
        raise ConfigError(f"{table}: column {missing[0]!r} is missing, found {', '.join(map(repr, header))}")
    return list(columns)


def _numeric(experiment: Experiment, table: Path, header: list[str], rows: list[tuple[int, list[str]]], d: int) -> list[str]:
    """For a model (d,) whose features have no names: all numeric columns that have no other role, in their order."""
    wanted = d - experiment.problem.has_intercept
    roles = {getattr(experiment.data, role, None) for role in ("user_column", "cluster_column", "target_column")}
    first = rows[0][1] if rows else header
    found = [column for column, cell in zip(header, first, strict=True) if column not in roles and is_number(cell)]
    if rows and len(found) != wanted:
        raise ConfigError(f"{table} has {len(found)} numeric columns for features ({', '.join(found) or 'none'}), the model wants {wanted}")
    return found
