"""Convex clustering by PDMM: the server half.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1; steps S1 to S11 are named where they happen. Deviations from the print:

- Drawn in pairs, z_ji = -z_ij and mu_ji = -mu_ij hold throughout, which is the halved form that section IV mentions; (16) as printed sees
  only the pairs with i first, and with the printed uniform draw the limit depends on the draws (`sampling: uniform`, placement paper,
  keeps that, with a warning). At full participation users send z_ij and z_ji as printed, though the second half says nothing new.
- S7 reaches the users inside S_P too. S7 and S10 of a round travel with S1 of the next, and `finish` delivers the last ones: one
  round trip per iteration. With z after x, S3 uses x^{t+1}, at the price of a second round trip in placement paper.
- Placement lean (not in the paper): z, mu and mu^ stay here and a user receives the one vector v_i that (16) needs of them. With
  uniform or recorded ordered pairs it minimizes (15) in full, rho/2 and lambda = LAM/2 per ordered pair.
- `acceleration: anderson` (not in the paper) starts each round from an extrapolation of earlier rounds' v and mu, see `anderson`. That
  the iteration is averaged in these coordinates is not proven; of the problems tried, N of 2 to 120, none took more rounds with it.

Left out (skip, placement lean): user i counts as not drawn in S2 and S4, x_i^{t+1} = x_i^t. The other x_j and all of z, mu and mu^, which
are kept here, make the steps of Algorithm 1 with that x_i, also for the pairs of i. While i is away the iterates so tend to the minimum of
(3) over the others' models with x_i held where it is, and that is what the residuals measure. A fixed point of the whole iteration is
one of any part of it: the limit is the same as ever once i is back. In placement paper everyone keeps everyone's x_j and needs all of
S7, so nobody can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.streams import generator
from coterie.errors import ConfigError, RunError
from coterie.methods.pdmm import Config, Constants, Values, ValuesWanted
from coterie_server.interface.deferred import Figures
from coterie_server.interface.half import FLAT_ONLY, Counts, Federation, Outcome, ServerHalf, Setting, StageHalf, half_of
from coterie_server.maths.clusters import Mask, partition, persistent
from coterie_server.methods.pdmm import counts as pdmm_counts
from coterie_server.methods.pdmm import messages as pdmm_messages
from coterie_server.methods.pdmm import pairs
from coterie_server.methods.pdmm.messages import NOBODY
from coterie_server.methods.pdmm.rounds import Clustering, Multipliers, Rounds, State, present
from coterie_server.methods.pdmm.stages import stages


@dataclass(frozen=True)
class Carry:
    """What a following stage with another penalty starts from; the users keep their part."""

    stage: str
    placement: str
    copies: int
    x: Array
    z: Array
    mu: Array
    muhat: Array
    rho: float


@dataclass(frozen=True)
class Pdmm:
    """The server half for one stage."""

    config: Config
    setting: Setting
    steps: Constants  # of round 1
    lam: float  # LAM
    d: int

    @property
    def n(self) -> int:
        return len(self.setting.members)

    @cached_property
    def layout(self) -> pairs.Layout:
        return pairs.ordered(self.n) if self.config.sampling in ("uniform", "recorded") else pairs.half(self.n)

    @cached_property
    def rounds(self) -> Rounds:
        return Rounds(self.config, self.layout, self.steps, self.lam, self.setting.precision)

    @property
    def is_lean(self) -> bool:
        return self.config.placement == "lean"

    @property
    def persistence(self) -> int:
        return self.config.persistence or (1 if self.config.sampling == "full" else 3)

    @cached_property
    def warm(self) -> Carry | None:
        """The iterate of the stage before, when that was one of this method."""
        start = self.setting.start
        return start.carry if self.config.start == "global" and start is not None and isinstance(start.carry, Carry) else None

    def as_half(self) -> StageHalf[State]:
        """For the engine."""
        return replace(
            half_of(self),
            printed_vectors=self.printed_vectors,
            labels_of=self.labels_of,
            warnings=self.warnings,
        )

    @property
    def client_options(self) -> Mapping[str, Any]:
        options = {
            "stage": self.setting.stage,
            "warm_from": self.warm.stage if self.warm else "",
            "placement": self.config.placement,
            "z_after_x": self.config.z_after_x(),
            "linearized": self.config.x_update == "linearized",
            "in_pairs": self.layout.copies == 1,
            "penalty": self.lam,
            "rho": self.steps.rho,
            "eta": self.steps.eta,
            "nu": self.steps.nu,
        }
        return {"pdmm": options}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know about the settings before the stage starts."""
        return self.config.unproven(self.n, self.steps)

    def start_models(self) -> Array | None:
        """x^0 (n, d) as S0 tells it to the users; None for zeros, and along a path, where they know it."""
        start = self.setting.start
        if self.config.start == "zero" or self.warm is not None or start is None or start.models is None:
            return None
        return self.setting.precision.rounded(start.models)

    async def init(self, federation: Federation) -> State:  # noqa: ARG002 - S0 travels with round 1
        """x^0 from the stage before, z, mu and mu^ zero; all of them kept along a path."""
        zero_for = np.zeros(self.n * (self.n - 1) // 2 if self.persistence > 1 else 0, dtype=np.int64)
        is_sampled = self.config.sampling != "full"
        unknown = self.lam / self.steps.rho  # a block not yet drawn is as far from rest as a mu can be
        x_moved = np.full(self.n if is_sampled else 0, unknown)
        z_moved = np.where(self.layout.first == self.layout.second, 0.0, unknown) if is_sampled else np.zeros(0)
        rest = (zero_for, x_moved, z_moved, NOBODY, NOBODY, Clustering(NOBODY), self.steps.rho)
        if self.warm is not None:
            x, z, mu, muhat = self.warm.x, self.warm.z, self.warm.mu, self.warm.muhat
        else:
            start = self.start_models()
            x, z = np.zeros((self.n, self.d)) if start is None else start, pairs.zeros(self.layout, self.d)
            mu, muhat = z, z if self.is_lean else np.zeros((self.d, 0))
        v = sums = np.zeros((0, self.d))
        if self.is_lean and not is_sampled:
            v, sums = self.rounds.aggregates(self.steps.rho, x, z, muhat), pairs.sums(self.layout, mu)
        return State(x, z, Multipliers(mu, muhat, sums, 0.0), v, *rest)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """One iteration; figures: blocks updated, the two residuals, and when due the objective and the number of `labels_of`."""
        chosen = self.chosen(number)
        is_due = self.config.evaluate_every > 0 and number % self.config.evaluate_every == 0
        extra = pdmm_messages.start(self.start_models(), is_lean=self.is_lean) if number == 1 else []
        if is_due:
            extra.append(ValuesWanted())
        new, replies = await self.rounds.advance(state, federation, chosen, extra, number)
        if self.persistence > 1:
            updated = None if chosen.z is None else pairs.touched(self.layout, chosen.z)
            new = replace(new, zero_for=persistent(state.zero_for, pairs.zero_pairs(self.layout, new.z), updated))
        there = present(chosen.x, replies)
        new = self.rounds.moved(state, new, chosen if there is chosen.x else replace(chosen, x=there))
        done = new
        figures: dict[str, float | Callable[[], float]] = {
            **pdmm_counts.blocks(self.layout, chosen),
            "rho": state.rho,
            "primal_residual": lambda: self.rounds.primal_residual(done),
            "dual_residual": lambda: self.rounds.dual_residual(state, done),
        }
        new = self.rounds.balanced(state, new, number)
        if there is not chosen.x and there is not None:
            drawn = np.arange(self.n) if chosen.x is None else chosen.x
            figures |= {"absent": float(drawn.size - there.size), "unasked": float(replies.n_unasked(drawn))}
        if is_due and replies.answered is not None:
            figures["told"] = float(replies.awaited(np.arange(self.n)).size)
        if number == 1 and (n_unasked := replies.n_unasked(np.arange(self.n))):
            figures["unasked_at_start"] = float(n_unasked)
        if is_due and replies.answered is None:
            figures["objective"] = float(replies[Values].f.sum()) + self.lam * pairs.total_distance(new.x)
        if is_due:
            x, zero_for, z = new.x, new.zero_for, new.z
            clustering = Clustering.deferred(lambda: Clustering(self._clusters(x, zero_for, z)))
            new = replace(new, clustering=clustering)
            figures["clusters"] = lambda: float(clustering.labels.max() + 1)
        return new, Figures(figures)

    def labels_of(self, state: State) -> Indices | None:
        """Clusters (n,) when they were last due, by the rule of `finish`."""
        return state.clustering.labels if state.clustering.labels.size else None

    def _clusters(self, x: Array, zero_for: Indices, z: Array) -> Indices:
        """Clusters (n,), on the way and at the end: users joined by lasting exact zeros of z, or whose models are near.

        Users who have not moved from a common start have said nothing, so they are near nobody.
        """
        unmoved = None
        if self.warm is None:
            start = self.start_models()
            unmoved = np.asarray((x == (0.0 if start is None else start)).all(axis=1))
        return partition(x, self._zeros(zero_for, z), self.config.cluster_tolerance, apart=unmoved)

    def _zeros(self, zero_for: Indices, z: Array) -> Mask:
        """(P,): whose z counts as zero: it has been for `persistence` updates."""
        return zero_for >= self.persistence if self.persistence > 1 else pairs.zero_pairs(self.layout, z)

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """Delivers the last S7 and S10 and finds the clusters."""
        if owed := self.rounds.owed(state):
            await federation.exchange(*owed)
        labels = self._clusters(state.x, state.zero_for, state.z)
        figures = {"clusters": float(labels.max() + 1), "rho_first": self.steps.rho, "rho": state.rho}
        carry = Carry(self.setting.stage, self.config.placement, self.layout.copies, state.x, state.z, state.mu, state.muhat, state.rho)
        return Outcome(state.x, labels, figures, carry=carry)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """See `pdmm_counts.vectors`."""
        return pdmm_counts.vectors(self.config, self.n, self.start_models(), figures)

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """See `pdmm_counts.scalars`."""
        return pdmm_counts.scalars(self.config, self.n, figures)

    def printed_vectors(self, n_rounds: int) -> Mapping[str, float]:
        """See `pdmm_counts.printed`."""
        return pdmm_counts.printed(self.config, self.n, n_rounds)

    def chosen(self, number: int) -> pairs.Chosen:
        """S1 and S8: the blocks of round `number`."""
        config = self.config
        if config.schedule is not None:
            if number > len(config.schedule):
                raise RunError(f"round {number} is not in the schedule, which has {len(config.schedule)} rounds")
            return pairs.Chosen(*(np.array(sorted(blocks), dtype=np.int64) for blocks in config.schedule[number - 1]))
        if config.sampling == "full":
            return pairs.EVERYTHING
        draw = pairs.draw_paired if config.sampling == "paired" else pairs.draw_uniform
        duals = config.dual_blocks(self.n) if config.dual == "independent" else None
        random = generator(self.setting.seed, f"pdmm blocks of {self.setting.stage}", round_number=number)
        return draw(self.layout, config.primal_blocks(self.n), duals, random)


def needs_everyone(config: Config) -> str:
    """See `coterie_server.run.absence`."""
    return "" if config.placement == "lean" else "in placement 'paper' users keep each other's models, which must stay equal"


def set_up(config: Config, setting: Setting) -> Pdmm:
    """The server half for one stage. Raises ConfigError when config, members and start do not fit together."""
    n = len(setting.members)
    if setting.facts is None:
        raise ConfigError("pdmm needs the users' facts (number of coefficients, smoothness), found none")
    method = Pdmm(config, setting, config.steps_for(n, float(setting.facts.smoothness.mean())), config.lam(n), setting.facts.d)
    if config.is_balanced() and method.warm is not None:  # along a path
        method = replace(method, steps=method.steps.at(method.warm.rho))
    _check_start(method)
    _check_draws(method)
    return method


def _check_start(method: Pdmm) -> None:
    start, carry = method.setting.start, method.warm
    if method.config.start == "global" and (start is None or start.models is None):
        raise ConfigError("start is global, but no models come from a stage before: name one, or write start: zero")
    if carry is not None and (carry.placement, carry.copies) != (method.config.placement, method.layout.copies):
        raise ConfigError(
            f"stage {carry.stage!r} kept its pairs in placement {carry.placement}, {'half' if carry.copies == 1 else 'ordered'}: "
            f"stage {method.setting.stage!r} cannot go on from them with placement {method.config.placement} "
            f"and sampling {method.config.sampling}"
        )
    shape = None if start is None or start.models is None else start.models.shape
    if shape is not None and shape != (method.n, method.d):
        raise ConfigError(f"the models to start from have shape {shape}, want {(method.n, method.d)}")


def _check_draws(method: Pdmm) -> None:
    n, config = method.n, method.config
    config.primal_blocks(n)
    config.dual_blocks(n)
    for number, (users, *places) in enumerate(config.schedule or (), 1):
        wrong = [user for user in users if user >= n] + [p for part in places for p in part if p >= n * n or p // n == p % n]
        if wrong:
            raise ConfigError(f"round {number} of the schedule names block {wrong[0]}, which {n} users do not have")


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """As `set_up`, for the engine."""
    return set_up(config, setting).as_half()


SERVER = ServerHalf(
    build=build,
    stages=stages,
    needs_everyone=needs_everyone,
    tiers=FLAT_ONLY,  # every pair of users has a dual variable, whatever their known clusters
)
