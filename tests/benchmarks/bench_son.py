"""`coterie.sum_of_norms` on graphs of nearest neighbours: CPU time, gap and memory of each case.

moons: 1,000 half-moon points, k = 15, phi = 2, the 551 penalties 0, .2, ..., 110 in the scale of Touw, Groenen and Terada (2022).
ten thousand: least squares, d = 5, k = 10, 10 penalties. hundred thousand: points, d = 3, k = 10, one penalty.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.spatial import cKDTree
from sklearn.datasets import make_moons

import coterie
from coterie.arrays import Array, Indices
from tests.benchmarks import record
from tests.benchmarks.record import Figure


def neighbours(points: Array, k: int, phi: float) -> tuple[Indices, Array]:
    """Pairs of each point and its k nearest, with weights that fall with the squared distance over its median."""
    near = cKDTree(points).query(points, k + 1)[1][:, 1:]
    pairs = np.unique(np.sort(np.stack([np.repeat(np.arange(len(points)), k), near.ravel()], axis=1), axis=1), axis=0)
    squares = ((points[pairs[:, 0]] - points[pairs[:, 1]]) ** 2).sum(axis=1)
    return pairs, np.exp(-phi * squares / np.median(squares))


def groups(n: int, d: int) -> Array:
    """Points around 20 centres."""
    random = np.random.default_rng(0)
    return np.asarray(3 * random.normal(size=(20, d))[random.integers(20, size=n)] + random.normal(size=(n, d)))


def case(name: str) -> tuple[Array, Array | None, float, Array]:
    """Points, Hessians, phi's graph size k, and penalties as multiples of the radius over the mean sum of weights."""
    if name == "moons":
        return make_moons(1000, noise=0.05, random_state=0)[0], None, 15, np.arange(551) * 0.2
    n, d = (10_000, 5) if name == "ten-thousand" else (100_000, 3)
    if name == "hundred-thousand":
        return groups(n, d), None, 10, np.array([0.3])
    rows = np.random.default_rng(1).normal(size=(n, 3 * d, d))
    return groups(n, d), np.einsum("nmi,nmj->nij", rows, rows) / (3 * d), 10, np.geomspace(0.03, 3, 10)


def measure(name: str, found_in: Any) -> None:
    """Puts CPU seconds, Newton steps, the largest gap, the clusters of the last penalty and the peak in MB of one case."""
    points, hessians, k, multiples = case(name)
    pairs, weights = neighbours(points, int(k), 2.0)
    radius = np.sqrt(((points - points.mean(axis=0)) ** 2).sum())
    per_user = 2 * weights.sum() / len(points)
    unit = radius / weights.sum() if name == "moons" else radius / np.sqrt(len(points)) / per_user
    started, found, gaps, steps = time.process_time(), None, [], 0
    for lam in multiples * unit:
        found = coterie.sum_of_norms(points, (pairs, weights), float(lam), hessians=hessians, start=found)
        gaps.append(found.gap)
        steps += found.iterations
    assert found is not None
    clusters, peak_mb = int(found.clusters.max()) + 1, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found_in.put((time.process_time() - started, steps, max(gaps), clusters, peak_mb))


def figures(cases: Sequence[str] = ("moons", "ten-thousand", "hundred-thousand"), repeats: int = 3) -> Iterator[Figure]:
    """Each case in processes of its own, since the memory is that of the process."""
    context = multiprocessing.get_context("spawn")
    for name in cases:
        found = []
        for _ in range(repeats):
            queue = context.SimpleQueue()
            process = context.Process(target=measure, args=(name, queue))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"the case {name} ended with {process.exitcode}, want 0")
            found.append(queue.get())
        seconds, steps, gaps, clusters, peaks = zip(*found, strict=True)
        yield Figure(name, "CPU s", seconds)
        yield Figure(f"{name}, Newton steps", "steps", steps, exact=True)
        yield Figure(f"{name}, largest gap", "", gaps, None)
        yield Figure(f"{name}, clusters at the last penalty", "clusters", clusters, None)
        yield Figure(f"{name}, peak", "MB", peaks)


if __name__ == "__main__":
    record.main(figures)
