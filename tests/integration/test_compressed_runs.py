"""Whole runs with compression: the same bits wherever users live and whoever dies, and bytes that a proxy and a closed form confirm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.experiment.config import Experiment
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.check.federations import descent, network
from coterie_deploy.studies.check.world import Faults, World
from coterie_server.record.compressed import Saving, savings
from coterie_server.record.rundb import read_run
from coterie_server.run.coordinator import Finished
from tests.simulation import query

FEDAVG = {"name": "fedavg", "participation": 0.7, "evaluate_last": 1, "fine_tune": []}
MEMORIES: dict[str, dict[str, Any]] = {
    "feedback": {"top_k": 0.3, "feedback": True},
    "last": {"quantize": {"bits": 2, "rotate": "hadamard"}, "against": "last"},
}


def experiment(folder: Path, **rules: Any) -> Experiment:
    return descent(FEDAVG, federation={"compress": rules}).experiment(folder)


def left(world: World) -> dict[str, bytes]:
    finished: Finished = world.run()
    finished.database.close()
    outcome = finished.outcomes[finished.final_stage]
    return {name: array.tobytes() for name, array in outcome.shared.items()}


def saved(folder: Path) -> list[Saving]:
    with read_run(folder) as connection:
        return savings(connection)


@pytest.mark.parametrize("name", MEMORIES)
def test_what_is_remembered_survives_kills_at_any_exchange(name: str, tmp_path: Path) -> None:
    thin = experiment(tmp_path, up=MEMORIES[name])
    calm = left(World(thin, tmp_path / "calm", 3))
    assert left(World(thin, tmp_path / "alone", 1)) == calm
    ((n,),) = query(tmp_path / "calm", "SELECT MAX(seq) FROM ledger")
    for seq in range(1, n + 1, 2):
        faults = Faults({seq: "h0"}, {seq + 1: "h1"}, (seq,))
        assert left(World(thin, tmp_path / f"{seq}", 3, faults)) == calm
        assert left(World(thin, tmp_path / f"new {seq}", 3, Faults({}, {}, (seq,)), keeps_hosts=False)) == calm


def test_a_memory_changes_what_is_sent(tmp_path: Path) -> None:
    found = {
        name: left(World(experiment(tmp_path, up=rule), tmp_path / name, 2))
        for name, rule in {**MEMORIES, "none": {"top_k": 0.3}, "task": {**MEMORIES["last"], "against": "task"}}.items()
    }
    assert len({str(one) for one in found.values()}) == 4


@pytest.mark.parametrize(
    "rules",
    [
        {"up": {"quantize": {"bits": 4}}, "down": {"quantize": {}}},
        {"up": {"top_k": 0.4}},
        {"up": {"rand_k": 0.4, "quantize": {}}},
        {"up": {"quantize": {"bits": 1, "rotate": "hadamard", "stochastic": False}}, "down": {"lossless": "zlib"}},
        {"up": {"top_k": 0.4, "lossless": "zlib"}},
        {"up": {"low_rank": 1}},
        {"up": {"low_rank": 1, "quantize": {"bits": 8}}},
    ],
    ids=str,
)
def test_books_and_closed_forms_agree_to_the_byte(rules: dict[str, Any], tmp_path: Path) -> None:
    thin = network({"name": "fedrep", "head_epochs": 1}, federation={"compress": rules}).experiment(tmp_path)
    left(World(thin, tmp_path / "run", 2))
    verdict = verdict_on(tmp_path / "run")
    assert verdict.agrees
    listed = {(one.step, one.direction): one for one in saved(tmp_path / "run")}
    assert listed.keys() == {("shared", way) for way in rules}
    for way, rule in rules.items():
        found = listed["shared", way]
        assert (found.expected is None) == ("lossless" in rule)
        assert found.expected in (None, found.values)
        assert (found.scales > 0, found.places > 0) == ("quantize" in rule, "top_k" in rule)
        assert found.scales + found.places <= found.aside
        kinds = "('partial.Updated')" if way == "up" else "('partial.Shared')"
        assert query(tmp_path / "run", f"SELECT COUNT(*) FROM ledger WHERE kind IN {kinds}") == [(0,)]
    # Without compression the payload of the same messages is what would have been.
    left(World(thin.model_copy(update={"federation": thin.federation.model_copy(update={"compress": None})}), tmp_path / "whole", 2))
    for way in rules:
        kind = "partial.Updated" if way == "up" else "partial.Shared"
        ((payload,),) = query(tmp_path / "whole", f"SELECT SUM(payload_bytes) FROM ledger WHERE kind = '{kind}'")
        assert listed["shared", way].plain == payload
    assert saved(tmp_path / "whole") == []


def test_a_wrong_closed_form_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(World(experiment(tmp_path, up={"quantize": {}}), tmp_path / "run", 2))
    assert verdict_on(tmp_path / "run").agrees
    monkeypatch.setattr("coterie.compress.numbers.Few.sizes", lambda *_: (1, 4))
    assert not verdict_on(tmp_path / "run").agrees


def test_a_run_that_loses_nothing_has_the_models_of_one_without_compression(tmp_path: Path) -> None:
    thin = experiment(tmp_path, up={"lossless": "zlib"}, down={"lossless": "zlib"})
    whole = thin.model_copy(update={"federation": thin.federation.model_copy(update={"compress": None})})
    assert left(World(thin, tmp_path / "thin", 2)) == left(World(whole, tmp_path / "whole", 2))


def test_answers_grow_closer_to_what_was_not_compressed(tmp_path: Path) -> None:
    """With feedback nothing is lost for good: after many rounds of a fifth of the numbers the model is that of all numbers."""

    def model(**rules: Any) -> np.ndarray[Any, Any]:
        method = {**FEDAVG, "participation": 1.0, "batch_size": None}
        made = descent(method, federation={"compress": rules} if rules else {}, stop={"rounds": 150})
        finished = World(made.experiment(tmp_path), tmp_path / str(rules), 1).run()
        finished.database.close()
        return np.concatenate([array.ravel() for array in finished.outcomes[finished.final_stage].shared.values()])

    whole = model()
    without, with_it = (float(np.linalg.norm(model(up={"top_k": 0.2, "feedback": is_kept}) - whole)) for is_kept in (False, True))
    assert with_it < 0.1 * np.linalg.norm(whole)
    assert with_it < without
