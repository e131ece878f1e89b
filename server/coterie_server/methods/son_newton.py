"""Server half of `son_newton`: proximal Newton steps, whose subproblem the server solves alone.

Users are asked for what the server does not know. Quadratic losses are known after one answer, also for the other penalties of a path.

Nobody can be left out (skip): a line search must not compare values of two problems.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie.experiment.config import Experiment
from coterie.families.consensus import AskConjugates, Conjugates, Curvatures, GroupModel, Slopes
from coterie.methods import oracle
from coterie.methods.son_newton import Config
from coterie_server.families import ties
from coterie_server.interface.half import (
    CONVERGED,
    Counts,
    Federation,
    Key,
    Need,
    Outcome,
    ServerHalf,
    Setting,
    StageHalf,
    half_of,
)
from coterie_server.interface.stages import Stage, along_path
from coterie_server.maths import bfgs, sieving, ssnal
from coterie_server.maths.covariance import symmetric
from coterie_server.maths.stacked import each, row_norms
from coterie_server.maths.sum_of_norms import moved_along

_ARMIJO = 1e-4
_RIDGE = 1e-6  # in units of the mean curvature, for users with less: a squared hinge without active rows has none
_SOLVED = 1e-15  # of the objective: the gap of a subproblem, small enough for its clusters to be right
_QUICK = 2048  # unknowns: fewer take seconds at most, and no thread
_MATRICES_OF_USER, _MATRICES_OF_TIE = 10, 4  # that are there at once, at most: as answered, inverted, in a Newton step
_VECTORS_OF_TIE, _PLACES_OF_TIE = 8, 250.0  # bytes of places: a tie is in several sparse matrices
_NOTHING = 1e-22  # of the largest objective: a gap that ends a stage even where the objective falls to 0
_ROUNDING = 1e-13  # of the objective, by which it may seem to grow


@dataclass(frozen=True)
class Answers:
    """The users' quadratics at the last accepted point."""

    x: Array  # (n, d)
    values: Array  # (n,)
    gradients: Array  # (n, d)
    hessians: Array  # (n, d, d), positive definite
    ridges: Array  # (n,) the multiples of the identity in them that the server has added
    labels: Indices  # (n,) clusters: users along whose ties models are equal, as a subproblem's solution has them to the last bit


@dataclass(frozen=True)
class Told:
    """What users say at the trial point, or would say."""

    values: Array  # (n,)
    gradients: Array  # (n, d)
    hessians: Array  # (n, d, d), of no meaning with `hessian: bfgs`
    asked: int


@dataclass(frozen=True)
class State:
    """Between two rounds."""

    answers: Answers | None  # None before the first round
    target: Array  # (n, d) the subproblem's solution, or the start
    z: Array  # (m, d) its dual
    share: float  # of the step to the target that is tried next
    promise: float  # how much the subproblem makes of the full step, negative
    objective: float
    gap: float  # of the quadratic model at `answers.x`, relative
    asked: int  # users in the latest round
    largest: float  # objective at any accepted point
    graph_mark: int  # of `Graph.mark`

    @property
    def query(self) -> Array:
        """The point of the next round."""
        if self.answers is None or self.share == 1.0:
            return self.target
        return np.asarray(self.answers.x + self.share * (self.target - self.answers.x))


@dataclass(frozen=True)
class Carry:
    """The start of a following stage with another penalty."""

    graph: ssnal.Graph
    lam: float
    z: Array
    answers: Answers


@dataclass(frozen=True)
class SonNewton:
    """The server half for one stage."""

    config: Config
    setting: Setting

    @property
    def n(self) -> int:
        return len(self.setting.members)

    @property
    def lam(self) -> float:
        return self.config.penalty or 0.0

    @cached_property
    def warm(self) -> Carry | None:
        """The answers of the stage before, when that was one of this method."""
        start = self.setting.start
        return start.carry if start is not None and isinstance(start.carry, Carry) else None

    @cached_property
    def graph(self) -> ssnal.Graph:
        if self.warm is not None:
            return self.warm.graph
        return ties.graph_of(self.config.graph, self.setting)

    @property
    def client_options(self) -> Mapping[str, Any]:
        return {"consensus": {"ridge": None, "with_hessians": self.config.hessian == "exact"}}

    async def init(self, federation: Federation) -> State:  # noqa: ARG002
        """Local models where the graph needed them, else zero; along a path, the first step from the answers to the penalty before."""
        d, graph = self.setting.known_facts.d, self.graph
        start = self.setting.start_models
        x = np.zeros((self.n, d)) if start is None else start
        if self.warm is None:
            return State(None, x, np.zeros((graph.m, d)), 1.0, 0.0, np.inf, np.inf, 0, 0.0, graph.mark)
        warm = self.warm
        z = moved_along(warm.z, graph.weights, warm.lam, self.lam)
        objective = float(warm.answers.values.sum()) + self._norms(warm.answers.x)
        return await self._solved(State(warm.answers, x, z, 1.0, 0.0, objective, np.inf, 0, objective, graph.mark))

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:  # noqa: ARG002
        """Steps 3 to 6: users answer at the trial point, and the server accepts it or goes back."""
        ties.check_same(self.graph, state.graph_mark)
        query = state.query
        told = await self._told(state.answers, query, federation)
        objective = float(told.values.sum()) + self._norms(query)
        wanted = state.objective + _ARMIJO * state.share * state.promise + _ROUNDING * abs(state.objective)
        state = replace(state, asked=told.asked)
        if state.answers is None or objective <= wanted:
            curvatures = self._curvatures(state.answers, query, told)
            answers = Answers(query, told.values, told.gradients, *curvatures, self.graph.within(ssnal.equal_rows(query)))
            here = replace(state, answers=answers, objective=objective, largest=max(objective, state.largest))
            here = replace(here, gap=self._gap(here, state.answers))
            state = here if here.gap <= self.config.tolerance else await self._solved(here)
        elif state.share < 1e-12:
            raise RunError(f"no step along the Newton direction lowers the objective {state.objective:g} at penalty {self.lam:g}")
        else:
            slope, rise = state.share * state.promise, objective - state.objective
            shorter = -slope / (2 * (rise - slope)) if np.isfinite(rise) else 0.1  # the minimum of a parabola through what is known
            state = replace(state, share=state.share * float(np.clip(shorter, 0.1, 0.5)))
        return state, {**self._figures(state), "asked": float(state.asked), CONVERGED: float(state.gap <= self.config.tolerance)}

    async def _told(self, before: Answers | None, x: Array, federation: Federation) -> Told:
        """Step 3: answers at x, of users who are asked, and of those whose last answer says what they would answer."""
        n, d, is_exact = *x.shape, self.config.hessian == "exact"
        if before is None:
            values, gradients, hessians, asked = np.zeros(n), np.zeros((n, d)), np.zeros((n, d, d)), np.arange(n)
        else:
            is_known = self.setting.is_quadratic and is_exact
            asked = np.flatnonzero((x != before.x).any(axis=1) & (not is_known))
            step, hessians = x - before.x, before.hessians - before.ridges[:, None, None] * np.eye(d)
            gradients = before.gradients + each(hessians, step)
            values = before.values + np.einsum("nd,nd->n", before.gradients + gradients, step) / 2
        if asked.size == n:
            replies = await federation.exchange(GroupModel(x))
        elif asked.size:
            replies = await federation.exchange(GroupModel(x[asked], users=asked), to=asked)
        if asked.size:
            slopes = replies[Slopes]
            values[asked], gradients[asked] = slopes.value, slopes.gradient
            if is_exact:
                hessians[asked] = symmetric(replies[Curvatures].triangle, d)
        return Told(values, gradients, hessians, asked.size)

    def _curvatures(self, before: Answers | None, x: Array, told: Told) -> tuple[Array, Array]:
        """Step 3: the users' Hessians at x, or what the server makes of their gradients, the smoothness L_i at first; and the ridges."""
        if self.config.hessian == "exact":
            return definite(told.hessians)
        if before is None:
            smoothness = self.setting.known_facts.smoothness
            if smoothness is None:
                raise RunError("no user has told the smoothness of its loss, which the first approximations come from")
            return definite(smoothness[:, None, None] * np.eye(x.shape[1]))
        return definite(bfgs.updated(before.hessians, before.x, x, told.gradients - before.gradients))

    def _gap(self, state: State, before: Answers | None) -> float:
        """The duality gap of the quadratic model at the new point, with the subproblem's z, over the objective.

        An approximation may have too much curvature in some direction, which would make the gap too small. So its least one counts for
        all directions, and no stage ends on bounds of the curvature alone.
        """
        assert state.answers is not None  # noqa: S101
        answers, hessians = state.answers, state.answers.hessians
        if self.config.hessian == "bfgs":
            if before is None:
                return np.inf
            hessians = np.linalg.eigvalsh(hessians)[:, :1, None] * np.eye(hessians.shape[1])
        gap = ssnal.gap(self.graph, hessians, answers.gradients, self.lam, answers.x, state.z)
        return gap / self._unit(state)

    def _unit(self, state: State) -> float:
        """What gaps are relative to: the objective, unless it is nothing."""
        return max(abs(state.objective), _NOTHING * state.largest / self.config.tolerance, float(np.finfo(float).tiny))

    async def _solved(self, state: State) -> State:
        """Step 4, to a gap far below that of the stage. With many users in a thread: it takes minutes, in which hosts must hear from us."""
        assert state.answers is not None  # noqa: S101
        x, gradients, hessians = state.answers.x, state.answers.gradients, state.answers.hessians
        linear = np.einsum("nij,nj->ni", hessians, x) - gradients
        absolute = min(1e-3 * self.config.tolerance, _SOLVED) * self._unit(state)
        solve = partial(sieving.minimise, self.graph, hessians, linear, self.lam, x, state.z, relative=0.0, absolute=absolute)
        found = solve() if x.size < _QUICK else await asyncio.to_thread(solve)
        promise = float((gradients * (found.x - x)).sum()) + self._norms(found.x) - self._norms(x)
        return replace(state, target=found.x, z=found.z, share=1.0, promise=min(promise, 0.0))

    def _norms(self, x: Array) -> float:
        return self.lam * float((self.graph.weights * row_norms(self.graph.apart(x))).sum())

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """The last accepted models, with a certificate if it is wanted; users are together whose ties are zero."""
        if state.answers is None:
            raise RunError("son_newton has no models after 0 rounds")
        carry = Carry(self.graph, self.lam, state.z, state.answers)
        new = None if self.config.graph == "complete" or self.warm is not None else self.graph  # a path has one graph
        figures, notes, warnings = self._figures(state), ties.notes_on(new), tuple[str, ...]()
        if self.config.certificate:
            found, warnings = await self._certified(state, state.answers, federation)
            figures |= found
            notes += tuple(f"certified: the objective is above its minimum by at most {gap:.1e} of itself" for gap in found.values())
        tied = ties.outcome_of(new)
        return Outcome(state.answers.x, state.answers.labels, figures, carry=carry, notes=notes, ties=tied, warnings=warnings)

    async def _certified(self, state: State, answers: Answers, federation: Federation) -> tuple[dict[str, float], tuple[str, ...]]:
        """The duality gap over the objective, or why there is none.

        With u = -B'z it is the sum of f_i(x_i) + f_i*(u_i) - u_i.x_i, each at least 0, and of what the ties miss.
        """
        u = -self.graph.pulled(state.z)
        told = (await federation.exchange(AskConjugates(u)))[Conjugates]
        if n_lost := self.n - int(told.found.sum()):
            why = f"{n_lost} of {self.n} users find no bound of their losses (wanted: losses with minimisers, as with problem.l2 above 0)"
            return {}, (f"stage {self.setting.stage!r} has no certificate: {why}",)
        apart = np.maximum(answers.values + told.value - (u * answers.x).sum(axis=1), 0.0)
        return {"certified_gap": (float(apart.sum()) + ssnal.missed(self.graph, self.lam, answers.x, state.z)) / self._unit(state)}, ()

    def labels_of(self, state: State) -> Indices | None:
        """Clusters of the last accepted point."""
        return None if state.answers is None else state.answers.labels

    def _figures(self, state: State) -> dict[str, float]:
        assert state.answers is not None  # noqa: S101
        return {"objective": state.objective, "duality_gap": state.gap, "clusters": float(state.answers.labels.max() + 1)}

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One vector down and one up for each user asked, and with a certificate one down."""
        n_asked = sum(row["asked"] for row in figures)
        proved: dict[Key, float] = {("conjugate", "down"): float(self.n)} if self.config.certificate and figures else {}
        return {("query", "down"): n_asked, ("gradient", "up"): n_asked, **proved}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """With each gradient a value, d + 1 scalars; if they are exact the upper triangle of a Hessian, d(d+1)/2; 2 for a certificate."""
        d, n_asked = self.setting.known_facts.d, sum(row["asked"] for row in figures)
        hessians: dict[Key, float] = {("hessian", "up"): n_asked * d * (d + 1) / 2} if self.config.hessian == "exact" else {}
        proved: dict[Key, float] = {("conjugate", "up"): 2.0 * self.n} if self.config.certificate and figures else {}
        return {("gradient", "up"): n_asked * (d + 1), **hessians, **proved}


def definite(hessians: Array) -> tuple[Array, Array]:
    """The Hessians (n, d, d) with a small multiple of the identity for users who lack curvature in some direction; the multiples (n,)."""
    n, d, _ = hessians.shape
    unit = float(np.einsum("nii->", hessians)) / (n * d) or 1.0
    least = np.linalg.eigvalsh(hessians)[:, 0]
    ridges = np.where(least < _RIDGE * unit, _RIDGE * unit, 0.0)
    return np.asarray(hessians + ridges[:, None, None] * np.eye(d)), ridges


def stages(config: Config, experiment: Experiment) -> list[Stage]:
    """local, where the graph needs it; then one stage for each penalty, each from the one before; then the refits."""
    return along_path(config, experiment, ties.before(config.graph), oracle.Config(partition="found"))


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage. ConfigError when the graph does not fit the users."""
    half = SonNewton(config, setting)
    half.graph  # noqa: B018 - refused before the first round
    return replace(half_of(half), labels_of=half.labels_of)


def memory(config: Config, n: int, d: int) -> Need | None:
    """Matrices of d x d for users and, in a Newton step of the subproblem, for ties; vectors and places of ties."""
    found = ties.pairs_of(config.graph, n)
    if found is None:
        return None
    n_pairs, which = found
    of_users, of_ties = 8.0 * d * d * _MATRICES_OF_USER * n, n_pairs * (8.0 * d * (d * _MATRICES_OF_TIE + _VECTORS_OF_TIE) + _PLACES_OF_TIE)
    needed = max(of_users + of_ties, ties.bytes_to_read(config.graph, n_pairs))
    instead = "use method pdmm, which keeps no second derivatives" if of_users > of_ties else ties.instead_of(config.graph)
    return Need(needed, f"son_newton with {d} numbers in a model on {which}", instead)


SERVER = ServerHalf(
    memory=memory, build=build, stages=stages, needs_everyone="without some losses the objective is that of another problem"
)
