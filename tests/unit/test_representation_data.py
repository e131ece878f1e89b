"""Regressions that share a representation, section 5.1 of Collins et al. (2021): the truth, and rows by name, purpose and round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.experiment.data import RepresentationData
from coterie.experiment.representation import true_head, true_representation
from coterie_client.data import list_users, load_users
from coterie_client.data.representation import fresh


def data(**changes: Any) -> RepresentationData:
    return RepresentationData.model_validate({"source": "representation", "users": 6, "d": 7, "k": 3, "rows_per_user": 4, **changes})


def theta(config: RepresentationData, seed: int, name: str) -> Any:
    truth = true_representation(config, seed)
    assert truth is not None
    return truth @ true_head(config, seed, name)


def test_the_columns_of_the_representation_are_orthonormal_and_heads_have_norm_root_k() -> None:
    truth = true_representation(data(), 3)
    assert truth is not None
    np.testing.assert_allclose(truth.T @ truth, np.eye(3), atol=1e-12)
    norms = [np.linalg.norm(true_head(data(), 3, f"u{number}")) for number in range(6)]
    np.testing.assert_allclose(norms, np.sqrt(3), rtol=1e-12)


def test_without_noise_targets_are_the_truth_at_the_rows() -> None:
    config = data(noise=0.0, test_per_user=5)
    for user in load_users(config, 3, None):
        np.testing.assert_allclose(user.target, user.features @ theta(config, 3, user.name), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(user.test_target, user.test_features @ theta(config, 3, user.name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("noise_is", "deviation"), [("std", 0.04), ("variance", 0.2)])
def test_the_noise_is_a_standard_deviation_or_a_variance(noise_is: str, deviation: float) -> None:
    config = data(users=1, rows_per_user=20_000, noise=0.04, noise_is=noise_is)
    (user,) = load_users(config, 3, None)
    residual = user.target - user.features @ theta(config, 3, "u0")
    assert residual.std() == pytest.approx(deviation, rel=0.03)
    np.testing.assert_allclose(np.cov(user.features, rowvar=False), np.eye(7), atol=0.05)


def test_a_users_rows_depend_on_nobody_else_and_fewer_are_the_first_of_more() -> None:
    everyone = {user.name: user for user in load_users(data(), 3, None)}
    assert list(everyone) == [head.name for head in list_users(data(), 3)] == ["u0", "u1", "u2", "u3", "u4", "u5"]
    (alone,) = load_users(data(users=5, rows_per_user=400), 3, ["u4"])
    np.testing.assert_array_equal(alone.features[:4], everyone["u4"].features)
    np.testing.assert_array_equal(alone.target[:4], everyone["u4"].target)


def test_fresh_rows_are_new_in_each_round_for_each_user_and_are_no_test_rows() -> None:
    config = data(test_per_user=4)
    names = ["u1", "u4"]
    draw = fresh(config, 3, names)
    users = {user.name: user for user in load_users(config, 3, names)}
    drawn = [users[name].features for name in names] + [users[name].test_features for name in names]
    drawn += [draw(position, number, 4)[0] for position in (0, 1) for number in (0, 1, 2)]
    assert len({rows.tobytes() for rows in drawn}) == len(drawn)
    x, y = fresh(config, 3, ["u4"])(0, 2, 4)
    np.testing.assert_array_equal(x, drawn[-1])
    np.testing.assert_allclose(y, x @ theta(config, 3, "u4"), atol=6e-3)  # six standard deviations
    assert fresh(config, 3, ["u4"])(0, 2, 9)[0].shape == (9, 7)


def test_the_seed_of_the_data_is_the_experiments_or_its_own() -> None:
    own = data(seed=11)
    assert load_users(own, 3, ["u0"])[0].target.tobytes() == load_users(data(), 11, ["u0"])[0].target.tobytes()
    assert load_users(data(), 3, ["u0"])[0].target.tobytes() != load_users(data(), 11, ["u0"])[0].target.tobytes()
    np.testing.assert_array_equal(true_representation(own, 3), true_representation(data(), 11))


def test_a_representation_larger_than_the_features_is_refused() -> None:
    with pytest.raises(ValidationError, match="k is 8, want at most d, which is 7"):
        data(k=8)
