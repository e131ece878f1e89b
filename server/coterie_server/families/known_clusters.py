"""What the server halves for known clusters share: weights by cluster, the objective, and what users say of their own models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.families.cluster_messages import ClusterMessages
from coterie.families.known_clusters import Segments, Weights, check_all_clustered
from coterie.wire.messages import PerCluster
from coterie_server.interface.half import Counts, Federation, Key, Members, Outcome, Setting
from coterie_server.record.rundb import BETWEEN, WITHIN

# Of the objective, from which a stage is warned about: what it may at least fall by, and what at most, which is far too much where pulls
# are stronger than the curvature of the losses.
_FAR, _PERHAPS_FAR = 0.01, 0.5


@dataclass(frozen=True)
class Clusters:
    """The clusters of some members (ascending numbers of the whole run) with their weights."""

    numbers: Indices  # (c,)
    names: tuple[str, ...]  # (c,)
    segments: Segments
    gamma: Array  # (n,) gamma_i
    gamma_sums: Array  # (c,) Gamma_j
    alpha: Array  # (c,)
    is_even: Array  # (c,) bool: whether gamma is constant inside the cluster

    @property
    def size(self) -> int:
        return self.numbers.size

    @property
    def sizes(self) -> Indices:
        """(c,) users of each."""
        return np.bincount(self.segments.place, minlength=self.size)


def clusters_of(weights: Weights, members: Members, *, some_only: bool = False) -> Clusters:
    """The clusters of these members. ConfigError when a user has none, or the weights miss somebody or name nobody.

    `some_only`: these are not all members of the run, so what the weights say of others is not looked at.
    """
    check_all_clustered(members.names, members.clusters)
    numbers = np.unique(members.cluster_of)
    segments = Segments(members.cluster_of, numbers)
    names = tuple(members.clusters[int(np.flatnonzero(members.cluster_of == number)[0])] for number in numbers)
    own = weights.restricted({*members.names, *names}) if some_only else weights
    gamma = own.gamma_of(members.names, members.clusters)
    gamma_sums = segments.sums(gamma)
    is_even = segments.maxima(gamma) == segments.minima(gamma)
    return Clusters(numbers, names, segments, gamma, gamma_sums, own.alpha_of(names, gamma_sums), is_even)


def weighted_average(values: Array, weights: Array) -> Array:
    """(d,) sum_j values_j / sum_j weights_j over the clusters in their order, for values (k, d) and weights (k,)."""
    total = float(weights.sum())
    if total <= 0:
        raise ConfigError("all alpha_j gamma_i are 0, so there is no global average: want p0 = 0, or some alpha above 0")
    average: Array = values.sum(axis=0) / total
    return average


def averages_of(clusters: Clusters, places: Indices, models: Array) -> Array:
    """(m, d) sum_{I_j} gamma_i theta_i / Gamma_j of the m clusters at `places`, 0 where Gamma_j is 0.

    `models` are those of their users in member order; ProtocolError unless there is one for each.
    """
    segments, gamma = clusters.segments, clusters.gamma
    if places.size < clusters.size:
        is_listed = np.isin(segments.place, places)
        segments, gamma = Segments(segments.place[is_listed], places), gamma[is_listed]
    if len(models) != gamma.size:
        raise ProtocolError(f"{len(models)} users of the clusters sent their models, wanted {gamma.size}")
    sums, gamma_sums = segments.sums(gamma[:, None] * models), clusters.gamma_sums[places][:, None]
    averages: Array = np.divide(sums, gamma_sums, out=np.zeros_like(sums), where=gamma_sums > 0)
    return averages


async def cluster_state(federation: Federation, clusters: Clusters, messages: ClusterMessages, within_rounds: Indices) -> PerCluster:
    """The clusters' parts of the objective, from what their users send to the aggregator; `messages` as for `objective_of`."""
    found = (await federation.exchange(messages.ask_state()))[messages.user_state]
    average = averages_of(clusters, np.arange(clusters.size), found.theta)
    with np.errstate(over="ignore"):  # a diverging run is told by `objective_of`
        distance = ((found.theta - average[clusters.segments.place]) ** 2).sum(axis=1)
        spread = clusters.segments.sums(clusters.gamma * distance) / 2
    inner = clusters.segments.sums(found.value) + (1 - clusters.alpha) * spread
    weight = clusters.alpha * clusters.gamma_sums
    return messages.cluster_state(clusters.numbers, inner, clusters.alpha * spread, average, weight, within_rounds)


async def cluster_gap(federation: Federation, clusters: Clusters, messages: ClusterMessages, centre: PerCluster) -> PerCluster:
    """The sums over each cluster of what its users say of their gradients; `messages` as for `objective_of`."""
    found = (await federation.exchange(centre))[messages.user_gap]
    sums = (clusters.segments.sums(values) for values in (found.squared, found.least, found.most, found.is_flat))
    return messages.cluster_gap(clusters.numbers, *sums)


async def objective_of(federation: Federation, clusters: Clusters, messages: ClusterMessages) -> dict[str, float]:
    """F of (2.1), and how often the clusters have averaged on their own; `messages` are the method's own.

    Every aggregator sends the sums of its cluster: users' models do not leave it.
    """
    return (await _look(federation, clusters, messages))[0]


async def _look(federation: Federation, clusters: Clusters, messages: ClusterMessages) -> tuple[dict[str, float], Array]:
    """`objective_of`, and (k, d) alpha_j bar + (1-alpha_j) bar_j, from which the gradient pulls."""
    numbers = clusters.numbers
    found = (await federation.exchange(messages.trace(numbers)))[messages.cluster_state]
    objective = float(found.inner.sum() + found.spread.sum())
    if not np.isfinite(objective):
        raise RunError(f"the objective is {objective}, wanted a finite number: eta is too large")
    centre = found.average
    if found.weight.sum() > 0:
        bar = weighted_average(found.weight[:, None] * found.average, found.weight)
        objective += float((found.weight * ((found.average - bar) ** 2).sum(axis=1)).sum()) / 2
        centre = clusters.alpha[:, None] * bar + (1 - clusters.alpha[:, None]) * found.average
    return {"objective": objective, "within_rounds": float(found.within_rounds.sum())}, centre


async def _gap(federation: Federation, clusters: Clusters, messages: ClusterMessages, centre: Array) -> dict[str, float]:
    """The norm of F's gradient, and what F can fall by from there, by the curvature there: at least, and at most where that is known."""
    found = (await federation.exchange(messages.gap_centre(clusters.numbers, centre)))[messages.cluster_gap]
    figures = {"gradient_norm": float(found.squared.sum()) ** 0.5, "gap_at_least": float(found.least.sum())}
    return figures if found.n_flat.any() else {**figures, "gap_at_most": float(found.most.sum())}


def far_from_optimum(stage: str, figures: Mapping[str, float], cure: str) -> str:
    """A warning where much of the objective is left to gain, or may be; "" elsewhere."""
    objective, least, most = abs(figures["objective"]), figures["gap_at_least"], figures.get("gap_at_most")
    if least <= _FAR * objective and (most or 0.0) <= _PERHAPS_FAR * objective:
        return ""
    scale = 100 / max(objective, np.finfo(float).tiny)
    falls = f"at least {least * scale:.2g} %" if most is None else f"{least * scale:.2g} to {most * scale:.2g} %"
    return (
        f"{stage} ends away from the optimum: its objective can still fall by {falls}, by the curvature where it ends "
        f"(gradient norm {figures['gradient_norm']:.2g}); want more than {cure}"
    )


async def private_outcome(
    federation: Federation,
    clusters: Clusters,
    messages: ClusterMessages,
    figures: Mapping[str, float],
    stage: str,
    *,
    collects: bool,
    cure: str,
) -> Outcome:
    """The end of a stage whose models stay at their users, who judge them: figures, and the models only where they are collected.

    Far from the optimum there is a warning, that more than `cure` is wanted.
    """
    seen, centre = await _look(federation, clusters, messages)
    figures = {**figures, **seen, **await _gap(federation, clusters, messages, centre)}
    warning = far_from_optimum(stage, figures, cure)
    judged = (await federation.exchange(messages.judge()))[messages.judgement]
    figures["sum_of_losses"] = float(judged.objective.sum())
    with_rows = judged.n_test > 0
    if with_rows.any():
        losses, metrics = judged.test_loss[with_rows], judged.test_metric[with_rows]
        figures |= {"heldout_loss": float(losses.mean()), "heldout_metric": float(metrics.mean())}
        figures |= {f"heldout_loss_{name}": value for name, value in spread_of(losses).items()}
        figures |= {f"heldout_metric_{name}": value for name, value in spread_of(metrics).items()}
    models = (await federation.exchange(messages.collect()))[messages.final_models].theta if collects else None
    return Outcome(models, clusters.segments.place, figures, warnings=(warning,) if warning else ())


def hosts_of(setting: Setting, clusters: Clusters) -> Indices:
    """(k,) the client hosts with users of each cluster, to each of which goes what the users of a cluster have in common."""
    return np.ones(clusters.size, dtype=np.int64) if setting.hosts_of_cluster is None else setting.hosts_of_cluster


@dataclass(frozen=True)
class FixedCounts:
    """Closed forms of messages that no coin decides: the objective, and the end of the stage."""

    vectors: Counts
    scalars: Counts


def fixed_counts(clusters: Clusters, d: int, figures: Sequence[Mapping[str, float]], hosts: Indices, *, collects: bool) -> FixedCounts:
    """The objective of each round that has one, and of the end; then what `private_outcome` asks for. `hosts` (k,) of each cluster.

    For an objective each user sends its aggregator f_i and theta_i, and each cluster bar_j and three scalars on. For the gap a vector goes
    down to each cluster and on to its hosts, and four scalars of each user come up, and of each cluster.
    """
    n_users, k = clusters.gamma.size, clusters.size
    n_traces = 1.0 + sum("objective" in row for row in figures)
    vectors: dict[Key, float] = {("trace", "up", WITHIN): n_traces * n_users, ("trace", "up", BETWEEN): n_traces * k}
    scalars: dict[Key, float] = {("trace", "up", WITHIN): n_traces * n_users * (d + 1), ("trace", "up", BETWEEN): n_traces * k * (d + 3)}
    vectors |= {("gap", "down", BETWEEN): float(k), ("gap", "down", WITHIN): float(hosts.sum())}
    scalars |= {("gap", "up", BETWEEN): 4.0 * k, ("gap", "up", WITHIN): 4.0 * n_users}
    scalars["evaluate", "up"] = 3.0 * n_users
    return FixedCounts({**vectors, **({("models", "up"): float(n_users)} if collects else {})}, scalars)


def spread_of(values: Array) -> dict[str, float]:
    """How the users' figures (n,) are spread: standard deviation, quartiles, smallest and largest.

    Of some that are infinite the deviation is infinite, and a quartile between two users is the higher of them.
    """
    is_finite = np.isfinite(values).all()
    with np.errstate(over="ignore"):
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="linear" if is_finite else "higher")
        deviation = values.std() if is_finite else np.inf
    named = {"sd": deviation, "q1": low, "median": middle, "q3": high, "min": values.min(), "max": values.max()}
    return {name: float(value) for name, value in named.items()}
