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
from coterie.errors import ConfigError, RunError
from coterie.messages import Message
from coterie.methods.pdmm import Aggregates, Config, Steps, Values, ValuesWanted
from coterie.streams import stream
from coterie_server import anderson, pairs, pdmm_messages
from coterie_server.clusters import Mask, components, partition, persistent
from coterie_server.later import Figures, Later
from coterie_server.method import Counts, Federation, Key, Outcome, Replies, Setting
from coterie_server.paths import stages  # the hook of `coterie_server.plan`
from coterie_server.pdmm_messages import NOBODY

FLAT_ONLY = True  # every pair of users has a dual variable, whatever their known clusters


@dataclass(eq=False)
class Multipliers(Later):
    """mu and mu^ after a round. What users are sent next needs no more of them than (18) and (19) say of their sums."""

    mu: Array  # (d, m)
    muhat: Array  # (d, m), (d, 0) where users keep it
    sums: Array  # (n, d) sum_j mu_ij of each user, (0, d) where nobody needs them
    gap: float  # |x_i - x_j - z_ij| over the unordered pairs, Euclidean


@dataclass(eq=False)
class Joined(Later):
    """Clusters joined by zeros alone when they were last due."""

    labels: Indices  # (n,), (0,) before they were due


@dataclass(frozen=True, eq=False)
class Ahead:
    """Anderson acceleration of (v, mu) -> (v, mu), which is all that a round starts from: users minimize from v alone, z needs mu."""

    u: Array  # (n d + d m,) v / sqrt(n) by users, then mu by components: about as much of either kind
    moved: float  # |v^{t+1} - v^t| / sqrt(n), the first being the plain one
    memory: anderson.Memory | None  # None after a round without everyone, which is another iteration's


@dataclass(frozen=True)
class State:
    """The iterate after a round, and what of it the users have yet to hear. Pairs as in `pairs.Layout`."""

    x: Array  # (n, d)
    z: Array  # (d, m)
    duals: Multipliers
    v: Array  # (n, d) what all users are sent next, (0, d) where it depends on who is drawn, or on the placement
    zero_for: Indices  # (P,) updates in a row that z was zero, (0,) when one is enough
    x_moved: Array  # (n,) how far each block went at its latest update, (0,) at full participation
    z_moved: Array  # (m,) likewise
    owed_x: Indices | None  # S7: users whose new models have not been broadcast, None for all
    owed_mu: Indices | None  # S10: places whose new mu has not been sent, None for all
    joined: Joined
    ahead: Ahead | None = None  # where the next round starts with acceleration

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
    """What a following stage with another penalty starts from; the users keep their part."""

    stage: str
    placement: str
    copies: int
    x: Array
    z: Array
    mu: Array
    muhat: Array


@dataclass(frozen=True)
class Pdmm:
    """The server half for one stage."""

    config: Config
    setting: Setting
    steps: Steps
    lam: float  # LAM
    d: int

    @property
    def n(self) -> int:
        return len(self.setting.members)

    @cached_property
    def layout(self) -> pairs.Layout:
        return pairs.ordered(self.n) if self.config.sampling in ("uniform", "recorded") else pairs.half(self.n)

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
        rest = (zero_for, x_moved, z_moved, NOBODY, NOBODY, Joined(NOBODY))
        if self.warm is not None:
            x, z, mu, muhat = self.warm.x, self.warm.z, self.warm.mu, self.warm.muhat
        else:
            start = self.start_models()
            x, z = np.zeros((self.n, self.d)) if start is None else start, pairs.zeros(self.layout, self.d)
            mu, muhat = z, z if self.is_lean else np.zeros((self.d, 0))
        v = sums = np.zeros((0, self.d))
        if self.is_lean and not is_sampled:
            v, sums = self._aggregates(x, z, muhat), pairs.sums(self.layout, mu)
        return State(x, z, Multipliers(mu, muhat, sums, 0.0), v, *rest)

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """One iteration; figures: blocks updated, residuals, and when due the objective and the number of `labels_of`.

        primal_residual: |x_i - x_j - z_ij| over the pairs, relative to sqrt(N) |x|. dual_residual: rho (N |x^{t+1} - x^t|^2 + |z^{t+1} -
        z^t|^2)^(1/2) over LAM sqrt(N(N-1)/2), the norm that the mu have at most; a block that was not drawn counts with its latest move.
        With acceleration: |v^{t+1} - v^t| over LAM (N-1) sqrt(N), the norm that the sums of the mu_ij have at most: how far the x_i are
        from the minima of f_i + sum_j mu_ij.x, up to the primal residual; v^{t+1} is the plain one, v^t what the users were sent.
        """
        chosen = self.chosen(number)
        is_due = self.config.evaluate_every > 0 and number % self.config.evaluate_every == 0
        extra = pdmm_messages.start(self.start_models(), is_lean=self.is_lean) if number == 1 else []
        if is_due:
            extra.append(ValuesWanted())
        advance = self._lean_round if self.is_lean else self._paper_round
        new, replies = await advance(state, federation, chosen, extra)
        if self.persistence > 1:
            updated = None if chosen.z is None else pairs.touched(self.layout, chosen.z)
            new = replace(new, zero_for=persistent(state.zero_for, pairs.zero_pairs(self.layout, new.z), updated))
        present = _present(chosen.x, replies)
        new = self._moved(state, new, chosen if present is chosen.x else replace(chosen, x=present))
        figures: dict[str, float | Callable[[], float]] = {
            **self._blocks(chosen),
            "primal_residual": lambda: self._primal_residual(new),
            "dual_residual": lambda: self._dual_residual(state, new),
        }
        if present is not chosen.x and present is not None:
            drawn = np.arange(self.n) if chosen.x is None else chosen.x
            figures |= {"absent": float(drawn.size - present.size), "unasked": float(replies.n_unasked(drawn))}
        if is_due and replies.answered is not None:
            figures["told"] = float(replies.awaited(np.arange(self.n)).size)
        if number == 1 and (n_unasked := replies.n_unasked(np.arange(self.n))):
            figures["unasked_at_start"] = float(n_unasked)
        if is_due and replies.answered is None:
            figures["objective"] = float(replies[Values].f.sum()) + self.lam * pairs.total_distance(new.x)
        if is_due:
            zero_for, z = new.zero_for, new.z
            joined = Joined.later(lambda: Joined(_joined(self.n, self._zeros(zero_for, z))))
            new = replace(new, joined=joined)
            figures["clusters"] = lambda: float(joined.labels.max() + 1)
        return new, Figures(figures)

    def labels_of(self, state: State) -> Indices | None:
        """Clusters (n,) joined by lasting exact zeros of z when they were last due; models that are merely near join in `finish` only."""
        return state.joined.labels if state.joined.labels.size else None

    def _zeros(self, zero_for: Indices, z: Array) -> Mask:
        """(P,): whose z counts as zero: it has been for `persistence` updates."""
        return zero_for >= self.persistence if self.persistence > 1 else pairs.zero_pairs(self.layout, z)

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """Delivers the last S7 and S10 and finds the clusters."""
        if owed := self._owed(state):
            await federation.exchange(*owed)
        labels = partition(state.x, self._zeros(state.zero_for, state.z), self.config.cluster_tolerance)
        figures = {"clusters": float(labels.max() + 1)}
        carry = Carry(self.setting.stage, self.config.placement, self.layout.copies, state.x, state.z, state.mu, state.muhat)
        return Outcome(state.x, labels, figures, carry=carry)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """S5 = X, S6 = Z (one per unordered pair when drawn in pairs), S7 = X counted once, S10 = S_D; lean: X each way."""
        x, z, mu = (sum(f.get(key, 0.0) for f in figures) for key in ("x_blocks", "z_blocks", "dual_blocks"))
        absent, unasked = (sum(f.get(key, 0.0) for f in figures) for key in ("absent", "unasked"))
        expected: dict[Key, float] = {("S5", "up"): x - absent}
        start = self.start_models()
        if start is not None and figures:
            expected["S0", "down"] = 1.0 if pdmm_messages.is_common(start) else self.n - figures[0].get("unasked_at_start", 0.0)
        if self.is_lean:
            expected["S7+S10", "down"] = x - unasked
        else:
            expected["S6", "up"] = z / 2 if self.config.sampling == "paired" else z
            expected["S7", "down"], expected["S10", "down"] = x, mu
        return expected

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """f_i(x_i) from each user in the rounds that evaluate."""
        every = self.config.evaluate_every
        if not every:
            return {}
        return {("evaluate", "up"): sum(row.get("told", float(self.n)) for number, row in enumerate(figures, 1) if number % every == 0)}

    def printed_vectors(self, n_rounds: int) -> Mapping[str, float]:
        """The paper's own count, S_P up and S_P + S_D down per iteration: a bound of what any placement sends, S0 apart."""
        n, config = self.n, self.config
        if config.schedule is not None:
            rounds = config.schedule[:n_rounds]
            s_p, s_d = sum(len(x) + len(z) for x, z, _ in rounds), sum(len(mu) for _, _, mu in rounds)
            return {"up": float(s_p), "down": float(s_p + s_d)}
        s_p, s_d = n * n, n * (n - 1)
        if config.sampling != "full":
            s_p = config.primal_blocks(n)
            s_d = config.dual_blocks(n) if config.dual == "independent" else min(s_p, s_d)
        if config.sampling == "paired" and config.dual == "independent":
            s_d = 2 * max(1, round(s_d / 2))  # both of a pair are drawn, or neither
        return {"up": float(n_rounds * s_p), "down": float(n_rounds * (s_p + s_d))}

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
        random = stream(self.setting.seed, f"pdmm blocks of {self.setting.stage}", round_number=number)
        return draw(self.layout, config.primal_blocks(self.n), duals, random)

    async def _paper_round(
        self, state: State, federation: Federation, chosen: pairs.Chosen, extra: Sequence[Message]
    ) -> tuple[State, Replies]:
        """S1 with the S7 and S10 of the round before; S5 and S6 come back; S8 and S9 happen here."""
        replies = await federation.exchange(*self._owed(state), *pdmm_messages.selection(self.layout, chosen), *extra)
        x = pdmm_messages.with_models(state.x, chosen.x, replies)
        splits, owed_x = replies, chosen.x
        if self.config.z_after_x():
            splits, owed_x = await federation.exchange(*pdmm_messages.models(x, chosen.x)), NOBODY
        z = pdmm_messages.with_splits(self.layout, state.z, chosen.z, splits)
        mu, gap = pairs.dual_step(self.layout, self.steps.tau * self.steps.rho, chosen.mu, x, z, state.mu)
        mu = self.setting.precision.rounded(mu)
        duals = Multipliers(mu, state.muhat, state.duals.sums, gap)
        return replace(state, x=x, z=z, duals=duals, owed_x=owed_x, owed_mu=chosen.mu), replies

    async def _lean_round(
        self, state: State, federation: Federation, chosen: pairs.Chosen, extra: Sequence[Message]
    ) -> tuple[State, Replies]:
        """v_i to the users drawn, x_i back (S5), and all about pairs here; users not drawn are not contacted unless `extra` asks."""
        if self.config.acceleration == "anderson":
            return await self._accelerated_round(state, federation, extra)
        if chosen.x is None:
            return await self._full_lean_round(state, federation, extra)
        replies = Replies({}, None)
        if chosen.x.size or extra:
            v = self._aggregates(state.x, state.z, state.muhat)[chosen.x]
            messages = [Aggregates(v, users=chosen.x)] if chosen.x.size else []
            replies = await federation.exchange(*messages, *extra, to=None if extra else chosen.x)
        x = pdmm_messages.with_models(state.x, _present(chosen.x, replies), replies)
        z, duals = pairs.advance_some(self.layout, self.steps, self.lam, chosen, state.x, x, state.z, state.mu, state.muhat)
        return replace(state, x=x, z=z, duals=Multipliers(duals.mu, duals.muhat, state.duals.sums, duals.gap)), replies

    async def _full_lean_round(self, state: State, federation: Federation, extra: Sequence[Message]) -> tuple[State, Replies]:
        """The same for everyone. The next v does not wait for the multipliers: with R_i = sum_{j!=i} (x_i - x_j - z_ij) and (18), (19)

        sum_j mu^_ij^{t+1} = sum_j mu_ij^t + (tau - nu) rho R_i.
        """
        steps, layout, weight = self.steps, self.layout, (self.steps.tau - self.steps.nu) * self.steps.rho
        replies = await federation.exchange(Aggregates(state.v), *extra)
        x = pdmm_messages.with_models(state.x, replies.answered, replies)
        z = pairs.split_all(layout, steps, self.lam, x if self.config.z_after_x() else state.x, state.muhat)
        duals = Multipliers.later(lambda: self._multipliers(x, z, state.mu))
        # v_i = rho sum_{j!=i} (x_j + z_ij) + eta x_i - sum_j mu^_ij, by multiples of what it is made of
        v = (steps.rho + weight) * (pairs.sums(layout, z) + x.sum(axis=0))
        v += (steps.eta - steps.rho - weight * self.n) * x
        v -= state.duals.sums
        return replace(state, x=x, z=z, duals=duals, v=v), replies

    async def _accelerated_round(self, state: State, federation: Federation, extra: Sequence[Message]) -> tuple[State, Replies]:
        """A full round from the extrapolated v and mu. What it ends with, and what is looked at, is the plain iterate, zeros included."""
        replies = await federation.exchange(Aggregates(state.v), *extra)
        x = pdmm_messages.with_models(state.x, replies.answered, replies)
        ahead = state.ahead
        mu = state.mu if ahead is None else ahead.u[state.v.size :].reshape(state.z.shape)
        z = pairs.split_all(self.layout, self.steps, self.lam, x, mu)
        new = pairs.dual_all(self.layout, self.steps, x, z, mu)
        v = self._aggregates(x, z, new.mu)
        value = self._coordinates(v, new.mu)
        residual = value - (self._coordinates(state.v, mu) if ahead is None else ahead.u)
        moved = float(np.linalg.norm(residual[: v.size]))
        memory, u = None, value
        if replies.answered is None:
            memory, u = anderson.step(None if ahead is None else ahead.memory, value, residual, self.config.anderson_memory)
        duals = Multipliers(new.mu, new.mu, np.zeros((0, self.d)), new.gap)
        sent = u[: v.size].reshape(v.shape) * np.sqrt(self.n)
        return replace(state, x=x, z=z, duals=duals, v=sent, ahead=Ahead(u, moved, memory)), replies

    def _coordinates(self, v: Array, mu: Array) -> Array:
        return np.concatenate([(v / np.sqrt(self.n)).reshape(-1), mu.reshape(-1)])

    def _multipliers(self, x: Array, z: Array, mu: Array) -> Multipliers:
        """S8, S9 and S11 on every pair."""
        duals = pairs.dual_all(self.layout, self.steps, x, z, mu)
        return Multipliers(duals.mu, duals.muhat, pairs.sums(self.layout, duals.mu), duals.gap)

    def _aggregates(self, x: Array, z: Array, muhat: Array) -> Array:
        """v (n, d). A pair stored twice has half of rho each."""
        rho, eta = self.steps.rho, self.steps.eta
        weighted = z * (rho / self.layout.copies)
        weighted -= muhat
        v: Array = rho * (x.sum(axis=0) - x) + eta * x + pairs.sums(self.layout, weighted)
        return v

    def _owed(self, state: State) -> list[Message]:
        """S7 and S10 of the round before."""
        if self.is_lean:
            return []
        return pdmm_messages.models(state.x, state.owed_x) + pdmm_messages.duals(self.layout, state.mu, state.owed_mu)

    def _blocks(self, chosen: pairs.Chosen) -> dict[str, float]:
        per_place = 2 // self.layout.copies
        everything = self.n * (self.n - 1)
        return {
            "x_blocks": float(self.n if chosen.x is None else chosen.x.size),
            "z_blocks": float(everything if chosen.z is None else per_place * chosen.z.size),
            "dual_blocks": float(everything if chosen.mu is None else per_place * chosen.mu.size),
        }

    def _moved(self, old: State, new: State, chosen: pairs.Chosen) -> State:
        """Notes how far the drawn blocks went."""
        if chosen.x is None or chosen.z is None:
            return new
        x_moved, z_moved = old.x_moved.copy(), old.z_moved.copy()
        x_moved[chosen.x] = np.linalg.norm(new.x[chosen.x] - old.x[chosen.x], axis=1)
        z_moved[chosen.z] = pairs.lengths(new.z[:, chosen.z] - old.z[:, chosen.z])
        return replace(new, x_moved=x_moved, z_moved=z_moved)

    def _primal_residual(self, new: State) -> float:
        scale = pairs.distance_norm(new.x)
        return new.duals.gap / scale if scale else 0.0

    def _dual_residual(self, old: State, new: State) -> float:
        if new.ahead is not None:
            return new.ahead.moved / (self.lam * (self.n - 1))
        is_full = self.config.sampling == "full"
        x_move = np.linalg.norm(new.x - old.x if is_full else new.x_moved)
        z_move = pairs.distance(old.z, new.z) if is_full else np.linalg.norm(new.z_moved) / np.sqrt(self.layout.copies)
        return float(self.steps.rho * np.hypot(np.sqrt(self.n) * x_move, z_move) / (self.lam * np.sqrt(self.n * (self.n - 1) / 2)))


def _joined(n: int, zero: Mask) -> Indices:
    """Clusters (n,) by the marked pairs (P,) alone: users who have not moved from a common start have said nothing."""
    upper = pairs.half(n)
    return components(upper.first[zero], upper.second[zero], n)


def _present(users: Indices | None, replies: Replies) -> Indices | None:
    """Those of `users` (None: all) who have answered, for a round that goes on without the late ones."""
    if replies.answered is None or users is None:
        return users if replies.answered is None else replies.answered
    return np.intersect1d(users, replies.answered)


def needs_everyone(config: Config) -> str:
    """See `coterie_server.absence`."""
    return "" if config.placement == "lean" else "in placement 'paper' users keep each other's models, which must stay equal"


def build(config: Config, setting: Setting) -> Pdmm:
    """The server half for one stage. Raises ConfigError when config, members and start do not fit together."""
    n = len(setting.members)
    if setting.facts is None:
        raise ConfigError("pdmm needs the users' facts (number of coefficients, smoothness), found none")
    method = Pdmm(config, setting, config.steps_for(n, float(setting.facts.smoothness.mean())), config.lam(n), setting.facts.d)
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


__all__ = ["Carry", "Pdmm", "State", "build", "needs_everyone", "stages"]
