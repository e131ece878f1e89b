"""Server half of the methods with one model for each group of users: Newton's method, or L-BFGS for large d.

A round sends each user the point of its group and uses nothing but the sums of the answers over groups. Nobody can be left out (skip): a
sum without some users is the derivative of another problem, and a line search must not compare values of two problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.families.consensus import AskModels, Curvatures, GroupModel, Slopes, UserModels
from coterie_server.interface.half import CONVERGED, FLAT, ROUNDING, UNBOUNDED, Counts, Facts, Federation, Key, Outcome, Replies, Sum
from coterie_server.interface.sum_links import SumLinks
from coterie_server.maths import consensus
from coterie_server.maths.covariance import symmetric


@dataclass(frozen=True)
class GroupSolver:
    """The half for groups given by labels (n,), numbered from 0."""

    facts: Facts
    labels: Indices
    tolerance: float
    newton_up_to: int
    ridge: float | None = None  # q of the Moreau envelopes; None: the losses themselves
    start: Array | None = None  # (n, d) models whose means over the groups are the first points
    sums: SumLinks | None = None  # see `Setting.sums`

    @property
    def client_options(self) -> Mapping[str, Any]:
        return {"consensus": {"ridge": self.ridge, "with_hessians": self.has_hessians}}

    async def init(self, federation: Federation) -> consensus.State:  # noqa: ARG002
        """Starts at the means of the given models, or at zero."""
        n_groups = int(self.labels.max()) + 1
        points = np.zeros((n_groups, self.facts.d))
        if self.start is not None:
            points = group_sums(self.start, self.labels, n_groups) / np.bincount(self.labels)[:, None]
        return consensus.begin(points)

    async def round(self, state: consensus.State, federation: Federation, number: int) -> tuple[consensus.State, Mapping[str, float]]:  # noqa: ARG002
        """Values and derivatives of all groups, once."""
        totals = await federation.total(GroupModel(state.query[self.labels]), of=self.sums_asked)
        slopes, curvatures = totals[Slopes], totals.get(Curvatures)
        hessians = None if curvatures is None else symmetric(curvatures.triangle, self.facts.d)
        state = consensus.step(state, slopes.value, slopes.gradient, hessians, self.tolerance)
        figures = {
            "objective": float(state.values.sum()),
            "gradient_norm": float(np.linalg.norm(state.gradients)),
            CONVERGED: float(state.converged.all() and not state.unbounded.any()),
        }
        if state.converged.all() and state.unbounded.any():
            figures[UNBOUNDED] = float(state.unbounded.sum())
        if totals.rounding:
            figures[ROUNDING] = totals.rounding
        return state, figures

    @property
    def sums_asked(self) -> Sequence[Sum]:
        """Those of a round: of slopes, and by Newton's method of curvatures."""
        slopes = Sum(Slopes, groups=self.labels, extents={"d": self.facts.d})
        curvatures = Sum(Curvatures, groups=self.labels, extents={"h": self.facts.d * (self.facts.d + 1) // 2})
        return [slopes, curvatures] if self.has_hessians else [slopes]

    @property
    def has_hessians(self) -> bool:
        """Whether users send Hessians."""
        return self.facts.d <= self.newton_up_to

    async def finish(self, state: consensus.State, federation: Federation) -> Outcome:
        """The group's model for each user; for envelopes, each user's proximal point."""
        models = state.points[self.labels]
        found = {UNBOUNDED: state.unbounded, FLAT: state.flat}  # groups without a minimiser, and groups with several
        figures = {"objective": float(state.values.sum())} | {name: float(flags.sum()) for name, flags in found.items() if flags.any()}
        if self.ridge is None:
            return Outcome(models, self.labels, {**figures, "clusters": float(len(state.points))})
        replies = await federation.exchange(AskModels(models))
        return Outcome(replies[UserModels].x, None, figures)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One vector down and one up for each user and round, or up for each sum; envelopes end with one more of each."""
        expected: dict[Key, float] = {("query", "down"): float(len(figures) * len(self.labels)), **self._up("gradient", len(figures))}
        if self.ridge is not None:
            expected |= {("model", "down"): float(len(self.labels)), ("model", "up"): float(len(self.labels))}
        return expected

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """With each gradient a value, d + 1 scalars, and by Newton's method the upper triangle of a Hessian, d(d+1)/2."""
        d, n_rounds = self.facts.d, len(figures)
        hessians = self._up("hessian", n_rounds * d * (d + 1) / 2) if self.has_hessians else {}
        return {**self._up("gradient", n_rounds * (d + 1)), **hessians}

    def _up(self, step: str, times: float) -> dict[Key, float]:
        """What each user, or each sum, sends so many times."""
        return {(step, "up"): times * len(self.labels)} if self.sums is None else self.sums.sums_up(step, times, self.labels)


def group_derivatives(replies: Replies, labels: Indices, n_groups: int) -> tuple[Array, Array, Array | None]:
    """Sums over each group: values (n_groups,), gradients (n_groups, d), Hessians (n_groups, d, d) if users sent them."""
    slopes, curvatures = replies[Slopes], replies.get(Curvatures)
    values, gradients = group_sums(slopes.value[:, None], labels, n_groups)[:, 0], group_sums(slopes.gradient, labels, n_groups)
    if curvatures is None:
        return values, gradients, None
    return values, gradients, symmetric(group_sums(curvatures.triangle, labels, n_groups), gradients.shape[1])


def group_sums(rows: Array, labels: Indices, n_groups: int) -> Array:
    """Sums (n_groups, m) of the rows (n, m) of each group, added in member order."""
    sums = np.zeros((n_groups, rows.shape[1]))
    np.add.at(sums, labels, rows)
    return sums
