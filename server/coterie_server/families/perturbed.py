"""One model for each group of users from sums of gradients and Hessians with noise: Newton's method without a line search.

With `privacy.unit: row` users have added the noise (`coterie_client.families.perturbed`). With `user` the server shortens each user's
gradient and Hessian by one factor, to at most `clip` and `clip_hessian` (Frobenius), and adds noise once to the sums of each group. A user
is in one group.

    x <- x - t max(H, kappa)^{-1} g,   t = log(1 + r) / r

- max(H, kappa) has the eigenvalues of H, raised to kappa = sqrt(2 d) s where they are less. s is the deviation of the noise on the diagonal
  of H, so kappa is about the largest eigenvalue of that noise. What is inverted is positive definite, and noise alone moves nothing far.
  It costs no privacy. AdaSSP (Wang, 2018, "Revisiting differentially private linear regression") adds a ridge to all directions instead,
  from a third noised number; on the schools of `silos` that shrinks what the rows know well.
- Least squares takes one exchange with t = 1, which is AdaSSP but for that.
- Other losses take `stop.rounds` exchanges. r = sqrt(clip_hessian) |step|, the change of a score, shortens steps as in Sun and Tran-Dinh
  (2019), "Generalized self-concordant functions", nu = 2. The steps are the noisy Newton method of Avella-Medina, Bradshaw and Loh (2023),
  "Differentially private inference via noisy optimization", section 4. Rounds with noise add up.

Nothing has a line search, since values would need noise of their own. Nobody can be left out, as in `coterie_server.families.consensus`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.draws.secret import digest
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.privacy import ALL_ONCE, PARTS_PER_SUM, noised_rounds, symmetric_noise
from coterie.families.consensus import Curvatures, GroupModel, Slopes
from coterie_server.families import privacy
from coterie_server.families.consensus import GroupSolver
from coterie_server.interface.half import CONVERGED, ROUNDING, Counts, Federation, Outcome, Setting, StageHalf, half_of
from coterie_server.interface.stages import Stage, single_stage
from coterie_server.maths.covariance import symmetric

# Figures: users whose gradient or Hessian was longer than its clip, and directions of models in which noise hides what rows say.
SHORTENED, LOST = "shortened_users", "directions_lost_to_noise"


@dataclass(frozen=True)
class State:
    points: Array  # (K, d) the groups' models
    n_shortened: int = 0  # of the last round, with `privacy.unit: user`


@dataclass(frozen=True)
class PerturbedSolver:
    """The half of a stage: `plain` knows the groups and the messages."""

    plain: GroupSolver
    setting: Setting
    budget: privacy.Budget

    @property
    def client_options(self) -> Mapping[str, Any]:
        return self.plain.client_options

    async def init(self, federation: Federation) -> State:
        """The points from which `plain` would start."""
        return State((await self.plain.init(federation)).points)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """One exchange, and one step of all groups."""
        query, figures = GroupModel(state.points[self.plain.labels]), dict[str, float]()
        if self._of_users:
            replies = await federation.exchange(query)
            shortened, n = self._shortened(replies[Slopes].gradient, symmetric(replies[Curvatures].triangle, self.plain.facts.d))
            gradients, hessians = self._noised(*shortened, number)
            figures[SHORTENED] = float(n)
        else:
            totals = await federation.total(query, of=self.plain.sums_asked)
            gradients, hessians = totals[Slopes].gradient, symmetric(totals[Curvatures].triangle, self.plain.facts.d)
            n = 0
            if totals.rounding:
                figures[ROUNDING] = totals.rounding
        step, n_raised = newton_steps(gradients, hessians, self._kappa)
        is_whole = self.setting.problem is not None and self.setting.problem.is_quadratic
        length = np.sqrt(self._clip_hessian) * np.linalg.norm(step, axis=1)
        shares = np.ones(len(step)) if is_whole else np.log1p(length) / np.maximum(length, np.finfo(float).tiny)
        points = state.points + np.where(length > 0.0, shares, 1.0)[:, None] * step
        if not np.isfinite(points).all():
            raise RunError(f"round {number} has left a model that is no number, want more noise, smaller clips, or problem.l2")
        figures |= {"noised_gradient_norm": float(np.linalg.norm(gradients)), LOST: float(n_raised)}
        return State(points, n), {**figures, CONVERGED: float(is_whole)}

    def _shortened(self, gradients: Array, hessians: Array) -> tuple[tuple[Array, Array], int]:
        """Those of users (n, d) and (n, d, d), none longer than its clip; and how many users had a longer one."""
        lengths = np.linalg.norm(gradients, axis=1), np.linalg.norm(hessians, axis=(1, 2))
        clips = self.setting.privacy.clip if self.setting.privacy else 0.0, self._clip_hessian
        factors = np.min([clip / np.maximum(length, clip) for length, clip in zip(lengths, clips, strict=True)], axis=0)
        return (gradients * factors[:, None], hessians * factors[:, None, None]), int((factors < 1).sum())

    def _noised(self, gradients: Array, hessians: Array, number: int) -> tuple[Array, Array]:
        """Sums over groups (K, d) and (K, d, d) with noise, which depends on the key, the round and the sums."""
        assert self.setting.secret is not None  # noqa: S101 - `NoiseKey` makes it for this unit
        assert self.setting.privacy is not None  # noqa: S101 - see `noised_half`
        labels, d = self.plain.labels, self.plain.facts.d
        n_groups = int(labels.max()) + 1
        gradient, hessian = np.zeros((n_groups, d)), np.zeros((n_groups, d, d))
        np.add.at(gradient, labels, gradients)
        np.add.at(hessian, labels, hessians)
        numbers = self.setting.secret.child("round", number, digest(gradient.tobytes(), hessian.tobytes())).numbers()
        scale = PARTS_PER_SUM * self.budget.multiplier
        for group in range(n_groups):
            gradient[group] += scale * self.setting.privacy.clip * numbers.normal(d)
            hessian[group] += scale * self._clip_hessian * symmetric_noise(numbers, d)
        return gradient, hessian

    @property
    def _of_users(self) -> bool:
        return self.setting.privacy is not None and self.setting.privacy.unit == "user"

    @property
    def _clip_hessian(self) -> float:
        return (self.setting.privacy and self.setting.privacy.clip_hessian) or 0.0

    @property
    def _kappa(self) -> Array:
        """(K,) about the largest eigenvalue of the noise in each group's Hessian: sqrt(2 d) times its deviation on the diagonal."""
        labels, scale = self.plain.labels, PARTS_PER_SUM * self.budget.multiplier * self._clip_hessian
        squares = np.ones(int(labels.max()) + 1)
        if not self._of_users:
            is_sum = self.setting.problem is not None and self.setting.problem.reduction == "sum"
            weights = np.ones(labels.size) if is_sum else 1.0 / self.plain.facts.n_rows
            squares = np.bincount(labels, np.square(weights)).astype(np.float64)
        found: Array = np.sqrt(2.0 * self.plain.facts.d * squares) * scale
        return found

    async def finish(self, state: State, federation: Federation) -> Outcome:  # noqa: ARG002
        """The group's model for each user."""
        figures = {"clusters": float(len(state.points)), **privacy.closing(self.budget, {}), "clip_hessian": self._clip_hessian}
        return Outcome(state.points[self.plain.labels], self.plain.labels, figures)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """As without noise."""
        return self.plain.expected_vectors(figures)

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """As without noise."""
        return self.plain.expected_scalars(figures)


def newton_steps(gradients: Array, hessians: Array, kappa: Array) -> tuple[Array, int]:
    """-max(H, kappa)^{-1} g (K, d), and how many eigenvalues of all H were below kappa (K,)."""
    curvatures, axes = np.linalg.eigh(hessians)
    raised = np.maximum(curvatures, np.maximum(kappa, np.finfo(float).tiny ** 0.5)[:, None])
    coordinates = np.matmul(gradients[:, None, :], axes)[:, 0, :] / raised
    return -np.matmul(axes, coordinates[:, :, None])[:, :, 0], int((curvatures < raised).sum())


def noised_half(plain: GroupSolver, setting: Setting) -> StageHalf[Any]:
    """The half for `setting.privacy`. ConfigError for more dimensions than Hessians are sent for."""
    wanted = setting.privacy
    assert wanted is not None  # noqa: S101 - the caller has looked
    if not plain.has_hessians:
        said = f"method.newton_up_to is {plain.newton_up_to}, and models have {plain.facts.d} numbers, but steps with noise need Hessians"
        raise ConfigError(f"{said}: want newton_up_to of {plain.facts.d} or more beside privacy")
    budget = budget_of(setting)
    return accounted(half_of(PerturbedSolver(plain, setting, budget)), budget, setting)


def budget_of(setting: Setting) -> privacy.Budget:
    """That of as many rounds of all units as the stage has, with noise on sums in each. ConfigError if no noise is enough."""
    assert setting.privacy is not None  # noqa: S101 - the caller has looked
    return privacy.Budget(setting.privacy, [(ALL_ONCE, setting.privacy.multiplier(ALL_ONCE, setting.rounds))])


def accounted(half: StageHalf[Any], budget: privacy.Budget, setting: Setting) -> StageHalf[Any]:
    """The half with its epsilon, and with what is to be said of its noise."""
    facts, notes = setting.known_facts, [privacy.said_of_sums(budget, setting.rounds)]
    doubts = privacy.doubts(budget, facts.n_rows, facts.n_rows.size, facts.d)
    return replace(half, epsilon=budget.spent, warnings=[*half.warnings, *doubts], notes=[*half.notes, *notes])


def stages(config: Any, experiment: Experiment) -> Sequence[Stage]:
    """One stage, of as many rounds as have noise."""
    listed = single_stage(config, experiment)
    if experiment.privacy is None:
        return listed
    return [replace(one, stop=one.stop.model_copy(update={"rounds": noised_rounds(experiment)})) for one in listed]
