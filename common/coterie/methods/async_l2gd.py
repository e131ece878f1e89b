"""`async_l2gd`: Algorithm 1 of Lyu, Hanzely and Kolar (2022), loopless local gradient descent with averages on separate schedules.

Every user has its own theta_i. In each iteration xi_0 ~ Bernoulli(p_0) is flipped, and xi_j ~ Bernoulli(p_j) for each cluster:

    xi_0 = 1:            theta_i <- (1 - eta gamma_i (alpha_j + tau_j (1-alpha_j))/p_0) theta_i
                                    + (eta gamma_i/p_0) (alpha_j bar + tau_j (1-alpha_j) bar_j)
    xi_0 = 0, xi_j = 1:  theta_i <- (1-c) theta_i + c bar_j,   c = eta gamma_i (1-tau_j)(1-alpha_j) / ((1-p_0) p_j)
    xi_0 = 0, xi_j = 0:  theta_i <- theta_i - eta/((1-p_0)(1-p_j)) grad f_i(theta_i)

It converges linearly to a ball around the minimiser of (2.1) whose size is proportional to eta (Theorem 3.5). The variant of the paper's
section 6 has one coin p. When it shows 1, both averages are descended at once: p_0 = p, p_j = 0, tau_j = 1.

The coins come from the shared seed. So only averages are sent, and only when averaging follows a local step. If gamma is constant in a
cluster, bar_j stays while users move towards it, and a global round moves it by -(eta gamma alpha_j/p_0)(bar_j - bar). If also alpha_j
gamma is equal in all clusters, bar stays too. Such averages are used again (`reuse`).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.method import Method
from coterie.families.cluster_messages import messages_of
from coterie.families.grid import Grid
from coterie.families.known_clusters import STEPS, Weights, averaged
from coterie.wire.messages import (
    Array,
    Indices,
    PerCluster,
    Positions,
    Scalars,
    Vectors,
    dataclass,
    declare,
)

Probability = Annotated[float, Field(ge=0, lt=1)]
Flip = Annotated[int, Field(ge=0, le=1)]
Coins = tuple[Flip, tuple[Flip, ...]]


class Config(Grid, Weights):
    """The weights, the iterations, and the parameters. Defaults follow from Corollary 3.6."""

    name: Literal["async_l2gd"] = "async_l2gd"
    iterations: PositiveInt = 2000
    variant: Literal["two_coins", "single_coin"] = "two_coins"
    p0: Probability | None = None  # single_coin: p
    p: Probability | dict[Name, Probability] | None = None  # p_j
    tau: Annotated[float, Field(ge=0, le=1)] | dict[Name, Annotated[float, Field(ge=0, le=1)]] | None = None  # by Proposition 3.3
    eta: PositiveFloat | None = None
    reuse: Literal["auto", "never"] = "auto"  # of averages that are still valid
    round_iterations: PositiveInt = 1000  # the most in one task of the coordinator
    trace_every: NonNegativeInt = 0  # iterations between values of the objective, each of which costs averages; 0: only at the end
    collect_models: bool = False  # at the end users send their models to the coordinator
    coins: tuple[Coins, ...] | None = None  # recorded: (xi_0, (xi_1, ..., xi_k)) for each iteration, clusters in natural order of names

    @model_validator(mode="after")
    def _variant_and_coins_fit(self) -> Self:
        if self.variant == "single_coin" and (self.p is not None or self.tau is not None):
            raise ValueError("variant 'single_coin' has p_j = 0 and tau_j = 1: give p0 alone, or take variant 'two_coins'")
        if self.coins is not None and len(self.coins) < self.iterations:
            raise ValueError(f"coins are given for {len(self.coins)} iterations, want one for each of {self.iterations}")
        return self


# ---- between coordinator and aggregators


@declare(method="async_l2gd", step="parameters")
@dataclass(frozen=True)
class Parameters(PerCluster):
    """The parameters of each cluster's iterations. An aggregator passes its cluster's on to the users."""

    p0: Annotated[Array, Scalars("clusters")]
    p: Annotated[Array, Scalars("clusters")]
    tau: Annotated[Array, Scalars("clusters")]
    alpha: Annotated[Array, Scalars("clusters")]
    eta: Annotated[Array, Scalars("clusters")]
    is_reusable: Annotated[Indices, Positions("clusters")]  # 0: no average; 1: bar_j; 2: bar too


@declare(method="async_l2gd", step="control")
@dataclass(frozen=True)
class Advance(PerCluster):
    """Go on to iteration `until`. With `wants_pair`, then reply with the sums for a global round."""

    until: Annotated[Indices, Positions("clusters")]
    wants_pair: Annotated[Indices, Positions("clusters")]


# ---- between an aggregator and its users


@declare(method="async_l2gd", step="control")
@dataclass(frozen=True)
class Steps(PerCluster):
    """Go on to iteration `until`. With `wants_models`, then send theta."""

    until: Annotated[Indices, Positions("clusters")]
    wants_models: Annotated[Indices, Positions("clusters")]


@declare(method="async_l2gd", step="within-average")
@dataclass(frozen=True)
class Centres(PerCluster):
    """Both averages before a global round, if more averaging follows it."""

    cluster_average: Annotated[Array, Vectors("clusters", "d")]
    global_average: Annotated[Array, Vectors("clusters", "d")]


MESSAGES = messages_of("async_l2gd")

METHOD = Method(config=Config, users_need_minimisers=False, has_known_clusters=True, reveals=averaged("async_l2gd"), steps=STEPS)
