"""The Poisson loss: a generalised linear model of counts with its canonical link."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from coterie.errors import ConfigError
from coterie.problem import ProblemConfig
from coterie_client.problems import build_problem
from coterie_client.problems.convex import ConvexProblem
from coterie_client.problems.losses import Poisson


def counts(n_users: int = 3, m: int = 30) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draws = np.random.default_rng(5)
    features = [draws.normal(size=(m, 2)) for _ in range(n_users)]
    return features, [draws.poisson(np.exp(x @ [0.5, -0.3] + 0.7)).astype(float) for x in features]


def problem(**config: object) -> ConvexProblem:
    features, targets = counts()
    return build_problem(ProblemConfig.model_validate({"loss": "poisson", **config}), ["a", "b", "c"], features, targets)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_minimiser_is_that_of_scipy(reduction: str) -> None:
    one, (features, targets) = problem(reduction=reduction, l2=0.1), counts()
    found = one.argmin(np.zeros((3, 3)), 0.0)
    for user in range(3):
        rows = np.column_stack([features[user], -np.ones(30)])

        def objective(x: np.ndarray, rows: np.ndarray = rows, y: np.ndarray = targets[user]) -> float:
            fit = np.exp(rows @ x) - y * (rows @ x)
            return float((fit.mean() if reduction == "mean" else fit.sum()) + 0.05 * x[:2] @ x[:2])

        best = minimize(objective, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
        np.testing.assert_allclose(found[user], best, rtol=0, atol=1e-6)
    assert np.abs(one.gradient(found)).max() < 1e-9


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


def test_predictions_are_means_and_are_judged_by_squared_error() -> None:
    one = problem(l2=0.1)
    x = np.array([0.5, -0.3, -0.7])
    np.testing.assert_allclose(one.predict(x, np.array([[1.0, 1.0]])), [np.exp(0.5 - 0.3 + 0.7)])
    assert one.smoothness().min() > 0


@pytest.mark.parametrize("wrong", [-1.0, 0.5])
def test_targets_must_be_counts(wrong: float) -> None:
    with pytest.raises(ConfigError, match=rf"user 'a' has the count {wrong:g}, targets of loss 'poisson' must be 0, 1, 2"):
        build_problem(ProblemConfig(loss="poisson"), ["a"], [np.ones((2, 1))], [np.array([1.0, wrong])])


def test_a_user_whose_counts_are_all_0_has_no_minimiser() -> None:
    one = build_problem(ProblemConfig(loss="poisson", l2=1.0), ["a"], [np.ones((3, 1))], [np.zeros(3)])
    with pytest.raises(ConfigError, match="all its counts are 0 and the intercept is not penalised"):
        one.check()
