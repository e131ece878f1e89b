"""`fedrep` and its relatives against Algorithm 1 of Collins, Hassani, Mokhtari and Shakkottai (2021), step by step, and the promises of the
engine: the same bits everywhere, private tensors that never travel, and books that hold exactly the shared ones.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.model import from_json, shared_tensors
from coterie.families.partial import Updated
from coterie.session.failures import failure_of
from coterie.v1 import session_pb2
from coterie.v1.session_pb2 import Failure
from coterie.wire.codec import encode
from coterie.wire.precision import Precision
from coterie_client.data import load_users
from coterie_client.families.partial import State
from coterie_client.hosting.build import build_host
from coterie_client.learning import Draw, Phase, Rows
from coterie_client.nets import TorchNetwork
from coterie_deploy.engines import loopback
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.run.coordinator import Finished
from coterie_server.run.engine import Engine
from tests.networks import CLASSES, N_USERS, WIDTH, network_experiment, write_users
from tests.simulation import Faults, World, query, small_experiment
from tests.slow import slow_after
from tests.tap import Tap

METHODS: dict[str, dict[str, Any]] = {
    "fedrep": {"name": "fedrep", "head_epochs": 3, "representation_epochs": 1},
    "fedrep by batches": {"name": "fedrep", "head_updates": 4, "head_optimizer": {"name": "adam", "lr": 0.01}},
    "fedper": {"name": "fedper", "epochs": 2},
    "fedavg": {"name": "fedavg", "epochs": 2, "average": "plain"},
    "lg_fedavg": {"name": "lg_fedavg", "epochs": 1},
    "local_network": {"name": "local_network", "epochs": 2},
}
SHARES = {"fedrep": "representation", "fedper": "representation", "fedavg": "all", "lg_fedavg": "head", "local_network": "none"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_users(tmp_path_factory.mktemp("data") / "users.npz")


def states(folder: Path, experiment: Experiment, finished: Finished, users: dict[str, list[str]]) -> dict[str, bytes]:
    """Each user's private tensors as its host has left them, to the bit."""
    kept: dict[str, bytes] = {}
    for name in users:
        host = World(experiment, folder, len(users)).host(name, finished.run_id)
        state = host.states["partial"]
        kept |= {user.name: state.private[place].tobytes() for place, user in enumerate(host.users)}
    return kept


def result(world: World) -> tuple[dict[str, bytes], dict[str, bytes], dict[str, float]]:
    """Shared tensors, private tensors, figures."""
    finished = world.run()
    outcome = finished.outcomes[finished.final_stage]
    shared = {name: array.tobytes() for name, array in outcome.shared.items()}
    return shared, states(world.folder, world.experiment, finished, world.users), dict(outcome.figures)


@pytest.mark.parametrize("method", slow_after(2, METHODS))
def test_the_bits_do_not_depend_on_hosts_nor_on_deaths(method: str, archive: Path, tmp_path: Path) -> None:
    experiment = network_experiment(archive, METHODS[method])
    once = result(World(experiment, tmp_path / "one", 1))
    assert result(World(experiment, tmp_path / "two", 2)) == once
    faults = Faults(hosts_before={4: "h1"}, hosts_after={7: "h0"}, coordinator=(6, 9))
    assert result(World(experiment, tmp_path / "killed", 5, faults)) == once
    assert result(World(experiment, tmp_path / "all killed", 2, faults, keeps_hosts=False)) == once


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedrep", "fedavg"])
def test_processes_over_grpc_give_the_bits_of_the_simulation(method: str, archive: Path, tmp_path: Path) -> None:
    experiment = network_experiment(archive, METHODS[method])
    simulated, _, figures = result(World(experiment, tmp_path / "simulated", 1))
    for n_hosts in (1, 2, 5):
        federation = experiment.federation.model_copy(update={"hosts": n_hosts})
        how = Launch(folder=tmp_path / f"grpc-{n_hosts}")
        finished = asyncio.run(launch(experiment.model_copy(update={"federation": federation}), how))
        outcome = finished.outcomes[finished.final_stage]
        assert {name: array.tobytes() for name, array in outcome.shared.items()} == simulated
        assert outcome.figures == figures


def run_to(experiment: Experiment, folder: Path) -> Finished:
    return World(experiment, folder, 2).run()


def test_a_round_is_that_of_algorithm_1(archive: Path, tmp_path: Path) -> None:
    """One round of FedRep by hand: every user trains its head with phi fixed, then phi with its head fixed; the server averages phi_i."""
    method = {**METHODS["fedrep"], "participation": 1.0, "evaluate_last": 0, "fine_tune": []}
    experiment = network_experiment(archive, method, stop={"rounds": 1})
    finished = run_to(experiment, tmp_path)
    assert experiment.model is not None
    network = TorchNetwork(experiment.model, "cross_entropy", experiment.seed, (WIDTH,))
    users = load_users(experiment.data, experiment.seed, None)
    start = network.initial()
    phases = [Phase(**phase) for phase in experiment.method.phases()]
    assert [phase.part for phase in phases] == ["head", "representation"]
    rows = np.array([len(user.target) for user in users], dtype=float)
    fitted = []
    for user in users:
        draw = Draw(experiment.seed, user.name, 1, "training of fedrep")
        fitted.append(network.fit(start, Rows(user.features, user.target), phases, draw))
    shared = shared_tensors(network.tensors, "representation")
    assert shared
    for tensor in shared:
        mean = sum(share * model.tensors[tensor.name].astype(float) for share, model in zip(rows / rows.sum(), fitted, strict=True))
        found = finished.outcomes["fedrep"].shared[tensor.name]
        assert found.shape == tensor.shape
        assert np.array_equal(found, np.asarray(mean).astype(np.float32))
        assert not np.array_equal(found, start[tensor.name])
    kept = states(tmp_path, experiment, finished, World(experiment, tmp_path, 2).users)
    for user, model in zip(users, fitted, strict=True):
        heads = [model.tensors[t.name].reshape(-1) for t in network.tensors if t.part == "head"]
        assert kept[user.name] == np.concatenate(heads).tobytes()


def test_users_that_are_not_drawn_keep_their_heads(archive: Path, tmp_path: Path) -> None:
    """ "for each client i not in I^t: Set h_i^{t,tau} <- h_i^{t-1,tau}", and a drawn one starts "h_i^t <- h_i^{t-1,tau}"."""
    method = {**METHODS["fedrep"], "users_per_round": 2, "evaluate_last": 0, "fine_tune": []}
    experiment = network_experiment(archive, method, stop={"rounds": 1})
    finished = run_to(experiment, tmp_path)
    kept = states(tmp_path, experiment, finished, World(experiment, tmp_path, 2).users)
    assert experiment.model is not None
    network = TorchNetwork(experiment.model, "cross_entropy", experiment.seed, (WIDTH,))
    head = np.concatenate([network.initial()[t.name].reshape(-1) for t in network.tensors if t.part == "head"]).tobytes()
    assert sorted(value == head for value in kept.values()) == [False] * 2 + [True] * (N_USERS - 2)


def test_an_average_may_weigh_all_users_the_same(archive: Path, tmp_path: Path) -> None:
    """As printed: "phi^{t+1} = 1/(rn) sum_{i in I^t} phi_i^{t+1}"."""
    by_rows, plain = (
        run_to(
            network_experiment(archive, {**METHODS["fedrep"], "average": average, "participation": 1.0}, stop={"rounds": 1}),
            tmp_path / average,
        )
        for average in ("rows", "plain")
    )
    for name, array in by_rows.outcomes["fedrep"].shared.items():
        assert not np.array_equal(array, plain.outcomes["fedrep"].shared[name])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("payload", ["float64", "float16"])
def test_exactly_the_shared_tensors_travel(method: str, payload: str, archive: Path, tmp_path: Path) -> None:
    experiment = network_experiment(archive, METHODS[method], payload=payload)
    run_to(experiment, tmp_path)
    facts = dict(query(tmp_path, "SELECT key, value FROM run"))
    tensors = from_json(facts["model"])
    n_shared = sum(t.size for t in shared_tensors(tensors, SHARES[experiment.method.name]))
    n_trained = sum(value for (value,) in query(tmp_path, "SELECT value FROM figures WHERE name = 'users'"))
    booked = {
        (step, way): (scalars, payload_bytes)
        for step, way, scalars, payload_bytes in query(
            tmp_path, "SELECT step, direction, SUM(scalars), SUM(payload_bytes) FROM ledger WHERE useful = 1 GROUP BY step, direction"
        )
    }
    item = 2 if payload == "float16" else 4
    assert booked["shared", "down"][0] == n_trained * n_shared
    assert booked.get(("shared", "up"), (0, 0)) == (n_trained * n_shared, item * n_trained * n_shared)
    assert booked["delivery", "down"][0] == N_USERS * n_shared
    assert booked["evaluation", "down"][0] == 6 * N_USERS * n_shared
    expected = query(tmp_path, "SELECT step, direction, vectors FROM expected WHERE vectors ORDER BY step, direction")
    vectors = query(
        tmp_path,
        "SELECT step, direction, SUM(vectors) AS n FROM ledger WHERE useful = 1 GROUP BY step, direction HAVING n > 0 ORDER BY 1, 2",
    )
    assert vectors == expected
    hosts = query(tmp_path, "SELECT kind, direction, SUM(message_bytes), SUM(scalars) FROM host_ledger GROUP BY kind, direction")
    parent = query(
        tmp_path,
        "SELECT kind, direction, SUM(message_bytes), SUM(scalars) FROM ledger WHERE kind != 'session' GROUP BY kind, direction",
    )
    assert sorted(hosts) == sorted(parent)


@pytest.mark.parametrize("method", ["fedrep", "lg_fedavg", "local_network"])
def test_no_byte_of_a_private_tensor_is_in_any_message(method: str, archive: Path) -> None:
    tap = Tap()
    asyncio.run(tap.run(network_experiment(archive, METHODS[method], payload="float32")))
    sent = b"".join(tap.replies)
    private = tap.host.states["partial"].private
    assert private.size
    trained = np.flatnonzero((private != private[np.argsort(private[:, 0])[0]]).any(axis=1))
    assert trained.size
    for user in trained:
        numbers = private[user]
        for start in range(numbers.size - 1):
            assert numbers[start : start + 2].tobytes() not in sent
    if method != "local_network":  # the search finds what is there: the last updates
        kind = Updated.kind.encode()
        assert kind in sent


def test_private_tensors_have_no_message() -> None:
    state = State(np.zeros((1, 3), np.float32), np.zeros((1, 0), np.int64), {})
    with pytest.raises((TypeError, AttributeError)):
        encode(session_pb2.Reply(seq=1), [state], Precision.of("float32"))  # type: ignore[list-item]


@pytest.mark.slow
def test_personal_models_are_better_than_chance_and_fedavg_is_not(archive: Path, tmp_path: Path) -> None:
    """The labels of each user are permuted: a shared representation serves everyone, one model for all cannot."""
    fast = {"participation": 1.0, "optimizer": {"lr": 0.1}}
    figures = {}
    for name in ("fedrep", "fedavg"):
        experiment = network_experiment(archive, {**METHODS[name], **fast}, stop={"rounds": 40})
        figures[name] = run_to(experiment, tmp_path / name).outcomes[name].figures
    assert figures["fedrep"]["personal_accuracy"] > figures["fedavg"]["global_accuracy"] + 0.1
    assert figures["fedrep"]["last_rounds_accuracy"] > 1.5 / CLASSES
    assert "global_ft_head_accuracy" in figures["fedavg"]
    assert "personal_ft_head_accuracy_q1" in figures["fedrep"]


def test_users_judge_each_for_itself(archive: Path, tmp_path: Path) -> None:
    run_to(network_experiment(archive, METHODS["fedrep"]), tmp_path)
    listed = query(tmp_path, "SELECT member, value FROM user_results WHERE name = 'personal_accuracy' ORDER BY member")
    assert [member for member, _ in listed] == list(range(N_USERS))
    (mean,) = query(tmp_path, "SELECT value FROM results WHERE name = 'personal_accuracy'")[0]
    assert mean == pytest.approx(np.mean([value for _, value in listed]), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": None}, "trains a network, but there is no key 'model'"),
        ({"method": {"name": "pdmm", "penalty": 0.1}}, "trains no network, but there is a model"),
        ({"problem": {"loss": "logistic"}}, "has the loss 'logistic', want cross_entropy or least_squares"),
        ({"method": {"name": "fedrep", "head_epochs": 2, "head_updates": 3}}, "give one"),
        ({"references": ["local"]}, "for convex problems"),
        ({"data": {"source": "csv", "path": "x.csv", "user_column": "u"}}, "data.target_column is missing, but networks learn targets"),
        ({"data": {"source": "npz", "path": "x.npz", "target": None}}, "data.target is missing, but networks learn targets"),
        ({"model": {"name": "lstm", "classes": 2}}, r"model\.symbols: is missing"),
    ],
)
def test_experiments_that_cannot_be_get_one_sentence(change: dict[str, Any], sentence: str, archive: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        network_experiment(archive, **{"method": METHODS["fedrep"], **change})


def test_half_precision_is_for_networks() -> None:
    with pytest.raises(ConfigError, match="payload 'float16' is for the weights of networks"):
        small_experiment({"name": "pdmm", "penalty": 0.1}, payload="float16")


@pytest.fixture
def own_words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What hosts say of their failures where they are, beside what their parent hears."""
    heard: list[str] = []

    def failure_with_words(error: BaseException) -> Failure:
        heard.append(str(error))
        return failure_of(error)

    monkeypatch.setattr(loopback, "failure_of", failure_with_words)
    return heard


def test_an_exploding_loss_names_user_round_and_tensor_at_its_host_alone(archive: Path, tmp_path: Path, own_words: list[str]) -> None:
    experiment = network_experiment(archive, {**METHODS["fedrep"], "optimizer": {"lr": 1e30}})
    with pytest.raises(RunError, match=r"host 'h\d': 1 number of its models is not finite \(rule M\d\); its own log names it$"):
        run_to(experiment, tmp_path)
    assert re.search(r"user 'u\d' in round 1: tensor '[a-z.0-9]+' has (nan|inf)", own_words[0])


def test_weights_too_large_for_half_precision_name_their_user(archive: Path, tmp_path: Path, own_words: list[str]) -> None:
    experiment = network_experiment(archive, {**METHODS["fedper"], "optimizer": {"lr": 3000.0}}, payload="float16")
    with pytest.raises(RunError, match=r"host '.+': .*is not finite"):
        run_to(experiment, tmp_path)
    assert re.search(r"for user 'u\d' in partial.Updated.weights in round 1, wanted finite numbers", own_words[0])


@pytest.mark.parametrize("payload", ["float32", "float16", "bfloat16"])
def test_a_run_leaves_the_shared_tensors_that_its_users_have(payload: str, archive: Path, tmp_path: Path) -> None:
    world = World(network_experiment(archive, METHODS["fedrep"], payload=payload), tmp_path, 2)
    outcome = world.run().outcomes["fedrep"]
    left = np.concatenate([array.reshape(-1) for array in outcome.shared.values()])
    for host in world.hosts.values():
        assert left.tobytes() == host.states["partial"].delivered.tobytes()


@pytest.mark.parametrize(("last", "n_averaged"), [(7, 0), (9, 1), (20, 3)])
def test_accuracies_are_averaged_over_the_last_rounds_alone(
    last: int, n_averaged: int, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "the average local accuracies for all users over the final 10 rounds", here 3, and less of a run that the clock has ended."""
    monkeypatch.setattr(Engine, "_clock_strikes", lambda _self, _seconds, point, _started: point.round == last)
    method = {"name": "fedper", "evaluate_every": 3, "evaluate_last": 3, "fine_tune": []}
    finished = run_to(network_experiment(archive, method, stop={"rounds": 20, "wall_time_s": 1000}), tmp_path)
    found = finished.outcomes["fedper"].figures.get("last_rounds_accuracy")
    listed = [value for (value,) in query(tmp_path, "SELECT value FROM figures WHERE name = 'accuracy' ORDER BY round")]
    assert found == (float(np.mean(listed[-n_averaged:])) if n_averaged else None)


def test_hosts_say_with_which_torch_they_compute(archive: Path) -> None:
    (hello,) = build_host("h", network_experiment(archive, METHODS["fedrep"]), "run", ["u0"]).hello()
    assert f"torch {torch.__version__}, cpu " in hello.hello.numerics


def test_a_linear_model_has_no_representation_to_share(archive: Path, tmp_path: Path) -> None:
    experiment = network_experiment(archive, METHODS["fedrep"], model={"name": "linear", "classes": CLASSES})
    with pytest.raises(ConfigError, match="no tensors in its representation"):
        run_to(experiment, tmp_path)


@pytest.mark.parametrize("method", ["fedrep", "local_network"])
def test_users_without_held_out_rows_train_all_the_same(method: str, archive: Path, tmp_path: Path) -> None:
    data = {"source": "npz", "path": str(archive), "test_fraction": 0}
    finished = run_to(network_experiment(archive, METHODS[method], data=data), tmp_path)
    assert finished.outcomes[method].figures == {}
    assert query(tmp_path, "SELECT COUNT(*) FROM figures WHERE name = 'accuracy'") == [(0,)]
    ((warning,),) = query(tmp_path, "SELECT text FROM events WHERE kind = 'warning'")
    assert "7 of 7 users have no held-out rows" in warning


def test_without_torch_a_client_says_which_extra_to_install(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("coterie_client.nets")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"needs torch, which is not installed: pip install 'coterie\[torch\]'"):
        build_host("h", network_experiment(archive, METHODS["fedrep"]), "run", None)


def test_rounds_of_one_user_are_warned_about(archive: Path, tmp_path: Path) -> None:
    run_to(network_experiment(archive, {**METHODS["fedrep"], "participation": 0.1}, stop={"rounds": 1}), tmp_path)
    ((warning,),) = query(tmp_path, "SELECT text FROM events WHERE kind = 'warning'")
    assert warning == "method.participation 0.1 of 7 users is one user a round: want more, or users_per_round"
