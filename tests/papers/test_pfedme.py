"""`pfedme` against Algorithm 1 of Dinh, Tran and Nguyen (2020)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.experiment.model import named_tensors
from coterie_client.learning import Rows
from tests.local_updates import PLAIN, Users, a_model, assert_close, combined, gradient, hand
from tests.networks import WIDTH, network_experiment, write_users
from tests.simulation import World

LR = 0.05


def test_local_rounds_are_those_of_algorithm_1() -> None:
    """theta minimises "f_i(theta; D) + lambda/2 ||theta - w||^2" by K steps, and "w_{i,r+1} = w_{i,r} - eta lambda (w_{i,r} - theta_i)"."""
    users = Users({"name": "pfedme", "penalty": 3.0, "personal_lr": 0.1, "personal_steps": 4, **PLAIN})
    users.round(1, a_model(users, seed=9))
    before, sent = users.kept(1), a_model(users)
    returned, _ = users.round(2, sent, (0, 2))
    for row, position in enumerate((0, 2)):
        w = theta = hand(sent)
        for batch in users.batches(position, 2):
            theta = w
            for _ in range(4):
                theta = combined(lambda t, g, a: t - 0.1 * (g + 3.0 * (t - a)), theta, gradient(theta, batch), w)
            w = combined(lambda a, t: a - LR * 3.0 * (a - t), w, theta)
        assert_close(users.named(returned[row]), w)
        assert_close(users.kept(position), theta)
    assert_close(users.kept(1), hand(before), 0.0)


def test_theta_is_the_prox_where_the_steps_suffice() -> None:
    """ "the first-order approach to obtain theta": in the limit grad f_i(theta) + lambda (theta - w) = 0."""
    method = {"name": "pfedme", "penalty": 4.0, "personal_lr": 0.1, "personal_steps": 300, **PLAIN, "batch_size": 100, "epochs": 1}
    users = Users(method)
    sent = a_model(users)
    users.round(1, sent, (1,))  # whose prox is not at a kink of ReLU
    theta = hand(users.kept(1))
    (batch,) = users.batches(1, 1, epochs=1, batch_size=100)
    left = combined(lambda g, t, w: g + 4.0 * (t - w), gradient(theta, batch), theta, hand(sent))
    assert max(float(tensor.abs().max()) for tensor in left.values()) < 1e-5


def test_one_step_of_length_1_over_lambda_is_fedavg() -> None:
    """theta = w - grad f / lambda, so lambda (w - theta) = grad f: up to rounding, and with it momentum and all."""
    pfedme = Users({"name": "pfedme", "penalty": 8.0, "personal_lr": 0.125, "personal_steps": 1, "epochs": 2})
    fedavg = Users({"name": "fedavg", "epochs": 2})
    sent = a_model(pfedme)
    found, wanted = pfedme.round(1, sent), fedavg.round(1, sent)
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)


def test_a_heavy_penalty_keeps_personal_models_at_the_global_one() -> None:
    users = Users({"name": "pfedme", "penalty": 1e5, "personal_lr": 5e-6, "personal_steps": 20, **PLAIN, "optimizer": {"lr": 1e-9}})
    sent = a_model(users)
    users.round(1, sent)
    for position in range(3):
        np.testing.assert_allclose(users.flat(users.kept(position)), users.flat(sent), atol=1e-4)


def test_users_judge_their_own_models() -> None:
    users = Users({"name": "pfedme"})
    users.round(1, a_model(users))
    scores = users.judged(1, a_model(users, seed=2))
    for position, user in enumerate(users.users):
        own = users.network.judge(users.kept(position), Rows(user.test_features, user.test_target))
        assert (scores.loss[position, 0], scores.metric[position, 0]) == own


def test_steps_that_lead_away_from_the_prox_are_refused() -> None:
    """Gradient steps on lambda/2 ||theta - w||^2 alone converge below 2 / lambda."""
    with pytest.raises(ConfigError, match=r"personal_lr 0\.2 times penalty 15 is 3, want less than 2"):
        Users({"name": "pfedme", "personal_lr": 0.2})


def test_both_models_have_the_statistics_gathered_at_theta() -> None:
    """Of batch norm, in K evaluations a batch, of which only theta's parameters are apart from w's."""
    normed = {"build": "tests.fixture_nets:normed", "options": {"width": WIDTH}}
    users = Users({"name": "pfedme", "personal_steps": 3, "batch_size": 100}, model=normed)
    sent = a_model(users)
    returned, _ = users.round(1, sent)
    for position in range(3):
        kept, own = users.kept(position), named_tensors(returned[position], users.counts(sent), users.network.tensors)
        assert users.counts(kept).tolist() == (users.counts(sent) + 3).tolist()
        for tensor in users.network.tensors:
            if not tensor.is_integer:
                assert np.array_equal(kept[tensor.name], own[tensor.name]) == tensor.is_statistic, tensor.name


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_the_server_mixes_the_average_with_what_was(beta: float, tmp_path: Path) -> None:
    """ "w^{t+1} = (1 - beta) w^t + beta sum_{i in S^t} w_i / S"."""
    archive = write_users(tmp_path / "users.npz")
    shared = {}
    for each in (1.0, beta):
        experiment = network_experiment(archive, {"name": "pfedme", "beta": each, "evaluate_last": 0, "fine_tune": []}, stop={"rounds": 1})
        shared[each] = World(experiment, tmp_path / f"{each}", 1).run().outcomes["pfedme"].shared
    first = Users({"name": "pfedme"}).network.initial()
    for name, mean in shared[1.0].items():
        np.testing.assert_allclose(shared[beta][name], (1 - beta) * first[name] + beta * mean, rtol=0, atol=1e-6)
        assert not np.array_equal(shared[beta][name], mean)
