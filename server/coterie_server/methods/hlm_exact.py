"""`hlm_exact`: the minimiser of (2.1) from the users' sufficient statistics. One round; the arithmetic is in `coterie_server.maths.hlm`.

Users send the statistics once along a grid, since they do not depend on the weights. Nobody can be left out (skip): every model depends on
all statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.methods.hlm_exact import LOSSES, AskStatistics, Config, Models, Statistics
from coterie_server.families import perturbed, privacy
from coterie_server.interface.half import CONVERGED, Counts, Federation, Outcome, ServerHalf, Setting, StageHalf, half_of
from coterie_server.interface.stages import Stage
from coterie_server.maths import hlm
from coterie_server.maths.covariance import symmetric
from coterie_server.methods.oracle import known_labels

_UNEQUAL = 30.0  # the largest root mean square of a feature by the smallest, from which there is a warning


@dataclass(frozen=True)
class State:
    """The users' models (n, d), empty before the only round, and their statistics, once they are known."""

    theta: Array
    told: hlm.Quadratics | None


@dataclass(frozen=True)
class HlmExact:
    """The server half: weights by user and by cluster."""

    cluster_of: Indices  # (n,)
    labels: Indices  # (n,) the same clusters, numbered by their first member
    gamma: Array  # (n,)
    alpha: Array  # (k,)
    told: hlm.Quadratics | None = None  # by the users, in an earlier stage
    d: int = 0
    budget: privacy.Budget | None = None  # with noise of users

    @property
    def client_options(self) -> Mapping[str, Any]:
        return {"hlm_exact": {}}

    async def init(self, federation: Federation) -> State:  # noqa: ARG002
        """No models, and the statistics if an earlier stage has them."""
        return State(np.zeros((len(self.gamma), 0)), self.told)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:  # noqa: ARG002
        """Gathers the statistics, solves, and sends each user its model."""
        users = state.told
        if users is None:
            told = (await federation.exchange(AskStatistics()))[Statistics]
            curvature = symmetric(told.triangle, told.slope.shape[1])
            users = hlm.Quadratics(curvature if self.budget is None else hlm.nearest_convex(curvature), told.slope)
        sums = _gamma_sums(self.gamma, self.cluster_of, len(self.alpha))
        theta = hlm.known_clusters(users, self.cluster_of, self.gamma, hlm.lambda_of(self.alpha, sums)).theta
        await federation.exchange(Models(theta))
        return State(theta, users), {"penalty": self._penalty(theta), CONVERGED: 1.0}

    async def finish(self, state: State, federation: Federation) -> Outcome:  # noqa: ARG002
        """The users' models. Their losses and the figure `penalty` add up to (2.1)."""
        figures = {"penalty": self._penalty(state.theta), "clusters": float(len(self.alpha)), **privacy.closing(self.budget, {})}
        return Outcome(state.theta, self.labels, figures, carry=state.told, warnings=_unequal_scales(state.told))

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One vector b_i up, unless it is known, and one model down for each user."""
        n_vectors = float(len(figures) * len(self.gamma))
        return {("statistics", "up"): n_vectors if self.told is None else 0.0, ("models", "down"): n_vectors}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """The upper triangle of A_i and b_i: d(d+3)/2 from each user that has not told them before."""
        n_told = len(figures) * len(self.gamma) if self.told is None else 0
        return {("statistics", "up"): n_told * self.d * (self.d + 3) / 2}

    def _penalty(self, theta: Array) -> float:
        return hlm.penalty(theta, self.cluster_of, self.gamma, self.alpha)


def stages(config: Config, experiment: Experiment) -> Sequence[Stage]:
    """One stage. ConfigError for a loss that is not quadratic."""
    loss = experiment.problem.loss
    if loss not in LOSSES:
        raise ConfigError(f"problem.loss is {loss!r}, want {' or '.join(LOSSES)}: method 'hlm_exact' solves quadratic losses only")
    return perturbed.stages(config, experiment)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage. ConfigError when a user has no known cluster, or a mapping of weights does not fit the members."""
    members = setting.members
    labels = known_labels(members)
    gamma = config.gamma_of(members.names, members.clusters)
    sums = _gamma_sums(gamma, members.cluster_of, len(members.cluster_names))
    d = 0 if setting.facts is None else setting.facts.d
    carried = None if setting.start is None else setting.start.carry
    told = carried if isinstance(carried, hlm.Quadratics) else None
    budget = None if setting.privacy is None else perturbed.budget_of(setting)
    half = half_of(HlmExact(members.cluster_of, labels, gamma, config.alpha_of(members.cluster_names, sums), told, d, budget))
    return half if budget is None else perturbed.accounted(half, budget, setting)


def _unequal_scales(told: hlm.Quadratics | None) -> tuple[str, ...]:
    """A warning where one weight cannot suit the coefficients of all features, of which the intercept is one."""
    squares = np.zeros(0) if told is None else np.diagonal(told.curvature.sum(axis=0))
    squares = squares[squares > 0]
    ratio = float(np.sqrt(squares.max() / squares.min())) if squares.size else 1.0
    if ratio <= _UNEQUAL:
        return ()
    said = f"a feature is {ratio:.3g} times as large as another one or the intercept, and one gamma holds for all coefficients"
    return (f"{said}: want data.standardize: true",)


def _gamma_sums(gamma: Array, cluster_of: Indices, n_clusters: int) -> Array:
    """Gamma_j (k,)."""
    return np.bincount(cluster_of, gamma, n_clusters).astype(np.float64, copy=False)


SERVER = ServerHalf(build=build, stages=stages, needs_everyone="every model depends on everyone's statistics")
