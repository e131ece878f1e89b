"""Server half of `fedrep_linear`: the method of moments, then means of the users' representations, in member order.

Left out (skip): all means are over the users A who answered, B^{t+1} = 1/|A| sum_{i in A} B_i^{t+1}, as if A had been drawn. Where A is
empty B stays. The head of a user left out is that of its last task; with heads `exact` the next B determines it. B depends more on the data
of users who take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.streams import normal, stream
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.methods.fedrep_linear import (
    AskMoments,
    Config,
    FinalRepresentation,
    Moments,
    Representation,
    Scores,
    SharedHead,
    UpdatedHead,
    UpdatedRepresentation,
)
from coterie_server.families.known_clusters import spread_of
from coterie_server.families.partial import last_of
from coterie_server.interface.half import (
    ABSENT,
    CONVERGED,
    FLAT_ONLY,
    UNASKED,
    Counts,
    Federation,
    Key,
    Outcome,
    ServerHalf,
    Setting,
    StageHalf,
    half_of,
)
from coterie_server.interface.merge import check_senders
from coterie_server.interface.stages import Stage, single_stage
from coterie_server.interface.wanted import Wanted
from coterie_server.maths.covariance import symmetric

REPRESENTATION, HEAD = "B", "w"  # what a run shares, by name


@dataclass(frozen=True)
class State:
    """Between two rounds."""

    b: Array  # (d, k)
    w: Array  # (k,) of heads `shared`; zeros otherwise
    first: Array  # (d, k) B^0
    n_silent: int = 0  # users who have not sent their moments


@dataclass(frozen=True)
class FedRepLinear:
    """The server half for one stage."""

    config: Config
    seed: int
    stage: str
    n_users: int
    d: int
    truth: Array | None  # (d, k*) with orthonormal columns
    given: Array | None  # (d, k) that of a finished run

    @property
    def client_options(self) -> Mapping[str, Any]:
        return {"fedrep_linear": self.config.model_dump(mode="json")}

    async def init(self, federation: Federation) -> State:
        """B^0."""
        w = np.zeros(self.config.k)
        if self.given is not None:
            return State(self.given, w, self.given)
        if self.config.start == "random":
            start = normal(stream(self.seed, "random representation", self.stage), self.d * self.config.k).reshape(self.d, self.config.k)
            b = np.linalg.qr(start)[0]
            return State(b, w, b)
        wanted = [Wanted(Moments, None, {"h": self.d * (self.d + 1) // 2})]
        moments = (await federation.exchange(AskMoments(), wanted=wanted))[Moments].z
        b = leading(moments.sum(axis=0) / len(moments), self.d, self.config.k)
        return State(b, w, b, self.n_users - len(moments))

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """B^{t+1} = 1/(r n) sum_i B_i^{t+1}."""
        if self.given is not None:
            return state, {CONVERGED: 1.0, "users": 0.0, **self._distance(state.b)}
        order = stream(self.seed, "participation", self.stage, number).order(self.n_users)
        chosen = np.sort(order[: self.config.n_selected(self.n_users)])
        with_head = (SharedHead(state.w, users=chosen),) if self.config.heads == "shared" else ()
        sent, shape = Representation(np.ascontiguousarray(state.b.T), users=chosen), {"d": self.d, "k": self.config.k}
        wanted = [Wanted(UpdatedRepresentation, chosen, shape), *([Wanted(UpdatedHead, chosen, shape)] if with_head else [])]
        replies = await federation.exchange(sent, *with_head, to=chosen, wanted=wanted)
        present = replies.awaited(chosen)
        absent = {"unasked": float(replies.n_unasked(chosen))} if present.size < chosen.size else {}
        if not present.size:
            return state, {"users": 0.0, **absent, **self._distance(state.b)}
        updated, found = replies[UpdatedRepresentation], replies[UpdatedRepresentation].b
        check_senders(updated.kind, updated.users, present)
        b = np.ascontiguousarray((found.sum(axis=0) / len(found)).T)
        if self.config.orthonormalize:
            b = np.linalg.qr(b)[0]
        w = replies[UpdatedHead].w.sum(axis=0) / len(found) if with_head else state.w
        return replace(state, b=b, w=w), {"users": float(len(found)), **absent, **self._distance(b)}

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """Every user receives B^T, solves for its head, unless all share one, and evaluates its model."""
        everyone: Indices = np.arange(self.n_users)
        with_head = (SharedHead(state.w, users=everyone),) if self.config.heads == "shared" else ()
        sent = FinalRepresentation(np.ascontiguousarray(state.b.T), users=everyone)
        replies = await federation.exchange(sent, *with_head, wanted=[Wanted(Scores)])
        scores, present = replies[Scores], replies.awaited(everyone)
        figures = {"sum_of_losses": float(scores.loss.sum()), **self._distance(state.b)}
        figures |= {f"{name}_at_start": value for name, value in self._distance(state.first).items()}
        figures |= replies.left_out(self.n_users) | ({"silent_at_start": float(state.n_silent)} if state.n_silent else {})
        by_user = {}
        if (judged := scores.n_test > 0).any():
            errors = scores.test_error[judged]
            figures |= {"heldout_loss": float(errors.mean() / 2), "heldout_metric": float(errors.mean())}
            figures |= {f"heldout_metric_{name}": value for name, value in spread_of(errors).items()}
            by_user["heldout_metric"] = np.full(self.n_users, np.nan)
            by_user["heldout_metric"][present] = scores.test_error
        return Outcome(None, None, figures, by_user=by_user, shared={REPRESENTATION: state.b, **({HEAD: state.w} if with_head else {})})

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """k d-vectors each way for each user of a round, and once to everyone at the end; the moments are scalars."""
        k = self.config.k
        n_asked, n_trained = self._asked_and_trained(figures)
        delivered: dict[Key, float] = {("delivery", "down"): k * (self.n_users - last_of(figures, UNASKED))}
        if self.given is not None:
            return delivered
        return {("representation", "down"): k * n_asked, ("representation", "up"): k * n_trained, **delivered}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """d(d+1)/2 of each user for the method of moments, a common head with each representation, and two scores at the end."""
        k, d, n = self.config.k, self.d, self.n_users
        expected: dict[Key, float] = {("evaluation", "up"): 2 * (n - last_of(figures, ABSENT))}
        if self.given is None and self.config.start == "moments":
            expected["moments", "up"] = (n - last_of(figures, "silent_at_start")) * d * (d + 1) / 2
        if self.config.heads == "shared":
            n_asked, n_trained = self._asked_and_trained(figures)
            expected["head", "down"] = k * (n_asked + n - last_of(figures, UNASKED))
            expected["head", "up"] = k * n_trained
        return expected

    def _asked_and_trained(self, figures: Sequence[Mapping[str, float]]) -> tuple[float, float]:
        """How often users were sent B^t, answered or not, and how often it was averaged."""
        n_trained = sum(row["users"] for row in figures)
        if self.given is not None:
            return 0.0, n_trained
        n_unasked = sum(row.get("unasked", 0.0) for row in figures)
        return len(figures) * self.config.n_selected(self.n_users) - n_unasked, n_trained

    def _distance(self, b: Array) -> dict[str, float]:
        return {} if self.truth is None else {"distance": distance(b, self.truth)}


def leading(triangle: Array, d: int, k: int) -> Array:
    """(d, k) the eigenvectors of the k largest eigenvalues of a symmetric matrix, given by its upper triangle row by row."""
    _, vectors = np.linalg.eigh(symmetric(triangle[None], d)[0])
    return np.ascontiguousarray(vectors[:, ::-1][:, :k])


def distance(b1: Array, b2: Array) -> float:
    """The principal angle distance (9) of two column spaces, |B1_perp' B2|_2, of (d, k) matrices with full column rank."""
    one, two = np.linalg.qr(b1)[0], np.linalg.qr(b2)[0]
    return float(np.linalg.norm(two - one @ (one.T @ two), 2))


def stages(config: Config, experiment: Experiment) -> Sequence[Stage]:
    """One stage. ConfigError for another loss than least squares without intercept."""
    problem = experiment.problem
    if problem.loss != "least_squares" or problem.intercept or problem.l2:
        found = f"loss {problem.loss!r}, intercept {str(problem.intercept).lower()} and l2 {problem.l2:g}"
        raise ConfigError(f"method 'fedrep_linear' has {found}, want least_squares, intercept false and l2 0")
    return single_stage(config, experiment)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage. ConfigError when k is larger than d, or a finished run is missing or does not fit."""
    facts = setting.known_facts
    if config.k > facts.d:
        raise ConfigError(f"method.k is {config.k}, want at most the {facts.d} features of the rows")
    given = None
    if config.start == "finished_run":
        given = None if setting.start is None else setting.start.shared.get(REPRESENTATION)
        if given is None:
            raise ConfigError("method.start is 'finished_run', but no run is given that has left a representation: want coterie adapt RUN")
        if given.shape != (facts.d, config.k):
            raise ConfigError(f"the run's representation has shape {list(given.shape)}, want [{facts.d}, {config.k}] for these rows")
    return half_of(FedRepLinear(config, setting.seed, setting.stage, len(setting.members), facts.d, setting.truth, given))


SERVER = ServerHalf(build=build, stages=stages, tiers=FLAT_ONLY)  # it knows no clusters
