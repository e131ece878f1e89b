"""Server halves of `async_al2sgd`: the coordinator has bar and xbar, the aggregators have the schedules of their clusters.

See `coterie.methods.async_al2sgd` for Algorithm 2. All clusters meet at a global round or a new anchor; between two of them they do not
wait for each other. An aggregator sends the pair (alpha_j sum gamma_i theta_i, alpha_j Gamma_j), or that of x, and nothing else.

Nobody can be left out (skip): the estimator (4.1) is unbiased only with the averages of all users, and the anchor of its variance
reduction belongs to one iteration for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.coins import first
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.families.cluster_messages import ClusterSums
from coterie.families.schedule import schedule_by
from coterie.methods.async_al2sgd import (
    ANCHOR,
    MESSAGES,
    NOTHING,
    THETA,
    Advance,
    AnchorPartialSums,
    AnchorSums,
    AskConstants,
    AskRowConstants,
    ClusterConstants,
    Config,
    GlobalAnchor,
    Parameters,
    RowConstants,
    recorded_refreshes,
)
from coterie.wire.messages import Message, PerCluster
from coterie_server.families import known_clusters, peers, robust
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
    Federation,
    Outcome,
    ServerHalf,
    Setting,
    StageHalf,
    Sum,
)
from coterie_server.interface.peers import Peers
from coterie_server.interface.stages import Stage
from coterie_server.methods.async_al2sgd.counts import ClosedForms
from coterie_server.methods.async_al2sgd.rates import Rates, accelerated, given, refresh_coin
from coterie_server.methods.async_al2sgd.walk import ClusterHalfState, Walk


@dataclass(frozen=True)
class State:
    """The coordinator's state."""

    at: int  # the next iteration
    rates: Rates
    average: Array  # (d,) bar or xbar
    owed: int  # THETA or ANCHOR: the kind of `average`, which has yet to be sent; NOTHING: it has been sent
    wants_anchor: bool  # before the first iteration, where users do not start at 0
    between_rounds: int = 0
    anchor_rounds: int = 0


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's half."""

    config: Config
    setting: Setting
    clusters: Clusters
    d: int
    counts: ClosedForms

    def as_half(self) -> StageHalf[State]:
        return StageHalf(
            client_options=self.client_options,
            init=self.init,
            round=self.round,
            finish=self.finish,
            expected_vectors=self.counts.expected_vectors,
            expected_scalars=self.counts.expected_scalars,
            spread_of_vectors=self.counts.spread_of_vectors,
            drawn_vectors=self.counts.drawn_vectors,
            ends=lambda figures: f"{figures['iteration']:.0f} iterations" if figures[ENDED] >= 1 else "",
            part=lambda figures: figures["iteration"] / self.config.iterations,
        )

    @property
    def client_options(self) -> Mapping[str, Any]:
        """The coins, where they are recorded, whether users start from the models of an earlier stage, and whether models are summed."""
        return {"async_al2sgd": {"coins": self.config.coins, "is_warm": self.setting.start is not None, "is_exact": self.setting.is_exact}}

    async def init(self, federation: Federation) -> State:
        """Learns the constants of the row losses, and sends everybody the parameters."""
        numbers, k = self.clusters.numbers, self.clusters.size
        constants = (await federation.exchange(AskConstants(numbers)))[ClusterConstants]
        smoothness, convexity = float(constants.smoothness.max()), given(self.config.mu, float(constants.strong_convexity.min()))
        rates = accelerated(self.config, self.clusters, smoothness, convexity)
        common = {name: np.full(k, getattr(rates, name)) for name in ("p0", "eta", "a1", "a2", "b1", "b2")}
        await federation.exchange(Parameters(numbers, p=rates.p, tau=rates.tau, alpha=self.clusters.alpha, **common))
        return State(0, rates, np.zeros(self.d), NOTHING, self.setting.start is not None)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:  # noqa: ARG002
        """To the next global round or new anchor, or by `round_iterations`, or to the next trace."""
        config, numbers, k = self.config, self.clusters.numbers, self.clusters.size
        until, wanted = self._next(state)
        listed: list[Message] = [Advance(numbers, np.full(k, until), np.full(k, wanted))]
        if state.owed != NOTHING and not self.setting.has_peers:
            listed.append((MESSAGES.global_average if state.owed == THETA else GlobalAnchor)(numbers, np.tile(state.average, (k, 1))))
        kinds: Mapping[int, type[ClusterSums]] = {THETA: MESSAGES.cluster_sums, ANCHOR: AnchorSums}
        kind = None if self.setting.has_peers else kinds.get(wanted)
        totals = await federation.total(*listed, of=[] if kind is None else [Sum(kind)])
        state = replace(state, at=until, owed=wanted, wants_anchor=False)
        if kind is not None:
            sums = totals[kind]
            average = weighted_average(sums.weighted, sums.weight) if sums.weight.any() else np.zeros(self.d)  # no user moves to it
            state = replace(state, average=self.setting.precision.rounded(average))
        between, anchors = state.between_rounds + (wanted == THETA), state.anchor_rounds + (wanted == ANCHOR)
        state = replace(state, between_rounds=between, anchor_rounds=anchors)
        figures = {"iteration": float(until), "between_rounds": float(between), "anchor_rounds": float(anchors)}
        figures |= self.counts.expected_rounds(state.rates, until)
        if until >= config.iterations:
            figures |= self.counts.drawn_rounds(state.rates, self.setting.seed)
        if self.setting.is_exact:
            figures[ROUNDING] = rounding_of(self.clusters, MESSAGES.models, self.setting.precision, totals.rounding)
        if wanted != THETA and config.trace_every and until % config.trace_every == 0:
            ends = {"has_peers": self.setting.has_peers, "is_exact": self.setting.is_exact}
            figures |= (await objective_of(federation, self.clusters, MESSAGES, **ends))[0]
        return state, {**figures, ENDED: float(until >= config.iterations)}

    def _next(self, state: State) -> tuple[int, int]:
        """The iteration to go to, and what is wanted there. At the same iteration a new anchor comes before a global round."""
        config, at, rates = self.config, state.at, state.rates
        if state.wants_anchor:
            return at, ANCHOR
        stop = min(config.iterations, at + config.round_iterations, known_clusters.next_trace(config.trace_every, config.iterations, at))
        schedule = schedule_by(self.setting.seed, rates.p0, rates.p, self.clusters.numbers, config.coins)
        start = at + (state.owed == THETA)  # this global round has its average
        average, _ = schedule.next_global(start, stop, is_stale=True, is_reusable=False)
        last = min(stop, config.iterations - 1)
        refresh = first(refresh_coin(self.setting.seed, rates.rho, recorded_refreshes(config.coins)).flips(at, last), at)
        if refresh < last and refresh + 1 <= average:
            return refresh + 1, ANCHOR
        return average, THETA if average < stop else NOTHING

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """The objective and the users' scores of their models y, which stay with them unless `collect_models` is set."""
        rates, n = state.rates, self.config.iterations
        figures = {name: float(getattr(rates, name)) for name in ("p0", "rho", "eta", "a1", "a2", "b1", "b2")}
        if all(getattr(self.config, name) is None for name in ("mu", "eta", "a1", "a2", "b1", "b2")):
            figures["contraction"] = rates.contraction  # the theorem holds for no other parameters
        figures |= {"between_rounds": float(state.between_rounds), "anchor_rounds": float(state.anchor_rounds)}
        figures |= self.counts.expected_rounds(rates, n)
        ends = {"collects": self.config.collect_models, "has_peers": self.setting.has_peers, "is_exact": self.setting.is_exact}
        return await private_outcome(federation, self.clusters, MESSAGES, figures, self.setting.stage, cure=f"{n} iterations", **ends)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The coordinator's half for one stage. ConfigError for weights and coins that do not fit the members."""
    facts, clusters = setting.known_facts, clusters_of(config, setting.members, setting.robust)
    _check_coins(config, facts.n_rows, clusters.size)
    hosts, d = known_clusters.hosts_of(setting, clusters), facts.d
    is_warm = setting.start is not None
    counts = ClosedForms(clusters, hosts, d, config.iterations, config.coins, is_warm, config.collect_models, setting.is_exact)
    half = known_clusters.with_rule(Coordinator(config, setting, clusters, d, counts).as_half(), clusters)
    return peers.counted(half, setting.peers, clusters.size, d)


def _check_coins(config: Config, n_rows: Indices, n_clusters: int) -> None:
    for number, (_, flips, rows, _) in enumerate(config.coins or ()):
        if len(flips) != n_clusters:
            raise ConfigError(f"method.coins has {len(flips)} coins of clusters in iteration {number}, want one for each of {n_clusters}")
        if len(rows) != n_rows.size:
            raise ConfigError(f"method.coins has {len(rows)} rows in iteration {number}, want one for each of {n_rows.size} users")
        if (beyond := np.flatnonzero(np.array(rows) >= n_rows)).size:
            user = int(beyond[0])
            raise ConfigError(f"method.coins has row {rows[user]} for user {user} in iteration {number}, want less than {n_rows[user]}")


def stages(config: Config, experiment: Experiment) -> Sequence[Stage]:
    """One stage, which ends by its iterations. Each takes at most three rounds (anchor, global round, steps), and one round comes first."""
    stop = experiment.stop.model_copy(update={"rounds": 3 * config.iterations + 1})
    return [Stage(config.name, config.name, config, stop, is_result=True)]


class ClusterHalf:
    """The aggregators' half, for one cluster or for several at once."""

    def __init__(self, config: Config, setting: ClusterSetting) -> None:
        self._config, self._seed, self._names, self._is_exact = config, setting.seed, setting.members.names, setting.is_exact
        self._clusters = clusters_of(config, setting.members, setting.robust, some_only=True)

    def init(self) -> ClusterHalfState:
        """Before the first iteration."""
        c = self._clusters.size
        zeros, nothing = np.zeros(c, dtype=np.int64), np.zeros((c, 0))
        return ClusterHalfState(zeros, nothing, zeros, nothing, self._clusters.nobody_left())

    async def step(
        self, state: ClusterHalfState, inbox: Mapping[type[Message], Message], federation: Federation
    ) -> tuple[ClusterHalfState, Sequence[PerCluster]]:
        """Handles the coordinator's messages."""
        if AskConstants in inbox:
            return state, [await self._constants(federation)]
        if isinstance(parameters := inbox.get(Parameters), Parameters):
            await federation.exchange(parameters, MESSAGES.user_weights(self._clusters.gamma))
            return replace(state, parameters=parameters), []
        if isinstance(go := inbox.get(Advance), Advance):
            if state.parameters is None:
                raise RunError("the coordinator sent no parameters before the first iteration")
            p0, p = float(state.parameters.p0[0]), state.parameters.p
            schedule = schedule_by(self._seed, p0, p, self._clusters.numbers, self._config.coins)
            walk = Walk(self._clusters, schedule, state.parameters, state, is_exact=self._is_exact)
            return await walk.to(go, inbox, federation)
        within, traced = state.within_rounds, state.traced
        seen = await cluster_sums(federation, self._clusters, MESSAGES, inbox, within, traced, is_exact=self._is_exact)
        return replace(state, traced=seen.traced), [seen.answer]

    def notes(self, state: ClusterHalfState) -> Sequence[str]:
        """Whom a rule has left out."""
        return robust.found(self._clusters.robust, self._names, state.left)

    async def _constants(self, federation: Federation) -> ClusterConstants:
        found = (await federation.exchange(AskRowConstants()))[RowConstants]
        flat = np.flatnonzero(found.strong_convexity <= 0)
        if flat.size and self._config.mu is None:
            who = f"user {self._names[int(flat[0])]!r} has row losses that are not strongly convex (mu = 0)"
            raise ConfigError(f"{who}, want mu above 0 for async_al2sgd: set problem.l2, or method.mu to what F has")
        segments = self._clusters.segments
        return ClusterConstants(self._clusters.numbers, segments.maxima(found.smoothness), segments.minima(found.strong_convexity))


def among_peers(config: Config, setting: ClusterSetting, others: Peers) -> ClusterMethod[Any]:
    """The aggregators' half where the averages go between them."""
    half, clusters = ClusterHalf(config, setting), clusters_of(config, setting.members, some_only=True)
    averages = (
        Averaged(MESSAGES.cluster_sums, MESSAGES.partial_sums, MESSAGES.global_average),
        Averaged(AnchorSums, AnchorPartialSums, GlobalAnchor),
    )
    return AmongPeers(half, clusters, MESSAGES, averages, others, setting.precision)


SERVER = ServerHalf(
    build=build,
    stages=stages,
    needs_everyone="an average without some users belongs to another objective",
    tiers=ClusterHalf,
    peers=among_peers,
)
