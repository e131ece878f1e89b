"""`l2gd` against Algorithm 1 of Hanzely and Richtarik (2020), federated learning of a mixture of global and local models."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.families.partial import Shared, TrainingLoss, Updated
from coterie.methods.l2gd import Coins
from coterie.wire.precision import Precision
from coterie_client.families.partial import CLIENT
from coterie_client.interface.half import Inbox
from coterie_client.learning import Rows
from coterie_client.methods.l2gd import LEFT, aggregated
from coterie_server.interface.half import Members, Setting
from coterie_server.methods.l2gd import coins
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from tests.local_updates import BATCH, STAGE, Hand, Tensors, Users, a_model, assert_close, combined, gradient, hand
from tests.networks import network_experiment, write_users
from tests.simulation import World

LR, P, PENALTY = 0.05, 0.2, 3.0
A = LR * PENALTY * (1 - P) / P  # alpha lambda / (n p), as lr is alpha / (n (1 - p))
METHOD: dict[str, Any] = {"name": "l2gd", "p": P, "penalty": PENALTY, "batch_size": BATCH, "optimizer": {"lr": LR}}


def a_round(users: Users, number: int, mean: Tensors, coins: tuple[int, int], asked: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """What the asked users return, and their losses."""
    messages = {
        Shared: Shared(users.flat(mean), np.zeros(0, np.int64), users=np.array(asked)),
        Coins: Coins(np.array(coins), users=np.array(asked)),
    }
    users.state, replies = CLIENT.step(users.state, Inbox(STAGE, number, messages), users.local)
    by_kind = {type(reply): reply for reply in replies}
    updated, losses = by_kind[Updated], by_kind[TrainingLoss]
    assert isinstance(updated, Updated)
    assert isinstance(losses, TrainingLoss)
    return updated.weights, losses.loss


def towards(x: Hand, mean: Tensors, times: int) -> Hand:
    """As many aggregations, one after the other."""
    for _ in range(times):
        x = combined(lambda w, m: (1 - A) * w + A * m, x, hand(mean))
    return x


def test_rounds_are_the_coins_of_algorithm_1() -> None:
    """ "if xi = 0: all devices perform a local step"; "else: master ... x_i^{k+1} = (1 - alpha lambda / (np)) x_i^k + ... xbar^k"."""
    users = Users(METHOD)
    x, to_come = {i: hand(users.network.initial()) for i in range(3)}, dict.fromkeys(range(3), 1)
    for number, thrown, asked in ((1, (3, 2), (0, 1)), (2, (4, 1), (0, 2)), (3, (1, 3), (0, 1, 2))):
        mean = a_model(users, seed=number)
        returned, _ = a_round(users, number, mean, thrown, asked)
        for row, position in enumerate(asked):
            x[position] = towards(x[position], mean, to_come[position])
            batches = list(users.batches(position, number))[: thrown[0]]
            assert len(batches) == thrown[0]
            for batch in batches:
                x[position] = combined(lambda w, g: w - LR * g, x[position], gradient(x[position], batch))
            assert_close(users.named(returned[row]), x[position])
            to_come[position] = thrown[1]
    for position in range(3):
        assert_close({name: array for name, array in users.kept(position).items() if name != LEFT}, x[position])


def test_users_judge_their_models_after_the_aggregations() -> None:
    users = Users(METHOD)
    a_round(users, 1, a_model(users), (2, 3), (0, 2))
    mean = a_model(users, seed=2)
    scores = users.judged(1, mean)
    for position, (user, times) in enumerate(zip(users.users, (3, 1, 3), strict=True)):
        own = aggregated(mean, users.kept(position), frozenset())
        assert_close(own, towards(hand({name: users.kept(position)[name] for name in mean}), mean, times))
        judged = users.network.judge(own, Rows(user.test_features, user.test_target))
        assert (scores.loss[position, 0], scores.metric[position, 0]) == judged


def test_without_a_penalty_it_is_local_training_to_the_bit() -> None:
    """ "lambda = 0: each x_i is the minimiser of its own f_i"."""
    plain = {"batch_size": BATCH, "optimizer": {"lr": LR, "momentum": 0.0}}
    l2gd, local = Users({**METHOD, "penalty": 0.0}), Users({"name": "local_network", "updates": 4, **plain})
    for number, asked in ((1, (0, 1, 2)), (2, (1, 2)), (3, (0,))):
        mean = a_model(l2gd, seed=number)
        np.testing.assert_array_equal(a_round(l2gd, number, mean, (4, 2), asked)[1], local.round(number, mean, asked)[1])
    np.testing.assert_array_equal([l2gd.flat(l2gd.kept(position)) for position in range(3)], local.state.private)


def test_whole_aggregations_are_federated_averaging_to_the_bit() -> None:
    """a = 1: "x_i = xbar", from which those drawn train, and by which all are judged, the ones never drawn too."""
    plain = {"batch_size": BATCH, "optimizer": {"lr": 0.5, "momentum": 0.0}}
    l2gd, fedavg = Users({"name": "l2gd", "p": 0.5, "penalty": 2.0, **plain}), Users({"name": "fedavg", "updates": 3, **plain})
    for number, asked in ((1, (0, 1)), (2, (0,))):
        sent = a_model(fedavg, seed=number)
        np.testing.assert_array_equal(a_round(l2gd, number, sent, (3, 1), asked)[0], fedavg.round(number, sent, asked)[0])
    np.testing.assert_array_equal(l2gd.judged(2, a_model(fedavg)).loss, fedavg.judged(2, a_model(fedavg)).loss)


def test_the_coins_of_a_round_are_as_long_as_those_that_are_thrown() -> None:
    """ "xi = 1 with probability p and 0 with probability 1 - p": P(k zeros) = (1 - p)^(k-1) p, and of ones with p for 1 - p."""
    setting = Setting(3, STAGE, Members((), ()), Precision.of("float64"))
    lengths = np.array([coins(0.3, setting, number) for number in range(1, 4001)])
    for found, end in zip(lengths.T, (0.3, 0.7), strict=True):
        for length in (1, 2, 3):
            share = (1 - end) ** (length - 1) * end
            assert abs((found == length).mean() - share) < 4 * np.sqrt(share * (1 - share) / 4000)
        assert found.min() == 1
    assert abs(np.corrcoef(lengths.T)[0, 1]) < 0.05


def test_the_coins_are_among_the_figures_and_the_same_for_all(tmp_path: Path) -> None:
    """ "the master ... xi^k": everyone in a round makes as many steps, by a coin that the seed throws."""
    experiment = network_experiment(write_users(tmp_path / "users.npz"), {"name": "l2gd", "p": 0.3, "evaluate_last": 0})
    rows = []
    for n_hosts in (1, 3):
        world = World(experiment, tmp_path / f"{n_hosts}", n_hosts)
        world.run()
        with contextlib.closing(open_run(world.folder)) as connection:
            history = summary.history(connection, summary.final_stage(connection).number)
            rows.append([(row["local_steps"], row["aggregations"]) for row in history])
    assert rows[0] == rows[1]
    assert len(set(rows[0])) > 2


def test_aggregations_past_the_mean_are_refused(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.npz")
    with pytest.raises(
        ConfigError, match=r"penalty, p and optimizer.lr give aggregations of a = lr penalty \(1 - p\) / p = 1.8: want at most 1"
    ):
        network_experiment(path, {**METHOD, "penalty": 9.0})
