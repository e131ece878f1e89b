"""Certificates against CVXPY's solutions (fixtures), closed forms, weak duality and the full problem (3) itself."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import RunError
from coterie_server.maths.certificate import (
    exact_lower_end,
    recovery_interval,
    solve_blocks,
    theorem1_bound,
    theorem2_bound,
)
from coterie_server.maths.clusters import partition, same_partition
from tests.fixture_losses import SquaredHinge


class Points:
    """Plain convex clustering: f_i(x) = |x - a_i|^2 / 2."""

    def __init__(self, targets):
        self.targets = np.array(targets, float)

    def __call__(self, x):
        n, d = x.shape
        away = x - self.targets
        return 0.5 * (away**2).sum(axis=1), away, np.tile(np.eye(d), (n, 1, 1))


def grouped(losses, labels):
    members = np.arange(labels.max() + 1)[:, None] == labels
    asked = []

    async def ask(w):
        values, gradients, hessians = losses(w[labels])
        asked.append(w)
        return members @ values, members @ gradients, np.einsum("kn,nde->kde", members, hessians)

    return ask, asked


def blocks(losses, labels, penalty, start):
    ask, asked = grouped(losses, labels)
    sizes = np.bincount(labels)

    solution = asyncio.run(solve_blocks(ask, start, sizes, penalty))
    assert solution.n_asks == len(asked)
    return solution


def interval(losses, labels, d, **options):
    ask, asked = grouped(losses, labels)
    user_asks = []

    async def ask_users(w):
        user_asks.append(w)
        return losses(w[labels])[1]

    found = asyncio.run(recovery_interval(ask, ask_users, labels, np.zeros((labels.max() + 1, d)), **options))
    assert found.n_asks == len(asked) + len(user_asks)
    return found


def full_partition(losses, labels, penalty):
    """The partition of the solution of (3) itself: every user a block of one."""
    n = len(labels)
    start = np.tile(losses.fixture["global"]["x"], (n, 1))
    return partition(blocks(losses, np.arange(n), penalty, start).w, tolerance=1e-7)


@pytest.mark.parametrize("n_users", [6, 60])
def test_the_k_block_problem_matches_cvxpy_where_the_clusters_are_exact(n_users):
    losses = SquaredHinge(n_users)
    for entry in losses.fixture["son"]:
        if not same_partition(np.array(entry["partition"]), losses.labels):
            continue
        solution = blocks(losses, losses.labels, entry["LAM"], np.zeros((3, 3)))
        assert solution.objective == pytest.approx(entry["Phi"], rel=1e-9)
        np.testing.assert_allclose(solution.w[losses.labels], entry["x"], atol=1e-6)
        assert solution.n_asks <= 15


@pytest.mark.parametrize(("n_users", "skipped"), [(6, []), (60, [0.05])])
def test_with_blocks_of_one_user_it_is_problem_3_and_matches_cvxpy_everywhere(n_users, skipped):
    losses = SquaredHinge(n_users)
    for entry in losses.fixture["son"]:
        if entry["LAM"] in skipped:  # seven seconds of server work
            continue
        start = np.tile(losses.fixture["global"]["x"], (n_users, 1))
        solution = blocks(losses, np.arange(n_users), entry["LAM"], start)
        assert solution.objective == pytest.approx(entry["Phi"], rel=1e-9)
        assert partition(solution.w).max() + 1 == entry["K"]


def test_two_blocks_on_a_line_move_together_by_the_closed_form():
    # Clusters {0, 0, 0} and {10}: each user is pulled by penalty times the size of the other cluster.
    losses, labels = Points([[0], [0], [0], [10]]), np.array([0, 0, 0, 1])
    np.testing.assert_allclose(blocks(losses, labels, 1.0, np.zeros((2, 1))).w, [[1.0], [7.0]], atol=1e-8)
    apart = blocks(losses, labels, 2.49, np.zeros((2, 1)))
    together = blocks(losses, labels, 2.51, apart.w)
    assert apart.merged.tolist() == [0, 1]
    assert together.merged.tolist() == [0, 0]
    np.testing.assert_allclose(together.w, [[2.5], [2.5]], atol=1e-8)


def test_a_far_start_needs_backtracking_and_still_solves_the_k_block_problem():
    centres = np.array([[-1.0], [1.0]])

    async def ask(w):  # log-cosh: undamped Newton steps run away from |w - centre| > 1.09
        away = w - centres
        return np.logaddexp(away, -away)[:, 0], np.tanh(away), (1 - np.tanh(away) ** 2)[:, :, None]

    solution = asyncio.run(solve_blocks(ask, np.array([[-4.0], [4.5]]), np.array([1, 1]), 0.5))
    pulled = 1 - np.arctanh(0.5)
    np.testing.assert_allclose(solution.w, [[-pulled], [pulled]], atol=1e-7)


def test_the_same_call_gives_the_same_bits():
    losses = SquaredHinge(60)
    first, second = (blocks(losses, losses.labels, 0.08, np.zeros((3, 3))) for _ in range(2))
    np.testing.assert_array_equal(first.w, second.w)


def test_an_oracle_that_contradicts_itself_is_refused():
    async def ask(w):
        return (w**2).sum(axis=1), -2 * w, np.tile(2 * np.eye(2), (2, 1, 1))

    with pytest.raises(RunError, match=r"penalty 0\.1 was not solved"):
        asyncio.run(solve_blocks(ask, np.ones((2, 2)), np.array([1, 1]), 0.1))


def test_theorem_1_takes_the_farthest_gradients_over_the_size_of_their_cluster():
    gradients = np.array([[0.0, 0], [3, 4], [0, 0], [0, 0], [0, 1], [0, 6]])
    assert theorem1_bound(gradients, np.array([0, 0, 1, 1, 1, 1])) == pytest.approx(2.5)
    assert theorem1_bound(gradients, np.arange(6)) == 0.0


def test_theorem_2_takes_the_nearest_gradients_over_twice_the_largest_complement():
    gradients = np.array([[0.0, 0], [3, 4], [0, 20]])
    assert theorem2_bound(gradients, np.array([4, 2, 1])) == pytest.approx(5 / (2 * 6))
    assert theorem2_bound(gradients[:1], np.array([4])) == np.inf


@pytest.mark.parametrize("penalty", [0.03, 0.0708, 0.09, 0.104])
def test_theorem_2_never_certifies_the_penalty_it_is_asked_about(penalty):
    losses = SquaredHinge(60)
    sizes = np.bincount(losses.labels)
    solution = blocks(losses, losses.labels, penalty, np.zeros((3, 3)))
    assert theorem2_bound(solution.gradients / sizes[:, None], sizes) < 0.75 * penalty


def test_the_exact_lower_end_of_two_users_is_half_their_difference():
    bounds = exact_lower_end(np.array([[0.0, 0], [6, 8]]), np.zeros(2, int))
    assert bounds.lower == pytest.approx(5.0)
    assert bounds.upper == pytest.approx(5.0)


def test_one_user_against_equal_others_needs_its_demand_spread_evenly():
    gradients = np.zeros((8, 3))
    gradients[3] = [8.0, 0, 0]  # demand 7 through 7 pairs
    bounds = exact_lower_end(gradients, np.zeros(8, int))
    assert bounds.lower == pytest.approx(1.0, rel=1e-5)
    assert bounds.upper == pytest.approx(1.0, rel=1e-5)


def test_the_exact_lower_end_is_the_largest_of_the_clusters():
    gradients = np.array([[0.0], [2.0], [0.0], [10.0], [7.0]])
    labels = np.array([0, 0, 1, 1, 2])
    assert exact_lower_end(gradients, labels).upper == pytest.approx(5.0)
    assert exact_lower_end(gradients[:1], labels[:1]) == (0.0, 0.0)
    assert exact_lower_end(np.ones((4, 2)), np.zeros(4, int)) == (0.0, 0.0)


@settings(max_examples=40)
@given(st.integers(2, 12), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_the_bounds_meet_and_lie_between_weak_duality_and_theorem_1(n, d, seed):
    random = np.random.default_rng(seed)
    gradients = random.standard_normal((n, d)) * np.exp(random.standard_normal((n, 1)))
    bounds = exact_lower_end(gradients, np.zeros(n, int))
    assert bounds.lower <= bounds.upper <= bounds.lower * (1 + 2e-6)
    assert bounds.upper <= theorem1_bound(gradients, np.zeros(n, int)) * (1 + 1e-12)
    demand = gradients.mean(axis=0) - gradients
    for _ in range(10):  # the dual ratio of the docstring, at potentials of its own
        members = random.random(n) < 0.5
        u = members[:, None] * demand + 0.1 * random.standard_normal((n, d))
        length = sum(np.linalg.norm(u[i] - u[j]) for i in range(n) for j in range(i))
        assert (u * demand).sum() / length <= bounds.upper * (1 + 1e-9)


def test_on_a_line_the_exact_lower_end_is_the_worst_cut():
    # For d = 1 the dual's extreme points are cuts: sum of the k largest demands over k(n - k).
    values = np.random.default_rng(3).standard_normal((15, 1)) ** 3
    demand = np.sort((values.mean() - values).ravel())[::-1]
    worst = max(demand[:k].sum() / (k * (15 - k)) for k in range(1, 15))
    bounds = exact_lower_end(values, np.zeros(15, int))
    assert bounds.lower == pytest.approx(worst, rel=1e-5)
    assert bounds.upper == pytest.approx(worst, rel=1e-5)


def test_two_hundred_users_in_one_cluster_are_certified_within_the_iterations():
    random = np.random.default_rng(0)
    gradients = 3 * random.standard_normal((2, 3))[random.integers(0, 2, 200)] + 0.3 * random.standard_normal((200, 3))
    bounds = exact_lower_end(gradients, np.zeros(200, int))
    assert bounds.upper <= bounds.lower * (1 + 1.1e-6)


def test_an_early_end_leaves_valid_bounds_further_apart():
    gradients = np.random.default_rng(4).standard_normal((30, 2))
    labels = np.zeros(30, int)
    exact, early = exact_lower_end(gradients, labels), exact_lower_end(gradients, labels, tolerance=1e-12, limit=2)
    assert early.lower <= exact.upper
    assert early.upper >= exact.lower
    assert early.upper - early.lower > exact.upper - exact.lower


def test_near_the_lower_end_of_the_sixty_users_the_exact_certificate_is_0711():
    losses = SquaredHinge(60)
    solution = blocks(losses, losses.labels, 0.0708, np.zeros((3, 3)))
    gradients = losses(solution.w[losses.labels])[1]
    bounds = exact_lower_end(gradients, losses.labels)
    assert bounds.upper == pytest.approx(0.0711, abs=3e-4)
    assert theorem1_bound(gradients, losses.labels) > 1.5 * bounds.upper


@pytest.mark.slow
def test_the_interval_of_the_sixty_users_is_that_of_problem_3_itself():
    losses = SquaredHinge(60)
    found = interval(losses, losses.labels, 3)
    assert found.lower == pytest.approx(0.0708, abs=3e-4)
    assert found.merging == pytest.approx(0.1044, abs=2e-4)
    # A user leaves its cluster by 3e-8 already at .1042, before the clusters merge at .1044.
    assert found.upper == pytest.approx(0.1041, abs=2e-4)
    assert found.n_asks <= 100
    for penalty, exact in [(0.9975 * found.lower, False), (1.0005 * found.lower, True), (1.002 * found.upper, False)]:
        assert same_partition(full_partition(losses, losses.labels, penalty), losses.labels) == exact


def test_a_partition_that_no_penalty_gives_has_no_interval():
    found = interval(SquaredHinge(60), np.arange(60) % 3, 3)
    assert found.lower == np.inf


def test_the_interval_of_points_on_a_line_is_the_closed_form():
    # {-1, 1} holds from penalty 1 on; the outer users 20 and 22 too; the means 0 and 21 meet when 21 = 2 * 2 * penalty.
    labels = np.array([0, 0, 1, 1])
    found = interval(Points([[-1], [1], [20], [22]]), labels, 1, tolerance=1e-5)
    assert found.lower == pytest.approx(1.0, rel=2e-5)
    assert found.upper == pytest.approx(21 / 4, rel=2e-5)
    assert found.merging == pytest.approx(21 / 4, rel=2e-5)


def test_singletons_hold_from_zero_and_a_single_cluster_holds_for_ever():
    losses = Points([[0], [1], [4]])
    apart = interval(losses, np.arange(3), 1)
    assert apart.lower == 0.0
    assert apart.upper == pytest.approx(1 / 2, rel=2e-3)  # 0 drifts by 2 penalties, 1 stays
    together = interval(losses, np.zeros(3, int), 1)
    assert together.lower == pytest.approx(7 / 6, rel=2e-3)  # the cut of 4 from the others: (4 - 5/3) / 2
    assert together.upper == np.inf


def test_too_few_penalties_are_an_error_and_not_an_interval():
    with pytest.raises(RunError, match="after 3 penalties"):
        interval(SquaredHinge(6), SquaredHinge(6).labels, 3, limit=3)
