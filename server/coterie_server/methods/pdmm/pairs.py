"""Arithmetic on one vector per pair of users, as PDMM needs it: storage, draws, and steps S3, S8 and S11 over whole rounds.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1 and its halved form. `half` storage keeps the pairs i < j in lexicographic
order, P = n(n-1)/2 of them, and z_ji = -z_ij, mu_ji = -mu_ij; `ordered` storage keeps (i, j) at i n + j, n^2 places, the diagonal
unused and zero. `on_graph` storage keeps the edges of a graph likewise, and m_ij = mu_ij / w_ij instead of mu_ij. Each edge has rho w_ij
and LAM w_ij. Then S3, S8 and S11 stay as they are for z and m. Only sums over a user's pairs have weights.
Arrays of pairs are component-major, (d, m), so that a vector's few components do not become the innermost loop.
Work goes in tiles that fit the cache, and sums are made in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist

from coterie.arrays import Array, Indices
from coterie.families.ties import Extent
from coterie.methods.pdmm import Constants
from coterie_server.maths.ssnal import Graph

_TILE_SCALARS = 12288  # of one array in a tile: six such arrays are in use at once and fit 600 kB
_SHORTEST_TILE = 256


@dataclass(frozen=True, eq=False)
class Layout:
    """Which users the m stored pairs belong to."""

    n: int
    first: Indices  # (m,) i
    second: Indices  # (m,) j
    copies: int  # how often an unordered pair is stored: 1 half, 2 ordered
    graph: Graph | None = None  # whose edges these are; None: all pairs, with weight 1

    @property
    def size(self) -> int:
        return len(self.first)

    @cached_property
    def extent(self) -> Extent:
        if self.graph is None:
            return Extent.complete(self.n)
        return Extent(self.n, self.size, float(self.graph.degrees.mean()), is_complete=False)

    @property
    def weights(self) -> Array | None:
        """(m,), None for 1."""
        return None if self.graph is None else self.graph.weights

    @property
    def total(self) -> float:
        """Of the weights of the unordered pairs."""
        return self.extent.n_pairs if self.graph is None else float(self.graph.weights.sum())

    @cached_property
    def degree(self) -> Array | float:
        """The sum of a user's weights, (n, 1), or N-1 for all."""
        return self.extent.degree if self.graph is None else self.graph.degrees[:, None]

    @property
    def loops(self) -> float:
        """The weight with which `gathered` counts a user itself."""
        return 1.0 if self.graph is None else 0.0

    @cached_property
    def scale(self) -> Array | float:
        """The root of each user's degree, (n, 1); of N where all have the same."""
        return np.sqrt(self.n) if self.graph is None else np.sqrt(np.maximum(self.graph.degrees, np.finfo(float).tiny))[:, None]

    @cached_property
    def roots(self) -> Array | float:
        """Those of the weights, (m,), or 1 for all."""
        return 1.0 if self.graph is None else np.sqrt(self.graph.weights)

    def damping(self, eta: float) -> Array | float:
        """eta_i."""
        return eta if self.graph is None else eta * self.degree

    def gathered(self, x: Array) -> Array:
        """sum_j w_ij x_j of each user (n, d), or (d,) the sum over everyone, which `loops` counts the user in."""
        return np.asarray(x.sum(axis=0) if self.graph is None else self.graph.adjacency @ x)

    @cached_property
    def starts(self) -> Indices:
        """Where the runs of equal `first` begin; only in half storage the last user has none."""
        return np.searchsorted(self.first, np.arange(self.n - 1 if self.copies == 1 else self.n))

    def place(self, i: Indices, j: Indices) -> Indices:
        """Where the pairs (i, j) are stored; half storage needs i < j."""
        return i * self.n + j if self.copies == 2 else i * self.n - i * (i + 1) // 2 + j - i - 1

    def directed(self, places: Indices) -> tuple[Indices, Indices, Indices, Array]:
        """Owner, partner, place and sign of the ordered pairs behind `places`, by owner and then by partner.

        Half storage stands for (i, j) with sign 1 and (j, i) with sign -1.
        """
        i, j = self.first[places], self.second[places]
        if self.copies == 2:
            return i, j, places, np.ones(len(places))
        owner, partner = np.concatenate([i, j]), np.concatenate([j, i])
        order = np.lexsort((partner, owner))
        sign = np.repeat([1.0, -1.0], len(places))
        return owner[order], partner[order], np.concatenate([places, places])[order], sign[order]


@lru_cache(maxsize=4)
def _second_of_each(layout: Layout, d: int) -> Indices:
    """(d m,) `second`, with n added for each component before."""
    return (layout.second + layout.n * np.arange(d)[:, None]).reshape(-1)


@lru_cache(maxsize=4)
def half(n: int) -> Layout:
    """The pairs i < j."""
    first, second = np.triu_indices(n, 1)
    return Layout(n, first.astype(np.int64), second.astype(np.int64), 1)


def on_graph(graph: Graph) -> Layout:
    """The edges of a graph."""
    return Layout(graph.n, graph.first, graph.second, 1, graph)


@lru_cache(maxsize=4)
def ordered(n: int) -> Layout:
    """All (i, j), numbered i n + j; `place` never gives the diagonal for i != j."""
    place = np.arange(n * n, dtype=np.int64)
    return Layout(n, place // n, place % n, 2)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The blocks of one round, ascending; None means all of them."""

    x: Indices | None  # users
    z: Indices | None  # places
    mu: Indices | None  # places


EVERYTHING = Chosen(None, None, None)


def draw_paired(layout: Layout, blocks: int, duals: int | None, random: np.random.Generator) -> Chosen:
    """Users and unordered pairs in the proportion `blocks` of all; `duals` ordered pairs for a draw of its own, None for the drawn pairs.

    Each of the n + P units (x_i, or z_ij with z_ji) is equally likely, so the expected number of blocks is `blocks`, up to rounding of the
    units.
    """
    n, pairs = layout.n, layout.size
    n_units = min(n + pairs, max(1, round(blocks / layout.extent.blocks * (n + pairs))))
    units = np.sort(random.choice(n + pairs, n_units, replace=False, shuffle=False))
    x, z = units[units < n], units[units >= n] - n
    if duals is None:
        return Chosen(x, z, z)
    n_duals = min(pairs, max(1, round(duals / 2)))
    return Chosen(x, z, np.sort(random.choice(pairs, n_duals, replace=False, shuffle=False)))


def draw_uniform(layout: Layout, blocks: int, duals: int | None, random: np.random.Generator) -> Chosen:
    """S1 and S8 as printed: `blocks` of the n^2 blocks, and `duals` of the n(n-1) ordered pairs (None: the pairs drawn in S1)."""
    n = layout.n
    units = np.sort(random.choice(n * n, blocks, replace=False, shuffle=False))
    x, z = units[units < n], _off_diagonal(units[units >= n] - n, n)
    if duals is None:
        return Chosen(x, z, z)
    return Chosen(x, z, _off_diagonal(np.sort(random.choice(n * (n - 1), duals, replace=False, shuffle=False)), n))


def _off_diagonal(rank: Indices, n: int) -> Indices:
    """Ordered storage's place of the pair with this lexicographic rank among the n(n-1)."""
    i, k = rank // (n - 1), rank % (n - 1)
    return np.asarray(i * n + k + (k >= i))


def zeros(layout: Layout, d: int) -> Array:
    return np.zeros((d, layout.size))


def differences(columns: Array, layout: Layout, places: Indices | slice = slice(None)) -> Array:
    """x_i - x_j (d, m) for models as `columns` (d, n)."""
    # No place is out of range; numpy is faster in a mode without the check.
    difference = columns.take(layout.first[places], axis=1, mode="clip")
    difference -= columns.take(layout.second[places], axis=1, mode="clip")
    return difference


def shrink(w: Array, threshold: float) -> Array:
    """Block soft threshold of each column in place: the prox of `threshold` |.|, the minimizer in (17)."""
    with np.errstate(divide="ignore"):
        w *= np.maximum(0.0, 1.0 - threshold / lengths(w))  # a norm of 0 gives -inf, hence 0
    return w


def sums(layout: Layout, values: Array) -> Array:
    """(n, d): for user i the weighted sum over its pairs, (i, j) counted with sign 1 and (j, i) with -1. `values` (d, m)."""
    n, d = layout.n, len(values)
    if layout.graph is not None:
        return np.stack([layout.graph.weighted_sums @ component for component in values], axis=1)
    if values.size <= _TILE_SCALARS:  # one call for all components
        of_second = np.bincount(_second_of_each(layout, d), values.reshape(-1), d * n).reshape(d, n)
    else:
        of_second = np.stack([np.bincount(layout.second, component, n) for component in values])
    total = np.negative(of_second, out=of_second)
    total[:, : len(layout.starts)] += np.add.reduceat(values, layout.starts, axis=1)
    return np.ascontiguousarray(total.T)


def total_distance(layout: Layout, x: Array) -> float:
    """sum w_ij |x_i - x_j| over the unordered pairs for x (n, d)."""
    if layout.graph is None:
        return float(pdist(x).sum())
    return float((layout.graph.weights * lengths(differences(np.ascontiguousarray(x.T), layout))).sum())


def distance_norm(layout: Layout, x: Array) -> float:
    """sqrt(n) |x|: the Euclidean norm of all x_i - x_j, i < j, when the models sum to zero, else an upper bound.

    With a graph, each user's model counts with its degree instead of n.
    """
    if layout.graph is None:
        return float(np.sqrt(len(x)) * np.linalg.norm(x))
    return float(np.linalg.norm(layout.scale * x))


def split_all(layout: Layout, steps: Constants, lam: float, x_seen: Array, muhat: Array) -> Array:
    """(17) on every pair: z (d, m) from `x_seen` (n, d), the models that z is computed from."""
    columns = np.ascontiguousarray(x_seen.T)
    z = np.empty_like(muhat)
    for tile in _tiles(layout.size, len(z)):
        w = np.multiply(muhat[:, tile], 1 / steps.rho, out=z[:, tile])
        w += differences(columns, layout, tile)
        shrink(w, lam / steps.rho)
    return z


class Duals(NamedTuple):
    """What (18) and (19) made of mu and mu^, and how far z is from the differences."""

    mu: Array  # (d, m)
    muhat: Array  # (d, m); where nu is 0 it is mu
    gap: float  # |x_i - x_j - z_ij| over the unordered pairs, Euclidean, squares weighted


def dual_all(layout: Layout, steps: Constants, x: Array, z: Array, mu: Array) -> Duals:
    """(18) and (19) on every pair, from the models x (n, d) of S5, the new z and the old mu."""
    columns = np.ascontiguousarray(x.T)
    mu_new = np.empty_like(z)
    muhat = np.empty_like(z) if steps.nu else mu_new
    gap = 0.0
    for tile in _tiles(layout.size, len(z)):
        residual = differences(columns, layout, tile)
        residual -= z[:, tile]
        gap += _square(residual, layout, tile)
        new = np.multiply(residual, steps.tau * steps.rho, out=mu_new[:, tile])
        new += mu[:, tile]
        if steps.nu:
            residual *= steps.nu * steps.rho
            np.subtract(new, residual, out=muhat[:, tile])
    return Duals(mu_new, muhat, float(np.sqrt(gap)))


def advance_some(
    layout: Layout, steps: Constants, lam: float, chosen: Chosen, x_seen: Array, x_new: Array, z: Array, mu: Array, muhat: Array
) -> tuple[Array, Duals]:
    """z (d, m) and the rest after (17) to (19) on the chosen places; what is not chosen stays (S4, S9).

    `x_seen` (n, d) are the models that z is computed from, `x_new` those after S5. A pair stored twice has half the weights, as in (15).
    """
    rho = steps.rho / layout.copies
    z_new = z.copy()
    if chosen.z is not None:
        w = muhat[:, chosen.z] / rho + differences(np.ascontiguousarray(x_seen.T), layout, chosen.z)
        z_new[:, chosen.z] = shrink(w, lam / steps.rho)
    mu_new, gap = dual_step(layout, steps.tau * rho, chosen.mu, x_new, z_new, mu)
    muhat_new = muhat.copy()
    if chosen.mu is not None:
        residual = differences(np.ascontiguousarray(x_new.T), layout, chosen.mu) - z_new[:, chosen.mu]
        muhat_new[:, chosen.mu] = mu_new[:, chosen.mu] - steps.nu * rho * residual
    return z_new, Duals(mu_new, muhat_new, gap)


def dual_step(layout: Layout, weight: float, places: Indices | None, x: Array, z: Array, mu: Array) -> tuple[Array, float]:
    """S8 and S9: mu + weight (x_i - x_j - z_ij) at `places` (None: all), and the norm of that residual over all unordered pairs."""
    residual = differences(np.ascontiguousarray(x.T), layout) - z
    gap = float(np.sqrt(_square(residual, layout) / layout.copies))
    if places is None:
        return mu + weight * residual, gap
    new = mu.copy()
    new[:, places] += weight * residual[:, places]
    return new, gap


def lengths(vectors: Array) -> Array:
    """(m,): the Euclidean norm of each pair's vector in (d, m)."""
    return np.asarray(np.sqrt(np.add.reduce(vectors * vectors, axis=0)))


def distance(layout: Layout, before: Array, after: Array) -> float:
    """|after - before| over all stored vectors (d, m), squares weighted, without a temporary of their size."""
    tiles = _tiles(before.shape[1], len(before))
    return float(np.sqrt(sum(_square(after[:, tile] - before[:, tile], layout, tile) for tile in tiles)))


def zero_pairs(layout: Layout, values: Array) -> NDArray[np.bool_]:
    """(P,): which unordered pairs have a vector of exact zeros; both of the two where they are stored twice."""
    is_zero: NDArray[np.bool_] = np.asarray(~values.any(axis=0))
    if layout.copies == 1:
        return is_zero
    one, other = _both_ways(layout, is_zero)
    return one & other


def touched(layout: Layout, places: Indices) -> NDArray[np.bool_]:
    """(P,): the unordered pairs with at least one stored vector among `places`."""
    marked = np.zeros(layout.size, dtype=bool)
    marked[places] = True
    if layout.copies == 1:
        return marked
    one, other = _both_ways(layout, marked)
    return one | other


def _both_ways(layout: Layout, values: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(P,) twice: the values of (i, j) and of (j, i), i < j, in ordered storage."""
    upper = half(layout.n)
    return values[layout.place(upper.first, upper.second)], values[layout.place(upper.second, upper.first)]


def to_users(layout: Layout, values: Array) -> Array:
    """Half storage (d, P) as every user sees it, (n, n-1, d): user i's vectors for its partners in member order."""
    n = layout.n
    i, k = np.divmod(np.arange(n * (n - 1)), n - 1)
    j = k + (k >= i)
    places = layout.place(np.minimum(i, j), np.maximum(i, j))
    seen: Array = values[:, places] * np.where(i < j, 1.0, -1.0)
    return np.ascontiguousarray(seen.T).reshape(n, n - 1, len(values))


def from_users(layout: Layout, values: Array) -> Array:
    """The inverse of `to_users`: the vectors that the users with i < j hold, (d, P)."""
    flat = values.reshape(layout.n * (layout.n - 1), -1)
    return np.ascontiguousarray(flat[layout.first * (layout.n - 1) + layout.second - 1].T)


def _square(values: Array, layout: Layout, places: slice = slice(None)) -> float:
    """The sum of the squares of the pairs' vectors (d, m), weighted."""
    if layout.weights is None:
        return float(np.einsum("dm,dm->", values, values))
    return float(np.dot(np.einsum("dm,dm->m", values, values), layout.weights[places]))


def _tiles(size: int, d: int) -> Iterator[slice]:
    width = max(_SHORTEST_TILE, _TILE_SCALARS // max(1, d))
    return (slice(start, min(start + width, size)) for start in range(0, size, width))
