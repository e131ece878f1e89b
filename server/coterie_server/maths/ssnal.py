"""Sums of norms on a graph: convex quadratics of users, and distances between the models of neighbours.

    minimise  sum_i [ x_i' H_i x_i / 2 - c_i' x_i ]  +  LAM sum_{(i,j) in E} w_ij |x_i - x_j|_2

With B x the differences along the edges and t = LAM w, the dual has a z_ij with |z_ij| <= t_ij for each edge, and B'z = c - H x at the
solution. Sun, Toh and Yuan (2021, JMLR 22(9)) solve the dual by an augmented Lagrangian method (section 4.1). Its inner problem

    phi(x) = sum_i f_i(x_i) + a Moreau envelope of the norms,    grad phi(x) = H x - c + B' Proj(z + sigma B x)

is solved by a semismooth Newton method (section 4.2) with the generalised Hessian H + sigma B' P B, where P is the derivative of the
projection onto the balls. Conjugate gradients solve each Newton step, with the blocks of the diagonal as preconditioner.

The projected z is feasible at every step. So with r = H x - c + B'z the duality gap is known at every step too, without a difference of
large numbers:

    gap = r' H^-1 r / 2 + sum_(i,j) [ t_ij |x_i - x_j| - z_ij' (x_i - x_j) ]

Users who are connected by edges with |z + sigma B x| <= t are joined: one point for all of them has the smaller gap near the solution.
Sums and products here do not depend on the number of threads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.sparse import csc_matrix, csr_matrix, diags_array
from scipy.sparse.csgraph import connected_components

from coterie.arrays import Array, Indices
from coterie_server.maths.clusters import Mask, canonical
from coterie_server.maths.newton_system import ELIMINATED, newton_step
from coterie_server.maths.stacked import dot, each, row_norms, sums_over

_SIGMA = 100.0  # the first sigma, in units of the mean curvature over the mean number of neighbours
_GROWTH, _LARGEST = 3.0, 1e7  # of sigma from one multiplier step to the next, and in all
_INNER = 0.03  # the share of the gap that an inner problem may leave in its gradient
_DAMPING = 1e-5  # the first one after a short step, in units of sigma times the number of neighbours
_TOGETHER = 1e-9  # of the longest x_i - x_j: users so near may be one cluster in the end
_INNER_LIMIT = 50  # Newton steps of one inner problem
_IDLE = 8  # multiplier steps in a row without a smaller gap, after which rounding is taken to forbid one
_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True)
class Graph:
    """Edges between n users, each pair once, first < second, with positive weights."""

    n: int
    first: Indices  # (m,)
    second: Indices  # (m,)
    weights: Array  # (m,)

    @staticmethod
    def of(n: int, first: Indices, second: Indices, weights: Array) -> Graph:
        """The graph of edges in any order; weights of the same pair are added, and edges without weight are left out."""
        low, high = np.minimum(first, second).astype(np.int64), np.maximum(first, second).astype(np.int64)
        positive = weights > 0
        keys, place = np.unique((low * n + high)[positive], return_inverse=True)
        return Graph(n, keys // n, keys % n, np.bincount(place, weights[positive], len(keys)).astype(float))

    @staticmethod
    def complete(n: int) -> Graph:
        """All pairs, with weight 1."""
        first, second = np.triu_indices(n, 1)
        return Graph(n, first, second, np.ones(len(first)))

    @property
    def m(self) -> int:
        return len(self.first)

    @cached_property
    def mark(self) -> int:
        """A number that another graph hardly has: edges and weights in 63 bits."""
        data = b"".join(np.ascontiguousarray(part).tobytes() for part in (self.first, self.second, self.weights))
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 1

    def apart(self, x: Array) -> Array:
        """B x (m, d): x_i - x_j for each edge."""
        return np.asarray(x.take(self.first, axis=0) - x.take(self.second, axis=0))

    def pulled(self, z: Array) -> Array:
        """B'z (n, d): for each user the sum of the z of its edges, with a minus where it is the second end."""
        return np.asarray(self.sums @ z)

    @cached_property
    def sums(self) -> csc_matrix:
        """B' (n, m)."""
        return differences(self.n, self.first, self.second).T

    @cached_property
    def weighted_sums(self) -> csr_matrix:
        """B'W (n, m)."""
        return (self.sums @ diags_array(self.weights)).tocsr()

    @cached_property
    def adjacency(self) -> csr_matrix:
        """The weights (n, n), symmetric."""
        ends = np.concatenate([self.first, self.second]), np.concatenate([self.second, self.first])
        return csr_matrix((np.concatenate([self.weights, self.weights]), ends), shape=(self.n, self.n))

    @cached_property
    def degrees(self) -> Array:
        """(n,) the sum of each user's weights."""
        return np.asarray(np.bincount(self.first, self.weights, self.n) + np.bincount(self.second, self.weights, self.n))

    @cached_property
    def counts(self) -> Indices:
        """(n,) the number of each user's edges."""
        return np.bincount(self.first, minlength=self.n) + np.bincount(self.second, minlength=self.n)

    @cached_property
    def touching(self) -> csc_matrix:
        """The absolute values of B' (n, m)."""
        return abs(self.sums)

    @cached_property
    def pattern(self) -> tuple[Indices, Indices, Indices]:
        """Of the Newton matrix in blocks: the source of each block (edges, edges again, users), its column, and where rows begin."""
        edges, users = np.arange(self.m), np.arange(self.n)
        rows, columns = np.concatenate([self.first, self.second, users]), np.concatenate([self.second, self.first, users])
        order = np.lexsort((columns, rows))
        begins = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=self.n))])
        return np.concatenate([edges, edges, self.m + users])[order], columns[order], begins

    def are_near(self, x: Array) -> Mask:
        """(m,) edges whose ends are as near as users who come together slowly."""
        lengths = row_norms(self.apart(x))
        return np.asarray(lengths <= _TOGETHER * lengths.max(initial=0.0))

    def together(self, x: Array) -> Indices:
        """Component of each user (n,) along the edges whose ends are near."""
        return self.components(self.are_near(x))

    def within(self, labels: Indices) -> Indices:
        """Component of each user (n,), numbered by the first member, along the edges whose ends have the same label (n,)."""
        if self.m == self.n * (self.n - 1) // 2:
            return canonical(labels)
        return self.components(labels[self.first] == labels[self.second])

    def components(self, kept: Mask | None = None) -> Indices:
        """Connected component of each user (n,), numbered by the first member, along all edges or the marked ones (m,)."""
        first, second = (self.first, self.second) if kept is None else (self.first[kept], self.second[kept])
        graph = csr_matrix((np.ones(len(first)), (first, second)), shape=(self.n, self.n))
        return np.asarray(connected_components(graph, directed=False)[1], np.int64)


@dataclass(frozen=True)
class Minimum:
    """A minimiser, and the dual point that proves how good it is."""

    x: Array  # (n, d)
    z: Array  # (m, d), |z| <= LAM w
    clusters: Indices  # (n,) users with one model, numbered by the first member
    gap: float  # the duality gap, at least the distance of the value from the minimum
    objective: float  # the value, over the sum of the minima of the quadratics
    n_newton: int


@dataclass(frozen=True)
class Quadratics:
    """x_i' H_i x_i / 2 - c_i' x_i for each user."""

    hessians: Array  # (n, d, d)
    linear: Array  # (n, d)
    inverses: Array  # (n, d, d)

    @staticmethod
    def of(hessians: Array, linear: Array) -> Quadratics:
        """With the inverses."""
        return Quadratics(hessians, linear, np.asarray(np.linalg.inv(hessians), float))

    def slopes(self, x: Array) -> Array:
        return each(self.hessians, x) - self.linear

    def half_square(self, r: Array) -> float:
        """r' H^-1 r / 2."""
        return dot(r, each(self.inverses, r)) / 2


def minimise(
    graph: Graph,
    hessians: Array,
    linear: Array,
    penalty: float,
    x: Array,
    z: Array | None = None,
    *,
    relative: float = 1e-6,
    absolute: float = 0.0,
    limit: int = 1000,
) -> Minimum:
    """The minimiser from a start x (n, d), and z (m, d) from a problem nearby, for positive definite H (n, d, d) and c (n, d).

    It ends when the gap is at most `relative` of the objective plus `absolute`, or after `limit` Newton steps, or where rounding stops it:
    the caller looks at `gap`.
    """
    quadratics = Quadratics.of(hessians, linear)
    radii = penalty * graph.weights
    n, d = x.shape
    if graph.m == 0 or penalty == 0:
        x = each(quadratics.inverses, linear)
        return Minimum(x, np.zeros((graph.m, d)), np.arange(n), 0.0, 0.0, 0)
    z = np.zeros((graph.m, d)) if z is None else cut(z, radii)[0]
    unit = float(np.einsum("nii->", hessians)) / (n * d) / (2 * graph.m / n)
    sigma, share, n_newton, n_idle, best, last = _SIGMA * unit, 1.0, 0, 0, None, None
    while True:
        x, z, inside, used, was_good = _inner(graph, quadratics, radii, x, z, sigma, (share * relative, share * absolute), limit - n_newton)
        n_newton += used
        found = joined(graph, quadratics, radii, x, z, inside, n_newton)
        if was_good and found.gap > relative * found.objective + absolute:
            if n * d <= ELIMINATED:
                last = _as_it_is(graph, quadratics, radii, x, found)
                found = found if graph.together(last.x).max() < found.clusters.max() else min(found, last, key=lambda one: one.gap)
            else:  # among so many, some users come together slowly, and edges between them that are nearly 0 would turn when others join
                near = graph.components(inside | graph.are_near(x))
                found = min(found, joined(graph, quadratics, radii, x, z, inside, n_newton, near), key=lambda one: one.gap)
        n_idle = n_idle + 1 if best is not None and found.gap > 0.9 * best.gap else 0
        best = found if best is None or found.gap < best.gap else best
        if best.gap <= relative * best.objective + absolute:
            return best
        if n_newton >= limit or n_idle == _IDLE:
            return best if last is None else replace(min(best, last, key=lambda one: one.gap), n_newton=n_newton)
        if was_good:  # before users were joined
            share /= 10
        else:
            sigma = min(sigma * _GROWTH, _LARGEST * unit)


def gap(graph: Graph, hessians: Array, slopes: Array, penalty: float, x: Array, z: Array) -> float:
    """The duality gap at x (n, d) and z (m, d) of quadratics with these slopes (n, d) at x."""
    r = slopes + graph.pulled(z)
    return dot(r, each(np.asarray(np.linalg.inv(hessians), float), r)) / 2 + missed(graph, penalty, x, z)


def missed(graph: Graph, penalty: float, x: Array, z: Array) -> float:
    """The part of a duality gap that is the ties': the sum of t |x_i - x_j| - z_ij.(x_i - x_j)."""
    radii = penalty * graph.weights
    return _mismatch(graph.apart(x), z, radii, row_norms(z) < radii * (1 - 1e-12))[0]


def _inner(
    graph: Graph,
    quadratics: Quadratics,
    radii: Array,
    x: Array,
    z: Array,
    sigma: float,
    wanted: tuple[float, float],
    limit: int,
) -> tuple[Array, Array, Mask, int, bool]:
    """Semismooth Newton on phi: x, the next z, the edges whose z is inside its ball, the steps, and whether the gap is as wanted."""
    n_steps, damping, identity = 0, 0.0, np.eye(x.shape[1])
    while True:
        u = graph.apart(x)
        v = z + sigma * u
        projected, norms, inside = cut(v, radii)
        slopes = quadratics.slopes(x)
        r = slopes + graph.pulled(projected)
        rest = quadratics.half_square(r)
        apart, penalties = _mismatch(u, projected, radii, inside)
        objective = quadratics.half_square(slopes) + penalties
        is_good = rest + apart <= wanted[0] * objective + wanted[1]
        if is_good or (n_steps > 0 and rest <= _INNER * apart) or n_steps >= min(limit, _INNER_LIMIT):
            return x, projected, inside, n_steps, bool(is_good)
        shares = np.where(inside, 1.0, radii) / np.where(inside, 1.0, norms)
        directions = v / np.where(inside, 1.0, norms)[:, None]
        blocks = np.einsum("md,me->mde", np.where(inside, 0.0, -shares)[:, None] * directions, directions)
        blocks.reshape(graph.m, -1)[:, :: x.shape[1] + 1] += shares[:, None]
        blocks *= sigma
        damped = quadratics.hessians + (damping * sigma * graph.counts)[:, None, None] * identity if damping else quadratics.hessians
        step = newton_step(graph, damped, blocks, r, inside)
        length = _line_search(graph, quadratics, radii, (v, slopes, r), step, sigma)
        n_steps += 1
        if length == 0.0:
            return x, projected, inside, n_steps, False
        x = x + length * step
        damping = _next_damping(damping, length)


def _next_damping(damping: float, length: float) -> float:
    """More after a short step, less after a full one: users with little curvature who are joined to nobody have long steps."""
    if length < 0.2:
        return max(_DAMPING, 10 * damping)
    if length < 1.0:
        return damping
    return damping / 4 if damping > _DAMPING else 0.0


def _line_search(graph: Graph, quadratics: Quadratics, radii: Array, here: tuple[Array, Array, Array], step: Array, sigma: float) -> float:
    """The first of 1, 1/2, ... for which phi falls enough (Armijo); 0 where rounding leaves none. Differences are taken edge by edge."""
    v, slopes, r = here
    along, curvature, slope = dot(slopes, step), dot(step, each(quadratics.hessians, step)) / 2, dot(r, step)
    u, before = sigma * (graph.apart(step)), envelopes(v, radii) / sigma
    rounding = 1e-15 * (abs(along) + curvature + float(before.sum()))
    length = 1.0
    while length > 1e-10:
        change = length * along + length**2 * curvature + float((envelopes(v + length * u, radii) / sigma - before).sum())
        if change <= 1e-4 * length * slope + rounding:
            return length
        length /= 2
    return 0.0


def joined(
    graph: Graph, quadratics: Quadratics, radii: Array, x: Array, z: Array, inside: Mask, n_newton: int, clusters: Indices | None = None
) -> Minimum:
    """The point with one model for all who are joined, along edges inside or as told: the minimiser of their quadratics, given z."""
    clusters = graph.components(inside) if clusters is None else clusters
    n, d = x.shape
    k = int(clusters.max()) + 1
    collect = sums_over(clusters, k)
    forces = each(quadratics.hessians, x) - quadratics.slopes(x) - graph.pulled(z)
    hessians = (collect @ quadratics.hessians.reshape(n, d * d)).reshape(k, d, d)
    x = each(np.linalg.inv(hessians), collect @ forces)[clusters]
    u, slopes = graph.apart(x), quadratics.slopes(x)
    apart, penalties = _mismatch(u, z, radii, inside)
    gap = quadratics.half_square(slopes + graph.pulled(z)) + apart
    return Minimum(x, z, clusters, gap, quadratics.half_square(slopes) + penalties, n_newton)


def _as_it_is(graph: Graph, quadratics: Quadratics, radii: Array, x: Array, found: Minimum) -> Minimum:
    """The same clusters, each with the mean of its users' x. Where users have little curvature a small force moves the minimiser far."""
    n, d = x.shape
    k = int(found.clusters.max()) + 1
    collect = sums_over(found.clusters, k)
    hessians = (collect @ quadratics.hessians.reshape(n, d * d)).reshape(k, d, d)
    x = x if k == n else each(np.linalg.inv(hessians), collect @ each(quadratics.hessians, x))[found.clusters]
    slopes = quadratics.slopes(x)
    apart, penalties = _mismatch(graph.apart(x), found.z, radii, row_norms(found.z) < radii * (1 - 1e-12))
    gap = quadratics.half_square(slopes + graph.pulled(found.z)) + apart
    return Minimum(x, found.z, found.clusters, gap, quadratics.half_square(slopes) + penalties, found.n_newton)


def _mismatch(u: Array, z: Array, radii: Array, inside: Mask) -> tuple[float, float]:
    """The sum of t |u| - z'u over the edges, without cancellation: |z| is t where z is not inside. And the sum of t |u|."""
    lengths = row_norms(u)
    turned = radii[:, None] * u / np.where(lengths > 0, lengths, 1.0)[:, None] - z
    missing = np.where(inside, radii**2 - np.einsum("md,md->m", z, z), 0.0)
    shares = lengths * (np.einsum("md,md->m", turned, turned) + np.maximum(missing, 0.0)) / (2 * radii)
    return float(shares.sum()), float((radii * lengths).sum())


def cut(v: Array, radii: Array) -> tuple[Array, Array, Mask]:
    """v (m, d) projected onto the balls, its norms, and whether it was inside."""
    norms = row_norms(v)
    inside = norms <= radii
    return v * (np.where(inside, 1.0, radii) / np.where(inside, 1.0, norms))[:, None], norms, inside


def envelopes(v: Array, radii: Array) -> Array:
    """(m,) sigma times the Moreau envelopes, up to what does not depend on x."""
    norms = row_norms(v)
    cut = np.minimum(norms, radii)
    return cut * (norms - cut / 2)


def differences(n: int, first: Indices, second: Indices) -> csr_matrix:
    """B (m, n): a row for each edge, 1 at its first end and -1 at its second."""
    m = len(first)
    return csr_matrix((np.tile([1.0, -1.0], m), np.stack([first, second], axis=1).ravel(), np.arange(0, 2 * m + 1, 2)), shape=(m, n))


def equal_rows(rows: Array) -> Indices:
    """(n,) labels, the same for equal rows."""
    return np.unique(rows, axis=0, return_inverse=True)[1].astype(np.int64).reshape(-1)
