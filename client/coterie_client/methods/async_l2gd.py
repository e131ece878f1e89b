"""Client half of `async_l2gd`: the three steps of Algorithm 1 on the models of a host's users, which stay here.

The aggregator says how many iterations to make, and sends new averages. Coins, which all members share, decide the kind of each iteration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices, distinct
from coterie.families.cluster_messages import Target, UserWeights
from coterie.families.schedule import GLOBAL, LOCAL, Schedule, combined, moved, schedule_by
from coterie.methods.async_l2gd import MESSAGES, Centres, Parameters, Steps
from coterie.wire.messages import Message
from coterie_client.families.known_clusters import terms, told
from coterie_client.interface.half import ClientHalf, Inbox, Local


@dataclass(frozen=True)
class State:
    """The state of a host's n users and their c clusters (ascending numbers)."""

    options: Mapping[str, Any]
    theta: Array  # (n, d)
    gamma: Array  # (n,)
    clusters: Indices  # (c,) their numbers
    place: Indices  # (n,) of each user's cluster among them
    at: Indices  # (c,) the next iteration
    cluster_average: Array  # (c, d) bar_j, while it is known
    global_average: Array  # (c, d) bar, likewise
    parameters: Parameters | None = None  # of these clusters


def init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:
    """theta = 0, or that of an earlier stage."""
    numbers, place = np.unique(local.clusters, return_inverse=True)
    d = local.problem.d
    theta = np.zeros((local.n_own, d)) if previous is None else previous.theta
    nothing = np.zeros((numbers.size, d))
    return State(options, theta, np.zeros(local.n_own), numbers, place, np.zeros(numbers.size, dtype=np.int64), nothing, nothing)


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    if (parameters := inbox.get(Parameters)) is not None:
        weights = inbox.get(MESSAGES.user_weights)
        gamma = state.gamma if weights is None else _placed(state.gamma, weights)
        return replace(state, parameters=parameters, gamma=gamma), []
    if (steps := inbox.get(Steps)) is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # the parent refuses numbers of a diverging run
            return _stepped(state, steps, inbox.get(MESSAGES.target), inbox.get(Centres), local)
    return state, told(inbox, MESSAGES, local, state.theta, state.gamma, state.place, is_exact=state.options["is_exact"])


def _placed(gamma: Array, weights: UserWeights) -> Array:
    if weights.users is None:
        return weights.gamma
    placed = gamma.copy()
    placed[weights.users] = weights.gamma
    return placed


def _stepped(state: State, steps: Steps, target: Target | None, centres: Centres | None, local: Local) -> tuple[State, Sequence[Message]]:
    """Advances the clusters in `steps`: first averaging steps with known averages, then local steps up to `until`."""
    assert state.parameters is not None  # noqa: S101 - the parameters come first
    run = _Run(state, state.parameters, local)
    p = state.parameters
    schedule = schedule_by(local.seed, float(p.p0[0]), p.p, state.clusters, state.options["coins"])
    places = np.searchsorted(state.clusters, steps.clusters)
    if centres is not None:
        known = np.searchsorted(state.clusters, centres.clusters)
        run.cluster_average[known], run.global_average[known] = centres.cluster_average, centres.global_average
    targets = {} if target is None else dict(zip(target.clusters.tolist(), target.target, strict=True))
    n_local = np.zeros(state.clusters.size, dtype=np.int64)
    for place, until in zip(places.tolist(), steps.until.tolist(), strict=True):
        n_local[place] = run.average(place, until, targets.get(int(state.clusters[place])), schedule)
    run.descend(n_local)
    at = state.at.copy()
    at[places] = steps.until
    after = replace(state, theta=run.theta, at=at, cluster_average=run.cluster_average, global_average=run.global_average)
    return after, _asked_models(after, places[steps.wants_models > 0])


def _asked_models(state: State, places: Indices) -> Sequence[Message]:
    if not places.size:
        return []
    is_exact = state.options["is_exact"]
    if places.size == state.clusters.size:
        return [MESSAGES.models(terms(state.theta, state.gamma, is_exact=is_exact))]
    users = np.flatnonzero(np.isin(state.place, places))
    return [MESSAGES.models(terms(state.theta[users], state.gamma[users], is_exact=is_exact), users=users)]


class _Run:
    def __init__(self, state: State, parameters: Parameters, local: Local) -> None:
        self.theta = state.theta.copy()
        self.cluster_average, self.global_average = state.cluster_average.copy(), state.global_average.copy()
        self._state, self._parameters, self._local = state, parameters, local

    def average(self, place: int, until: int, target: Array | None, schedule: Schedule) -> int:
        """The averaging steps of a cluster at the beginning; `target` is for the first. Returns the number of local steps that follow."""
        at = int(self._state.at[place])
        ops = schedule.operations(int(self._state.clusters[place]), at, until)
        local_steps = np.flatnonzero(ops == LOCAL)
        n_averaging = int(local_steps[0]) if local_steps.size else ops.size
        users = np.flatnonzero(self._state.place == place) if n_averaging else None
        for op in ops[:n_averaging].tolist():
            self._average_once(place, users, op == GLOBAL, target)
            target = None
        return ops.size - n_averaging

    def _average_once(self, place: int, users: Indices | None, is_global: bool, target: Array | None) -> None:
        """One averaging step of the users of one cluster (Algorithm 1, lines for xi_0 = 1 and xi_j = 1)."""
        p = self._parameters
        p0, pj, tau, alpha, eta = (float(values[place]) for values in (p.p0, p.p, p.tau, p.alpha, p.eta))
        gamma = self._state.gamma[users, None]
        if is_global:
            bar_j, bar = self.cluster_average[place], self.global_average[place]
            towards = combined(alpha, tau, bar_j, bar) if target is None else target
            step = eta * gamma / p0
            self.theta[users] = (1 - step * (alpha + tau * (1 - alpha))) * self.theta[users] + step * towards
            if target is None and users is not None:
                self.cluster_average[place] = moved(bar_j, bar, float(step[0, 0]), alpha)
            return
        if target is not None:
            self.cluster_average[place] = target
        step = eta * gamma * ((1 - tau) * (1 - alpha)) / ((1 - p0) * pj)
        self.theta[users] = (1 - step) * self.theta[users] + step * self.cluster_average[place]

    def descend(self, n_local: Indices) -> None:
        """`n_local` (c,) local steps: theta_i <- theta_i - eta/((1-p_0)(1-p_j)) grad f_i(theta_i)."""
        p, state = self._parameters, self._state
        by_cluster = p.eta / ((1 - p.p0) * (1 - p.p))
        scale = by_cluster[state.place][:, None]
        n_of_user = n_local[state.place]
        done = 0
        for level in distinct(n_local[n_local > 0]).tolist():
            users = np.flatnonzero(n_of_user >= level)
            if users.size == n_of_user.size:
                for _ in range(level - done):
                    self.theta -= scale * self._local.problem.gradient(self.theta)
            else:
                theta, own = self.theta[users], scale[users]
                for _ in range(level - done):
                    theta -= own * self._local.problem.gradient(theta, users)
                self.theta[users] = theta
            done = level


CLIENT = ClientHalf(init=init, step=step)
