"""`fed_mtl` against the mean-regularised problem of Evgeniou and Pontil (2004)."""

from __future__ import annotations

import numpy as np

from coterie_client.learning import Rows
from tests.local_updates import PLAIN, Users, a_model, assert_close, combined, gradient, hand

LR = 0.05


def test_users_train_their_own_models_near_the_mean() -> None:
    """Gradient steps on f_i(w_i) + mu/2 ||w_i - wbar||^2, from where w_i was."""
    users = Users({"name": "fed_mtl", "mu": 0.7, **PLAIN})
    w = {position: hand(users.network.initial()) for position in range(3)}
    for number, asked in ((1, (0, 1, 2)), (2, (0, 2))):
        mean = a_model(users, seed=number)
        returned, _ = users.round(number, mean, asked)
        for row, position in enumerate(asked):
            for batch in users.batches(position, number):
                w[position] = combined(lambda a, g, m: a - LR * (g + 0.7 * (a - m)), w[position], gradient(w[position], batch), hand(mean))
            assert_close(users.named(returned[row]), w[position])
    for position in range(3):
        assert_close(users.kept(position), w[position])


def test_without_a_pull_it_is_local_training_to_the_bit() -> None:
    mtl, local = Users({"name": "fed_mtl", "mu": 0.0}), Users({"name": "local_network"})
    for number in (1, 2):
        sent = a_model(mtl, seed=number)
        np.testing.assert_array_equal(mtl.round(number, sent)[1], local.round(number, sent)[1])
    np.testing.assert_array_equal([mtl.flat(mtl.kept(position)) for position in range(3)], local.state.private)


def test_users_judge_their_own_models() -> None:
    users = Users({"name": "fed_mtl"})
    users.round(1, a_model(users))
    scores = users.judged(1, a_model(users, seed=2))
    for position, user in enumerate(users.users):
        own = users.network.judge(users.kept(position), Rows(user.test_features, user.test_target))
        assert (scores.loss[position, 0], scores.metric[position, 0]) == own


def test_the_mean_weighs_all_users_the_same() -> None:
    """The sum of the pulls is least at the plain mean of the models."""
    assert Users({"name": "fed_mtl"}).experiment.method.average == "plain"
