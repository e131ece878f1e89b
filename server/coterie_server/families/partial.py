"""Server half of partial sharing, for all methods that train networks (see `coterie.families.partial`). It needs no torch: to the
server, the shared tensors are one vector of float32 numbers and one of counts.

Algorithm 1 of Collins, Hassani, Mokhtari and Shakkottai (2021) with any split of the tensors; averages are sums in member order, in
float64.

Left out (skip): a round's average is that of the drawn users who answered, phi^{t+1} = sum_{i in A} p_i phi_i / sum_{i in A} p_i, p_i the
rows or 1, that is, the round that drew A alone; where A is empty phi stays as it is. The private tensors of a user left out stay where the
last task that it was sent has brought them. What is shared leans towards the data of those who take part: while somebody is away the rounds
are those of a federation without it. Accuracies are means over the users who judge; one that is away at the end is not delivered the final
tensors, and has no accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.streams import stream
from coterie.errors import ProtocolError, RunError
from coterie.experiment.model import TensorInfo, check_sizes, named_tensors, shared_tensors
from coterie.families.partial import (
    AS_IS,
    MODES,
    AskScores,
    AskStart,
    Delivery,
    Scores,
    Shared,
    Single,
    Start,
    Training,
    TrainingLoss,
    Trial,
    Updated,
)
from coterie.wire.messages import Message, Rows
from coterie_server.families.known_clusters import spread_of
from coterie_server.interface.half import (
    ABSENT,
    FLAT_ONLY,
    UNASKED,
    Counts,
    Federation,
    Key,
    Outcome,
    Replies,
    ServerHalf,
    Setting,
    StageHalf,
    half_of,
)
from coterie_server.interface.merge import check_senders
from coterie_server.interface.wanted import Wanted

_BLOCK = 1 << 18  # numbers that are averaged at once


@dataclass(frozen=True)
class State:
    """Between two rounds."""

    weights: Single  # (shared,) phi^t and all other shared float tensors, one after the other
    counts: Indices  # (counts,) the shared integer tensors
    recent: tuple[float, ...] = ()  # mean metrics of the latest rounds, as far back as all were evaluated, oldest first
    beside: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # what a method keeps beside them, by name


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a method does with messages and arrays of its own; each function is given the half."""

    # Names and first values of `State.beside`, given the half and phi^0.
    start: Callable[[PartialSharing, Single], Mapping[str, NDArray[Any]]] = lambda *_: {}
    # (half, state, users of the round, round) -> messages that go with the shared tensors
    asked: Callable[[PartialSharing, State, Indices, int], Sequence[Message]] = lambda *_: ()
    # (half, users of the round) -> what they must return with their tensors
    returned: Callable[[PartialSharing, Indices], Sequence[Wanted]] = lambda *_: ()
    # What all users must answer to the final tensors.
    told: Callable[[PartialSharing], Sequence[Wanted]] = lambda *_: ()
    # (half, state, replies, who has answered) -> what becomes of the users' replies; the mean of their tensors by default.
    taken: Callable[[PartialSharing, State, Replies, Indices], State] = lambda half, *given: half.averaged(*given)
    # (half, round) -> figures of the round
    figures: Callable[[PartialSharing, int], Mapping[str, float]] = lambda *_: {}
    # (half, state, replies to the delivery) -> the cluster of each user, of a method that finds any
    clusters: Callable[[PartialSharing, State, Replies], Indices | None] = lambda *_: None
    labels_of: Callable[[State], Indices | None] = lambda *_: None  # the clusters so far
    # (half, state, replies to the delivery) -> (n, d) the models of users with convex problems; None where the server does not know them.
    models: Callable[[PartialSharing, State, Replies], Array | None] = lambda half, state, _: half.common_models(state)
    # The closed form of its own messages, given that of the others.
    vectors: Callable[[Counts], Counts] = lambda *_: {}


@dataclass(frozen=True)
class PartialSharing:
    """The server half for one stage."""

    config: Training
    setting: Setting
    tensors: tuple[TensorInfo, ...]  # that are sent
    n_rows: Indices  # (n,) training rows
    n_test: Indices  # (n,)
    are_personal: bool  # whether users have tensors, or a whole model, of their own
    beta: float = 1.0  # how far phi moves towards the average: phi^{t+1} = (1 - beta) phi^t + beta mean
    own: Own = Own()
    one: tuple[TensorInfo, ...] | None = None  # that return, where several models are sent; None: those that are sent

    def as_half(self) -> StageHalf[State]:
        """For the engine."""
        return replace(
            half_of(self),
            labels_of=self.own.labels_of,
            warnings=self.warnings,
        )

    @property
    def client_options(self) -> Mapping[str, Any]:
        """Settings of the client half, which is the room `partial`."""
        return {"partial": self.config.client_options()}

    @property
    def warnings(self) -> Sequence[str]:
        """Users without held-out rows are in no accuracy; a round of one user averages nothing."""
        found, n_users = [], self.n_test.size
        if n_blind := int((self.n_test == 0).sum()):
            found.append(f"{n_blind} of {n_users} users have no held-out rows, so no accuracy counts them")
        if self.config.n_selected(n_users) == 1 < n_users and self.config.users_per_round is None:
            found.append(
                f"method.participation {self.config.participation:g} of {n_users} users is one user a round: want more, or users_per_round"
            )
        return found

    async def init(self, federation: Federation) -> State:
        """phi^0, from the first user that is not left out; every user would say the same."""
        if not self.tensors:
            return State(np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64))
        for number in range(self.n_rows.size):
            first = np.full(1, number)
            wanted = [Wanted(Start, first, extents(self.tensors))]
            replies = await federation.exchange(AskStart(users=first), to=first, wanted=wanted)
            if replies.awaited(first).size:
                break
        starts = replies.one_by_one(Start)
        check_senders(Start.kind, owners(starts), first)
        start = starts[0]
        check_sizes(start.weights[0], start.counts[0], self.tensors)
        weights = start.weights[0].astype(self._dtype)
        return State(weights, start.counts[0], beside=self.own.start(self, weights))

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """Users are drawn, train and return; and, in some rounds, everyone judges."""
        chosen = drawn(self.config, self.setting, self.n_rows.size, number)
        asked = [Shared(state.weights, state.counts, users=chosen), *self.own.asked(self, state, chosen, number)]
        replies = await federation.exchange(*asked, to=chosen, wanted=self._returned(chosen))
        answered = replies.awaited(chosen)
        figures = {"users": float(answered.size)}
        if answered.size < chosen.size:
            figures["unasked"] = float(replies.n_unasked(chosen))
        if answered.size:
            losses = replies[TrainingLoss]
            check_senders(TrainingLoss.kind, losses.users, answered)
            figures["loss"] = _mean(losses.loss, self.n_rows[answered])
        if answered.size and self.tensors:
            state = self.own.taken(self, state, replies, answered)
            self._check_finite(state, number)
        judged = await self._mean_metric(state, federation) if self._is_evaluated(number) else {}
        figures |= {**judged, **self.own.figures(self, number)}
        if self.setting.metric in judged:
            metric = judged[self.setting.metric]
            return replace(state, recent=(*state.recent, metric)[-max(self.config.evaluate_last, 1) :]), figures
        return replace(state, recent=()), figures

    def _returned(self, chosen: Indices) -> list[Wanted]:
        """What the users of a round must return."""
        updates = [Wanted(Updated, chosen, extents(self._returning))] if self.tensors else []
        return [Wanted(TrainingLoss, chosen), *updates, *self.own.returned(self, chosen)]

    def _scored(self, modes: Indices) -> list[Wanted]:
        """What everyone must answer who is asked to judge."""
        return [Wanted(Scores, None, {"modes": modes.size}, self._check_scores)]

    def _check_scores(self, scores: Scores, users: Indices) -> None:
        """ProtocolError where a user with held-out rows has no metric: its host would have said that it cannot go on."""
        if np.isnan(scores.metric[self.n_test[users] > 0]).any():
            raise ProtocolError(f"{Scores.kind} came with a metric of nan for a user with held-out rows, wanted a number")

    def averaged(self, state: State, replies: Replies, answered: Indices) -> State:
        """The mean of the users' shared tensors."""
        updates = replies.one_by_one(Updated)
        check_senders(Updated.kind, owners(updates), answered)
        weights, counts = self.average(updates)
        if self.beta != 1:
            with np.errstate(over="ignore"):  # it is found by `_check_finite`
                weights = ((1 - self.beta) * state.weights.astype(np.float64) + self.beta * weights).astype(self._dtype)
        return replace(state, weights=weights, counts=counts)

    def _check_finite(self, state: State, number: int) -> None:
        """RunError where a long step of the server leaves what users cannot be sent: means alone stay among what they have returned."""
        moved = {"shared tensors": state.weights} if self.beta != 1 else {}
        for what, values in {**moved, **{name: array for name, array in state.beside.items() if array.dtype.kind == "f"}}.items():
            sent = self.setting.precision.rounded_weights(values)
            if not np.isfinite(sent).all():
                found = "nan" if np.isnan(sent).any() else "inf"
                raise RunError(
                    f"round {number} has left {found} in the server's {what}, with steps of {self.beta:g} towards the users' mean: "
                    "want finite numbers: a shorter step or payload float32 may help"
                )

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """Everyone gets the final tensors, and judges its model with and without fine-tuning."""
        everyone = np.arange(self.n_rows.size)
        modes = np.array(self.config.modes, dtype=np.int64)
        delivery = Delivery(state.weights, state.counts, users=everyone)
        replies = await federation.exchange(delivery, AskScores(modes), wanted=[*self._scored(modes), *self.own.told(self)])
        figures, by_user = self.judged(replies, modes)
        figures |= replies.left_out(self.n_rows.size)
        if state.recent and self.config.evaluate_last:
            figures[f"last_rounds_{self.setting.metric}"] = float(np.mean(state.recent))
        shared, labels = self.delivered(state), self.own.clusters(self, state, replies)
        models = self.own.models(self, state, replies) if self.setting.precision.model == np.float64 else None
        return Outcome(models, labels, figures, by_user=by_user, shared=shared, is_judged=True)

    def common_models(self, state: State) -> Array | None:
        """(n, d) the models of users with convex problems; None where these are their own, which the server does not know."""
        if self.are_personal:
            return None
        return np.tile(self.setting.precision.rounded_weights(state.weights), (self.n_rows.size, 1))

    def delivered(self, state: State) -> Mapping[str, NDArray[Any]]:
        """The shared tensors by name, as users have them: in half precision they have lost something on the way."""
        return named_tensors(self.setting.precision.rounded_weights(state.weights), state.counts, self.tensors)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """A vector is all that one user is sent, or sends: the shared tensors."""
        if not any(not tensor.is_integer for tensor in self.tensors):
            return {}
        n_trained = sum(row["users"] for row in figures)
        n_unasked = sum(row.get("unasked", 0.0) for row in figures)
        n_asked = len(figures) * self.config.n_selected(self.n_rows.size) - n_unasked  # with those whose answer was not waited for
        n_judging = self._n_judging(figures) - sum(row.get("unasked_judges", 0.0) for row in figures)
        expected: dict[Key, float] = {("start", "up"): 1.0, ("shared", "down"): n_asked, ("shared", "up"): n_trained}
        expected["delivery", "down"] = self.n_rows.size - _last(figures, UNASKED)
        return {**expected, **({("evaluation", "down"): n_judging} if n_judging else {}), **self.own.vectors(expected)}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """From each user a training loss a round, and a loss and an accuracy in each mode in which it judges."""
        n_judged = self._n_judging(figures) - sum(row.get("absent_judges", 0.0) for row in figures)
        n_judged += len(self.config.modes) * (self.n_rows.size - _last(figures, ABSENT))
        return {("loss", "up"): sum(row["users"] for row in figures), ("evaluation", "up"): 2 * n_judged}

    def _n_judging(self, figures: Sequence[Mapping[str, float]]) -> float:
        """Users over the rounds in which all of them judge."""
        return float(self.n_rows.size * sum(self._is_evaluated(number) for number in range(1, len(figures) + 1)))

    def average(self, updates: Sequence[Updated]) -> tuple[Single, Indices]:
        """phi^{t+1} = sum_i p_i phi_i^{t+1}, block by block: the users' tensors may be most of the memory."""
        for update in updates:
            check_sizes(update.weights[0], update.counts[0], self._returning)
        shares = self._shares(owners(updates))
        size = updates[0].weights.shape[1]
        mean = np.empty(size, dtype=self._dtype)
        for start in range(0, size, _BLOCK):
            block = slice(start, min(start + _BLOCK, size))
            total = np.zeros(block.stop - block.start)
            for share, update in zip(shares, updates, strict=True):
                total += share * update.weights[0, block]
            mean[block] = total
        counts = np.zeros(updates[0].counts.shape[1])
        for share, update in zip(shares, updates, strict=True):
            counts += share * update.counts[0]
        return mean, np.rint(counts).astype(np.int64)

    def _shares(self, users: Indices) -> Array:
        """p_i of these users: they sum to 1."""
        weights = self.n_rows[users].astype(np.float64) if self.config.average == "rows" else np.ones(users.size)
        shares: Array = weights / weights.sum()
        return shares

    @property
    def _returning(self) -> tuple[TensorInfo, ...]:
        return self.tensors if self.one is None else self.one

    @property
    def _dtype(self) -> np.dtype[Any]:
        return self.setting.precision.model

    def _is_evaluated(self, number: int) -> bool:
        every = self.config.evaluate_every
        if not self.n_test.any():
            return False
        return number > self.setting.rounds - self.config.evaluate_last or (every is not None and number % every == 0)

    async def _mean_metric(self, state: State, federation: Federation) -> dict[str, float]:
        """The figure "accuracy" (or another metric), none where those with held-out rows are skipped, and how many users were."""
        everyone = np.arange(self.n_rows.size)
        modes = np.array([AS_IS])
        trial = Trial(state.weights, state.counts, users=everyone)
        replies = await federation.exchange(trial, AskScores(modes), wanted=self._scored(modes))
        figures, _ = self.judged(replies, modes)
        found = {self.setting.metric: figures["heldout_metric"]} if figures else {}
        if n_absent := everyone.size - replies.awaited(everyone).size:
            found |= {"absent_judges": float(n_absent), "unasked_judges": float(replies.n_unasked(everyone))}
        return found

    @np.errstate(over="ignore", invalid="ignore")  # losses of models that have run away may be infinite, and their spread nothing
    def judged(self, replies: Replies, modes: Indices) -> tuple[dict[str, float], dict[str, Array]]:
        """Means and spreads over the users with held-out rows, and what each has said; nothing where nobody has any."""
        scores, everyone = replies[Scores], replies.awaited(np.arange(self.n_rows.size))
        said = everyone if scores.users is None else scores.users
        check_senders(Scores.kind, said, everyone)
        if scores.loss.shape[1] != modes.size:
            raise ProtocolError(f"{Scores.kind} came with {scores.loss.shape[1]} modes, wanted {modes.size}")
        judged = self.n_test[said] > 0
        if not judged.any():
            return {}, {}
        whose = "personal" if self.are_personal else "global"
        figures: dict[str, float] = {}
        by_user: dict[str, Array] = {}
        for place, mode in enumerate(modes.tolist()):
            loss, metric = scores.loss[judged, place], scores.metric[judged, place]  # may be infinite
            if np.isnan(metric).any():
                name = self.setting.members.names[said[judged][np.isnan(metric)][0]]
                raise RunError(f"user {name!r} judged its model to be nan, wanted a number: a smaller learning rate may help")
            mean_loss, mean_metric = float(loss.mean()), float(metric.mean())
            if mode == AS_IS:
                figures |= {"heldout_loss": mean_loss, "heldout_metric": mean_metric}
            name = f"{whose}{MODES[mode]}_{self.setting.metric}"
            figures[name] = mean_metric
            figures |= {f"{name}_{which}": value for which, value in spread_of(metric).items()}
            by_user[name] = np.full(self.n_rows.size, np.nan)
            by_user[name][said[judged]] = metric
        return figures, by_user


def extents(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    """Of the axes of messages with these tensors: numbers and counts."""
    n_counts = sum(tensor.size for tensor in tensors if tensor.is_integer)
    return {"shared": sum(tensor.size for tensor in tensors) - n_counts, "counts": n_counts}


def drawn(config: Training, setting: Setting, n_users: int, number: int) -> Indices:
    """I^t: r n users of round `number`, without replacement."""
    order = stream(setting.seed, "participation", setting.stage, number).order(n_users)
    return np.sort(order[: config.n_selected(n_users)])


def owners(messages: Sequence[Rows]) -> Indices:
    """Whose each message is: they have come one by one."""
    return np.array([message.users[0] for message in messages if message.users is not None], dtype=np.int64)


def _last(figures: Sequence[Mapping[str, float]], name: str) -> float:
    return figures[-1].get(name, 0.0) if figures else 0.0


@np.errstate(over="ignore")  # of models that are about to run away
def _mean(values: Array, weights: Indices) -> float:
    return float((values * weights).sum() / weights.sum())


def set_up(config: Training, setting: Setting) -> PartialSharing:
    """The server half for one stage. ConfigError when the shared part of the model has no tensors."""
    facts = setting.facts
    if facts is None or facts.n_test is None:
        raise RunError(f"stage {setting.stage!r} needs the sizes of the stage 'prepare'")
    how, statistics_travel = config.how, config.batch_norm == "shared"
    tensors = shared_tensors(setting.tensors, how.sharing, statistics_travel=statistics_travel, private_layers=how.private_layers)
    are_personal = how.is_personal or len(tensors) < len(setting.tensors)
    return PartialSharing(config, setting, tensors, facts.n_rows, facts.n_test, are_personal=are_personal)


def build(config: Training, setting: Setting) -> StageHalf[State]:
    """As `set_up`, for the engine."""
    return set_up(config, setting).as_half()


SERVER = ServerHalf(build=build, tiers=FLAT_ONLY)  # it knows no clusters
