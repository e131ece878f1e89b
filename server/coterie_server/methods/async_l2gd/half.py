"""Server halves of `async_l2gd`: the coordinator has the global average, the aggregators have the schedules of their clusters.

See `coterie.methods.async_l2gd` for Algorithm 1. Between two global rounds that need a new average, clusters do not wait for each other. An
aggregator then sends the pair (alpha_j sum gamma_i theta_i, alpha_j Gamma_j) and nothing else.

Nobody can be left out (skip): an average over some of the users belongs to another F, and the averaging step divides by the probability
that all of them make it. The coins determine each user's steps in each iteration, so a user cannot make missed steps later.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.privacy import Draws, Privacy
from coterie.families.schedule import Schedule, schedule_by
from coterie.methods.async_l2gd import MESSAGES, Advance, Config, Parameters
from coterie.wire.messages import Message, PerCluster
from coterie_server.families import cluster_noise, coin_counts, known_clusters, peers, robust
from coterie_server.families.cluster_noise import ClusterNoise
from coterie_server.families.coin_counts import NO_REUSE, REUSE_ALL, REUSE_WITHIN
from coterie_server.families.known_clusters import (
    Clusters,
    cluster_sums,
    clusters_of,
    objective_of,
    private_outcome,
    rounding_of,
    weighted_average,
)
from coterie_server.families.peers import AmongPeers, Averaged
from coterie_server.interface.half import (
    ENDED,
    ROUNDING,
    ClusterMethod,
    ClusterSetting,
    Counts,
    Federation,
    Outcome,
    ServerHalf,
    Setting,
    StageHalf,
    Sum,
    half_of,
)
from coterie_server.interface.peers import Peers
from coterie_server.interface.stages import Stage
from coterie_server.methods.async_l2gd.rates import Rates, rates_of
from coterie_server.methods.async_l2gd.walk import ClusterHalfState, Walk
from coterie_server.record import rundb


@dataclass(frozen=True)
class State:
    """The coordinator's state."""

    at: int  # the next iteration
    average: Array  # (d,) bar
    is_new: bool  # whether bar is new at this iteration, and has yet to be sent
    is_stale: bool  # whether some cluster has made a local step since bar was new
    between_rounds: int


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's half."""

    config: Config
    setting: Setting
    clusters: Clusters
    rates: Rates
    d: int
    reuse: Indices  # (k,) NO_REUSE, REUSE_WITHIN or REUSE_ALL for each cluster
    reuses_bar: bool

    def as_half(self) -> StageHalf[State]:
        privacy = self.setting.privacy
        half = half_of(self)
        if privacy is not None:
            half = replace(half, epsilon=functools.partial(self.epsilon, privacy), notes=[self._said(privacy)])
        return replace(
            half,
            spread_of_vectors=self.spread_of_vectors,
            drawn_vectors=self.drawn_vectors,
            ends=lambda figures: f"{figures['iteration']:.0f} iterations" if figures[ENDED] >= 1 else "",
            part=lambda figures: figures["iteration"] / self.config.iterations,
        )

    def _said(self, privacy: Privacy) -> str:
        n = cluster_noise.n_averages(self._schedule(), self.clusters, self.reuse, self.config.iterations)
        noise = f"the noise of each cluster's average is {self.multiplier(privacy):.3g} clips of one user"
        return f"privacy: changes of users from the average are clipped at {privacy.clip:g}; {noise}, in at most {n} averages of a cluster"

    @property
    def client_options(self) -> Mapping[str, Any]:
        """The coins, where they are recorded, and whether users' models are summed."""
        return {"async_l2gd": {"coins": self.config.coins, "is_exact": self.setting.is_exact}}

    async def init(self, federation: Federation) -> State:
        """Sends everybody the parameters."""
        rates, ones = self.rates, np.ones(self.clusters.size)
        numbers, alpha = self.clusters.numbers, self.clusters.alpha
        await federation.exchange(Parameters(numbers, rates.p0 * ones, rates.p, rates.tau, alpha, rates.eta * ones, self.reuse))
        return self._begun()

    async def round(self, state: State, federation: Federation, _: int) -> tuple[State, Mapping[str, float]]:
        """To the next iteration that needs a new bar, or by `round_iterations`, or to the next trace."""
        config, numbers = self.config, self.clusters.numbers
        until, is_stale, wants_pair = self._next(state)
        go = Advance(numbers, np.full(numbers.size, until), np.full(numbers.size, int(wants_pair)))
        news = (
            [MESSAGES.global_average(numbers, np.tile(state.average, (numbers.size, 1)))]
            if state.is_new and not self.setting.has_peers
            else []
        )
        pairs = [Sum(MESSAGES.cluster_sums)] if wants_pair and not self.setting.has_peers else []
        totals = await federation.total(go, *news, of=pairs)
        after = replace(state, at=until, is_new=False, is_stale=is_stale)
        if wants_pair:
            after = replace(after, is_new=True, is_stale=False, between_rounds=state.between_rounds + 1)
        if pairs:
            sums = totals[MESSAGES.cluster_sums]
            after = replace(after, average=self.setting.precision.rounded(weighted_average(sums.weighted, sums.weight)))
        figures = {"iteration": float(until), "between_rounds": float(after.between_rounds)}
        if self.setting.is_exact:
            figures[ROUNDING] = rounding_of(self.clusters, MESSAGES.models, self.setting.precision, totals.rounding)
        if config.trace_every and until % config.trace_every == 0 and not wants_pair:
            ends = {"has_peers": self.setting.has_peers, "is_exact": self.setting.is_exact}
            figures |= (await objective_of(federation, self.clusters, MESSAGES, **ends))[0]
        return after, {**figures, ENDED: float(until >= config.iterations)}

    def _next(self, state: State) -> tuple[int, bool, bool]:
        """Where the next round ends, whether bar is out of date there, and whether it needs a new one."""
        config = self.config
        trace = known_clusters.next_trace(config.trace_every, config.iterations, state.at)
        stop = min(config.iterations, state.at + config.round_iterations, trace)
        start = state.at + int(state.is_new)  # this iteration has the new average
        until, is_stale = self._schedule().next_global(start, stop, is_stale=state.is_stale, is_reusable=self.reuses_bar)
        return until, is_stale, until < stop

    def epsilon(self, privacy: Privacy, n_rounds: int) -> float:
        """What so many rounds spend."""
        state = self._begun()
        end = 0
        for _ in range(n_rounds):
            if state.at >= self.config.iterations:
                break
            until, is_stale, wants_pair = self._next(state)
            state = replace(state, at=until, is_new=wants_pair, is_stale=is_stale and not wants_pair)
            end = until + int(wants_pair)
        n = cluster_noise.n_averages(self._schedule(), self.clusters, self.reuse, end)
        return privacy.spent(Draws(n, 1.0), self.multiplier(privacy), 1)

    def multiplier(self, privacy: Privacy) -> float:
        """The noise multiplier of the stage."""
        return cluster_noise.multiplier_of(privacy, self._schedule(), self.clusters, self.reuse, self.config.iterations)

    def _begun(self) -> State:
        return State(0, np.zeros(self.d), is_new=False, is_stale=True, between_rounds=0)

    def _schedule(self) -> Schedule:
        return schedule_by(self.setting.seed, self.rates.p0, self.rates.p, self.clusters.numbers, self.config.coins)

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """The objective and the users' scores. Models stay at the users unless `collect_models` is set."""
        rates, n, privacy = self.rates, self.config.iterations, self.setting.privacy
        p0, p = rates.p0, rates.p
        within = np.where(self.reuse > NO_REUSE, (1 - p0) ** 2 * p * (1 - p), (1 - p0) * p)  # (k,) rounds in each cluster, per iteration
        figures = {"between_rounds": float(state.between_rounds), "eta": rates.eta, "p0": rates.p0}
        if privacy is not None:
            figures |= {"delta": privacy.delta, "clip": privacy.clip, "noise_multiplier": self.multiplier(privacy)}
        figures |= {"between_rounds_expected": self._expected_between() * n, "within_rounds_expected": float(within.sum()) * n}
        cure = f"{n} iterations, or a smaller eta than {rates.eta:.3g}, to which the distance from the optimum in the limit is proportional"
        ends = {"collects": self.config.collect_models, "has_peers": self.setting.has_peers, "is_exact": self.setting.is_exact}
        ends |= {"tells_centre": privacy is None}
        return await private_outcome(federation, self.clusters, MESSAGES, figures, self.setting.stage, cure=cure, **ends)

    def _expected_between(self) -> float:
        """Global rounds that need a new bar, per iteration."""
        p0 = self.rates.p0
        return p0 * (1 - p0 / (1 - (1 - p0) * float(self.rates.p.prod()))) if self.reuses_bar else p0

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Expected d-vectors: a pair's vector up and bar down for each cluster and global round, theta_i up for each user and round.

        A vector for a cluster goes to each of its hosts.
        """
        n, p0, p = figures[-1]["iteration"] if figures else 0.0, self.rates.p0, self.rates.p
        averaging, reusable = p0 + (1 - p0) * p, self.reuse > NO_REUSE
        # (k,) per iteration: a user sends theta before averaging where bar_j is not known, which it is after all but local steps. What goes
        # down to each host is in `coterie_server.families.coin_counts`.
        models = np.where(reusable, (1 - p0) * (1 - p) * averaging, averaging)
        then_used = np.where(self.reuse == REUSE_ALL, averaging, (1 - p0) * p)
        targets = np.where(reusable, (1 - p0) ** 2 * p * (1 - p) + self._expected_between() * (1 + then_used), averaging)
        up, down = float((self._senders * models).sum()) * n, float((self._hosts * targets).sum()) * n
        return {**_averages(self._expected_between() * n * self.clusters.size, up, down), **self._fixed_counts(figures)[0]}

    def spread_of_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Standard deviations over the coins; inside clusters, which share a coin, an upper bound: the sum of each cluster's."""
        n, p0, p = int(figures[-1]["iteration"]) if figures else 0, self.rates.p0, self.rates.p
        _, between = coin_counts.needed_over_coins(p0, float(p.prod()), n, is_reusable=self.reuses_bar)
        models, targets = 0.0, 0.0
        for j, reuse in enumerate(self.reuse.tolist()):
            _, spread = coin_counts.moves_over_coins(p0, float(p[j]), float(np.delete(p, j).prod()), reuse, n)
            models, targets = models + self._senders[j] * spread.up, targets + self._hosts[j] * spread.down
        return _averages(between * self.clusters.size, float(models), float(targets))

    def drawn_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """For the coins of this seed, or those recorded; nothing for a stage that was stopped early."""
        n = self.config.iterations
        if not figures or figures[-1]["iteration"] < n:
            return {}
        schedule = self._schedule()
        operations = [schedule.operations(number, 0, n) for number in self.clusters.numbers.tolist()]
        needs_bar = coin_counts.needed(operations, is_reusable=self.reuses_bar)
        moved = [coin_counts.moves(ops, needs_bar, each) for ops, each in zip(operations, self.reuse.tolist(), strict=True)]
        models = sum(size * move.up for size, move in zip(self._senders.tolist(), moved, strict=True))
        targets = sum(hosts * move.down for hosts, move in zip(self._hosts.tolist(), moved, strict=True))
        return _averages(float(needs_bar.sum()) * self.clusters.size, models, targets)

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """p0, p_j, tau_j, alpha_j and eta to each cluster, and on to its hosts, with gamma_i to each user; the objective, and the end."""
        n_hosts, n_users = float(self._hosts.sum()), len(self.setting.members)
        return {
            ("parameters", "down", rundb.BETWEEN): 5.0 * self.clusters.size,
            ("parameters", "down", rundb.WITHIN): 5 * n_hosts + n_users,
            **self._fixed_counts(figures)[1],
        }

    @property
    def _hosts(self) -> Indices:
        return known_clusters.hosts_of(self.setting, self.clusters)

    def _fixed_counts(self, figures: Sequence[Mapping[str, float]]) -> tuple[Counts, Counts]:
        how = {"collects": self.config.collect_models, "is_exact": self.setting.is_exact, "tells_centre": self.setting.privacy is None}
        return known_clusters.fixed_counts(self.clusters, self.d, figures, self._hosts, **how)

    @property
    def _senders(self) -> Indices:
        """(k,) how many vectors come up from a cluster that averages: of its users, or sums of its hosts."""
        return self._hosts if self.setting.is_exact else self.clusters.sizes


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
    facts, clusters = setting.known_facts, clusters_of(config, setting.members, setting.robust)
    if config.coins is not None and any(len(flips) != clusters.size for _, flips in config.coins):
        raise ConfigError(f"method.coins must have a coin for each of the {clusters.size} clusters in every iteration")
    if facts.smoothness is None:
        raise RunError(f"stage {setting.stage!r} has no smoothness constants of the users' losses, want them in the facts of its method")
    rates = rates_of(config, clusters, float(facts.smoothness.max()))
    # bar_j is used again where gamma is constant inside the cluster, and bar where that holds everywhere, with one alpha_j gamma.
    products, may_reuse = clusters.alpha * clusters.segments.maxima(clusters.gamma), config.reuse != "never"
    reuses_bar = bool(may_reuse and clusters.is_even.all() and np.all(products == products[0]))
    reuse = np.where(np.logical_and(may_reuse, clusters.is_even), REUSE_ALL if reuses_bar else REUSE_WITHIN, NO_REUSE)
    half = known_clusters.with_rule(Coordinator(config, setting, clusters, rates, facts.d, reuse, reuses_bar).as_half(), clusters)
    return peers.counted(known_clusters.closed(half, setting, clusters), setting.peers, clusters.size, facts.d)


def stages(config: Config, experiment: Experiment) -> Sequence[Stage]:
    """One stage, which ends by its iterations: a round makes one in the mean, and may make none."""
    stop = experiment.stop.model_copy(update={"rounds": 2 * config.iterations + 2})
    return [Stage(config.name, config.name, config, stop, is_result=True)]


class ClusterHalf:
    """The aggregators' half, for one cluster or for several at once."""

    def __init__(self, config: Config, setting: ClusterSetting) -> None:
        self._config = config
        self._seed, self._setting = setting.seed, setting
        self._clusters = clusters_of(config, setting.members, setting.robust, some_only=True)

    def init(self) -> ClusterHalfState:
        """Before the first iteration."""
        c = self._clusters.size
        nothing, zeros = np.zeros((c, 0)), np.zeros(c, dtype=np.int64)
        return ClusterHalfState(zeros, zeros, nothing, nothing, zeros, nothing, self._clusters.nobody_left())

    async def step(
        self, state: ClusterHalfState, inbox: Mapping[type[Message], Message], federation: Federation
    ) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Handles the coordinator's messages."""
        if isinstance(parameters := inbox.get(Parameters), Parameters):
            await federation.exchange(parameters, MESSAGES.user_weights(self._clusters.gamma))
            return replace(state, parameters=parameters), []
        if isinstance(go := inbox.get(Advance), Advance):
            news = inbox.get(MESSAGES.global_average)
            walk = Walk(self._config, self._clusters, self._setting, state, self._noise(state))
            return await walk.to(go, news if isinstance(news, MESSAGES.global_average) else None, federation)
        is_exact = self._setting.is_exact
        seen = await cluster_sums(federation, self._clusters, MESSAGES, inbox, state.within_rounds, state.traced, is_exact=is_exact)
        return replace(state, traced=seen.traced), [seen.answer]

    def notes(self, state: ClusterHalfState) -> Sequence[str]:
        """Whom a rule has left out."""
        return robust.found(self._clusters.robust, self._setting.members.names, state.left)

    def _noise(self, state: ClusterHalfState) -> ClusterNoise | None:
        """That of the averages, with `privacy`: of all clusters, since runs with aggregators have none."""
        privacy, secret, sent = self._setting.privacy, self._setting.secret, state.parameters
        if privacy is None or secret is None or sent is None:
            return None
        schedule = schedule_by(self._seed, float(sent.p0[0]), sent.p, self._clusters.numbers, self._config.coins)
        multiplier = cluster_noise.multiplier_of(privacy, schedule, self._clusters, sent.is_reusable, self._config.iterations)
        return ClusterNoise(privacy.clip, multiplier, secret)


def among_peers(config: Config, setting: ClusterSetting, others: Peers) -> ClusterMethod[Any]:
    """The aggregators' half where the average goes between them."""
    half, clusters = ClusterHalf(config, setting), clusters_of(config, setting.members, some_only=True)
    averages = (Averaged(MESSAGES.cluster_sums, MESSAGES.partial_sums, MESSAGES.global_average),)
    return AmongPeers(half, clusters, MESSAGES, averages, others, setting.precision)


SERVER = ServerHalf(
    build=build,
    stages=stages,
    needs_everyone="an average without some users belongs to another objective",
    tiers=ClusterHalf,
    peers=among_peers,
)
