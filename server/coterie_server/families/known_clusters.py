"""Shared by the server halves for known clusters: weights by cluster, the objective, and the users' scores of their models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.robust import Robust
from coterie.families.cluster_messages import ClusterMessages
from coterie.families.known_clusters import Segments, Weights, check_all_clustered
from coterie.wire.messages import Message, PerCluster
from coterie_server.families.robust import centre_of
from coterie_server.interface.half import Counts, Federation, Key, Members, Outcome, Setting
from coterie_server.record.rundb import BETWEEN, WITHIN

# A stage gets a warning where its objective can still fall by this share of it: by the lower bound, or by the upper one, which is far too
# large where pulls are stronger than the curvature of the losses.
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
    robust: Robust | None = None  # the rule of their averages, where users may lie

    @property
    def size(self) -> int:
        return self.numbers.size

    @property
    def sizes(self) -> Indices:
        """(c,) users of each."""
        return np.bincount(self.segments.place, minlength=self.size)


def clusters_of(weights: Weights, members: Members, robust: Robust | None = None, *, some_only: bool = False) -> Clusters:
    """The clusters of these members. ConfigError when a user has none, or the weights lack a name or have an unknown one.

    With a rule, which counts each user as one, also where users of a cluster have different weights.

    `some_only`: the weights may have names of other members of the run.
    """
    check_all_clustered(members.names, members.clusters)
    numbers = np.unique(members.cluster_of)
    segments = Segments(members.cluster_of, numbers)
    names = tuple(members.clusters[int(np.flatnonzero(members.cluster_of == number)[0])] for number in numbers)
    own = weights.restricted({*members.names, *names}) if some_only else weights
    gamma = own.gamma_of(members.names, members.clusters)
    gamma_sums = segments.sums(gamma)
    is_even = segments.maxima(gamma) == segments.minima(gamma)
    if robust is not None and not is_even.all():
        name = names[int(np.flatnonzero(~is_even)[0])]
        why = f"federation.robust counts each user of a cluster as one, but gamma differs between users of cluster {name!r}"
        raise ConfigError(f"{why}: want one gamma for each cluster, or no rule")
    return Clusters(numbers, names, segments, gamma, gamma_sums, own.alpha_of(names, gamma_sums), is_even, robust)


def weighted_average(values: Array, weights: Array) -> Array:
    """(d,) sum_j values_j / sum_j weights_j over the clusters in their order, for values (k, d) and weights (k,)."""
    total = float(weights.sum())
    if total <= 0:
        raise ConfigError("all alpha_j gamma_i are 0, so there is no global average: want p0 = 0, or some alpha above 0")
    return np.asarray(functools.reduce(np.add, values) / total)  # one after another, as partial sums around a ring


def next_trace(every: int, last: int, at: int) -> int:
    """The iteration after `at` whose objective is traced, or the last one; `every`: iterations between traces, 0 for none."""
    return (at // every + 1) * every if every else last


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
    return np.asarray(np.divide(sums, gamma_sums, out=np.zeros_like(sums), where=gamma_sums > 0))


def centres_of(clusters: Clusters, places: Indices, models: Array) -> Array:
    """(m, d) as `averages_of`, or what `federation.robust` has instead: each user then counts as one."""
    means = averages_of(clusters, places, models)
    if clusters.robust is None:
        return means
    own = clusters.segments.place[np.isin(clusters.segments.place, places)]
    return np.array([centre_of(clusters.robust, [models[own == place]]).values for place in places.tolist()])


async def cluster_sums(
    federation: Federation, clusters: Clusters, messages: ClusterMessages, inbox: Mapping[type[Message], Message], within_rounds: Indices
) -> PerCluster:
    """An aggregator's answer to a question of `objective_of` or `private_outcome`, from what its users send. TypeError for another."""
    if isinstance(centre := inbox.get(messages.gap_centre), messages.gap_centre):
        gaps = (await federation.exchange(centre))[messages.user_gap]
        sums = (clusters.segments.sums(values) for values in (gaps.squared, gaps.least, gaps.most, gaps.is_flat))
        return messages.cluster_gap(clusters.numbers, *sums)
    if messages.trace not in inbox:
        raise TypeError(f"no step for {list(inbox)}")
    found = (await federation.exchange(messages.ask_state()))[messages.user_state]
    average = averages_of(clusters, np.arange(clusters.size), found.theta)
    with np.errstate(over="ignore"):  # `objective_of` reports a diverging run
        distance = ((found.theta - average[clusters.segments.place]) ** 2).sum(axis=1)
        spread = clusters.segments.sums(clusters.gamma * distance) / 2
    inner = clusters.segments.sums(found.value) + (1 - clusters.alpha) * spread
    weight = clusters.alpha * clusters.gamma_sums
    return messages.cluster_state(clusters.numbers, inner, clusters.alpha * spread, average, weight, within_rounds)


async def objective_of(
    federation: Federation, clusters: Clusters, messages: ClusterMessages, *, has_peers: bool
) -> tuple[dict[str, float], Array | None]:
    """F of (2.1), how often the clusters have averaged on their own, and (k, d) the points alpha_j bar + (1-alpha_j) bar_j.

    `messages` are the method's own. Aggregators send sums over their clusters, so users' models do not leave them. Among peers they keep
    the points too, and send three scalars.
    """
    replies = await federation.exchange(messages.trace(clusters.numbers))
    found: Any = replies[messages.cluster_part if has_peers else messages.cluster_state]
    objective = float(found.inner.sum() + found.spread.sum())
    if not np.isfinite(objective):
        raise RunError(f"the objective is {objective}, wanted a finite number: eta is too large")
    if has_peers:
        objective += float(found.distance.sum()) / 2
        return {"objective": objective, "within_rounds": float(found.within_rounds.sum())}, None
    centre = found.average
    if found.weight.sum() > 0:
        bar = weighted_average(found.weight[:, None] * found.average, found.weight)
        objective += float((found.weight * ((found.average - bar) ** 2).sum(axis=1)).sum()) / 2
        centre = clusters.alpha[:, None] * bar + (1 - clusters.alpha[:, None]) * found.average
    return {"objective": objective, "within_rounds": float(found.within_rounds.sum())}, centre


def far_from_optimum(stage: str, figures: Mapping[str, float], cure: str) -> str:
    """A warning where the objective can still fall far, or may; "" elsewhere. `cure`: what the user needs more of."""
    objective, least, most = abs(figures["objective"]), figures["gap_at_least"], figures.get("gap_at_most")
    if least <= _FAR * objective and (most or 0.0) <= _PERHAPS_FAR * objective:
        return ""
    scale = 100 / max(objective, np.finfo(float).tiny)
    falls = f"at least {least * scale:.2g} %" if most is None else f"{least * scale:.2g} to {most * scale:.2g} %"
    norm = f"gradient norm {figures['gradient_norm']:.2g}"
    found = f"its objective can still fall by {falls}, by the curvature where it ends ({norm})"
    return f"{stage} ends away from the optimum: {found}; want more than {cure}"


async def private_outcome(
    federation: Federation,
    clusters: Clusters,
    messages: ClusterMessages,
    figures: Mapping[str, float],
    stage: str,
    *,
    collects: bool,
    cure: str,
    has_peers: bool,
    tells_centre: bool = True,
) -> Outcome:
    """The end of a stage whose models stay at their users, who evaluate them; models are returned only where `collects` is set.

    Figures: the objective, the norm of its gradient, and the least and, where known, the most that it can fall, by the curvature there.
    Without `tells_centre` users do not receive the averages for that, which have no noise.
    """
    seen, centre = await objective_of(federation, clusters, messages, has_peers=has_peers)
    figures, warning = {**figures, **seen}, ""
    if tells_centre:
        found, warning = await _distance(federation, clusters, messages, centre, seen, stage, cure)
        figures |= found
    judged = (await federation.exchange(messages.judge()))[messages.judgement]
    figures["sum_of_losses"] = float(judged.objective.sum())
    with_rows = judged.n_test > 0
    if with_rows.any():
        losses, metrics = judged.test_loss[with_rows], judged.test_metric[with_rows]
        for what, values in (("heldout_loss", losses), ("heldout_metric", metrics)):
            figures |= {what: float(values.mean()), **{f"{what}_{name}": value for name, value in spread_of(values).items()}}
    models = (await federation.exchange(messages.collect()))[messages.final_models].theta if collects else None
    return Outcome(models, clusters.segments.place, figures, warnings=(warning,) if warning else ())


async def _distance(
    federation: Federation,
    clusters: Clusters,
    messages: ClusterMessages,
    centre: Array | None,  # None: aggregators know them
    seen: Mapping[str, float],
    stage: str,
    cure: str,
) -> tuple[dict[str, float], str]:
    """Figures of how far the optimum is from models with the points `centre` (k, d), and a warning where it is far."""
    asked = messages.ask_gap(clusters.numbers) if centre is None else messages.gap_centre(clusters.numbers, centre)
    gap = (await federation.exchange(asked))[messages.cluster_gap]
    figures = {"gradient_norm": float(gap.squared.sum()) ** 0.5, "gap_at_least": float(gap.least.sum())}
    if not gap.n_flat.any():
        figures["gap_at_most"] = float(gap.most.sum())
    return figures, far_from_optimum(stage, {**seen, **figures}, cure)


def hosts_of(setting: Setting, clusters: Clusters) -> Indices:
    """(k,) the client hosts with users of each cluster: a message for a cluster goes to each of them."""
    return np.ones(clusters.size, dtype=np.int64) if setting.hosts_of_cluster is None else setting.hosts_of_cluster


def fixed_counts(
    clusters: Clusters, d: int, figures: Sequence[Mapping[str, float]], hosts: Indices, *, collects: bool, tells_centre: bool = True
) -> tuple[Counts, Counts]:
    """The vectors and scalars that no coin decides: those of `objective_of` in rounds with an objective, and of `private_outcome`.

    `hosts` (k,) of each cluster. For an objective each user sends its aggregator f_i and theta_i, and each cluster sends on bar_j and three
    scalars. For the gap a vector goes down to each cluster and on to its hosts; four scalars come up from each user and each cluster.
    """
    n_users, k = clusters.gamma.size, clusters.size
    n_traces = 1.0 + sum("objective" in row for row in figures)
    vectors: dict[Key, float] = {("trace", "up", WITHIN): n_traces * n_users, ("trace", "up", BETWEEN): n_traces * k}
    scalars: dict[Key, float] = {("trace", "up", WITHIN): n_traces * n_users * (d + 1), ("trace", "up", BETWEEN): n_traces * k * (d + 3)}
    if tells_centre:
        vectors |= {("gap", "down", BETWEEN): float(k), ("gap", "down", WITHIN): float(hosts.sum())}
        scalars |= {("gap", "up", BETWEEN): 4.0 * k, ("gap", "up", WITHIN): 4.0 * n_users}
    scalars["evaluate", "up"] = 3.0 * n_users
    return {**vectors, **({("models", "up"): float(n_users)} if collects else {})}, scalars


def spread_of(values: Array) -> dict[str, float]:
    """The spread of the users' figures (n,): standard deviation, quartiles, smallest and largest.

    If some are infinite the deviation is infinite, and a quartile between two users is the higher of them.
    """
    is_finite = np.isfinite(values).all()
    with np.errstate(over="ignore"):
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="linear" if is_finite else "higher")
        deviation = values.std() if is_finite else np.inf
    named = {"sd": deviation, "q1": low, "median": middle, "q3": high, "min": values.min(), "max": values.max()}
    return {name: float(value) for name, value in named.items()}
