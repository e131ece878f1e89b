"""Client half of partial sharing, for all methods of local updates (see `coterie.families.partial`).

A user's private tensors are its state: they persist from round to round and across restarts, and no message has a place for them. So does
what a method's own local update keeps (`coterie_client.interface.local_update`), which the stage names; by default an update is phases of
training. A host trains its users one after another, each from its own tensors, rows and random streams, so that a user's numbers do not
depend on who shares its host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.model import TensorInfo, named_tensors, shared_tensors, stacked
from coterie.families.partial import (
    AS_IS,
    AskScores,
    AskStart,
    Chosen,
    Coins,
    Delivery,
    Scores,
    Shared,
    Single,
    Start,
    TrainHead,
    Training,
    TrainingLoss,
    Trial,
    Updated,
    Variate,
    VariateMove,
)
from coterie.registry import is_method
from coterie.text.quoting import quoted
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_client.interface.local_update import CHOICE, PHASES, LocalUpdate, local_update
from coterie_client.learning import Draw, Fitted, Learner, Phase, Rows, Tensors
from coterie_client.problems.descent import ConvexLearner


@dataclass(frozen=True)
class State:
    """What the users of a host keep."""

    private: Single  # (n_own, p) each user's private float tensors, one after the other
    private_counts: Indices  # (n_own, c) and the integer ones
    options: Mapping[str, Any]  # of the stage
    delivered: Single | None = None  # (shared,) the tensors that came to stay
    delivered_counts: Indices | None = None
    kept: dict[str, NDArray[Any]] = field(default_factory=dict)  # (n_own, ...) by name, what the method's own update keeps


def allows(options: Mapping[str, Any], experiment: Experiment, n_members: int) -> bool:  # noqa: ARG001
    """Those of the experiment: which tensors are shared is among them."""
    wanted = experiment.method
    return isinstance(wanted, Training) and bool(dict(options) == json.loads(json.dumps(wanted.client_options())))


def init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:  # noqa: ARG001
    """A stage starts: every user has the model that the seed gives."""
    split, initial = _Split(local, options), _learner(local).initial()
    weights, counts = split.flat(initial, split.private)
    started = _update(options).start(initial, options.get("settings", {}))
    kept = {name: np.repeat(array[None], local.n_own, axis=0) for name, array in started.items()}
    return State(np.tile(weights, (local.n_own, 1)), np.tile(counts, (local.n_own, 1)), dict(options), kept=kept)


@np.errstate(over="ignore", invalid="ignore")  # what has run away is told after training, or by the parent that is sent it
def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    split = _Split(local, state.options)
    replies: list[Message] = []
    if (asked := inbox.get(AskStart)) is not None:
        weights, counts = split.flat(split.initial(_learner(local)), split.shared)
        users = _listed(asked.users, local)
        replies.append(Start(np.tile(weights, (users.size, 1)), np.tile(counts, (users.size, 1)), users=users))
    if (sent := inbox.get(Shared)) is not None:
        state, trained = _train(state, sent, inbox, local, split)
        replies += trained
    if (kept := inbox.get(Delivery)) is not None:
        state = _kept(state, kept, local, split)
        if state.options.get("adaptation"):
            state = _adapted(state, inbox, local, split)
        if _update(state.options).choose is not None:
            state = _chosen(state, kept.weights, kept.counts, inbox, local, split)
            replies.append(Chosen(state.kept[CHOICE]))
    if TrainHead in inbox:
        state, losses = _train_heads(state, inbox, local, split)
        replies.append(TrainingLoss(losses))
    if AskScores in inbox:
        replies.append(_scores(state, inbox, local, split))
    return state, replies


def travelling(tensors: Sequence[TensorInfo], options: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    """The tensors that the options of a stage share."""
    how = {"statistics_travel": options["statistics_travel"], "private_layers": options.get("private_layers", ())}
    return shared_tensors(tensors, options["sharing"], **how)


class _Split:
    """Which tensors travel, and how tensors become the rows of messages and of the state."""

    def __init__(self, local: Local, options: Mapping[str, Any]) -> None:
        tensors = _learner(local).tensors
        self._dtype = local.precision.model
        self.returned = travelling(tensors, options)
        self._n_models: int | None = options.get("n_models")  # None: what is sent is like what is returned
        self.shared = self.returned if self._n_models is None else stacked(self.returned, self._n_models)
        names = {tensor.name for tensor in self.shared}
        self.private = tuple(tensor for tensor in tensors if tensor.name not in names)
        self.float_shared = tuple(tensor for tensor in self.shared if not tensor.is_integer)

    def initial(self, learner: Learner) -> Tensors:
        """What the seed gives, of several models by as many seeds."""
        if self._n_models is None:
            return learner.initial()
        models = [learner.initial(number) for number in range(self._n_models)]
        return {name: np.stack([model[name] for model in models]) for name in models[0]}

    @staticmethod
    def flat(tensors: Tensors, listed: Sequence[TensorInfo]) -> tuple[Single, Indices]:
        """The listed tensors as numbers and counts, one after the other."""
        weights = [tensors[tensor.name].reshape(-1) for tensor in listed if not tensor.is_integer]
        counts = [tensors[tensor.name].reshape(-1) for tensor in listed if tensor.is_integer]
        return np.concatenate([np.zeros(0, np.float32), *weights]), np.concatenate([np.zeros(0, np.int64), *counts])

    def floats(self, weights: Single) -> dict[str, NDArray[Any]]:
        """Numbers like the shared float tensors, by the names of these."""
        return named_tensors(weights.astype(self._dtype, copy=False), np.zeros(0, np.int64), self.float_shared)

    def parameters(self, weights: Single) -> dict[str, NDArray[Any]]:
        """Those of them that gradients move."""
        named = self.floats(weights)
        return {tensor.name: named[tensor.name] for tensor in self.float_shared if not tensor.is_statistic}

    def model(self, state: State, position: int, weights: Single, counts: Indices) -> dict[str, NDArray[Any]]:
        """All tensors of a user: the shared ones as given, its private ones."""
        private = named_tensors(state.private[position], state.private_counts[position], self.private)
        return {**named_tensors(weights.astype(self._dtype, copy=False), counts, self.shared), **private}


def _kept(state: State, kept: Delivery, local: Local, split: _Split) -> State:
    """What was delivered stays; where more comes than is shared, users start their own part from it."""
    delivers = state.options.get("delivers", state.options["sharing"])
    if delivers == state.options["sharing"]:
        return replace(state, delivered=kept.weights, delivered_counts=kept.counts)
    came = shared_tensors(_learner(local).tensors, delivers, statistics_travel=state.options["statistics_travel"])
    named = {**_learner(local).initial(), **named_tensors(kept.weights, kept.counts, came)}
    weights, counts = split.flat(named, split.shared)
    own, own_counts = split.flat(named, split.private)
    private, private_counts = np.tile(own, (local.n_own, 1)), np.tile(own_counts, (local.n_own, 1))
    return replace(state, private=private, private_counts=private_counts, delivered=weights, delivered_counts=counts)


def _adapted(state: State, inbox: Inbox, local: Local, split: _Split) -> State:
    """Users keep what they make of the delivered tensors: it is their model."""
    weights, counts = _delivered(state)
    models = [_adaptation(state, inbox, local, position, split.model(state, position, weights, counts)) for position in range(local.n_own)]
    return replace(state, kept={name: np.stack([model[name] for model in models]) for name in models[0]})


def _adaptation(state: State, inbox: Inbox, local: Local, position: int, model: Tensors) -> Tensors:
    phases = [Phase(**phase) for phase in state.options.get("adaptation", [])]
    return _fit(inbox, local, position, model, phases, "adaptation").tensors if phases else model


def _train(state: State, sent: Shared, inbox: Inbox, local: Local, split: _Split) -> tuple[State, list[Message]]:
    """A local update of each user drawn, one after another."""
    users = _listed(sent.users, local)
    private, private_counts = state.private.copy(), state.private_counts.copy()
    kept = {name: rows.copy() for name, rows in state.kept.items()}
    n_weights, n_counts = (sum(tensor.size for tensor in split.returned if tensor.is_integer == kind) for kind in (False, True))
    weights, counts = np.empty((users.size, n_weights), local.precision.model), np.empty((users.size, n_counts), np.int64)
    losses = np.empty(users.size)
    phases = [Phase(**phase) for phase in state.options["phases"]]
    update, settings = _update(state.options).update, state.options.get("settings", {})
    beside = inbox.get(Variate)
    if beside is not None:
        settings = {**settings, "variate": split.parameters(beside.weights)}
    if (coins := inbox.get(Coins)) is not None:
        settings = {**settings, "coins": coins.lengths.tolist()}
    moves = np.empty((users.size, n_weights if beside is not None else 0), weights.dtype)
    for row, position in enumerate(users.tolist()):
        model, fit = split.model(state, position, sent.weights, sent.counts), partial(_fit, inbox, local, position)
        moved = update(model, _of_user(state.kept, position), phases, settings, fit)
        losses[row] = moved.loss
        weights[row], counts[row] = split.flat(moved.tensors, split.returned)
        private[position], private_counts[position] = split.flat(moved.tensors, split.private)
        if beside is not None:
            moves[row], _ = split.flat({**split.floats(np.zeros(n_weights)), **moved.variate}, split.float_shared)
        for name, rows in kept.items():
            rows[position] = moved.kept[name]
    state = replace(state, private=private, private_counts=private_counts, kept=kept)
    updated: list[Message] = [Updated(weights, counts, users=users)] if split.shared else []
    if beside is not None:
        updated.append(VariateMove(moves, users=users))
    if CHOICE in kept:
        updated.append(Chosen(kept[CHOICE][users], users=users))
    return state, [*updated, TrainingLoss(losses, users=users)]


def _chosen(state: State, weights: Single, counts: Indices, inbox: Inbox, local: Local, split: _Split) -> State:
    """Of several models each user keeps the number of its own."""
    choose = _update(state.options).choose
    if choose is None:
        return state
    kept = {name: rows.copy() for name, rows in state.kept.items()}
    for position in range(local.n_own):
        fit, own = partial(_fit, inbox, local, position), _of_user(state.kept, position)
        for name, array in choose(split.model(state, position, weights, counts), own, fit).items():
            kept[name][position] = array
    return replace(state, kept=kept)


def _train_heads(state: State, inbox: Inbox, local: Local, split: _Split) -> tuple[State, NDArray[np.float64]]:
    """New users train their private tensors on the delivered ones."""
    weights, counts = _delivered(state)
    private, private_counts = state.private.copy(), state.private_counts.copy()
    losses = np.empty(local.n_own)
    phases = [Phase(**phase) for phase in state.options["phases"]]
    for position in range(local.n_own):
        fitted = _fit(inbox, local, position, split.model(state, position, weights, counts), phases)
        losses[position] = fitted.loss
        private[position], private_counts[position] = split.flat(fitted.tensors, split.private)
    return replace(state, private=private, private_counts=private_counts), losses


def _scores(state: State, inbox: Inbox, local: Local, split: _Split) -> Scores:
    """Every user judges its model, as it is or fine-tuned; what comes of fine-tuning, and of a trial's adaptation, is forgotten."""
    sent = inbox.get(Trial)
    weights, counts = (sent.weights, sent.counts) if sent is not None else _delivered(state)
    if sent is not None:
        state = _chosen(state, weights, counts, inbox, local, split)
    modes = inbox[AskScores].modes
    loss, metric = np.full((local.n_own, modes.size), np.nan), np.full((local.n_own, modes.size), np.nan)
    for position, user in enumerate(local.users):
        if not len(user.test_features):
            continue
        fit = partial(_fit, inbox, local, position)
        model = personal_model(state, position, split.model(state, position, weights, counts), _learner(local).tensors)
        if sent is not None:
            model = _adaptation(state, inbox, local, position, model)
        for place, mode in enumerate(modes.tolist()):
            tensors = model
            if mode != AS_IS:
                phase = Phase(**state.options["fine_tuning"][str(mode)])
                tensors = fit(model, [phase], "fine-tuning").tensors
            held_out = Rows(user.test_features, user.test_target, user.name)
            loss[position, place], metric[position, place] = _learner(local).judge(tensors, held_out)
            if np.isnan(metric[position, place]):
                raise RunError(
                    f"user {user.name!r} in round {inbox.round}: what its model says of held-out rows is nan, want numbers: "
                    "a smaller learning rate may help"
                )
    return Scores(loss, metric)


def personal_model(state: State, position: int, model: Tensors, tensors: Sequence[TensorInfo]) -> Tensors:
    """The model that a user judges by, given `model` of the shared tensors and its private ones; of a trial's before any adaptation."""
    parameters = {tensor.name for tensor in tensors if not tensor.is_statistic}
    return _update(state.options).personal(model, _of_user(state.kept, position), parameters)


def _update(options: Mapping[str, Any]) -> LocalUpdate:
    """The local update of the stage's method: phases alone where it has none of its own."""
    name = options.get("update")
    if name is None:  # of a run that is finished
        return PHASES
    if not is_method(name):
        raise ProtocolError(f"the parent asks for the local update of method {quoted(name)}, which is unknown")
    return local_update(name)


def _of_user(kept: Tensors, position: int) -> Tensors:
    return {name: rows[position] for name, rows in kept.items()}


def _fit(inbox: Inbox, local: Local, position: int, tensors: Tensors, phases: Sequence[Phase], purpose: str = "training") -> Fitted:
    user = local.users[position]
    draw = Draw(local.seed, user.name, inbox.round, f"{purpose} of {inbox.stage}")
    return _learner(local).fit(tensors, Rows(user.features, user.target, user.name), phases, draw)


def _delivered(state: State) -> tuple[Single, Indices]:
    if state.delivered is None or state.delivered_counts is None:
        raise ProtocolError("users are to work on shared tensors that have not been delivered to them")
    return state.delivered, state.delivered_counts


def _listed(users: Indices | None, local: Local) -> Indices:
    return np.arange(local.n_own) if users is None else users


def _learner(local: Local) -> Learner:
    """The users' network, or what descends their convex losses."""
    return ConvexLearner(local.problem, local.seed) if local.network is None else local.network


CLIENT = ClientHalf(allows=allows, init=init, step=step, keeps_models=True)
