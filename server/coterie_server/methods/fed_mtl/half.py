"""Server half of `fed_mtl` (see `coterie.methods.fed_mtl`). Networks use partial sharing, with the tensors that the configuration shares,
and so do steps on convex problems. Exact minimisers have a half of their own, which keeps W and A and sends each user the point to which
its relations pull it.

Left out (skip): user i counts as not drawn and keeps the w_i of its latest answer, or of the start. A round with some users makes the
majoriser's step in their w_i alone, and so does not increase the objective. While users are away the iterates tend to the minimum over the
others' models; once all are back, the limit is that of a run without losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.methods.fed_mtl import Config, Pull, Pulled
from coterie_server.families import partial
from coterie_server.families.partial import drawn
from coterie_server.interface.half import Counts, Federation, Outcome, Setting, StageHalf, half_of
from coterie_server.interface.merge import check_senders
from coterie_server.interface.wanted import Wanted
from coterie_server.methods.fed_mtl import relations

# A move that increases the objective by no more than this part of it may have decreased it.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class State:
    """Between two rounds. Users who have not answered yet have NaN as value."""

    w: Array  # (n, d)
    move: Array  # (n, d) how far the latest round has moved them
    gradients: Array  # (n, d) of f_i at w_i, computed from the minimisers
    values: Array  # (n,) f_i(w_i)
    a: Array  # (n, n), or `relations.MEAN`
    b: Array  # (n,) A <= diag(b)
    change: float = 1.0  # of A W, relative, when A was learnt last
    t: float = 1.0  # of the acceleration


@dataclass(frozen=True)
class Related:
    """The server half for one stage on convex problems."""

    config: Config
    setting: Setting
    n: int
    d: int

    @property
    def client_options(self) -> Mapping[str, Any]:
        return {"fed_mtl": {}}

    async def init(self, federation: Federation) -> State:  # noqa: ARG002 - users start at zero, or from what they are sent
        """Zeros, or the models of the stage before. ConfigError for an invalid matrix of relations."""
        chosen, start, zeros = self.config.relations, self.setting.start_models, np.zeros((self.n, self.d))
        a = relations.MEAN if chosen in ("mean", "learned") else relations.given(chosen, self.n)
        return State(zeros if start is None else start, zeros, zeros, np.full(self.n, np.nan), a, relations.bounds(a, self.n))

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """Users are drawn, pulled and return. Once all have answered, figures: the objective, and residuals.

        dual_residual: |G + mu W A| over |G| + |mu W A|, G the users' gradients. primal_residual, of learned relations: the change of W A
        when A was learnt last, over |W A|.
        """
        every = self.config.relations_every
        is_due = self.config.relations == "learned" and number > every and (number - 1) % every == 0
        if is_due and not np.isnan(state.values).any():
            state = self._learnt(state)
        chosen = drawn(self.config, self.setting, self.n, number)
        t = (1 + np.sqrt(1 + 4 * state.t**2)) / 2
        # An extrapolated step may increase the objective. So it is made only in rounds with everyone, where the objective is known.
        ahead = (state.t - 1) / t if chosen.size == self.n and not np.isnan(state.values).any() else 0.0
        v = state.w + ahead * state.move
        y = self.setting.precision.rounded(v - _over(relations.applied(state.a, v), state.b))
        weights = self.config.mu * state.b
        users = None if chosen.size == self.n else chosen
        pull, wanted = Pull(y[chosen], weights[chosen], users=users), [Wanted(Pulled, users, {"d": self.d})]
        replies = await federation.exchange(pull, to=users, wanted=wanted)
        present = replies.awaited(chosen)
        figures = {"users": float(present.size)}
        if present.size < chosen.size:
            figures["unasked"] = float(replies.n_unasked(chosen))
        if present.size:
            answer = replies[Pulled]
            check_senders(answer.kind, np.arange(self.n) if answer.users is None else answer.users, present)
            state = self._moved(state, _with(state, present, answer, weights, y), is_ahead=ahead > 0, t=t)
        return state, figures | self._progress(state)

    async def finish(self, state: State, federation: Federation) -> Outcome:  # noqa: ARG002 - the engine delivers W
        """The users' models."""
        return Outcome(state.w, None, self._progress(state))

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One vector each way for each user of a round."""
        n_asked = len(figures) * self.config.n_selected(self.n) - sum(row.get("unasked", 0.0) for row in figures)
        return {("pull", "down"): n_asked, ("pull", "up"): sum(row["users"] for row in figures)}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """With each vector, of d scalars, one more: the weight of the pull down, and the loss up."""
        return {key: (self.d + 1) * n for key, n in self.expected_vectors(figures).items()}

    def objective(self, state: State) -> float:
        """sum_i f_i(w_i) + mu/2 tr(W A W'); NaN until all users have answered."""
        return float(state.values.sum() + self.config.mu / 2 * (state.w * relations.applied(state.a, state.w)).sum())

    def _learnt(self, state: State) -> State:
        """A for the current W, with which the objective is no larger than before. The acceleration goes on."""
        a = relations.learnt(state.w, self.config.relations_floor)
        new, old = relations.applied(a, state.w), relations.applied(state.a, state.w)
        return replace(state, a=a, b=relations.bounds(a, self.n), change=_relative(new - old, np.linalg.norm(new)))

    def _moved(self, old: State, new: State, *, is_ahead: bool, t: float) -> State:
        """The new state, or the old one where an extrapolated step has increased the objective."""
        before, after = self.objective(old), self.objective(new)
        if is_ahead and not after <= before + _ROUNDING * abs(before):
            return replace(old, t=1.0)
        return replace(new, move=new.w - old.w, t=t)

    def _progress(self, state: State) -> dict[str, float]:
        if np.isnan(state.values).any():
            return {}
        pull = self.config.mu * relations.applied(state.a, state.w)
        scale = np.linalg.norm(state.gradients) + np.linalg.norm(pull)
        figures = {"objective": self.objective(state), "dual_residual": _relative(state.gradients + pull, scale)}
        return figures | ({"primal_residual": state.change} if self.config.relations == "learned" else {})


def _with(state: State, present: Indices, answer: Pulled, weights: Array, y: Array) -> State:
    """The state with the answers of these users: at a minimiser grad f_i(w_i) = mu b_i (y_i - w_i)."""
    w, gradients, values = state.w.copy(), state.gradients.copy(), state.values.copy()
    w[present], values[present] = answer.w, answer.value
    gradients[present] = weights[present, None] * (y[present] - answer.w)
    return replace(state, w=w, gradients=gradients, values=values)


def _over(rows: Array, b: Array) -> Array:
    """Rows over b, 0 for users who are related to nobody."""
    return np.divide(rows, b[:, None], out=np.zeros_like(rows), where=b[:, None] > 0)


def _relative(difference: Array, scale: float | np.floating[Any]) -> float:
    return float(np.linalg.norm(difference) / scale) if scale else 0.0


def build(config: Config, setting: Setting) -> StageHalf[Any]:
    if setting.precision.model != np.float64 or config.solver == "steps":
        return partial.build(config, setting)
    return half_of(Related(config, setting, len(setting.members), setting.known_facts.d))


SERVER = replace(partial.SERVER, build=build)
