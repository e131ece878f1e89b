"""`fedprox` against Algorithm 2 of Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith (2020)."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import ConfigError
from tests.local_updates import PLAIN, Users, a_model, assert_close, combined, gradient, hand


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_local_update_minimises_the_proximal_loss(momentum: float) -> None:
    """ "Each chosen device k finds a w_k^{t+1} which is a inexact minimizer of: argmin_w h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2".

    Momentum remembers gradients of h_k, each at the point where it was taken."""
    mu, lr = 0.7, 0.05
    users = Users({"name": "fedprox", "mu": mu, **PLAIN, "optimizer": {"lr": lr, "momentum": momentum}})
    sent = a_model(users)
    returned, _ = users.round(3, sent)
    for position in range(3):
        anchor = w = hand(sent)
        velocity = combined(lambda a: 0 * a, w)
        for batch in users.batches(position, 3):
            slope = combined(lambda g, a, b: g + mu * (a - b), gradient(w, batch), w, anchor)
            velocity = combined(lambda v, g: momentum * v + g, velocity, slope)
            w = combined(lambda a, v: a - lr * v, w, velocity)
        assert_close(users.named(returned[position]), w)


def test_without_a_proximal_term_it_is_fedavg_to_the_bit() -> None:
    """ "FedAvg is a special case of FedProx where mu = 0"."""
    returned = {}
    for name, extra in (("fedprox", {"mu": 0.0}), ("fedavg", {})):
        users = Users({"name": name, **extra, "epochs": 2})
        returned[name] = users.round(1, a_model(users))
    np.testing.assert_array_equal(returned["fedprox"][0], returned["fedavg"][0])
    np.testing.assert_array_equal(returned["fedprox"][1], returned["fedavg"][1])


def test_a_heavier_proximal_term_stays_nearer() -> None:
    moved = []
    for mu in (0.0, 1.0, 10.0):
        users = Users({"name": "fedprox", "mu": mu, "epochs": 5})
        sent = a_model(users)
        moved.append(np.linalg.norm(users.round(1, sent)[0] - users.flat(sent)))
    assert moved[0] > moved[1] > moved[2] > 0


def test_the_term_is_not_negative() -> None:
    with pytest.raises(ConfigError, match=r"method\.mu: is -1, want at least 0"):
        Users({"name": "fedprox", "mu": -1})
