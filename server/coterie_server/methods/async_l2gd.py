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
from coterie.config import Experiment, StopRule
from coterie.errors import ConfigError, RunError
from coterie.messages import Message, PerCluster
from coterie.methods import async_l2gd as messages
from coterie.methods.async_l2gd import (
    Advance,
    Centres,
    ClusterSums,
    Config,
    GlobalAverage,
    Models,
    Parameters,
    Steps,
    Target,
    Trace,
    UserWeights,
)
from coterie.methods.schedule import GLOBAL, LOCAL, WITHIN, Schedule, combined, moved, recorded_coins, schedule_of
from coterie.wire import Precision
from coterie_server import coin_counts, known_clusters, rundb
from coterie_server.coin_counts import NO_REUSE, REUSE_ALL, REUSE_WITHIN
from coterie_server.known_clusters import (
    Clusters,
    averages_of,
    cluster_state,
    clusters_of,
    objective_of,
    private_outcome,
    weighted_average,
)
from coterie_server.method import ClusterSetting, Counts, Federation, Outcome, Setting
from coterie_server.plan import Stage

STALE, FRESH, SHARED = 0, 1, 2  # what is known of bar_j: nothing; by the aggregator; by its users too


@dataclass(frozen=True)
class Rates:
    """The parameters of Algorithm 1 for k clusters."""

    p0: float
    p: Array  # (k,)
    tau: Array  # (k,)
    eta: float


def rates_of(config: Config, clusters: Clusters, smoothness: float) -> Rates:
    """What is given, and the rest by Corollary 3.6; `smoothness` is L. ConfigError for what cannot be run.

    C1 = max alpha_j gamma_i, C2 = max (1-alpha_j) gamma_i, tau_j = p0/(p0 + 2(1-p0)p_j) by Proposition 3.3, eta = 1/(2 calL). With a single
    coin both averages wait for it, so that p makes calL smallest as p0 does in the corollary's second case, for max{C1, C2} in place of C1.
    """
    names = clusters.names
    own_alpha = clusters.alpha[clusters.segments.place]
    c1, c2 = float((own_alpha * clusters.gamma).max()), float(((1 - own_alpha) * clusters.gamma).max())
    is_single = config.variant == "single_coin"
    if is_single and c1 == 0 < c2:
        raise ConfigError(
            "method.variant is 'single_coin', but alpha_j gamma_i is 0 for all: its rounds need a global average, want an alpha above 0 or "
            "variant 'two_coins'"
        )
    p0, p = _probabilities(max(c1, c2), 0.0, smoothness) if is_single else _probabilities(c1, c2, smoothness)
    p0 = p0 if config.p0 is None else config.p0
    each_p = _each("p", config.p, names, p)
    if is_single:
        each_tau = np.ones(len(names))
    else:
        total = p0 + 2 * (1 - p0) * each_p
        each_tau = _each("tau", config.tau, names, np.divide(p0, total, out=np.zeros_like(total), where=total > 0))
    _check_probabilities(p0, each_p, each_tau, clusters, c1)
    if config.eta is not None:
        return Rates(p0, each_p, each_tau, config.eta)
    return Rates(p0, each_p, each_tau, 1 / (2 * expected_smoothness(p0, each_p, each_tau, clusters, smoothness)))


def _probabilities(c1: float, c2: float, smoothness: float) -> tuple[float, float]:
    """p0 and p_j of Corollary 3.6."""
    if c2 > c1:
        return 2 * c1 / (c1 + c2 + smoothness), (c2 - c1) / (c2 - c1 + smoothness)
    return (2 * c1 / (2 * c1 + smoothness) if c1 > 0 else 0.0), 0.0


def expected_smoothness(p0: float, p: Array, tau: Array, clusters: Clusters, smoothness: float) -> float:
    """calL = max{2 C1/p0, max_j (1-alpha_j) max gamma_i v_j, L/(1-p0) max_j 1/(1-p_j)}, terms that never run left out.

    v_j = 2 tau_j^2/p0 + (1-tau_j)^2/((1-p0)p_j) is how the proof of Proposition 3.3 weighs the pull to bar_j before it chooses tau_j. For
    its tau_j that is 2/(p0 + 2(1-p0)p_j), the smallest, as in (3.3), which would be too small for another, and eta too large to converge.
    """
    gamma = clusters.segments.maxima(clusters.gamma)
    within = (1 - p0) * p
    pull = np.divide((1 - tau) ** 2, within, out=np.zeros_like(within), where=within > 0)
    terms = [smoothness / (1 - p0) * float((1 / (1 - p)).max())]
    if p0 > 0:
        pull += 2 * tau**2 / p0
        terms.append(2 * float((clusters.alpha * gamma).max()) / p0)
    return max(*terms, float(((1 - clusters.alpha) * gamma * pull).max()))


def _each(key: str, value: float | Mapping[str, float] | None, names: Sequence[str], otherwise: float | Array) -> Array:
    if value is None:
        return np.broadcast_to(np.asarray(otherwise, dtype=np.float64), (len(names),)).copy()
    if not isinstance(value, Mapping):
        return np.full(len(names), float(value))
    wrong = next((name for name in (*value, *names) if name not in value or name not in names), None)
    if wrong is not None:
        what = "has no value for" if wrong in names else "names"
        raise ConfigError(f"method.{key} {what} cluster {wrong!r}, want a value for each of {', '.join(names)}")
    return np.array([value[name] for name in names], dtype=np.float64)


def _check_probabilities(p0: float, p: Array, tau: Array, clusters: Clusters, c1: float) -> None:
    if p0 == 0 and c1 > 0:
        j = int(clusters.alpha.argmax())
        raise ConfigError(
            f"method.p0 is 0, but cluster {clusters.names[j]!r} has alpha {clusters.alpha[j]:g}: without global rounds want alpha 0 for all"
        )
    if p0 > 0 and c1 == 0:
        raise ConfigError(
            f"method.p0 is {p0:g}, but alpha_j gamma_i is 0 for all: there is no global average, want p0 0 or an alpha above 0"
        )
    for j, name in enumerate(clusters.names):
        if p0 == 0 and (1 - clusters.alpha[j]) * tau[j] * clusters.gamma_sums[j] > 0:
            raise ConfigError(
                f"method.tau is {tau[j]:g} for cluster {name!r}, but p0 is 0: its average would never count in full, want tau 0"
            )
        if p[j] == 0 and (1 - clusters.alpha[j]) * (1 - tau[j]) * clusters.gamma_sums[j] > 0:
            raise ConfigError(
                f"method.p is 0 for cluster {name!r}, but tau is {tau[j]:g}: its average would never count in full, want p above 0 or tau 1"
            )


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
        news = [GlobalAverage(numbers, np.tile(state.average, (numbers.size, 1)))] if state.is_new else []
        replies = await federation.exchange(go, *news)
        after = replace(state, at=until, is_new=False, is_stale=is_stale)
        if wants_pair:
            sums = replies[ClusterSums]
            average = self.setting.precision.rounded(weighted_average(sums.weighted, sums.weight))
            after = State(until, average, is_new=True, is_stale=False, between_rounds=state.between_rounds + 1)
        figures = {"iteration": float(until), "between_rounds": float(after.between_rounds)}
        if config.trace_every and until % config.trace_every == 0 and not wants_pair:
            figures |= await objective_of(federation, self.clusters, messages)
        return after, {**figures, "has_ended": float(until >= config.iterations)}

    def _next_trace(self, at: int) -> int:
        every = self.config.trace_every
        return (at // every + 1) * every if every else self.config.iterations

    def _schedule(self) -> Schedule:
        return _schedule(self.config, self.setting.seed, self.rates.p0, self.rates.p, self.clusters.numbers)

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """The objective and what users say of their models, which stay with them unless `collect_models` is set."""
        rates, n = self.rates, self.config.iterations
        figures = {"between_rounds": float(state.between_rounds), "eta": rates.eta, "p0": rates.p0}
        figures |= {"between_rounds_expected": self._expected_between() * n}
        figures |= {"within_rounds_expected": float(self._expected_within().sum()) * n}
        return await private_outcome(federation, self.clusters, messages, figures, collects=self.config.collect_models)

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
            **self._around(figures).vectors,
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
            **self._around(figures).scalars,
        }

    @property
    def _hosts(self) -> Indices:
        return known_clusters.hosts_of(self.setting, self.clusters)

    def _around(self, figures: Sequence[Mapping[str, float]]) -> known_clusters.Around:
        assert self.setting.facts is not None  # noqa: S101 - `build` has checked
        return known_clusters.around(self.clusters, self.setting.facts.d, figures, collects=self.config.collect_models)

    def _expected_models(self) -> Array:
        """(k,) how often each user of a cluster sends its theta, per iteration: before averaging, where bar_j is not known."""
        p0, p = self.rates.p0, self.rates.p
        averaging = p0 + (1 - p0) * p
        reusable = _reusable(self.config, self.clusters, self.reuse) > NO_REUSE
        expected: Array = np.where(reusable, (1 - p0) * (1 - p) * averaging, averaging)  # (known after all but local steps)
        return expected

    def _expected_targets(self) -> Array:
        """(k,) vectors that go down to each host of a cluster, per iteration: see `coterie_server.coin_counts`."""
        p0, p = self.rates.p0, self.rates.p
        averaging = p0 + (1 - p0) * p
        reuse = _reusable(self.config, self.clusters, self.reuse)
        then_used = np.where(reuse == REUSE_ALL, averaging, (1 - p0) * p)
        expected: Array = np.where(reuse > NO_REUSE, (1 - p0) ** 2 * p * (1 - p) + self._expected_between() * (1 + then_used), averaging)
        return expected


def _averages(between: float, models: float, targets: float) -> dict[tuple[str, ...], float]:
    """The counts of averaging by step and direction."""
    return {
        ("between-average", "up"): between,
        ("between-average", "down"): between,
        ("within-average", "up"): models,
        ("within-average", "down"): targets,
    }


def needs_everyone(config: Config) -> str:  # noqa: ARG001
    """See `coterie_server.absence`."""
    return "an average without some users belongs to another objective"


def build(config: Config, setting: Setting) -> Coordinator:
    """The coordinator's half for one stage. ConfigError for weights and parameters that cannot be run."""
    if setting.facts is None:
        raise RunError("method 'async_l2gd' needs the facts of the stage 'prepare'")
    clusters = clusters_of(config, setting.members)
    if config.coins is not None and any(len(flips) != clusters.size for _, flips in config.coins):
        raise ConfigError(f"method.coins must have a coin for each of the {clusters.size} clusters in every iteration")
    rates = rates_of(config, clusters, float(setting.facts.smoothness.max()))
    return Coordinator(config, setting, clusters, rates, _reuse(config, clusters))


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


def _schedule(config: Config, seed: int, p0: float, p: Array, numbers: Indices) -> Schedule:
    return schedule_of(seed, p0, tuple(p.tolist()), tuple(numbers.tolist()), recorded_coins(config.coins))


# ---- the aggregators' half


@dataclass(frozen=True)
class ClusterHalfState:
    """Of c clusters: the next iteration, what is known of bar_j, bar_j and bar, and how often the cluster has averaged on its own."""

    at: Indices  # (c,)
    known: Indices  # (c,) STALE, FRESH or SHARED
    cluster_average: Array  # (c, d)
    global_average: Array  # (c, d)
    within_rounds: Indices  # (c,)
    parameters: Parameters | None = None


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
        parameters, go, trace = inbox.get(Parameters), inbox.get(Advance), inbox.get(Trace)
        if isinstance(parameters, Parameters):
            await federation.exchange(parameters, UserWeights(self._clusters.gamma))
            return replace(state, parameters=parameters), []
        if isinstance(go, Advance):
            news = inbox.get(GlobalAverage)
            walk = Walk(self._config, self._clusters, self._seed, self._precision, state)
            return await walk.to(go, news if isinstance(news, GlobalAverage) else None, federation)
        if isinstance(trace, Trace):
            return state, [await cluster_state(federation, self._clusters, messages, state.within_rounds)]
        raise TypeError(f"no step of async_l2gd for {list(inbox)}")


def build_clusters(config: Config, setting: ClusterSetting) -> ClusterHalf:
    """The aggregators' half for one stage."""
    return ClusterHalf(config, setting)


@dataclass(frozen=True)
class _Leg:
    """What one cluster does next without hearing from anybody: averaging steps whose averages are at hand, then local steps."""

    until: int
    wants_models: bool
    first: int | None = None  # the operation at its beginning that users have no average for
    centres: bool = False  # and both averages go with it, since more averaging follows
    known: int = STALE  # of bar_j, when it is done
    is_within: bool = False  # whether the models are wanted for a round of the cluster's own


class Walk:
    """The way of some clusters from where they are to where the coordinator wants them."""

    def __init__(self, config: Config, clusters: Clusters, seed: int, precision: Precision, state: ClusterHalfState) -> None:
        if state.parameters is None:
            raise RunError("the coordinator sent no parameters before the first iteration")
        self._config, self._clusters, self._precision = config, clusters, precision
        self._p = state.parameters
        self._schedule = _schedule(config, seed, float(self._p.p0[0]), self._p.p, clusters.numbers)
        self._at, self._known = state.at.copy(), state.known.copy()
        self._within_rounds = state.within_rounds.copy()
        self._cluster_average, self._global_average = state.cluster_average.copy(), state.global_average.copy()
        self._has_news = np.zeros(clusters.size, dtype=np.bool_)  # whether bar is new, and the users have yet to get it

    async def to(self, go: Advance, news: GlobalAverage | None, federation: Federation) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Walks, wave by wave: in each, all clusters that still have a way to go take a leg."""
        if news is not None:
            self._global_average = news.average.copy()
            self._has_news[:] = True
        wants_pair = go.wants_pair > 0
        while (pending := self._pending(go.until, wants_pair)).size:
            legs = {place: self._leg(place, int(go.until[place]), bool(wants_pair[place])) for place in pending.tolist()}
            await self._wave(legs, federation)
        state = ClusterHalfState(self._at, self._known, self._cluster_average, self._global_average, self._within_rounds, self._p)
        if not wants_pair.any():
            return state, []
        weight = self._clusters.alpha * self._clusters.gamma_sums
        return state, [ClusterSums(self._clusters.numbers, weight[:, None] * self._cluster_average, weight)]

    def _pending(self, until: Indices, wants_pair: Any) -> Indices:
        return np.flatnonzero((self._at < until) | (wants_pair & (self._known == STALE)))

    # ---- planning

    def _leg(self, place: int, until: int, wants_pair: bool) -> _Leg:
        number, at, known = int(self._clusters.numbers[place]), int(self._at[place]), int(self._known[place])
        ops = self._schedule.operations(number, at, min(until + 1, self._config.iterations))
        n = until - at  # to be done at most; the one after them, if any, says what must be known then
        reusable = int(self._p.is_reusable[place])
        done, first = 0, None
        if n and ops[0] == WITHIN and known == STALE:
            return _Leg(at, wants_models=True, is_within=True)
        centres = False
        while done < n and ops[done] != LOCAL:
            if ops[done] == WITHIN:
                if known == STALE:
                    break
                first = WITHIN if known == FRESH else first
                known = SHARED if reusable else STALE
            elif self._has_news[place] and done == 0:
                first = GLOBAL
                # After a global round, another one needs both only where bar is used again too; else that brings its own.
                centres = ops.size > 1 and ((ops[1] == WITHIN and reusable > NO_REUSE) or (ops[1] == GLOBAL and reusable == REUSE_ALL))
                known = (SHARED if centres else FRESH) if reusable else STALE
                # Any other global round on the way needs no news: the averages that users have move as is known.
            done += 1
        if done < n and ops[done] == LOCAL:
            local = ops[done:n] == LOCAL
            done += local.size if local.all() else int(local.argmin())
            known = STALE
        stops_at = at + done
        needs = done < ops.size and known == STALE and (ops[done] == WITHIN or (stops_at == until and wants_pair))
        return _Leg(stops_at, needs, first, centres, known, is_within=needs and bool(ops[done] == WITHIN))

    # ---- one wave

    async def _wave(self, legs: Mapping[int, _Leg], federation: Federation) -> None:
        numbers, places = self._clusters.numbers, np.array(list(legs), dtype=np.int64)
        until = np.array([leg.until for leg in legs.values()], dtype=np.int64)
        wants = np.array([leg.wants_models for leg in legs.values()], dtype=np.int64)
        sent: list[Message] = [Steps(numbers[places], until, wants), *self._targets(legs)]
        is_all = places.size == self._clusters.size
        to = None if is_all else np.flatnonzero(np.isin(self._clusters.segments.place, places))
        replies = await federation.exchange(*sent, to=to)
        for place, leg in legs.items():
            self._arrive(place, leg)
        asked = places[wants > 0]
        if asked.size:
            self._average(asked, replies[Models])

    def _targets(self, legs: Mapping[int, _Leg]) -> list[Message]:
        numbers = self._clusters.numbers
        centres = np.array([place for place, leg in legs.items() if leg.centres], dtype=np.int64)
        single = [place for place, leg in legs.items() if leg.first is not None and not leg.centres]
        listed: list[Message] = []
        if single:
            points = [self._target(place, legs[place].first) for place in single]
            listed.append(Target(numbers[single], np.array(points)))
        if centres.size:
            self._cluster_average[centres] = self._precision.rounded(self._cluster_average[centres])  # as users have it from here on
            listed.append(Centres(numbers[centres], self._cluster_average[centres], self._global_average[centres]))
        return listed

    def _target(self, place: int, operation: int | None) -> Array:
        bar_j: Array = self._cluster_average[place]
        if operation == WITHIN:
            return bar_j
        return combined(float(self._p.alpha[place]), float(self._p.tau[place]), bar_j, self._global_average[place])

    def _arrive(self, place: int, leg: _Leg) -> None:
        """Where the cluster is now; bar_j moves with the global rounds on the way, as the users move it."""
        ops = self._schedule.operations(int(self._clusters.numbers[place]), int(self._at[place]), leg.until)
        if leg.known != STALE and self._p.is_reusable[place]:
            gamma = float(self._clusters.gamma[self._first_user(place)])
            step = float(self._p.eta[place]) * gamma / float(self._p.p0[place]) if self._p.p0[place] > 0 else 0.0
            for _ in range(int((ops == GLOBAL).sum())):
                bar_j = moved(self._cluster_average[place], self._global_average[place], step, float(self._p.alpha[place]))
                self._cluster_average[place] = bar_j
        if ops.size:
            self._has_news[place] = False
        self._at[place], self._known[place] = leg.until, leg.known
        self._within_rounds[place] += int(leg.is_within)

    def _first_user(self, place: int) -> int:
        return int(np.flatnonzero(self._clusters.segments.place == place)[0])

    def _average(self, asked: Indices, models: Models) -> None:
        """bar_j = sum_{I_j} gamma_i theta_i / Gamma_j of the clusters whose users have sent their models."""
        if not self._cluster_average.shape[1]:
            self._cluster_average = np.zeros((self._clusters.size, models.theta.shape[1]))
        self._cluster_average[asked] = self._precision.rounded(averages_of(self._clusters, asked, models.theta))
        self._known[asked] = FRESH
