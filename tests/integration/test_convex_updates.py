"""Local updates of convex losses in runs: the same bits wherever users are and whoever dies, and what they keep is in no message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie_client.families.partial import State
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.run.coordinator import Finished
from tests.convex import METHODS, N_FEATURES, convex_experiment, write_rows
from tests.simulation import Faults, World, query
from tests.tap import Tap

D = N_FEATURES + 1
N_USERS = 5
FEW = ("scaffold", "ifca")  # a variate that travels and is kept, and several models
FAST_FEW = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
NO_TORCH = 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")\n'


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "users.npz")


def of_most(method: str) -> dict[str, Any]:
    """The method with four of the five users in each round, so that two of three hosts are always asked."""
    return {**METHODS[method], "participation": 0.8}


def found(finished: Finished) -> tuple[bytes, dict[str, bytes], Mapping[str, float]]:
    """Models and labels, shared tensors and figures of the method, to the bit."""
    outcome = finished.outcomes[finished.final_stage]
    parts = [array.tobytes() for array in (outcome.models, outcome.labels) if array is not None]
    return b"".join(parts), {name: array.tobytes() for name, array in outcome.shared.items()}, dict(outcome.figures)


def kept(world: World, finished: Finished) -> dict[str, dict[str, bytes]]:
    """What each user keeps at the end, to the bit."""
    of_users = {}
    for name in world.users:
        host = World(world.experiment, world.folder, len(world.users)).host(name, finished.run_id)
        state: State = host.states["partial"]
        assert all(rows.dtype in (np.float64, np.int64) for rows in state.kept.values())
        for place, user in enumerate(host.users):
            of_users[user.name] = {key: rows[place].tobytes() for key, rows in state.kept.items()}
    return of_users


@pytest.mark.parametrize("payload", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", FAST_FEW)
def test_the_bits_do_not_depend_on_hosts_nor_on_deaths(method: str, payload: str, archive: Path, tmp_path: Path) -> None:
    experiment = convex_experiment(archive, of_most(method), payload=payload)
    once = World(experiment, tmp_path / "one", 1)
    faults = Faults(hosts_before={5: "h1"}, hosts_after={8: "h0"}, coordinator=(7, 10))
    killed = World(experiment, tmp_path / "killed", 3, faults, keeps_hosts=False)
    wanted, finished = once.run(), killed.run()
    assert len(killed.done) == 4, "all faults must have struck"
    assert found(finished) == found(wanted)
    assert kept(killed, finished) == kept(once, wanted)


@pytest.mark.parametrize("method", [name if name == "scaffold" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS])
def test_hosts_without_torch_in_processes_of_their_own_give_the_same_bits(
    method: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = convex_experiment(archive, of_most(method), federation={"hosts": 2})
    alone = asyncio.run(launch(experiment, Launch("loopback")))
    (tmp_path / "torch.py").write_text(NO_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert found(asyncio.run(launch(experiment, Launch("grpc")))) == found(alone)


# ---- what travels


@pytest.mark.parametrize("method", ["apfl", "ditto", "pfedme", "scaffold"])  # users' models make the mean of l2gd, others keep none
def test_no_number_that_users_keep_is_in_any_message(method: str, archive: Path) -> None:
    tap = Tap()
    asyncio.run(tap.run(convex_experiment(archive, {**METHODS[method], "participation": 1.0, "fine_tune": []})))
    sent = b"".join(tap.replies)
    rows: dict[str, Any] = tap.host.states["partial"].kept
    numbers = np.unique(np.concatenate([array.reshape(-1) for array in rows.values()]))
    numbers = numbers[(numbers != 0.0) & (numbers != 1.0)]  # to which adaptive alphas are held
    assert numbers.size >= N_USERS * D
    assert all(number.tobytes() not in sent for number in numbers)
    assert all(number.tobytes() not in sent for user in tap.host.users for number in user.features.reshape(-1))


def test_payload_float32_costs_half_and_little_else(archive: Path, tmp_path: Path) -> None:
    """Users and server compute in float64 with what the way has left."""
    models, booked = {}, {}
    for payload in ("float64", "float32"):
        experiment = convex_experiment(archive, METHODS["scaffold"], payload=payload)
        outcome = World(experiment, tmp_path / payload, 2).run().outcomes["scaffold"]
        assert outcome.models is not None
        models[payload] = outcome.models
        totals = "SELECT SUM(vectors), SUM(scalars), SUM(payload_bytes) FROM ledger WHERE vectors > 0 AND direction = 'up'"
        ((vectors, scalars, booked[payload]),) = query(tmp_path / payload, totals)
        assert (scalars, booked[payload]) == (D * vectors, D * vectors * (8 if payload == "float64" else 4))
    np.testing.assert_allclose(models["float32"], models["float64"], rtol=0, atol=1e-6)
    assert (models["float32"] != models["float64"]).all()
    np.testing.assert_array_equal(models["float32"], models["float32"].astype(np.float32))
