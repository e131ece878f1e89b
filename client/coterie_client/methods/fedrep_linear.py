"""Client half of `fedrep_linear`: for each user, its head by least squares or gradient steps, then one gradient step on B."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.streams import stream
from coterie.experiment.config import Experiment
from coterie.methods.fedrep_linear import (
    AskMoments,
    Config,
    FinalRepresentation,
    Moments,
    Representation,
    Scores,
    SharedHead,
    UpdatedHead,
    UpdatedRepresentation,
)
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local


@dataclass(frozen=True)
class State:
    heads: Array  # (n_own, k)
    options: Mapping[str, Any]  # of the stage


def allows(options: Mapping[str, Any], experiment: Experiment, n_members: int) -> bool:  # noqa: ARG001
    """Only the experiment's options, which decide whether heads are sent."""
    return bool(dict(options) == experiment.method.model_dump(mode="json"))


def init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:  # noqa: ARG001
    return State(np.zeros((local.n_own, options["k"])), dict(options))


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    config = Config.model_validate(state.options)
    if AskMoments in inbox:
        return state, [Moments(_moments(config, inbox, local))]
    if Representation in inbox:
        with np.errstate(over="ignore", invalid="ignore"):  # the receiver reports divergence, with user and round
            return _update(state, config, inbox, local)
    if FinalRepresentation in inbox:
        return _judge(state, config, inbox, local)
    return state, []


def _moments(config: Config, inbox: Inbox, local: Local) -> Array:
    """Z_i = (1/m) sum_j y_j^2 x_j x_j', upper triangles (n_own, d(d+1)/2)."""
    rows = []
    for position in range(local.n_own):
        x, y = _batch(config, position, inbox, local)
        weighted = x * (y * y)[:, None]
        z = np.einsum("jp,jq->pq", weighted, x) / len(y)
        rows.append(z[np.triu_indices(x.shape[1])])
    return np.array(rows)


def _update(state: State, config: Config, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    """w_i, then B_i = B - eta grad_B f_i(w_i, B), of the users of this round."""
    sent = inbox[Representation]
    users: Indices = np.arange(local.n_own) if sent.users is None else sent.users
    b = np.ascontiguousarray(sent.b.T)
    heads, updated = state.heads.copy(), np.empty((users.size, *sent.b.shape))
    shared = inbox[SharedHead].w if config.heads == "shared" else None
    for row, position in enumerate(users.tolist()):
        x, y = _batch(config, position, inbox, local)
        features = np.einsum("jp,pk->jk", x, b)
        w = _head(config, features, y, heads[position], shared)
        heads[position] = w
        updated[row] = (b - config.eta * gradient(x, features, y, w)).T
        if shared is not None:
            heads[position] = shared - config.head_eta * _head_gradient(features, y, shared)
    answers: list[Message] = [UpdatedRepresentation(updated, users=users)]
    if shared is not None:
        answers.append(UpdatedHead(heads[users], users=users))
    return replace(state, heads=heads), answers


def _head(config: Config, features: Array, y: Array, before: Array, shared: Array | None) -> Array:
    """The head for the step on the representation."""
    if shared is not None:
        return shared
    if config.heads == "exact":
        return exact_head(features, y)
    w = before
    for _ in range(config.head_steps):
        step: Array = config.head_eta * _head_gradient(features, y, w)
        w = w - step
    return w


def exact_head(features: Array, y: Array) -> Array:
    """(k,) argmin_w |y - features w|, the smallest of several; features (m, k)."""
    return np.asarray(np.linalg.lstsq(features, y, rcond=None)[0], dtype=np.float64)


def gradient(x: Array, features: Array, y: Array, w: Array) -> Array:
    """(d, k) grad_B f(w, B) = -(1/m) X'(y - XBw) w', for X (m, d) and features XB (m, k)."""
    residual = y - np.einsum("jk,k->j", features, w)
    step: Array = -np.einsum("jp,j->p", x, residual)[:, None] * w / len(y)
    return step


def _head_gradient(features: Array, y: Array, w: Array) -> Array:
    """(k,) grad_w f(w, B)."""
    residual = y - np.einsum("jk,k->j", features, w)
    slope: Array = -np.einsum("jk,j->k", features, residual) / len(y)
    return slope


def _batch(config: Config, position: int, inbox: Inbox, local: Local) -> tuple[Array, Array]:
    """A user's rows (m, d) and targets (m,) of this round."""
    user = local.users[position]
    m = config.batch_rows or len(user.target)
    if config.batch == "fresh" and local.fresh is not None:
        return local.fresh(position, inbox.round, m)
    if config.batch_rows is None or m >= len(user.target):
        return user.features, user.target
    if config.batch == "fixed":
        return user.features[:m], user.target[:m]
    chosen = np.sort(stream(local.seed, f"rows of {inbox.stage}", user.name, inbox.round).order(len(user.target))[:m])
    return user.features[chosen], user.target[chosen]


def _judge(state: State, config: Config, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    """Heads for the final representation, fitted to all of each user's own rows unless they are shared, and their losses."""
    shared = inbox[SharedHead].w if config.heads == "shared" else None
    b = np.ascontiguousarray(inbox[FinalRepresentation].b.T)
    heads = state.heads.copy()
    loss, error = np.empty(local.n_own), np.full(local.n_own, np.nan)
    for position, user in enumerate(local.users):
        features = np.einsum("jp,pk->jk", user.features, b)
        heads[position] = exact_head(features, user.target) if shared is None else shared
        loss[position] = _mean_square(features, user.target, heads[position]) / 2
        if len(user.test_target):
            error[position] = _mean_square(np.einsum("jp,pk->jk", user.test_features, b), user.test_target, heads[position])
    n_test = np.array([len(user.test_target) for user in local.users], dtype=np.int64)
    return replace(state, heads=heads), [Scores(loss, error, n_test)]


def _mean_square(features: Array, y: Array, w: Array) -> float:
    residual = y - np.einsum("jk,k->j", features, w)
    return float(np.einsum("j,j->", residual, residual) / len(y))


def private(state: State) -> Sequence[str]:
    """Heads, where each user has its own."""
    return () if state.options["heads"] == "shared" else ("heads",)


CLIENT = ClientHalf(allows=allows, init=init, step=step, private=private)
