"""The solutions of `son_newton` fulfil the optimality conditions for each loss, on each graph, from far starts and in degenerate cases.

sum_j z_ij = -grad f_i with |z_ij| <= LAM w_ij, and z_ij along x_i - x_j where these differ.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ProtocolError
from coterie.families.consensus import Curvatures, GroupModel, Slopes
from coterie.methods.son_newton import Config
from coterie_client.data import UserData
from coterie_client.families import consensus
from coterie_client.interface.half import Inbox
from tests.papers import fixture_data
from tests.papers.pdmm_federation import finished
from tests.papers.son_newton_federation import Users, residuals
from tests.papers.test_son_newton import rows

LOSSES = ("least_squares", "logistic", "squared_hinge", "huber", "poisson", "squared_distance", "huber_distance")


def of_loss(loss: str, made: list[UserData]) -> Users:
    """The users with targets that suit the loss."""
    if loss == "poisson":
        made = [replace(user, target=np.maximum(0.0, np.rint(2 * user.target + 1))) for user in made]
    elif loss in ("logistic", "squared_hinge"):
        made = [replace(user, target=np.where(user.target < 0, -1.0, 1.0)) for user in made]
    return Users(loss, made, l2=0.0 if loss.endswith("distance") else 0.01)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("graph", ["complete", {"neighbours": 3}])
@pytest.mark.parametrize("hessian", ["exact", "bfgs"])
def test_the_optimality_conditions_hold_for_each_loss(loss: str, graph: Any, hessian: Any) -> None:
    users = of_loss(loss, rows({"labels": False}, 0))
    carry = users.solved(Config(penalty=0.02 if loss == "huber_distance" else 0.05, graph=graph, tolerance=1e-18, hessian=hessian))
    found = residuals(carry)
    assert found.forces < 1e-8
    assert found.outside <= 1e-14
    assert found.turned < 1e-12
    assert np.ptp(carry.answers.x, axis=0).max() > 0
    assert len(users.asked) <= (10 if hessian == "exact" else 50)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("graph", ["complete", {"neighbours": 5}])
def test_60_users_have_residuals_of_1e_8(loss: str, graph: Any) -> None:
    users = of_loss(loss, fixture_data.users({"n_users": 60}, 0))
    carry = users.solved(Config(penalty=0.05 if graph == "complete" else 1.0, graph=graph, tolerance=1e-18))
    found = residuals(carry)
    assert found.forces < 1e-8
    assert found.outside <= 1e-14
    assert found.turned < 1e-8
    assert len(users.asked) <= 12


@pytest.mark.parametrize(
    ("loss", "hessian"),
    [
        *((loss, "exact") for loss in ("logistic", "poisson", "squared_hinge", "huber")),
        *((loss, "bfgs") for loss in ("logistic", "squared_hinge", "huber")),
    ],
)
def test_a_start_from_afar_leads_to_the_same_solution(loss: str, hessian: Any) -> None:
    """Where a logistic loss is flat its Hessian says nothing, and full steps are too long; a Poisson loss has gradients of 1e5 there."""
    users = of_loss(loss, rows({"labels": False}, 0))
    config = Config(penalty=0.05, tolerance=1e-16, hessian=hessian)
    near = users.solved(config)
    far = users.solved(config, 20 * np.where(np.arange(users.n)[:, None] % 2, -1.0, 1.0) * np.ones(users.d), limit=150)
    np.testing.assert_allclose(far.answers.x, near.answers.x, atol=1e-5)
    assert residuals(far).forces < 1e-6


def user(name: str, features: Any, target: Any) -> UserData:
    rows_, targets = np.array(features, float), np.array(target, float)
    return UserData(name, "all", rows_, targets, rows_, targets)


@pytest.mark.parametrize("hessian", ["exact", "bfgs"])
def test_users_with_the_same_rows_have_one_model_at_any_penalty(hessian: Any) -> None:
    users = Users("least_squares", [user(f"u{place}", [[0.0], [1.0], [3.0]], [1.0, 2.0, 2.0]) for place in range(5)], l2=0.01)
    carry = users.solved(Config(penalty=1e-6, tolerance=1e-14, hessian=hessian))
    assert np.ptp(carry.answers.x, axis=0).max() == 0
    assert residuals(carry).forces < 1e-7


@pytest.mark.parametrize("hessian", ["exact", "bfgs"])
def test_one_user_alone_has_its_own_minimiser(hessian: Any) -> None:
    users = Users("logistic", [user("u0", [[0.0], [1.0], [3.0]], [-1.0, 1.0, 1.0])], l2=0.1)
    carry = users.solved(Config(penalty=1.0, tolerance=1e-14, hessian=hessian), np.zeros((1, 2)))
    np.testing.assert_allclose(carry.answers.x, users.problem.argmin(np.zeros((1, 2)), 0.0), atol=1e-6)


@pytest.mark.parametrize("hessian", ["exact", "bfgs"])
def test_users_with_fewer_rows_than_coefficients_are_completed_by_the_others(hessian: Any) -> None:
    """Without a ridge their Hessians are singular, and a solution is a minimiser as good as any."""
    made = [user(f"u{place}", [[float(place), 1.0]], [float(place)]) for place in range(6)]
    users = Users("least_squares", made)
    carry = users.solved(Config(penalty=10.0, tolerance=1e-14, hessian=hessian), np.zeros((6, 3)))
    assert residuals(carry).forces < 1e-6
    assert users.problem.value(carry.answers.x).sum() < 1e-12, "one line goes through all rows"


def test_a_penalty_that_joins_everybody_gives_the_model_for_all() -> None:
    made = rows({"labels": False}, 0)
    users = of_loss("huber", made)
    carry = users.solved(Config(penalty=100.0, tolerance=1e-16))
    assert np.ptp(carry.answers.x, axis=0).max() == 0
    np.testing.assert_allclose(users.problem.gradient(carry.answers.x).sum(axis=0), 0.0, atol=1e-9)


def test_a_penalty_of_almost_nothing_leaves_everybody_alone() -> None:
    users = of_loss("logistic", rows({"labels": False}, 0))
    carry = users.solved(Config(penalty=1e-12, tolerance=1e-16))
    np.testing.assert_allclose(carry.answers.x, users.problem.argmin(np.zeros((users.n, users.d)), 0.0), atol=1e-6)


def test_users_whose_loss_is_zero_end_without_a_division_by_it() -> None:
    users = Users("least_squares", [user(f"u{place}", [[0.0], [1.0]], [0.0, 0.0]) for place in range(3)], l2=0.1)
    carry = users.solved(Config(penalty=1.0))
    np.testing.assert_array_equal(carry.answers.x, 0.0)


def test_only_users_are_asked_whose_point_has_changed() -> None:
    users = of_loss("logistic", rows({"labels": True}, 0))
    half = users.half(Config(penalty=0.05), np.zeros((users.n, users.d)))
    state = finished(half.round(finished(half.init(users)), users, 1))[0]
    target = state.target.copy()
    target[[0, 4]] = 0.0
    moved, figures = finished(half.round(replace(state, target=target, promise=0.0, objective=np.inf), users, 2))
    assert users.asked[-1].tolist() == [place for place in range(users.n) if place not in (0, 4)]
    assert figures["asked"] == users.n - 2
    np.testing.assert_array_equal(moved.answers.values, users.problem.value(target))
    np.testing.assert_array_equal(moved.answers.gradients, users.problem.gradient(target))
    assert half.expected_vectors([figures])["query", "down"] == users.n - 2


def test_hosts_answer_for_the_users_they_are_asked_about() -> None:
    """The client half on a message for some users; with a ridge it is always all."""
    problem = of_loss("huber", rows({"labels": False}, 0)).problem
    x, some = np.ones((2, problem.d)), np.array([1, 3])
    inbox = Inbox("x", 1, {GroupModel: GroupModel(x, users=some)})
    local: Any = SimpleNamespace(problem=problem, row_privacy=None)
    slopes, curvatures = consensus.step(consensus.State(None, with_hessians=True), inbox, local)[1]
    assert isinstance(slopes, Slopes)
    assert isinstance(curvatures, Curvatures)
    np.testing.assert_array_equal(slopes.gradient, problem.gradient(np.ones((problem.n_users, problem.d)))[some])
    assert slopes.users is some
    assert curvatures.users is some
    assert curvatures.triangle.shape == (2, problem.d * (problem.d + 1) // 2)
    with pytest.raises(ProtocolError, match="asks some users for a stage with a ridge"):
        consensus.step(consensus.State(1.0, with_hessians=True), inbox, local)


@pytest.mark.parametrize("loss", LOSSES)
def test_users_prove_each_solution_and_no_poor_one(loss: str) -> None:
    """The certified gap bounds the distance to the optimum, also after one round, where the quadratic says nothing of the loss."""
    users = of_loss(loss, rows({"labels": False}, 0))
    half = users.half(Config(penalty=0.02 if loss == "huber_distance" else 0.05, tolerance=1e-18, certificate=True))
    state, objectives, gaps = finished(half.init(users)), [], []
    for number in range(1, 30):
        state, figures = finished(half.round(state, users, number))
        objectives.append(figures["objective"])
        ended = finished(half.finish(state, users))
        gaps.append(ended.figures["certified_gap"])
        assert f"above its minimum by at most {gaps[-1]:.1e} of itself" in ended.notes[-1]
        if figures["converged"]:
            break
    assert gaps[-1] < 1e-13
    for objective, gap in zip(objectives, gaps, strict=True):
        assert gap * abs(objective) >= objective - objectives[-1] - 1e-13 * abs(objective)


def test_a_loss_without_a_bound_is_said() -> None:
    """Separable rows without l2: the logistic loss of u0 has an infimum and no minimiser."""
    users = Users("logistic", [user("u0", [[0.0], [1.0]], [-1.0, 1.0]), user("u1", [[0.0], [1.0], [2.0]], [1.0, -1.0, 1.0])])
    half = users.half(Config(penalty=1e-9, certificate=True), np.zeros((2, 2)))
    state = finished(half.init(users))
    state = finished(half.round(state, users, 1))[0]
    ended = finished(half.finish(replace(state, z=np.zeros_like(state.z)), users))
    assert "certified_gap" not in ended.figures
    assert ended.warnings == (
        "stage 'x' has no certificate: 1 of 2 users find no bound of their losses "
        "(wanted: losses with minimisers, as with problem.l2 above 0)",
    )
