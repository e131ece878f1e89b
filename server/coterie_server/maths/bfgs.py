"""Approximations of users' Hessians from differences of their gradients: BFGS with Powell's damping (Nocedal and Wright 2006, 18.2).

Each B_i stays positive definite whatever the pairs are. A user who did not move keeps its own.
"""

from __future__ import annotations

import numpy as np

from coterie.arrays import Array

_DAMPED = 0.2  # the least share of the curvature along a step that one update leaves
_MOVED = 1e-9  # of the models' lengths: below it a difference of gradients is rounding


def updated(b: Array, before: Array, after: Array, y: Array) -> Array:
    """B (n, d, d) after steps from `before` to `after` (n, d), along which the gradients changed by y (n, d).

    A first step finds a multiple of the identity, and replaces it by the multiple that suits the pair.
    """
    s = after - before
    has_moved = _norms(s) > _MOVED * (_norms(before) + _norms(after))
    along = np.einsum("nd,nd->n", s, y)
    is_first = has_moved & (along > 0) & _is_multiple(b)
    scale = np.einsum("nd,nd->n", y, y) / np.where(is_first, along, 1.0)
    b = np.where(is_first[:, None, None], scale[:, None, None] * np.eye(s.shape[1]), b)
    image = np.einsum("nij,nj->ni", b, s)
    curvature = np.einsum("nd,nd->n", s, image)
    has_moved &= curvature > 0
    missing = np.where(has_moved & (along < _DAMPED * curvature), curvature - along, 1.0)
    share = np.where(along < _DAMPED * curvature, (1 - _DAMPED) * curvature / missing, 1.0)[:, None]
    damped = share * y + (1 - share) * image
    length = np.where(has_moved, np.einsum("nd,nd->n", s, damped), 1.0)
    outer = damped[:, :, None] * damped[:, None, :] / length[:, None, None]
    lost = image[:, :, None] * image[:, None, :] / np.where(has_moved, curvature, 1.0)[:, None, None]
    return np.asarray(np.where(has_moved[:, None, None], b - lost + outer, b))


def _is_multiple(b: Array) -> Array:
    """Whether each is a multiple of the identity."""
    return np.asarray((b == b[:, :1, :1] * np.eye(b.shape[1])).all(axis=(1, 2)))


def _norms(rows: Array) -> Array:
    return np.asarray(np.linalg.norm(rows, axis=1))
