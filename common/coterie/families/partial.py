"""Partial sharing: what methods of local updates have in common. A model's tensors are split by name; the shared ones travel, and
the private ones stay in their user's state, for which there is no message. The model is a network or, for methods that share all of it, the
x of a convex problem (`coterie.experiment.model.convex_tensors`): the loss of a batch is then the mean, over its rows, of the f_il whose
mean over all rows is f_i.

A round: the server draws r n users and sends them the shared tensors; each trains its model on its own rows, in phases that the
method gives, and returns its shared tensors; the server averages them. FedRep shares the representation and trains the head first; FedPer
shares the representation and trains all at once; FedAvg shares all; LG-FedAvg shares the head.

Kinds of layers may stay with their users wherever they are (`private_layers`).
Of batch norm, the running statistics travel and are averaged like parameters where their layer is shared (`batch_norm: shared`), or stay
with their users (`private`). Counts, such as the batches seen, are averaged and rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from coterie.experiment.method import NETWORK, Kind, Method
from coterie.experiment.model import Part, Sharing, check_part
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.families.evaluation import judged
from coterie.registry import method
from coterie.wire.messages import Array, Broadcast, Indices, Positions, Rows, Scalars, Weights, dataclass, declare

Single = NDArray[Any]  # float32 of networks, float64 of convex problems
Trained = Part | Literal["all"]
Epochs = Annotated[int, Field(ge=0, le=1_000_000)]

# What users are asked to judge: their model as it is, and after fine-tuning its head or all of it on their own rows.
AS_IS, HEAD_TUNED, ALL_TUNED = 0, 1, 2
MODES: Mapping[int, str] = {AS_IS: "", HEAD_TUNED: "_ft_head", ALL_TUNED: "_ft_all"}


class Optimizer(Settings):
    """How a local update moves; its memory (momentum, moments) is new in each phase of each update."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: PositiveFloat = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5  # of sgd
    weight_decay: NonNegativeFloat = 0.0


class PlainSgd(Optimizer):
    """Of methods whose formulas are about steps without memory."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Training(Settings):
    """What all of these methods need to know."""

    if TYPE_CHECKING:
        name: str

    participation: Annotated[float, Field(gt=0, le=1)] = 0.1  # r: r n users a round, rounded, at least one
    users_per_round: PositiveInt | None = None  # instead of r
    batch_size: PositiveInt | None = 10  # None: all rows of the user
    optimizer: Optimizer = Optimizer()
    average: Literal["rows", "plain"] = "rows"  # users weigh as many as they have rows, or the same as in print
    batch_norm: Literal["shared", "private"] = "shared"
    evaluate_every: PositiveInt | None = None  # rounds; absent: in the last ones alone
    evaluate_last: Annotated[int, Field(ge=0, le=1_000_000)] = 10  # rounds whose accuracies are averaged at the end
    # At the end users also judge what becomes of their model when they train it once more.
    fine_tune: tuple[Literal["head", "all"], ...] = ("head",)
    fine_tune_epochs: Epochs = 10

    @property
    def how(self) -> LocalTraining:
        """The method."""
        found = method(self.name)
        assert isinstance(found, LocalTraining)  # noqa: S101 - others have other configurations
        return found

    def phases(self) -> list[dict[str, Any]]:
        """The local update, part by part in order, as the client half takes them."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What the method's local update needs to know beside the phases."""
        return {}

    @model_validator(mode="after")
    def _parts_are_those_of_models(self) -> Self:
        """A part that is misspelt in phases is a mistake before anything starts."""
        self.client_options()
        return self

    def phase(self, part: Trained, *, epochs: int | None = None, updates: int | None = None, **changes: Any) -> dict[str, Any]:
        """One phase: `epochs` over the user's rows, or `updates` batches. ConfigError for a part that models do not have."""
        check_part(part)
        chosen: Optimizer = changes.pop("optimizer", None) or self.optimizer
        moves = {"optimizer": chosen.name, "lr": chosen.lr, "momentum": chosen.momentum, "weight_decay": chosen.weight_decay}
        return {"part": part, "epochs": epochs, "updates": updates, "batch_size": self.batch_size, **moves, **changes}

    @property
    def modes(self) -> list[int]:
        """What users judge at the end."""
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
        """How many users take part in a round."""
        wanted = self.users_per_round or round(self.participation * n_users)
        return min(max(wanted, 1), n_users)


class JointTraining(Training):
    """Methods whose local update trains all of the model at once."""

    epochs: Epochs | None = None  # of a local update; 1 where neither is given
    updates: PositiveInt | None = None  # batches instead of epochs

    @model_validator(mode="after")
    def _one_of_epochs_and_updates(self) -> Self:
        if self.epochs is not None and self.updates is not None:
            raise ValueError("epochs and updates both say how long a local update is: give one")
        return self

    def phases(self) -> list[dict[str, Any]]:
        """All at once."""
        epochs = None if self.updates is not None else 1 if self.epochs is None else self.epochs
        return [self.phase("all", epochs=epochs, updates=self.updates)]


@declare(method="partial", step="start")
@dataclass(frozen=True)
class AskStart(Rows):
    """Asks one user for the shared tensors as the seed gives them: the server builds no network."""


@declare(method="partial", step="start")
@dataclass(frozen=True)
class Start(Rows):
    """phi^0."""

    weights: Annotated[Single, Weights("rows", "shared")]
    counts: Annotated[Indices, Positions("rows", "counts")]


@declare(method="partial", step="shared")
@dataclass(frozen=True)
class Shared(Rows):
    """The server sends the shared tensors to the users of this round: FedRep, Algorithm 1, "sends current representation phi^t"."""

    weights: Annotated[Single, Weights("shared")]
    counts: Annotated[Indices, Positions("counts")]


@declare(method="partial", step="shared")
@dataclass(frozen=True)
class Updated(Rows):
    """A user returns its shared tensors: "sends updated representation phi_i^{t+1} to server"."""

    weights: Annotated[Single, Weights("rows", "shared")]
    counts: Annotated[Indices, Positions("rows", "counts")]


@declare(method="partial", step="loss")
@dataclass(frozen=True)
class TrainingLoss(Rows):
    """A user's mean loss over the batches of the last phase of its local update."""

    loss: Annotated[Array, Scalars("rows")]


@declare(method="partial", step="evaluation")
@dataclass(frozen=True)
class Trial(Rows):
    """The shared tensors of a round, for users to judge and forget."""

    weights: Annotated[Single, Weights("shared")]
    counts: Annotated[Indices, Positions("counts")]


@declare(method="partial", step="delivery")
@dataclass(frozen=True)
class Delivery(Rows):
    """The shared tensors that a user keeps: those of the end of a run, or those that a new user starts from."""

    weights: Annotated[Single, Weights("shared")]
    counts: Annotated[Indices, Positions("counts")]


@declare(method="partial", step="evaluation")
@dataclass(frozen=True)
class AskScores(Broadcast):
    """Asks every user to judge its model on its held-out rows, in these `MODES`."""

    modes: Annotated[Indices, Positions("modes")]


@declare(method="partial", step="evaluation")
@dataclass(frozen=True)
class Scores(Rows):
    """Mean loss and metric (`ProblemConfig.metric`) on the held-out rows; NaN for users without any."""

    loss: Annotated[Array, Scalars("rows", "modes", allows="nan")]
    metric: Annotated[Array, Scalars("rows", "modes", allows="nan")]


@declare(method="partial", step="head")
@dataclass(frozen=True)
class TrainHead(Broadcast):
    """Asks new users to train their private tensors on what was delivered; nothing of it comes back."""


# What the methods of local updates tell; a method adds what it sends beside.
SHARED_UPDATE = Reveal(
    "the shared tensors after local training, and its mean training loss",
    "the update of a round: rows of images have been reconstructed from such updates in the literature. "
    "Private tensors (heads) have no message that could carry them",
    ("partial/start", "partial/shared", "partial/loss", "partial/delivery"),
)
LOCAL_UPDATE: tuple[Reveal, ...] = (SHARED_UPDATE, judged("partial/evaluation"))


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Method):
    """A method of local updates. `UPDATE` in its client module is its local update; without one it is the phases of `config.phases`."""

    config: type[Training]
    reveals: tuple[Reveal, ...] = LOCAL_UPDATE
    models: frozenset[Kind] = NETWORK
    room: str = "partial"
    users_need_minimisers: bool = False  # of convex losses: steps need none
    needs_sizes: bool = True  # averages are by rows, accuracies over users with held-out ones
    sharing: Sharing = "all"  # which part travels
    private_layers: tuple[str, ...] = ()  # torch's names of layers that stay with their users whatever their part is
    is_personal: bool = False  # whether users judge models of their own even where all tensors travel
