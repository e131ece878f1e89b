"""`scaffold` against Algorithm 1 of Karimireddy, Kale, Mohri, Reddi, Stich and Suresh (2020)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.model import TensorInfo
from coterie.families.partial import Shared, Updated
from coterie.methods.scaffold import Config, Variate, VariateMove
from coterie.record.snapshot import SnapshotFile
from coterie.wire.precision import Precision
from coterie_client.families.partial import CLIENT
from coterie_client.interface.half import Inbox
from coterie_server.families.partial import PartialSharing, SharedState
from coterie_server.interface.half import Members, Replies, Setting
from coterie_server.methods.scaffold import OWN, C, taken
from tests.local_updates import PLAIN, STAGE, Tensors, Users, a_model, assert_close, combined, gradient, hand
from tests.networks import WIDTH, network_experiment, write_users
from tests.simulation import CoordinatorKilledError, Faults, World

LR = 0.05
SETTING = Setting(0, "stage", Members((), ()), Precision.of("float64"))
SGD = {"lr": LR, "momentum": 0.0}


def communicated(users: Users, number: int, sent: Tensors, variate: Tensors, asked: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """ "communicate (x, c) to all clients i in S", and what these communicate: the models, and Delta c_i."""
    messages = {
        Shared: Shared(users.flat(sent), np.zeros(0, np.int64), users=np.array(asked)),
        Variate: Variate(users.flat(variate), users=np.array(asked)),
    }
    users.state, replies = CLIENT.step(users.state, Inbox(STAGE, number, messages), users.local)
    by_kind = {type(reply): reply for reply in replies}
    updated, moved = by_kind[Updated], by_kind[VariateMove]
    assert isinstance(updated, Updated)
    assert isinstance(moved, VariateMove)
    return updated.weights, moved.weights


def test_a_local_update_is_that_of_algorithm_1() -> None:
    """ "y_i <- y_i - eta_l (g_i(y_i) + c - c_i)"; "c_i^+ <- (ii) c_i - c + 1/(K eta_l) (x - y_i)"; "c_i <- c_i^+"."""
    users = Users({"name": "scaffold", **PLAIN})
    own = [{name: 0.0 * value for name, value in hand(a_model(users)).items()} for _ in range(3)]
    for number, asked in ((1, (0, 1)), (2, (0, 2)), (3, (0, 1, 2))):
        x, c = a_model(users, seed=number), a_model(users, seed=10 + number)
        returned, moves = communicated(users, number, x, c, asked)
        for row, position in enumerate(asked):
            y, n_steps = hand(x), 0
            for batch in users.batches(position, number):
                y = combined(lambda a, g, v, w: a - LR * (g + v - w), y, gradient(y, batch), hand(c), own[position])
                n_steps += 1
            rate = 1 / (n_steps * LR)
            new = combined(lambda w, v, a, b, rate=rate: w - v + rate * (a - b), own[position], hand(c), hand(x), y)
            assert_close(users.named(returned[row]), y)
            assert_close(users.named(moves[row]), combined(lambda a, b: a - b, new, own[position]))
            assert_close(users.kept(position), new)
            own[position] = new


def test_without_variates_it_is_fedavg_to_the_bit() -> None:
    """The first round, where c = c_i = 0."""
    scaffold, fedavg = Users({"name": "scaffold", "optimizer": SGD}), Users({"name": "fedavg", "optimizer": SGD})
    sent = a_model(fedavg)
    zero = {name: np.zeros_like(array) for name, array in sent.items()}
    returned, _ = communicated(scaffold, 1, sent, zero, (0, 1, 2))
    np.testing.assert_array_equal(returned, fedavg.round(1, sent)[0])


def test_of_batch_norm_statistics_and_counts_have_no_variates() -> None:
    """Steps move parameters alone: what is returned of the running statistics is as if the server had sent no variate for them."""
    normed = {"build": "tests.fixture_nets:normed", "options": {"width": WIDTH}}
    returned = []
    for of_statistics in (0.0, 5.0):
        users = Users({"name": "scaffold", "optimizer": SGD}, model=normed)
        sent = a_model(users)
        tensors = [tensor for tensor in users.network.tensors if not tensor.is_integer]
        assert set(users.kept(0)) == {tensor.name for tensor in tensors}
        variate = {tensor.name: np.full(tensor.shape, of_statistics if tensor.is_statistic else 0.1, np.float32) for tensor in tensors}
        flat = np.concatenate([array.reshape(-1) for array in variate.values()])
        messages = {Shared: Shared(users.flat(sent), users.counts(sent), users=np.arange(3)), Variate: Variate(flat, users=np.arange(3))}
        _, replies = CLIENT.step(users.state, Inbox(STAGE, 1, messages), users.local)
        (updated,) = (reply for reply in replies if isinstance(reply, Updated))
        (moved,) = (reply for reply in replies if isinstance(reply, VariateMove))
        is_statistic = np.concatenate([np.full(tensor.size, tensor.is_statistic) for tensor in tensors])
        assert is_statistic.any()
        np.testing.assert_array_equal((moved.weights == 0).all(axis=0), is_statistic)
        assert (updated.counts > users.counts(sent)).all()
        returned.append(updated.weights)
    np.testing.assert_array_equal(*returned)


def test_an_update_without_a_step_leaves_the_variates() -> None:
    users = Users({"name": "scaffold", "epochs": 0})
    sent = a_model(users)
    returned, moves = communicated(users, 1, sent, a_model(users, seed=2), (0, 1, 2))
    np.testing.assert_array_equal(returned, np.tile(users.flat(sent), (3, 1)))
    assert not moves.any()


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_the_server_takes_the_mean_of_the_moves(server_lr: float) -> None:
    """ "(Delta x, Delta c) <- 1/|S| sum_i (Delta y_i, Delta c_i)"; "x <- x + eta_g Delta x and c <- c + |S|/N Delta c"."""
    tensors = (TensorInfo("w", (2,), False, "representation"),)
    config = Config(optimizer=SGD, server_lr=server_lr)
    rows, none = np.array([10, 20, 30, 40]), np.zeros(4, np.int64)
    method = PartialSharing(config, SETTING, tensors, rows, none, are_personal=False, beta=server_lr, own=OWN)
    x, c = np.array([1.0, 2.0]), np.array([0.5, -0.5])
    y, moves = np.array([[3.0, 4.0], [0.0, 8.0]]), np.array([[0.1, 0.2], [0.3, -0.6]])
    users = np.array([1, 3])
    updates = [Updated(y[i : i + 1].astype(np.float32), np.zeros((1, 0), np.int64), users=users[i : i + 1]) for i in range(2)]
    variates = [VariateMove(moves[i : i + 1].astype(np.float32), users=users[i : i + 1]) for i in range(2)]
    before = SharedState(x.astype(np.float32), np.zeros(0, np.int64), beside={C: c.astype(np.float32)})
    after = taken(method, before, Replies({}, None, {Updated: updates, VariateMove: variates}), users)
    np.testing.assert_allclose(after.weights, x + server_lr * (y - x).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(after.beside[C], c + 2 / 4 * moves.mean(axis=0), rtol=1e-6)
    wrong = [VariateMove(np.zeros((1, 3), np.float32), users=users[i : i + 1]) for i in range(2)]
    with pytest.raises(ProtocolError, match="came with rows of 3 numbers, wanted 2"):
        taken(method, before, Replies({}, None, {Updated: updates, VariateMove: wrong}), users)


def test_users_who_moved_their_variates_are_those_who_answered() -> None:
    """A control variate of somebody else, or none, is refused."""
    method = PartialSharing(
        Config(optimizer=SGD),
        SETTING,
        (TensorInfo("w", (1,), False, "representation"),),
        np.full(4, 10),
        np.zeros(4, np.int64),
        are_personal=False,
    )
    before = SharedState(np.zeros(1, np.float32), np.zeros(0, np.int64), beside={C: np.zeros(1, np.float32)})
    users = np.array([1, 3])
    updates = [Updated(np.ones((1, 1), np.float32), np.zeros((1, 0), np.int64), users=users[i : i + 1]) for i in range(2)]
    moved = [VariateMove(np.ones((1, 1), np.float32), users=np.array([user])) for user in (1, 2)]
    for variates in (moved, moved[:1]):
        with pytest.raises(ProtocolError, match=r"VariateMove came for members \[1.*\], wanted it once for each of \[1, 3\]"):
            taken(method, before, Replies({}, None, {Updated: updates, VariateMove: variates}), users)


def after_one_round(folder: Path, server_lr: float, **extra: Any) -> Mapping[str, NDArray[Any]]:
    """x^1 of seven users, by name."""
    method = {"name": "scaffold", "optimizer": SGD, "server_lr": server_lr, "evaluate_last": 0, "fine_tune": []}
    experiment = network_experiment(write_users(folder / "users.npz"), method, stop={"rounds": 1}, **extra)
    return World(experiment, folder / f"run {server_lr:g}", 1).run().outcomes["scaffold"].shared


def test_the_server_steps_as_far_as_it_is_told(tmp_path: Path) -> None:
    """ "x <- x + eta_g Delta x", of a whole run."""
    first = Users({"name": "scaffold"}).network.initial()
    half, whole = after_one_round(tmp_path, 0.5), after_one_round(tmp_path, 1.0)
    for name, mean in whole.items():
        np.testing.assert_allclose(half[name], (first[name] + mean) / 2, rtol=0, atol=1e-6)
        assert not np.array_equal(half[name], mean)


@pytest.mark.parametrize(("server_lr", "payload"), [(1e300, "float32"), (1e8, "float16")])
def test_too_long_a_step_of_the_server_is_its_own_fault(server_lr: float, payload: str, tmp_path: Path) -> None:
    """No user is blamed for numbers that the server could not send, and no figure becomes nan in silence."""
    with pytest.raises(
        RunError, match=rf"round 1 has left (inf|nan) in the server's shared tensors, with steps of {re.escape(f'{server_lr:g}')} "
    ):
        after_one_round(tmp_path, server_lr, payload=payload)


def test_the_servers_variate_is_the_mean_of_the_users(tmp_path: Path) -> None:
    """ "c = 1/N sum_i c_i" from zero on, whoever takes part; seen from what a run has written down."""
    method = {"name": "scaffold", "optimizer": SGD, "evaluate_last": 0}
    every_round = {"snapshots": {"every_rounds": 1}, "stop": {"rounds": 6}}
    experiment = network_experiment(write_users(tmp_path / "users.npz"), method, **every_round)
    world = World(experiment, tmp_path / "run", 3, Faults(coordinator=[8]))  # after the sizes, the start and five rounds
    with pytest.raises(CoordinatorKilledError):
        world.attempt(resume=False)
    point = SnapshotFile(tmp_path / "run" / "checkpoints", "run").load()["point"]
    own = []
    for host in world.hosts.values():
        kept = host.states["partial"].kept
        own.append(np.concatenate([kept[tensor.name].reshape(len(host.users), -1) for tensor in host.network.tensors], axis=1))
    assert point.round == 5
    assert np.abs(point.state.beside[C]).max() > 1e-3
    np.testing.assert_allclose(point.state.beside[C], np.concatenate(own).mean(axis=0), atol=1e-6)


def test_other_steps_than_plain_sgd_are_refused(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.npz")
    for optimizer, found in (({"momentum": 0.5}, "sgd with momentum 0.5"), ({"name": "adam"}, "adam")):
        with pytest.raises(ConfigError, match=f"optimizer is {found}, but control variates are made from steps of plain sgd"):
            network_experiment(path, {"name": "scaffold", "optimizer": optimizer})
