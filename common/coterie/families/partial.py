"""Partial sharing: the common part of methods with local updates.

A model's tensors are split by name: shared ones are sent, and private ones stay in their user's state, which no message carries. The model
is a network or, for methods that share all of it, the x of a convex problem (`coterie.experiment.model.convex_tensors`). In that case the
loss of a batch is the mean of f_il over its rows, where f_i is the mean over all rows.

In a round, the server draws r n users and sends them the shared tensors. Each trains its model on its own rows, in the method's phases, and
returns its shared tensors, which the server averages. FedRep shares the representation and trains the head first. FedPer shares the
representation and trains all at once. FedAvg shares all; LG-FedAvg shares the head.

Some kinds of layers may be private wherever they are (`private_layers`). With `batch_norm: shared`, running statistics of shared layers are
sent and averaged like parameters; with `private` they stay with their users. Counts, such as the batches seen, are averaged and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from coterie.errors import ConfigError
from coterie.experiment.method import ANY_MODEL, NETWORK, Kind, Method, Room
from coterie.experiment.model import Part, Sharing, check_part
from coterie.experiment.privacy import UNITS, Draws, Privacy, Unit, row_draws
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.families.evaluation import judged
from coterie.registry import method
from coterie.wire.messages import Array, Broadcast, Indices, Positions, Rows, Scalars, Weights, dataclass, declare

Single = NDArray[Any]  # float32 for networks, float64 for convex problems
Trained = Part | Literal["all"]
Epochs = Annotated[int, Field(ge=0, le=1_000_000)]

# What users evaluate: their model as it is, or after fine-tuning its head or all of it on their own rows.
AS_IS, HEAD_TUNED, ALL_TUNED = 0, 1, 2
MODES: Mapping[int, str] = {AS_IS: "", HEAD_TUNED: "_ft_head", ALL_TUNED: "_ft_all"}


class Optimizer(Settings):
    """The optimizer of local updates. Its state (momentum, moments) starts anew in each phase of each update."""

    name: Literal["sgd", "adam"] = "sgd"  #: Algorithm of the steps.
    lr: PositiveFloat = 0.01  #: Step size (learning rate).
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5  #: Momentum of sgd, which starts anew in each phase of each update.
    weight_decay: NonNegativeFloat = 0.0  #: Weight decay: this multiple of the weights is added to the gradient.


class PlainSgd(Optimizer):
    """For methods whose formulas assume steps without momentum."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  #: Momentum of sgd. The method's formulas assume 0.


@dataclass(frozen=True)
class Work:
    """Local work of one user in one round, in gradients: passes take one of each of its rows; batches are of phases counted in batches."""

    passes: float = 0
    batches: float = 0


class Training(Settings):
    """Settings of all methods with local updates."""

    WORK: ClassVar[tuple[str, ...]] = ()  # keys that say how long a local update is

    if TYPE_CHECKING:
        name: str

    #: Share r of the n users that take part in a round: r n, rounded, at least one. More users cost more traffic, and make progress
    #: steadier.
    participation: Annotated[float, Field(gt=0, le=1)] = 0.1
    users_per_round: PositiveInt | None = None  #: Number of users in a round, instead of `participation`.
    batch_size: PositiveInt | None = 10  #: Rows of a batch in a local step; null: all rows of the user.
    optimizer: Optimizer = Optimizer()  #: Optimizer of the local steps.
    #: Weights of users in the server's average. rows: by their numbers of training rows. plain: equal, as most papers print it.
    average: Literal["rows", "plain"] = "rows"
    #: Running statistics of batch norm: sent and averaged with shared layers, or private to each user.
    batch_norm: Literal["shared", "private"] = "shared"
    #: Rounds between evaluations on held-out rows, which cost traffic; null: only in the last `evaluate_last` rounds.
    evaluate_every: PositiveInt | None = None
    #: Number of last rounds that are evaluated. The mean of their accuracies is reported beside the accuracy of the final models.
    evaluate_last: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    #: Parts that users fine-tune on their own rows at the end. Each gives an accuracy besides that of the model as it is.
    fine_tune: tuple[Literal["head", "all"], ...] = ("head",)
    fine_tune_epochs: Epochs = 10  #: Passes over a user's rows in fine-tuning.

    @property
    def how(self) -> LocalTraining:
        found = method(self.name)
        assert isinstance(found, LocalTraining)  # noqa: S101 - others have other configurations
        return found

    def phases(self) -> list[dict[str, Any]]:
        """The local update as a list of phases, in the client half's format."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Further settings of the method's local update."""
        return {}

    @model_validator(mode="after")
    def _parts_are_those_of_models(self) -> Self:
        """Finds misspelt parts in phases before anything starts."""
        self.client_options()
        return self

    def phase(self, part: Trained, *, epochs: int | None = None, updates: int | None = None, **changes: Any) -> dict[str, Any]:
        """One phase: `epochs` over the user's rows, or `updates` batches. ConfigError for an unknown part."""
        check_part(part)
        chosen: Optimizer = changes.pop("optimizer", None) or self.optimizer
        moves = {"optimizer": chosen.name, "lr": chosen.lr, "momentum": chosen.momentum, "weight_decay": chosen.weight_decay}
        return {"part": part, "epochs": epochs, "updates": updates, "batch_size": self.batch_size, **moves, **changes}

    @property
    def gradients(self) -> int:
        """Gradients in a local step: more than one where it trains several models, or takes gradients at several points."""
        return 1

    def own_phases(self) -> list[dict[str, Any]]:
        """The phases of a model that a user trains beside the one it returns."""
        return []

    @property
    def work(self) -> Work:
        """The work of a local update; in the mean, where coins decide how long one is."""
        phases, times = [*self.phases(), *self.own_phases()], self.gradients
        return Work(times * sum(phase["epochs"] or 0 for phase in phases), times * sum(phase["updates"] or 0 for phase in phases))

    def keys_for(self, work: Work) -> dict[str, Any] | None:
        """The `WORK` keys for this work, or for the least above it; None where no keys give it."""
        del work
        return None

    def row_draws(self, n_rows: int) -> Draws:
        """The steps of a round on so many rows of a user, in all models that it trains, with `privacy.unit: row`."""
        return row_draws(n_rows, [*self.phases(), *self.own_phases()])

    @property
    def keeps_models(self) -> bool:
        """Whether users keep part of a model, or all of one."""
        how = self.how
        return how.is_personal or how.sharing != "all" or bool(how.private_layers) or self.batch_norm == "private"

    @property
    def modes(self) -> list[int]:
        """What users evaluate at the end."""
        return [AS_IS, *(HEAD_TUNED if part == "head" else ALL_TUNED for part in dict.fromkeys(self.fine_tune))]

    def client_options(self) -> dict[str, Any]:
        """The settings of the client half."""
        epochs = self.fine_tune_epochs
        tuned = {str(HEAD_TUNED): self.phase("head", epochs=epochs), str(ALL_TUNED): self.phase("all", epochs=epochs)}
        return {
            "sharing": self.how.sharing,
            "statistics_travel": self.batch_norm == "shared",
            "phases": self.phases(),
            "fine_tuning": tuned,
            "private_layers": list(self.how.private_layers),
            "update": self.name,
            "settings": self.settings(),
        }

    def n_selected(self, n_users: int) -> int:
        """The number of users in a round."""
        wanted = self.users_per_round or round(self.participation * n_users)
        return min(max(wanted, 1), n_users)


class JointTraining(Training):
    """Methods whose local update trains the whole model at once."""

    WORK: ClassVar[tuple[str, ...]] = ("epochs", "updates")

    #: Passes over a user's rows in a local update, by default 1. More of them save rounds, and let users drift apart.
    epochs: Epochs | None = None
    updates: PositiveInt | None = None  #: Batches in a local update, instead of `epochs`.

    @model_validator(mode="after")
    def _one_of_epochs_and_updates(self) -> Self:
        if self.epochs is not None and self.updates is not None:
            raise ValueError("epochs and updates both say how long a local update is: give one")
        return self

    def phases(self) -> list[dict[str, Any]]:
        """One phase for the whole model."""
        epochs = None if self.updates is not None else 1 if self.epochs is None else self.epochs
        return [self.phase("all", epochs=epochs, updates=self.updates)]

    def keys_for(self, work: Work) -> dict[str, Any] | None:
        """Whole passes, or whole batches."""
        key, value = ("updates", work.batches) if work.batches else ("epochs", work.passes)
        return None if (work.batches and work.passes) or not float(value).is_integer() else {key: math.ceil(value / self.gradients)}


@declare(method="partial", step="start")
class AskStart(Rows):
    """Asks one user for the initial shared tensors of the seed, because the server builds no network."""


@declare(method="partial", step="start", whole=True)
class Start(Rows):
    """phi^0."""

    weights: Annotated[Single, Weights("rows", "shared")]
    counts: Annotated[Indices, Positions("rows", "counts")]


@declare(method="partial", step="shared")
class Shared(Rows):
    """The server sends the shared tensors to the users of this round: FedRep, Algorithm 1, "sends current representation phi^t"."""

    weights: Annotated[Single, Weights("shared")]
    counts: Annotated[Indices, Positions("counts")]


@declare(method="partial", step="shared", total=True)
class Updated(Start):
    """A user returns its shared tensors: "sends updated representation phi_i^{t+1} to server"."""


@declare(method="partial", step="loss", total=True)
class TrainingLoss(Rows):
    """A user's mean loss over the batches of the last phase of its local update."""

    loss: Annotated[Array, Scalars("rows")]


@declare(method="partial", step="evaluation", whole=True)
class Trial(Shared):
    """The shared tensors of a round, which users evaluate and discard."""


@declare(method="partial", step="delivery", whole=True)
class Delivery(Shared):
    """The shared tensors that a user keeps: at the end of a run, or at the start of a new user."""


@declare(method="partial", step="evaluation")
class AskScores(Broadcast):
    """Asks every user to evaluate its model on its held-out rows, in these `MODES`."""

    modes: Annotated[Indices, Positions("modes")]


@declare(method="partial", step="evaluation")
class Scores(Rows):
    """Mean loss and metric (`ProblemConfig.metric`) on the held-out rows; NaN for users without any."""

    loss: Annotated[Array, Scalars("rows", "modes", allows="nan")]
    metric: Annotated[Array, Scalars("rows", "modes", allows="nan")]


@declare(method="partial", step="head")
class TrainHead(Broadcast):
    """Asks new users to train their private tensors on the delivered ones. The result stays with the user."""


# What local updates reveal; a method adds its own messages.
SHARED_UPDATE = Reveal(
    "the shared tensors after local training, and its mean training loss",
    "the update of a round: rows of images have been reconstructed from such updates in the literature. "
    "Private tensors (heads) have no message that could carry them",
    ("partial/start", "partial/shared", "partial/loss", "partial/delivery"),
    summed="of each host, the weighted sums of its drawn users' shared tensors after local training, and of their mean training losses",
    noised="of each host, the sum of its drawn users' changes of the shared tensors, each shortened, with the host's share of the noise",
)
LOCAL_UPDATE: tuple[Reveal, ...] = (SHARED_UPDATE, judged("partial/evaluation"))


ROOM = Room(
    steps={
        "start": "the first shared tensors, from one user",
        "shared": "the shared tensors, to the users drawn and back",
        "loss": "losses of local updates",
        "evaluation": "what is judged, and how users judge it",
        "delivery": "the final shared tensors",
        "head": "the order to train new heads, which stay where they are",
    }
)


def _adapted(config: Training) -> Mapping[str, Any]:
    """New users train their heads as the run's users did."""
    if config.how.private_layers:
        kept = ", ".join(config.how.private_layers)
        raise ConfigError(f"has kept layers of its users ({kept}), which new users cannot train apart: want one that keeps heads")
    if (n_models := config.client_options().get("n_models")) is not None:
        raise ConfigError(f"has left {n_models} models, want a run with one that new users can start from")
    trained = config.model_dump(mode="json")
    return {
        "shared": trained.get("shared", config.how.sharing),
        "batch_size": trained["batch_size"],
        "batch_norm": trained["batch_norm"],
        "optimizer": trained.get("head_optimizer") or trained["optimizer"],
    }


# Units that a method can protect whose users take steps on their rows, and return what the server averages.
STEPS_AND_MEAN: frozenset[Unit] = frozenset(UNITS)


def private_defaults(privacy: Privacy) -> Mapping[str, Any]:
    """Where hosts add the noise, all users take part in each round, and nobody judges a model that was trained without noise.

    With user: a plain mean.
    """
    of_hosts = {"participation": 1.0, "fine_tune": ()} if privacy.is_of_hosts else {}
    return {**of_hosts, "average": "plain"} if privacy.unit == "user" else of_hosts


def leaks(config: Training, privacy: Privacy) -> str:
    if privacy.unit == "user" and config.average == "rows":
        return "method.average is 'rows', but privacy.unit 'user' bounds each user's part in a plain mean: want plain"
    if privacy.is_of_hosts and config.fine_tune:
        key = "unit 'row'" if privacy.unit == "row" else "where 'hosts'"
        return f"method.fine_tune trains on rows without noise, which privacy.{key} does not allow: want []"
    if privacy.unit == "row" and (config.users_per_round is not None or config.participation < 1):
        return "privacy.unit is 'row', where every user takes part in each round: want method.participation 1 and no users_per_round"
    return ""


def _no_rule(config: Training, _: Kind) -> str:
    return "users share nothing, so one that lies harms nobody else" if config.how.sharing == "none" else ""


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Method):
    """A method with local updates. The client module's `UPDATE` is its local update; the default is the phases of `config.phases`."""

    config: type[Training]  #: the keys of `method` in an experiment
    reveals: tuple[Reveal, ...] = LOCAL_UPDATE  #: with those of messages of its own: `(*LOCAL_UPDATE, Reveal(...))`
    models: frozenset[Kind] = NETWORK  #: supported kinds
    room: str = "partial"  #: the family whose halves it uses
    users_need_minimisers: bool = False  #: steps on convex losses do not need them
    adapted: Callable[[Any], Mapping[str, Any]] | None = _adapted  #: the section `method` of new users of a finished run
    #: With `exact_sums`, the server averages from sums for these kinds of models: none where `ServerUpdate.taken` uses each user's tensors.
    sums: frozenset[Kind] = ANY_MODEL
    needs_sizes: bool = True  #: for averages weighted by rows, and accuracies over users with held-out rows
    private_defaults: Callable[[Privacy], Mapping[str, Any]] = private_defaults  #: see `Method`
    leaks: Callable[[Any, Privacy], str] = leaks  #: see `Method`
    no_rule: Callable[[Any, Kind], str] = _no_rule  #: see `Method`
    sharing: Sharing = "all"  #: the shared part
    private_layers: tuple[str, ...] = ()  #: torch's names of layers that are always private
    is_personal: bool = False  #: whether users evaluate models of their own even if all tensors are shared

    def fault(self, listed: Mapping[str, Any]) -> str:
        """A method is personal only if something stays with its users."""
        if not self.is_personal or self.sharing != "all" or self.private_layers:
            return ""
        update = listed.get("UPDATE")
        if update is not None and (type(update).__name__ != "LocalUpdate" or update.judged is not type(update).judged):
            return ""  # a text that names it, or another class, is looked at when it is imported
        lacks = "there is no UPDATE" if update is None else "UPDATE has no `judged`"
        wanted = "want LocalUpdate(update, start=own_model, judged=judge_own), a private part (sharing), or is_personal=False"
        return f"has is_personal=True, but nothing stays with a user: all tensors are shared, and {lacks}; {wanted}"
