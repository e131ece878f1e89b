"""Variance components and conditional covariances from sufficient statistics, against those from the covariance of all rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import block_diag

from coterie_server.maths import hlm
from coterie_server.maths.covariance import is_definite, sandwich
from coterie_server.maths.variance_components import Statistics, conditional, error_variance, estimated

K, PER, D = 5, 4, 2
CLUSTER_OF = np.repeat(np.arange(K), PER)


def rows(cluster: float, user: float, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Users of 3 to 7 rows, with effects of these standard deviations."""
    random = np.random.default_rng(seed)
    of_cluster, of_user = cluster * random.normal(size=(K, D)), user * random.normal(size=(K * PER, D))
    features = [np.column_stack([random.normal(size=3 + i % 5), -np.ones(3 + i % 5)]) for i in range(K * PER)]
    models = np.array([1.0, 2.0]) + of_cluster[CLUSTER_OF] + of_user
    return features, [x @ model + 0.3 * random.normal(size=len(x)) for x, model in zip(features, models, strict=True)]


def told(features: list[np.ndarray], targets: list[np.ndarray]) -> Statistics:
    pairs = list(zip(features, targets, strict=True))
    squares = np.array([y @ y for y in targets])
    sizes = np.array([len(y) for y in targets])
    return Statistics(np.stack([x.T @ x for x in features]), np.stack([x.T @ y for x, y in pairs]), squares, sizes, CLUSTER_OF)


def effects(features: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The designs of beta, the clusters' and the users' effects."""
    of_clusters = [np.vstack([features[i] for i in np.flatnonzero(j == CLUSTER_OF)]) for j in range(K)]
    return np.vstack(features), block_diag(*of_clusters), block_diag(*features)


def criterion(features: list[np.ndarray], targets: list[np.ndarray], variances: tuple[float, float, float], restricted: bool) -> float:
    """Minus twice the log-likelihood, by the covariance of all rows."""
    (x, clusters, users), y = effects(features), np.concatenate(targets)
    v = variances[0] * clusters @ clusters.T + variances[1] * users @ users.T + variances[2] * np.eye(len(y))
    inverse = np.linalg.inv(v)
    information = x.T @ inverse @ x
    rest = y - x @ np.linalg.solve(information, x.T @ inverse @ y)
    value = np.linalg.slogdet(v)[1] + rest @ inverse @ rest + (len(y) - D * restricted) * np.log(2 * np.pi)
    return float(value + (np.linalg.slogdet(information)[1] if restricted else 0.0))


@pytest.mark.parametrize("restricted", [True, False])
def test_the_estimates_minimise_the_criterion_of_the_whole_covariance(restricted: bool) -> None:
    features, targets = rows(0.7, 0.5)
    found = estimated(told(features, targets), restricted=restricted)
    best = (found.cluster, found.user, found.error)
    assert found.criterion == pytest.approx(criterion(features, targets, best, restricted), rel=1e-10)
    for place in range(3):
        for factor in (0.97, 1.03):
            other = tuple(value * (factor if place == number else 1.0) for number, value in enumerate(best))
            assert criterion(features, targets, other, restricted) > found.criterion


@pytest.mark.parametrize(("cluster", "user"), [(0.0, 0.5), (0.7, 0.0), (0.0, 0.0)])
def test_a_variance_that_the_data_does_not_show_is_zero_and_not_small(cluster: float, user: float) -> None:
    found = [estimated(told(*rows(cluster, user, seed))) for seed in range(4)]
    for true, name in ((cluster, "cluster"), (user, "user")):
        zeros = [getattr(one, name) == 0.0 for one in found]
        assert not any(zeros) if true else any(zeros)
        assert all(getattr(one, name) >= 0.0 for one in found)


def test_conditional_means_and_covariances_are_those_of_the_mixed_model_equations() -> None:
    features, targets = rows(0.7, 0.5)
    gamma, lam, variance, ridge = 0.4, 0.2, 0.09, np.array([0.3, 0.0])
    n = len(features)
    found = conditional(told(features, targets), np.full(n, gamma), np.full(K, lam), variance, ridge)
    (x, clusters, users), y = effects(features), np.concatenate(targets)
    design = np.hstack([x, clusters, users])
    places = [np.zeros((D, design.shape[1])) for _ in range(n)]  # of beta + b_cluster + b_user
    for i, place in enumerate(places):
        for start in (0, D * (1 + CLUSTER_OF[i]), D * (1 + K + i)):
            place[:, start : start + D] = np.eye(D)
    penalty = np.diag(np.repeat([0.0, lam, gamma], [D, K * D, n * D]))
    system = design.T @ design + penalty + sum(place.T @ np.diag(ridge) @ place for place in places)
    inverse, solution = np.linalg.inv(system), np.linalg.solve(system, design.T @ y)
    np.testing.assert_allclose(found.common, solution[:D], rtol=1e-9)
    np.testing.assert_allclose(found.common_covariance, variance * inverse[:D, :D], rtol=1e-9)
    for i, place in enumerate(places):
        np.testing.assert_allclose(found.users[i], place @ solution, rtol=1e-9)
        np.testing.assert_allclose(found.user_covariances[i], variance * place @ inverse @ place.T, rtol=1e-8, atol=1e-14)
    for j in range(K):
        place = np.where(np.arange(design.shape[1]) >= D * (1 + K), 0.0, places[PER * j])
        np.testing.assert_allclose(found.clusters[j], place @ solution, rtol=1e-9)
        np.testing.assert_allclose(found.cluster_covariances[j], variance * place @ inverse @ place.T, rtol=1e-8, atol=1e-14)


def test_the_conditional_means_are_the_minimiser_that_hlm_exact_sends() -> None:
    features, targets = rows(0.7, 0.5)
    gamma, lam = np.linspace(0.3, 2.0, K * PER), np.array([1.0, 2.0, 0.5, np.inf, 4.0])
    found = conditional(told(features, targets), gamma, lam, 1.0, np.zeros(D))
    wanted = hlm.known_clusters(hlm.quadratics(features, targets), CLUSTER_OF, gamma, lam)
    np.testing.assert_allclose(found.users, wanted.theta, rtol=1e-9)
    np.testing.assert_allclose(found.clusters, wanted.w, rtol=1e-9)
    np.testing.assert_allclose(found.common, wanted.wbar, rtol=1e-9)


def test_the_error_variance_at_the_estimated_ratios_is_the_estimated_one() -> None:
    statistics = told(*rows(0.7, 0.5))
    found = estimated(statistics)
    gamma, lam = np.full(K * PER, found.error / found.user), np.full(K, found.error / found.cluster)
    assert error_variance(statistics, gamma, lam) == pytest.approx(found.error, rel=1e-9)


def test_collinear_features_have_no_components_and_no_covariance() -> None:
    features, targets = rows(0.7, 0.5)
    statistics = told([np.column_stack([x[:, 1], x[:, 1]]) for x in features], targets)
    assert np.isnan(estimated(statistics).error)
    assert np.isnan(conditional(statistics, np.ones(K * PER), np.ones(K), 1.0, np.zeros(D)).common).all()
    assert np.isnan(sandwich(statistics.gram, statistics.gram, np.ones(K * PER), np.zeros(D))).all()


def test_definiteness_does_not_depend_on_units() -> None:
    matrix, units = np.array([[2.0, 1.0], [1.0, 2.0]]), np.diag([1e-9, 1e9])
    assert is_definite(units @ matrix @ units)
    assert not is_definite(units @ np.ones((2, 2)) @ units)
    assert not is_definite(np.diag([1.0, 0.0]))


def test_the_sandwich_of_weighted_users_by_hand() -> None:
    """One coefficient: (sum omega^2 G) / (sum omega H + c)^2."""
    hessians, outers = np.array([[[2.0]], [[6.0]]]), np.array([[[1.0]], [[3.0]]])
    found = sandwich(hessians, outers, np.array([0.5, 1.0]), np.array([3.0]), 2.0)
    np.testing.assert_allclose(found, 2.0 * (0.25 * 1 + 3) / (1 + 6 + 3) ** 2)
