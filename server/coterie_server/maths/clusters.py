"""Which users share a model: partitions from exact zeros and from nearness, and how to compare two partitions.

The sum-of-norms penalty of Armacki, Bajovic, Jakovetic and Kar (2022), problem (3), makes the models of a cluster equal at a solution.
Before, they are only nearly equal. PDMM's z_ij (17) are exactly zero early, but also between users who stay apart outside the recovery
interval. So `partition` joins users on nearness or on zeros, and `persistent` counts how long a zero lasts. Nearness is measured by
coefficient, so that clusters do not depend on the units of a feature. A zero between clearly different models joins nobody: a coefficient
that is a billion times smaller than the others moves long after the first zeros.

Pairs are the i < j in lexicographic order, the order of `np.triu_indices(n, 1)`: n(n-1)/2 of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist, pdist

from coterie.arrays import Array, Indices

Mask = NDArray[np.bool_]

_ROUNDING = 64 * float(np.finfo(np.float64).eps)  # of the largest coefficient: a coefficient without effect is no better than this
_PLAINLY = 0.5  # of a coefficient's size: users who differ by more have different models, also where z is zero
_PAIRS = 1 << 16  # joined pairs that are compared at a time
_CHUNK = 256  # rows of the distance matrix held at a time: 4 MB at n = 2000


def partition(
    x: Array,
    joined: Mask | None = None,
    tolerance: float = 1e-4,
    scale: float | None = None,
    apart: Mask | None = None,
    among: Indices | None = None,
) -> Indices:
    """Cluster of each user, (n,): users are together when a chain of joined or near pairs connects them.

    `among` (2, m) are the pairs that can be together, None for all. `x` (n, d) are the models; `joined` (m,) marks the pairs whose z is
    zero, which joins them unless a coefficient of theirs differs by more than half of its size. A pair is near when no coefficient differs
    by more than `tolerance` of its size, its largest value in any model, or by more than rounding relative to the largest coefficient. So
    the units of a feature change nothing here. Sizes are no differences: at a consensus these are rounding, and would separate all users.
    `scale` replaces the sizes of all coefficients. `apart` (n,) marks users whose models count as near nobody's.
    Clusters are numbered by their first member. O(m d) time among m pairs, else O(n^2 d) time and O(n^2) bits of memory at most.
    Raises ValueError when `joined` has another length or `tolerance` is negative.
    """
    n = len(x)
    if joined is not None and joined.shape != (n * (n - 1) // 2 if among is None else among.shape[1],):
        raise ValueError(f"the mask of joined pairs has shape {joined.shape}, not {(n * (n - 1) // 2,)}")
    if tolerance < 0:
        raise ValueError(f"the tolerance is {tolerance}, not at least 0")
    if n == 0:
        return np.zeros(0, np.int64)
    if among is None:
        who = np.arange(n) if apart is None else np.flatnonzero(~apart)
        edges = [who[_near_pairs(x[who], _radii(x, tolerance, scale))]]
    else:
        moved = among if apart is None else among[:, ~apart[among].any(axis=0)]
        edges = [_within(moved, x, _radii(x, tolerance, scale))]
    if joined is not None:
        edges.append(_within(_joined_pairs(joined, n) if among is None else among[:, joined], x, _radii(x, _PLAINLY, scale)))
    first, second = np.concatenate(edges, axis=1)
    return components(first, second, n)


def overlap(x: Array, labels: Indices) -> float | None:
    """How far a user's model is from the mean of its cluster at most, over the distance of the two closest means.

    `x` (n, d) are the models, `labels` (n,) their clusters. Coefficients are measured by their sizes, as in `partition`. Clusters of an
    optimum have 0. Above one half, users of two clusters may be closer than users of one. None with one cluster, or if all users are alone.
    """
    n_clusters = int(labels.max(initial=-1)) + 1
    if not 1 < n_clusters < len(x):
        return None
    sizes = np.abs(x).max(axis=0)
    scaled = x / np.where(sizes > 0, sizes, 1.0)
    means = np.zeros((n_clusters, x.shape[1]))
    np.add.at(means, labels, scaled)
    means /= np.bincount(labels)[:, None]
    farthest = float(np.linalg.norm(scaled - means[labels], axis=1).max())
    closest = float(cKDTree(means).query(means, k=2)[0][:, 1].min())
    return farthest / max(closest, float(np.finfo(float).tiny))


def _radii(x: Array, tolerance: float, scale: float | None) -> Array:
    """(d,) how far the coefficients of near models may be apart."""
    sizes = np.abs(x).max(axis=0, initial=0.0)
    radii: Array = tolerance * (sizes if scale is None else np.full(x.shape[1], scale))
    return np.maximum(radii, _ROUNDING * sizes.max(initial=0.0)) if tolerance and scale is None else radii


def components(first: Indices, second: Indices, n: int) -> Indices:
    """Connected components (n,), numbered by their first member, of the graph with edges (first, second), both (m,).

    Everyone takes the smallest label among its neighbours, then that label's own label, until nothing changes.
    """
    labels = np.arange(n)
    while True:
        lower = np.minimum(labels[first], labels[second])
        new = labels.copy()
        np.minimum.at(new, first, lower)
        np.minimum.at(new, second, lower)
        new = new[new]
        if np.array_equal(new, labels):
            return np.unique(labels, return_inverse=True)[1].reshape(-1)
        labels = new


def _near_pairs(x: Array, radii: Array) -> Indices:
    """Edges (2, m) that connect the same users as all pairs within `radii` (d,); one edge per user and near block suffices."""
    # Where a radius is 0, values are replaced by their even ranks: then different values differ by 2 or more.
    exact = radii == 0.0
    scaled = x / np.where(exact, 1.0, radii)
    for k in np.flatnonzero(exact):
        scaled[:, k] = 2.0 * np.unique(x[:, k], return_inverse=True)[1].reshape(-1)
    found = []
    for start in range(0, len(x), _CHUNK):
        rows, columns = np.nonzero(cdist(scaled[start : start + _CHUNK], scaled[start:], "chebyshev") <= 1.0)
        forward = rows < columns
        found.append(np.stack([rows[forward], columns[forward]]).astype(np.int64) + start)
    return np.concatenate([np.zeros((2, 0), np.int64), *found], axis=1)


def _joined_pairs(joined: Mask, n: int) -> Indices:
    """The marked pairs as (2, m) indices, without listing the unmarked ones."""
    position = np.flatnonzero(joined)
    starts = np.concatenate([[0], np.cumsum(np.arange(n - 1, 0, -1))])  # position of the pair (i, i+1)
    first = np.searchsorted(starts, position, side="right") - 1
    return np.stack([first, position - starts[first] + first + 1]).astype(np.int64)


def _within(pairs: Indices, x: Array, radii: Array) -> Indices:
    """Those of the pairs (2, m) whose models differ by no more than `radii` (d,)."""
    blocks = (pairs[:, start : start + _PAIRS] for start in range(0, pairs.shape[1], _PAIRS))  # whose models fit into memory
    kept = [np.all(np.abs(x[first] - x[second]) <= radii, axis=1) for first, second in blocks]
    return pairs[:, np.concatenate([np.zeros(0, np.bool_), *kept])]


def incidence(n: int) -> tuple[csr_matrix, Indices, Indices]:
    """Matrix (n, m) with incidence @ s = sum_j s_ij for antisymmetric s given on the pairs, and the pairs' ends (m,) and (m,)."""
    first, second = np.triu_indices(n, 1)
    pairs = np.arange(len(first))
    signs = np.concatenate([np.ones(len(pairs)), -np.ones(len(pairs))])
    ends = (np.concatenate([first, second]), np.concatenate([pairs, pairs]))
    return csr_matrix((signs, ends), shape=(n, len(pairs))), first, second


def persistent(counts: Indices, zero: Mask, updated: Mask | None = None) -> Indices:
    """New counts (m,): at how many of its latest updates in a row each pair's z was zero.

    `zero` (m,) says whose z is zero now, `updated` (m,) whose z was updated in this round (None: all). A pair left out of the round
    keeps its count. With a persistence of p, the joined pairs of `partition` are `counts >= p`.
    """
    counted = np.where(zero, counts + 1, 0)
    return counted if updated is None else np.where(updated, counted, counts)


def canonical(labels: Indices) -> Indices:
    """The same partition (n,) with clusters numbered 0, 1, ... by their first member."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse.reshape(-1)]


def same_partition(a: Indices, b: Indices) -> bool:
    """True when two labelings (n,) put the same users together, however the clusters are named."""
    return len(a) == len(b) and bool(np.array_equal(canonical(a), canonical(b)))


def within_distance(x: Array, labels: Indices) -> float:
    """Mean Euclidean distance over the unordered pairs of users in one cluster; Figure 2 of the paper.

    `x` (n, d), `labels` (n,). Every pair weighs the same, so larger clusters weigh more. 0 when no two users share a cluster.
    """
    distances = [pdist(x[labels == label]) for label in range(int(labels.max(initial=-1)) + 1)]
    n_pairs = sum(len(part) for part in distances)
    return float(sum(part.sum() for part in distances) / n_pairs) if n_pairs else 0.0


def adjusted_rand(a: Indices, b: Indices) -> float:
    """Adjusted Rand index of two labelings (n,), Hubert and Arabie (1985): 1 when equal, about 0 when unrelated.

    Two labelings that are both one cluster, or both singletons, agree: 1. Raises ValueError when the lengths differ.
    """
    if len(a) != len(b):
        raise ValueError(f"the labelings have {len(a)} and {len(b)} users, not the same number")
    a, b = canonical(a), canonical(b)
    width = int(b.max(initial=0)) + 1
    together = _pairs(np.unique(a * width + b, return_counts=True)[1])
    in_a, in_b, total = _pairs(np.bincount(a)), _pairs(np.bincount(b)), len(a) * (len(a) - 1) // 2
    # Times the number of pairs, the expectation and the gap are integers: equal partitions give exactly 1.
    expected = in_a * in_b
    spread = (in_a + in_b) * total - 2 * expected
    return 2.0 * (together * total - expected) / spread if spread else 1.0


def _pairs(sizes: Indices) -> int:
    return sum(int(size) * (int(size) - 1) // 2 for size in sizes)
