"""What users keep for the local update of their method: the same bits whoever dies, never in a message, and part of their models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ProtocolError
from coterie_client.data import load_users
from coterie_client.families.partial import CLIENT, State
from coterie_client.learning import Rows
from coterie_client.nets import TorchNetwork
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.models import finished_run, models_of
from tests.local_updates import Users
from tests.networks import N_USERS, WIDTH, network_experiment, write_users
from tests.simulation import Faults, World
from tests.slow import slow_after
from tests.tap import Tap

KEEPING: dict[str, dict[str, Any]] = {
    "ditto": {"name": "ditto", "epochs": 2},
    "apfl": {"name": "apfl", "adaptive": True},
    "pfedme": {"name": "pfedme"},
    "fed_mtl": {"name": "fed_mtl"},
    "l2gd": {"name": "l2gd", "p": 0.4, "penalty": 3.0},
    "per_fedavg": {"name": "per_fedavg"},  # from the end on
}
NORMED = {"build": "tests.fixture_nets:normed", "options": {"width": WIDTH}}
SMOOTH = {"build": "tests.fixture_nets:plain", "options": {"width": WIDTH}}  # no parameter is without a gradient


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_users(tmp_path_factory.mktemp("data") / "users.npz")


def kept(world: World) -> tuple[dict[str, bytes], dict[str, float]]:
    """Each user's own arrays, to the bit, and the figures."""
    finished = world.run()
    found: dict[str, bytes] = {}
    for name in world.users:
        host = World(world.experiment, world.folder, len(world.users)).host(name, finished.run_id)
        state: State = host.states["partial"]
        assert state.kept
        found |= {user.name: b"".join(rows[place].tobytes() for rows in state.kept.values()) for place, user in enumerate(host.users)}
    return found, dict(finished.outcomes[finished.final_stage].figures)


@pytest.mark.parametrize("method", slow_after(2, KEEPING))
def test_what_users_keep_does_not_depend_on_hosts_nor_on_deaths(method: str, archive: Path, tmp_path: Path) -> None:
    experiment = network_experiment(archive, KEEPING[method], model=NORMED)
    once = kept(World(experiment, tmp_path / "one", 1))
    assert len(set(once[0].values())) == len(once[0]), "users have become different"
    assert "personal_accuracy" in once[1]
    faults = Faults(hosts_before={4: "h1"}, hosts_after={7: "h0"}, coordinator=(6, 9))
    assert kept(World(experiment, tmp_path / "all killed", 2, faults, keeps_hosts=False)) == once


@pytest.mark.parametrize("method", sorted(set(KEEPING) - {"fed_mtl", "l2gd"}))  # whose users' models make the mean
def test_no_byte_of_what_users_keep_is_in_any_message(method: str, archive: Path) -> None:
    tap = Tap()
    asyncio.run(tap.run(network_experiment(archive, {**KEEPING[method], "fine_tune": []}, model=SMOOTH, payload="float32")))
    sent, state = b"".join(tap.replies), tap.host.states["partial"]
    first = tap.host.network.initial()
    n_searched = 0
    for name in first:
        for numbers in state.kept[name].reshape(N_USERS, -1):
            moved = numbers != first[name].reshape(-1)
            trained = np.flatnonzero(moved[:-1] & moved[1:])
            n_searched += trained.size
            assert all(numbers[start : start + 2].tobytes() not in sent for start in trained), name
    assert n_searched > 100


@pytest.mark.parametrize("method", KEEPING)
def test_users_models_are_those_that_they_judge(method: str, archive: Path, tmp_path: Path) -> None:
    experiment = network_experiment(archive, KEEPING[method])
    finished = asyncio.run(launch(experiment, Launch("loopback", folder=tmp_path / "run")))
    models = models_of(finished_run(tmp_path / "run"), None)
    assert len({b"".join(array.tobytes() for array in model.values()) for model in models.values()}) == len(models)
    shared = finished.outcomes[method].shared
    assert all(set(model) == set(shared) for model in models.values())
    assert any(not np.array_equal(model["head.weight"], shared["head.weight"]) for model in models.values())


@pytest.mark.parametrize("payload", ["float32", "float16"])
@pytest.mark.parametrize("method", KEEPING)
def test_users_models_have_the_loss_of_the_run(method: str, payload: str, archive: Path, tmp_path: Path) -> None:
    """What is written down is what was judged, also where users adapt what they were sent."""
    experiment = network_experiment(archive, {**KEEPING[method], "fine_tune": []}, model=NORMED, payload=payload)
    finished = asyncio.run(launch(experiment, Launch("loopback", folder=tmp_path / "run")))
    models = models_of(finished_run(tmp_path / "run"), None)
    assert experiment.model is not None
    network = TorchNetwork(experiment.model, "cross_entropy", experiment.seed, (WIDTH,))
    users = load_users(experiment.data, experiment.seed, None)
    losses = [network.judge(models[user.name], Rows(user.test_features, user.test_target))[0] for user in users]
    assert np.mean(losses) == pytest.approx(finished.outcomes[method].figures["heldout_loss"], rel=1e-12)


def test_a_local_update_that_is_none_is_refused() -> None:
    users = Users({"name": "ditto"})
    options = {**users.experiment.method.client_options(), "update": "prepare"}
    with pytest.raises(ProtocolError, match="asks for the local update of method 'prepare', which is unknown"):
        CLIENT.init(options, users.local, None)
