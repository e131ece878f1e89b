"""Messages that the methods for known clusters share: averages, the objective, and the end. Each method has them as kinds of its own.

With `exact_sums` parents receive sums alone (`federation.total`): an aggregator those over its users, the coordinator those over clusters.
Then users' vectors are multiplied by gamma_i where they are, and clusters' averages by alpha_j Gamma_j.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from coterie.arrays import Array, Indices
from coterie.families.evaluation import Scores
from coterie.wire.messages import Broadcast, Message, PerCluster, Positions, Rows, Scalars, Vectors, declare

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class ClusterSums(PerCluster):
    """All that a cluster sends about its users: alpha_j sum_{I_j} gamma_i theta_i, and alpha_j Gamma_j."""

    weighted: Annotated[Array, Vectors("clusters", "d")]
    weight: Annotated[Array, Scalars("clusters")]


@dataclass(frozen=True)
class GlobalAverage(PerCluster):
    """bar, to each aggregator."""

    average: Annotated[Array, Vectors("clusters", "d")]


@dataclass(frozen=True)
class UserWeights(Rows):
    """gamma_i, if users differ."""

    gamma: Annotated[Array, Scalars("rows")]


@dataclass(frozen=True)
class Models(Rows):
    """theta_i, for its cluster's average; with `exact_sums` gamma_i theta_i."""

    theta: Annotated[Array, Vectors("rows", "d")]


@dataclass(frozen=True)
class Target(PerCluster):
    """The target of the next averaging step: bar_j, or in a global round alpha_j bar + tau_j (1-alpha_j) bar_j."""

    target: Annotated[Array, Vectors("clusters", "d")]


@dataclass(frozen=True)
class Trace(PerCluster):
    """Asks an aggregator for its part of the objective."""


@dataclass(frozen=True)
class AskState(Broadcast):
    """Asks users for f_i(theta_i) and theta_i."""


@dataclass(frozen=True)
class UserState(Rows):
    """To the aggregator: f_i and theta_i; with `exact_sums` gamma_i theta_i."""

    value: Annotated[Array, Scalars("rows")]
    theta: Annotated[Array, Vectors("rows", "d", exact=True)]


@dataclass(frozen=True)
class ClusterCentre(PerCluster):
    """With `exact_sums` bar_j, to the cluster's hosts, which then tell how far their users are from it."""

    average: Annotated[Array, Vectors("clusters", "d", exact=True)]


@dataclass(frozen=True)
class UserSpread(Rows):
    """With `exact_sums`, gamma_i/2 |theta_i - bar_j|^2."""

    spread: Annotated[Array, Scalars("rows")]


@dataclass(frozen=True)
class ClusterState(PerCluster):
    """A cluster's part of F, in which only bar is missing, and how often it has averaged.

    `inner` = sum f_i + (1-alpha_j) sum gamma_i/2 |theta_i - bar_j|^2, `spread` = alpha_j sum gamma_i/2 |theta_i - bar_j|^2.
    """

    inner: Annotated[Array, Scalars("clusters")]
    spread: Annotated[Array, Scalars("clusters")]
    average: Annotated[Array, Vectors("clusters", "d", exact=True)]  # bar_j; with `exact_sums` alpha_j Gamma_j bar_j
    weight: Annotated[Array, Scalars("clusters")]  # alpha_j Gamma_j
    within_rounds: Annotated[Indices, Positions("clusters")]


@dataclass(frozen=True)
class GlobalCentre(PerCluster):
    """With `exact_sums` bar, to each aggregator, which then tells how far bar_j is from it."""

    average: Annotated[Array, Vectors("clusters", "d", exact=True)]


@dataclass(frozen=True)
class ClusterSpread(PerCluster):
    """With `exact_sums`, alpha_j Gamma_j/2 |bar_j - bar|^2."""

    spread: Annotated[Array, Scalars("clusters")]


@dataclass(frozen=True)
class GapCentre(PerCluster):
    """alpha_j bar + (1-alpha_j) bar_j, to each aggregator and on to its hosts: dF/dtheta_i = grad f_i + gamma_i (theta_i - that).

    With `exact_sums` an aggregator receives bar.
    """

    centre: Annotated[Array, Vectors("clusters", "d", exact=True)]


@dataclass(frozen=True)
class UserGap(Rows):
    """The square of a user's gradient g_i, and how far F may fall (`coterie_client.families`). The vectors stay with the user."""

    squared: Annotated[Array, Scalars("rows")]
    least: Annotated[Array, Scalars("rows")]
    most: Annotated[Array, Scalars("rows")]
    is_flat: Annotated[Array, Scalars("rows")]


@dataclass(frozen=True)
class ClusterGap(PerCluster):
    """The sums over a cluster."""

    squared: Annotated[Array, Scalars("clusters")]
    least: Annotated[Array, Scalars("clusters")]
    most: Annotated[Array, Scalars("clusters")]
    n_flat: Annotated[Array, Scalars("clusters")]


@dataclass(frozen=True)
class Judge(Broadcast):
    """Asks users to evaluate their own models, which stay with them."""


@dataclass(frozen=True)
class Judgement(Scores):
    """f_i at the user's model, and loss and metric on its held-out rows."""


@dataclass(frozen=True)
class Collect(Broadcast):
    """Asks users for their models (`collect_models`)."""


@dataclass(frozen=True)
class FinalModels(Models):
    """theta_i, to the coordinator."""


# ---- between aggregators (`federation.topology: peers`), instead of what holds averages above


@dataclass(frozen=True)
class PartialSums(PerCluster):
    """On the way around a ring: the sum over the clusters so far, in their order, and the weight of each of them."""

    weighted: Annotated[Array, Vectors(1, "d", exact=True)]
    weight: Annotated[Array, Scalars("clusters")]


@dataclass(frozen=True)
class TraceSums(PerCluster):
    """As `ClusterSums`, in full precision, for the objective."""

    weighted: Annotated[Array, Vectors("clusters", "d", exact=True)]
    weight: Annotated[Array, Scalars("clusters")]


@dataclass(frozen=True)
class TracePartialSums(PartialSums):
    """As `PartialSums`, for the objective."""


@dataclass(frozen=True)
class TraceAverage(PerCluster):
    """As `GlobalAverage`, in full precision, for the objective."""

    average: Annotated[Array, Vectors("clusters", "d", exact=True)]


@dataclass(frozen=True)
class ClusterPart(PerCluster):
    """To the coordinator instead of `ClusterState`. `distance` = alpha_j Gamma_j |bar_j - bar|^2."""

    inner: Annotated[Array, Scalars("clusters")]
    spread: Annotated[Array, Scalars("clusters")]
    distance: Annotated[Array, Scalars("clusters")]
    within_rounds: Annotated[Indices, Positions("clusters")]


@dataclass(frozen=True)
class AskGap(PerCluster):
    """Asks an aggregator that knows its `GapCentre` for the gap."""


@dataclass(frozen=True)
class ClusterMessages:
    """The classes of one method's kinds, in the order of `messages_of`."""

    cluster_sums: type[ClusterSums]
    global_average: type[GlobalAverage]
    user_weights: type[UserWeights]
    models: type[Models]
    target: type[Target]
    trace: type[Trace]
    ask_state: type[AskState]
    user_state: type[UserState]
    cluster_state: type[ClusterState]
    cluster_centre: type[ClusterCentre]
    user_spread: type[UserSpread]
    global_centre: type[GlobalCentre]
    cluster_spread: type[ClusterSpread]
    gap_centre: type[GapCentre]
    user_gap: type[UserGap]
    cluster_gap: type[ClusterGap]
    judge: type[Judge]
    judgement: type[Judgement]
    collect: type[Collect]
    final_models: type[FinalModels]
    partial_sums: type[PartialSums]
    trace_sums: type[TraceSums]
    trace_partial_sums: type[TracePartialSums]
    trace_average: type[TraceAverage]
    cluster_part: type[ClusterPart]
    ask_gap: type[AskGap]


_SUMMED: Collection[type[Message]] = (ClusterSums, Models, UserState, UserSpread, ClusterState, ClusterSpread, UserGap, ClusterGap)


def messages_of(method: str) -> ClusterMessages:
    """Declares the shared messages for a method."""

    def own(step: str, cls: type[M]) -> type[M]:
        return declare(method=method, step=step, total=cls in _SUMMED)(cast(type[M], type(cls.__name__, (cls,), {"__doc__": cls.__doc__})))

    steps = (
        ("between-average", (ClusterSums, GlobalAverage)),
        ("parameters", (UserWeights,)),
        ("within-average", (Models, Target)),
        ("trace", (Trace, AskState, UserState, ClusterState, ClusterCentre, UserSpread, GlobalCentre, ClusterSpread)),
        ("gap", (GapCentre, UserGap, ClusterGap)),
        ("evaluate", (Judge, Judgement)),
        ("models", (Collect, FinalModels)),
        ("between-average", (PartialSums,)),
        ("trace", (TraceSums, TracePartialSums, TraceAverage, ClusterPart)),
        ("gap", (AskGap,)),
    )
    classes: list[Any] = [own(step, cls) for step, listed in steps for cls in listed]
    return ClusterMessages(*classes)
