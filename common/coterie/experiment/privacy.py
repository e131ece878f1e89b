"""Differential privacy of a run: what is clipped and noised, and how much noise there is.

A method says in `Method.protects` which units it can protect.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, model_validator

from coterie.arrays import Array
from coterie.draws.accountant import Sampling, Steps, epsilon, noise_multiplier
from coterie.draws.secret import SecretNumbers
from coterie.errors import ConfigError
from coterie.experiment.settings import Settings
from coterie.extras import not_installed
from coterie.findings import Finding

Unit = Literal["row", "user"]
UNITS: Final[tuple[Unit, ...]] = ("row", "user")


@dataclass(frozen=True)
class Draws:
    """How often a round draws units, and how many: the `Steps` of one round, but for their noise."""

    n: int  #: steps
    rate: float  #: share of the units in each
    sampling: Sampling = "poisson"
    n_units: int = 0  #: for fixed samples


ALL_ONCE: Final = Draws(1, 1.0)  #: one step with all units
# Noise of each of two sums in one step, in noise multipliers of the step: 1/s^2 of both add up.
PARTS_PER_SUM: Final = 2.0**0.5


def symmetric_noise(numbers: SecretNumbers, d: int) -> Array:
    """(d, d) the noise of a symmetric matrix whose Frobenius norm is bounded: deviation 1 on the diagonal, and 1 / sqrt(2) beside it.

    That is a standard normal vector of the diagonal and sqrt(2) times the upper triangle, whose length is that norm.
    """
    upper = np.triu(numbers.normal(d * d).reshape(d, d), 1) / np.sqrt(2.0)
    found: Array = upper + upper.T + np.diag(numbers.normal(d))
    return found


def row_draws(n_rows: int, phases: Iterable[Mapping[str, Any]]) -> Draws:
    """The steps of these phases on so many rows of a user: batches with each row at random, of the phases' `batch_size` in the mean.

    A pass has as many steps as whole batches fit into the rows, at least one. All phases have one batch size.
    """
    n, size = 0, n_rows
    for phase in phases:
        size = min(phase["batch_size"] or n_rows, n_rows)
        n += phase["updates"] if phase["updates"] is not None else phase["epochs"] * max(1, n_rows // size)
    return Draws(n, size / n_rows)


class ClipRule(Settings):
    """The clip follows a quantile of the lengths of users' changes: Andrew, Thakkar, McMahan and Ramaswamy (2021), Algorithm 1.

    C <- C exp(-rate (b - quantile)), b the noised share of changes no longer than C. The count has its own noise, of deviation
    `count_noise`, and changes get a little more than `noise_multiplier` says, so that both together spend the same epsilon.
    """

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5  #: Share of changes that are to be no longer than the clip.
    rate: PositiveFloat = 0.2  #: How fast the clip follows.
    #: Standard deviation of the noise of the count. Absent: a twentieth of the users drawn.
    count_noise: PositiveFloat | None = None

    def count_deviation(self, m: int) -> float:
        """That of the noise of the count, of m users."""
        return m / 20 if self.count_noise is None else self.count_noise

    def multiplier(self, whole: float, m: int) -> float:
        """Noise multiplier of the changes, so that with the count of m users they spend what `whole` spends alone: theorem 1 there."""
        rest = whole**-2 - (2 * self.count_deviation(m)) ** -2
        if rest <= 0:
            raise ConfigError(
                f"privacy.adapt.count_noise is {self.count_deviation(m):g}, want more than {whole / 2:g}, half of the noise multiplier: "
                "with less, the count alone spends more than the epsilon"
            )
        return float(rest**-0.5)


class Privacy(Settings):
    """Clipping and noise: what the run tells of a single row, or of a single user, is bounded by (epsilon, delta)."""

    #: What is protected. row: each training row, by noise in the steps of its user (DP-SGD). user: all rows of a user, by noise in the sum
    #: of the users' changes.
    unit: Unit
    #: With unit user: who adds the noise. server, the default: the coordinator, which sees each user's change without noise. hosts: each
    #: host adds a share before its sum is masked, so that the coordinator sees the noised total alone. It wants `federation.sums: masked`.
    where: Literal["server", "hosts"] | None = None
    clip: PositiveFloat  #: Largest Euclidean norm C of a row's gradient, or of a user's change. Longer ones are shortened to it.
    #: Standard deviation of the noise over `clip`. Give either this or `epsilon`.
    noise_multiplier: PositiveFloat | None = None
    epsilon: PositiveFloat | None = None  #: What `stop.rounds` rounds may spend in all. The noise follows from it.
    #: Largest Frobenius norm of a row's Hessian, or of a user's, for methods that send sums of gradients and Hessians.
    clip_hessian: PositiveFloat | None = None
    adapt: ClipRule | None = None  #: With unit user: how `clip`, which is then the first one, follows the users' changes.
    #: Probability with which the bound of epsilon may fail. It should be well below one over the number of units.
    delta: Annotated[float, Field(gt=0, lt=1)]

    @model_validator(mode="after")
    def _one_of_noise_and_epsilon(self) -> Self:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            found = "neither is given" if self.epsilon is None else "both are given"
            raise ValueError(f"noise_multiplier or epsilon says how much noise there is, but {found}: give one")
        if self.where is not None and self.unit == "row":
            raise ValueError(f"where is {self.where!r}, but the noise of unit row is in the steps of its hosts: want no such key")
        if self.adapt is not None and self.is_shared:
            raise ValueError("adapt is for noise of the server: hosts do not tell how many changes are shorter, want no such key")
        if self.adapt is not None and self.unit == "row":
            raise ValueError("adapt is for unit user: the clip of row stays as it is, want no such key")
        return self

    @property
    def is_shared(self) -> bool:
        """Whether the noise of a sum of users' changes is that of the hosts together: of each a share."""
        return self.unit == "user" and self.where == "hosts"

    @property
    def is_of_hosts(self) -> bool:
        """Whether hosts add the noise, so that it protects from the coordinator too."""
        return self.unit == "row" or self.is_shared

    def check_libraries(self) -> None:
        """ConfigError if this process lacks a library of the noise that its host adds."""
        uses_normal, counts = self.unit == "row", self.is_of_hosts and self.epsilon is not None
        for module, is_needed in (("scipy", uses_normal or counts), ("dp_accounting", counts)):
            if is_needed and importlib.util.find_spec(module) is None:
                raise not_installed(f"the noise of this host needs {module}", "coterie[privacy]", Finding("T21"))

    def multiplier(self, per_round: Draws, rounds: int) -> float:
        """The noise multiplier with which so many rounds spend at most `epsilon`; or the given one."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None  # noqa: S101 - see the validator
        return noise_multiplier(self.epsilon, self.delta, rounds * per_round.n, per_round.rate, per_round.sampling, per_round.n_units)

    def spent(self, per_round: Draws, multiplier: float, rounds: int) -> float:
        """The epsilon of so many rounds with this noise."""
        return epsilon(Steps(multiplier, rounds * per_round.n, per_round.rate, per_round.sampling, per_round.n_units), self.delta)


def noised_rounds(experiment: Any) -> int:
    """The most rounds with noise. Sums of a quadratic loss tell all at one point, so they have noise once."""
    from coterie.registry import method  # noqa: PLC0415 - methods import this module

    return 1 if method(experiment.method.name).noises_sums and experiment.problem.is_quadratic else int(experiment.stop.rounds)


def _unclipped(experiment: Any, found: Any) -> str:
    """What is missing for noised sums of gradients and Hessians, or is there without them: a sentence, "" for nothing."""
    privacy, name = experiment.privacy, experiment.method.name
    if not found.noises_sums:
        said = f"privacy.clip_hessian is for sums of Hessians, and method {name!r} sends none: want no such key"
        return "" if privacy.clip_hessian is None else said
    if privacy.is_shared:
        return f"privacy.where is 'hosts', but method {name!r} sends sums of derivatives, which the coordinator shortens: want server"
    if privacy.clip_hessian is None:
        return f"method {name!r} sends sums of Hessians, and privacy.clip bounds gradients alone: want privacy.clip_hessian too"
    if privacy.adapt is not None:
        return f"privacy.adapt follows changes of models, and method {name!r} sends sums of derivatives: want no such key"
    if experiment.problem.is_distance:
        return f"problem.loss is {experiment.problem.loss!r}, whose Hessian has no parts of rows to shorten: want a loss with targets"
    return ""


def refused(experiment: Any) -> str:
    """What in an experiment would send numbers without noise, and what is wanted instead: a sentence, "" for nothing."""
    from coterie.registry import method  # noqa: PLC0415 - methods import this module

    if experiment.privacy is None:
        limit = experiment.stop.epsilon
        return "" if limit is None else f"stop.epsilon is {limit:g}, but there is no key 'privacy': want one, or no stop.epsilon"
    config, unit, found = experiment.method, experiment.privacy.unit, method(experiment.method.name)
    if unit not in found.protects:
        others = f"it can have privacy.unit {' or '.join(sorted(found.protects))}" if found.protects else "want a method that can have it"
        return f"privacy.unit is {unit!r}, but method {config.name!r} cannot protect it: {found.unprotected}; {others}"
    if sentence := found.leaks(config, experiment.privacy) or _unclipped(experiment, found):
        return sentence
    if experiment.privacy.is_shared:
        if not experiment.masks_sums:
            said = "federation.sums is 'open', but with privacy.where 'hosts' each host adds a share of the noise, which alone hides little"
            return f"{said}: want federation.sums: masked and exact_sums: true, or privacy.where: server"
    elif unit == "user" and experiment.exact_sums:
        said = "exact_sums is true, but privacy.unit 'user' shortens the change of each user, which a sum hides"
        return f"{said}: want false, or privacy.where: hosts with federation.sums: masked"
    if experiment.references:
        return "references send models and derivatives without noise: want none beside privacy"
    if experiment.inference:
        return "inference sends second moments without noise: want false beside privacy"
    if experiment.data.standardize or experiment.data.fills_missing:
        return "data.standardize and filling of missing cells send sums without noise: want neither beside privacy"
    if experiment.privacy.is_of_hosts and experiment.data.fold is not None:
        whose = "privacy.unit 'row'" if unit == "row" else "privacy.where 'hosts'"
        return f"data.fold judges models on part of the training rows, whose scores have no noise: want none beside {whose}"
    if experiment.federation.is_two_tier:
        return f"federation.topology is {experiment.federation.topology!r}, but aggregators add no noise: want 'flat' beside privacy"
    return ""


def uncounted(experiment: Any) -> list[str]:
    """What leaves a host without noise, so that epsilon does not bound it. Sentences without full stops, which runs and reports print."""
    privacy = experiment.privacy
    if privacy is None:
        return []
    if not privacy.is_of_hosts:
        return ["privacy: the coordinator and readers of its run folder see each user's changes, losses and scores without noise"]
    has_scores = not (privacy.is_shared and experiment.method.keeps_models)
    listed = "numbers of rows, what joining tells, and scores on held-out rows" if has_scores else "numbers of rows and what joining tells"
    said = [f"privacy: {listed} have no noise, and epsilon does not count them"]
    if not has_scores:
        said.append("privacy: users do not judge models that they keep, since these are trained without noise: there are no scores")
    if getattr(experiment.data, "standardize_own", False):
        scaled = "data.standardize_own scales features by means and deviations of the same rows, without noise"
        said.append(f"privacy: {scaled}: epsilon holds as if these were public, want false and public constants if they are not")
    return said
