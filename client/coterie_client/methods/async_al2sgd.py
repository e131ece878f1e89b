"""Client half of `async_al2sgd`: the iterations of Algorithm 2 on the x, y, z of a host's users, which stay here.

The aggregator says how many iterations to make, and sends averages. The shared seed decides the kind and the row of each iteration. A row
is uniform, and fixed by the seed, the user's number in the whole run, and the iteration. Each user has its own stream: SplitMix64, started
at a word of `coterie.draws.streams`. Its state after t draws needs no earlier draws, so users at different iterations are served at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices, distinct
from coterie.draws.streams import philox
from coterie.families.cluster_messages import Target
from coterie.families.schedule import GLOBAL, combined, schedule_by
from coterie.methods.async_al2sgd import ANCHOR, MESSAGES, THETA, AnchorAverages, Anchors, AskRowConstants, Parameters, RowConstants, Steps
from coterie.wire.messages import Message
from coterie_client.families.known_clusters import terms, told
from coterie_client.interface.half import ClientHalf, Inbox, Local

Words = NDArray[np.uint64]

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
_GAMMA, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


def keys_of(seed: int, numbers: Indices) -> Words:
    """(n,) the start values of these users' streams."""
    return np.array([philox(seed, "row of user", number).random_raw() for number in numbers.tolist()], dtype=np.uint64)


def drawn_rows(keys: Words, iterations: Indices, n_rows: Indices) -> Indices:
    """(n,) a row below n_rows (n,) < 2^31 for each user and iteration (n,); each row's probability is within 2^-32 of 1/n_rows."""
    word = keys + (iterations.astype(np.uint64) + np.uint64(1)) * _GAMMA
    word = (word ^ (word >> _30)) * _MIX_1
    word = (word ^ (word >> _27)) * _MIX_2
    word ^= word >> _31
    rows: Indices = (((word >> _32) * n_rows.astype(np.uint64)) >> _32).astype(np.int64)
    return rows


def recorded_rows(coins: Sequence[Sequence[Sequence[int]]], numbers: Indices) -> Indices:
    """(iterations, n) the rows of these users in recorded coins."""
    return np.array([line[2] for line in coins], dtype=np.int64)[:, numbers]


@dataclass(frozen=True)
class State:
    """The state of a host's n users and their c clusters (ascending numbers)."""

    options: Mapping[str, Any]
    keys: Words  # (n,) of the users' draws of rows
    clusters: Indices  # (c,) their numbers
    place: Indices  # (n,) of each user's cluster among them
    at: Indices  # (c,) the next iteration
    x: Array  # (n, d)
    y: Array  # (n, d)
    z: Array  # (n, d)
    gradient: Array  # (n, d) of F at x: the first line of (4.1)
    cluster_anchor: Array  # (c, d) xbar_j
    global_anchor: Array  # (c, d) xbar
    gamma: Array  # (n,)
    parameters: Parameters | None = None  # of these clusters


def init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:
    """x = y = z = 0, or, with the option `is_warm`, the y of an earlier stage."""
    numbers, place = np.unique(local.clusters, return_inverse=True)
    zeros, averages = np.zeros((local.n_own, local.problem.d)), np.zeros((numbers.size, local.problem.d))
    y = previous.y if previous is not None and options["is_warm"] else zeros
    keys, at = keys_of(local.seed, local.numbers), np.zeros(numbers.size, dtype=np.int64)
    return State(options, keys, numbers, place, at, y, y, y, zeros, averages, averages, np.zeros(local.n_own))


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    if AskRowConstants in inbox:
        return state, [RowConstants(local.problem.row_smoothness(), local.problem.row_strong_convexity())]
    if (parameters := inbox.get(Parameters)) is not None:
        state = replace(state, parameters=parameters, gamma=inbox[MESSAGES.user_weights].gamma)
        return replace(state, gradient=_gradient_at_anchor(state, local)), []
    if (steps := inbox.get(Steps)) is not None:
        if (anchors := inbox.get(AnchorAverages)) is not None:
            state = _with_anchors(state, anchors, local)
        with np.errstate(over="ignore", invalid="ignore"):  # the parent refuses numbers of a diverging run
            return _stepped(state, steps, inbox.get(MESSAGES.target), local)
    return state, told(inbox, MESSAGES, local, state.y, state.gamma, state.place, is_exact=state.options["is_exact"])


def _with_anchors(state: State, anchors: AnchorAverages, local: Local) -> State:
    places = np.searchsorted(state.clusters, anchors.clusters)
    cluster_anchor, global_anchor = state.cluster_anchor.copy(), state.global_anchor.copy()
    cluster_anchor[places], global_anchor[places] = anchors.cluster_average, anchors.global_average
    state = replace(state, cluster_anchor=cluster_anchor, global_anchor=global_anchor)
    return replace(state, gradient=_gradient_at_anchor(state, local))


def _gradient_at_anchor(state: State, local: Local) -> Array:
    """(n, d) grad f_i(x_i) + alpha_j gamma_i (x_i - xbar) + (1-alpha_j) gamma_i (x_i - xbar_j)."""
    assert state.parameters is not None  # noqa: S101 - the parameters come first
    alpha, gamma = state.parameters.alpha[state.place][:, None], state.gamma[:, None]
    pull = alpha * (state.x - state.global_anchor[state.place]) + (1 - alpha) * (state.x - state.cluster_anchor[state.place])
    return local.problem.gradient(state.x) + gamma * pull


def _stepped(state: State, steps: Steps, target: Target | None, local: Local) -> tuple[State, Sequence[Message]]:
    """Advances the clusters in `steps`: one averaging iteration for those with a target, then local ones. Sends what is requested."""
    assert state.parameters is not None  # noqa: S101 - as above
    places = np.searchsorted(state.clusters, steps.clusters)
    n_local = np.zeros(state.clusters.size, dtype=np.int64)
    n_local[places] = steps.until - state.at[places]
    run = _Run(state, state.parameters, local)
    if target is not None:
        averaging = np.searchsorted(state.clusters, target.clusters)
        run.average(averaging, target.target)
        n_local[averaging] -= 1
    run.descend(n_local)
    at = state.at.copy()
    at[places] = steps.until
    new_anchors = _users_of(state, places[steps.wanted == ANCHOR])
    x = state.x
    if new_anchors.size:
        x = x.copy()
        x[new_anchors] = run.y[new_anchors]
    replies: list[Message] = []
    is_exact = state.options["is_exact"]
    if (asked := _users_of(state, places[steps.wanted == THETA])).size:
        theta = terms(run.theta(asked), state.gamma[asked], is_exact=is_exact)
        replies.append(MESSAGES.models(theta, users=_unless_all(asked, local)))
    if new_anchors.size:
        anchors = terms(x[new_anchors], state.gamma[new_anchors], is_exact=is_exact)
        replies.append(Anchors(anchors, users=_unless_all(new_anchors, local)))
    return replace(state, x=x, y=run.y, z=run.z, at=at), replies


def _users_of(state: State, places: Indices) -> Indices:
    return np.flatnonzero(np.isin(state.place, places))


def _unless_all(users: Indices, local: Local) -> Indices | None:
    return None if users.size == local.n_own else users


class _Run:
    def __init__(self, state: State, parameters: Parameters, local: Local) -> None:
        self.y, self.z = state.y.copy(), state.z.copy()
        self._state, self._p, self._local = state, parameters, local
        self._at = state.at.copy()
        names = ("eta", "a1", "a2", "b1", "b2")
        self._eta, self._a1, self._a2, self._b1, self._b2 = (float(getattr(parameters, name)[0]) for name in names)
        coins = state.options["coins"]
        self._recorded = None if coins is None else recorded_rows(coins, local.numbers)

    def theta(self, users: Indices | slice) -> Array:
        """(n, d) a1 z + a2 x + (1-a1-a2) y."""
        return self._a1 * self.z[users] + self._a2 * self._state.x[users] + (1 - self._a1 - self._a2) * self.y[users]

    def average(self, places: Indices, targets: Array) -> None:
        """An iteration with xi_0 = 1 or xi_j = 1 for the clusters at `places`: (4.1) with what `targets` (m, d) subtract."""
        state, c = self._state, self._state.clusters.size
        weight, share, shift = np.zeros(c), np.zeros(c), np.zeros((c, self.y.shape[1]))
        for place, target in zip(places.tolist(), targets, strict=True):
            weight[place], share[place], subtracted = self._pull(place)
            shift[place] = target - subtracted
        users = _users_of(state, places)
        own, x = state.place[users], state.x[users]
        theta = self.theta(users)
        difference = share[own][:, None] * (theta - x) - shift[own]
        estimate = state.gradient[users] + (state.gamma[users] * weight[own])[:, None] * difference
        self.y[users], self.z[users] = self._moved(theta, self.z[users], estimate)
        self._at[places] += 1

    def _pull(self, place: int) -> tuple[float, float, Array]:
        """(weight, share, subtracted at x): the term is gamma_i weight (share (theta_i - x_i) - (target - subtracted))."""
        p, state, at = self._p, self._state, int(self._at[place])
        p0, pj, tau, alpha = (float(values[place]) for values in (p.p0, p.p, p.tau, p.alpha))
        if self._operation(place, at) == GLOBAL:
            subtracted = combined(alpha, tau, state.cluster_anchor[place], state.global_anchor[place])
            return 1 / p0, alpha + tau * (1 - alpha), subtracted
        return (1 - tau) * (1 - alpha) / ((1 - p0) * pj), 1.0, state.cluster_anchor[place]

    def _operation(self, place: int, at: int) -> int:
        p, clusters = self._p, self._state.clusters
        schedule = schedule_by(self._local.seed, float(p.p0[0]), p.p, clusters, self._state.options["coins"])
        return int(schedule.operations(int(clusters[place]), at, at + 1)[0])

    def _moved(self, theta: Array, z: Array, estimate: Array) -> tuple[Array, Array]:
        """y and z after an iteration; (b2/eta)(y - theta) is -b2 g."""
        return theta - self._eta * estimate, self._b1 * z + (1 - self._b1) * theta - self._b2 * estimate

    def descend(self, n_local: Indices) -> None:
        """`n_local` (c,) iterations with xi_0 = xi_j = 0."""
        n_of_user = n_local[self._state.place]
        done = 0
        for level in distinct(n_local[n_local > 0]).tolist():
            self._descend_together(np.flatnonzero(n_of_user >= level), done, level)
            done = level

    def _descend_together(self, users: Indices, start: int, stop: int) -> None:
        """Local iterations `start` to `stop` of this task, for users that all make them."""
        state, problem = self._state, self._local.problem
        listed = _unless_all(users, self._local)
        own = state.place[users]
        scale = (1 / ((1 - self._p.p0) * (1 - self._p.p)))[own][:, None]
        x, y, z, gradient = (values[users] for values in (state.x, self.y, self.z, state.gradient))
        anchored, rest = self._a2 * x, 1 - self._a1 - self._a2
        for step in range(start, stop):
            rows = self._rows(users, self._at[own] + step)
            theta = self._a1 * z + anchored + rest * y
            estimate = problem.row_gradient(theta, rows, listed) - problem.row_gradient(x, rows, listed)
            estimate *= scale
            estimate += gradient
            y, z = self._moved(theta, z, estimate)
        self.y[users], self.z[users] = y, z

    def _rows(self, users: Indices, iterations: Indices) -> Indices:
        if self._recorded is not None:
            return self._recorded[iterations, users]
        return drawn_rows(self._state.keys[users], iterations, self._local.problem.n_rows[users])


CLIENT = ClientHalf(init=init, step=step)
