"""The finite-sum form of a user's loss, f_i = (1/m_i) sum_l f_il: gradients and constants of single rows."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.experiment.problem import DISTANCE_LOSSES, MARGIN_LOSSES, ProblemConfig
from coterie_client.problems import blocks, build_problem
from coterie_client.problems.blocks import Subsets
from coterie_client.problems.convex import ConvexProblem

LOSSES = (*MARGIN_LOSSES, *DISTANCE_LOSSES)
QUADRATIC = ("least_squares", "squared_distance")
M = (10, 4, 1)


def rows_of(loss: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draws = np.random.default_rng(1)
    features = [draws.normal(size=(m, 3)) for m in M]
    targets = [np.abs(labels) if loss == "poisson" else labels for labels in (np.sign(draws.normal(size=m)) for m in M)]
    return features, targets


def problem(loss: str, reduction: str, *, intercept: bool, l2: float = 0.3) -> ConvexProblem:
    config = ProblemConfig.model_validate({"loss": loss, "reduction": reduction, "l2": l2, "intercept": intercept})
    return build_problem(config, ["a", "b", "c"], *rows_of(loss))


def alone(one: ConvexProblem, x: np.ndarray, user: int, row: int) -> np.ndarray:
    gradient: np.ndarray = one.row_gradient(x[[user]], np.array([row]), np.array([user]))[0]
    return gradient


def row_hessian(one: ConvexProblem, x: np.ndarray, user: int, row: int) -> np.ndarray:
    """By differences: central ones, which are exact for a quadratic f_il up to rounding."""
    step = 1e-5 * np.eye(one.d)
    changes = [alone(one, x + e, user, row) - alone(one, x - e, user, row) for e in step]
    hessian = np.array(changes) / 2e-5
    symmetric: np.ndarray = (hessian + hessian.T) / 2
    return symmetric


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_mean_over_a_users_rows_is_its_gradient(loss: str, reduction: str, intercept: bool) -> None:
    one = problem(loss, reduction, intercept=intercept)
    x = np.random.default_rng(2).normal(size=(3, one.d))
    means = np.array([np.mean([alone(one, x, user, row) for row in range(M[user])], axis=0) for user in range(3)])
    gradient = one.gradient(x)
    assert (np.linalg.norm(means - gradient, axis=1) <= 1e-12 * np.linalg.norm(gradient, axis=1)).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("intercept", [True, False])
def test_a_row_gradient_is_that_of_a_user_with_this_row_only(loss: str, reduction: str, intercept: bool) -> None:
    one, (features, targets) = problem(loss, reduction, intercept=intercept), rows_of(loss)
    x = np.random.default_rng(3).normal(size=(3, one.d))
    penalty = 0.3 * x
    if one.config.has_intercept:
        penalty[:, -1] = 0.0
    for user, m in enumerate(M):
        rows = [(features[user][[row]], targets[user][[row]]) for row in range(m)]
        config = one.config.model_copy(update={"l2": 0.0})
        single = build_problem(config, [f"row {row}" for row in range(m)], [a for a, _ in rows], [y for _, y in rows])
        factor = m if reduction == "sum" else 1
        expected = factor * single.gradient(np.tile(x[user], (m, 1))) + penalty[user]
        np.testing.assert_allclose([alone(one, x, user, row) for row in range(m)], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_users_row_gradient_does_not_depend_on_who_else_is_asked(loss: str) -> None:
    one = problem(loss, "sum", intercept=True)
    x = np.random.default_rng(3).normal(size=(3, one.d))
    rows = np.array([7, 2, 0])
    together = one.row_gradient(x, rows)
    for user in range(3):
        assert together[user].tobytes() == alone(one, x, user, int(rows[user])).tobytes()
    backwards = np.array([2, 1, 0])
    assert np.array_equal(one.row_gradient(x[backwards], rows[backwards], backwards), together[backwards])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("intercept", [True, False])
def test_constants_bound_the_curvature_of_every_row(loss: str, reduction: str, intercept: bool) -> None:
    one = problem(loss, reduction, intercept=intercept)
    draws = np.random.default_rng(4)
    largest, smallest = one.row_smoothness(), one.row_strong_convexity()
    for user in range(3):
        for row in range(M[user]):
            for scale in (0.1, 3.0):
                spectrum = np.linalg.eigvalsh(row_hessian(one, scale * draws.normal(size=(3, one.d)), user, row))
                slack = 1e-6 * largest[user]
                assert spectrum[-1] <= largest[user] + slack
                assert spectrum[0] >= smallest[user] - slack


@pytest.mark.parametrize("loss", QUADRATIC)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_constants_of_quadratic_losses_are_reached(loss: str, reduction: str, intercept: bool) -> None:
    one = problem(loss, reduction, intercept=intercept)
    x = np.zeros((3, one.d))
    for user in range(3):
        spectra = np.array([np.linalg.eigvalsh(row_hessian(one, x, user, row)) for row in range(M[user])])
        assert spectra.max() == pytest.approx(one.row_smoothness()[user], rel=1e-8)
        assert spectra.min() == pytest.approx(one.row_strong_convexity()[user], abs=1e-8)


def test_constants_by_hand() -> None:
    config = {"loss": "squared_hinge", "l2": 0.5, "reduction": "sum"}
    rows, labels = np.array([[0.0, 1.0], [3.0, 4.0]]), np.array([1.0, -1.0])
    flat = build_problem(ProblemConfig.model_validate(config | {"intercept": False}), ["u"], [rows], [labels])
    assert flat.row_smoothness().tolist() == [2 * 2 * 25 + 0.5]  # m_i times the bound 2 of the hinge times |a|^2
    assert flat.row_strong_convexity().tolist() == [0.5]
    lifted = build_problem(ProblemConfig.model_validate(config), ["u"], [rows], [labels])
    a = np.array([3.0, 4.0, -1.0])
    expected = np.linalg.eigvalsh(4 * np.outer(a, a) + np.diag([0.5, 0.5, 0.0]))[-1]
    np.testing.assert_allclose(lifted.row_smoothness(), [expected], rtol=1e-14)
    assert lifted.row_strong_convexity().tolist() == [0.0]


def test_a_single_feature_of_least_squares_is_strongly_convex_in_each_row() -> None:
    one = build_problem(ProblemConfig(loss="least_squares", l2=0.1, intercept=False), ["u"], [np.array([[3.0], [-2.0]])], [np.zeros(2)])
    np.testing.assert_allclose(one.row_strong_convexity(), [4.1], rtol=1e-15)
    np.testing.assert_allclose(one.row_smoothness(), [9.1], rtol=1e-15)


@pytest.mark.parametrize(
    ("loss", "intercept", "expected"),
    [
        ("huber", True, [0.0, 0.0, 0.0]),  # the intercept is not penalised
        ("huber", False, [0.3, 0.3, 0.3]),
        ("least_squares", False, [0.3, 0.3, 0.3]),
        ("squared_distance", True, [10.3, 4.3, 1.3]),  # each point holds the model, in the sum m_i times
        ("huber_distance", True, [0.3, 0.3, 0.3]),
    ],
)
def test_what_is_strongly_convex_row_by_row(loss: str, intercept: bool, expected: list[float]) -> None:
    assert problem(loss, "sum", intercept=intercept).row_strong_convexity().tolist() == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([9, 4, 0], "row index 4 is asked of a user with 4 rows"),  # a row of padding
        ([-1, 0, 0], "row index -1 is asked of a user with 10 rows"),
        ([0, 0], r"row indices have shape \(2,\), wanted \(3,\)"),
    ],
)
def test_a_row_that_a_user_does_not_have_is_a_bug_of_the_caller(rows: list[int], message: str) -> None:
    one = problem("logistic", "mean", intercept=True)
    with pytest.raises(ValueError, match=message):
        one.row_gradient(np.zeros((3, 4)), np.array(rows))


@pytest.mark.parametrize("loss", LOSSES)
def test_asking_again_about_some_users_gives_the_same_bits(loss: str) -> None:
    one = problem(loss, "mean", intercept=True)
    x = np.random.default_rng(5).normal(size=(3, one.d))
    whole = one.gradient(x)
    users = np.array([2, 0])
    for _ in range(3):  # from the third time on, the rows that were kept
        assert np.array_equal(one.gradient(x[users], users), whole[users])
    users[:] = [1, 2]  # the caller's array is the caller's
    for _ in range(3):
        assert np.array_equal(one.gradient(x[users], users), whole[users])
    assert one.gradient(x[:0], users[:0]).shape == (0, one.d)


def test_the_rows_of_a_repeated_subset_are_copied_out_once_and_only_while_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    one = problem("logistic", "mean", intercept=True)
    sorted_users, users = Subsets(one.stacks, one.n_users), np.array([0, 2])
    first, second, third = (sorted_users.blocks(users.copy())[0][1] for _ in range(3))
    assert first is not second  # asked once, nothing is kept
    assert second is third
    other = sorted_users.blocks(np.array([1]))[0][1]
    assert other is not third
    monkeypatch.setattr(blocks, "MAX_KEPT", 3)
    assert len({id(block) for block in [sorted_users.blocks(users)[0][1] for _ in range(3)]}) == 3
