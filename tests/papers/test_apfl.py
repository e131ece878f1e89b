"""`apfl` against Algorithm 1 and equation (10) of Deng, Kamani and Mahdavi (2020)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.families.partial import ALL_TUNED
from coterie_client.learning import Rows
from coterie_client.methods.apfl import ALPHA
from tests.local_updates import PLAIN, Users, a_model, assert_close, combined, gradient, hand
from tests.networks import WIDTH

LR = 0.05
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "dropout": {"model": {"build": "tests.fixture_nets:two_layers", "options": {"rate": 0.3, "width": WIDTH}, "head": ["5"]}},
    "batch norm": {"model": {"build": "tests.fixture_nets:normed", "options": {"width": WIDTH}}},
}


@pytest.mark.parametrize("adaptive", [False, True])
def test_both_models_and_alpha_are_those_of_algorithm_1(adaptive: bool) -> None:
    """ "w_i^t = w_i^{t-1} - eta grad f_i(w_i^{t-1}; xi)", "v_i^t = v_i^{t-1} - eta grad_v f_i(vbar_i^{t-1}; xi)", where
    "vbar_i = alpha_i v_i + (1 - alpha_i) w_i", and (10): "alpha_i - eta <v_i - w_i, grad f_i(vbar_i; xi)>"."""
    users = Users({"name": "apfl", "alpha": 0.4, "adaptive": adaptive, **PLAIN})
    v = {position: hand(users.network.initial()) for position in range(3)}
    alpha = dict.fromkeys(range(3), 0.4)
    for number, asked in ((1, (0, 1, 2)), (2, (2,))):
        sent = a_model(users, seed=number)
        returned, _ = users.round(number, sent, asked)
        for row, position in enumerate(asked):
            w = hand(sent)
            for batch in users.batches(position, number):
                a, own = alpha[position], v[position]
                g = gradient(combined(lambda x, y, a=a: a * x + (1 - a) * y, own, w), batch)
                v[position] = combined(lambda x, y, a=a: x - LR * a * y, own, g)
                if adaptive:
                    alpha[position] -= LR * float(sum(((own[name] - w[name]) * g[name]).sum() for name in w))
                w = combined(lambda x, y: x - LR * y, w, gradient(w, batch))
            assert_close(users.named(returned[row]), w)
    assert (alpha[2] != 0.4) == adaptive
    for position in range(3):
        assert_close(users.kept(position), v[position])
        assert users.kept(position)[ALPHA] == pytest.approx(alpha[position], abs=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_without_the_own_model_users_judge_fedavgs_global_model_to_the_bit(model: str) -> None:
    """alpha = 0: the mix is w. Of batch norm it has statistics of its own."""
    apfl, fedavg = Users({"name": "apfl", "alpha": 0.0}, **MODELS[model]), Users({"name": "fedavg"}, **MODELS[model])
    for number in (1, 2):
        sent = a_model(apfl, seed=number)
        np.testing.assert_array_equal(apfl.round(number, sent)[0], fedavg.round(number, sent)[0])
        if model != "batch norm":
            np.testing.assert_array_equal(apfl.judged(number, sent).loss, fedavg.judged(number, sent).loss)


@pytest.mark.parametrize("model", MODELS)
def test_with_the_own_model_alone_it_is_local_training_to_the_bit(model: str) -> None:
    """alpha = 1: the mix is v_i."""
    apfl, local = Users({"name": "apfl", "alpha": 1.0}, **MODELS[model]), Users({"name": "local_network"}, **MODELS[model])
    for number in (1, 2):
        sent = a_model(apfl, seed=number)
        losses = [users.round(number, sent)[1] for users in (apfl, local)]
        np.testing.assert_array_equal(*losses)
        np.testing.assert_array_equal(apfl.judged(number, sent).loss, local.judged(number, sent).loss)
    np.testing.assert_array_equal([apfl.flat(apfl.kept(position)) for position in range(3)], local.state.private)
    np.testing.assert_array_equal([apfl.counts(apfl.kept(position)) for position in range(3)], local.state.private_counts)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_alpha_stays_between_the_two_models(alpha: float) -> None:
    """(10) alone would leave [0, 1]; at its ends the mix is one of the two."""
    users = Users({"name": "apfl", "alpha": alpha, "adaptive": True, "epochs": 3, "optimizer": {"lr": 0.5}})
    for number in range(1, 6):
        users.round(number, a_model(users, seed=number))
        found = users.state.kept[ALPHA]
        assert ((found >= 0) & (found <= 1)).all()


def test_users_judge_and_fine_tune_the_mix() -> None:
    users = Users({"name": "apfl", "alpha": 0.25, "fine_tune": ["all"]})
    sent = a_model(users)
    users.round(1, sent)
    scores, tuned = users.judged(1, sent), users.judged(1, sent, ALL_TUNED)
    for position, user in enumerate(users.users):
        kept = users.kept(position)
        mix = {name: (0.25 * kept[name] + 0.75 * array).astype(np.float32) for name, array in sent.items()}
        loss, _ = users.network.judge(mix, Rows(user.test_features, user.test_target))
        assert scores.loss[position, 0] == pytest.approx(loss, rel=1e-6)
    assert (tuned.loss != scores.loss).all()


def test_running_statistics_of_batch_norm_are_not_mixed() -> None:
    """The mix has its own, "gathered where its gradients are taken": at 0 < alpha < 1 neither w's nor a mean of both."""
    users = Users({"name": "apfl", "alpha": 0.25}, **MODELS["batch norm"])
    sent = a_model(users)
    users.round(1, sent)
    scores = users.judged(1, sent)
    statistics = {tensor.name for tensor in users.network.tensors if tensor.is_statistic}
    for position, user in enumerate(users.users):
        kept = users.kept(position)
        mix = {
            name: kept[name] if name in statistics else (0.25 * kept[name] + 0.75 * array).astype(np.float32)
            for name, array in sent.items()
        }
        loss, _ = users.network.judge(mix, Rows(user.test_features, user.test_target))
        assert scores.loss[position, 0] == pytest.approx(loss, rel=1e-6)


def test_alpha_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"method\.alpha: is 1\.5, want at most 1"):
        Users({"name": "apfl", "alpha": 1.5})
