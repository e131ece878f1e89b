"""Client half of partial sharing, for all methods with local updates (see `coterie.families.partial`).

A user's private tensors are its state. They persist between rounds and across restarts, and no message can carry them. The same holds for
what a method's own local update keeps (`coterie_client.interface.local_update`). The stage names this update; the default is phases of
training. A host trains its users one after another, each from its own tensors, rows and random streams. So a user's numbers do not depend
on the other users of its host. Users with convex losses and equally many rows are trained together, if the update allows it: with the same
bits, and without work of Python for each of them. So are users of a stacked network, whose bits differ from those of the loop.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
)
from coterie.registry import is_method
from coterie.text.quoting import quoted
from coterie.wire.messages import Message, Rows, select
from coterie_client.families.returned import Returned
from coterie_client.interface.half import ClientHalf, Inbox, Local, check_rounds
from coterie_client.interface.local_update import PHASES, Context, LocalUpdate, Received, local_update
from coterie_client.learning import Draw, Fitted, Learner, Phase, Tensors
from coterie_client.learning import Rows as UserRows
from coterie_client.learning.private import RowNoise
from coterie_client.problems.descent import ConvexLearner


@dataclass(frozen=True)
class State:
    private: Single  # (n_own, p) each user's private float tensors, concatenated
    private_counts: Indices  # (n_own, c) and its integer ones
    options: Mapping[str, Any]  # of the stage
    delivered: Single | None = None  # (shared,) the delivered tensors
    delivered_counts: Indices | None = None
    kept: dict[str, NDArray[Any]] = field(default_factory=dict)  # (n_own, ...) by name, kept by the method's own update
    n_noised: int = 0  # rounds with noise so far


def allows(options: Mapping[str, Any], experiment: Experiment, n_members: int) -> bool:  # noqa: ARG001
    """Only the experiment's options, which include the names of shared tensors."""
    wanted = experiment.method
    return isinstance(wanted, Training) and bool(dict(options) == json.loads(json.dumps(wanted.client_options())))


def init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:
    """At the start of a stage, every user has the initial model of the seed."""
    split, initial = _Split(local, options), _learner(local).initial()
    weights, counts = split.flat(initial, split.private)
    started = _returned(options).started(_update(options).start(initial, options.get("settings", {})))
    kept = {name: np.repeat(array[None], local.n_own, axis=0) for name, array in started.items()}
    n_noised = 0 if previous is None else previous.n_noised
    return State(np.tile(weights, (local.n_own, 1)), np.tile(counts, (local.n_own, 1)), dict(options), kept=kept, n_noised=n_noised)


@np.errstate(over="ignore", invalid="ignore")  # divergence is reported after training, or by the parent
def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    split, update = _Split(local, state.options), _update(state.options)
    for kind in inbox.messages:
        if kind.method != Shared.method and kind not in update.down:
            raise ProtocolError(f"the parent sends {kind.kind}, which the method's local update does not declare")
    replies: list[Message] = []
    if (asked := inbox.get(AskStart)) is not None:
        weights, counts = split.flat(split.initial(_learner(local)), split.shared)
        users = _listed(asked.users, local)
        replies.append(Start(np.tile(weights, (users.size, 1)), np.tile(counts, (users.size, 1)), users=users))
    if (sent := inbox.get(Shared)) is not None:
        state, trained = _train(state, sent, inbox, local, split, update)
        replies += trained
    if (kept := inbox.get(Delivery)) is not None:
        state = _kept(state, kept, local, split)
        if update.received is not None:
            state, told = _received(state, inbox, local, split, update)
            replies += told
    if TrainHead in inbox:
        state, losses = _train_heads(state, inbox, local, split)
        replies.append(TrainingLoss(losses))
    if AskScores in inbox:
        replies.append(_scores(state, inbox, local, split, update))
    return state, replies


def private(state: State) -> Sequence[str]:
    """Private tensors, and what the method's update keeps without returning it."""
    returns = _update(state.options).returns
    own = [name for name in state.kept if not returns(name)]
    return ("private", "kept") if len(own) == len(state.kept) else ("private", *(f"kept.{name}" for name in own))


def travelling(tensors: Sequence[TensorInfo], options: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    """The tensors that the options of a stage share."""
    how = {"statistics_travel": options["statistics_travel"], "private_layers": options.get("private_layers", ())}
    return shared_tensors(tensors, options["sharing"], **how)


class _Split:
    """The shared and the private tensors, and their conversion to rows of messages and of the state."""

    def __init__(self, local: Local, options: Mapping[str, Any]) -> None:
        tensors = _learner(local).tensors
        self._dtype = local.precision.model
        self.returned = travelling(tensors, options)
        self._n_models: int | None = options.get("n_models")  # None: the server sends one model
        self.shared = self.returned if self._n_models is None else stacked(self.returned, self._n_models)
        names = {tensor.name for tensor in self.shared}
        self.private = tuple(tensor for tensor in tensors if tensor.name not in names)
        self.float_shared = tuple(tensor for tensor in self.shared if not tensor.is_integer)

    def initial(self, learner: Learner) -> Tensors:
        """The initial tensors of the seed. With several models, each has its own seed."""
        if self._n_models is None:
            return learner.initial()
        models = [learner.initial(number) for number in range(self._n_models)]
        return {name: np.stack([model[name] for model in models]) for name in models[0]}

    @staticmethod
    def flat(tensors: Tensors, listed: Sequence[TensorInfo]) -> tuple[Single, Indices]:
        """The listed tensors, concatenated: floats and integers. First axes that the tensors have beyond their own stay."""
        found: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
        for tensor in listed:
            array = tensors[tensor.name]
            found[tensor.is_integer].append(array.reshape(*array.shape[: array.ndim - len(tensor.shape)], tensor.size))
        weights, counts = (
            np.concatenate([np.zeros((*(of[0].shape[:-1] if of else ()), 0), dtype), *of], axis=-1)
            for of, dtype in zip(found, (np.float32, np.int64), strict=True)
        )
        return weights, counts

    def floats(self, weights: Single) -> dict[str, NDArray[Any]]:
        """The shared float tensors by name, from concatenated numbers."""
        return named_tensors(weights.astype(self._dtype, copy=False), np.zeros(0, np.int64), self.float_shared)

    def packed(self, tensors: Tensors) -> Single:
        """(k, shared) the concatenated shared float tensors of k users, with 0 for missing tensors; without an axis of users k is 1."""
        n_weights = sum(tensor.size for tensor in self.float_shared)
        weights, _ = self.flat({**self.floats(np.zeros(n_weights)), **tensors}, self.float_shared)
        return np.atleast_2d(weights.astype(self._dtype, copy=False))

    def parameters(self, weights: Single) -> dict[str, NDArray[Any]]:
        """As `floats`, without running statistics, which have no gradient."""
        named = self.floats(weights)
        return {tensor.name: named[tensor.name] for tensor in self.float_shared if not tensor.is_statistic}

    def model(self, state: State, users: int | Indices, weights: Single, counts: Indices) -> dict[str, NDArray[Any]]:
        """All tensors of a user: the given shared ones, and its private ones. Those of several users have a first axis of users."""
        private = named_tensors(state.private[users], state.private_counts[users], self.private)
        weights = weights.astype(self._dtype, copy=False)
        if not isinstance(users, int):
            weights, counts = (np.broadcast_to(array, (users.size, array.size)) for array in (weights, counts))
        return {**named_tensors(weights, counts, self.shared), **private}


def _kept(state: State, kept: Delivery, local: Local, split: _Split) -> State:
    """Stores the delivered tensors. If they include private ones, users start their own part from them."""
    delivers = state.options.get("delivers", state.options["sharing"])
    if delivers == state.options["sharing"]:
        return replace(state, delivered=kept.weights, delivered_counts=kept.counts)
    came = shared_tensors(_learner(local).tensors, delivers, statistics_travel=state.options["statistics_travel"])
    named = {**_learner(local).initial(), **named_tensors(kept.weights, kept.counts, came)}
    weights, counts = split.flat(named, split.shared)
    own, own_counts = split.flat(named, split.private)
    private, private_counts = np.tile(own, (local.n_own, 1)), np.tile(own_counts, (local.n_own, 1))
    return replace(state, private=private, private_counts=private_counts, delivered=weights, delivered_counts=counts)


def _context(state: State, model: Tensors, users: int | Indices, inbox: Inbox, local: Local, split: _Split, update: LocalUpdate) -> Context:
    return Context(
        round=inbox.round,
        model=model,
        kept=_of_user(state.kept, users),
        target=_targets(local, users),
        shared={tensor.name for tensor in split.shared},
        phases=_phases(state.options),
        settings=state.options.get("settings", {}),
        fit=partial(_fit, inbox, local, users, noise=_row_noise(inbox, local, users)),
        named=split.parameters,
        packed=split.packed,
        messages={kind: _rows_of(inbox[kind], np.atleast_1d(users)) for kind in update.down if kind in inbox},
    )


def _rows_of(message: Rows, users: Indices) -> Rows:
    """The rows of these users (sorted) of a message. ProtocolError if there are none of one."""
    rows = users if message.users is None else np.flatnonzero(np.isin(message.users, users))
    if message.users is not None and not np.array_equal(message.users[rows], users):
        raise ProtocolError(f"the parent sends {message.kind} to other users than the shared tensors")
    return select(message, rows, None)  # type: ignore[return-value]


class _Beside:
    """Collects the methods' own messages of several users into one message of each kind."""

    def __init__(self, kinds: Sequence[type[Rows]], users: Indices) -> None:
        self._kinds, self._users = kinds, users
        self._fields: dict[type[Rows], dict[str, NDArray[Any]]] = {}

    def put(self, rows: int | Indices, messages: Sequence[Rows]) -> None:
        """Adds the messages of a user, or of several. RunError unless they are what the local update declares."""
        if [type(message) for message in messages] != list(self._kinds):
            found, wanted = (", ".join(kind.__name__ for kind in listed) or "none" for listed in (map(type, messages), self._kinds))
            raise RunError(f"a local update returned the messages {found}, want those that it declares: {wanted}")
        for message in messages:
            fields = self._fields.setdefault(type(message), {})
            for name, _ in message.specs:
                array = getattr(message, name)
                if name not in fields:
                    fields[name] = np.empty((self._users.size, *array.shape[1:]), array.dtype)
                fields[name][rows] = array[0] if isinstance(rows, int) else array

    def together(self) -> list[Message]:
        return [kind(**fields, users=self._users) for kind, fields in self._fields.items()]


def _train(state: State, sent: Shared, inbox: Inbox, local: Local, split: _Split, update: LocalUpdate) -> tuple[State, list[Message]]:
    users = _listed(sent.users, local)
    check_rounds(local, state.n_noised)
    private, private_counts = state.private.copy(), state.private_counts.copy()
    kept = {name: rows.copy() for name, rows in state.kept.items()}
    n_weights, n_counts = (sum(tensor.size for tensor in split.returned if tensor.is_integer == kind) for kind in (False, True))
    weights, counts = np.empty((users.size, n_weights), local.precision.model), np.empty((users.size, n_counts), np.int64)
    returning, keeping = (weights, counts, split.returned), (private, private_counts, split.private)
    losses, beside = np.empty(users.size), _Beside(update.up, users)
    for rows, own in _pieces(users, local, update, _phases(state.options)):
        model = split.model(state, own, sent.weights, sent.counts)
        context = _context(state, model, own, inbox, local, split, update)
        returned = _returned(state.options, None if isinstance(own, int) else own.size)
        moved = returned.moved(update.update(context), (*split.returned, *split.private), context.kept)
        losses[rows] = moved.loss
        for at, (of_all, of_all_counts, listed) in ((rows, returning), (own, keeping)):
            for name, views in named_tensors(of_all, of_all_counts, listed).items():
                views[at] = moved.tensors[name]
        beside.put(rows, moved.messages)
        for name, arrays in kept.items():
            arrays[own] = moved.kept[name]
    state = replace(
        state, private=private, private_counts=private_counts, kept=kept, n_noised=state.n_noised + (local.noised_rounds is not None)
    )
    updated: list[Message] = [Updated(local.returned(weights, sent.weights), counts, users=users)] if split.shared else []
    told = [] if local.noised_rounds is not None else [TrainingLoss(losses, users=users)]  # it has no noise
    return state, [*updated, *beside.together(), *told]


def _pieces(
    users: Indices, local: Local, update: LocalUpdate, phases: Sequence[Phase], *, is_together: bool = True
) -> Iterator[tuple[int, int] | tuple[Indices, Indices]]:
    """The users one after another, or in groups that work together: their places in the list, and their positions."""
    learner, network = _learner(local), local.network
    is_together = is_together and local.row_privacy is None
    if is_together and update.together and isinstance(learner, ConvexLearner):
        yield from ((rows, users[rows]) for rows in learner.alike(users))
    elif is_together and update.together and network is not None and network.is_stacked:
        counts = np.array([len(local.users[i].target) for i in users.tolist()])
        # Updates other than phases may use targets and numbers of steps, which users with equally many rows have in one shape.
        places = [np.arange(users.size)] if update is PHASES else [np.flatnonzero(counts == m) for m in np.unique(counts)]
        yield from ((rows[part], users[rows[part]]) for rows in places for part in network.stacks(counts[rows], phases))
    else:
        yield from enumerate(users.tolist())


def _targets(local: Local, users: int | Indices) -> NDArray[Any]:
    """The users' targets. Those of several users with unequal numbers of rows are padded with nan."""
    if isinstance(users, int):
        return local.users[users].target
    listed = [local.users[i].target for i in users.tolist()]
    found = np.full((len(listed), max(len(target) for target in listed)), np.nan)
    for row, target in zip(found, listed, strict=True):
        row[: len(target)] = target
    return found


def _received(state: State, inbox: Inbox, local: Local, split: _Split, update: LocalUpdate) -> tuple[State, list[Message]]:
    """Users process the delivered tensors, and keep the result."""
    everyone, (weights, counts) = np.arange(local.n_own), _delivered(state)
    listed, beside = [], _Beside(update.told, everyone)
    for position in everyone.tolist():
        model = split.model(state, position, weights, counts)
        received = _on_receipt(_context(state, model, position, inbox, local, split, update), update, _returned(state.options))
        listed.append(received.kept)
        beside.put(position, received.messages)
    return replace(state, kept={name: np.stack([kept[name] for kept in listed]) for name in listed[0]}), beside.together()


def _on_receipt(context: Context, update: LocalUpdate, returned: Returned) -> Received:
    return Received(context.kept) if update.received is None else returned.received(update.received(context))


def _train_heads(state: State, inbox: Inbox, local: Local, split: _Split) -> tuple[State, NDArray[np.float64]]:
    weights, counts = _delivered(state)
    private, private_counts = state.private.copy(), state.private_counts.copy()
    losses = np.empty(local.n_own)
    phases = _phases(state.options)
    for position in range(local.n_own):
        fitted = _fit(inbox, local, position, split.model(state, position, weights, counts), phases)
        losses[position] = fitted.loss
        private[position], private_counts[position] = split.flat(fitted.tensors, split.private)
    return replace(state, private=private, private_counts=private_counts), losses


def _scores(state: State, inbox: Inbox, local: Local, split: _Split, update: LocalUpdate) -> Scores:
    """Each user evaluates its model, as it is or fine-tuned. Results of fine-tuning and of trials are discarded."""
    sent = inbox.get(Trial)
    weights, counts = (sent.weights, sent.counts) if sent is not None else _delivered(state)
    modes = inbox[AskScores].modes
    local.check_scores(modes.tolist())
    tensors = _learner(local).tensors
    loss, metric = np.full((local.n_own, modes.size), np.nan), np.full((local.n_own, modes.size), np.nan)
    judging = np.flatnonzero([len(user.test_features) > 0 for user in local.users])
    tuning = {int(mode): Phase(**phase) for mode, phase in state.options["fine_tuning"].items()}
    for _, own in _pieces(judging, local, update, [*tuning.values()], is_together=sent is None or update.received is None):
        returned = _returned(state.options, None if isinstance(own, int) else own.size)
        model: Tensors = split.model(state, own, weights, counts)
        kept = _of_user(state.kept, own)
        if sent is not None and update.received is not None:
            kept = _on_receipt(_context(state, model, own, inbox, local, split, update), update, returned).kept
        model = returned.judged(update.judged(model, kept, _parameters(tensors)), tensors)
        for place, mode in enumerate(modes.tolist()):
            tuned = model if mode == AS_IS else _fit(inbox, local, own, model, [tuning[mode]], "fine-tuning").tensors
            loss[own, place], metric[own, place] = _judged(local, own, tuned)
            if (lost := np.isnan(metric[own, place])).any():
                name = local.names[np.atleast_1d(own)[np.argmax(lost)]]
                raise RunError(
                    f"user {name!r} in round {inbox.round}: what its model says of held-out rows is nan, want numbers: "
                    "a smaller learning rate may help"
                )
    return Scores(loss, metric)


def _judged(local: Local, users: int | Indices, tensors: Tensors) -> tuple[Any, Any]:
    """Loss and metric of a user's model on its held-out rows, or of those of several users."""
    learner = _learner(local)
    if isinstance(users, int):
        user = local.users[users]
        return learner.judge(tensors, UserRows(user.test_features, user.test_target, user.name))
    rows = [local.users[i] for i in users.tolist()]
    if local.network is not None:
        return local.network.judge_together(tensors, [UserRows(user.test_features, user.test_target, user.name) for user in rows])
    assert isinstance(learner, ConvexLearner)  # noqa: S101 - see `_pieces`
    return learner.judge_together(tensors, users, [user.test_features for user in rows], [user.test_target for user in rows])


def model_of(state: State, position: int, shared: Tensors, tensors: Sequence[TensorInfo]) -> Tensors:
    """The model that a user evaluates."""
    names = {tensor.name for tensor in travelling(tensors, state.options)}
    private = [tensor for tensor in tensors if tensor.name not in names]
    own = named_tensors(state.private[position], state.private_counts[position], private)
    return _update(state.options).judged({**shared, **own}, _of_user(state.kept, position), _parameters(tensors))


def _parameters(tensors: Sequence[TensorInfo]) -> frozenset[str]:
    return frozenset(tensor.name for tensor in tensors if not tensor.is_statistic)


def _update(options: Mapping[str, Any]) -> LocalUpdate:
    """The local update of the stage's method, or phases if it has none."""
    name = options.get("update")
    if name is None:  # after the end of a run
        return PHASES
    if not is_method(name):
        raise ProtocolError(f"the parent asks for the local update of method {quoted(name)}, which is unknown")
    return local_update(name)


def _phases(options: Mapping[str, Any]) -> list[Phase]:
    return [Phase(**phase) for phase in options["phases"]]


def _returned(options: Mapping[str, Any], n_users: int | None = None) -> Returned:
    return Returned(str(options.get("update", "")), n_users)


def _of_user(kept: Tensors, users: int | Indices) -> Tensors:
    return {name: rows[users] for name, rows in kept.items()}


def _row_noise(inbox: Inbox, local: Local, users: int | Indices) -> RowNoise | None:
    """The noise of a user's update, with `privacy.unit: row`. RunError without a key for it."""
    if local.row_privacy is None:
        return None
    if inbox.secret is None or not isinstance(users, int):
        raise RunError("rows are to be protected by noise, but this task has no key for it")
    return local.row_privacy.noise(len(local.users[users].target), inbox.secret.child(local.names[users]).numbers())


def _fit(
    inbox: Inbox,
    local: Local,
    users: int | Indices,
    tensors: Tensors,
    phases: Sequence[Phase],
    purpose: str = "training",
    noise: RowNoise | None = None,
) -> Fitted:
    learner, purpose = _learner(local), f"{purpose} of {inbox.stage}"
    if local.row_privacy is not None:
        if noise is None or not isinstance(users, int):
            raise RunError(f"the {purpose} has no noise, but the rows are to be protected by it")
        user = local.users[users]
        return learner.fit(tensors, UserRows(user.features, user.target, user.name), phases, _draw(inbox, local, user.name, purpose), noise)
    if isinstance(users, int):
        user = local.users[users]
        return learner.fit(tensors, UserRows(user.features, user.target, user.name), phases, _draw(inbox, local, user.name, purpose))
    own = [local.users[i] for i in users.tolist()]
    draw = _draw(inbox, local, tuple(user.name for user in own), purpose)
    if local.network is not None:
        return local.network.fit_together(tensors, [UserRows(user.features, user.target, user.name) for user in own], phases, draw)
    assert isinstance(learner, ConvexLearner)  # noqa: S101 - see `_pieces`
    return learner.fit_together(tensors, users, phases, draw)


def _draw(inbox: Inbox, local: Local, users: str | tuple[str, ...], purpose: str) -> Draw:
    return Draw(local.seed, users, inbox.round, purpose)


def _delivered(state: State) -> tuple[Single, Indices]:
    if state.delivered is None or state.delivered_counts is None:
        raise ProtocolError("users are to work on shared tensors that have not been delivered to them")
    return state.delivered, state.delivered_counts


def _listed(users: Indices | None, local: Local) -> Indices:
    return np.arange(local.n_own) if users is None else users


def _learner(local: Local) -> Learner:
    """The users' network, or the learner of their convex losses."""
    return ConvexLearner(local.problem, local.seed) if local.network is None else local.network


CLIENT = ClientHalf(allows=allows, init=init, step=step, model_of=model_of, private=private)
