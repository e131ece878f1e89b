"""Server halves of `async_al2sgd`: the coordinator's, which owns bar and xbar, and the aggregators', which own their clusters' schedules.

See `coterie.methods.async_al2sgd` for Algorithm 2. A global round and a new anchor bring all clusters together; between two of them a
cluster goes its own way. What an aggregator sends of its users is the pair (alpha_j sum gamma_i theta_i, alpha_j Gamma_j), or that of x.

Nobody can be left out (skip): the estimator (4.1) is unbiased with the averages of all users alone, and the anchor of its variance
reduction is everyone's at the same iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.coins import Coin, DrawnCoin, RecordedCoin, first
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.families.schedule import LOCAL, Schedule, combined, schedule_by
from coterie.methods import async_al2sgd as messages
from coterie.methods import async_l2gd
from coterie.methods.async_al2sgd import (
    ANCHOR,
    NOTHING,
    THETA,
    Advance,
    AnchorAverages,
    Anchors,
    AnchorSums,
    AskConstants,
    AskRowConstants,
    ClusterConstants,
    ClusterSums,
    Config,
    GapCentre,
    GlobalAnchor,
    GlobalAverage,
    Models,
    Parameters,
    RowConstants,
    Steps,
    Target,
    Trace,
    UserWeights,
    recorded_refreshes,
)
from coterie.wire.messages import Message, PerCluster
from coterie_server.families import coin_counts, known_clusters
from coterie_server.families.coin_counts import NO_REUSE
from coterie_server.families.known_clusters import (
    Clusters,
    averages_of,
    cluster_gap,
    cluster_state,
    clusters_of,
    objective_of,
    private_outcome,
    weighted_average,
)
from coterie_server.families.l2gd_rates import expected_smoothness, rates_of
from coterie_server.interface.half import ENDED, ClusterSetting, Counts, Federation, Outcome, ServerHalf, Setting, StageHalf, half_of
from coterie_server.interface.stages import Stage
from coterie_server.record.rundb import BETWEEN, WITHIN


@dataclass(frozen=True)
class Rates:
    """The parameters of Algorithm 2 for k clusters."""

    p0: float
    p: Array  # (k,)
    tau: Array  # (k,)
    rho: float
    eta: float
    a1: float
    a2: float
    b1: float
    b2: float
    contraction: float  # of the Lyapunov function in an iteration, at least, where all of Corollary 4.4 holds


def accelerated(config: Config, clusters: Clusters, smoothness: float, convexity: float) -> Rates:
    """What is given, and the rest by Corollary 4.4, in its order; `smoothness` is L~, `convexity` mu. ConfigError for what cannot be run.

    p0, p_j, tau_j are those of Corollary 3.6 and calL that of (3.3), both with L~. The contraction is that of Theorem 4.3's proof,
    min{b2 mu, a1/2, rho a1/(2 a2 + a1)}.
    """
    shared = {key: getattr(config, key) for key in ("gamma", "lam", "alpha", "p0", "p", "tau")}
    rates = rates_of(async_l2gd.Config(**shared), clusters, smoothness)
    rho = rates.p0 if config.rho is None else config.rho
    if rho <= 0:
        raise ConfigError("method.rho would be p0, which is 0: without new anchors nothing converges, want rho above 0")
    cal_l = expected_smoothness(rates.p0, rates.p, rates.tau, clusters, smoothness)
    largest = max(smoothness + float(clusters.gamma.max()), cal_l)
    eta = _given(config.eta, 1 / (4 * largest))
    a2 = _given(config.a2, cal_l / (2 * largest))
    a1 = _given(config.a1, min(0.5, (eta * convexity * max(0.5, a2 / rho)) ** 0.5))
    if a1 + a2 > 1:
        raise ConfigError(f"method.a1 is {a1:g} and a2 is {a2:g}, want at most 1 together")
    b2 = _given(config.b2, 1 / max(2 * convexity, 4 * a1 / eta))
    b1 = _given(config.b1, 1 - b2 * convexity)
    contraction = min(b2 * convexity, a1 / 2, rho * a1 / (2 * a2 + a1))
    return Rates(rates.p0, rates.p, rates.tau, rho, eta, a1, a2, b1, b2, contraction)


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


# ---- the coordinator's half


@dataclass(frozen=True)
class State:
    """Where the coordinator is: the next iteration, and what it has yet to send there."""

    at: int
    rates: Rates
    average: Array  # (d,) bar or xbar
    owed: int  # THETA or ANCHOR: what `average` is of; NOTHING: it has been sent
    wants_anchor: bool  # before the first iteration, where that does not begin at 0
    between_rounds: int = 0
    anchor_rounds: int = 0


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's half."""

    config: Config
    setting: Setting
    clusters: Clusters
    d: int

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
        """The coins, where they are recorded, and whether users begin where an earlier stage has left them."""
        return {"async_al2sgd": {"coins": self.config.coins, "is_warm": self._is_warm}}

    @property
    def _is_warm(self) -> bool:
        return self.setting.start is not None

    async def init(self, federation: Federation) -> State:
        """Learns the constants of the row losses, and gives everybody the parameters."""
        numbers, k = self.clusters.numbers, self.clusters.size
        constants = (await federation.exchange(AskConstants(numbers)))[ClusterConstants]
        smoothness, convexity = float(constants.smoothness.max()), _given(self.config.mu, float(constants.strong_convexity.min()))
        rates = accelerated(self.config, self.clusters, smoothness, convexity)
        common = {name: np.full(k, getattr(rates, name)) for name in ("p0", "eta", "a1", "a2", "b1", "b2")}
        await federation.exchange(Parameters(numbers, p=rates.p, tau=rates.tau, alpha=self.clusters.alpha, **common))
        return State(0, rates, np.zeros(self.d), NOTHING, self._is_warm)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:  # noqa: ARG002
        """To the next global round or new anchor, or as far as is asked for at once."""
        config, numbers, k = self.config, self.clusters.numbers, self.clusters.size
        until, wanted = self._next(state)
        listed: list[Message] = [Advance(numbers, np.full(k, until), np.full(k, wanted))]
        if state.owed != NOTHING:
            listed.append((GlobalAverage if state.owed == THETA else GlobalAnchor)(numbers, np.tile(state.average, (k, 1))))
        replies = await federation.exchange(*listed)
        state = replace(state, at=until, owed=wanted, wants_anchor=False)
        if wanted != NOTHING:
            sums = replies[ClusterSums] if wanted == THETA else replies[AnchorSums]
            average = weighted_average(sums.weighted, sums.weight) if sums.weight.any() else np.zeros(self.d)  # nobody goes towards that
            state = replace(state, average=self.setting.precision.rounded(average))
        state = replace(
            state,
            between_rounds=state.between_rounds + (wanted == THETA),
            anchor_rounds=state.anchor_rounds + (wanted == ANCHOR),
        )
        figures = {"iteration": float(until), "between_rounds": float(state.between_rounds), "anchor_rounds": float(state.anchor_rounds)}
        figures |= self._expected_rounds(state.rates, until)
        if until >= config.iterations:
            figures |= self._drawn_rounds(state.rates)
        if wanted != THETA and config.trace_every and until % config.trace_every == 0:
            figures |= await objective_of(federation, self.clusters, messages)
        return state, {**figures, ENDED: float(until >= config.iterations)}

    def _next(self, state: State) -> tuple[int, int]:
        """The iteration to go on to, and what is wanted there. At the same iteration a new anchor comes before a global round."""
        config, at, rates = self.config, state.at, state.rates
        if state.wants_anchor:
            return at, ANCHOR
        trace = (at // config.trace_every + 1) * config.trace_every if config.trace_every else config.iterations
        stop = min(config.iterations, at + config.round_iterations, trace)
        schedule = schedule_by(self.setting.seed, rates.p0, rates.p, self.clusters.numbers, config.coins)
        start = at + (state.owed == THETA)  # the global round at hand has its average
        average, _ = schedule.next_global(start, stop, is_stale=True, is_reusable=False)
        last = min(stop, config.iterations - 1)
        refresh = first(_refreshes(self.setting.seed, rates.rho, recorded_refreshes(config.coins)).flips(at, last), at)
        if refresh < last and refresh + 1 <= average:
            return refresh + 1, ANCHOR
        return average, THETA if average < stop else NOTHING

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """The objective and what users say of their models y, which stay with them unless `collect_models` is set."""
        rates, n = state.rates, self.config.iterations
        names = ("p0", "rho", "eta", "a1", "a2", "b1", "b2")
        figures = {name: float(getattr(rates, name)) for name in names}
        if all(getattr(self.config, name) is None for name in ("mu", "eta", "a1", "a2", "b1", "b2")):
            figures["contraction"] = rates.contraction  # for others the theorem promises nothing
        figures |= {"between_rounds": float(state.between_rounds), "anchor_rounds": float(state.anchor_rounds)}
        figures |= self._expected_rounds(rates, n)
        return await private_outcome(
            federation, self.clusters, messages, figures, self.setting.stage, collects=self.config.collect_models, cure=f"{n} iterations"
        )

    def _expected_rounds(self, rates: Rates, n: int) -> dict[str, float]:
        """How often clusters average in n iterations, alone and together. No average is used again; an anchor at the end is not shared."""
        anchors = rates.rho * min(n, self.config.iterations - 1) + self._is_warm
        within = n * (1 - rates.p0) * rates.p
        return {
            "between_rounds_expected": n * rates.p0,
            "anchor_rounds_expected": anchors,
            "within_rounds_expected": float(within.sum()),
            "within_vectors_expected": float((self.clusters.sizes * (n * rates.p0 + within)).sum()),  # theta_i up for averages
            "within_targets_expected": float((self._hosts * (n * rates.p0 + within)).sum()),  # and what is subtracted down to hosts
        }

    def _drawn_rounds(self, rates: Rates) -> dict[str, float]:
        """The same for the coins of this seed, or those recorded."""
        n = self.config.iterations
        schedule = schedule_by(self.setting.seed, rates.p0, rates.p, self.clusters.numbers, self.config.coins)
        operations = [schedule.operations(number, 0, n) for number in self.clusters.numbers.tolist()]
        needs_bar = coin_counts.needed(operations, is_reusable=False)
        averages = np.array([coin_counts.moves(ops, needs_bar, NO_REUSE).up for ops in operations])
        refreshes = _refreshes(self.setting.seed, rates.rho, recorded_refreshes(self.config.coins)).flips(0, n - 1)
        return {
            "between_rounds_drawn": float(needs_bar.sum()),
            "anchor_rounds_drawn": float(refreshes.sum()) + self._is_warm,
            "within_vectors_drawn": float((self.clusters.sizes * averages).sum()),
            "within_targets_drawn": float((self._hosts * averages).sum()),
        }

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """A pair's vector up and an average down for each cluster and global round or anchor; x_i up for each user and anchor.

        Each host of a cluster gets what an averaging iteration subtracts, and both averages of an anchor.
        """
        last = figures[-1] if figures else {}
        between, anchors, models = (last.get(f"{name}_expected", 0.0) for name in ("between_rounds", "anchor_rounds", "within_vectors"))
        targets = last.get("within_targets_expected", 0.0)
        return {**self._averages(between, anchors, models, targets), **self._fixed_counts(figures).vectors}

    def spread_of_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Standard deviations over the coins, of binomial counts with these means; inside clusters, which share a coin, a bound.

        It is that of clusters which all make the same choices, with the mean of their probabilities.
        """
        last = figures[-1] if figures else {}
        n, users, hosts = last.get("iteration", 0.0), float(self.clusters.sizes.sum()), float(self._hosts.sum())
        units = {"between_rounds": 1.0, "anchor_rounds": 1.0, "within_vectors": users, "within_targets": hosts}
        means = {name: last.get(f"{name}_expected", 0.0) / unit for name, unit in units.items()}
        means["anchor_rounds"] -= self._is_warm  # which no coin decides
        spread = {name: max(mean * (1 - mean / n), 0.0) ** 0.5 if n else 0.0 for name, mean in means.items()}
        return self._averages(*(unit * spread[name] for name, unit in units.items()))

    def drawn_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """For the coins of this seed, or those recorded; nothing of a stage that was stopped on its way."""
        last = figures[-1] if figures else {}
        if "within_vectors_drawn" not in last:
            return {}
        names = ("between_rounds", "anchor_rounds", "within_vectors", "within_targets")
        return self._averages(*(last[f"{name}_drawn"] for name in names))

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Two constants of each user up, and their extremes for each cluster; nine parameters down to each cluster, and on to its hosts.

        With these goes gamma_i to each user. Then the objective, and the end.
        """
        n_hosts, n_users, k = float(self._hosts.sum()), len(self.setting.members), self.clusters.size
        return {
            ("parameters", "up", BETWEEN): 2.0 * k,
            ("parameters", "up", WITHIN): 2.0 * n_users,
            ("parameters", "down", BETWEEN): 9.0 * k,
            ("parameters", "down", WITHIN): 9 * n_hosts + n_users,
            **self._fixed_counts(figures).scalars,
        }

    @property
    def _hosts(self) -> Indices:
        return known_clusters.hosts_of(self.setting, self.clusters)

    def _averages(self, between: float, anchors: float, models: float, targets: float) -> dict[tuple[str, ...], float]:
        """The counts of averaging by step and direction."""
        k, n_users = self.clusters.size, len(self.setting.members)
        return {
            ("between-average", "up", BETWEEN): k * between,
            ("between-average", "down", BETWEEN): k * between,
            ("between-anchor", "up", BETWEEN): k * anchors,
            ("between-anchor", "down", BETWEEN): k * anchors,
            ("within-average", "up"): models,
            ("within-average", "down"): targets,
            ("within-anchor", "up"): n_users * anchors,
            ("within-anchor", "down"): 2 * float(self._hosts.sum()) * anchors,
        }

    def _fixed_counts(self, figures: Sequence[Mapping[str, float]]) -> known_clusters.FixedCounts:
        return known_clusters.fixed_counts(self.clusters, self.d, figures, self._hosts, collects=self.config.collect_models)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The coordinator's half for one stage. ConfigError for weights and coins that do not fit the members."""
    if setting.facts is None:
        raise RunError("method 'async_al2sgd' needs the facts of the stage 'prepare'")
    clusters = clusters_of(config, setting.members)
    _check_coins(config, setting.facts.n_rows, clusters.size)
    return Coordinator(config, setting, clusters, setting.facts.d).as_half()


def _check_coins(config: Config, n_rows: Indices, n_clusters: int) -> None:
    for number, (_, flips, rows, _) in enumerate(config.coins or ()):
        if len(flips) != n_clusters:
            raise ConfigError(f"method.coins has {len(flips)} coins of clusters in iteration {number}, want one for each of {n_clusters}")
        if len(rows) != n_rows.size:
            raise ConfigError(f"method.coins has {len(rows)} rows in iteration {number}, want one for each of {n_rows.size} users")
        beyond = np.flatnonzero(np.array(rows) >= n_rows)
        if beyond.size:
            user = int(beyond[0])
            raise ConfigError(f"method.coins has row {rows[user]} for user {user} in iteration {number}, want less than {n_rows[user]}")


def stages(config: Config, experiment: Experiment) -> Sequence[Stage]:
    """One stage, which ends by its iterations; each has at most an anchor, a global round and a mere going on, and one comes before."""
    stop = experiment.stop.model_copy(update={"rounds": 3 * config.iterations + 1})
    return [Stage(config.name, config.name, config, stop, is_result=True)]


@functools.lru_cache(maxsize=16)
def _refreshes(seed: int, rho: float, recorded: tuple[int, ...] | None) -> Coin:
    """xi', which only the coordinator has to know."""
    return DrawnCoin(seed, "coin of the anchors", rho) if recorded is None else RecordedCoin(recorded)


# ---- the aggregators' half


@dataclass(frozen=True)
class ClusterHalfState:
    """Of c clusters: the next iteration, the newest average of theta or of x, and how often the cluster has averaged on its own."""

    at: Indices  # (c,)
    average: Array  # (c, d)
    within_rounds: Indices  # (c,)
    parameters: Parameters | None = None


class ClusterHalf:
    """The aggregators' half, for one cluster or for several at once."""

    def __init__(self, config: Config, setting: ClusterSetting) -> None:
        self._config, self._seed, self._names = config, setting.seed, setting.members.names
        self._clusters = clusters_of(config, setting.members, some_only=True)

    def init(self) -> ClusterHalfState:
        """Before the first iteration."""
        c = self._clusters.size
        return ClusterHalfState(np.zeros(c, dtype=np.int64), np.zeros((c, 0)), np.zeros(c, dtype=np.int64))

    async def step(
        self, state: ClusterHalfState, inbox: Mapping[type[Message], Message], federation: Federation
    ) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Handles what the coordinator sent."""
        if AskConstants in inbox:
            return state, [await self._constants(federation)]
        if isinstance(parameters := inbox.get(Parameters), Parameters):
            await federation.exchange(parameters, UserWeights(self._clusters.gamma))
            return replace(state, parameters=parameters), []
        if isinstance(go := inbox.get(Advance), Advance):
            if state.parameters is None:
                raise RunError("the coordinator sent no parameters before the first iteration")
            p0, p = float(state.parameters.p0[0]), state.parameters.p
            schedule = schedule_by(self._seed, p0, p, self._clusters.numbers, self._config.coins)
            return await _Walk(self._clusters, schedule, state.parameters, state).to(go, inbox, federation)
        if Trace in inbox:
            return state, [await cluster_state(federation, self._clusters, messages, state.within_rounds)]
        if isinstance(centre := inbox.get(GapCentre), GapCentre):
            return state, [await cluster_gap(federation, self._clusters, messages, centre)]
        raise TypeError(f"no step of async_al2sgd for {list(inbox)}")

    async def _constants(self, federation: Federation) -> ClusterConstants:
        found = (await federation.exchange(AskRowConstants()))[RowConstants]
        flat = np.flatnonzero(found.strong_convexity <= 0)
        if flat.size and self._config.mu is None:
            name = self._names[int(flat[0])]
            raise ConfigError(
                f"user {name!r} has row losses that are not strongly convex (mu = 0), want mu above 0 for async_al2sgd: set problem.l2, "
                "or method.mu to what F has"
            )
        segments = self._clusters.segments
        return ClusterConstants(self._clusters.numbers, segments.maxima(found.smoothness), segments.minima(found.strong_convexity))


def build_clusters(config: Config, setting: ClusterSetting) -> ClusterHalf:
    """The aggregators' half for one stage."""
    return ClusterHalf(config, setting)


@dataclass(frozen=True)
class _Leg:
    """What a cluster does next without hearing from anybody: at most one averaging iteration, whose target is at hand, then local ones."""

    until: int
    wanted: int


class _Walk:
    """The way of some clusters from where they are to where the coordinator wants them."""

    def __init__(self, clusters: Clusters, schedule: Schedule, parameters: Parameters, state: ClusterHalfState) -> None:
        self._clusters, self._schedule, self._p = clusters, schedule, parameters
        self._at, self._average, self._within_rounds = state.at.copy(), state.average.copy(), state.within_rounds.copy()
        self._targets: dict[int, Array] = {}  # by place: what the next iteration subtracts
        self._answered = np.zeros(clusters.size, dtype=np.bool_)

    async def to(
        self, go: Advance, inbox: Mapping[type[Message], Message], federation: Federation
    ) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Walks, wave by wave: in each, all clusters that still have a way to go take a leg."""
        extra: list[Message] = []
        if isinstance(anchor := inbox.get(GlobalAnchor), GlobalAnchor):
            extra.append(AnchorAverages(self._clusters.numbers, self._average, anchor.average))
        if isinstance(news := inbox.get(GlobalAverage), GlobalAverage):
            self._targets = {
                place: combined(float(self._p.alpha[place]), float(self._p.tau[place]), self._average[place], bar)
                for place, bar in enumerate(news.average)
            }
        while (pending := np.flatnonzero((self._at < go.until) | ((go.wanted != NOTHING) & ~self._answered))).size:
            legs = {place: self._leg(place, int(go.until[place]), int(go.wanted[place])) for place in pending.tolist()}
            await self._wave(legs, go.until, extra, federation)
            extra = []
        state = ClusterHalfState(self._at, self._average, self._within_rounds, self._p)
        wanted = int(go.wanted[0])
        if wanted == NOTHING:
            return state, []
        weight = self._clusters.alpha * self._clusters.gamma_sums
        sums = ClusterSums if wanted == THETA else AnchorSums
        return state, [sums(self._clusters.numbers, weight[:, None] * self._average, weight)]

    def _leg(self, place: int, until: int, wanted: int) -> _Leg:
        at = int(self._at[place])
        averages = self._schedule.operations(int(self._clusters.numbers[place]), at, until) != LOCAL
        n_ready = 1 if place in self._targets else 0
        stop = first(averages[n_ready:], at + n_ready) if averages.size else until
        return _Leg(stop, THETA if stop < until else wanted)

    async def _wave(self, legs: Mapping[int, _Leg], until: Indices, extra: Sequence[Message], federation: Federation) -> None:
        numbers, places = self._clusters.numbers, np.array(list(legs), dtype=np.int64)
        stops = np.array([leg.until for leg in legs.values()], dtype=np.int64)
        wanted = np.array([leg.wanted for leg in legs.values()], dtype=np.int64)
        sent: list[Message] = [*extra, Steps(numbers[places], stops, wanted)]
        if known := [place for place in legs if place in self._targets]:
            sent.append(Target(numbers[known], np.array([self._targets.pop(place) for place in known])))
        is_all = places.size == self._clusters.size
        to = None if is_all else np.flatnonzero(np.isin(self._clusters.segments.place, places))
        replies = await federation.exchange(*sent, to=to)
        self._at[places] = stops
        if (asked := places[wanted == THETA]).size:
            self._learn(asked, replies[Models].theta)
        if (asked := places[wanted == ANCHOR]).size:
            self._learn(asked, replies[Anchors].x)
        is_within = stops < until[places]
        self._targets |= {place: self._average[place] for place in places[is_within].tolist()}
        self._within_rounds[places[is_within]] += 1
        self._answered[places[~is_within]] = True

    def _learn(self, asked: Indices, models: Array) -> None:
        """The averages of the clusters whose users have sent their models."""
        if not self._average.shape[1]:
            self._average = np.zeros((self._clusters.size, models.shape[1]))
        self._average[asked] = averages_of(self._clusters, asked, models)


SERVER = ServerHalf(
    build=build,
    stages=stages,
    needs_everyone="an average without some users belongs to another objective",
    tiers=build_clusters,
)
