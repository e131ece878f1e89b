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

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.method import CONVEX, Method
from coterie.experiment.privacy import Privacy
from coterie.families.cluster_messages import messages_of
from coterie.families.grid import Grid
from coterie.families.known_clusters import AVERAGES, STEPS, Weights, averaged
from coterie.wire.messages import Array, Indices, PerCluster, Positions, Scalars, Vectors, declare

Probability = Annotated[float, Field(ge=0, lt=1)]
Flip = Annotated[int, Field(ge=0, le=1)]
Coins = tuple[Flip, tuple[Flip, ...]]


class Iterations(Grid, Weights):
    """The weights, the iterations, and parameters of both asynchronous methods."""

    iterations: PositiveInt = 2000  #: Iterations of a stage, each of them a local step or an averaging step.
    #: Probability p_0 of an average over all clusters; with single_coin that of any average. Absent: by Corollary 3.6 or 4.4.
    p0: Probability | None = None
    #: Probability p_j of an average in a cluster, a number or a mapping by cluster. Absent: by Corollary 3.6 or 4.4.
    p: Probability | dict[Name, Probability] | None = None
    #: Step size. The method ends in a ball around the minimiser whose size is proportional to it. Absent: by Corollary 3.6 or 4.4.
    eta: PositiveFloat | None = None
    round_iterations: PositiveInt = 1000  #: The most iterations in one task of the coordinator, which is a round of the run.
    trace_every: NonNegativeInt = 0  #: Iterations between two values of the objective, each of which costs averages. 0: only at the end.
    collect_models: bool = False  #: Whether users send their models to the coordinator at the end, as `coterie predict` needs.
    coins: tuple[Any, ...] | None = None  #: Recorded coins to replay, for each iteration.

    @model_validator(mode="after")
    def _coins_fit(self) -> Self:
        if self.coins is not None and len(self.coins) < self.iterations:
            raise ValueError(f"coins are given for {len(self.coins)} iterations, want one for each of {self.iterations}")
        return self


class Config(Iterations):
    """The weights, the iterations, and the parameters. Defaults follow from Corollary 3.6."""

    name: Literal["async_l2gd"] = "async_l2gd"
    #: two_coins: averages in clusters and over all have coins of their own. single_coin: one coin for both, as in section 6.
    variant: Literal["two_coins", "single_coin"] = "two_coins"
    #: Share tau_j of the pull to the cluster that is left to the averages over all. Absent: by Proposition 3.3.
    tau: Annotated[float, Field(ge=0, le=1)] | dict[Name, Annotated[float, Field(ge=0, le=1)]] | None = None
    #: auto: an average that is still valid is not sent again. never: each averaging step sends it.
    reuse: Literal["auto", "never"] = "auto"
    #: Recorded coins to replay: (xi_0, (xi_1, ..., xi_k)) for each iteration. Clusters are in natural order of their names.
    coins: tuple[Coins, ...] | None = None

    @model_validator(mode="after")
    def _variant_fits(self) -> Self:
        if self.variant == "single_coin" and (self.p is not None or self.tau is not None):
            raise ValueError("variant 'single_coin' has p_j = 0 and tau_j = 1: give p0 alone, or take variant 'two_coins'")
        return self


# ---- between coordinator and aggregators


@declare(method="async_l2gd", step="parameters")
class Parameters(PerCluster):
    """The parameters of each cluster's iterations. An aggregator passes its cluster's on to the users."""

    p0: Annotated[Array, Scalars("clusters")]
    p: Annotated[Array, Scalars("clusters")]
    tau: Annotated[Array, Scalars("clusters")]
    alpha: Annotated[Array, Scalars("clusters")]
    eta: Annotated[Array, Scalars("clusters")]
    is_reusable: Annotated[Indices, Positions("clusters")]  # 0: no average; 1: bar_j; 2: bar too


@declare(method="async_l2gd", step="control")
class Advance(PerCluster):
    """Go on to iteration `until`. With `wants_pair`, then reply with the sums for a global round."""

    until: Annotated[Indices, Positions("clusters")]
    wants_pair: Annotated[Indices, Positions("clusters")]


# ---- between an aggregator and its users


@declare(method="async_l2gd", step="control")
class Steps(PerCluster):
    """Go on to iteration `until`. With `wants_models`, then send theta."""

    until: Annotated[Indices, Positions("clusters")]
    wants_models: Annotated[Indices, Positions("clusters")]


@declare(method="async_l2gd", step="within-average")
class Centres(PerCluster):
    """Both averages before a global round, if more averaging follows it."""

    cluster_average: Annotated[Array, Vectors("clusters", "d")]
    global_average: Annotated[Array, Vectors("clusters", "d")]


MESSAGES = messages_of("async_l2gd")


def _leaks(config: Config, privacy: Privacy) -> str:
    if privacy.is_shared:
        return "privacy.where is 'hosts', but the coordinator shortens what users add to averages of clusters: want server"
    missing = [name for name in ("eta", "p0", *(("p",) if config.variant == "two_coins" else ())) if getattr(config, name) is None]
    if missing:
        return f"method.{missing[0]} follows from the users' losses, without noise: want a number beside privacy"
    if config.collect_models:
        return "method.collect_models would put models into the run folder, which have no noise: want false beside privacy"
    return ""


METHOD = Method(
    config=Config,
    continues="users and aggregators go on with averages as they were sent",
    users_need_minimisers=False,
    no_rule=lambda *_: "",
    sums=CONVEX,
    facts=lambda _: frozenset({"smoothness"}),  # of the default rates
    has_known_clusters=True,
    protects=frozenset({"user"}),
    leaks=_leaks,
    unprotected="the steps of its users have no noise, only averages have",
    averages=AVERAGES,
    reveals=averaged("async_l2gd"),
    steps=STEPS,
)
