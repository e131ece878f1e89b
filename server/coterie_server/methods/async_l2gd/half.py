"""Server halves of `async_l2gd`: the coordinator, which owns the global average, and the aggregators, which own their clusters' schedules.

See `coterie.methods.async_l2gd` for Algorithm 1. Between two global rounds that need a new average a cluster goes its own way; its
aggregator then sends the pair (alpha_j sum gamma_i theta_i, alpha_j Gamma_j) and nothing else.

Nobody can be left out (skip): bar_j = sum gamma_i theta_i / Gamma_j over some of the users is a minimiser's of another F, and the averaging
step divides by the probability that all of them make it. The coins say what every user does in every iteration, with no message to
those who would have to make the steps missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, StopRule
from coterie.families.schedule import Schedule, schedule_by
from coterie.methods.async_l2gd import MESSAGES, Advance, Config, Parameters
from coterie.wire.messages import Message, PerCluster
from coterie_server.families import coin_counts, known_clusters
from coterie_server.families.coin_counts import NO_REUSE, REUSE_ALL, REUSE_WITHIN
from coterie_server.families.known_clusters import (
    Clusters,
    cluster_gap,
    cluster_state,
    clusters_of,
    objective_of,
    private_outcome,
    weighted_average,
)
from coterie_server.families.l2gd_rates import Rates, rates_of
from coterie_server.interface.half import ENDED, ClusterSetting, Counts, Federation, Outcome, ServerHalf, Setting, StageHalf, half_of
from coterie_server.interface.stages import Stage
from coterie_server.methods.async_l2gd.walk import ClusterHalfState, Walk
from coterie_server.record import rundb


@dataclass(frozen=True)
class State:
    """Where the coordinator is: the next iteration, and whether bar is new there, and has yet to be sent."""

    at: int
    average: Array  # (d,) bar
    is_new: bool
    is_stale: bool  # whether some cluster has made a local step since bar was new
    between_rounds: int


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's half."""

    config: Config
    setting: Setting
    clusters: Clusters
    rates: Rates
    reuse: int  # of REUSE_ALL for bar

    def as_half(self) -> StageHalf[State]:
        """For the engine."""
        return replace(
            half_of(self),
            spread_of_vectors=self.spread_of_vectors,
            drawn_vectors=self.drawn_vectors,
            ends=lambda figures: f"{figures['iteration']:.0f} iterations" if figures[ENDED] >= 1 else "",
            part=lambda figures: figures["iteration"] / self.config.iterations,
        )

    @property
    def client_options(self) -> Mapping[str, Any]:
        """The coins, where they are recorded."""
        return {"async_l2gd": {"coins": self.config.coins}}

    async def init(self, federation: Federation) -> State:
        """Everybody gets the parameters."""
        k = self.clusters.size
        parameters = Parameters(
            self.clusters.numbers,
            np.full(k, self.rates.p0),
            self.rates.p,
            self.rates.tau,
            self.clusters.alpha,
            np.full(k, self.rates.eta),
            _reusable(self.config, self.clusters, self.reuse),
        )
        await federation.exchange(parameters)
        assert self.setting.facts is not None  # noqa: S101 - `build` has checked
        return State(0, np.zeros(self.setting.facts.d), is_new=False, is_stale=True, between_rounds=0)

    async def round(self, state: State, federation: Federation, _: int) -> tuple[State, Mapping[str, float]]:
        """To the next iteration that needs a new bar, or as far as is asked for at once."""
        config, numbers = self.config, self.clusters.numbers
        stop = min(config.iterations, state.at + config.round_iterations, self._next_trace(state.at))
        start = state.at + int(state.is_new)  # the iteration at hand needs no newer average than that just made
        until, is_stale = self._schedule().next_global(start, stop, is_stale=state.is_stale, is_reusable=self.reuse == REUSE_ALL)
        wants_pair = until < stop
        go = Advance(numbers, np.full(numbers.size, until), np.full(numbers.size, int(wants_pair)))
        news = [MESSAGES.global_average(numbers, np.tile(state.average, (numbers.size, 1)))] if state.is_new else []
        replies = await federation.exchange(go, *news)
        after = replace(state, at=until, is_new=False, is_stale=is_stale)
        if wants_pair:
            sums = replies[MESSAGES.cluster_sums]
            average = self.setting.precision.rounded(weighted_average(sums.weighted, sums.weight))
            after = State(until, average, is_new=True, is_stale=False, between_rounds=state.between_rounds + 1)
        figures = {"iteration": float(until), "between_rounds": float(after.between_rounds)}
        if config.trace_every and until % config.trace_every == 0 and not wants_pair:
            figures |= await objective_of(federation, self.clusters, MESSAGES)
        return after, {**figures, ENDED: float(until >= config.iterations)}

    def _next_trace(self, at: int) -> int:
        every = self.config.trace_every
        return (at // every + 1) * every if every else self.config.iterations

    def _schedule(self) -> Schedule:
        return schedule_by(self.setting.seed, self.rates.p0, self.rates.p, self.clusters.numbers, self.config.coins)

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """The objective and what users say of their models, which stay with them unless `collect_models` is set."""
        rates, n = self.rates, self.config.iterations
        figures = {"between_rounds": float(state.between_rounds), "eta": rates.eta, "p0": rates.p0}
        figures |= {"between_rounds_expected": self._expected_between() * n}
        figures |= {"within_rounds_expected": float(self._expected_within().sum()) * n}
        cure = f"{n} iterations, or a smaller eta than {rates.eta:.3g}, to which the distance from the optimum in the limit is proportional"
        return await private_outcome(
            federation, self.clusters, MESSAGES, figures, self.setting.stage, collects=self.config.collect_models, cure=cure
        )

    def _expected_between(self) -> float:
        """Global rounds that need a new bar, per iteration."""
        p0 = self.rates.p0
        if self.reuse < REUSE_ALL:
            return p0
        return p0 * (1 - p0 / (1 - (1 - p0) * float(self.rates.p.prod())))

    def _expected_within(self) -> Array:
        """(k,) rounds inside each cluster, per iteration."""
        p0, p = self.rates.p0, self.rates.p
        reusable = _reusable(self.config, self.clusters, self.reuse) > NO_REUSE
        expected: Array = np.where(reusable, (1 - p0) ** 2 * p * (1 - p), (1 - p0) * p)
        return expected

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Expected d-vectors: a pair's vector up and bar down for each cluster and global round, theta_i up for each user and round.

        What goes down inside a cluster goes to each of its hosts.
        """
        n = figures[-1]["iteration"] if figures else 0.0
        models, targets = (self.clusters.sizes * self._expected_models()).sum(), (self._hosts * self._expected_targets()).sum()
        return {
            **_averages(self._expected_between() * n * self.clusters.size, float(models) * n, float(targets) * n),
            **self._fixed_counts(figures).vectors,
        }

    def spread_of_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Standard deviations over the coins; inside clusters, which share a coin, the sum of each cluster's, which is no less."""
        n, p0, p = int(figures[-1]["iteration"]) if figures else 0, self.rates.p0, self.rates.p
        _, between = coin_counts.needed_over_coins(p0, float(p.prod()), n, is_reusable=self.reuse == REUSE_ALL)
        models, targets = 0.0, 0.0
        for j, reuse in enumerate(_reusable(self.config, self.clusters, self.reuse).tolist()):
            _, spread = coin_counts.moves_over_coins(p0, float(p[j]), float(np.delete(p, j).prod()), reuse, n)
            models, targets = models + self.clusters.sizes[j] * spread.up, targets + self._hosts[j] * spread.down
        return _averages(between * self.clusters.size, float(models), float(targets))

    def drawn_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """For the coins of this seed, or those recorded; nothing of a stage that was stopped on its way."""
        n = self.config.iterations
        if not figures or figures[-1]["iteration"] < n:
            return {}
        schedule = self._schedule()
        operations = [schedule.operations(number, 0, n) for number in self.clusters.numbers.tolist()]
        needs_bar = coin_counts.needed(operations, is_reusable=self.reuse == REUSE_ALL)
        reuse = _reusable(self.config, self.clusters, self.reuse).tolist()
        moved = [coin_counts.moves(ops, needs_bar, each) for ops, each in zip(operations, reuse, strict=True)]
        models = sum(size * move.up for size, move in zip(self.clusters.sizes.tolist(), moved, strict=True))
        targets = sum(hosts * move.down for hosts, move in zip(self._hosts.tolist(), moved, strict=True))
        return _averages(float(needs_bar.sum()) * self.clusters.size, models, targets)

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """p0, p_j, tau_j, alpha_j and eta to each cluster, and on to its hosts, with gamma_i to each user; the objective, and the end."""
        n_hosts, n_users = float(self._hosts.sum()), len(self.setting.members)
        return {
            ("parameters", "down", rundb.BETWEEN): 5.0 * self.clusters.size,
            ("parameters", "down", rundb.WITHIN): 5 * n_hosts + n_users,
            **self._fixed_counts(figures).scalars,
        }

    @property
    def _hosts(self) -> Indices:
        return known_clusters.hosts_of(self.setting, self.clusters)

    def _fixed_counts(self, figures: Sequence[Mapping[str, float]]) -> known_clusters.FixedCounts:
        assert self.setting.facts is not None  # noqa: S101 - `build` has checked
        return known_clusters.fixed_counts(self.clusters, self.setting.facts.d, figures, self._hosts, collects=self.config.collect_models)

    def _expected_models(self) -> Array:
        """(k,) how often each user of a cluster sends its theta, per iteration: before averaging, where bar_j is not known."""
        p0, p = self.rates.p0, self.rates.p
        averaging = p0 + (1 - p0) * p
        reusable = _reusable(self.config, self.clusters, self.reuse) > NO_REUSE
        expected: Array = np.where(reusable, (1 - p0) * (1 - p) * averaging, averaging)  # (known after all but local steps)
        return expected

    def _expected_targets(self) -> Array:
        """(k,) vectors that go down to each host of a cluster, per iteration: see `coterie_server.families.coin_counts`."""
        p0, p = self.rates.p0, self.rates.p
        averaging = p0 + (1 - p0) * p
        reuse = _reusable(self.config, self.clusters, self.reuse)
        then_used = np.where(reuse == REUSE_ALL, averaging, (1 - p0) * p)
        expected: Array = np.where(reuse > NO_REUSE, (1 - p0) ** 2 * p * (1 - p) + self._expected_between() * (1 + then_used), averaging)
        return expected


def _averages(between: float, models: float, targets: float) -> dict[tuple[str, ...], float]:
    """The counts of averaging by step and direction."""
    return {
        ("between-average", "up", rundb.BETWEEN): between,
        ("between-average", "down", rundb.BETWEEN): between,
        ("within-average", "up"): models,
        ("within-average", "down"): targets,
    }


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The coordinator's half for one stage. ConfigError for weights and parameters that cannot be run."""
    if setting.facts is None:
        raise RunError("method 'async_l2gd' needs the facts of the stage 'prepare'")
    clusters = clusters_of(config, setting.members)
    if config.coins is not None and any(len(flips) != clusters.size for _, flips in config.coins):
        raise ConfigError(f"method.coins must have a coin for each of the {clusters.size} clusters in every iteration")
    rates = rates_of(config, clusters, float(setting.facts.smoothness.max()))
    return Coordinator(config, setting, clusters, rates, _reuse(config, clusters)).as_half()


def _reuse(config: Config, clusters: Clusters) -> int:
    """Whether bar may be used again: gamma constant inside each cluster, and alpha_j gamma the same in all."""
    if config.reuse == "never":
        return NO_REUSE
    products = clusters.alpha * clusters.segments.maxima(clusters.gamma)
    return REUSE_ALL if clusters.is_even.all() and np.all(products == products[0]) else REUSE_WITHIN


def _reusable(config: Config, clusters: Clusters, reuse: int) -> Indices:
    """(k,) NO_REUSE, REUSE_WITHIN or REUSE_ALL for each cluster."""
    if config.reuse == "never":
        return np.zeros(clusters.size, dtype=np.int64)
    return np.where(clusters.is_even, reuse, NO_REUSE)


def stages(config: Config, experiment: Experiment) -> Sequence[Stage]:
    """One stage, which ends by its iterations."""
    return [Stage(config.name, config.name, config, replace_rounds(experiment.stop, config.iterations), is_result=True)]


def replace_rounds(stop: StopRule, iterations: int) -> StopRule:
    """A stop rule that never cuts a method that counts its own iterations: a round has at least none, and one iteration in the mean."""
    return stop.model_copy(update={"rounds": 2 * iterations + 2})


# ---- the aggregators' half


class ClusterHalf:
    """The aggregators' half, for one cluster or for several at once."""

    def __init__(self, config: Config, setting: ClusterSetting) -> None:
        self._config = config
        self._seed, self._precision = setting.seed, setting.precision
        self._clusters = clusters_of(config, setting.members, some_only=True)

    def init(self) -> ClusterHalfState:
        """Before the first iteration."""
        c = self._clusters.size
        nothing, zeros = np.zeros((c, 0)), np.zeros(c, dtype=np.int64)
        return ClusterHalfState(zeros, zeros, nothing, nothing, zeros)

    async def step(
        self, state: ClusterHalfState, inbox: Mapping[type[Message], Message], federation: Federation
    ) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Handles what the coordinator sent."""
        parameters, go, trace = inbox.get(Parameters), inbox.get(Advance), inbox.get(MESSAGES.trace)
        if isinstance(parameters, Parameters):
            await federation.exchange(parameters, MESSAGES.user_weights(self._clusters.gamma))
            return replace(state, parameters=parameters), []
        if isinstance(go, Advance):
            news = inbox.get(MESSAGES.global_average)
            walk = Walk(self._config, self._clusters, self._seed, self._precision, state)
            return await walk.to(go, news if isinstance(news, MESSAGES.global_average) else None, federation)
        if isinstance(trace, MESSAGES.trace):
            return state, [await cluster_state(federation, self._clusters, MESSAGES, state.within_rounds)]
        if isinstance(centre := inbox.get(MESSAGES.gap_centre), MESSAGES.gap_centre):
            return state, [await cluster_gap(federation, self._clusters, MESSAGES, centre)]
        raise TypeError(f"no step of async_l2gd for {list(inbox)}")


def build_clusters(config: Config, setting: ClusterSetting) -> ClusterHalf:
    """The aggregators' half for one stage."""
    return ClusterHalf(config, setting)


SERVER = ServerHalf(
    build=build,
    stages=stages,
    needs_everyone="an average without some users belongs to another objective",
    tiers=build_clusters,
)
