"""Server half of partial sharing, for all methods that train networks (see `coterie.families.partial`). It needs no torch: here the shared
tensors are one vector of float32 numbers and one of counts.

Algorithm 1 of Collins, Hassani, Mokhtari and Shakkottai (2021) with any split of the tensors. Averages are sums in member order, in
float64, or with `exact_sums` the hosts' sums of p_i phi_i in fixed point.

Left out (skip): a round's average is that of the drawn users A who answered, phi^{t+1} = sum_{i in A} p_i phi_i / sum_{i in A} p_i, p_i the
rows or 1, as if A had been drawn. Where A is empty phi stays. The private tensors of a user left out are those of its last task. The shared
tensors depend more on the data of users who take part. Accuracies are means over the users who send scores. A user that is away at the end
does not receive the final tensors, and has no accuracy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.secret import Secret
from coterie.draws.streams import stream
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.model import TensorInfo, check_sizes, named_tensors, shared_tensors
from coterie.families.evaluation import COMMON, OWN
from coterie.families.partial import (
    AS_IS,
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
from coterie_server.families import privacy, robust
from coterie_server.families.averages import mean_of, owners
from coterie_server.families.scores import judged
from coterie_server.interface.half import (
    ABSENT,
    FLAT_ONLY,
    ROUNDING,
    UNASKED,
    Counts,
    Federation,
    Key,
    Outcome,
    Replies,
    ServerHalf,
    Setting,
    StageHalf,
    Sum,
    half_of,
)
from coterie_server.interface.merge import check_senders, one_by_one
from coterie_server.interface.wanted import Wanted

M = TypeVar("M", bound=Rows)


@dataclass(frozen=True)
class SharedState:
    """Between two rounds."""

    weights: Single  #: (shared,) phi^t and all other shared float tensors, one after the other
    counts: Indices  #: (counts,) the shared integer tensors
    recent: tuple[float, ...] = ()  #: mean metrics of the latest rounds, back to the last one without an evaluation, oldest first
    beside: Mapping[str, NDArray[Any]] = field(default_factory=dict)  #: a method's own arrays, by name


@dataclass(frozen=True, kw_only=True)
class ServerUpdate:
    """What the server does in a round of a method with messages and arrays of its own.

    `ServerUpdate(...).as_half()` is the method's `SERVER`. `coterie_client.interface.local_update.LocalUpdate` is the users' part.
    """

    #: Names and first values of `SharedState.beside`, given the half and phi^0.
    start: Callable[[PartialSharing, Single], Mapping[str, NDArray[Any]]] = lambda *_: {}
    #: (half, state, users of the round, round) -> messages that go with the shared tensors
    asked: Callable[[PartialSharing, SharedState, Indices, int], Sequence[Message]] = lambda *_: ()
    #: (half, users of the round) -> the replies wanted with their tensors
    returned: Callable[[PartialSharing, Indices], Sequence[Wanted]] = lambda *_: ()
    #: The replies that all users must send to the final tensors.
    told: Callable[[PartialSharing], Sequence[Wanted]] = lambda *_: ()
    #: (half, state, replies, users who answered) -> the state after the replies; by default with the mean of the users' tensors.
    taken: Callable[[PartialSharing, SharedState, Replies, Indices], SharedState] = lambda half, *given: half.averaged(*given)
    #: (half, round) -> figures of the round
    figures: Callable[[PartialSharing, int], Mapping[str, float]] = lambda *_: {}
    #: (half, state, replies to the delivery) -> the cluster of each user, if the method finds clusters
    clusters: Callable[[PartialSharing, SharedState, Replies], Indices | None] = lambda *_: None
    labels_of: Callable[[SharedState], Indices | None] = lambda *_: None  #: the clusters so far
    #: (half, state, replies to the delivery) -> (n, d) the models of users with convex problems; None where the server does not know them.
    models: Callable[[PartialSharing, SharedState, Replies], Array | None] = lambda half, state, _: half.common_models(state)
    #: The closed form of these messages, given that of the others.
    vectors: Callable[[Counts], Counts] = lambda *_: {}
    beta: Callable[[Any], float] = lambda _: 1.0  #: given the configuration: how far phi moves towards the average

    def as_half(self) -> ServerHalf:
        """The server half of the method."""
        return replace(SERVER, build=lambda config, setting: replace(set_up(config, setting), own=self, beta=self.beta(config)).as_half())


@dataclass(frozen=True)
class PartialSharing:
    """The server half for one stage."""

    config: Training  #: of the method
    setting: Setting  #: of the stage
    tensors: tuple[TensorInfo, ...]  #: that are sent
    n_rows: Indices  #: (n,) training rows
    n_test: Indices  #: (n,)
    are_personal: bool  #: whether users have private tensors, or a private model
    beta: float = 1.0  #: how far phi moves towards the average: phi^{t+1} = (1 - beta) phi^t + beta mean
    own: ServerUpdate = ServerUpdate()  #: the messages and arrays of the method
    noise_of: Secret | None = None  #: the key of the noise of a round, with `privacy.unit: user`
    one: tuple[TensorInfo, ...] | None = None  #: that return, where several models are sent; None: those that are sent

    def as_half(self) -> StageHalf[SharedState]:
        if self.setting.sums is not None and (self.own.taken is not ServerUpdate.taken or self.one is not None):
            why = f"the server half of {self.config.name!r} uses each user's tensors"
            raise ConfigError(f"exact_sums is true, but {why}: want false (its METHOD should have sums=frozenset())")
        found, n_users = [], self.n_test.size
        if n_blind := int((self.n_test == 0).sum()):
            found.append(f"{n_blind} of {n_users} users have no held-out rows, so no accuracy counts them")
        if self.config.n_selected(n_users) == 1 < n_users and self.config.users_per_round is None:
            one = f"method.participation {self.config.participation:g} of {n_users} users is one user a round"
            found.append(f"{one}: want more, or users_per_round")
        robust.check(self.setting.robust)
        found += robust.doubts(self.setting.robust, self.config.n_selected(n_users), "a round")
        notes = robust.said(self.setting.robust, [self.config.n_selected(n_users)], "a round")
        budget = self.budget
        if budget is None:
            return replace(half_of(self), labels_of=self.own.labels_of, warnings=found, notes=notes)
        if budget.privacy.unit == "user" and self.tensors and any(tensor.is_integer for tensor in self.tensors):
            raise ConfigError("privacy.unit is 'user', but shared tensors have counts that get no noise: want method.batch_norm private")
        found += privacy.doubts(budget, self.n_rows, self.config.n_selected(n_users), sum(extents(self.tensors).values()))
        return replace(
            half_of(self), labels_of=self.own.labels_of, warnings=found, notes=[*notes, privacy.said(budget)], epsilon=budget.spent
        )

    @functools.cached_property
    def budget(self) -> privacy.Budget | None:
        """What rounds spend, with `privacy`."""
        wanted = self.setting.privacy
        n_shares = 0 if self.setting.sums is None else self.setting.sums.n_shares
        return None if wanted is None else privacy.Budget.of(wanted, self.config, self.n_rows, self.setting.rounds, n_shares)

    @property
    def _tells_losses(self) -> bool:
        """Whether users send their training losses, which have no noise."""
        return self.setting.privacy is None or not self.setting.privacy.is_of_hosts

    @property
    def _modes(self) -> Sequence[int]:
        """How users judge models: not at all where these are trained without noise, and noise of the hosts is to hide them."""
        wanted = self.setting.privacy
        return [] if wanted is not None and wanted.is_shared and self.config.keeps_models else self.config.modes

    @property
    def client_options(self) -> Mapping[str, Any]:
        return {"partial": self.config.client_options()}

    async def init(self, federation: Federation) -> SharedState:
        """phi^0, from the first user that is not left out: all users have the same."""
        if not self.tensors:
            return SharedState(np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64))
        for number in range(self.n_rows.size):
            first = np.full(1, number)
            wanted = [Wanted(Start, first, extents(self.tensors))]
            replies = await federation.exchange(AskStart(users=first), to=first, wanted=wanted)
            if replies.awaited(first).size:
                break
        (start,) = self.in_runs(replies, Start, first)
        check_sizes(start.weights[0], start.counts[0], self.tensors)
        weights = start.weights[0].astype(self._dtype)
        left = robust.nobody_left(self.setting.robust, self.n_rows.size)
        beside = {**self.own.start(self, weights), **privacy.first_clip(self.budget), **left}
        return SharedState(weights, start.counts[0], beside=beside)

    async def round(self, state: SharedState, federation: Federation, number: int) -> tuple[SharedState, Mapping[str, float]]:
        """Users are drawn, train and return; in some rounds everyone evaluates."""
        chosen = drawn(self.config, self.setting, self.n_rows.size, number)
        asked = [Shared(state.weights, state.counts, users=chosen), *self.own.asked(self, state, chosen, number)]
        if self.setting.sums is not None:
            return await self._summed_round(state, federation, number, chosen, asked)
        is_judged = self.setting.robust is not None
        updates = [Wanted(Updated, chosen, extents(self._returning), is_judged=is_judged)] if self.tensors else []
        losses_wanted = [Wanted(TrainingLoss, chosen)] if self._tells_losses else []
        wanted = [*losses_wanted, *updates, *self.own.returned(self, chosen)]
        replies = await federation.exchange(*asked, to=chosen, wanted=wanted)
        answered, figures = self._attendance(replies, chosen)
        before = state
        if answered.size and self._tells_losses:
            losses = replies[TrainingLoss]
            check_senders(TrainingLoss.kind, losses.users, answered)
            figures["loss"] = mean_of(losses.loss, self.n_rows[answered])
        if answered.size and self.tensors:
            secret = self.setting.secret
            state = self.own.taken(replace(self, noise_of=secret and secret.child("round", number)), state, replies, answered)
            self._check_finite(state, number)
        figures |= robust.figures(self.setting.robust, before.beside, state.beside)
        return await self._closed(state, federation, number, figures)

    def _attendance(self, replies: Replies, chosen: Indices) -> tuple[Indices, dict[str, float]]:
        """The users who answered, and the figures of how many they are."""
        answered = replies.awaited(chosen)
        figures = {"users": float(answered.size)}
        if answered.size < chosen.size:
            figures["unasked"] = float(replies.n_unasked(chosen))
        return answered, figures

    async def _summed_round(
        self, state: SharedState, federation: Federation, number: int, chosen: Indices, asked: Sequence[Message]
    ) -> tuple[SharedState, Mapping[str, float]]:
        """The same from sums: what a single user has returned is not known."""
        assert self.setting.sums is not None  # noqa: S101 - see `round`
        sums = [Sum(TrainingLoss, self.n_rows)] if self._tells_losses else []
        weights, form = self.n_rows if self.config.average == "rows" else None, None if self.budget is None else self.budget.form
        if self.tensors:
            sums.append(Sum(Updated, weights, extents=extents(self._returning), form=form))
        totals = await federation.total(*asked, of=sums, to=chosen, wanted=self.own.returned(self, chosen))
        answered, figures = self._attendance(totals.replies, chosen)
        if n_absent := self.setting.sums.n_sums(chosen) - self.setting.sums.n_sums(answered):
            figures["absent_sums"] = float(n_absent)
        if answered.size:
            figures |= {"loss": float(totals.mean(TrainingLoss).loss[0])} if self._tells_losses else {}
            figures[ROUNDING] = totals.rounding
        if answered.size and self.tensors:
            if form is not None:
                m = self.config.n_selected(self.n_rows.size)
                state = replace(state, weights=privacy.moved(state.weights, totals[Updated].weights[0], m))
            else:
                mean = totals.mean(Updated)
                state = self._moved(state, mean.weights[0].astype(self._dtype), np.rint(mean.counts[0]).astype(np.int64))
            self._check_finite(state, number)
        return await self._closed(state, federation, number, figures)

    async def _closed(
        self, state: SharedState, federation: Federation, number: int, figures: dict[str, float]
    ) -> tuple[SharedState, Mapping[str, float]]:
        """The end of a round: in some rounds everyone evaluates."""
        judged = await self._mean_metric(state, federation) if self._is_evaluated(number) else {}
        figures |= {**judged, **self.own.figures(self, number), **privacy.clip_of(state.beside)}
        if self.setting.metric in judged:
            metric = judged[self.setting.metric]
            return replace(state, recent=(*state.recent, metric)[-max(self.config.evaluate_last, 1) :]), figures
        return replace(state, recent=()), figures

    def _scored(self, modes: Indices) -> list[Wanted]:
        """The scores of all users. A user with held-out rows must have a metric: without one its host cannot go on."""

        def check(scores: Scores, users: Indices) -> None:
            if np.isnan(scores.metric[self.n_test[users] > 0]).any():
                raise ProtocolError(f"{Scores.kind} came with a metric of nan for a user with held-out rows, wanted a number")

        return [Wanted(Scores, None, {"modes": modes.size}, check)] if modes.size else []

    def wanted(self, kind: type[Rows], users: Indices) -> Wanted:
        """One message of this kind from each of these users (sorted), of as many numbers as the shared tensors."""
        return Wanted(kind, users, extents(self.tensors), is_judged=self.setting.robust is not None)

    def in_runs(self, replies: Replies, kind: type[M], answered: Indices) -> Sequence[M]:
        """The messages with `Weights` of this kind, in the order of the users who answered. ProtocolError unless each has sent one."""
        messages = replies.in_runs(kind)
        check_senders(kind.kind, owners(messages), answered)
        return messages

    def one_by_one(self, replies: Replies, kind: type[M], answered: Indices) -> Sequence[M]:
        """The same, one message for each user."""
        return tuple(one_by_one(self.in_runs(replies, kind, answered)))  # type: ignore[arg-type]

    def averaged(self, state: SharedState, replies: Replies, answered: Indices) -> SharedState:
        """The mean of the users' shared tensors, or the centre by a rule of `federation.robust`."""
        updates = self.in_runs(replies, Updated, answered)
        if self.noise_of is not None and self.budget is not None:
            rows, m = [update.weights for update in updates], self.config.n_selected(self.n_rows.size)
            return replace(state, **privacy.noised(rows, state.weights, state.beside, m, self.budget, self.noise_of))
        mean = self.average(updates, state.weights)
        return self._moved(replace(state, beside=robust.counted(state.beside, mean.left)), mean.weights, mean.counts)

    def _moved(self, state: SharedState, weights: Single, counts: Indices) -> SharedState:
        """The state after a round with this mean."""
        if self.beta != 1:
            with np.errstate(over="ignore"):  # `_check_finite` finds it
                weights = ((1 - self.beta) * state.weights.astype(np.float64) + self.beta * weights).astype(self._dtype)
        return replace(state, weights=weights, counts=counts)

    def _check_finite(self, state: SharedState, number: int) -> None:
        """RunError where a step of the server has left a number that cannot be sent. A mean alone stays between the users' numbers."""
        moved = {"shared tensors": state.weights} if self.beta != 1 else {}
        for what, values in {**moved, **{name: array for name, array in state.beside.items() if array.dtype.kind == "f"}}.items():
            sent = self.setting.precision.rounded_weights(values)
            if not np.isfinite(sent).all():
                found = "nan" if np.isnan(sent).any() else "inf"
                step = f"with steps of {self.beta:g} towards the users' mean"
                wanted = "want finite numbers: a shorter step or payload float32 may help"
                raise RunError(f"round {number} has left {found} in the server's {what}, {step}: {wanted}")

    async def finish(self, state: SharedState, federation: Federation) -> Outcome:
        """Everyone receives the final tensors, and evaluates its model with and without fine-tuning."""
        everyone = np.arange(self.n_rows.size)
        modes = np.array(self._modes, dtype=np.int64)
        asked = [Delivery(state.weights, state.counts, users=everyone), *([AskScores(modes)] if modes.size else [])]
        replies = await federation.exchange(*asked, wanted=[*self._scored(modes), *self.own.told(self)])
        figures, by_user = self.judged(replies, modes)
        figures |= replies.left_out(self.n_rows.size)
        figures |= privacy.closing(self.budget, state.beside)
        if state.recent and self.config.evaluate_last:
            figures[f"last_rounds_{self.setting.metric}"] = float(np.mean(state.recent))
        shared, labels = self.delivered(state), self.own.clusters(self, state, replies)
        n_models = 1 if self.one is None else self.tensors[0].shape[0]
        n_taken = n_models if labels is None else int(labels.max()) + 1
        unused = f"users have taken only {n_taken} of the {n_models} models: fewer models, other steps or another seed may do better"
        models = self.own.models(self, state, replies) if self.setting.precision.model == np.float64 else None
        notes = robust.found(self.setting.robust, self.setting.members.names, state.beside.get(robust.LEFT))
        warnings = (unused,) * (n_taken < n_models)
        return Outcome(models, labels, figures, by_user=by_user, shared=shared, is_judged=True, warnings=warnings, notes=notes)

    def common_models(self, state: SharedState) -> Array | None:
        """(n, d) the models of users with convex problems; None where they are private."""
        if self.are_personal:
            return None
        return np.tile(self.setting.precision.rounded_weights(state.weights), (self.n_rows.size, 1))

    def delivered(self, state: SharedState) -> Mapping[str, NDArray[Any]]:
        """The shared tensors by name, rounded to the payload type like those of the users."""
        return named_tensors(self.setting.precision.rounded_weights(state.weights), state.counts, self.tensors)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """A vector is all shared tensors, as one user sends or receives them."""
        if not any(not tensor.is_integer for tensor in self.tensors):
            return {}
        n_trained = self._n_answers(figures)
        n_unasked = sum(row.get("unasked", 0.0) for row in figures)
        n_asked = len(figures) * self.config.n_selected(self.n_rows.size) - n_unasked  # answered or not
        n_judging = self._n_judging(figures) - sum(row.get("unasked_judges", 0.0) for row in figures)
        expected: dict[Key, float] = {("start", "up"): 1.0, ("shared", "down"): n_asked, ("shared", "up"): n_trained}
        expected["delivery", "down"] = self.n_rows.size - last_of(figures, UNASKED)
        return {**expected, **({("evaluation", "down"): n_judging} if n_judging else {}), **self.own.vectors(expected)}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """From each user, or in each sum, a training loss a round; a loss and an accuracy for each evaluation and mode."""
        n_judged = self._n_judging(figures) - sum(row.get("absent_judges", 0.0) for row in figures)
        n_judged += len(self._modes) * (self.n_rows.size - last_of(figures, ABSENT))
        losses: Counts = {("loss", "up"): self._n_answers(figures)} if self._tells_losses else {}
        return {**losses, ("evaluation", "up"): 2 * n_judged}

    def _n_answers(self, figures: Sequence[Mapping[str, float]]) -> float:
        """How many users have returned tensors, or how many sums of theirs have come."""
        if self.setting.sums is None:
            return sum(row["users"] for row in figures)
        drawings = (drawn(self.config, self.setting, self.n_rows.size, number) for number in range(1, len(figures) + 1))
        return float(sum(map(self.setting.sums.n_sums, drawings))) - sum(row.get("absent_sums", 0.0) for row in figures)

    def _n_judging(self, figures: Sequence[Mapping[str, float]]) -> float:
        """Users times the rounds in which all of them evaluate."""
        return float(self.n_rows.size * sum(self._is_evaluated(number) for number in range(1, len(figures) + 1)))

    def average(self, updates: Sequence[Updated], before: Single) -> robust.Mean:
        """phi^{t+1} = sum_i p_i phi_i^{t+1}, given phi^t. Each of the messages has the rows of one or more users."""
        for update in updates:
            check_sizes(update.weights, update.counts, self._returning)
        users = owners(updates)
        shares = self.n_rows[users].astype(np.float64) if self.config.average == "rows" else np.ones(users.size)
        shares /= shares.sum()  # p_i
        return robust.mean_of_tensors(self.setting.robust, updates, shares, before)

    @property
    def _returning(self) -> tuple[TensorInfo, ...]:
        return self.tensors if self.one is None else self.one

    @property
    def _dtype(self) -> np.dtype[Any]:
        return self.setting.precision.model

    def _is_evaluated(self, number: int) -> bool:
        every = self.config.evaluate_every
        if not self.n_test.any() or not self._modes:
            return False
        return number > self.setting.rounds - self.config.evaluate_last or (every is not None and number % every == 0)

    async def _mean_metric(self, state: SharedState, federation: Federation) -> dict[str, float]:
        """The figure "accuracy" (or another metric), none where all users with held-out rows are left out, and how many users are."""
        everyone = np.arange(self.n_rows.size)
        modes = np.array([AS_IS])
        trial = Trial(state.weights, state.counts, users=everyone)
        replies = await federation.exchange(trial, AskScores(modes), wanted=self._scored(modes))
        figures, _ = self.judged(replies, modes)
        found = {self.setting.metric: figures["heldout_metric"]} if figures else {}
        if n_absent := everyone.size - replies.awaited(everyone).size:
            found |= {"absent_judges": float(n_absent), "unasked_judges": float(replies.n_unasked(everyone))}
        return found

    def judged(self, replies: Replies, modes: Indices) -> tuple[dict[str, float], dict[str, Array]]:
        """Means and spreads over the users with held-out rows, and the scores by user; both empty where nobody is to judge, or has any."""
        whose = OWN if self.are_personal else COMMON
        return judged(replies, modes, self.n_test, whose, self.setting.metric, self.setting.members.names) if modes.size else ({}, {})


def extents(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    """The axes of messages with these tensors: how many numbers and counts they have."""
    n_counts = sum(tensor.size for tensor in tensors if tensor.is_integer)
    return {"shared": sum(tensor.size for tensor in tensors) - n_counts, "counts": n_counts}


def drawn(config: Training, setting: Setting, n_users: int, number: int) -> Indices:
    """I^t: the r n users of round `number`, drawn without replacement."""
    if setting.secret is not None:
        return privacy.drawn_in_secret(setting.secret.child("round", number), n_users, config.n_selected(n_users))
    order = stream(setting.seed, "participation", setting.stage, number).order(n_users)
    return np.sort(order[: config.n_selected(n_users)])


def last_of(figures: Sequence[Mapping[str, float]], name: str) -> float:
    """A figure of the last round, 0 without one."""
    return figures[-1].get(name, 0.0) if figures else 0.0


def sizes_of(setting: Setting) -> tuple[Indices, Indices]:
    """(n,) training and held-out rows of the users. RunError before the stage 'prepare'."""
    facts = setting.facts
    if facts is None or facts.n_test is None:
        raise RunError(f"stage {setting.stage!r} needs the sizes of the stage 'prepare'")
    return facts.n_rows, facts.n_test


def set_up(config: Training, setting: Setting) -> PartialSharing:
    """The server half for one stage. ConfigError when the shared part of the model has no tensors."""
    how, statistics_travel = config.how, config.batch_norm == "shared"
    tensors = shared_tensors(setting.tensors, how.sharing, statistics_travel=statistics_travel, private_layers=how.private_layers)
    are_personal = how.is_personal or len(tensors) < len(setting.tensors)
    return PartialSharing(config, setting, tensors, *sizes_of(setting), are_personal=are_personal)


def build(config: Training, setting: Setting) -> StageHalf[SharedState]:
    return set_up(config, setting).as_half()


SERVER = ServerHalf(build=build, tiers=FLAT_ONLY)  # it knows no clusters
