"""The Poisson loss: a generalised linear model of counts with its canonical link."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog, minimize
from scipy.stats import poisson

from coterie.errors import ConfigError
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems import build_problem
from coterie_client.problems.convex import ConvexProblem
from coterie_client.problems.losses import Poisson


def counts(n_users: int = 3, m: int = 30) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draws = np.random.default_rng(5)
    features = [draws.normal(size=(m, 2)) for _ in range(n_users)]
    return features, [draws.poisson(np.exp(x @ [0.5, -0.3] + 0.7)).astype(float) for x in features]


def problem(**config: object) -> ConvexProblem:
    return build_problem(ProblemConfig.model_validate({"loss": "poisson", **config}), ["a", "b", "c"], *counts())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("log_mean_limit", [5.0, 50.0])
def test_the_minimiser_is_that_of_scipy(reduction: str, log_mean_limit: float) -> None:
    one, (features, targets) = problem(reduction=reduction, l2=0.1, log_mean_limit=log_mean_limit), counts()
    found = one.argmin(np.zeros((3, 3)), 0.0)
    for user in range(3):
        rows = np.column_stack([features[user], -np.ones(30)])

        def objective(x: np.ndarray, rows: np.ndarray = rows, y: np.ndarray = targets[user]) -> float:
            fit = np.exp(rows @ x) - y * (rows @ x)
            return float((fit.mean() if reduction == "mean" else fit.sum()) + 0.05 * x[:2] @ x[:2])

        best = minimize(objective, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
        np.testing.assert_allclose(found[user], best, rtol=0, atol=1e-6)
    assert np.abs(one.gradient(found)).max() < 1e-10


@pytest.mark.parametrize("log_mean_limit", [5.0, 20.0, 50.0])
def test_a_start_where_exp_overflows_leads_to_the_same_minimiser(log_mean_limit: float) -> None:
    one = problem(l2=0.01, log_mean_limit=log_mean_limit)
    near = one.argmin(np.zeros((3, 3)), 0.0)
    far = one.argmin(np.zeros((3, 3)), 0.0, np.array([[1e3, 0.0, 0.0], [0.0, -1e4, 0.0], [0.0, 0.0, -800.0]]))
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-9)


def test_beyond_the_limit_the_exponential_goes_on_as_its_parabola() -> None:
    loss, y = Poisson(2.0), np.full(5, 3.0)
    below, above = np.linspace(-3.0, 2.0, 5), np.linspace(2.0, 60.0, 5)
    np.testing.assert_allclose(loss.value(below, y), np.exp(below) - 3.0 * below, rtol=1e-14)
    u = above - 2.0
    np.testing.assert_allclose(loss.value(above, y), np.exp(2.0) * (1 + u + u**2 / 2) - 3.0 * above, rtol=1e-13)
    assert loss.curvature(above, y).max() == pytest.approx(loss.curvature_bound)
    step = 1e-6
    for s in (below, above):
        slope = (loss.value(s + step, y) - loss.value(s - step, y)) / (2 * step)
        np.testing.assert_allclose(loss.slope(s, y), slope, rtol=1e-5, atol=1e-5)
        curvature = (loss.slope(s + step, y) - loss.slope(s - step, y)) / (2 * step)
        np.testing.assert_allclose(loss.curvature(s, y), curvature, rtol=1e-4)


def test_the_smoothness_is_that_of_rows_at_the_limit() -> None:
    one, (features, _) = problem(intercept=False, l2=0.1, log_mean_limit=3.0), counts()
    squares = [(x**2).sum(axis=1).max() for x in features]
    np.testing.assert_allclose(one.row_smoothness(), math.exp(3.0) * np.array(squares) + 0.1, rtol=1e-13)
    grams = [np.linalg.eigvalsh(math.exp(3.0) * x.T @ x / 30)[-1] + 0.1 for x in features]
    np.testing.assert_allclose(one.smoothness(), grams, rtol=1e-12)


def test_predictions_are_means_and_stay_finite() -> None:
    one = problem(l2=0.1)
    x = np.array([0.5, -0.3, -0.7])
    np.testing.assert_allclose(one.predict(x, np.array([[1.0, 1.0]])), [np.exp(0.5 - 0.3 + 0.7)])
    assert np.isfinite(one.predict(np.array([900.0, 0.0, 0.0]), np.array([[1.0, 1.0]]))).all()


def test_the_metric_is_the_mean_deviance() -> None:
    one, (features, targets) = problem(l2=0.1), counts()
    x = one.argmin(np.zeros((3, 3)), 0.0)
    _, metric = one.evaluate(x, features, targets)
    for user in range(3):
        means = one.predict(x[user], features[user])
        lost = poisson.logpmf(targets[user], targets[user]) - poisson.logpmf(targets[user], means)
        assert metric[user] == pytest.approx(2 * lost.mean(), rel=1e-12)
    _, perfect = one.evaluate(np.tile([0.0, 0.0, -math.log(7.0)], (3, 1)), features, [np.full(30, 7.0)] * 3)
    np.testing.assert_allclose(perfect, 0.0, atol=1e-14)
    loss, far = one.evaluate(np.full((3, 3), -1e3), features, targets)  # where exp would overflow
    assert np.isfinite(far).all()
    assert np.isfinite(loss).all()


@pytest.mark.parametrize("wrong", [-1.0, 0.5])
def test_targets_must_be_counts(wrong: float) -> None:
    with pytest.raises(ConfigError, match=rf"user 'a' has the count {wrong:g} in row 1, targets of loss 'poisson' must be 0, 1, 2"):
        build_problem(ProblemConfig(loss="poisson"), ["a"], [np.ones((2, 1))], [np.array([1.0, wrong])])


def test_counts_to_be_fitted_are_within_the_limit_and_counts_to_be_judged_need_not_be() -> None:
    rows, high = np.ones((3, 1)), np.array([1.0, 149.0, 400.0])
    with pytest.raises(
        ConfigError, match=r"user 'b' has the count 149 in row 1, above exp\(log_mean_limit\) = 148.4: wanted a log_mean_limit of 5.991 or"
    ):
        build_problem(ProblemConfig(loss="poisson"), ["a", "b"], [rows, rows], [np.ones(3), high])
    build_problem(ProblemConfig(loss="poisson", log_mean_limit=6.0), ["a"], [rows], [high])
    one = build_problem(ProblemConfig(loss="poisson", intercept=False), ["a"], [rows], [np.ones(3)])
    loss, _ = one.evaluate(np.zeros((1, 1)), [rows], [high])
    assert loss[0] == 1.0  # exp(0) - y 0


def test_a_user_whose_counts_are_all_0_has_no_minimiser() -> None:
    one = build_problem(ProblemConfig(loss="poisson", l2=1.0), ["a"], [np.ones((3, 1))], [np.zeros(3)])
    with pytest.raises(ConfigError, match="all its counts are 0 and the intercept is not penalised"):
        one.check()
    build_problem(ProblemConfig(loss="poisson", l2=1.0, intercept=False), ["a"], [np.ones((3, 1))], [np.zeros(3)]).check()


def test_whether_sparse_counts_have_a_minimiser_is_decided_as_a_linear_program_decides_it() -> None:
    draws = np.random.default_rng(0)
    features = [draws.normal(size=(m, 2)) for m in draws.integers(3, 12, 150)]
    targets = [np.where(draws.random(len(x)) < 0.2, 1.0, 0.0) for x in features]
    names = [f"u{i}" for i in range(len(features))]
    found = [reason is None for reason in build_problem(ProblemConfig(loss="poisson"), names, features, targets).coercive()]
    nearly_flat = 0
    for is_coercive, x, y in zip(found, features, targets, strict=True):
        a = np.hstack([x, -np.ones((len(x), 1))])
        # Some v in a box has a.v = 0 where the count is positive and a.v <= 0 where it is 0, not all of them 0, or A is flat.
        fixed = a[y > 0] if y.any() else None
        lowering = linprog(
            a[y == 0].sum(axis=0), a[y == 0], np.zeros((y == 0).sum()), fixed, None if fixed is None else y[y > 0] * 0, (-1, 1)
        )
        has_minimiser = lowering.fun > -1e-9 and np.linalg.matrix_rank(a) == 3
        assert has_minimiser or not is_coercive
        nearly_flat += has_minimiser and not is_coercive
    assert nearly_flat <= 1  # a minimiser with a mean of exp(-90), which the certificate cannot tell from 0
    assert 30 < sum(found) < len(found) - 30
    one = build_problem(ProblemConfig(loss="poisson"), names, features, targets)
    good = np.flatnonzero(found)
    x = one.argmin(np.zeros((len(good), 3)), 0.0, users=good)
    assert np.abs(one.gradient(x, good)).max() < 1e-9
    with pytest.raises(ConfigError, match="some direction lowers means of its counts of 0 and moves no other mean"):
        build_problem(ProblemConfig(loss="poisson", intercept=False), ["a"], [np.eye(2)], [np.array([1.0, 0.0])]).check()
