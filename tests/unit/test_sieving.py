"""Sums of norms by groups of users: the same minima as without groups, and what decides that a group holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.arrays import Array
from coterie_server.maths import sieving, ssnal
from coterie_server.maths.clusters import same_partition
from coterie_server.maths.ssnal import Graph, Minimum
from tests.sums_of_norms import case

Problem = tuple[Graph, Array, Array, float]


def problem(n: int, share: float, strength: float, *, least_squares: bool, seed: int, spread: float = 0.1) -> Problem:
    """Graph, Hessians, linear terms and a penalty: users around four centres; at strength 1 most clusters are joined."""
    made = case(n, 2, share, strength, least_squares=least_squares, seed=seed)
    graph = Graph.of(n, made.pairs[:, 0], made.pairs[:, 1], made.weights)
    centres = np.stack([made.points[kind::4].mean(axis=0) for kind in range(4)])[np.arange(n) % 4]
    linear = np.einsum("nij,nj->ni", made.hessians, centres + spread * (made.points - centres))
    return graph, np.asarray(made.hessians), linear, 8 * strength / float(graph.degrees.mean())


def both(given: Problem, gap: float = 1e-13) -> tuple[Minimum, Minimum]:
    start = np.zeros_like(given[2])
    return sieving.minimise(*given, start, relative=gap), ssnal.minimise(*given, start, relative=gap)


@settings(deadline=None, max_examples=20)
@given(
    n=st.integers(32, 60),
    share=st.sampled_from([0.5, 1.0]),
    strength=st.sampled_from([0.05, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0]),
    least_squares=st.booleans(),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 0.3, 1.0]),
)
def test_the_minimum_is_that_of_the_solver_of_all_edges(
    n: int, share: float, strength: float, least_squares: bool, seed: int, spread: float
) -> None:
    made = problem(n, share, strength, least_squares=least_squares, seed=seed, spread=spread)
    sieved, plain = both(made)
    assert sieved.gap <= 1e-13 * sieved.objective
    assert sieved.objective == pytest.approx(plain.objective, rel=1e-12)
    np.testing.assert_allclose(sieved.x, plain.x, atol=1e-5)
    graph, hessians, linear, penalty = made
    slopes = np.einsum("nij,nj->ni", hessians, sieved.x) - linear
    assert ssnal.gap(graph, hessians, slopes, penalty, sieved.x, sieved.z) <= 1e-12 * sieved.objective
    assert (np.linalg.norm(sieved.z, axis=1) <= penalty * graph.weights * (1 + 1e-14)).all()


def test_clusters_that_hold_are_found_without_a_newton_step_on_all_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem(120, 1.0, 0.3, least_squares=False, seed=3)
    sieved, plain = both(made)
    assert 1 < plain.clusters.max() + 1 < 12
    assert same_partition(sieved.clusters, plain.clusters)
    sizes = []
    solver = ssnal.minimise

    def seen(graph: Graph, *arguments: object, **options: object) -> Minimum:
        sizes.append(graph.n)
        return solver(graph, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ssnal, "minimise", seen)
    sieving.minimise(*made, np.zeros_like(made[2]), relative=1e-13)
    assert sizes
    assert max(sizes) <= 40


def test_forces_that_pull_two_users_apart_are_held_by_way_of_the_others() -> None:
    """The shortest z for forces of .8 N LAM and the opposite is 1.6 LAM on the edge between them; others can take the rest."""
    n, lam = 40, 0.1
    points = np.zeros((n, 2))
    points[0], points[1] = [0.8 * n * lam, 0.0], [-0.8 * n * lam, 0.0]
    graph, hessians = Graph.complete(n), np.broadcast_to(np.eye(2), (n, 2, 2))
    found = sieving.minimise(graph, hessians, points, lam, points, relative=1e-13)
    assert found.clusters.max() == 0
    assert found.gap <= 1e-13 * found.objective
    assert found.n_newton > 1
    points *= 1.3
    assert np.bincount(sieving.minimise(graph, hessians, points, lam, points, relative=1e-13).clusters).tolist() == [1, 1, 38]


def test_a_start_is_left_as_it_was() -> None:
    made = problem(60, 1.0, 0.5, least_squares=False, seed=1)
    warm = sieving.minimise(*made, np.zeros_like(made[2]), relative=1e-12)
    x, z = warm.x.copy(), warm.z.copy()
    again = sieving.minimise(*made[:3], 0.9 * made[3], warm.x, warm.z, relative=1e-12)
    assert (warm.x == x).all()
    assert (warm.z == z).all()
    np.testing.assert_allclose(again.x, ssnal.minimise(*made[:3], 0.9 * made[3], x, z, relative=1e-12).x, atol=1e-5)


@pytest.mark.parametrize("strength", [0.3, 0.5, 5.0])
def test_units_and_equal_users_change_nothing(strength: float) -> None:
    graph, hessians, linear, penalty = problem(48, 1.0, strength, least_squares=False, seed=4)
    linear[24:] = linear[:24]
    start, scale = np.zeros_like(linear), 2.0**40
    found = sieving.minimise(graph, hessians, linear, penalty, start, relative=1e-12)
    scaled = sieving.minimise(graph, hessians, scale * linear, scale * penalty, start, relative=1e-12)
    assert (found.clusters[24:] == found.clusters[:24]).all()
    np.testing.assert_array_equal(scaled.x, scale * found.x)


def test_steps_are_not_more_than_allowed() -> None:
    made = problem(100, 1.0, 0.4, least_squares=True, seed=0)
    for limit in (1, 2, 5, 12):
        assert sieving.minimise(*made, np.zeros_like(made[2]), relative=1e-14, limit=limit).n_newton <= limit
