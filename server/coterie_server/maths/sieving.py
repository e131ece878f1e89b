"""Sums of norms on graphs with many edges for each user: groups of users first, then the proof that the groups may stay together.

On such graphs nearly all edges join users of one cluster, and a solver of all edges spends its time on them. Adaptive sieving (Yuan,
Chang, Sun, Toh, 2022, SIAM Journal on Optimization 32(3)) solves a reduced problem and looks at the optimality conditions of what was
left out. Here:

1. Each group of users becomes one point; edges between two groups become one edge with the sum of their weights.
2. `ssnal` solves this problem, which may join groups to clusters. At its solution, each user i needs the force
   g_i = c_i - H_i x_i - (B'z)_i from the edges inside its cluster.
3. The groups were right if the edges can hold the users: if there are z with B'z = g and |z| <= t on the edges inside clusters. They are
   found by minimising, over potentials y, with a small e > 0,

       sum_(i,j) env(z0_ij + y_i - y_j) - g'y + e |y|^2 / 2,    with the gradient B' Proj(z0 + B y) - g + e y.

   What is left of g, namely e y, is nearly constant on the parts that a cluster falls into.
4. A cluster that cannot be held is split by what is left of g, and all begins again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from scipy.sparse import csc_matrix, csr_matrix

from coterie.arrays import Array, Indices
from coterie_server.maths import ssnal
from coterie_server.maths.clusters import Mask
from coterie_server.maths.ssnal import Graph, Minimum, Quadratics, cut, differences, envelopes, equal_rows
from coterie_server.maths.stacked import dot, each, sums_over

_DENSE = 8  # a graph is dense from n^2 / 8 edges
_SMALLEST = 32  # users: smaller problems are solved at once
_FEWER = 3  # there must be so many users for each group
_ROUNDS = 6  # of solving and splitting
_PIECES = 12  # that a cluster is split into at once
_LEAVING = 0.05  # of a cluster's users: so few who are too far leave it alone
_NEAR = 0.2  # the radius of a piece, in units of the largest length of a force
_SOFTNESS = (1e-2, 1e-4, 1e-6, 1e-8)  # e in each multiplier step, in units of the mean number of neighbours
_HOLD_STEPS, _CG_STEPS = 12, 60  # Newton steps of one of them, and conjugate gradients of each
_FORCING = 0.03  # the share of the residual that conjugate gradients may leave
_SHARE = 0.5  # of the wanted gap, that the reduced problem may leave


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
    """What `ssnal.minimise` finds, with the same arguments; on dense graphs with few clusters much sooner."""
    wanted = relative, absolute
    if graph.m < graph.n**2 / _DENSE or graph.n < _SMALLEST or penalty == 0:
        return ssnal.minimise(graph, hessians, linear, penalty, x, z, relative=relative, absolute=absolute, limit=limit)
    quadratics = Quadratics.of(hessians, linear)
    begin = np.zeros((graph.m, x.shape[1])) if z is None else z.copy()
    first = _sieved(quadratics, graph, penalty, _first_groups(graph, x, z), x, begin, wanted, limit)
    if first is not None:
        if _is_good(first, wanted) or first.n_newton >= limit:
            return first
        x, z = first.x, first.z
    n_before = 0 if first is None else first.n_newton
    found = ssnal.minimise(graph, hessians, linear, penalty, x, z, relative=relative, absolute=absolute, limit=limit - n_before)
    found = replace(found, n_newton=found.n_newton + n_before)
    groups = graph.together(found.x)
    if groups.max() < found.clusters.max() and found.n_newton < limit:  # where fusions are just due users come together slowly
        last = _sieved(quadratics, graph, penalty, groups, found.x, found.z.copy(), wanted, limit - found.n_newton)
        if last is not None:
            n_newton = found.n_newton + last.n_newton
            found = replace(last if _is_good(last, wanted) or last.gap < found.gap else found, n_newton=n_newton)
    return found


def _is_good(found: Minimum, wanted: tuple[float, float]) -> bool:
    return found.gap <= wanted[0] * found.objective + wanted[1]


def _first_groups(graph: Graph, x: Array, z: Array | None) -> Indices:
    """(n,) users with one model at the start; without a dual, the parts of the graph."""
    if z is None or not z.any():
        return graph.components()
    return equal_rows(x)


def _sieved(
    quadratics: Quadratics, graph: Graph, penalty: float, groups: Indices, x: Array, z: Array, wanted: tuple[float, float], limit: int
) -> Minimum | None:
    """The last round's point, or None where there were too many groups for a round. It changes z."""
    radii, n_newton, last = penalty * graph.weights, 0, None
    for _ in range(_ROUNDS):
        if (groups.max() + 1) * _FEWER > graph.n or n_newton >= limit:
            break
        clusters, x, z, n_steps = _reduced(quadratics, graph, penalty, groups, x, z, wanted, limit - n_newton)
        edges = _Edges(graph, radii, clusters)
        slopes = quadratics.slopes(x)
        forces = -slopes if edges.are_all else -slopes - graph.pulled(np.where(edges.inside[:, None], 0.0, z))
        forces = _balanced(quadratics, forces, clusters)
        allowed = wanted[0] * quadratics.half_square(slopes) + wanted[1]
        n_newton += n_steps
        begin = cut(z[edges.inside], edges.radii)[0]
        z[edges.inside], rest, n_steps = _held(quadratics, edges, begin, forces, allowed / 8, limit - n_newton)
        n_newton += n_steps
        last = x, z, edges.inside, n_newton, graph.within(clusters)
        energies = np.einsum("nd,nd->n", rest, each(quadratics.inverses, rest)) / 2
        if energies.sum() <= allowed / 4:
            break
        before, groups = groups, _split(groups, clusters, rest, energies, edges.are_too_far(forces), allowed)
        if groups.max() == before.max():
            break
    return None if last is None else ssnal.joined(graph, quadratics, radii, *last)


def _reduced(
    quadratics: Quadratics, graph: Graph, penalty: float, groups: Indices, x: Array, z: Array, wanted: tuple[float, float], limit: int
) -> tuple[Indices, Array, Array, int]:
    """Steps 1 and 2: the clusters of users (n,), their x and z, and the Newton steps. z inside groups stays as it was."""
    (n, d), k = x.shape, int(groups.max()) + 1
    collect = sums_over(groups, k)
    hessians = (collect @ quadratics.hessians.reshape(n, d * d)).reshape(k, d, d)
    if k == 1:
        return groups, each(np.asarray(np.linalg.inv(hessians)), collect @ quadratics.linear)[groups], z, 0
    one, other = groups[graph.first], groups[graph.second]
    sign = np.where(one < other, 1.0, -1.0)
    keys = np.minimum(one, other) * k + np.maximum(one, other)
    weights = np.asarray(np.bincount(keys, graph.weights, k * k), float)
    weights[:: k + 1] = 0.0
    pairs = np.flatnonzero(weights)
    between = Graph(k, pairs // k, pairs % k, weights[pairs])
    duals = np.stack([np.bincount(keys, sign * z[:, axis], k * k)[pairs] for axis in range(d)], axis=1).astype(float)
    start = (collect @ x) / np.bincount(groups)[:, None]
    relative, absolute = _SHARE * wanted[0], _SHARE * wanted[1]
    found = ssnal.minimise(
        between, hessians, collect @ quadratics.linear, penalty, start, duals, relative=relative, absolute=absolute, limit=limit
    )
    shares = np.zeros((k * k, d))
    shares[pairs] = found.z / between.weights[:, None]
    z = np.where((one == other)[:, None], z, (sign * graph.weights)[:, None] * shares[keys])
    return found.clusters[groups], found.x[groups], z, found.n_newton


def _balanced(quadratics: Quadratics, forces: Array, clusters: Indices) -> Array:
    """The forces (n, d) less what no edge inside a cluster can give: they sum to zero in each cluster, after a step of its point."""
    (n, d), k = forces.shape, int(clusters.max()) + 1
    collect = sums_over(clusters, k)
    hessians = (collect @ quadratics.hessians.reshape(n, d * d)).reshape(k, d, d)
    return forces - each(quadratics.hessians, each(np.asarray(np.linalg.inv(hessians)), collect @ forces)[clusters])


class _Edges:
    """The edges inside clusters, and what they do to users."""

    def __init__(self, graph: Graph, radii: Array, clusters: Indices) -> None:
        inside = self.inside = clusters[graph.first] == clusters[graph.second]
        self.first, self.second, self.radii, self.n = graph.first[inside], graph.second[inside], radii[inside], graph.n
        self.degrees = np.bincount(self.first, minlength=self.n) + np.bincount(self.second, minlength=self.n)
        self.most = np.bincount(self.first, self.radii, self.n) + np.bincount(self.second, self.radii, self.n)

    @property
    def are_all(self) -> bool:
        return len(self.first) == len(self.inside)

    def are_too_far(self, forces: Array) -> Mask:
        """Users (n,) with neighbours in their cluster for whom no z of the allowed lengths is enough."""
        return np.asarray((self.most > 0) & (np.square(forces).sum(axis=1) > self.most**2 * (1 + 1e-9)))

    @cached_property
    def sums(self) -> csc_matrix:
        """B' (n, m_inside)."""
        return differences(self.n, self.first, self.second).T

    @cached_property
    def laplacian(self) -> csr_matrix:
        """B'B (n, n)."""
        everyone, ones = np.arange(self.n), np.ones(len(self.first))
        ends = np.concatenate([self.first, self.second, everyone]), np.concatenate([self.second, self.first, everyone])
        return csr_matrix((np.concatenate([-ones, -ones, self.degrees]), ends), shape=(self.n, self.n))

    def apart(self, y: Array) -> Array:
        return np.asarray(y.take(self.first, axis=0) - y.take(self.second, axis=0))


def _held(quadratics: Quadratics, edges: _Edges, z: Array, forces: Array, allowed: float, limit: int) -> tuple[Array, Array, int]:
    """Step 3: z (m_inside, d), what it leaves of the forces (n, d), and the Newton steps."""
    if edges.are_too_far(forces).any():
        return z, forces, 0
    unit = max(float(edges.degrees.mean()), 1.0)
    n_steps, before, left_before, v = 0, np.inf, forces, z
    for softness in unit * np.array(_SOFTNESS):
        y = np.zeros_like(forces)
        for _ in range(_HOLD_STEPS):
            z, norms, inside = cut(v, edges.radii)
            left = forces - edges.sums @ z
            r = left - softness * y
            if dot(r, r) <= (0.3 * softness) ** 2 * dot(y, y) or quadratics.half_square(left) <= allowed or n_steps >= limit:
                break
            step = _potentials(edges, v, norms, inside, r, softness)
            n_steps += 1
            along, curvature, slope = softness * dot(y, step) - dot(forces, step), softness * dot(step, step) / 2, -dot(r, step)
            moved, here = edges.apart(step), envelopes(v, edges.radii)
            length = 1.0
            while length > 1e-6:
                change = length * along + length**2 * curvature + float((envelopes(v + length * moved, edges.radii) - here).sum())
                if change <= 1e-4 * length * slope:
                    break
                length /= 2
            else:
                break
            y, v = y + length * step, v + length * moved
        rest = quadratics.half_square(left)
        if rest > 0.1 * before:
            return z, left_before, n_steps  # they do not hold, and the softer step told better where they part
        before, left_before = rest, left
        if rest <= allowed or n_steps >= limit:
            break
    return z, left_before, n_steps


def _potentials(edges: _Edges, v: Array, norms: Array, inside: Mask, r: Array, softness: float) -> Array:
    """The Newton step (B'PB + e)^-1 r by conjugate gradients, with the blocks of the diagonal as preconditioner.

    P differs from I on the edges outside their balls alone.
    """
    outside = np.flatnonzero(~inside)
    count, d = len(outside), r.shape[1]
    apart = differences(edges.n, edges.first[outside], edges.second[outside])
    back = apart.T
    shares, directions = (edges.radii[outside] / norms[outside])[:, None], v[outside] / norms[outside][:, None]
    blocks = (shares * directions)[:, :, None] * directions[:, None, :]
    blocks.reshape(count, d * d)[:, :: d + 1] += 1 - shares
    touched = abs(back) @ blocks.reshape(count, d * d)
    diagonal = np.asarray((edges.degrees + softness)[:, None, None] * np.eye(d) - touched.reshape(-1, d, d))
    inverses = np.linalg.inv(diagonal)
    step, rest = np.zeros_like(r), r
    direction = preconditioned = each(inverses, rest)
    square = dot(rest, preconditioned)
    wanted = _FORCING**2 * square
    for _ in range(_CG_STEPS):
        if square <= wanted:
            break
        missing = each(blocks, apart @ direction)
        image = edges.laplacian @ direction - back @ missing + softness * direction
        length = square / dot(direction, image)
        step, rest = step + length * direction, rest - length * image
        preconditioned = each(inverses, rest)
        before, square = square, dot(rest, preconditioned)
        direction = preconditioned + square / before * direction
    return step


def _split(groups: Indices, clusters: Indices, rest: Array, energies: Array, too_far: Mask, allowed: float) -> Indices:
    """Step 4: clusters that are held are one group each. Groups of others are cut by the rest, and a few users leave them."""
    k = int(clusters.max()) + 1
    is_held = np.bincount(clusters, energies, k) <= allowed / (2 * k)
    kept = np.where(is_held[clusters], -1, groups)
    pieces = np.zeros_like(groups)
    for cluster in np.flatnonzero(~is_held):
        members = np.flatnonzero(clusters == cluster)
        leaving = members[too_far[members]]
        pieces[members] = _pieces(rest[members])
        if len(leaving) <= _LEAVING * len(members):
            pieces[leaving] = _PIECES + np.arange(len(leaving))
    return np.unique(np.stack([clusters, kept, pieces], axis=1), axis=0, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _pieces(rows: Array) -> Indices:
    """Each row with the nearest of some centres, each of which is the farthest from those before."""
    squares = np.square(rows).sum(axis=1)
    near, pieces = np.square(rows - rows[squares.argmax()]).sum(axis=1), np.zeros(len(rows), np.int64)
    for piece in range(1, _PIECES):
        far = near.argmax()
        if near[far] <= _NEAR**2 * squares.max():
            break
        distances = np.square(rows - rows[far]).sum(axis=1)
        is_nearer = distances < near
        pieces[is_nearer], near = piece, np.minimum(near, distances)
    return pieces
