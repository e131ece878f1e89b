"""Server half shared by `global`, `oracle` and `squared`: Newton's method (L-BFGS for large d) for one model per group of users.

A round sends each user the point of its group and sums the answers in member order. Nobody can be left out (skip): a sum without some
users is the derivative of another problem, and a line search that compares values of two problems compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.families.consensus import AskModels, Curvatures, GroupModel, Slopes, UserModels
from coterie_server.interface.half import CONVERGED, FLAT, UNBOUNDED, Counts, Facts, Federation, Key, Outcome
from coterie_server.maths import consensus


@dataclass(frozen=True)
class GroupSolver:
    """The half for groups given by labels (n,), numbered from 0."""

    facts: Facts
    labels: Indices
    tolerance: float
    newton_up_to: int
    ridge: float | None = None  # q of the Moreau envelopes; None: the losses themselves
    start: Array | None = None  # (n, d) models whose means over the groups are the first points

    @property
    def client_options(self) -> Mapping[str, Any]:
        """Settings of the client half, which is the room `consensus`."""
        return {"consensus": {"ridge": self.ridge, "with_hessians": self.facts.d <= self.newton_up_to}}

    async def init(self, federation: Federation) -> consensus.State:  # noqa: ARG002
        """Starts at the means of the given models, or at zero."""
        n_groups = int(self.labels.max()) + 1
        points = np.zeros((n_groups, self.facts.d))
        if self.start is not None:
            points = _group_sums(self.start, self.labels, n_groups) / np.bincount(self.labels)[:, None]
        return consensus.begin(points)

    async def round(self, state: consensus.State, federation: Federation, number: int) -> tuple[consensus.State, Mapping[str, float]]:  # noqa: ARG002
        """One look at all groups."""
        n_groups = len(state.points)
        replies = await federation.exchange(GroupModel(state.query[self.labels]))
        slopes, curvatures = replies[Slopes], replies.get(Curvatures)
        values = _group_sums(slopes.value[:, None], self.labels, n_groups)[:, 0]
        gradients = _group_sums(slopes.gradient, self.labels, n_groups)
        hessians = None if curvatures is None else _unpacked(_group_sums(curvatures.triangle, self.labels, n_groups), self.facts.d)
        state = consensus.step(state, values, gradients, hessians, self.tolerance)
        figures = {
            "objective": float(state.values.sum()),
            "gradient_norm": float(np.linalg.norm(state.gradients)),
            CONVERGED: float(state.converged.all() and not state.unbounded.any()),
        }
        if state.converged.all() and state.unbounded.any():
            figures[UNBOUNDED] = float(state.unbounded.sum())
        return state, figures

    async def finish(self, state: consensus.State, federation: Federation) -> Outcome:
        """The group's model for each user; for envelopes, each user's proximal point."""
        models = state.points[self.labels]
        if self.ridge is None:
            figures = {"objective": float(state.values.sum()), "clusters": float(len(state.points)), **_left_open(state)}
            return Outcome(models, self.labels, figures)
        replies = await federation.exchange(AskModels(models))
        return Outcome(replies[UserModels].x, None, {"objective": float(state.values.sum()), **_left_open(state)})

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One vector down and one up for each user and round; envelopes end with one more of each."""
        n_vectors = float(len(figures) * len(self.labels))
        expected: dict[Key, float] = {("query", "down"): n_vectors, ("gradient", "up"): n_vectors}
        if self.ridge is not None:
            expected |= {("model", "down"): float(len(self.labels)), ("model", "up"): float(len(self.labels))}
        return expected

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """With each gradient a value, d + 1 scalars, and by Newton's method the upper triangle of a Hessian, d(d+1)/2."""
        d, n_asked = self.facts.d, float(len(figures) * len(self.labels))
        hessians: dict[Key, float] = {("hessian", "up"): n_asked * d * (d + 1) / 2} if d <= self.newton_up_to else {}
        return {("gradient", "up"): n_asked * (d + 1), **hessians}


def _left_open(state: consensus.State) -> dict[str, float]:
    """How many groups have no minimiser, and how many have several, where there are any."""
    found = {UNBOUNDED: state.unbounded, FLAT: state.flat}
    return {name: float(groups.sum()) for name, groups in found.items() if groups.any()}


def _group_sums(rows: Array, labels: Indices, n_groups: int) -> Array:
    """Sums (n_groups, m) of the rows (n, m) of each group, added in member order."""
    sums = np.zeros((n_groups, rows.shape[1]))
    np.add.at(sums, labels, rows)
    return sums


def _unpacked(triangles: Array, d: int) -> Array:
    """Symmetric matrices (k, d, d) from their upper triangles (k, d(d+1)/2)."""
    rows, columns = np.triu_indices(d)
    full = np.zeros((len(triangles), d, d))
    full[:, rows, columns] = triangles
    full[:, columns, rows] = triangles
    return full
