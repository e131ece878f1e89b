"""A run of MLflow for a run of Coterie: parameters are the settings of the experiment, metrics the figures of its rounds.

The steps of STAGE/FIGURE are rounds, those of STAGE/FIGURE.by_bytes useful wire bytes; STAGE/result.FIGURE is a closing figure. Tags have
the id and the status of Coterie's run, so a later export finds the run again and adds the values that are missing.

`output` is a folder (MLflow's file store) or any tracking URI that the installed MLflow can write to. MLflow's usage statistics are off.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.extras import extra
from coterie_deploy.read.export.points import BY_BYTES, Points, StagePoints
from coterie_deploy.read.shipped import FROZEN

# Read when mlflow is imported, and later. A missing server is given up after seconds instead of minutes.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
with extra("mlflow", "mlflow", "--to mlflow needs mlflow-skinny"):
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

_TAG = "coterie.run_id"
_REPORT = "report.html"
_STRANGE = re.compile(r"[^A-Za-z0-9_\-. :/]")  # characters that names of metrics do not have
_BATCH = 1000  # metrics that MLflow takes at once
_PARAMS = 100
_LONGEST = 6000  # characters of a parameter
_STATUS = {"finished": "FINISHED", "running": "RUNNING", "stopped": "KILLED"}  # by the first word of a run's


@contextlib.contextmanager
def target(output: str, points: Points) -> Iterator[MlflowRun]:
    """The run of MLflow, which is begun at need. ConfigError when there can be none at this place."""
    if len(urlsplit(output).scheme) < 2:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # or it asks for a database
        output = Path(output).absolute().as_uri()
    try:
        client = MlflowClient(tracking_uri=output)
        run_id = _run_of(client, points)
    except (MlflowException, ImportError, OSError) as error:
        raise ConfigError(f"MLflow cannot write to {output}: {_first_line(error)}") from None
    yield MlflowRun(client, run_id)


def _run_of(client: Any, points: Points) -> str:
    """The id of MLflow's run for this run of Coterie, which it creates if necessary."""
    name = points.facts["name"]
    experiment = client.get_experiment_by_name(name)
    experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
    if runs := client.search_runs([experiment_id], f"tags.`{_TAG}` = '{points.run_id}'"):
        return str(runs[0].info.run_id)
    tags = {_TAG: points.run_id, "coterie.version": points.facts["version"]}
    run = client.create_run(experiment_id, start_time=_milliseconds(points.began_at), tags=tags, run_name=points.folder.name)
    return str(run.info.run_id)


class MlflowRun:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._n_there: dict[str, int] = {}  # values of each metric
        self._is_described = False

    def add(self, points: Points) -> int:
        """Adds what is not there yet; how many values these were. RunError when it cannot be written."""
        try:
            if not self._is_described:
                self._describe(points)
            metrics = [metric for stage in points.stages if stage.rounds.size for metric in self._new(stage)]
            for start in range(0, len(metrics), _BATCH):
                self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH], synchronous=True)
            self._stand(points)
        except (MlflowException, OSError) as error:
            raise RunError(f"MLflow has refused what was exported: {_first_line(error)}") from error
        return len(metrics)

    def _describe(self, points: Points) -> None:
        """Settings and the frozen experiment; the same values may be given again."""
        settings = [Param(key, str(value)[:_LONGEST]) for key, value in points.settings.items()]
        for start in range(0, len(settings), _PARAMS):
            self._client.log_batch(self._run_id, params=settings[start : start + _PARAMS], synchronous=True)
        self._client.log_artifact(self._run_id, str(points.folder / FROZEN))
        self._is_described = True

    def _new(self, stage: StagePoints) -> Iterator[Any]:
        for name, values in stage.figures.items():
            there = np.flatnonzero(~np.isnan(values))
            yield from self._rest(f"{stage.name}/{name}", values[there], stage.rounds[there], stage.at[there])
            if stage.n_bytes is not None:
                yield from self._rest(f"{stage.name}/{name}.{BY_BYTES}", values[there], stage.n_bytes[there], stage.at[there])
        for name, cost in stage.costs.items():
            yield from self._rest(f"{stage.name}/{name}", cost, stage.rounds, stage.at)
        for name, value in stage.results.items() if stage.has_ended else ():
            yield from self._rest(f"{stage.name}/result.{name}", [value], stage.rounds[-1:], stage.at[-1:])

    def _rest(self, name: str, values: Iterable[Any], steps: Indices, at: Array) -> Iterator[Any]:
        """The values of a metric that are not there yet."""
        key = _STRANGE.sub("_", name)
        if key not in self._n_there:
            self._n_there[key] = len(self._client.get_metric_history(self._run_id, key))
        start = self._n_there[key]
        for value, step, moment in itertools.islice(zip(values, steps, at, strict=True), start, None):
            self._n_there[key] += 1
            yield Metric(key, float(value), _milliseconds(float(moment)), int(step))

    def _stand(self, points: Points) -> None:
        """The status of the run, and after its end the files that belong to it."""
        status = points.facts["status"]
        tags = [RunTag("coterie.status", status[:_LONGEST]), RunTag("coterie.attempt", points.facts["attempt"])]
        self._client.log_batch(self._run_id, tags=tags, synchronous=True)
        if not points.is_over:
            return
        if (points.folder / _REPORT).is_file():
            self._client.log_artifact(self._run_id, str(points.folder / _REPORT))
        ended = max((float(stage.at[-1]) for stage in points.stages if stage.rounds.size), default=points.began_at)
        word = status.partition(":")[0].partition(",")[0]
        self._client.set_terminated(self._run_id, _STATUS.get(word, "FAILED"), _milliseconds(ended))


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
