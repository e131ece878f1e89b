"""The data source `hlm`."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.draws.streams import stream
from coterie.errors import ConfigError
from coterie.experiment.data import HlmData
from coterie_client.data import list_users, load_users
from coterie_client.data.hlm import normal, truth


def config(**changes):
    return HlmData(source="hlm", **{"clusters": 3, "users_per_cluster": 4, "d": 5, "rows_per_user": 6, "test_per_user": 2, **changes})


def test_users_come_in_cluster_order_and_heads_agree_with_them():
    users, heads = load_users(config(), 0, None), list_users(config(), 0)
    assert [user.name for user in users] == [f"u{number}" for number in range(12)]
    assert [user.cluster for user in users] == [f"c{number // 4}" for number in range(12)]
    assert [(head.name, head.cluster, head.n_rows) for head in heads] == [(user.name, user.cluster, len(user.target)) for user in users]
    assert {(user.features.shape, user.test_features.shape, user.test_target.shape) for user in users} == {((6, 5), (2, 5), (2,))}


@pytest.mark.parametrize("design", ["gaussian", "orthogonal"])
def test_a_users_rows_and_truth_do_not_depend_on_who_else_is_loaded(design):
    everyone, (alone,) = load_users(config(design=design), 3, None), load_users(config(design=design), 3, ["u7"])
    for field in ("features", "target", "test_features", "test_target"):
        assert getattr(alone, field).tobytes() == getattr(everyone[7], field).tobytes(), field
    names = [user.name for user in everyone]
    assert truth(config(), 3, ["u7", "u0"]).tobytes() == truth(config(), 3, names)[[7, 0]].tobytes()
    assert (load_users(config(), 4, ["u7"])[0].target != alone.target).all()


def test_fewer_rows_are_the_first_of_more_about_the_same_truth():
    (few,), (many,) = load_users(config(), 0, ["u2"]), load_users(config(rows_per_user=50), 0, ["u2"])
    np.testing.assert_array_equal(many.features[:6], few.features)
    np.testing.assert_array_equal(many.target[:6], few.target)
    np.testing.assert_array_equal(truth(config(), 0, ["u2"]), truth(config(rows_per_user=50), 0, ["u2"]))


def test_targets_are_linear_in_the_truth_with_noise_of_the_given_size():
    theta = truth(config(), 0, ["u5"])[0]
    (exact,) = load_users(config(sigma_noise=0), 0, ["u5"])
    np.testing.assert_allclose(exact.target, exact.features @ theta, rtol=1e-12)
    np.testing.assert_allclose(exact.test_target, exact.test_features @ theta, rtol=1e-12)
    (noisy,) = load_users(config(sigma_noise=3, rows_per_user=4000), 0, ["u5"])
    assert (noisy.target - noisy.features @ theta).std() == pytest.approx(3, rel=0.05)


def test_the_truth_lies_around_its_cluster_and_clusters_around_the_centre():
    """(5.1): bar_j = bar + N(0, sigma_bar^2), theta_i = bar_j + N(0, sigma_j^2)."""
    sizes = {"clusters": 40, "users_per_cluster": 40, "d": 4, "rows_per_user": 1, "test_per_user": 0}
    wide = config(**sizes, sigma_cluster=3, sigma_user=0.5, sigma_global=50)
    theta = truth(wide, 0, [f"u{number}" for number in range(1600)]).reshape(40, 40, 4)
    centres = theta.mean(axis=1)
    assert np.std(theta - centres[:, None], ddof=0) == pytest.approx(0.5, rel=0.05)
    assert np.std(centres - centres.mean(axis=0)) == pytest.approx(3, rel=0.15)
    assert np.abs(centres.mean(axis=0)).max() > 15
    same = truth(config(sigma_cluster=0, sigma_user=0), 0, ["u0", "u11"])
    np.testing.assert_array_equal(same, np.zeros((2, 5)))


def test_an_orthogonal_design_has_m_times_the_identity_for_xx():
    for user in load_users(config(design="orthogonal", rows_per_user=9), 0, None):
        np.testing.assert_allclose(user.features.T @ user.features, 9 * np.eye(5), atol=1e-12)


def test_normal_numbers_have_the_moments_of_the_normal_distribution():
    x = normal(stream(0, "test"), 200_000)
    assert x.shape == (200_000,)
    moments = [(x**power).mean() for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.04)
    assert np.corrcoef(x[::2], x[1::2])[0, 1] == pytest.approx(0, abs=0.01)
    np.testing.assert_array_equal(normal(stream(0, "test"), 7), x[:7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"design": "orthogonal", "rows_per_user": 4}, "rows_per_user is 4, want at least d, which is 5"),
        ({"clusters": 2000, "users_per_cluster": 1000}, "is 2000000 users, want at most 1000000"),
        ({"rows_per_user": 1_000_000}, "the users' rows are 72000144 numbers together, want at most 30000000"),
    ],
)
def test_what_does_not_fit_is_told(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_an_unknown_user_is_told():
    with pytest.raises(ConfigError, match="user 'u99' is not in the data"):
        truth(config(), 0, ["u0", "u99"])
