"""`per_fedavg` against Algorithm 1 and section 5 of Fallah, Mokhtari and Ozdaglar (2020)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError
from coterie.families.partial import ALL_TUNED
from coterie_client.learning import Rows
from tests.local_updates import (
    PLAIN,
    STAGE,
    Batch,
    Hand,
    Users,
    a_model,
    assert_close,
    by_hand_rows,
    combined,
    gradient,
    hand,
    loss_by_hand,
)

BETA, ALPHA, DELTA = 0.05, 0.2, 1e-2


def curved(w: Hand, g: Hand, batch: Batch) -> Hand:
    """The product with the Hessian from gradients: "(grad f(w + delta g; D'') - grad f(w - delta g; D'')) / 2 delta"."""
    above, below = (gradient(combined(lambda a, b, end=end: a + end * b, w, g), batch) for end in (DELTA, -DELTA))
    return combined(lambda a, b: (a - b) / (2 * DELTA), above, below)


@pytest.mark.parametrize("hessian", ["fo", "hf"])
def test_local_steps_are_those_of_algorithm_1(hessian: str) -> None:
    """ "w~ = w - alpha grad f_i(w, D)", "w <- w - beta (I - alpha grad^2 f_i(w, D'')) grad f_i(w~, D')", of three independent batches."""
    users = Users({"name": "per_fedavg", "alpha": ALPHA, "hessian": hessian, "delta": DELTA, **PLAIN})
    sent = a_model(users)
    returned, _ = users.round(3, sent)
    for position in range(3):
        w = hand(sent)
        independent = [users.batches(position, 3, purpose=f"training of {STAGE}{which}") for which in ("", ", batch 1", ", batch 2")]
        differ = False
        for outer, inner, third in zip(*independent, strict=True):
            differ |= not torch.equal(outer[0], inner[0])
            adapted = combined(lambda a, g: a - ALPHA * g, w, gradient(w, inner))
            g = gradient(adapted, outer)
            if hessian == "hf":
                g = combined(lambda a, b: a - ALPHA * b, g, curved(w, g, third))
            w = combined(lambda a, b: a - BETA * b, w, g)
        assert differ
        assert_close(users.named(returned[position]), w, 2e-5 if hessian == "hf" else 2e-6)


def test_with_the_hessian_a_step_follows_the_gradient_of_the_meta_function() -> None:
    """F_i(w) = f_i(w - alpha grad f_i(w)), "grad F_i(w) = (I - alpha grad^2 f_i(w)) grad f_i(w - alpha grad f_i(w))", differentiated
    through by torch; of all rows at once, so that the batches are one and the same. Without the Hessian it is another."""
    distance = {}
    for hessian in ("fo", "hf"):
        method = {"name": "per_fedavg", "alpha": ALPHA, "hessian": hessian, "batch_size": 100, "optimizer": {"lr": 1.0, "momentum": 0.0}}
        users = Users(method)
        sent = a_model(users)
        returned, _ = users.round(1, sent, (0,))
        w = {name: tensor.requires_grad_() for name, tensor in hand(sent).items()}
        rows = by_hand_rows(users.users[0], np.arange(len(users.users[0].target)))
        inner = torch.autograd.grad(loss_by_hand(w, *rows), list(w.values()), create_graph=True)
        meta = loss_by_hand({name: a - ALPHA * g for (name, a), g in zip(w.items(), inner, strict=True)}, *rows)
        wanted = np.concatenate([g.numpy().reshape(-1) for g in torch.autograd.grad(meta, list(w.values()))])
        distance[hessian] = np.linalg.norm(users.flat(sent) - returned[0] - wanted) / np.linalg.norm(wanted)
    assert distance["hf"] < 1e-3
    assert distance["fo"] > 0.02


@pytest.mark.parametrize("hessian", ["fo", "hf"])
def test_without_an_inner_step_it_is_fedavg(hessian: str) -> None:
    """alpha = 0: F_i is f_i, and users judge w."""
    meta = Users({"name": "per_fedavg", "alpha": 0.0, "hessian": hessian, "epochs": 2})
    fedavg = Users({"name": "fedavg", "epochs": 2})
    sent = a_model(meta)
    found, wanted = meta.round(1, sent), fedavg.round(1, sent)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(meta.judged(1, sent).loss, fedavg.judged(1, sent).loss)


@pytest.mark.parametrize("length", [{}, {"adaptation_epochs": 1}, {"adaptation_epochs": 3}, {"adaptation_updates": 2}])
def test_users_judge_and_fine_tune_what_they_adapt(length: dict[str, int]) -> None:
    """ "each user ... updates the global model by one gradient step with its own data", or more; by plain steps of length alpha."""
    users = Users({"name": "per_fedavg", "alpha": ALPHA, "batch_size": 4, **length, "fine_tune": ["all"]})
    sent = a_model(users)
    scores, tuned = users.judged(2, sent), users.judged(2, sent, ALL_TUNED)
    for position, user in enumerate(users.users):
        w = hand(sent)
        steps = list(users.batches(position, 2, epochs=length.get("adaptation_epochs", 1), purpose=f"adaptation of {STAGE}"))
        for batch in steps[: length.get("adaptation_updates")]:
            w = combined(lambda a, g: a - ALPHA * g, w, gradient(w, batch))
        rows = torch.tensor(user.test_features, dtype=torch.float64), torch.tensor(user.test_target, dtype=torch.int64)
        assert scores.loss[position, 0] == pytest.approx(float(loss_by_hand(w, *rows)), rel=1e-5)
        unadapted, _ = users.network.judge(sent, Rows(user.test_features, user.test_target))
        assert scores.loss[position, 0] != pytest.approx(unadapted, rel=1e-3)
    assert (tuned.loss != scores.loss).all()


def test_adaptation_has_one_length() -> None:
    with pytest.raises(ConfigError, match="adaptation_epochs and adaptation_updates both say how users adapt the model: give one"):
        Users({"name": "per_fedavg", "adaptation_epochs": 1, "adaptation_updates": 1})
