"""`coterie predict` for users with networks: the shared tensors of the run and the private ones of the user's host, applied to new rows."""

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
from coterie_deploy.read.tabular import write_table
from coterie_deploy.read.user_models import FinishedRun, Tensors, finished_run, models_of

ROW, PREDICTION = "row", "prediction"


def predict(folder: Path, user: str, table: Path, state: Path | None, out: Path | None, stdout: IO[str]) -> None:
    """Writes the class, or the value of a regression, of each row: beside the table's columns, or by the row's number in an archive."""
    run = finished_run(folder)
    tensors = models_of(run, state, [user])[user]
    if table.suffix == ".npz":
        features = _archived(run.experiment, table)
        header, rows = [ROW], [[str(number)] for number in range(len(features))]
    else:
        read = read_new_rows(run.experiment.data, table, getattr(run.experiment.data, "feature_columns", None) or ())
        header, rows, features = list(read.header), read.cells, read.features
    if not len(features):
        write_table(out, stdout, [*header, PREDICTION], [])
        return
    said = _said(run.experiment, _outputs(run, tensors, features, f"rows of {table}"))
    write_table(out, stdout, [*header, PREDICTION], [[*cells, value] for cells, value in zip(rows, said, strict=True)])


def predictions(folder: Path, user: str, features: NDArray[Any], state: Path | None = None) -> NDArray[Any]:
    """(m,) the class, or the value of a regression, of each row (m, ...). Raises ConfigError."""
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
    classes = outputs.argmax(axis=1)
    chosen = getattr(getattr(experiment.data, "partition", None), "classes", None)
    is_relabelled = bool(chosen) and experiment.data.partition.relabel  # type: ignore[union-attr]
    return [str(chosen[place]) if is_relabelled and chosen is not None else str(place) for place in classes.tolist()]
