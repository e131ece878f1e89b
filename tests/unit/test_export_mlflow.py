"""`coterie export --to mlflow`: what MLflow's own client finds is what the run database holds, each value once; nothing is sent home."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie_deploy.read.export import export
from tests.growing_run import STAGES, GrowingRun, finished_run

pytestmark = pytest.mark.slow  # importing mlflow takes seconds


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    def refuse(*_: Any) -> None:
        raise AssertionError("somebody wants to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def client_of(store: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store.absolute().as_uri())


def only_run(client: Any) -> Any:
    experiment = client.get_experiment_by_name("growing")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def metrics(client: Any) -> dict[str, list[tuple[int, int, float]]]:
    """(milliseconds, step, value) of each metric."""
    run = only_run(client)
    return {key: [(m.timestamp, m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}


def test_every_figure_stands_against_rounds_and_against_bytes(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    n_values = export(run.folder, "mlflow", str(tmp_path / "store"), follow=False)
    found = metrics(client_of(tmp_path / "store"))
    assert n_values == sum(map(len, found.values())) == 46
    for stage in STAGES:
        times = run.times(stage)
        for figure in ("objective", "clusters"):
            by_round, by_bytes = found[f"{stage}/{figure}"], found[f"{stage}/{figure}.by_bytes"]
            assert [(step, value) for _, step, value in by_round] == run.by_round(stage, figure)
            assert [(step, value) for _, step, value in by_bytes] == run.by_bytes(stage, figure)
            assert [at for at, _, _ in by_round] == [at for at, _, _ in by_bytes] == [1000 * times[step] for _, step, _ in by_round]
    assert [(step, value) for _, step, value in found["pdmm-0.5/result.heldout_loss"]] == [(4, 1.25)]
    assert found["global/bytes_up"][0][1:] == (1, 2 * 100 + 5 + 2 * 1001 + 5)


def test_the_run_says_which_it_is_and_what_its_settings_were(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    (run.folder / "report.html").write_text("<p>a report</p>")
    export(run.folder, "mlflow", str(tmp_path / "store"), follow=False)
    client = client_of(tmp_path / "store")
    found = only_run(client)
    tags = {key: value for key, value in found.data.tags.items() if key.startswith("coterie.")}
    assert tags == {"coterie.run_id": "0123456789abcdef", "coterie.status": "finished", "coterie.version": "9", "coterie.attempt": "1"}
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert (found.info.start_time, found.info.end_time) == (1_000_000_000, 1_000_008_000)
    params = found.data.params
    assert (params["seed"], params["method.name"], params["method.path"], params["federation.hosts"]) == ("0", "pdmm", "[0.5]", "2")
    assert {file.path for file in client.list_artifacts(found.info.run_id)} == {"experiment.json", "report.html"}
    kept = Path(client.download_artifacts(found.info.run_id, "experiment.json", str(tmp_path)))
    assert json.loads(kept.read_text()) == json.loads((run.folder / "experiment.json").read_text())


def test_an_export_that_is_repeated_or_was_interrupted_adds_what_is_missing(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    export(run.folder, "mlflow", str(tmp_path / "store"), follow=False)
    expected = metrics(client_of(tmp_path / "store"))
    assert export(run.folder, "mlflow", str(tmp_path / "store"), follow=False) == 0
    assert metrics(client_of(tmp_path / "store")) == expected
    path = next((tmp_path / "store").rglob("objective.by_bytes"))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert export(run.folder, "mlflow", str(tmp_path / "store"), follow=False) == 2
    assert metrics(client_of(tmp_path / "store")) == expected


@pytest.mark.parametrize("two_tiers", [False, True])
def test_a_run_that_is_followed_is_exported_as_one_that_has_finished(tmp_path: Path, two_tiers: bool) -> None:
    run = GrowingRun(tmp_path / "run", two_tiers=two_tiers)
    run.begin(1)
    seen: list[tuple[str, int]] = []

    def look(_: float) -> None:
        found = only_run(client_of(tmp_path / "store"))
        seen.append((found.info.status, len(metrics(client_of(tmp_path / "store")).get("pdmm-0.5/objective", ()))))
        assert not (two_tiers and "pdmm-0.5/objective.by_bytes" in found.data.metrics)
        if run.round < 4:
            run.more(objective=1.0 / (run.round + 1))
        else:
            run.end(heldout_loss=0.5)
            run.finish()

    with run.held():
        followed = export(run.folder, "mlflow", str(tmp_path / "store"), follow=True, sleep=look)
    assert seen == [("RUNNING", n) for n in (0, 0, 1, 2, 3)]
    assert followed == export(run.folder, "mlflow", str(tmp_path / "whole"), follow=False)
    found = metrics(client_of(tmp_path / "store"))
    assert found == metrics(client_of(tmp_path / "whole"))
    assert [(step, value) for _, step, value in found["pdmm-0.5/objective.by_bytes"]] == run.by_bytes("pdmm-0.5", "objective")


@pytest.mark.parametrize(("status", "expected"), [("failed: enough", "FAILED"), ("running", "KILLED")])
def test_a_run_that_has_not_finished_says_so(tmp_path: Path, status: str, expected: str) -> None:
    run = finished_run(tmp_path / "run")
    run.finish(status)
    export(run.folder, "mlflow", str(tmp_path / "store"), follow=True)
    assert only_run(client_of(tmp_path / "store")).info.status == expected


def test_two_runs_of_one_experiment_are_two_runs(tmp_path: Path) -> None:
    for number in (1, 2):
        run = finished_run(tmp_path / f"run-{number}", run_id=f"{number:016}")
        export(run.folder, "mlflow", str(tmp_path / "store"), follow=False)
    client = client_of(tmp_path / "store")
    runs = client.search_runs([client.get_experiment_by_name("growing").experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["run-1", "run-2"]


def test_a_place_that_mlflow_cannot_write_to_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"MLflow cannot write to nowhere://x: .*"):
        export(run.folder, "mlflow", "nowhere://x", follow=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"MLflow cannot write to file://.*/file: .*"):
        export(run.folder, "mlflow", str(tmp_path / "file"), follow=False)


def test_usage_statistics_are_off() -> None:
    code = (
        "import coterie_deploy.read.export.to_mlflow, mlflow.telemetry\n"
        "from mlflow.telemetry import utils\n"
        "utils._IS_IN_CI_ENV_OR_TESTING = False\n"
        "print(utils.is_telemetry_disabled(), mlflow.telemetry.get_telemetry_client())"
    )
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH", "HOME")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == ["True", "None"]
