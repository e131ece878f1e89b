"""The rounds of PDMM at the server: the iterate, and how a round computes the next one.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1, steps S1 to S11 as far as they happen here; the deviations are those named in
`coterie_server.methods.pdmm.half`. What is drawn, reported and booked is decided there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.arrays import Array, Indices
from coterie.families.pdmm_messages import Aggregates, ValuesWanted, Weight
from coterie.methods.pdmm import Config, Constants
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.interface.deferred import Deferred
from coterie_server.interface.half import Federation, Replies
from coterie_server.interface.wanted import Wanted
from coterie_server.maths import anderson
from coterie_server.methods.pdmm import balance, forecast, pairs
from coterie_server.methods.pdmm import messages as pdmm_messages
from coterie_server.methods.pdmm.forecast import Forecasts
from coterie_server.methods.pdmm.messages import NOBODY


@dataclass(eq=False)
class Multipliers(Deferred):
    """mu and mu^ after a round. The next messages to users need only their sums, which (18) and (19) give without them."""

    mu: Array  # (d, m)
    muhat: Array  # (d, m), (d, 0) where users keep it
    sums: Array  # (n, d) sum_j mu_ij of each user, (0, d) where nobody needs them
    gap: float  # |x_i - x_j - z_ij| over the unordered pairs, Euclidean, squares weighted


@dataclass(eq=False)
class Clustering(Deferred):
    """Clusters joined by zeros alone when they were last due."""

    labels: Indices  # (n,), (0,) before they were due


@dataclass(frozen=True, eq=False)
class Extrapolation:
    """Anderson acceleration of (v, mu) -> (v, mu), the whole input of a round: users minimize from v alone, z needs mu."""

    u: Array  # (n d + d m,) v / sqrt(n) by users, then mu by components: about as much of either kind; with a graph, v_i over the root of
    #   the degree, and m times that of the weight
    moved: float  # |v^{t+1} - v^t| in these coordinates, the first being the plain one
    memory: anderson.Memory | None  # None after a round without everyone, which is another iteration's


@dataclass(frozen=True)
class State:
    """The iterate after a round, and the part that has yet to be sent. Pairs as in `pairs.Layout`."""

    x: Array  # (n, d)
    z: Array  # (d, m)
    duals: Multipliers
    v: Array  # (n, d) the next messages to all users, (0, d) where they depend on who is drawn, or on the placement
    zero_for: Indices  # (P,) updates in a row that z was zero, (0,) when one is enough
    x_moved: Array  # (n,) how far each block went at its latest update, (0,) at full participation
    z_moved: Array  # (m,) likewise
    owed_x: Indices | None  # S7: users whose new models have not been broadcast, None for all
    owed_mu: Indices | None  # S10: places whose new mu has not been sent, None for all
    clustering: Clustering
    rho: float  # of the next round
    untold: Indices  # users who have yet to learn their degrees
    graph_mark: int  # of `ties.mark_of`
    extrapolation: Extrapolation | None = None  # where the next round starts with acceleration
    forecasts: Forecasts | None = None  # with `forecast`

    @property
    def mu(self) -> Array:
        """(d, m)."""
        return self.duals.mu

    @property
    def muhat(self) -> Array:
        """(d, m), (d, 0) where it is kept by the users."""
        return self.duals.muhat


@dataclass(frozen=True)
class Carry:
    """The start of a following stage with another penalty; the users keep their part."""

    stage: str
    placement: str
    copies: int
    x: Array
    z: Array
    mu: Array
    muhat: Array
    rho: float
    graph_mark: int
    forecasts: Forecasts | None = None


@dataclass(frozen=True)
class Rounds:
    """All rounds of one stage."""

    config: Config
    layout: pairs.Layout
    first_steps: Constants  # of round 1
    lam: float  # LAM
    precision: Precision
    residual: float | None = None  # with which the stage ends
    last: int = 0  # round

    @property
    def n(self) -> int:
        return self.layout.n

    def steps(self, state: State) -> Constants:
        """Those of the next round."""
        return self.first_steps.at(state.rho)

    async def advance(
        self, state: State, federation: Federation, chosen: pairs.Chosen, extra: Sequence[Message], number: int
    ) -> tuple[State, Replies]:
        """The state after round `number` on the chosen blocks, and what users answered in it, to `extra` too."""
        if state.untold.size:
            extra = [pdmm_messages.degrees(self.layout, state.untold), *extra]
        if balance.has_weight(self.config, number):
            extra = [Weight(np.array([state.rho])), *extra]
        if self.config.placement == "paper":
            return await self._paper_round(state, federation, chosen, extra)
        if self.config.acceleration == "anderson":
            return await self._accelerated_round(state, federation, extra)
        if state.forecasts is not None:
            return await self._forecast_round(state, state.forecasts, federation, extra, is_last=number == self.last)
        return await self._lean_round(state, federation, chosen, extra)

    def _wanted(self, users: Indices | None, state: State, extra: Sequence[Message]) -> list[Wanted]:
        return pdmm_messages.wanted(users, state.x.shape[1], extra, is_stochastic=self.config.stochastic is not None)

    async def _paper_round(
        self, state: State, federation: Federation, chosen: pairs.Chosen, extra: Sequence[Message]
    ) -> tuple[State, Replies]:
        """S1 with the S7 and S10 of the round before; S5 and S6 come back; S8 and S9 happen here."""
        replies = await federation.exchange(*self.owed(state), *pdmm_messages.selection(self.layout, chosen), *extra)
        x = pdmm_messages.with_models(state.x, chosen.x, replies)
        splits, owed_x = replies, chosen.x
        if self.config.z_after_x():
            splits, owed_x = await federation.exchange(*pdmm_messages.models(x, chosen.x)), NOBODY
        z = pdmm_messages.with_splits(self.layout, state.z, chosen.z, splits)
        mu, gap = pairs.dual_step(self.layout, self.steps(state).tau * state.rho, chosen.mu, x, z, state.mu)
        mu = self.precision.rounded(mu)
        duals = Multipliers(mu, state.muhat, state.duals.sums, gap)
        return replace(state, x=x, z=z, duals=duals, owed_x=owed_x, owed_mu=chosen.mu), replies

    async def _lean_round(
        self, state: State, federation: Federation, chosen: pairs.Chosen, extra: Sequence[Message]
    ) -> tuple[State, Replies]:
        """v_i to the users drawn, x_i back (S5), and all about pairs here; users not drawn are not contacted unless `extra` asks."""
        if chosen.x is None:
            return await self._full_lean_round(state, federation, extra)
        replies = Replies({}, None)
        if chosen.x.size or extra:
            v = self.aggregates(state.rho, state.x, state.z, state.muhat)[chosen.x]
            messages = [Aggregates(v, users=chosen.x)] if chosen.x.size else []
            replies = await federation.exchange(
                *messages, *extra, to=None if extra else chosen.x, wanted=self._wanted(chosen.x, state, extra)
            )
        x = pdmm_messages.with_models(state.x, present(chosen.x, replies), replies)
        z, duals = pairs.advance_some(self.layout, self.steps(state), self.lam, chosen, state.x, x, state.z, state.mu, state.muhat)
        return replace(state, x=x, z=z, duals=Multipliers(duals.mu, duals.muhat, state.duals.sums, duals.gap)), replies

    async def _full_lean_round(self, state: State, federation: Federation, extra: Sequence[Message]) -> tuple[State, Replies]:
        """The same for everyone. The next v does not wait for the multipliers: with R_i = sum_{j!=i} (x_i - x_j - z_ij) and (18), (19)

        sum_j mu^_ij^{t+1} = sum_j mu_ij^t + (tau - nu) rho R_i.
        """
        replies = await federation.exchange(Aggregates(state.v), *extra, wanted=self._wanted(None, state, extra))
        return self._after(state, pdmm_messages.with_models(state.x, replies.answered, replies)), replies

    def _after(self, state: State, x: Array) -> State:
        """The state after a round of everyone that has brought the models x (n, d)."""
        steps, layout = self.steps(state), self.layout
        weight = (steps.tau - steps.nu) * steps.rho
        z = pairs.split_all(layout, steps, self.lam, x if self.config.z_after_x() else state.x, state.muhat)
        duals = Multipliers.deferred(lambda: self._multipliers(steps, x, z, state.mu))
        # v_i = rho sum_{j!=i} (x_j + z_ij) + eta x_i - sum_j mu^_ij, by multiples of what it is made of
        v = (steps.rho + weight) * (pairs.sums(layout, z) + layout.gathered(x))
        v += (layout.damping(steps.eta) - steps.rho * layout.loops - weight * (layout.degree + layout.loops)) * x
        v -= state.duals.sums
        return replace(state, x=x, z=z, duals=duals, v=v)

    async def _forecast_round(
        self, state: State, known: Forecasts, federation: Federation, extra: Sequence[Message], *, is_last: bool
    ) -> tuple[State, Replies]:
        """A full round in which only users are asked whose answers cannot be foretold well enough.

        Where its residual would end the stage, everyone else is asked in a second exchange: the residual that ends a stage is of answers.
        Everyone is asked in the last round too, and where users have yet to learn their degrees. Only then are values of losses asked for.
        """
        steps, everyone = self.steps(state), np.arange(self.n)
        q = steps.rho * self.layout.degree + self.layout.damping(steps.eta)
        v = self.precision.rounded(state.v)
        x, doubt = forecast.foretold(known, v, q)
        left = [message for message in extra if not isinstance(message, ValuesWanted)]
        due = everyone if is_last or state.untold.size else np.flatnonzero(doubt > self._doubt(known.residual))
        asked, exchanges, replies = NOBODY, 0, Replies({}, None)
        while True:
            if due.size:
                asked, exchanges = np.union1d(asked, due), exchanges + 1
                more = extra if asked.size == self.n else left
                to = None if due.size == self.n or len(more) > len(left) else due
                replies = await federation.exchange(Aggregates(v[due], users=due), *more, to=to, wanted=self._wanted(due, state, more))
                x = pdmm_messages.with_models(x, due, replies)
            new = self._after(state, x)
            residual = max(self.primal_residual(new), self.dual_residual(state, new))
            if asked.size == self.n or self.residual is None or residual > self.residual:
                break
            due = np.setdiff1d(everyone, asked)
        known = forecast.learned(known, asked, v, q, x, float(np.finfo(self.precision.dtype).eps))
        are_own = np.isin(everyone, asked).astype(np.int64)
        known = replace(known, are_own=are_own, residual=residual, asked=asked.size, exchanges=exchanges)
        return replace(new, forecasts=known), replies if replies.answered is None else Replies({}, None)

    def _doubt(self, residual: float) -> Array:
        """The error that users' gradients may have, (1,) or (n,): `forecast` of the residual, in the units of the sums of mu_ij."""
        scale = np.ravel(self.layout.scale)
        return np.asarray((self.config.forecast or 0.0) * residual * self.lam * self._most * scale / np.sqrt(self.n))

    async def _accelerated_round(self, state: State, federation: Federation, extra: Sequence[Message]) -> tuple[State, Replies]:
        """A full round from the extrapolated v and mu. Results and figures are those of the plain iterate, zeros included."""
        replies = await federation.exchange(Aggregates(state.v), *extra, wanted=self._wanted(None, state, extra))
        x = pdmm_messages.with_models(state.x, replies.answered, replies)
        extrapolation = state.extrapolation
        mu = state.mu if extrapolation is None else extrapolation.u[state.v.size :].reshape(state.z.shape) / self.layout.roots
        steps = self.steps(state)
        z = pairs.split_all(self.layout, steps, self.lam, x, mu)
        new = pairs.dual_all(self.layout, steps, x, z, mu)
        v = self.aggregates(steps.rho, x, z, new.mu)
        value = self._coordinates(v, new.mu)
        residual = value - (self._coordinates(state.v, mu) if extrapolation is None else extrapolation.u)
        moved = float(np.linalg.norm(residual[: v.size]))
        memory, u = None, value
        if replies.answered is None:
            memory, u = anderson.step(None if extrapolation is None else extrapolation.memory, value, residual, self.config.anderson_memory)
        duals = Multipliers(new.mu, new.mu, np.zeros((0, len(z))), new.gap)
        sent = u[: v.size].reshape(v.shape) * self.layout.scale
        return replace(state, x=x, z=z, duals=duals, v=sent, extrapolation=Extrapolation(u, moved, memory)), replies

    def _coordinates(self, v: Array, mu: Array) -> Array:
        return np.concatenate([(v / self.layout.scale).reshape(-1), (mu * self.layout.roots).reshape(-1)])

    def _multipliers(self, steps: Constants, x: Array, z: Array, mu: Array) -> Multipliers:
        """S8, S9 and S11 on every pair."""
        duals = pairs.dual_all(self.layout, steps, x, z, mu)
        return Multipliers(duals.mu, duals.muhat, pairs.sums(self.layout, duals.mu), duals.gap)

    def aggregates(self, rho: float, x: Array, z: Array, muhat: Array) -> Array:
        """v (n, d). A pair stored twice has half of rho each."""
        eta = self.first_steps.at(rho).eta
        weighted = z * (rho / self.layout.copies)
        weighted -= muhat
        layout = self.layout
        around = layout.gathered(x) - x if layout.graph is None else layout.gathered(x)
        return np.asarray(rho * around + layout.damping(eta) * x + pairs.sums(layout, weighted))

    def owed(self, state: State) -> list[Message]:
        """S7 and S10 of the round before."""
        if self.config.placement == "lean":
            return []
        return pdmm_messages.models(state.x, state.owed_x) + pdmm_messages.duals(self.layout, state.mu, state.owed_mu)

    def moved(self, old: State, new: State, chosen: pairs.Chosen) -> State:
        """Records how far the drawn blocks moved."""
        if chosen.x is None or chosen.z is None:
            return new
        x_moved, z_moved = old.x_moved.copy(), old.z_moved.copy()
        x_moved[chosen.x] = np.linalg.norm(new.x[chosen.x] - old.x[chosen.x], axis=1)
        z_moved[chosen.z] = pairs.lengths(new.z[:, chosen.z] - old.z[:, chosen.z])
        return replace(new, x_moved=x_moved, z_moved=z_moved)

    def primal_residual(self, new: State) -> float:
        """|x_i - x_j - z_ij| over the pairs, over sqrt(N) |x|; with a graph, squares have the weights of pairs and users' degrees."""
        scale = pairs.distance_norm(self.layout, new.x)
        return new.duals.gap / scale if scale else 0.0

    def dual_residual(self, old: State, new: State) -> float:
        """rho (N |x^{t+1} - x^t|^2 + |z^{t+1} - z^t|^2)^(1/2) over LAM sqrt(N(N-1)/2), the norm that the mu have at most.

        A block that was not drawn counts with its latest move. With acceleration: |v^{t+1} - v^t| over LAM (N-1) sqrt(N), the norm that the
        sums of the mu_ij have at most: how far the x_i are from the minima of f_i + sum_j mu_ij.x, up to the primal residual; v^{t+1} is
        the plain one, v^t what the users were sent. With a graph, squares have the weights of pairs and users' degrees.
        """
        if new.extrapolation is not None:
            return float(new.extrapolation.moved / (self.lam * self._most))
        return self._plain_dual_residual(old, new)

    @property
    def _most(self) -> float:
        """The norm that the sums of the mu_ij have at most, over LAM, as users' gradients are scaled."""
        return float(self.n - 1 if self.layout.graph is None else np.sqrt(2 * self.layout.total))

    def _plain_dual_residual(self, old: State, new: State) -> float:
        is_full = self.config.sampling == "full"
        layout = self.layout
        z_move = pairs.distance(layout, old.z, new.z) if is_full else np.linalg.norm(new.z_moved * layout.roots) / np.sqrt(layout.copies)
        if layout.graph is None:
            x_move = np.sqrt(self.n) * np.linalg.norm(new.x - old.x if is_full else new.x_moved)
        else:
            x_move = np.linalg.norm(layout.scale * (new.x - old.x if is_full else new.x_moved[:, None]))
        return float(old.rho * np.hypot(x_move, z_move) / (self.lam * np.sqrt(layout.total)))

    def balanced(self, old: State, new: State, number: int) -> State:
        """The state after round `number` with the rho of the next: v follows, z and the mu have other units, extrapolation begins anew."""
        if not balance.is_due(self.config, number):
            return new
        # With acceleration too it is the plain dual residual: that of v has the primal one in it.
        rho = balance.balanced(new.rho, self.first_steps.rho, self.primal_residual(new), self._plain_dual_residual(old, new))
        if rho == new.rho:
            return new
        if not new.v.size:
            return replace(new, rho=rho)
        v = self.aggregates(rho, new.x, new.z, new.muhat)
        extrapolation = None if new.extrapolation is None else Extrapolation(self._coordinates(v, new.mu), new.extrapolation.moved, None)
        return replace(new, rho=rho, v=v, extrapolation=extrapolation)


def present(users: Indices | None, replies: Replies) -> Indices | None:
    """Those of `users` (None: all) who have answered, for a round that goes on without the late ones."""
    if replies.answered is None or users is None:
        return users if replies.answered is None else replies.answered
    return np.intersect1d(users, replies.answered)
