"""Approximate Hessians from differences of gradients."""

from __future__ import annotations

import numpy as np

from coterie_server.maths.bfgs import updated


def quadratics(n: int, d: int) -> np.ndarray:
    factors = np.random.default_rng(0).normal(size=(n, d, d))
    return factors @ factors.transpose(0, 2, 1) + 0.1 * np.eye(d)


def image(matrices: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.einsum("nij,nj->ni", matrices, rows)


def test_the_last_pair_is_met() -> None:
    hessians, b = quadratics(5, 3), np.tile(np.eye(3), (5, 1, 1))
    x = np.zeros((5, 3))
    for step in np.random.default_rng(1).normal(size=(4, 5, 3)):
        b, x = updated(b, x, x + step, image(hessians, step)), x + step
        if (np.einsum("nd,nd->n", step, image(hessians, step)) > 0).all():
            np.testing.assert_allclose(image(b, step), image(hessians, step), rtol=1e-9)
    assert np.linalg.eigvalsh(b).min() > 0


def test_steps_along_conjugate_directions_find_the_hessian() -> None:
    (hessian,) = quadratics(1, 4)
    values, vectors = np.linalg.eigh(hessian)
    b, x = 7.0 * np.eye(4)[None], np.ones((1, 4))
    for direction, curvature in zip(vectors.T, values, strict=True):
        step = 0.1 * direction[None]
        b, x = updated(b, x, x + step, curvature * step), x + step
    np.testing.assert_allclose(b[0], hessian, atol=1e-9)


def test_it_stays_positive_definite_without_curvature_or_with_a_wrong_sign() -> None:
    b, x, step = np.tile(2.0 * np.eye(2), (3, 1, 1)), np.ones((3, 2)), np.tile([[1.0, 1.0]], (3, 1))
    y = np.array([[0.0, 0.0], [-5.0, -5.0], [1e-9, 0.0]])
    for _ in range(5):
        b, x = updated(b, x, x + step, y), x + step
    assert np.linalg.eigvalsh(b).min() > 0
    assert image(b, step)[0] @ step[0] < 0.01 * 2 * 2, "a fifth of the curvature is left each time"


def test_who_did_not_move_keeps_the_own_approximation() -> None:
    b, x = quadratics(2, 3), np.ones((2, 3))
    moved = updated(b, x, x + np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), np.array([[1e-17, 0.0, 0.0], [2.0, 1.0, 0.0]]))
    np.testing.assert_array_equal(moved[0], b[0])
    assert not np.array_equal(moved[1], b[1])
