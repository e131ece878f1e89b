"""PDMM where a round is an update with whoever has answered, and no host waits for another: `sampling: arrival`.

This is not in the paper. With delays, the steps of Algorithm 1 on all pairs need not converge: the duals of a slow user's pairs follow the
fast users to their limit and back. So here each pair (i, j) has a copy of each of its two models, with mean m_ij and difference z_ij, and a
multiplier mu_ij, as in the splitting of Hallac, Leskovec and Boyd, *Network lasso* (2015). User i receives one vector and solves

    v_i = sum_j rho (2 m_ij + z_ij) - mu_ij,       x_i <- argmin f_i(x) + q/2 |x|^2 - v_i.x,       q = 2 rho (N-1),

which is (16) with a pair's own copies instead of x_i and x_j. A pair is updated in the first update in which both of its users have
answered a vector that had its latest value:

    e = tau (x_i - x_j) + (1 - tau) z_ij,     m_ij <- tau (x_i + x_j)/2 + (1 - tau) m_ij,
    z_ij <- shrink(e + mu_ij / rho, LAM / rho),     mu_ij <- mu_ij + rho (e - z_ij),

with a relaxation tau below 2. So an answer is never out of date for a pair that uses it: as far as this pair knows, x_i is what user i
would answer now. What is left is the averaged iteration of Douglas and Rachford, of which each update does some coordinates: Bianchi,
Hachem and Iutzeler, *A coordinate descent primal-dual algorithm* (2016), prove convergence where these are drawn at random.

On a graph pairs are its edges. As in whole rounds, mu_ij is kept over the weight w_ij: rho and LAM have this factor, and the sums over j
too. So q = 2 rho D_i, with the sum D_i of the user's weights.

|mu_ij| <= LAM and mu_ij.z_ij = LAM |z_ij| hold throughout. So `primal_residual`, of x_i - x_j = z_ij, and `dual_residual`, of grad f_i(x_i)
+ sum_j w_ij mu_ij = 0, are those of the optimality conditions, however old an answer is. grad f_i(x_i) is v_i - q x_i of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.streams import generator
from coterie.errors import ConfigError
from coterie.families.pdmm_messages import Aggregates, OwnValuesWanted, OwnWeights, UpdatedModels, Values
from coterie.methods.pdmm import Config, Constants
from coterie.wire.messages import Message
from coterie_server.families import ties
from coterie_server.interface.deferred import Figures
from coterie_server.interface.half import Counts, Federation, Key, Outcome, Replies, Setting
from coterie_server.interface.wanted import Wanted
from coterie_server.methods.pdmm import balance, pairs
from coterie_server.methods.pdmm import counts as pdmm_counts
from coterie_server.methods.pdmm import messages as pdmm_messages
from coterie_server.methods.pdmm.rounds import Carry, Clustering

UNUSED = "unused_at_end"  # closing figure: answers that came after the last update


@dataclass(frozen=True, eq=False)
class State:
    """The iterate after an update, and who is at work. Pairs (d, m) as in `pairs.Layout`."""

    x: Array  # (n, d)
    slope: Array  # (n, d) grad f_i(x_i), NaN before the first answer
    value: Array  # (n,) f_i(x_i), NaN where it is not known
    z: Array
    mu: Array
    middle: Array
    rho: float  # of the next update
    changed: Indices  # (m,) the update that has changed each pair last
    answered: Indices  # (n,) the update that sent the vector of each user's latest answer, -1 before
    asked: Indices  # (n,) the update that has sent the latest vector
    weight: Array  # (n,) the rho that the latest vector was made with
    n_answers: Indices  # (n,)
    is_idle: NDArray[np.bool_]  # (n,) users who have answered, and get a vector in the next update
    v: Array  # (n, d) the latest vectors
    due: Indices  # (n,) with `delays`: when the answer comes
    clock: int  # with `delays`: when the update was
    ages: Array  # (3,) of all answers: how many, the sum of their ages in updates, the greatest
    clustering: Clustering
    graph_mark: int  # of `ties.mark_of`


@dataclass(frozen=True)
class Arrivals:
    """The server half for one stage."""

    config: Config
    setting: Setting
    layout: pairs.Layout
    steps: Constants
    lam: float
    start: Array | None  # x^0 (n, d) as S0 sends it
    warm: Carry | None  # the iterate of the stage before
    clusters: Callable[[Array, Indices, Array], Indices]
    client_options: Mapping[str, Any]

    @property
    def n(self) -> int:
        return self.layout.n

    @property
    def graph_mark(self) -> int:
        return ties.mark_of(self.layout.graph)

    @cached_property
    def _degrees(self) -> Array:
        """(n, 1): the sums D_i of users' weights; N-1 without a graph."""
        return np.broadcast_to(self.layout.degree, (self.n, 1))

    @cached_property
    def delays(self) -> Indices | None:
        """(n,) the mean times of tasks, None where the clock decides. ConfigError for a name that no user has."""
        given, names = self.config.delays, self.setting.members.names
        if given is None:
            return None
        if unknown := sorted(set(given) - set(names)):
            raise ConfigError(f"delays names user {unknown[0]!r}, which the run does not have, want names such as {names[0]!r}")
        return np.array([given.get(name, 1) for name in names], dtype=np.int64)

    async def init(self, federation: Federation) -> State:
        """x^0 from the stage before, z and mu zero; all of them kept along a path. S0 and users' degrees travel by themselves."""
        n, d = self.n, self.setting.known_facts.d
        messages = pdmm_messages.start(self.start, is_lean=True)
        if self.layout.graph is not None:
            messages.append(pdmm_messages.degrees(self.layout, np.arange(n)))
        if messages:
            await federation.exchange(*messages)
        x, z = np.zeros((n, d)) if self.start is None else self.start, pairs.zeros(self.layout, d)
        mu = z
        if self.warm is not None:
            ties.check_same(self.layout.graph, self.warm.graph_mark)
            x, z, mu = self.warm.x, self.warm.z, self.warm.mu
        unknown, never = np.full((n, d), np.nan), np.zeros(n, dtype=np.int64)
        at, everyone, nobody = np.zeros(self.layout.size, dtype=np.int64), np.ones(n, dtype=np.bool_), Clustering(pdmm_messages.NOBODY)
        means = self._means(x, slice(None))
        rho, told, asked = self.steps.rho, (never - 1, never, unknown[:, 0], never), (everyone, unknown, never, 0)
        return State(x, unknown, unknown[:, 0], z, mu, means, rho, at, *told, *asked, np.zeros(3), nobody, self.graph_mark)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """One update: vectors for those who have answered before, and the answers of those who answer now."""
        ties.check_same(self.layout.graph, state.graph_mark)
        state = self._asked(state, number)
        replies, arrived, n_sent, clock = await (self._by_clock if self.delays is None else self._drawn)(state, federation, number)
        ages = number - state.asked[arrived]
        so_far = np.array([state.ages[0] + ages.size, state.ages[1] + ages.sum(), max(state.ages[2], ages.max(initial=0))])
        new = self._answered(state, replies, arrived)
        done = replace(self._with_pairs(new, number), clock=clock, ages=so_far)
        new = self._balanced(state, done)
        figures: dict[str, float | Callable[[], float]] = {
            "x_blocks": float(arrived.size),
            "asked": float(n_sent),
            "pairs": float((done.changed == number).sum()),
            "staleness": float(ages.max(initial=0)),
            "rho": state.rho,
            "primal_residual": lambda: self._primal_residual(done),
            "dual_residual": lambda: self._dual_residual(done),
        }
        every = self.config.evaluate_every
        if every and number % every == 0:
            if not np.isnan(done.value).any():
                figures["objective"] = lambda: float(done.value.sum()) + self.lam * pairs.total_distance(self.layout, done.x)
            clustering = Clustering.deferred(lambda: Clustering(self.clusters(done.x, pdmm_messages.NOBODY, done.z)))
            new = replace(new, clustering=clustering)
            figures["clusters"] = lambda: float(clustering.labels.max() + 1)
        return new, Figures(figures)

    def _asked(self, state: State, number: int) -> State:
        """The vectors of users who have answered, and with `delays` when they answer again."""
        idle, rho = state.is_idle, state.rho
        v = pairs.sums(self.layout, rho * state.z - state.mu) + 2 * rho * self._unsigned_sums(state.middle)
        v = np.where(idle[:, None], self.setting.precision.rounded(v), state.v)
        due = state.due
        if self.delays is not None:
            random = generator(self.setting.seed, f"pdmm arrivals of {self.setting.stage}", round_number=number)
            due = np.where(idle, state.clock + random.integers(1, 2 * self.delays), due)
        return replace(state, v=v, due=due, asked=np.where(idle, number, state.asked), weight=np.where(idle, rho, state.weight))

    async def _by_clock(self, state: State, federation: Federation, _: int) -> tuple[Replies, Indices, int, int]:
        """Sends the vectors, and takes the answers that have come. Also returns who has answered, and how many vectors were sent."""
        idle = np.flatnonzero(state.is_idle)
        replies = await federation.exchange(
            *self._messages(state, idle), to=idle, wanted=self._wanted(state, None), within=self.config.staleness()
        )
        arrived = np.arange(self.n) if replies.answered is None else replies.answered
        return replies, arrived, idle.size, 0

    async def _drawn(self, state: State, federation: Federation, number: int) -> tuple[Replies, Indices, int, int]:
        """The answers that come first, and all that come until the oldest ones are there. A user is asked when its answer is due."""
        oldest = state.due[number - state.asked >= self.config.staleness()]
        clock = max(int(state.due.min()), int(oldest.max(initial=0)))
        users = np.flatnonzero(state.due <= clock)
        replies = await federation.exchange(*self._messages(state, users), to=users, wanted=self._wanted(state, users))
        return replies, users, users.size, clock

    def _messages(self, state: State, users: Indices) -> list[Message]:
        """Vectors, and questions for losses, to these users."""
        if not users.size:
            return []
        weights = [OwnWeights(state.weight[users], users=users)] if self.config.is_balanced() else []
        wants = [OwnValuesWanted(users=users)] if self.config.evaluate_every else []
        return [Aggregates(state.v[users], users=users), *weights, *wants]

    def _wanted(self, state: State, users: Indices | None) -> list[Wanted]:
        values = [Wanted(Values, users)] if self.config.evaluate_every else []
        return [Wanted(UpdatedModels, users, {"d": state.x.shape[1]}), *values]

    def _answered(self, state: State, replies: Replies, arrived: Indices) -> State:
        """S5: the models of users who have answered, and what follows about their losses."""
        x = pdmm_messages.with_models(state.x, arrived, replies)
        slope, value, answered = state.slope.copy(), state.value.copy(), state.answered.copy()
        slope[arrived] = state.v[arrived] - 2 * state.weight[arrived, None] * self._degrees[arrived] * x[arrived]
        answered[arrived] = state.asked[arrived]
        n_answers = state.n_answers.copy()
        n_answers[arrived] += 1
        if self.config.evaluate_every:
            value[arrived] = replies[Values].f
        is_idle = np.zeros(self.n, dtype=np.bool_)
        is_idle[arrived] = True
        return replace(state, x=x, slope=slope, value=value, answered=answered, n_answers=n_answers, is_idle=is_idle)

    def _with_pairs(self, state: State, number: int) -> State:
        """The pairs both of whose users have answered a vector with the pair's latest value."""
        oldest = np.minimum(state.answered[self.layout.first], state.answered[self.layout.second])
        due = np.flatnonzero(oldest > state.changed)
        tau, rho = self.steps.tau, state.rho
        z, mu, middle, changed = state.z.copy(), state.mu.copy(), state.middle.copy(), state.changed.copy()
        extended = tau * pairs.differences(np.ascontiguousarray(state.x.T), self.layout, due) + (1 - tau) * z[:, due]
        z[:, due] = pairs.shrink(extended + mu[:, due] / rho, self.lam / rho)
        mu[:, due] += rho * (extended - z[:, due])
        middle[:, due] = tau * self._means(state.x, due) + (1 - tau) * middle[:, due]
        changed[due] = number
        return replace(state, z=z, mu=mu, middle=middle, changed=changed)

    def _balanced(self, before: State, after: State) -> State:
        """With the rho of the next update. What whole rounds are to `balance` is here that everyone has answered once more.

        Answers that are under way were made with the rho before. This happens a finite number of times, so the limit is the same.
        """
        n_rounds = int(after.n_answers.min())
        if n_rounds == int(before.n_answers.min()) or not balance.is_due(self.config, n_rounds):
            return after
        primal, dual = self._primal_residual(after), self._dual_residual(after)
        return replace(after, rho=balance.balanced(after.rho, self.steps.rho, primal, dual))

    def _means(self, x: Array, places: Indices | slice) -> Array:
        """(x_i + x_j)/2 (d, m) for x (n, d)."""
        columns = np.ascontiguousarray(x.T)
        return np.asarray(0.5 * (columns[:, self.layout.first[places]] + columns[:, self.layout.second[places]]))

    def _unsigned_sums(self, values: Array) -> Array:
        """(n, d): for user i the weighted sum over its pairs, both users with sign 1. `values` (d, m)."""
        values = values if self.layout.weights is None else values * self.layout.weights
        ends = (self.layout.first, self.layout.second)
        return np.stack([sum((np.bincount(end, component, self.n) for end in ends), np.zeros(self.n)) for component in values], axis=1)

    def _primal_residual(self, state: State) -> float:
        """|x_i - x_j - z_ij| over the pairs, relative to sqrt(N) |x|. Squares have a graph's weights and degrees."""
        scale = pairs.distance_norm(self.layout, state.x)
        gap = pairs.differences(np.ascontiguousarray(state.x.T), self.layout) - state.z
        return float(np.linalg.norm(gap * self.layout.roots)) / scale if scale else 0.0

    def _dual_residual(self, state: State) -> float:
        """|grad f_i(x_i) + sum_j mu_ij| over the users, relative to LAM |D|, the most it can be; infinite before all have answered."""
        if np.isnan(state.slope).any():
            return float("inf")
        slopes = state.slope + pairs.sums(self.layout, state.mu)
        graph = self.layout.graph
        most = (self.n - 1) * float(np.sqrt(self.n)) if graph is None else float(np.linalg.norm(graph.degrees))
        return float(np.linalg.norm(slopes)) / (self.lam * most)

    def labels_of(self, state: State) -> Indices | None:
        """Clusters (n,) when they were last due, by the rule of `finish`."""
        return state.clustering.labels if state.clustering.labels.size else None

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """Waits for the answers that are owed, which come too late for an update, and finds the clusters."""
        figures = {"rho_first": self.steps.rho, "rho": state.rho}
        if self.delays is None and not state.is_idle.all():
            replies = await federation.exchange(to=pdmm_messages.NOBODY, wanted=self._wanted(state, None), within=0)
            figures[UNUSED] = float(0 if replies.answered is None else replies.answered.size)
        labels = self.clusters(state.x, pdmm_messages.NOBODY, state.z)
        n, total, greatest = state.ages.tolist()
        ages = {"answers": n, "mean_staleness": total / max(n, 1.0), "greatest_staleness": greatest}
        figures |= {**pdmm_counts.of_clusters(state.x, labels), **ages}
        where = (self.setting.stage, self.config.placement, self.layout.copies)
        carry = Carry(*where, state.x, state.z, state.mu, state.mu, state.rho, state.graph_mark)
        whose = "the clock's" if self.delays is None else "drawn from the seed"
        said = f"stage {self.setting.stage!r} has updates instead of rounds (sampling: arrival), with arrivals that are {whose}"
        note = f"{said}: {n:,.0f} answers, {ages['mean_staleness']:.3g} updates old in the mean and {greatest:.0f} at most"
        new = self.layout.graph if self.warm is None else None  # a path has one graph
        return Outcome(state.x, labels, figures, carry=carry, notes=(note, *ties.notes_on(new)), ties=ties.outcome_of(new))

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """S5: an answer each, also those that came after the last update. S7+S10: a vector for each user that was asked."""
        unused = sum(row.get(UNUSED, 0.0) for row in figures)
        found: dict[Key, float] = {
            ("S5", "up"): sum(row["x_blocks"] for row in figures) + unused,
            ("S7+S10", "down"): sum(row["asked"] for row in figures),
        }
        if self.start is not None and figures:
            found["S0", "down"] = 1.0 if pdmm_messages.is_common(self.start) else float(self.n)
        return found

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """With each vector its rho, if that may change, and with each answer the loss at it, if losses are asked for. Once the degrees."""
        vectors = self.expected_vectors(figures)
        told: dict[Key, float] = {("balance", "down"): vectors["S7+S10", "down"]} if self.config.is_balanced() else {}
        if self.layout.graph is not None and figures:
            told["ties", "down"] = float(self.n)
        return told | ({("evaluate", "up"): vectors["S5", "up"]} if self.config.evaluate_every else {})
