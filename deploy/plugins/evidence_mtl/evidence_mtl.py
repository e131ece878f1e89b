"""`evidence_mtl`: mean-regularised multi-task learning, with a weight that is learnt from the data instead of tuned.

The objective is that of Evgeniou and Pontil (2004), Regularized multi-task learning, with models near their mean,

    min over w_1, ..., w_n, c   sum_i f_i(w_i) + lambda/2 sum_i ||w_i - c||^2

where f_i is the negative log-likelihood of user i's rows. So w_i ~ N(c, I / lambda) is the prior of its model, and lambda is what the
evidence framework makes of it (MacKay, 1992, Bayesian interpolation). With H_i the Hessian of f_i at w_i, user i's rows
determine gamma_i = tr H_i (H_i + lambda I)^-1 of its parameters, and where the evidence is stationary

    lambda = sum_i gamma_i / sum_i ||w_i - c||^2                              (1)

In a round the server sends c and lambda; each user returns w_i = argmin f_i(w) + lambda/2 ||w - c||^2, f_i(w_i) and gamma_i; the server
takes c as the mean of the w_i, and lambda from (1). Least squares has f_i = 1/2 sum of squares over the variance of the noise, 1 or, with
`noise: learned`, that for which 1/beta = 2 sum_i f_i / (m - sum_i gamma_i) of m rows in all: users then get the weight lambda / beta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from coterie.plugin import (
    Array,
    ClientHalf,
    ConfigError,
    Counts,
    Federation,
    Inbox,
    Local,
    Message,
    Method,
    Outcome,
    Reveal,
    Rows,
    Scalars,
    ServerHalf,
    Setting,
    Settings,
    StageHalf,
    Vectors,
    Wanted,
    declare,
)

NAME = "evidence_mtl"


class Config(Settings):
    """Hyper-parameters."""

    name: Literal["evidence_mtl"] = "evidence_mtl"
    start: PositiveFloat = 1.0  # lambda of the first round
    learns: bool = True  # false: lambda stays
    noise: Literal["one", "learned"] = "one"  # its variance, of least squares; other losses have none
    largest: Annotated[float, Field(gt=0, le=1e12)] = 1e8  # lambda where all users have the same model


@declare(method=NAME, step="center")
@dataclass(frozen=True)
class Center(Rows):
    """c, and how much models are pulled towards it: the same for all users."""

    c: Annotated[Array, Vectors("d")]
    weight: Annotated[Array, Scalars(1)]


@declare(method=NAME, step="model")
@dataclass(frozen=True)
class Model(Rows):
    """A user's w_i, f_i(w_i) and gamma_i."""

    w: Annotated[Array, Vectors("rows", "d")]
    value: Annotated[Array, Scalars("rows")]
    determined: Annotated[Array, Scalars("rows")]


METHOD = Method(
    config=Config,
    needs_sizes=True,
    users_need_minimisers=False,
    checked_with=("problem.loss=logistic", "problem.reduction=sum"),
    reveals=(
        Reveal(
            "w_i, its loss there, and how many of its parameters its rows determine, each round",
            "the user's model, and the gradient of its loss there",
            (NAME,),
        ),
    ),
)


# ---- the server


@dataclass(frozen=True)
class State:
    """Between two rounds."""

    c: Array  # (d,)
    weight: float  # lambda, over beta where the noise is learnt
    w: Array  # (n, d)


@dataclass(frozen=True)
class Server:
    """The server half for one stage."""

    config: Config
    n_rows: int  # m
    n: int
    d: int

    async def init(self, _: Federation) -> State:
        """c = 0."""
        return State(np.zeros(self.d), self.config.start, np.zeros((self.n, self.d)))

    async def round(self, state: State, federation: Federation, _: int) -> tuple[State, Mapping[str, float]]:
        """c, lambda, and the objective where the users stood."""
        sent = Center(state.c, np.array([state.weight]), users=np.arange(self.n))
        found = (await federation.exchange(sent, wanted=[Wanted(Model, None, {"d": self.d})]))[Model]
        c = found.w.mean(axis=0)
        weight = self.learnt(state.weight, found, c)
        objective = found.value.sum() + state.weight / 2 * ((found.w - state.c) ** 2).sum()
        scale = np.linalg.norm(c) or 1.0
        return State(c, weight, found.w), {
            "objective": float(objective),
            "weight": state.weight,
            "primal_residual": abs(weight / state.weight - 1.0),
            "dual_residual": float(np.linalg.norm(c - state.c) / scale),
        }

    def learnt(self, weight: float, found: Model, c: Array) -> float:
        """The fixed point, for the models of now."""
        determined, spread = float(found.determined.sum()), float(((found.w - c) ** 2).sum())
        if not self.config.learns:
            return weight
        beta = 1.0
        if self.config.noise == "learned":
            beta = max(self.n_rows - determined, 1.0) / max(2 * float(found.value.sum()), np.finfo(float).tiny)
        return min(determined / spread / beta if spread else self.config.largest, self.config.largest)

    async def finish(self, state: State, _: Federation) -> Outcome:
        """The users' models."""
        return Outcome(state.w, figures={"weight": state.weight})

    def vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One to each user, and one of each."""
        n = float(self.n * len(figures))
        return {("center", "down"): n, ("model", "up"): n}

    def scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Beside each vector down the weight, and beside each vector up two numbers."""
        n = float(self.n * len(figures))
        return {("center", "down"): (self.d + 1) * n, ("model", "up"): (self.d + 2) * n}


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage."""
    assert setting.facts is not None  # noqa: S101 - each run of a convex problem begins with them
    made = Server(config, int(setting.facts.n_rows.sum()), len(setting.members), setting.facts.d)
    return StageHalf(
        client_options={NAME: {}},
        init=made.init,
        round=made.round,
        finish=made.finish,
        expected_vectors=made.vectors,
        expected_scalars=made.scalars,
    )


SERVER = ServerHalf(build=build, needs_everyone="the mean of some users' models is the centre of another objective")


# ---- the users


@dataclass(frozen=True)
class Start:
    """Where Newton's method starts."""

    w: Array  # (n_own, d)


def init(_: Mapping[str, Any], local: Local, __: Start | None) -> Start:
    """At 0. ConfigError for losses that are no negative log-likelihoods."""
    if local.problem.config.reduction != "sum":
        raise ConfigError("evidence_mtl weighs the users' rows against their prior, but problem.reduction is 'mean': want sum")
    return Start(np.zeros((local.n_own, local.problem.d)))


def step(state: Start, inbox: Inbox, local: Local) -> tuple[Start, Sequence[Message]]:
    """w_i = argmin f_i(w) + lambda/2 ||w - c||^2, and gamma_i there."""
    c, (weight,) = inbox[Center].c, inbox[Center].weight
    w = local.precision.rounded(local.problem.argmin(np.tile(weight * c, (local.n_own, 1)), float(weight), state.w))
    curvatures = np.maximum(np.linalg.eigvalsh(local.problem.hessian(w)), 0.0)  # (n_own, d)
    return replace(state, w=w), [Model(w, local.problem.value(w), (curvatures / (curvatures + weight)).sum(axis=1))]


CLIENT = ClientHalf(init=init, step=step)
