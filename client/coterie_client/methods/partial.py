"""Client half of partial sharing, for all methods that train networks (see `coterie.methods.partial`).

A user's private tensors are its state: they persist from round to round and across restarts, and no message has a place for them. A
host trains its users one after another, each from its own tensors, rows and random streams, so that a user's numbers do not depend on who
shares its host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ProtocolError, RunError
from coterie.messages import Message
from coterie.methods.partial import (
    AS_IS,
    AskScores,
    AskStart,
    Delivery,
    Scores,
    Shared,
    Single,
    Start,
    TrainHead,
    TrainingLoss,
    Trial,
    Updated,
)
from coterie.model import TensorInfo, named_tensors, shared_tensors
from coterie_client.method import Inbox, Local
from coterie_client.nets import Draw, Fitted, Phase, Rows, TorchNetwork

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class State:
    """What the users of a host keep."""

    private: Single  # (n_own, p) each user's private float tensors, one after the other
    private_counts: Indices  # (n_own, c) and the integer ones
    options: Mapping[str, Any]  # of the stage
    delivered: Single | None = None  # (shared,) the tensors that came to stay
    delivered_counts: Indices | None = None


class _Partial:
    def init(self, options: Mapping[str, Any], local: Local, previous: State | None) -> State:  # noqa: ARG002
        """A stage starts: every user has the model that the seed gives."""
        split = _Split(local, options)
        weights, counts = split.flat(_network(local).initial(), split.private)
        return State(np.tile(weights, (local.n_own, 1)), np.tile(counts, (local.n_own, 1)), dict(options))

    def step(self, state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
        split = _Split(local, state.options)
        replies: list[Message] = []
        if (asked := inbox.get(AskStart)) is not None:
            weights, counts = split.flat(_network(local).initial(), split.shared)
            users = _listed(asked.users, local)
            replies.append(Start(np.tile(weights, (users.size, 1)), np.tile(counts, (users.size, 1)), users=users))
        if (sent := inbox.get(Shared)) is not None:
            state, trained = _train(state, sent, inbox, local, split)
            replies += trained
        if (kept := inbox.get(Delivery)) is not None:
            state = _kept(state, kept, local, split)
        if TrainHead in inbox:
            state, losses = _train_heads(state, inbox, local, split)
            replies.append(TrainingLoss(losses))
        if AskScores in inbox:
            replies.append(_scores(state, inbox, local, split))
        return state, replies


class _Split:
    """Which tensors travel, and how tensors become the rows of messages and of the state."""

    def __init__(self, local: Local, options: Mapping[str, Any]) -> None:
        tensors = _network(local).tensors
        self.shared = shared_tensors(tensors, options["sharing"], statistics_travel=options["statistics_travel"])
        names = {tensor.name for tensor in self.shared}
        self.private = tuple(tensor for tensor in tensors if tensor.name not in names)

    @staticmethod
    def flat(tensors: Tensors, listed: Sequence[TensorInfo]) -> tuple[Single, Indices]:
        """The listed tensors as float32 numbers and counts, one after the other."""
        weights = [tensors[tensor.name].reshape(-1) for tensor in listed if not tensor.is_integer]
        counts = [tensors[tensor.name].reshape(-1) for tensor in listed if tensor.is_integer]
        return np.concatenate([np.zeros(0, np.float32), *weights]), np.concatenate([np.zeros(0, np.int64), *counts])

    def model(self, state: State, position: int, weights: Single, counts: Indices) -> dict[str, NDArray[Any]]:
        """All tensors of a user: the shared ones as given, its private ones."""
        private = named_tensors(state.private[position], state.private_counts[position], self.private)
        return {**named_tensors(weights, counts, self.shared), **private}


def _kept(state: State, kept: Delivery, local: Local, split: _Split) -> State:
    """What was delivered stays; where more comes than is shared, users start their own part from it."""
    delivers = state.options.get("delivers", state.options["sharing"])
    if delivers == state.options["sharing"]:
        return replace(state, delivered=kept.weights, delivered_counts=kept.counts)
    came = shared_tensors(_network(local).tensors, delivers, statistics_travel=state.options["statistics_travel"])
    named = {**_network(local).initial(), **named_tensors(kept.weights, kept.counts, came)}
    weights, counts = split.flat(named, split.shared)
    own, own_counts = split.flat(named, split.private)
    private, private_counts = np.tile(own, (local.n_own, 1)), np.tile(own_counts, (local.n_own, 1))
    return replace(state, private=private, private_counts=private_counts, delivered=weights, delivered_counts=counts)


def _train(state: State, sent: Shared, inbox: Inbox, local: Local, split: _Split) -> tuple[State, list[Message]]:
    """A local update of each user drawn, one after another."""
    users = _listed(sent.users, local)
    private, private_counts = state.private.copy(), state.private_counts.copy()
    n_weights, n_counts = sent.weights.size, sent.counts.size
    weights, counts = np.empty((users.size, n_weights), np.float32), np.empty((users.size, n_counts), np.int64)
    losses = np.empty(users.size)
    phases = [Phase(**phase) for phase in state.options["phases"]]
    for row, position in enumerate(users.tolist()):
        fitted = _fit(split.model(state, position, sent.weights, sent.counts), phases, position, inbox, local)
        losses[row] = fitted.loss
        weights[row], counts[row] = split.flat(fitted.tensors, split.shared)
        private[position], private_counts[position] = split.flat(fitted.tensors, split.private)
    state = replace(state, private=private, private_counts=private_counts)
    updated: list[Message] = [Updated(weights, counts, users=users)] if split.shared else []
    return state, [*updated, TrainingLoss(losses, users=users)]


def _train_heads(state: State, inbox: Inbox, local: Local, split: _Split) -> tuple[State, NDArray[np.float64]]:
    """New users train their private tensors on the delivered ones."""
    weights, counts = _delivered(state)
    private, private_counts = state.private.copy(), state.private_counts.copy()
    losses = np.empty(local.n_own)
    phases = [Phase(**phase) for phase in state.options["phases"]]
    for position in range(local.n_own):
        fitted = _fit(split.model(state, position, weights, counts), phases, position, inbox, local)
        losses[position] = fitted.loss
        private[position], private_counts[position] = split.flat(fitted.tensors, split.private)
    return replace(state, private=private, private_counts=private_counts), losses


def _scores(state: State, inbox: Inbox, local: Local, split: _Split) -> Scores:
    """Every user judges its model, as it is or fine-tuned; what fine-tuning gives is forgotten."""
    sent = inbox.get(Trial)
    weights, counts = (sent.weights, sent.counts) if sent is not None else _delivered(state)
    modes = inbox[AskScores].modes
    loss, accuracy = np.full((local.n_own, modes.size), np.nan), np.full((local.n_own, modes.size), np.nan)
    for position, user in enumerate(local.users):
        if not len(user.test_target):
            continue
        model = split.model(state, position, weights, counts)
        for place, mode in enumerate(modes.tolist()):
            tensors = model
            if mode != AS_IS:
                phase = Phase(**state.options["fine_tuning"][str(mode)])
                tensors = _fit(model, [phase], position, inbox, local, "fine-tuning").tensors
            loss[position, place], accuracy[position, place] = _network(local).judge(tensors, Rows(user.test_features, user.test_target))
    return Scores(loss, accuracy)


def _fit(tensors: Tensors, phases: Sequence[Phase], position: int, inbox: Inbox, local: Local, purpose: str = "training") -> Fitted:
    user = local.users[position]
    draw = Draw(local.seed, user.name, inbox.round, f"{purpose} of {inbox.stage}")
    return _network(local).fit(tensors, Rows(user.features, user.target), phases, draw)


def _delivered(state: State) -> tuple[Single, Indices]:
    if state.delivered is None or state.delivered_counts is None:
        raise ProtocolError("users are to work on shared tensors that have not been delivered to them")
    return state.delivered, state.delivered_counts


def _listed(users: Indices | None, local: Local) -> Indices:
    return np.arange(local.n_own) if users is None else users


def _network(local: Local) -> TorchNetwork:
    if not isinstance(local.network, TorchNetwork):
        raise RunError("the host's users have no network, wanted the experiment's model")
    return local.network


CLIENT = _Partial()
