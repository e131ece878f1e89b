"""The Newton step of `ssnal`: (H + B' P B) step = -r, with a block for each user and each edge.

Few unknowns are eliminated. Others take conjugate gradients with the blocks of the diagonal as preconditioner. Where that is slow, users
who are joined also move as one point: their edges are as stiff as sigma is large, which blocks of single users do not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import bsr_matrix, csc_matrix

from coterie.arrays import Array, Indices
from coterie_server.maths.clusters import Mask
from coterie_server.maths.stacked import dot, each, sums_over

if TYPE_CHECKING:
    from coterie_server.maths.ssnal import Graph

_FORCING, _CG_LIMIT = 0.05, 500  # of conjugate gradients: the share of the residual that they may leave, and their most steps
_DIRECT = 96  # unknowns of a Newton step that are eliminated at once; LAPACK computes so few without threads
_PATIENCE, ELIMINATED = 50, 1024  # conjugate gradients after which at most so many unknowns are eliminated, and more get a second level
_BLOCK = 64  # rows of an elimination


def newton_step(graph: Graph, hessians: Array, edges: Array, r: Array, inside: Mask) -> Array:
    """Minus the inverse of H + B' edges B times r (n, d). Edges (m, d, d) are the blocks; those inside their balls (m,) join their ends."""
    n, d = r.shape
    if n * d <= _DIRECT:
        return np.asarray(np.linalg.solve(_dense(graph, hessians, edges), -r.ravel()).reshape(n, d))
    diagonal = hessians + (graph.touching @ edges.reshape(graph.m, d * d)).reshape(n, d, d)
    source, columns, begins = graph.pattern
    blocks = np.concatenate([-edges, diagonal]).take(source, axis=0)
    matrix = bsr_matrix((blocks, columns, begins), shape=(n * d, n * d))
    inverses = np.linalg.inv(diagonal)
    step, rest, joined_users = np.zeros((n, d)), -r, None
    direction = preconditioned = each(inverses, rest)
    square = dot(rest, preconditioned)
    wanted = _FORCING**2 * square
    for number in range(_CG_LIMIT):
        if square <= wanted:
            break
        if number == _PATIENCE and n * d <= ELIMINATED:
            return _eliminated(_dense(graph, hessians, edges), -r.ravel()).reshape(n, d)
        if number == _PATIENCE:
            joined_users = _JoinedUsers.of(graph, hessians, edges, inside)
            direction = preconditioned = each(inverses, rest) + joined_users.moved(rest)
            square, wanted = dot(rest, preconditioned), _FORCING**2 * dot(r, each(inverses, r) + joined_users.moved(r))
        image = (matrix @ direction.ravel()).reshape(n, d)
        length = square / dot(direction, image)
        step, rest = step + length * direction, rest - length * image
        preconditioned = each(inverses, rest)
        if joined_users is not None:
            preconditioned += joined_users.moved(rest)
        before, square = square, dot(rest, preconditioned)
        direction = preconditioned + square / before * direction
    return step


@dataclass(frozen=True)
class _JoinedUsers:
    """The second level of the preconditioner."""

    sums: csc_matrix  # (k, n) over the users of each component
    parts: Indices  # (n,) the component of each user
    inverses: Array  # (k, d, d) of the components' blocks, 0 for single users

    @staticmethod
    def of(graph: Graph, hessians: Array, edges: Array, inside: Mask) -> _JoinedUsers:
        n, d, _ = hessians.shape
        parts = graph.components(inside)
        sums = sums_over(parts, int(parts.max()) + 1)
        leaving = np.where((parts[graph.first] != parts[graph.second])[:, None], edges.reshape(graph.m, d * d), 0.0)
        inverses = np.linalg.inv((sums @ (hessians.reshape(n, d * d) + graph.touching @ leaving)).reshape(-1, d, d))
        inverses[np.bincount(parts) == 1] = 0.0
        return _JoinedUsers(sums, parts, inverses)

    def moved(self, rest: Array) -> Array:
        """(n, d): the step of each user's component."""
        return each(self.inverses, self.sums @ rest)[self.parts]


def _dense(graph: Graph, hessians: Array, edges: Array) -> Array:
    """H + B' edges B as one matrix (n d, n d)."""
    n, d, _ = hessians.shape
    matrix, everyone = np.zeros((n, n, d, d)), np.arange(n)
    matrix[graph.first, graph.second] = matrix[graph.second, graph.first] = -edges
    matrix[everyone, everyone] = hessians - matrix.sum(axis=1)
    return matrix.transpose(0, 2, 1, 3).reshape(n * d, n * d)


def _eliminated(matrix: Array, right: Array) -> Array:
    """The solution of a positive definite system by blocks, all of one size, so that the order of sums does not depend on threads."""
    n, size = len(right), -(-len(right) // _BLOCK) * _BLOCK
    a = np.eye(size, size + _BLOCK)  # the last block has the right side in its first column
    a[:n, :n], a[:n, size] = matrix, right
    for begin in range(0, size, _BLOCK):
        end = begin + _BLOCK
        a[begin:end, end:] = np.linalg.solve(a[begin:end, begin:end], a[begin:end, end:])
        a[end:, end:] -= a[end:, begin:end] @ a[begin:end, end:]
    x = a[:, size].copy()
    for begin in range(size - _BLOCK, -1, -_BLOCK):
        end = begin + _BLOCK
        x[begin:end] -= np.einsum("ij,j->i", a[begin:end, end:size], x[end:])
    return x[:n]
