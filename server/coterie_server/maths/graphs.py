"""Graphs of users from their local models: who is tied to whom, and how strongly. Touw, Groenen and Terada (2022), section 3."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from coterie.arrays import Array, Indices
from coterie_server.maths.ssnal import Graph


def nearest(models: Array, neighbours: int, phi: float) -> Graph:
    """Each user (n, d) with its nearest, and what the shortest bridges between parts add: the graph is connected.

    The weights are exp(-phi |x_i - x_j|^2 / median), with the median of the squared distances of the pairs: units change nothing.
    """
    n = len(models)
    near = cKDTree(models).query(models, min(neighbours, n - 1) + 1)[1].reshape(n, -1)
    users = np.repeat(np.arange(n), near.shape[1])
    apart = users != near.ravel()  # of equal models, a user need not be the first
    first, second = users[apart], near.ravel()[apart]
    graph = Graph.of(n, first, second, np.ones(len(first)))
    first, second = (np.concatenate(ends) for ends in zip((graph.first, graph.second), bridges(models, graph.components()), strict=True))
    squares = np.square(models[first] - models[second]).sum(axis=1)
    median = float(np.median(squares[squares > 0])) if (squares > 0).any() else 1.0
    return Graph.of(n, first, second, np.maximum(np.exp(-phi * squares / median), np.finfo(float).tiny))


def bridges(models: Array, labels: Indices) -> tuple[Indices, Indices]:
    """Ends of the edges of a minimum spanning tree of the parts (n,), each the shortest between two parts (Boruvka)."""
    firsts: list[int] = []
    seconds: list[int] = []
    labels = labels.copy()
    while labels.max(initial=0) > 0:
        for part in np.unique(labels):
            inside = np.flatnonzero(labels == part)
            outside = np.flatnonzero(labels != part)
            if not inside.size or not outside.size:  # joined already
                continue
            distances, places = cKDTree(models[outside]).query(models[inside])
            nearest_one = int(np.argmin(distances))
            first, second = int(inside[nearest_one]), int(outside[places[nearest_one]])
            firsts.append(first)
            seconds.append(second)
            labels[labels == labels[second]] = part
        labels = np.unique(labels, return_inverse=True)[1].reshape(-1)
    return np.array(firsts, np.int64), np.array(seconds, np.int64)
