"""`coterie.sum_of_norms`: minima, certificates, and graphs and points of unusual kinds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array, triu

import coterie
from coterie import ConfigError, RunError
from coterie.arrays import Array
from coterie_server.maths.sum_of_norms import SumOfNorms
from tests.bits import printed
from tests.sums_of_norms import CASES, FIXTURE, Case, case, groups

MINIMA = json.loads(FIXTURE.read_text(encoding="utf-8"))


def solved(case: Case, tolerance: float = 1e-10, start: SumOfNorms | None = None) -> SumOfNorms:
    return coterie.sum_of_norms(case.points, (case.pairs, case.weights), case.lam, hessians=case.hessians, tolerance=tolerance, start=start)


def conditions(case: Case, found: SumOfNorms) -> tuple[float, float, float]:
    """What the optimality conditions leave, in relative terms: of the forces, of the lengths of z, and of the angles between z and x."""
    order = np.lexsort((case.pairs[:, 1], case.pairs[:, 0]))
    (first, second), radii = case.pairs[order].T, case.lam * case.weights[order]
    forces = np.einsum("nij,nj->ni", case.hessians, found.x - case.points)
    np.add.at(forces, first, found.z)
    np.subtract.at(forces, second, found.z)
    apart = found.x[first] - found.x[second]
    too_long = np.linalg.norm(found.z, axis=1) / radii - 1
    turned = (radii * np.linalg.norm(apart, axis=1) - (found.z * apart).sum(axis=1)).sum()
    largest = np.abs(np.einsum("nij,nj->ni", case.hessians, case.points)).max()
    return float(np.abs(forces).max() / largest), float(too_long.max(initial=0.0)), float(turned / max(case.objective(found.x), 1e-300))


@pytest.mark.parametrize("name", CASES)
def test_the_minimum_is_that_of_cvxpy(name: str) -> None:
    found = solved(CASES[name])
    value = CASES[name].objective(found.x)
    assert value == pytest.approx(MINIMA[name], rel=1e-9)
    assert found.objective == pytest.approx(value, rel=1e-12)
    assert found.gap <= 1e-10


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
def test_the_gap_bounds_the_distance_from_the_minimum(tolerance: float) -> None:
    name = "200 users"
    found = solved(CASES[name], tolerance)
    assert (CASES[name].objective(found.x) - MINIMA[name]) / found.objective <= found.gap + 1e-12
    assert found.gap <= tolerance


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(2, 15),
    d=st.integers(1, 4),
    share=st.sampled_from([0.3, 1.0]),
    lam=st.floats(1e-3, 10.0),
    least_squares=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_solutions_satisfy_the_optimality_conditions(n: int, d: int, share: float, lam: float, least_squares: bool, seed: int) -> None:
    problem = case(n, d, share, lam, least_squares=least_squares, seed=seed)
    found = coterie.sum_of_norms(problem.points, (problem.pairs, problem.weights), lam, hessians=problem.hessians, tolerance=1e-13)
    forces, too_long, turned = conditions(problem, found)
    assert forces < 1e-5
    assert too_long < 1e-14
    assert turned < 1e-12
    for label in range(found.clusters.max() + 1):
        assert (found.x[found.clusters == label] == found.x[found.clusters == label][0]).all()


def test_a_path_with_warm_starts_has_the_solutions_of_cold_ones_in_fewer_steps() -> None:
    points, warm, n_warm, n_cold = groups(60, 2, 3), None, 0, 0
    for lam in np.geomspace(0.01, 0.3, 12):
        warm = coterie.sum_of_norms(points, None, lam, tolerance=1e-12, start=warm)
        cold = coterie.sum_of_norms(points, None, lam, tolerance=1e-12)
        np.testing.assert_allclose(warm.x, cold.x, atol=1e-5)
        assert (warm.clusters == cold.clusters).all()
        n_warm, n_cold = n_warm + warm.iterations, n_cold + cold.iterations
    assert n_warm < n_cold


def test_two_points_meet_at_half_of_their_distance() -> None:
    points = np.array([[0.0, 0.0], [3.0, 4.0]])
    apart = coterie.sum_of_norms(points, None, 1.0, tolerance=1e-12)
    np.testing.assert_allclose(apart.x, [[0.6, 0.8], [2.4, 3.2]], atol=1e-9)
    assert apart.clusters.tolist() == [0, 1]
    due = coterie.sum_of_norms(points, None, 2.5, tolerance=1e-12)
    np.testing.assert_allclose(due.x, [[1.5, 2.0]] * 2, atol=1e-5)
    joined = coterie.sum_of_norms(points, None, 2.6, tolerance=1e-12)
    assert joined.clusters.tolist() == [0, 0]
    np.testing.assert_allclose(joined.x, [[1.5, 2.0]] * 2, atol=1e-12)


def test_equal_points_are_one_cluster_at_any_penalty() -> None:
    points = np.repeat(groups(6, 3, 1), 3, axis=0)
    found = coterie.sum_of_norms(points, None, 1e-3, tolerance=1e-10)
    assert found.clusters.tolist() == np.repeat(np.arange(6), 3).tolist()
    same = coterie.sum_of_norms(np.full((5, 2), 0.1), None, 7.0)
    np.testing.assert_allclose(same.x, 0.1, rtol=1e-14)
    assert same.gap == 0.0


def test_nothing_moves_without_a_penalty_a_weight_or_a_second_point() -> None:
    points = groups(7, 2, 2)
    pairs = np.array([[0, 1], [2, 3]])
    for weights, lam in (((pairs, np.ones(2)), 0.0), ((pairs, np.zeros(2)), 3.0), ((pairs[:0], np.zeros(0)), 3.0)):
        found = coterie.sum_of_norms(points, weights, lam)
        np.testing.assert_allclose(found.x, points, rtol=1e-13)
        assert found.clusters.tolist() == list(range(7))
        assert found.gap == 0.0
    np.testing.assert_allclose(coterie.sum_of_norms(points[:1], None, 5.0).x, points[:1], rtol=1e-14)


def test_parts_of_a_graph_meet_at_their_own_means_under_a_huge_penalty() -> None:
    points = groups(8, 2, 4)
    pairs = np.array([[0, 1], [1, 2], [2, 3], [4, 5], [6, 5]])
    found = coterie.sum_of_norms(points, (pairs, np.ones(5)), 1e6, tolerance=1e-12)
    assert found.clusters.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    means = [points[:4].mean(axis=0)] * 4 + [points[4:7].mean(axis=0)] * 3 + [points[7]]
    np.testing.assert_allclose(found.x, means, rtol=1e-12)


def test_units_of_the_points_change_nothing() -> None:
    points = groups(30, 3, 5)
    small, large = (coterie.sum_of_norms(scale * points, None, scale * 0.1, tolerance=1e-11) for scale in (1.0, 2.0**30))
    assert (small.clusters == large.clusters).all()
    np.testing.assert_allclose(large.x / 2.0**30, small.x, atol=1e-5)


def test_users_of_very_unequal_curvature_are_solved() -> None:
    problem = case(25, 2, 1.0, 0.01, least_squares=True, seed=9)
    hessians = problem.hessians * np.geomspace(1e-6, 1.0, 25)[:, None, None]
    found = coterie.sum_of_norms(problem.points, None, 0.01, hessians=hessians, tolerance=1e-9)
    assert found.gap <= 1e-9


def test_a_matrix_of_weights_counts_each_pair_once() -> None:
    points = groups(12, 2, 6)
    random = np.random.default_rng(0)
    upper = np.triu(random.random((12, 12)) * (random.random((12, 12)) < 0.5), 1)
    first, second = np.nonzero(upper)
    wanted = coterie.sum_of_norms(points, (np.stack([second, first], axis=1), upper[first, second]), 0.3)
    for matrix in (csr_array(upper), csr_array(upper + upper.T), triu(csr_array(upper)).T):
        found = coterie.sum_of_norms(points, matrix, 0.3)
        assert found.x.tobytes() == wanted.x.tobytes()


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    code = (
        "import hashlib, numpy as np, coterie; points = np.random.default_rng(0).normal(size=(150, 3));"
        "print(hashlib.sha256(coterie.sum_of_norms(points, None, .005).x.tobytes()).hexdigest())"
    )
    assert len(printed(code, 1, 4)) == 1


def test_many_unknowns_are_eliminated_with_the_bits_of_any_number_of_threads() -> None:
    code = (
        "import hashlib, numpy as np; from coterie_server.maths.newton_system import _eliminated; random = np.random.default_rng(0)\n"
        "for n in (97, 333, 720):\n"
        "    half, right = random.normal(size=(n, 2 * n)), random.normal(size=n)\n"
        "    matrix = np.einsum('ik,jk->ij', half, half) / n + np.diag(10.0 ** random.uniform(-3, 3, n))\n"
        "    found = _eliminated(matrix, right)\n"
        "    print(hashlib.sha256(found.tobytes()).hexdigest(), np.abs(matrix @ found - right).max() < 1e-12)"
    )
    (printed_,) = printed(code, 1, 3, 4)
    assert printed_.count("True") == 3


def test_users_of_little_curvature_whose_fusions_are_nearly_due_are_solved_to_rounding() -> None:
    """The minimiser of such a user given z moves far with z, and conjugate gradients do not end."""
    problem = case(80, 4, 1.0, 0.02, least_squares=True, seed=2)
    random = np.random.default_rng(1)
    hessians = problem.hessians * np.geomspace(1e-3, 1.0, 4)[:, None] * np.geomspace(1e-3, 1.0, 4)
    points = problem.points[:1] + 0.05 * random.normal(size=(80, 4)) / np.geomspace(1e-2, 1.0, 4)
    for lam in (0.0007, 0.001):
        found = coterie.sum_of_norms(points, None, lam, hessians=hessians, tolerance=1e-13)
        assert found.gap <= 1e-13
        assert found.iterations < 120


def error(points: Array, *arguments: object, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        coterie.sum_of_norms(points, *arguments, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_wrong_input_is_refused_in_one_sentence() -> None:
    points = groups(4, 2, 0)
    ones = np.ones(1)
    assert error(points[0]) == "the points have shape (2,), want (N, d) with at least one point and one coordinate"
    assert error(points * np.nan) == "the points contain NaN or infinity, want finite numbers"
    assert error(points, None, -1.0) == "lam is -1.0, want a finite number of at least 0"
    assert error(points, None, 1.0, tolerance=0.0) == "tolerance is 0.0, want a number between 0 and 1"
    assert error(points, ([[0, 4]], ones)) == "a pair has point 4, want points from 0 to 3"
    assert error(points, ([[2, 2]], ones)) == "a pair joins point 2 to itself, want two different points"
    assert error(points, ([[0, 1]], -ones)) == "a weight is -1.0, want finite weights of at least 0"
    assert (
        error(points, ([[0, 1]], np.ones(2))) == "the pairs have shape (1, 2) and the weights (2,), want integers (m, 2) and numbers (m,)"
    )
    assert error(points, np.eye(4)) == "the weights are a ndarray, want a sparse matrix or a tuple of pairs and weights"
    assert (
        error(points, csr_array(np.ones((3, 3))))
        == "the matrix of weights has shape (3, 3), want (4, 4), one row and column for each point"
    )
    assert "not symmetric" in error(points, csr_array(np.arange(16.0).reshape(4, 4)))
    assert error(points, hessians=np.ones((4, 2))) == "the Hessians have shape (4, 2), want (4, 2, 2)"
    assert error(points, hessians=np.zeros((4, 2, 2))) == "the Hessian of point 0 is not positive definite"
    other = coterie.sum_of_norms(points[:3], None, 1.0)
    assert error(points, start=other) == "start has 3 points of 2 coordinates and 3 pairs, want those of this problem: 4, 2 and 6"


def test_too_few_steps_end_with_the_gap() -> None:
    with pytest.raises(RunError, match=r"sum_of_norms has a relative gap of \d.*e.* after 2 Newton steps, want at most 1e-10"):
        coterie.sum_of_norms(groups(100, 2, 0), None, 0.02, tolerance=1e-10, limit=2)
