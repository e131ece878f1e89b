"""Convex clustering by PDMM: the server half.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1; steps S1 to S11 are named where they happen. Deviations from the print:

- Drawn in pairs, z_ji = -z_ij and mu_ji = -mu_ij hold throughout, which is the halved form that section IV mentions; (16) as printed sees
  only the pairs with i first, and with the printed uniform draw the limit depends on the draws (`sampling: uniform`, placement paper,
  keeps that, with a warning). At full participation users send z_ij and z_ji as printed, though the second half says nothing new.
- S7 reaches the users inside S_P too. S7 and S10 of a round travel with S1 of the next, and `finish` delivers the last ones: one
  round trip per iteration. With z after x, S3 uses x^{t+1}, at the price of a second round trip in placement paper.
- Placement lean (not in the paper): z, mu and mu^ stay here and a user receives the one vector v_i that (16) needs of them. With
  uniform or recorded ordered pairs it minimizes (15) in full, rho/2 and lambda = LAM/2 per ordered pair.
- `forecast` (not in the paper) asks only users whose x_i the server cannot foretell from their answers before, see `forecast`. The x-update
  of the others is inexact, by an error that falls with the residual. A residual that ends a stage is one of answers.
- `acceleration: anderson` (not in the paper) starts each round from an extrapolation of earlier rounds' v and mu, see `anderson`. That
  the iteration is averaged in these coordinates is not proven; of the problems tried, N of 2 to 120, none took more rounds with it.

Left out (skip, placement lean): user i counts as not drawn in S2 and S4, x_i^{t+1} = x_i^t. The other x_j and all of z, mu and mu^, which
are kept here, make the steps of Algorithm 1 with that x_i, also for the pairs of i. While i is away the iterates tend to the minimum of (3)
over the others' models with x_i fixed, and the residuals measure the distance from that. Once i is back, the limit is that of a run without
losses, since a fixed point of the whole iteration is one of each part. In placement paper every user keeps every x_j and needs all of S7,
so nobody can be left out.
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
from coterie.experiment.config import Experiment
from coterie.families.pdmm_messages import Excesses, Values, ValuesWanted
from coterie.methods import oracle
from coterie.methods.pdmm import Config, Constants
from coterie_server.families import ties
from coterie_server.interface.deferred import Figures
from coterie_server.interface.half import (
    FLAT_ONLY,
    UNCONVERGED,
    Counts,
    Federation,
    Need,
    Outcome,
    ServerHalf,
    Setting,
    StageHalf,
    half_of,
)
from coterie_server.interface.stages import Stage, along_path, reference
from coterie_server.maths.clusters import partition, persistent
from coterie_server.methods.pdmm import counts as pdmm_counts
from coterie_server.methods.pdmm import forecast, pairs
from coterie_server.methods.pdmm import messages as pdmm_messages
from coterie_server.methods.pdmm.arrivals import Arrivals
from coterie_server.methods.pdmm.messages import NOBODY
from coterie_server.methods.pdmm.rounds import Carry, Clustering, Multipliers, Rounds, State, present


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
        if self.config.graph != "complete":
            return pairs.on_graph(ties.graph_of(self.config.graph, self.setting))
        return pairs.ordered(self.n) if self.config.sampling in ("uniform", "recorded") else pairs.half(self.n)

    @cached_property
    def rounds(self) -> Rounds:
        return Rounds(
            self.config, self.layout, self.steps, self.lam, self.setting.precision, self.setting.residual, last=self.setting.rounds
        )

    @property
    def is_lean(self) -> bool:
        return self.config.placement == "lean"

    @property
    def persistence(self) -> int:
        return self.config.persistence or (1 if self.config.sampling in ("full", "arrival") else 3)

    @property
    def graph_mark(self) -> int:
        return ties.mark_of(self.layout.graph)

    @property
    def untold(self) -> Indices:
        """Whom a stage tells their degrees; in a complete graph everyone knows them."""
        return NOBODY if self.layout.graph is None else np.arange(self.n)

    @cached_property
    def warm(self) -> Carry | None:
        """The iterate of the stage before, when that was one of this method."""
        start = self.setting.start
        return start.carry if self.config.start == "global" and start is not None and isinstance(start.carry, Carry) else None

    def as_half(self) -> StageHalf[State]:
        warnings = self.config.unproven(self.layout.extent, self.steps)
        return replace(half_of(self), printed_vectors=self.printed_vectors, labels_of=self.labels_of, warnings=warnings)

    @property
    def client_options(self) -> Mapping[str, Any]:
        options = {
            "stage": self.setting.stage,
            "warm_from": self.warm.stage if self.warm else "",
            "placement": self.config.placement,
            "z_after_x": self.config.z_after_x(),
            "linearized": self.config.x_update == "linearized",
            "stochastic": {} if self.config.stochastic is None else self.config.stochastic.model_dump(),
            "in_pairs": self.layout.copies == 1,
            "on_graph": self.layout.graph is not None,
            "penalty": self.lam,
            "rho": self.steps.rho,
            "eta": self.steps.eta,
            "nu": self.steps.nu,
        }
        return {"pdmm": options}

    def start_models(self) -> Array | None:
        """x^0 (n, d) as S0 sends it to the users; None for zeros, and along a path, where they have it."""
        start = self.setting.start_models
        return None if self.config.start == "zero" or self.warm is not None or start is None else self.setting.precision.rounded(start)

    async def init(self, federation: Federation) -> State:  # noqa: ARG002 - S0 travels with round 1
        """x^0 from the stage before, z, mu and mu^ zero; all of them kept along a path."""
        zero_for = np.zeros(self.layout.extent.n_pairs if self.persistence > 1 else 0, dtype=np.int64)
        is_sampled = self.config.sampling != "full"
        unknown = self.lam / self.steps.rho  # the largest move of a mu stands for blocks that were not drawn yet
        x_moved = np.full(self.n if is_sampled else 0, unknown)
        z_moved = np.where(self.layout.first == self.layout.second, 0.0, unknown) if is_sampled else np.zeros(0)
        rest = (zero_for, x_moved, z_moved, NOBODY, NOBODY, Clustering(NOBODY), self.steps.rho, self.untold, self.graph_mark)
        if self.warm is not None:
            ties.check_same(self.layout.graph, self.warm.graph_mark)
            x, z, mu, muhat = self.warm.x, self.warm.z, self.warm.mu, self.warm.muhat
        else:
            start = self.start_models()
            x, z = np.zeros((self.n, self.d)) if start is None else start, pairs.zeros(self.layout, self.d)
            mu, muhat = z, z if self.is_lean else np.zeros((self.d, 0))
        v = sums = np.zeros((0, self.d))
        if self.is_lean and not is_sampled:
            v, sums = self.rounds.aggregates(self.steps.rho, x, z, muhat), pairs.sums(self.layout, mu)
        forecasts = None
        if self.config.forecast is not None:
            kept = None if self.warm is None else self.warm.forecasts
            forecasts = forecast.nothing(self.n, self.d) if kept is None else kept
        return State(x, z, Multipliers(mu, muhat, sums, 0.0), v, *rest, forecasts=forecasts)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """One iteration; figures: blocks updated, the two residuals, and when due the objective and the number of `labels_of`."""
        ties.check_same(self.layout.graph, state.graph_mark)
        chosen = self.chosen(number)
        is_due = self.config.evaluate_every > 0 and number % self.config.evaluate_every == 0
        extra = pdmm_messages.start(self.start_models(), is_lean=self.is_lean) if number == 1 else []
        if is_due:
            extra.append(ValuesWanted())
        new, replies = await self.rounds.advance(state, federation, chosen, extra, number)
        new = replace(new, untold=np.setdiff1d(state.untold, replies.awaited(state.untold)))
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
        if new.forecasts is not None:
            figures |= pdmm_counts.of_forecasts(new.forecasts, is_valued=replies.get(Values) is not None)
        if (excesses := replies.get(Excesses)) is not None:
            figures[UNCONVERGED] = float((excesses.excess > 1.0).sum())
        new = self.rounds.balanced(state, new, number)
        if there is not chosen.x and there is not None:
            drawn = np.arange(self.n) if chosen.x is None else chosen.x
            figures |= {"absent": float(drawn.size - there.size), "unasked": float(replies.n_unasked(drawn))}
        if is_due and replies.answered is not None:
            figures["told"] = float(replies.awaited(np.arange(self.n)).size)
        if state.untold.size:
            figures |= {"ties_told": float(state.untold.size), "unasked_ties": float(replies.n_unasked(state.untold))}
        if number == 1 and (n_unasked := replies.n_unasked(np.arange(self.n))):
            figures["unasked_at_start"] = float(n_unasked)
        if is_due and replies.answered is None and (values := replies.get(Values)) is not None:
            figures["objective"] = float(values.f.sum()) + self.lam * pairs.total_distance(self.layout, new.x)
        if is_due:
            x, zero_for, z = new.x, new.zero_for, new.z
            clustering = Clustering.deferred(lambda: Clustering(self.clusters(x, zero_for, z)))
            new = replace(new, clustering=clustering)
            figures["clusters"] = lambda: float(clustering.labels.max() + 1)
        return new, Figures(figures)

    def labels_of(self, state: State) -> Indices | None:
        """Clusters (n,) when they were last due, by the rule of `finish`."""
        return state.clustering.labels if state.clustering.labels.size else None

    def clusters(self, x: Array, zero_for: Indices, z: Array) -> Indices:
        """Clusters (n,), on the way and at the end: users joined by lasting exact zeros of z, or whose models are near.

        Users who have not moved from a common start are near nobody: their models do not show their data yet.
        """
        unmoved = None
        if self.warm is None:
            start = self.start_models()
            unmoved = np.asarray((x == (0.0 if start is None else start)).all(axis=1))
        zeros = zero_for >= self.persistence if self.persistence > 1 else pairs.zero_pairs(self.layout, z)
        among = None if self.layout.graph is None else np.stack([self.layout.first, self.layout.second])
        return partition(x, zeros, self.config.cluster_tolerance, apart=unmoved, among=among)

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """Delivers the last S7 and S10 and finds the clusters."""
        if owed := self.rounds.owed(state):
            await federation.exchange(*owed)
        labels = self.clusters(state.x, state.zero_for, state.z)
        figures = {**pdmm_counts.of_clusters(state.x, labels), "rho_first": self.steps.rho, "rho": state.rho}
        where = (self.setting.stage, self.config.placement, self.layout.copies)
        carry = Carry(*where, state.x, state.z, state.mu, state.muhat, state.rho, state.graph_mark, state.forecasts)
        warnings = tuple[str, ...]()
        if state.forecasts is not None and (n_foretold := self.n - int(state.forecasts.are_own.sum())):
            why = "neither residual nor rounds ended the stage"
            warnings = (f"the models of {n_foretold} of {self.n} users are the server's forecasts: {why}",)
        new = self.layout.graph if self.warm is None else None  # a path has one graph
        return Outcome(state.x, labels, figures, carry=carry, notes=ties.notes_on(new), ties=ties.outcome_of(new), warnings=warnings)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        return pdmm_counts.vectors(self.config, self.n, self.start_models(), figures)

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        return pdmm_counts.scalars(self.config, self.n, figures)

    def printed_vectors(self, n_rounds: int) -> Mapping[str, float]:
        return pdmm_counts.printed(self.config, self.layout.extent, n_rounds)

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
        duals = config.dual_blocks(self.layout.extent) if config.dual == "independent" else None
        random = generator(self.setting.seed, f"pdmm blocks of {self.setting.stage}", round_number=number)
        return draw(self.layout, config.primal_blocks(self.layout.extent), duals, random)


def needs_everyone(config: Config) -> str:
    """See `coterie_server.run.plan`."""
    if config.sampling == "arrival":
        return "with sampling 'arrival' a pair of users waits for both, and no update is older than max_staleness allows"
    if config.forecast is not None:
        return "with 'forecast' a stage ends by the answers of all users"
    return "" if config.placement == "lean" else "in placement 'paper' users keep each other's models, which must stay equal"


def set_up(config: Config, setting: Setting) -> Pdmm:
    """The server half for one stage. Raises ConfigError when config, members and start do not fit together."""
    n = len(setting.members)
    if setting.facts is None:
        raise ConfigError("pdmm needs the users' facts, found none")
    mean = None if setting.facts.smoothness is None else float(setting.facts.smoothness.mean())
    method = Pdmm(config, setting, Constants(0.0, 0.0, 0.0, 0.0), config.lam(n), setting.facts.d)
    method = replace(method, steps=config.steps_for(method.layout.extent, mean))
    if config.is_balanced() and method.warm is not None:  # along a path
        method = replace(method, steps=method.steps.at(method.warm.rho))
    _check_start(method)
    _check_draws(method)
    return method


def _check_start(method: Pdmm) -> None:
    start, carry, config = method.setting.start_models, method.warm, method.config
    if config.start == "global" and start is None:
        raise ConfigError("start is global, but no models come from a stage before: name one, or write start: zero")
    if carry is not None and (carry.placement, carry.copies) != (config.placement, method.layout.copies):
        kept = f"stage {carry.stage!r} kept its pairs in placement {carry.placement}, {'half' if carry.copies == 1 else 'ordered'}"
        wanted = f"from them with placement {config.placement} and sampling {config.sampling}"
        raise ConfigError(f"{kept}: stage {method.setting.stage!r} cannot go on {wanted}")
    if start is not None and start.shape != (method.n, method.d):
        raise ConfigError(f"the models to start from have shape {start.shape}, want {(method.n, method.d)}")


def _check_draws(method: Pdmm) -> None:
    n, config = method.n, method.config
    config.primal_blocks(method.layout.extent)
    config.dual_blocks(method.layout.extent)
    for number, (users, *places) in enumerate(config.schedule or (), 1):
        wrong = [user for user in users if user >= n] + [p for part in places for p in part if p >= n * n or p // n == p % n]
        if wrong:
            raise ConfigError(f"round {number} of the schedule names block {wrong[0]}, which {n} users do not have")


def stages(config: Config, experiment: Experiment) -> list[Stage]:
    """All stages of `config`, in order: global with `start: global`; pdmm, or pdmm-LAM for each of a path; refit with `refit: true`.

    `experiment.stop` holds for each penalty on its own. A decreasing path takes the fewest rounds: a stage starts from the iterate of the
    one before, duals included. The clusters of each penalty are refitted by a stage of `oracle`, and held-out rows choose among all these
    models: the penalty with the best models finds no clusters, and the one that finds good clusters shrinks too much.
    """
    if config.forecast is not None and experiment.stop.objective_gap is not None:
        raise ConfigError("method.forecast is given with stop.objective_gap: the objective is seldom known then, want stop.residual alone")
    needed = ties.before(config.graph)
    before = needed + ([reference("global")] if config.start == "global" else [])
    # From the second penalty on, the start is the stage before, whatever the first one started from.
    listed = along_path(config, experiment, before, oracle.Config(partition="found"), start="global")
    return [replace(stage, beside=tuple(one.name for one in needed)) if stage.method == config.name else stage for stage in listed]


def build(config: Config, setting: Setting) -> StageHalf[Any]:
    method = set_up(config, setting)
    if config.sampling != "arrival":
        return method.as_half()
    start, options = method.start_models(), method.client_options
    arrivals = Arrivals(config, setting, method.layout, method.steps, method.lam, start, method.warm, method.clusters, options)
    return replace(half_of(arrivals), labels_of=arrivals.labels_of)


def memory(config: Config, n: int, d: int) -> Need | None:
    """The pair variables before and after a round, what Anderson acceleration keeps, and whom the pairs belong to."""
    found = ties.pairs_of(config.graph, n)
    if found is None:
        return None
    n_pairs, which = found
    if config.graph == "complete" and config.sampling in ("uniform", "recorded"):
        n_pairs = n * n
    vectors = 4 if config.z_after_x() else 6
    vectors += 2 * config.anderson_memory + 3 if config.acceleration == "anderson" else 0
    others = 16 if config.sampling == "full" else 40
    learned = 0.0 if config.forecast is None else 8.0 * n * d * d * 5  # before and after, and three while they change
    needed = max(n_pairs * (8.0 * d * vectors + others) + learned, ties.bytes_to_read(config.graph, n_pairs))
    return Need(needed, f"pdmm on {which}", ties.instead_of(config.graph))


SERVER = ServerHalf(
    memory=memory,
    build=build,
    stages=stages,
    needs_everyone=needs_everyone,
    tiers=FLAT_ONLY,  # every pair of users has a dual variable, whatever their known clusters
)
