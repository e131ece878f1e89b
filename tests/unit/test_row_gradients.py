"""The finite-sum form of a user's loss: gradients and constants of single rows."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.problem import DISTANCE_LOSSES, MARGIN_LOSSES, ProblemConfig
from coterie_client.problems import build_problem
from coterie_client.problems.convex import ConvexProblem

M = (10, 4, 1)


def problem(loss: str, reduction: str, *, intercept: bool, l2: float = 0.3) -> ConvexProblem:
    draws = np.random.default_rng(1)
    features = [draws.normal(size=(m, 3)) for m in M]
    targets = [np.abs(labels) if loss == "poisson" else labels for labels in (np.sign(draws.normal(size=m)) for m in M)]
    config = ProblemConfig.model_validate({"loss": loss, "reduction": reduction, "l2": l2, "intercept": intercept})
    return build_problem(config, ["a", "b", "c"], features, targets)


def alone(one: ConvexProblem, x: np.ndarray, user: int, row: int) -> np.ndarray:
    return one.row_gradient(x[[user]], np.array([row]), np.array([user]))[0]


@pytest.mark.parametrize("loss", [*MARGIN_LOSSES, *DISTANCE_LOSSES])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_mean_over_a_users_rows_is_its_gradient(loss: str, reduction: str, intercept: bool) -> None:
    one = problem(loss, reduction, intercept=intercept)
    x = np.random.default_rng(2).normal(size=(3, one.d))
    means = np.array([np.mean([alone(one, x, user, row) for row in range(M[user])], axis=0) for user in range(3)])
    np.testing.assert_allclose(means, one.gradient(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [*MARGIN_LOSSES, *DISTANCE_LOSSES])
def test_a_users_row_gradient_does_not_depend_on_who_else_is_asked(loss: str) -> None:
    one = problem(loss, "sum", intercept=True)
    x = np.random.default_rng(3).normal(size=(3, one.d))
    rows = np.array([7, 2, 0])
    together = one.row_gradient(x, rows)
    for user in range(3):
        assert together[user].tobytes() == alone(one, x, user, int(rows[user])).tobytes()


@pytest.mark.parametrize("loss", [*MARGIN_LOSSES, *DISTANCE_LOSSES])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_constants_bound_the_curvature_of_every_row(loss: str, reduction: str) -> None:
    one = problem(loss, reduction, intercept=False)
    draws = np.random.default_rng(4)
    largest, smallest = one.row_smoothness(), one.row_strong_convexity()
    for user in range(3):
        for row in range(M[user]):
            for _ in range(20):
                x, step = draws.normal(size=(3, one.d)), 1e-3 * draws.normal(size=(3, one.d))
                change = alone(one, x + step, user, row) - alone(one, x, user, row)
                curvature = float(change @ step[user]) / float(step[user] @ step[user])
                assert np.linalg.norm(change) <= (1 + 1e-6) * largest[user] * np.linalg.norm(step[user])
                assert curvature >= (1 - 1e-6) * smallest[user]


def test_the_smoothness_of_least_squares_is_reached_along_the_longest_row() -> None:
    one = problem("least_squares", "sum", intercept=False)
    block = one.stacks[-1][1]
    rows = block.rows[0, : M[0]]  # type: ignore[attr-defined]
    longest = int(np.linalg.norm(rows, axis=1).argmax())
    x = np.zeros((3, one.d))
    moved = x.copy()
    moved[0] = rows[longest] / np.linalg.norm(rows[longest])
    change = alone(one, moved, 0, longest) - alone(one, x, 0, longest)
    assert np.linalg.norm(change) == pytest.approx(one.row_smoothness()[0], rel=1e-12)


def test_an_unpenalised_intercept_leaves_no_strong_convexity() -> None:
    assert problem("least_squares", "mean", intercept=True).row_strong_convexity().tolist() == [0.0, 0.0, 0.0]
    assert problem("least_squares", "mean", intercept=False).row_strong_convexity().tolist() == [0.3, 0.3, 0.3]
