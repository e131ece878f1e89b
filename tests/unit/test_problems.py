"""The convex losses: derivatives, constants, minimisers, scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from coterie.errors import ConfigError
from coterie.experiment.problem import DISTANCE_LOSSES, MARGIN_LOSSES, ProblemConfig
from coterie_client.problems import build_problem

LOSSES = (*MARGIN_LOSSES, *DISTANCE_LOSSES)
CLASSIFIERS = ("squared_hinge", "logistic")
FIXTURES = Path(__file__).parents[1] / "fixtures"


def _rows(rng, counts, p, loss):
    features = [1.5 * rng.normal(size=(m, p)) for m in counts]
    if loss in CLASSIFIERS:
        return features, [np.where(rng.random(m) < 0.5, 1.0, -1.0) for m in counts]
    if loss == "poisson":
        return features, [1.0 + rng.poisson(1.0, m) for m in counts]
    return features, [2.0 * rng.normal(size=m) for m in counts]


def _problem(loss, counts=(1, 3, 8, 9, 20, 40), p=3, seed=0, **config):
    features, targets = _rows(np.random.default_rng(seed), counts, p, loss)
    return build_problem(ProblemConfig(loss=loss, **config), [f"u{i}" for i in range(len(counts))], features, targets), features, targets


def _one_by_one(loss, x, a, y, c, delta, mean, intercept):
    """f_i as the documentation writes it, with a loop over rows."""
    if loss in DISTANCE_LOSSES:
        distances = [float(np.sqrt(((x - row) ** 2).sum())) for row in a]
        kinds = {"squared_distance": lambda t: t * t / 2, "huber_distance": lambda t: _huber(t, delta)}
        costs, w = [kinds[loss](t) for t in distances], x
    else:
        w, b = (x[:-1], x[-1]) if intercept else (x, 0.0)
        phi = {
            "squared_hinge": lambda s, t: max(0.0, 1 - t * s) ** 2,
            "logistic": lambda s, t: np.log(1 + np.exp(-t * s)),
            "least_squares": lambda s, t: (s - t) ** 2 / 2,
            "huber": lambda s, t: _huber(abs(s - t), delta),
            "poisson": _poisson,
        }[loss]
        costs = [phi(float(row @ w) - b, t) for row, t in zip(a, y, strict=True)]
    return sum(costs) / (len(costs) if mean else 1) + c / 2 * float(w @ w)


def _poisson(s, t, limit=5.0):
    beyond = max(s - limit, 0.0)
    return np.exp(min(s, limit)) * (1 + beyond + beyond**2 / 2) - t * s


def _huber(t, delta):
    return t * t / 2 if t <= delta else delta * (t - delta / 2)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("reduction", "intercept"), [("mean", True), ("sum", False)])
def test_the_value_is_the_formula_of_the_configuration(loss, reduction, intercept):
    problem, features, targets = _problem(loss, l2=0.3, huber_delta=0.7, reduction=reduction, intercept=intercept)
    x = np.random.default_rng(1).normal(size=(problem.n_users, problem.d))
    expected = [_one_by_one(loss, x[i], features[i], targets[i], 0.3, 0.7, reduction == "mean", intercept) for i in range(problem.n_users)]
    np.testing.assert_allclose(problem.value(x), expected, rtol=1e-13)
    assert problem.n_rows.tolist() == [1, 3, 8, 9, 20, 40]
    assert problem.d == 3 + (intercept and loss in MARGIN_LOSSES)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_and_hessian_agree_with_central_differences(loss, reduction):
    problem, _, _ = _problem(loss, l2=0.2, huber_delta=1.3, reduction=reduction)
    x = np.random.default_rng(2).normal(size=(problem.n_users, problem.d))
    gradient, hessian = problem.gradient(x), problem.hessian(x)
    for j in range(problem.d):
        e = 1e-6 * np.eye(problem.d)[j]
        slope = (problem.value(x + e) - problem.value(x - e)) / 2e-6
        np.testing.assert_allclose(gradient[:, j], slope, rtol=1e-6, atol=1e-6)
        # Away from the kinks of the slope, where these seeded points are.
        change = (problem.gradient(x + e) - problem.gradient(x - e)) / 2e-6
        np.testing.assert_allclose(hessian[:, :, j], change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_smoothness_bounds_every_hessian_and_is_attained(loss):
    problem, _, _ = _problem(loss, l2=0.1, huber_delta=1e6 if "huber" in loss else 1.0)
    rng = np.random.default_rng(3)
    bound, floor = problem.smoothness(), problem.strong_convexity()
    for scale in (0.0, 0.1, 1.0, 10.0):
        spectrum = np.linalg.eigvalsh(problem.hessian(scale * rng.normal(size=(problem.n_users, problem.d))))
        assert (spectrum[:, -1] <= bound * (1 + 1e-12)).all()
        assert (spectrum[:, 0] >= floor - 1e-12 * bound).all()
    # At x = 0 each margin is 0: the hinge is active and the logistic loss at its most curved; delta is out of reach. An intercept that
    # lifts all log means above the limit is where the Poisson loss is at its most curved.
    most = np.zeros((problem.n_users, problem.d))
    most[:, -1] = -6.0 if loss == "poisson" else 0.0
    np.testing.assert_allclose(np.linalg.eigvalsh(problem.hessian(most))[:, -1], bound, rtol=1e-12)


def test_strong_convexity_is_zero_unless_something_curves_every_direction():
    assert (_problem("logistic", l2=0.5)[0].strong_convexity() == 0.0).all()  # the intercept is free
    assert (_problem("logistic", l2=0.5, intercept=False)[0].strong_convexity() == 0.5).all()
    least_squares = _problem("least_squares")[0].strong_convexity()
    assert (least_squares[:2] == 0.0).all()  # 1 and 3 rows in 4 dimensions
    assert (least_squares[2:] > 0.0).all()
    assert (_problem("squared_distance", reduction="sum")[0].strong_convexity() == [1, 3, 8, 9, 20, 40]).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ridge", [30.0, 0.5, 1e-3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_minimiser_meets_the_first_order_condition(loss, ridge, reduction):
    problem, _, _ = _problem(loss, l2=1e-3, reduction=reduction)
    rng = np.random.default_rng(4)
    tilt, start = rng.normal(size=(2, problem.n_users, problem.d))
    x = problem.argmin(tilt, ridge, start)
    residual = np.linalg.norm(problem.gradient(x) + ridge * x - tilt, axis=1)
    # The stated tolerance, with its rounding part: 64 eps ((L + ridge) |x| + ...) matters where |x| is large.
    scale = (problem.smoothness() * problem.d + ridge) * (1 + np.linalg.norm(x, axis=1))
    rounding = 200 * np.finfo(float).eps * (scale + np.linalg.norm(tilt, axis=1))
    assert (residual <= 1e-12 * (1 + np.linalg.norm(tilt, axis=1)) + rounding).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ridge", [2.0, 0.01])
def test_the_minimiser_is_that_of_scipy(loss, ridge):
    problem, features, targets = _problem(loss, l2=0.05)
    tilt = np.random.default_rng(5).normal(size=(problem.n_users, problem.d))
    x = problem.argmin(tilt, ridge)
    for i in range(problem.n_users):

        def objective(z, i=i):
            f = _one_by_one(loss, z, features[i], targets[i], 0.05, 1.0, True, True)
            return f + ridge / 2 * z @ z - tilt[i] @ z

        found = minimize(objective, x[i] + 0.1, method="BFGS", options={"gtol": 1e-8})
        assert objective(x[i]) <= found.fun + 1e-12 * abs(found.fun)
        np.testing.assert_allclose(x[i], found.x, rtol=1e-4, atol=1e-4)


def test_ridges_may_differ_between_users():
    problem, _, _ = _problem("logistic", l2=0.1)
    rng = np.random.default_rng(6)
    tilt, ridge = rng.normal(size=(problem.n_users, problem.d)), rng.uniform(0.1, 5.0, problem.n_users)
    x = problem.argmin(tilt, ridge)
    np.testing.assert_allclose(problem.gradient(x) + ridge[:, None] * x, tilt, atol=1e-11)


@pytest.mark.parametrize("loss", ["squared_hinge", "huber", "logistic", "huber_distance"])
def test_a_far_start_a_steep_tilt_and_a_weak_ridge_still_converge(loss):
    problem, _, _ = _problem(loss, counts=(25,) * 10, p=20, seed=7)
    rng = np.random.default_rng(8)
    tilt, start = rng.normal(size=(problem.n_users, problem.d)), 1e3 * rng.normal(size=(problem.n_users, problem.d))
    x = problem.argmin(tilt, 1e-4, start)
    np.testing.assert_allclose(problem.gradient(x) + 1e-4 * x, tilt, atol=1e-8)


def test_least_squares_without_ridge_is_the_textbook_solution():
    problem, features, targets = _problem("least_squares", counts=(8, 20, 33))
    x = problem.argmin(np.zeros((3, 4)), 0.0)
    for i in range(3):
        design = np.hstack([features[i], -np.ones((len(features[i]), 1))])
        np.testing.assert_allclose(x[i], np.linalg.lstsq(design, targets[i])[0], rtol=1e-10)


@pytest.mark.parametrize(("far", "tolerance"), [(1e3, 1e-12), (1e5, 1e-12), (1e6, 1e-5)])  # at 1e6 the Hessian has no more digits
def test_a_minimiser_is_found_whatever_the_size_of_one_feature(far, tolerance):
    """A patient number beside an intercept: gradients at the level of rounding were taken for a minimum 13 % above it."""
    rng = np.random.default_rng(4)
    number, a = 4.0 * far + far * rng.random(60).round(6), rng.normal(size=60)
    y = 2.0 * a - 3.0 + 0.3 * rng.normal(size=60)
    problem = build_problem(ProblemConfig(loss="least_squares"), ["u"], [np.column_stack([number, a])], [y])
    found = problem.argmin(np.zeros((1, 3)), 0.0)
    centred = np.column_stack([(number - number.mean()) / number.std(), a, np.ones(60)])
    least = 0.5 * np.mean((y - centred @ np.linalg.lstsq(centred, y, rcond=None)[0]) ** 2)
    assert problem.value(found)[0] <= least * (1 + tolerance)


def test_squared_distance_has_the_mean_of_the_points_for_minimiser():
    problem, features, _ = _problem("squared_distance")
    x = problem.argmin(np.zeros((6, 3)), 0.0)
    np.testing.assert_allclose(x, [a.mean(axis=0) for a in features], atol=1e-14)


@pytest.mark.parametrize(("tilt", "ridge", "expected"), [(0.3, 0.0, 2.3), (0.0, 1.0, 1.0), (5.0, 0.5, 8.0)])
def test_huber_distance_to_one_point_by_hand(tilt, ridge, expected):
    problem = build_problem(ProblemConfig(loss="huber_distance"), ["u"], [np.array([[2.0]])], [np.zeros(1)])
    # Within delta of the point: (2 + tilt) / (1 + ridge); beyond it: (tilt - 1) / ridge.
    np.testing.assert_allclose(problem.argmin(np.array([[tilt]]), ridge), [[expected]], rtol=1e-15)


@pytest.mark.parametrize("n", [6, 60])
def test_the_local_optima_of_the_paper_minimise_the_squared_hinge(n):
    data = json.loads((FIXTURES / f"convex_clustering_{n}.json").read_text())
    features, targets = [np.array(a) for a in data["A"]], [np.array(y, dtype=float) for y in data["Y"]]
    config = ProblemConfig(loss="squared_hinge", l2=data["c"])
    problem = build_problem(config, [f"u{i}" for i in range(n)], features, targets)
    problem.check()
    local = problem.argmin(np.zeros((n, problem.d)), 0.0)
    assert problem.value(local).sum() == pytest.approx(data["local"]["sum_f"], rel=1e-9)
    np.testing.assert_allclose(local, data["local"]["x"], atol=1e-4)
    together = np.tile(data["global"]["x"], (n, 1))
    assert problem.value(together).sum() == pytest.approx(data["global"]["sum_f"], rel=1e-9)
    np.testing.assert_allclose(problem.gradient(together).sum(axis=0), 0.0, atol=1e-6)
    # The fixture adds c to the intercept's direction as well, a bound; here it is exact.
    assert data["mean_lip"] - data["c"] <= problem.smoothness().mean() <= data["mean_lip"]
    # Test rows belong to clusters; a user is scored on those of its own.
    test_rows = [np.array(data["test"][k]["A"]) for k in data["label"]]
    test_labels = [np.array(data["test"][k]["Y"], dtype=float) for k in data["label"]]
    _, accuracy = problem.evaluate(local, test_rows, test_labels)
    assert accuracy.mean() == pytest.approx(data["local"]["acc"], abs=1e-12)


def test_a_classifier_is_scored_by_accuracy_and_predicts_labels():
    problem, features, targets = _problem("logistic", l2=0.1)
    x = problem.argmin(np.zeros((6, 4)), 0.5)
    loss, accuracy = problem.evaluate(x, features, targets)
    shrunken = 0.05 * (x[:, :3] ** 2).sum(axis=1)
    np.testing.assert_allclose(loss, problem.value(x) - shrunken, rtol=1e-12)
    for i in range(6):
        labels = problem.predict(x[i], features[i])
        assert set(labels) <= {-1.0, 1.0}
        assert accuracy[i] == (labels == targets[i]).mean()
    assert problem.predict(x[0], np.empty((0, 3))).shape == (0,)
    assert problem.predict(np.zeros(4), np.zeros((2, 3))).tolist() == [1.0, 1.0]  # a tie is a label too


def test_other_losses_are_scored_by_squared_error_and_users_without_rows_by_nan():
    problem, features, targets = _problem("huber")
    x = np.random.default_rng(9).normal(size=(6, 4))
    features[2], targets[2] = np.empty((0, 3)), np.empty(0)
    loss, error = problem.evaluate(x, features, targets)
    assert np.isnan(loss[2])
    assert np.isnan(error[2])
    for i in (0, 1, 3, 4, 5):
        assert error[i] == pytest.approx(((problem.predict(x[i], features[i]) - targets[i]) ** 2).mean(), rel=1e-13)
    points, rows, _ = _problem("squared_distance")
    _, error = points.evaluate(x[:, :3], rows, [])
    assert error[5] == pytest.approx(((rows[5] - x[5, :3]) ** 2).sum(axis=1).mean(), rel=1e-13)
    with pytest.raises(ConfigError, match="no predictions"):
        points.predict(x[0, :3], rows[0])


def test_arguments_are_left_as_they_were():
    problem, _, _ = _problem("squared_hinge", l2=0.1)
    x = np.random.default_rng(10).normal(size=(6, 4))
    x.flags.writeable = False
    problem.hessian(x)
    problem.argmin(x, 0.7, x)
    for reader in (problem.value, problem.gradient):
        reader(x)


@pytest.mark.parametrize("loss", ["poisson", "logistic", "squared_hinge", "least_squares", "huber"])
def test_a_start_too_far_away_for_its_numbers_is_reported_and_not_warned_about(loss):
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(9, 3)), np.where(rng.random(9) < 0.5, 1.0, 0.0 if loss == "poisson" else -1.0)
    problem = build_problem(ProblemConfig(loss=loss, l2=0.1), ["a"], [features], [targets])
    start = np.full((1, problem.d), 1e308)
    problem.look_ahead(start, 1.0)
    for _ in range(2):
        assert np.isnan(problem.argmin(np.zeros((1, problem.d)), 1.0, start, allow_unbounded=True)).all()
        problem.look_ahead(np.zeros((1, problem.d)), 1.0)


@pytest.mark.parametrize("loss", ["least_squares", "logistic"])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("l2", [0.0, 0.3, 50.0])
def test_with_fewer_rows_than_features_the_constants_are_those_of_the_whole_matrix(loss, intercept, l2):
    problem, _, _ = _problem(loss, (1, 3, 8, 9, 20), p=40, l2=l2, intercept=intercept)
    spectra = np.linalg.eigvalsh(problem.hessian(np.zeros((problem.n_users, problem.d))))  # of the logistic loss: where it is most curved
    np.testing.assert_allclose(problem.smoothness(), spectra[:, -1], rtol=1e-12)
    least = spectra[:, 0] if loss == "least_squares" else np.full(5, 0.0 if intercept else l2)
    np.testing.assert_allclose(problem.strong_convexity(), np.maximum(least, 0.0), rtol=1e-9, atol=1e-12)
