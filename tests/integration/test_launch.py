"""Coterie from Python, and the launcher underneath: results, resuming, running event loops, and hosts that cannot be started."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import Result, run
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import experiment_from
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.run.engine import Progress

EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "data": {"source": "ellipses", "users_per_cluster": 2, "test_per_class": 50},
    "problem": {"loss": "squared_hinge", "l2": 1e-3},
    "method": {"name": "oracle"},
    "references": ["local", "global"],
}


def test_three_lines_of_python_give_models_metrics_and_ledger() -> None:
    result = run(EXPERIMENT)
    assert isinstance(result, Result)
    assert (result.folder, result.final_stage, result.stages) == (None, "oracle", ("local", "global", "oracle"))
    assert list(result.models) == [f"u{i}" for i in range(6)]
    assert all(model.shape == (3,) for model in result.models.values())
    assert result.clusters == {"u0": 0, "u1": 0, "u2": 1, "u3": 1, "u4": 2, "u5": 2}
    assert result.metrics["oracle"]["heldout_metric"] > result.metrics["global"]["heldout_metric"]
    assert [figures["round"] for figures in result.history("global")] == list(range(1, len(result.history("global")) + 1))
    assert result.history()[-1]["objective"] == result.metrics["oracle"]["objective"]
    query = next(row for row in result.ledger() if (row["stage"], row["step"], row["direction"]) == ("global", "query", "down"))
    assert query["vectors"] == query["expected"] == 6 * len(result.history("global"))
    assert query["wire_bytes"] >= query["message_bytes"] > query["payload_bytes"] == 8 * 3 * query["vectors"]


def test_a_simulation_of_two_tiers_is_flat() -> None:
    flat, two = run(EXPERIMENT), run({**EXPERIMENT, "federation": {"topology": "clusters", "hosts": 3}})
    for user, model in flat.models.items():
        np.testing.assert_array_equal(model, two.models[user])


def test_the_result_of_a_mapping_a_file_and_an_experiment_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(str(EXPERIMENT))
    results = [run(EXPERIMENT), run(path), run(str(path)), run(experiment_from(EXPERIMENT))]
    assert len({result.models["u3"].tobytes() for result in results}) == 1


def test_overrides_change_the_experiment() -> None:
    result = run(EXPERIMENT, overrides=["references=[]", "data.users_per_cluster=1"])
    assert (result.stages, len(result.users)) == (("oracle",), 3)


def test_a_run_works_inside_a_running_event_loop() -> None:
    async def notebook_cell() -> Result:
        return run(EXPERIMENT)

    result = asyncio.run(notebook_cell())
    assert result.history("global")
    assert result.ledger()


def test_the_number_of_hosts_and_the_transport_do_not_change_the_bits(tmp_path: Path) -> None:
    one, three = run(EXPERIMENT), run(EXPERIMENT, hosts=3, output=tmp_path / "run")
    distributed = run(EXPERIMENT, transport="grpc", hosts=2)
    for stage in one.stages:
        for user in one.users:
            bits = one.models_of(stage)[user].tobytes()
            assert bits == three.models_of(stage)[user].tobytes() == distributed.models_of(stage)[user].tobytes()
    assert three.history("global") == one.history("global")
    assert (tmp_path / "run/run.db").is_file()
    assert distributed.folder is None
    assert distributed.ledger()


def test_a_run_that_was_stopped_is_resumed_to_the_same_models(tmp_path: Path) -> None:
    experiment = experiment_from({**EXPERIMENT, "snapshots": {"every_rounds": 2}})
    stop = asyncio.Event()

    def stop_in_the_middle(progress: Progress) -> None:
        if progress.stage.name == "oracle" and progress.round == 3:
            stop.set()

    async def interrupted() -> None:
        await launch(experiment, Launch("loopback", tmp_path / "run", observer=stop_in_the_middle, stop=stop))

    with pytest.raises(RunError, match="after round 4"):
        asyncio.run(interrupted())
    resumed, undisturbed = run(experiment, output=tmp_path / "run", resume=True), run(experiment)
    assert all(np.array_equal(resumed.models[user], undisturbed.models[user]) for user in undisturbed.users)
    assert resumed.history("oracle") == undisturbed.history("oracle")


def test_a_path_in_a_mapping_is_overridden_by_one_penalty() -> None:
    content = {**EXPERIMENT, "method": {"name": "pdmm", "path": [0.2, 0.1]}, "references": []}
    assert run(content, overrides=["method.penalty=0.1", "stop.rounds=5"]).stages == ("global", "pdmm")


def test_an_observer_sees_every_round() -> None:
    seen: list[tuple[str, int]] = []
    result = run(EXPERIMENT, observer=lambda progress: seen.append((progress.stage.name, progress.round)))
    assert seen == [(stage, int(figures["round"])) for stage in result.stages for figures in result.history(stage)]


def test_mistakes_are_errors_of_the_two_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(EXPERIMENT)
    with pytest.raises(ConfigError, match="no stage 'refit'"):
        result.models_of("refit")
    with pytest.raises(ConfigError, match="no stage 'refit'"):
        result.history("refit")
    with pytest.raises(ConfigError, match="unknown key"):
        run({**EXPERIMENT, "colour": "red"})
    with pytest.raises(ConfigError, match="7 hosts for 6 users"):
        run(EXPERIMENT, hosts=7)
    with pytest.raises(ConfigError, match="'pigeon'"):
        run(EXPERIMENT, transport="pigeon")  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(RunError, match="cannot start host 'host-1'"):
        run(EXPERIMENT, transport="grpc")


def test_an_aggregator_whose_folder_is_a_file_is_named_and_nobody_looks_for_its_port(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("no folder")
    content = {**EXPERIMENT, "federation": {"topology": "clusters", "hosts": 3}}
    experiment = experiment_from(content)
    with pytest.raises(RunError, match=r"cannot start aggregator '.*' in .*/hosts/aggregator-1: Not a directory"):
        asyncio.run(launch(experiment, Launch("grpc", folder=tmp_path)))
