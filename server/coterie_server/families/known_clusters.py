"""Shared by the server halves for known clusters: weights by cluster, the objective, and the users' scores of their models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices, distinct
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.robust import Robust
from coterie.families.cluster_messages import ClusterMessages
from coterie.families.known_clusters import Segments, Weights, check_all_clustered
from coterie.record.ledger import DOWN
from coterie.wire.messages import Message, PerCluster, Rows
from coterie.wire.precision import Precision
from coterie_server.families import robust as robust_rule
from coterie_server.interface.half import Counts, Federation, Key, Members, Outcome, Setting, StageHalf, Sum
from coterie_server.interface.wanted import Wanted
from coterie_server.record.rundb import BETWEEN, WITHIN

# A stage gets a warning where its objective can still fall by this share of it: by the lower bound, or by the upper one, which is far too
# large where pulls are stronger than the curvature of the losses.
_FAR, _PERHAPS_FAR = 0.01, 0.5

# Of exact sums over a cluster: what gamma_i times a number of a model does not exceed, and the users of a cluster. An aggregator knows its
# own cluster alone, so how numbers are written must not depend on others: sums in a flat run, of several clusters, have the same bits.
_LARGEST, _MOST_USERS = 2.0**30, 1 << 20


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

    def nobody_left(self) -> Indices:
        """How often the rule has left each user out before the first average, (0,) without one."""
        return np.zeros(0 if self.robust is None else self.gamma.size, dtype=np.int64)

    def users_at(self, places: Indices) -> Indices:
        """The users of the clusters at these places, ascending."""
        return np.flatnonzero(np.isin(self.segments.place, places))


def clusters_of(weights: Weights, members: Members, robust: Robust | None = None, *, some_only: bool = False) -> Clusters:
    """The clusters of these members. ConfigError when a user has none, or the weights lack a name or have an unknown one.

    With a rule, which counts each user as one, also where users of a cluster have different weights.

    `some_only`: the weights may have names of other members of the run.
    """
    check_all_clustered(members.names, members.clusters)
    robust_rule.check(robust)
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
    return means_of(clusters, places, segments.sums(gamma[:, None] * models))


def sum_of(kind: type[Rows], clusters: Clusters, places: Indices, weighted: str = "") -> Sum:
    """The exact sums of this kind over the users of each of the clusters at `places`; `weighted` is the field that gamma_i multiplies."""
    groups = np.zeros(clusters.gamma.size, dtype=np.int64)
    is_listed = np.isin(clusters.segments.place, places)
    groups[is_listed] = np.searchsorted(places, clusters.segments.place[is_listed])
    return Sum(kind, groups=groups, bounds={weighted: _LARGEST} if weighted else {}, capacity=_MOST_USERS)


def means_of(clusters: Clusters, places: Indices, sums: Array) -> Array:
    """(m, d) bar_j of the clusters at `places` from sums of gamma_i theta_i over them (m, d), 0 where Gamma_j is 0."""
    gamma_sums = clusters.gamma_sums[places][:, None]
    return np.asarray(np.divide(sums, gamma_sums, out=np.zeros_like(sums), where=gamma_sums > 0))


def centres_of(clusters: Clusters, places: Indices, models: Array, left: Indices) -> Array:
    """(m, d) as `averages_of`, or what `federation.robust` has instead: each user then counts as one.

    `left` (n,), how often a rule has left each user out, is counted up; without a rule it is empty.
    """
    if clusters.robust is None:
        return averages_of(clusters, places, models)
    users, centres = clusters.users_at(places), []
    for place in places.tolist():
        is_own = clusters.segments.place[users] == place
        centre = robust_rule.centre_of(clusters.robust, [models[is_own]])
        left[users[is_own][centre.left]] += 1
        centres.append(centre.values)
    return np.array(centres)


def rounding_of(clusters: Clusters, kind: type[Rows], precision: Precision, between: float) -> float:
    """How far rounding may have moved an average: bar_j of sums of `Models`, and bar, where each term was moved by `between`."""
    error = sum_of(kind, clusters, np.arange(clusters.size), "theta").forms(np.zeros(1, dtype=np.int64), precision)["theta"].error
    within = np.divide(clusters.sizes, clusters.gamma_sums, out=np.zeros(clusters.size), where=clusters.gamma_sums > 0)
    weight = float((clusters.alpha * clusters.gamma_sums).sum())
    return max(error * float(within.max()), between * clusters.size / weight if weight else 0.0)


Wish = tuple[Indices, type[Rows], str]  # the places of clusters whose users send this kind, and its field with their vectors


async def averaged(
    federation: Federation,
    clusters: Clusters,
    wishes: Sequence[Wish],
    sent: Sequence[Message],
    to: Indices | None,
    *,
    left: Indices,
    is_exact: bool,
    wants_models: bool = False,
) -> list[tuple[Indices, Array]]:
    """The places and bar_j (m, d) of the clusters of each wish that has any, from what users answer to what is `sent`.

    `left` is as in `centres_of`. With `wants_models` they are the users' models themselves, in member order, for averages with noise.
    With `is_exact` there must be at most one such wish, and then all users of `to` be of its clusters.
    """
    listed = [wish for wish in wishes if wish[0].size]
    if not is_exact or not listed:
        judged = [] if clusters.robust is None else listed
        wanted = [Wanted(kind, clusters.users_at(places), is_judged=True) for places, kind, _ in judged]
        replies = await federation.exchange(*sent, to=to, wanted=wanted)
        models = [(places, getattr(replies[kind], name)) for places, kind, name in listed]
        return models if wants_models else [(places, centres_of(clusters, places, theirs, left)) for places, theirs in models]
    ((places, kind, name),) = listed
    totals = await federation.total(*sent, of=[sum_of(kind, clusters, places, name)], to=to)
    return [(places, means_of(clusters, places, getattr(totals[kind], name)))]


@dataclass(frozen=True)
class Seen:
    """An aggregator's answer, and what it keeps of it: (c, d) bar_j of the trace, with `exact_sums`."""

    answer: PerCluster
    traced: Array


async def cluster_sums(
    federation: Federation,
    clusters: Clusters,
    messages: ClusterMessages,
    inbox: Mapping[type[Message], Message],
    within_rounds: Indices,
    traced: Array,
    *,
    is_exact: bool,
) -> Seen:
    """An aggregator's answer to a question of `objective_of` or `private_outcome`, from what its users send. TypeError for another.

    `traced` are the averages of the latest trace.
    """
    if is_exact:
        return await _exact_sums(federation, clusters, messages, inbox, within_rounds, traced)
    return Seen(await _plain_sums(federation, clusters, messages, inbox, within_rounds), traced)


async def _exact_sums(
    federation: Federation,
    clusters: Clusters,
    messages: ClusterMessages,
    inbox: Mapping[type[Message], Message],
    within_rounds: Indices,
    traced: Array,
) -> Seen:
    everyone, numbers, alpha = np.arange(clusters.size), clusters.numbers, clusters.alpha
    weight = alpha * clusters.gamma_sums
    if isinstance(sent := inbox.get(messages.gap_centre), messages.gap_centre):
        centre = messages.gap_centre(numbers, alpha[:, None] * sent.centre + (1 - alpha[:, None]) * traced)
        gaps = (await federation.total(centre, of=[sum_of(messages.user_gap, clusters, everyone)]))[messages.user_gap]
        return Seen(messages.cluster_gap(numbers, gaps.squared, gaps.least, gaps.most, gaps.is_flat), traced)
    if isinstance(bar := inbox.get(messages.global_centre), messages.global_centre):
        return Seen(messages.cluster_spread(numbers, weight / 2 * ((traced - bar.average) ** 2).sum(axis=1)), traced)
    if messages.trace not in inbox:
        raise TypeError(f"no step for {list(inbox)}")
    states = sum_of(messages.user_state, clusters, everyone, "theta")
    found = (await federation.total(messages.ask_state(), of=[states]))[messages.user_state]
    average = means_of(clusters, everyone, found.theta)
    spreads = sum_of(messages.user_spread, clusters, everyone)
    spread = (await federation.total(messages.cluster_centre(numbers, average), of=[spreads]))[messages.user_spread].spread
    inner = found.value + (1 - alpha) * spread
    return Seen(messages.cluster_state(numbers, inner, alpha * spread, weight[:, None] * average, weight, within_rounds), average)


async def _plain_sums(
    federation: Federation, clusters: Clusters, messages: ClusterMessages, inbox: Mapping[type[Message], Message], within_rounds: Indices
) -> PerCluster:
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
    federation: Federation, clusters: Clusters, messages: ClusterMessages, *, has_peers: bool, is_exact: bool
) -> tuple[dict[str, float], Array | None]:
    """F of (2.1), how often the clusters have averaged on their own, and (k, d) the points alpha_j bar + (1-alpha_j) bar_j.

    `messages` are the method's own. Aggregators send sums over their clusters, so users' models do not leave them. Among peers they keep
    the points too, and send three scalars. With `is_exact` their answers come as sums over clusters, and the points are bar.
    """
    if is_exact:
        return await _exact_objective(federation, clusters, messages)
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


async def _exact_objective(federation: Federation, clusters: Clusters, messages: ClusterMessages) -> tuple[dict[str, float], Array]:
    totals = await federation.total(messages.trace(clusters.numbers), of=[Sum(messages.cluster_state)])
    found = totals[messages.cluster_state]
    bar = found.average[0] / float(found.weight[0]) if found.weight[0] > 0 else np.zeros(found.average.shape[1])
    centre = np.tile(bar, (clusters.size, 1))
    between = await federation.total(messages.global_centre(clusters.numbers, centre), of=[Sum(messages.cluster_spread)])
    objective = float(found.inner[0] + found.spread[0] + between[messages.cluster_spread].spread[0])
    return {"objective": objective, "within_rounds": float(found.within_rounds[0])}, centre


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
    is_exact: bool,
    tells_centre: bool = True,
) -> Outcome:
    """The end of a stage whose models stay at their users, who evaluate them; models are returned only where `collects` is set.

    Figures: the objective, the norm of its gradient, and the least and, where known, the most that it can fall, by the curvature there.
    Without `tells_centre` users do not receive the averages for that, which have no noise.
    """
    seen, centre = await objective_of(federation, clusters, messages, has_peers=has_peers, is_exact=is_exact)
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
    gap = (await federation.total(asked, of=[Sum(messages.cluster_gap)]))[messages.cluster_gap]
    figures = {"gradient_norm": float(gap.squared.sum()) ** 0.5, "gap_at_least": float(gap.least.sum())}
    if not gap.n_flat.any():
        figures["gap_at_most"] = float(gap.most.sum())
    return figures, far_from_optimum(stage, {**seen, **figures}, cure)


def hosts_of(setting: Setting, clusters: Clusters) -> Indices:
    """(k,) the client hosts with users of each cluster: a message for a cluster goes to each of them."""
    return np.ones(clusters.size, dtype=np.int64) if setting.hosts_of_cluster is None else setting.hosts_of_cluster


def fixed_counts(
    clusters: Clusters,
    d: int,
    figures: Sequence[Mapping[str, float]],
    hosts: Indices,
    *,
    collects: bool,
    is_exact: bool,
    tells_centre: bool = True,
) -> tuple[Counts, Counts]:
    """The vectors and scalars that no coin decides: those of `objective_of` in rounds with an objective, and of `private_outcome`.

    `hosts` (k,) of each cluster. For an objective each user sends its aggregator f_i and theta_i, and each cluster sends on bar_j and three
    scalars. For the gap a vector goes down to each cluster and on to its hosts; four scalars come up from each user and each cluster.
    With `is_exact` a host sends a sum for each of its clusters. Then an objective has a second exchange: an average down, and a scalar up.
    """
    n_users, k, n_hosts = clusters.gamma.size, clusters.size, float(hosts.sum())
    n_traces, n_up, more = 1.0 + sum("objective" in row for row in figures), n_hosts if is_exact else float(n_users), int(is_exact)
    vectors: dict[Key, float] = {("trace", "up", WITHIN): n_traces * n_up, ("trace", "up", BETWEEN): n_traces * k}
    scalars: dict[Key, float] = {
        ("trace", "up", WITHIN): n_traces * n_up * (d + 1 + more),
        ("trace", "up", BETWEEN): n_traces * k * (d + 3 + more),
    }
    if is_exact:
        vectors |= {("trace", "down", WITHIN): n_traces * n_hosts, ("trace", "down", BETWEEN): n_traces * k}
    if tells_centre:
        vectors |= {("gap", "down", BETWEEN): float(k), ("gap", "down", WITHIN): n_hosts}
        scalars |= {("gap", "up", BETWEEN): 4.0 * k, ("gap", "up", WITHIN): 4.0 * n_up}
    scalars["evaluate", "up"] = 3.0 * n_users
    return {**vectors, **({("models", "up"): float(n_users)} if collects else {})}, scalars


def with_rule(half: StageHalf[Any], clusters: Clusters) -> StageHalf[Any]:
    """The half, which says at its start what the rule of its averages bears."""
    sizes = np.unique(clusters.sizes).tolist()
    notes = robust_rule.said(clusters.robust, sizes, "a cluster")
    doubts = [doubt for size in sizes for doubt in robust_rule.doubts(clusters.robust, size, "a cluster")]
    return replace(half, notes=[*half.notes, *notes], warnings=[*half.warnings, *doubts])


def closed(half: StageHalf[Any], setting: Setting, clusters: Clusters) -> StageHalf[Any]:
    """The half, without closed forms that it does not have.

    Under masks in a flat run a host sends a sum of each cluster that is asked, also of those that it has no users of. Unless all hosts have
    users of all clusters, the number of sums then depends on which clusters are asked together.
    """
    sums, hosts = setting.sums, hosts_of(setting, clusters)
    if sums is None or not sums.has_all_groups or sums.hosts_below is not None or (hosts == distinct(sums.host_of).size).all():
        return half

    def known(counts: Callable[[Sequence[Mapping[str, float]]], Counts]) -> Callable[[Sequence[Mapping[str, float]]], Counts]:
        open_steps = ("evaluate", "models", "parameters")
        return lambda figures: {key: n for key, n in counts(figures).items() if key[1] == DOWN or BETWEEN in key or key[0] in open_steps}

    vectors, scalars = known(half.expected_vectors), known(half.expected_scalars)
    spread, drawn = known(half.spread_of_vectors), known(half.drawn_vectors)
    return replace(half, expected_vectors=vectors, expected_scalars=scalars, spread_of_vectors=spread, drawn_vectors=drawn)


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
