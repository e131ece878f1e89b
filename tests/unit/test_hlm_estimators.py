"""The estimators of `coterie_server.maths.hlm` as arrays in and out. What the paper claims of them is in tests/papers/test_hlm.py."""

from __future__ import annotations

import numpy as np
import pytest

from coterie_server.maths import hlm

CLUSTER_OF = np.array([0, 0, 0, 1, 1, 2, 2, 2])


def users(n_rows=6, d=4, n=8):
    random = np.random.default_rng(n_rows)
    features = [random.normal(size=(n_rows, d)) for _ in range(n)]
    return features, [random.normal(size=n_rows) for _ in range(n)]


def gradient(quadratics, theta, gamma, alpha):
    """Of (2.1), whose averages bar_j and bar are themselves minimal."""
    sums = np.bincount(CLUSTER_OF, gamma)
    centres = np.stack([np.bincount(CLUSTER_OF, gamma * column) for column in theta.T], axis=1) / sums[:, None]
    shares = alpha[CLUSTER_OF]
    total = (shares * gamma).sum()
    centre = (shares * gamma) @ theta / total if total else 0 * theta[0]
    pull = gamma[:, None] * ((1 - shares)[:, None] * (theta - centres[CLUSTER_OF]) + shares[:, None] * (theta - centre))
    return np.einsum("nij,nj->ni", quadratics.curvature, theta) - quadratics.slope + pull


@pytest.mark.parametrize("n_rows", [1, 2, 6])
@pytest.mark.parametrize("alpha", [(0.4, 0.3, 0.9), (0.0, 0.3, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
def test_the_gradient_of_21_vanishes_at_the_minimiser(alpha, n_rows):
    """Also with fewer rows than d, where X'X is singular."""
    quadratics, gamma, alpha = hlm.quadratics(*users(n_rows)), np.linspace(0.3, 2, 8), np.array(alpha)
    lam = hlm.lambda_of(alpha, np.bincount(CLUSTER_OF, gamma))
    theta = hlm.known_clusters(quadratics, CLUSTER_OF, gamma, lam).theta
    np.testing.assert_allclose(gradient(quadratics, theta, gamma, alpha), 0, atol=1e-11)


def test_w_and_wbar_are_the_means_that_23_asks_for():
    gamma, lam = np.linspace(0.3, 2, 8), np.array([1.0, 2.0, 0.5])
    found = hlm.known_clusters(hlm.quadratics(*users()), CLUSTER_OF, gamma, lam)
    np.testing.assert_allclose(found.wbar, lam @ found.w / lam.sum(), rtol=1e-11)
    for j in range(3):
        own = j == CLUSTER_OF
        wanted = (lam[j] * found.wbar + gamma[own] @ found.theta[own]) / (lam[j] + gamma[own].sum())
        np.testing.assert_allclose(found.w[j], wanted, rtol=1e-11)


def test_a_user_without_gamma_is_on_its_own_with_the_model_of_least_norm():
    quadratics, gamma = hlm.quadratics(*users(n_rows=2)), np.ones(8)
    gamma[[2, 6]] = 0.0
    theta = hlm.known_clusters(quadratics, CLUSTER_OF, gamma, np.ones(3)).theta
    np.testing.assert_allclose(theta[[2, 6]], hlm.local(quadratics)[[2, 6]], rtol=1e-12)
    rest = np.flatnonzero(gamma)
    without = hlm.Quadratics(quadratics.curvature[rest], quadratics.slope[rest])
    np.testing.assert_allclose(theta[rest], hlm.known_clusters(without, CLUSTER_OF[rest], gamma[rest], np.ones(3)).theta, rtol=1e-11)


def test_one_cluster_is_all_clusters_with_alpha_1():
    quadratics = hlm.quadratics(*users(n_rows=3))
    tied = hlm.known_clusters(quadratics, CLUSTER_OF, np.full(8, 0.7), np.full(3, np.inf)).theta
    np.testing.assert_allclose(hlm.single_cluster(quadratics, 0.7), tied, rtol=1e-11)
    alone = hlm.known_clusters(quadratics, np.zeros(8, dtype=np.int64), np.full(8, 0.7), np.zeros(1)).theta
    np.testing.assert_allclose(hlm.single_cluster(quadratics, 0.7), alone, rtol=1e-11)


def test_the_single_cluster_is_the_closed_form_of_section_61():
    """theta^sc = (I - lambda/n sum (X_i'X_i + lambda I)^-1)^-1 (1/n sum (X_i'X_i + lambda I)^-1 X_i'X_i theta_i^lt), as printed."""
    features, targets = users(n_rows=3)
    quadratics, lam, n, d = hlm.quadratics(features, targets), 0.8, 8, 4
    inverses = [np.linalg.inv(x.T @ x + lam * np.eye(d)) for x in features]
    fits = [inverse @ x.T @ y for inverse, x, y in zip(inverses, features, targets, strict=True)]
    centre = np.linalg.solve(np.eye(d) - lam / n * sum(inverses), sum(fits) / n)
    wanted = [fit + lam * inverse @ centre for fit, inverse in zip(fits, inverses, strict=True)]
    np.testing.assert_allclose(hlm.single_cluster(quadratics, lam), wanted, rtol=1e-10)


@pytest.mark.parametrize("n_rows", [2, 3, 9])
def test_local_and_single_models_are_least_squares_of_least_norm(n_rows):
    features, targets = users(n_rows, d=4)
    quadratics = hlm.quadratics(features, targets)
    wanted = [np.linalg.lstsq(x, y)[0] for x, y in zip(features, targets, strict=True)]
    np.testing.assert_allclose(hlm.local(quadratics), wanted, rtol=1e-9, atol=1e-11)
    pooled = np.linalg.lstsq(np.concatenate(features), np.concatenate(targets))[0]
    np.testing.assert_allclose(hlm.single_model(quadratics), pooled, rtol=1e-9)


def test_a_large_gamma_gives_the_single_model_and_a_small_one_the_local_models():
    quadratics = hlm.quadratics(*users(n_rows=9))
    np.testing.assert_allclose(hlm.single_cluster(quadratics, 1e9), np.tile(hlm.single_model(quadratics), (8, 1)), atol=1e-6)
    np.testing.assert_allclose(hlm.single_cluster(quadratics, 1e-9), hlm.local(quadratics), atol=1e-6)


def test_lambda_is_what_gives_alpha_back():
    alpha, sums = np.array([0.0, 0.25, 1.0, 1.0]), np.array([2.0, 3.0, 4.0, 0.0])
    lam = hlm.lambda_of(alpha, sums)
    np.testing.assert_array_equal(lam, [0.0, 1.0, np.inf, np.inf])


def test_cross_validation_takes_the_penalty_that_fits_rows_left_out():
    """By hand, one fit for each fold and penalty; users with a single row are left out whole."""
    features, targets = users(n_rows=4, d=2)
    targets = [y + x @ np.array([1.0, -1.0]) + x[:, 0] * (i % 3 - 1) for i, (x, y) in enumerate(zip(features, targets, strict=True))]
    features, targets = [*features, features[0][:1]], [*targets, targets[0][:1]]
    penalties, errors = np.geomspace(0.01, 100, 40), []
    for penalty in penalties:
        error = 0.0
        for fold in range(3):
            kept = [[r for r in range(len(x)) if (r + i) % 3 != fold] for i, x in enumerate(features)]
            rows = [x[k] for x, k in zip(features, kept, strict=True)]
            models = hlm.single_cluster(hlm.quadratics(rows, [y[k] for y, k in zip(targets, kept, strict=True)]), penalty)
            for x, y, k, model in zip(features, targets, kept, models, strict=True):
                out = [r for r in range(len(x)) if r not in k]
                error += np.square(y[out] - x[out] @ model).sum()
        errors.append(error)
    best = int(np.argmin(errors))
    assert 0 < best < 39  # the test would tell little at an end of the grid
    assert hlm.cross_validated(features, targets, penalties, 3) == penalties[best]
