"""The linear systems of a sum of norms with many users, and the end of a solution where users come together slowly."""

from __future__ import annotations

import numpy as np
import pytest

from coterie_server.maths import graphs, newton_system, ssnal


def test_users_who_are_joined_by_stiff_edges_move_as_one_point(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    n, d = 900, 2
    chain = np.arange(n - 1)
    graph = ssnal.Graph.of(n, chain, chain + 1, np.ones(n - 1))
    inside = chain % 10 != 9  # chains of ten users
    edges = np.where(inside, 10.0 ** random.uniform(3, 7, n - 1), 1.0)[:, None, None] * np.eye(d)
    hessians, r = random.uniform(0.01, 1, (n, 1, 1)) * np.eye(d), random.normal(size=(n, d))
    matrix = newton_system._dense(graph, hessians, edges)
    exact = np.linalg.solve(matrix, -r.ravel()).reshape(n, d)
    monkeypatch.setattr(newton_system, "_FORCING", 1e-6)

    def error() -> float:
        return float(np.abs(newton_system.newton_step(graph, hessians, edges, r, inside) - exact).max() / np.abs(exact).max())

    monkeypatch.setattr(newton_system, "_CG_LIMIT", 120)
    assert error() < 0.01
    monkeypatch.setattr(newton_system, "_PATIENCE", 121)  # without the second level
    assert error() > 0.5


def test_users_who_come_together_slowly_do_not_prolong_a_solution() -> None:
    random = np.random.default_rng(22)
    n, d = 520, 2
    points = random.normal(size=(n, d))
    graph = graphs.nearest(points, 10, 2.0)
    rows = random.normal(size=(n, 6, d))
    hessians = np.einsum("nmi,nmj->nij", rows, rows) / 6 + 1e-3 * np.eye(d)
    linear = np.einsum("nij,nj->ni", hessians, points)
    found = ssnal.minimise(graph, hessians, linear, 0.03, points, relative=0.0, absolute=1e-15 * n)
    assert found.gap <= 1e-15 * n
    assert found.n_newton <= 50  # 56 where only edges inside their balls join users at the end
    again = ssnal.minimise(graph, hessians, linear, 0.03, found.x, found.z, relative=0.0, absolute=1e-18 * n)
    np.testing.assert_array_equal(found.clusters, again.clusters)
