"""`async_al2sgd`: Algorithm 2 of Lyu, Hanzely and Kolar (2022), Async-AL2SGD+: accelerated, variance reduced, one row per local step.

Every user has x_i (the anchor), y_i and z_i, all 0 at the start. In each iteration theta = a1 z + a2 x + (1-a1-a2) y, the coins xi_0 and
xi_j of Algorithm 1 are flipped, y <- theta - eta g, z <- b1 z + (1-b1) theta + (b2/eta)(y - theta), and with probability rho the anchor is
renewed: x <- y. The estimator is (4.1) with the term marked below, which is missing in print; without it the estimator is biased:

    g_i = grad f_i(x_i) + alpha_j gamma_i (x_i - xbar) + (1-alpha_j) gamma_i (x_i - xbar_j)
        + [xi_0 = 1] gamma_i alpha_j/p_0 ((theta_i - bar) - (x_i - xbar))
        + [xi_0 = 1] gamma_i tau_j (1-alpha_j)/p_0 ((theta_i - bar_j) - (x_i - xbar_j))                              <- missing
        + [xi_0 = 0, xi_j = 1] gamma_i (1-tau_j)(1-alpha_j)/((1-p_0)p_j) ((theta_i - bar_j) - (x_i - xbar_j))
        + [xi_0 = xi_j = 0] 1/((1-p_0)(1-p_j)) (grad f_il(theta_i) - grad f_il(x_i)),   l uniform in the user's rows

It converges to the minimiser of (2.1) itself. As in `async_l2gd` the coins come from the shared seed. Averages are never reused: theta
mixes x, y and z, and an averaging step moves bar_j by an amount that is not known. New anchors are barriers for all clusters, except after
the last iteration, where their averages are not needed.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from coterie.experiment.method import CONVEX, Method
from coterie.experiment.reveals import Reveal
from coterie.families.cluster_messages import ClusterSums, GlobalAverage, PartialSums, messages_of
from coterie.families.known_clusters import AVERAGES, STEPS, Shares, averaged
from coterie.methods.async_l2gd import Centres, Flip, Iterations
from coterie.wire.messages import Array, Broadcast, Indices, PerCluster, Positions, Rows, Scalars, Vectors, declare

Coins = tuple[Flip, tuple[Flip, ...], tuple[NonNegativeInt, ...], Flip]
Share = Annotated[float, Field(gt=0, le=1)]

NOTHING, THETA, ANCHOR = 0, 1, 2  # what users, or a cluster, send after their iterations


class Config(Iterations):
    """The weights, the iterations, and the parameters. Defaults follow from Corollary 4.4."""

    name: Literal["async_al2sgd"] = "async_al2sgd"
    tau: Shares | None = None  #: Share tau_j of the pull to the cluster that is left to the averages over all. Absent: by Proposition 3.3.
    rho: Share | None = None  #: Probability of new anchors in an iteration, which cost a pass over all rows and an average. Absent: p_0.
    #: Strong convexity mu that the steps assume. Absent: the smallest of all row losses or, if they have none, an estimate for the
    #: objective.
    mu: PositiveFloat | None = None
    a1: Share | None = None  #: Weight of z in the point theta of an iteration. Absent: by Corollary 4.4.
    #: Weight of the anchor x in the point theta of an iteration. Absent: by Corollary 4.4.
    a2: Annotated[float, Field(ge=0, le=1)] | None = None
    b1: Annotated[float, Field(ge=0, le=1)] | None = None  #: Share of its old value in the update of z. Absent: by Corollary 4.4.
    b2: PositiveFloat | None = None  #: Length of z's gradient step. Absent: by Corollary 4.4.
    #: Recorded coins to replay: (xi_0, (xi_1, ..., xi_k), (row of each user), xi') for each iteration. Clusters and users are in natural
    #: order of their names.
    coins: tuple[Coins, ...] | None = None


def recorded_refreshes(coins: Sequence[Sequence[Any]] | None) -> tuple[int, ...] | None:
    """The recorded xi', also as parsed from JSON."""
    return None if coins is None else tuple(int(line[3]) for line in coins)


# ---- between coordinator and aggregators


@declare(method="async_al2sgd", step="parameters")
class AskConstants(PerCluster):
    """Asks each cluster for the constants of its row losses."""


@declare(method="async_al2sgd", step="parameters")
class ClusterConstants(PerCluster):
    """The largest smoothness and smallest strong convexity of the row losses in a cluster. A user's own stay with the aggregator."""

    smoothness: Annotated[Array, Scalars("clusters")]
    strong_convexity: Annotated[Array, Scalars("clusters")]


@declare(method="async_al2sgd", step="parameters")
class Parameters(PerCluster):
    """The parameters of each cluster's iterations. An aggregator passes its cluster's on to the users."""

    p0: Annotated[Array, Scalars("clusters")]
    p: Annotated[Array, Scalars("clusters")]
    tau: Annotated[Array, Scalars("clusters")]
    alpha: Annotated[Array, Scalars("clusters")]
    eta: Annotated[Array, Scalars("clusters")]
    a1: Annotated[Array, Scalars("clusters")]
    a2: Annotated[Array, Scalars("clusters")]
    b1: Annotated[Array, Scalars("clusters")]
    b2: Annotated[Array, Scalars("clusters")]


@declare(method="async_al2sgd", step="control")
class Advance(PerCluster):
    """Go on to iteration `until`. Then reply with the pair of THETA for a global round, or of a new ANCHOR, or with NOTHING."""

    until: Annotated[Indices, Positions("clusters")]
    wanted: Annotated[Indices, Positions("clusters")]


@declare(method="async_al2sgd", step="between-anchor", total=True)
class AnchorSums(ClusterSums):
    """As `ClusterSums`, for the new anchors x_i."""


@declare(method="async_al2sgd", step="between-anchor")
class AnchorPartialSums(PartialSums):
    """As `PartialSums`, for the new anchors x_i."""


@declare(method="async_al2sgd", step="between-anchor")
class GlobalAnchor(GlobalAverage):
    """xbar, to each aggregator."""


# ---- between an aggregator and its users


@declare(method="async_al2sgd", step="parameters")
class AskRowConstants(Broadcast):
    """Asks users for the constants of their row losses f_il."""


@declare(method="async_al2sgd", step="parameters")
class RowConstants(Rows):
    """The largest smoothness and the smallest strong convexity of a user's row losses."""

    smoothness: Annotated[Array, Scalars("rows")]
    strong_convexity: Annotated[Array, Scalars("rows")]


@declare(method="async_al2sgd", step="control")
class Steps(Advance):
    """Go on to iteration `until`. Then send THETA, or take y as the new ANCHOR and send it, or send NOTHING."""


@declare(method="async_al2sgd", step="within-anchor", total=True)
class Anchors(Rows):
    """The new x_i, for its cluster's average; with `exact_sums` gamma_i x_i."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="async_al2sgd", step="within-anchor")
class AnchorAverages(Centres):
    """xbar_j and xbar, which users keep until the next anchor."""


MESSAGES = messages_of("async_al2sgd")

METHOD = Method(
    config=Config,
    continues="users and aggregators go on with anchors as they were sent",
    users_need_minimisers=False,
    no_rule=lambda *_: "",
    sums=CONVEX,
    has_known_clusters=True,
    unprotected="its rates follow from single rows, and the averages of its anchors have no noise: async_l2gd can have it",
    averages={**AVERAGES, "anchor_rounds": "for a new anchor"},
    steps={**STEPS, "within-anchor": "users' anchors, and their average", "between-anchor": "the same between clusters"},
    reveals=(
        Reveal(
            "the largest smoothness and the smallest convexity of its rows' losses",
            "the size of the largest row; the coordinator sees them of a whole cluster",
            ("async_al2sgd/parameters",),
            seen="aggregator",
        ),
        *averaged("async_al2sgd", "within-anchor"),
    ),
)
