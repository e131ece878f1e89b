"""`ditto` against Algorithm 1 of Li, Hu, Beirami and Smith (2021)."""

from __future__ import annotations

import numpy as np

from coterie.families.partial import ALL_TUNED
from coterie_client.learning import Rows
from tests.local_updates import PLAIN, Users, a_model, assert_close, combined, gradient, hand

LR = 0.05


def test_both_models_are_those_of_algorithm_1() -> None:
    """ "Set w_k^t to w^t and update w_k^t for r local iterations on F_k"; "v_k = v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))"."""
    users = Users({"name": "ditto", "penalty": 0.7, **PLAIN})
    first, second = a_model(users), a_model(users, seed=2)
    users.round(1, first)
    own = [hand(users.kept(position)) for position in range(3)]
    returned, _ = users.round(2, second, (0, 2))
    for row, position in enumerate((0, 2)):
        anchor, w, v = hand(second), hand(second), own[position]
        for batch in users.batches(position, 2):
            w = combined(lambda a, g: a - LR * g, w, gradient(w, batch))
            v = combined(lambda a, g, b: a - LR * (g + 0.7 * (a - b)), v, gradient(v, batch), anchor)
        assert_close(users.named(returned[row]), w)
        assert_close(users.kept(position), v)
    assert_close(users.kept(1), own[1], 0.0)


def test_what_is_returned_is_fedavgs_to_the_bit() -> None:
    """The global update does not see v_k."""
    ditto, fedavg = Users({"name": "ditto"}), Users({"name": "fedavg"})
    for number in (1, 2):
        sent = a_model(ditto, seed=number)
        np.testing.assert_array_equal(ditto.round(number, sent)[0], fedavg.round(number, sent)[0])


def test_without_a_pull_personal_models_are_those_of_local_training_to_the_bit() -> None:
    """ "when lambda is set to 0, Ditto is reduced to training local models"."""
    ditto, local = Users({"name": "ditto", "penalty": 0.0, "epochs": 2}), Users({"name": "local_network", "epochs": 2})
    for number in (1, 2, 3):
        sent = a_model(ditto, seed=number)
        losses = [users.round(number, sent)[1] for users in (ditto, local)]
        np.testing.assert_array_equal(*losses)
    np.testing.assert_array_equal([ditto.flat(ditto.kept(position)) for position in range(3)], local.state.private)


def test_a_heavy_pull_keeps_personal_models_at_the_global_one() -> None:
    """ "As lambda grows large, it recovers global model": lambda eta = 1 sets v_k to w^t, less a step."""
    users = Users({"name": "ditto", "penalty": 1e4, **PLAIN, "optimizer": {"lr": 1e-4, "momentum": 0.0}})
    sent = a_model(users)
    users.round(1, sent)
    for position in range(3):
        np.testing.assert_allclose(users.flat(users.kept(position)), users.flat(sent), atol=1e-3)
        assert np.abs(users.flat(users.network.initial()) - users.flat(sent)).max() > 0.1


def test_personal_models_may_be_trained_for_longer() -> None:
    """Algorithm 1 has s iterations of v_k beside r of w_k."""
    users = Users({"name": "ditto", "penalty": 0.0, **PLAIN, "personal_epochs": 3})
    sent = a_model(users)
    returned, _ = users.round(1, sent)
    v, w = hand(users.network.initial()), hand(sent)
    for number, batch in enumerate(users.batches(0, 1, epochs=3)):
        v = combined(lambda a, g: a - LR * g, v, gradient(v, batch))
        if number < 2 * len(list(users.batches(0, 1, epochs=1))):
            w = combined(lambda a, g: a - LR * g, w, gradient(w, batch))
    assert_close(users.kept(0), v)
    assert_close(users.named(returned[0]), w)


def test_users_judge_and_fine_tune_their_own_models() -> None:
    users = Users({"name": "ditto", "fine_tune": ["all"]})
    sent = a_model(users)
    users.round(1, sent)
    scores, tuned = users.judged(1, sent), users.judged(1, sent, ALL_TUNED)
    for position, user in enumerate(users.users):
        own = users.network.judge(users.kept(position), Rows(user.test_features, user.test_target))
        assert (scores.loss[position, 0], scores.metric[position, 0]) == own
    np.testing.assert_array_equal(users.judged(1, a_model(users, seed=2)).loss, scores.loss)
    np.testing.assert_array_equal(users.judged(1, a_model(users, seed=2), ALL_TUNED).loss, tuned.loss)
    assert (tuned.loss != scores.loss).all()
