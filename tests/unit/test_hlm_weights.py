"""gamma, lam and alpha of the methods for known clusters."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.families.known_clusters import Weights

NAMES, CLUSTERS = ("u0", "u1", "u2"), ("a", "b", "b")


def experiment(**weights):
    data, problem = {"source": "ellipses"}, {"loss": "least_squares"}
    return experiment_from({"name": "weights", "data": data, "problem": problem, "method": {"name": "hlm_exact", **weights}})


def test_one_gamma_is_everybodys():
    np.testing.assert_array_equal(Weights(gamma=2, lam=1).gamma_of(NAMES, CLUSTERS), [2, 2, 2])


def test_a_users_own_gamma_comes_before_that_of_its_cluster():
    np.testing.assert_array_equal(Weights(gamma={"a": 1, "b": 2, "u2": 5}, lam=1).gamma_of(NAMES, CLUSTERS), [1, 2, 5])


def test_alpha_is_lambda_over_lambda_plus_the_sum_of_gamma():
    """Proposition 2.2, with 0/0 read as 0: a cluster without any weight."""
    np.testing.assert_allclose(Weights(gamma=1, lam=3).alpha_of(("a", "b", "c"), np.array([1.0, 9.0, 0.0])), [3 / 4, 3 / 12, 1])
    np.testing.assert_allclose(Weights(gamma=1, lam={"b": 1, "a": 0}).alpha_of(("a", "b"), np.array([0.0, 1.0])), [0, 1 / 2])
    np.testing.assert_array_equal(Weights(gamma=1, alpha={"b": 1, "a": 0.25}).alpha_of(("a", "b"), np.array([1.0, 2.0])), [0.25, 1])
    np.testing.assert_array_equal(Weights(gamma=1, alpha=0).alpha_of(("a", "b"), np.array([1.0, 2.0])), [0, 0])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"gamma": 1, "alpha": 1.5}, "method.alpha: is 1.5, want a number from 0 to 1"),
        ({"gamma": 1, "alpha": {"c0": 0.5, "c1": -0.1}}, "method.alpha: is -0.1 for 'c1', want a number from 0 to 1"),
        ({"gamma": 1, "alpha": float("nan")}, "method.alpha: is nan, want a number from 0 to 1"),
        ({"gamma": 1}, "method: want exactly one of lam (lambda of (2.3)) and alpha (of (2.1))"),
        ({"gamma": 1, "lam": 1, "alpha": 0.5}, "method: want exactly one of lam (lambda of (2.3)) and alpha (of (2.1))"),
        ({"gamma": -1, "lam": 1}, "method.gamma: is -1, want a finite number of at least 0"),
        ({"gamma": float("inf"), "lam": 1}, "method.gamma: is inf, want a finite number of at least 0"),
        ({"gamma": {"u3": float("nan")}, "lam": 1}, "method.gamma: is nan for 'u3', want a finite number of at least 0"),
        ({"gamma": {"c0": "much"}, "lam": 1}, "method.gamma: is 'much' for 'c0', want a finite number of at least 0"),
        ({"gamma": {0: 1.0}, "lam": 1}, "method.gamma: has the key 0, want names of users or clusters as text"),
        ({"gamma": True, "lam": 1}, "method.gamma: is True, want a finite number of at least 0"),
        ({"lam": 1}, "method.gamma: is missing"),
    ],
)
def test_a_wrong_weight_is_told_in_one_sentence(weights, message):
    with pytest.raises(ConfigError) as caught:
        experiment(**weights)
    assert str(caught.value) == f"the experiment: {message}"


def test_all_wrong_weights_are_told_at_once():
    with pytest.raises(ConfigError, match=r"method\.gamma: is -1.*; method\.alpha: is 2"):
        experiment(gamma=-1, alpha=2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"gamma": {"a": 1}, "lam": 1}, "method.gamma has no value for user 'u1' nor for its cluster"),
        ({"gamma": {"a": 1, "b": 1, "z": 1}, "lam": 1}, "method.gamma names 'z', which is neither a user nor a cluster"),
        ({"gamma": 1, "lam": {"a": 1}}, "method.lam has no value for cluster 'b'"),
        ({"gamma": 1, "alpha": {"a": 1, "b": 1, "z": 1}}, "method.alpha names cluster 'z', want one of a, b"),
    ],
)
def test_a_mapping_that_does_not_fit_the_members_is_told(weights, message):
    chosen = Weights(**weights)
    with pytest.raises(ConfigError, match=message):
        chosen.alpha_of(("a", "b"), np.array([chosen.gamma_of(NAMES, CLUSTERS).sum(), 1.0]))


def test_weights_are_frozen():
    with pytest.raises(ValidationError):
        Weights(gamma=1, lam=1).gamma = 2


def test_numbers_that_yaml_takes_for_text_are_numbers() -> None:
    weights = Weights.model_validate({"gamma": {"u0": "1e-3", "a": 2}, "lam": "1e2"})
    assert (weights.gamma, weights.lam) == ({"u0": 0.001, "a": 2.0}, 100.0)
