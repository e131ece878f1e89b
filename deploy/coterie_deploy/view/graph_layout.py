"""Places of users and clusters in a picture of their graph: their models in a plane, in which nothing hides anything else.

Lengths are in units in which the picture is about 2 wide and 1.2 high.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coterie.arrays import Array, Indices

_HALF = np.array([1.0, 0.62])  # of the width and of the height
_COVERED = 0.09  # the share of the picture that points cover
_SMALLEST, _LARGEST = 0.006, 0.03  # radii of a user's point
_GOLDEN = math.pi * (3 - math.sqrt(5))  # the angle from one seed of a sunflower to the next
_SEED = 1.4  # how far apart seeds lie, in radii
_EQUAL = 1e-3  # models of a cluster are one point when they differ by no more than this share of what all models do
_NOTHING = 1e-9  # a component that varies less than this share of the first one is rounding
_MARGIN = 1.04  # between neighbours, in radii
_STEPS = 300  # of moving apart
_OUTSIDE, _ROOM = 0.02, 1.25  # the share of users that may lie outside, and how much wider the picture is than where the others are
_FEWEST_OUTSIDE = 50  # users from which on somebody may lie outside


@dataclass(frozen=True)
class Plane:
    """Coordinates of models."""

    values: Array  # (n, 2)
    shares: tuple[float, float]  # of the variance of models, in each of the two directions

    @cached_property
    def places(self) -> Array:
        """(n, 2) in the picture, which each axis fills; of many users, those far from the others lie at its edge."""
        return np.clip(self._scaled, -_HALF, _HALF)

    @property
    def n_outside(self) -> int:
        """How many users lie at the edge because they are farther away."""
        return int((np.abs(self._scaled) > _HALF * (1 + 1e-9)).any(axis=1).sum())

    @cached_property
    def _scaled(self) -> Array:
        outside = _OUTSIDE if len(self.values) >= _FEWEST_OUTSIDE else 0.0
        low = np.quantile(self.values, outside / 2, axis=0, method="higher")
        high = np.quantile(self.values, 1 - outside / 2, axis=0, method="lower")
        centred = self.values - (low + high) / 2
        reach = np.minimum((high - low) / 2 * (_ROOM if outside else 1.0), np.abs(centred).max(axis=0))
        return np.asarray(centred * np.divide(_HALF, reach, out=np.zeros(2), where=reach > 0))


@dataclass(frozen=True)
class Layout:
    """Where circles lie, (m, 2), and their radii (m,)."""

    places: Array
    radii: Array
    n_spread: int = 0  # users who have the model of others, and lie around it

    def box(self) -> tuple[float, float, float, float]:
        """The centre, and half of the width and of the height that hold all circles."""
        low, high = (self.places - self.radii[:, None]).min(axis=0), (self.places + self.radii[:, None]).max(axis=0)
        centre, half = (low + high) / 2, np.maximum((high - low) / 2, 4 * _LARGEST) * 1.03
        return float(centre[0]), float(centre[1]), float(half[0]), float(half[1])


def plane_of(models: Array) -> Plane:
    """The first two principal components of models (n, d), d > 1; zeros where models do not vary."""
    centred = models - models.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    sizes, directions = sizes[:2], directions[:2]
    signs = np.sign(directions[np.arange(len(directions)), np.abs(directions).argmax(axis=1)])
    found = np.zeros((len(models), 2))
    if sizes[0] > _NOTHING * np.linalg.norm(models):
        kept = sizes > _NOTHING * sizes[0]
        found[:, : len(sizes)] = np.where(kept, centred @ (directions * signs[:, None]).T, 0.0)
    total = float(np.square(centred).sum())
    first, second = (float(np.square(column).sum()) / total if total > 0 else 0.0 for column in found.T)
    return Plane(found, (first, second))


def of_values(values: Array) -> Plane:
    """Models (n,) of one number: the value, and the user's number from the top."""
    return Plane(np.column_stack([values, -np.arange(len(values), dtype=float)]), (1.0, 0.0))


def users_in(plane: Plane, models: Array, labels: Indices, *, may_move: bool = True) -> Layout:
    """A circle for each user (n,). The users of a cluster with one model lie around it, like the seeds of a sunflower."""
    n = len(labels)
    places = plane.places
    if not may_move:
        return Layout(places, np.full(n, float(np.clip(_HALF[1] / n, _SMALLEST, _LARGEST))))
    radius = _radius(n)
    extent = float(np.linalg.norm(models - models.mean(axis=0), axis=1).max())
    discs: list[Indices] = []
    for label in np.unique(labels):
        inside = np.flatnonzero(labels == label)
        apart = np.linalg.norm(models[inside] - models[inside].mean(axis=0), axis=1).max()
        discs += [inside] if apart <= _EQUAL * extent else [np.array([user]) for user in inside]
    centres = np.array([places[inside].mean(axis=0) for inside in discs])
    around = [_seeds(len(inside), radius) for inside in discs]
    reach = np.array([np.linalg.norm(seeds, axis=1).max() + radius for seeds in around])
    centres = moved_apart(centres, reach)
    found = np.empty((n, 2))
    for inside, centre, seeds in zip(discs, centres, around, strict=True):
        found[inside] = centre + seeds
    return Layout(found, np.full(n, radius), sum(len(inside) for inside in discs if len(inside) > 1))


def clusters_in(plane: Plane, labels: Indices, chosen: Indices) -> Layout:
    """A circle for each of the chosen clusters, of an area by its users, at the mean of their models."""
    sizes = np.bincount(labels)
    means = np.column_stack([np.bincount(labels, column) for column in plane.places.T])[chosen] / sizes[chosen, None]
    radii = np.maximum(_radius(int(sizes[chosen].sum())) * np.sqrt(sizes[chosen]), _SMALLEST)
    return Layout(moved_apart(means, radii), radii)


def moved_apart(places: Array, radii: Array) -> Array:
    """Circles (m, 2) that overlap are moved until none does, small ones more than large ones."""
    places, m = places.copy(), len(places)
    first, second = np.triu_indices(m, 1)
    reach, areas = _MARGIN * (radii[first] + radii[second]), np.square(radii)
    share = areas[second] / (areas[first] + areas[second])
    turn = _GOLDEN * np.arange(len(first))
    for _ in range(_STEPS):
        apart = places[first] - places[second]
        distance = np.linalg.norm(apart, axis=1)
        close = np.flatnonzero(distance < reach * (1 - 1e-6))
        if not close.size:
            break
        away = np.column_stack([np.cos(turn[close]), np.sin(turn[close])])  # from what lies in the same place
        np.divide(apart[close], distance[close, None], out=away, where=distance[close, None] > 0)
        push = away * (reach - distance)[close, None]
        for axis in range(2):
            places[:, axis] += np.bincount(first[close], share[close] * push[:, axis], m)
            places[:, axis] -= np.bincount(second[close], (1 - share[close]) * push[:, axis], m)
    return places


def _radius(n: int) -> float:
    """Of a user's point among n."""
    return min(math.sqrt(_COVERED * 4 * float(_HALF.prod()) / (math.pi * n)), _LARGEST)


def _seeds(n: int, radius: float) -> Array:
    """(n, 2) places around 0 that keep circles of this radius apart."""
    if n == 1:
        return np.zeros((1, 2))
    number = np.arange(n)
    far = _SEED * radius * np.sqrt(number + 0.5)
    return np.column_stack([far * np.cos(_GOLDEN * number), far * np.sin(_GOLDEN * number)])
