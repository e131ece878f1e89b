"""Local updates: the plan in phases, the rows of each step, and the interface that trains and evaluates one user's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.streams import orders, stream
from coterie.errors import RunError
from coterie.experiment.model import Part, TensorInfo, check_part
from coterie.findings import Finding

if TYPE_CHECKING:
    from coterie_client.learning.private import RowNoise
    from coterie_client.learning.steps import Gradient, Slope

Tensors = Mapping[str, NDArray[Any]]


class Rule(Protocol):
    """A method's rule for taking gradients elsewhere than at the parameters."""

    @property
    def n_batches(self) -> int:
        """Batches of rows per step, each with its own random stream."""

    def on(self, slope: Slope, phase: Phase) -> Gradient:
        """The gradient of a slope in one phase."""


@runtime_checkable
class RuleOfUsers(Rule, Protocol):
    """A rule with arrays that may have a first axis of users."""

    def of_user(self, number: int) -> Rule:
        """The rule of one of them."""


@dataclass(frozen=True)
class Phase:
    """Minibatch steps on a part of the model: `epochs` over the user's rows, or `updates` steps (tau). One of the two is None."""

    part: Part | Literal["all"]
    epochs: int | None
    updates: int | None
    batch_size: int | None  # rows; None: all of them
    lr: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0
    cache: bool = True  # compute the head's features once, if the phase trains the head
    pull: tuple[float, Mapping[str, NDArray[Any]]] | None = None  # mu and anchor: mu (w - anchor) is added to the gradient
    shift: Mapping[str, NDArray[Any]] | None = None  # added to the gradient
    rule: Rule | None = None  # where to take the gradient; None: at the parameters

    def __post_init__(self) -> None:
        """ConfigError for an unknown part, since a misspelt "head" would mean the representation."""
        check_part(self.part)

    def of_user(self, number: int) -> Phase:
        """The phase of one of several users, whose arrays have a first axis of users."""

        def own(named: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name: array[number] for name, array in named.items()}

        pull = None if self.pull is None else (self.pull[0], own(self.pull[1]))
        rule = self.rule.of_user(number) if isinstance(self.rule, RuleOfUsers) else self.rule
        return replace(self, pull=pull, shift=None if self.shift is None else own(self.shift), rule=rule)

    def inside(self, prefix: str) -> Phase:
        """The phase for one module of a network, with the module's `prefix` cut from tensor names."""

        def cut(named: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}

        pull = None if self.pull is None else (self.pull[0], cut(self.pull[1]))
        return replace(self, pull=pull, shift=None if self.shift is None else cut(self.shift))


@dataclass(frozen=True)
class Rows:
    """A user's rows (m, ...) and targets (m,)."""

    features: NDArray[Any]
    target: NDArray[Any]
    user: str = ""  # for messages


@dataclass(frozen=True)
class Draw:
    """The key of the random streams of one local update, or of those of several users at once."""

    seed: int
    user: str | tuple[str, ...]
    round: int
    purpose: str

    def another(self, what: str) -> Draw:
        """The key of other streams for the same update."""
        return replace(self, purpose=f"{self.purpose}, {what}")

    def order(self, n_rows: int, *index: int) -> Indices:
        """(n_rows,) the rows in the order of one pass, (k, n_rows) of several users."""
        if isinstance(self.user, str):
            return stream(self.seed, self.purpose, self.user, self.round, *index).order(n_rows)
        n = len(self.user)
        return np.array(orders(self.seed, self.purpose, self.user, [(self.round, *index)] * n, np.full(n, n_rows)))

    def orders(self, counts: Indices, users: Indices, indices: Sequence[tuple[int, ...]]) -> Sequence[Indices]:
        """The rows in the order of some passes (n,): `counts[i]` of user `users[i]` in its pass `indices[i]`."""
        numbers = [(self.round, *index) for index in indices]
        return orders(self.seed, self.purpose, [self.user[i] for i in users.tolist()], numbers, counts)

    def of_user(self, number: int) -> Draw:
        """The key of one of the users."""
        return replace(self, user=self.user[number])

    def place(self, number: int = 0) -> str:
        """The user (of several, by its number) and round, for messages."""
        return f"user {self.user if isinstance(self.user, str) else self.user[number]!r} in round {self.round}"


@dataclass(frozen=True)
class Fitted:
    """The result of a local update; of several users at once, loss and arrays have a first axis of users."""

    tensors: dict[str, NDArray[Any]]
    loss: Any  # a float: the mean over the batches of the last phase that had a batch
    n_steps: int  # of all phases
    beside: dict[str, NDArray[Any]] = field(default_factory=dict)  # trained by the rules, beside the model

    def checked(self, draw: Draw) -> Fitted:
        """Itself. RunError naming user, round and tensor if a number is not finite."""
        for name, array in (*self.tensors.items(), *self.beside.items()):
            _check_finite(draw, f"tensor {name!r}", array)
        _check_finite(draw, "the loss", np.array(self.loss))
        return self


class Learner(Protocol):
    """Trains and evaluates models of one kind. It never changes its arguments, returns fresh arrays, and keeps no state between users."""

    @property
    def tensors(self) -> Sequence[TensorInfo]: ...

    def initial(self, number: int = 0) -> dict[str, NDArray[Any]]:
        """The tensors' initial values, drawn from the seed. Models with another number start elsewhere."""

    def fit(self, tensors: Tensors, rows: Rows, phases: Sequence[Phase], draw: Draw, noise: RowNoise | None = None) -> Fitted:
        """One local update of one user. RunError naming user, round and tensor if a number is not finite.

        With noise, no row decides much. No loss is computed, and 0 stands for it: it would be exact, and an infinite one would end the run.
        """

    def judge(self, tensors: Tensors, rows: Rows) -> tuple[float, float]:
        """Mean loss, and accuracy or another metric of the loss, on the rows."""


class Network(Learner, Protocol):
    """The network of a host's users, which torch builds and trains (`coterie_client.nets`). Halves see its tensors as arrays."""

    def check_rows_apart(self) -> None:
        """ConfigError that names a layer in which rows are not apart, so that the gradient of a single row cannot be shortened."""

    @property
    def is_stacked(self) -> bool:
        """Whether several users may be trained at once."""

    def stacks(self, counts: Indices, phases: Sequence[Phase]) -> Iterator[Indices]:
        """The places, in a list of users with these numbers of rows, of those who are trained at once."""

    def fit_together(self, tensors: Tensors, rows: Sequence[Rows], phases: Sequence[Phase], draw: Draw) -> Fitted:
        """As `fit`, for several users: arrays have a first axis of users."""

    def judge_together(self, tensors: Tensors, rows: Sequence[Rows]) -> tuple[Array, Array]:
        """As `judge`, with the same bits, for several users, if `is_stacked`."""

    @property
    def numerics(self) -> str:
        """Describes what determines the bits of its arithmetic."""


def _check_finite(draw: Draw, what: str, found: NDArray[Any]) -> None:
    if not np.isfinite(found).all():
        number = 0
        if not isinstance(draw.user, str):
            number = int(np.argwhere(~np.isfinite(found))[0, 0])
            found = found[number]
        place = draw.place(number)
        value = "nan" if np.isnan(found).any() else "inf"
        raise RunError(f"{place}: {what} has {value} after training, want finite numbers: a smaller learning rate may help", Finding("M1"))


class Epoch(NamedTuple):
    """Row numbers of all steps in order, with a first axis of users where there are several, and the batch size of each step."""

    order: Indices
    sizes: list[int]


def _sizes(n_rows: int, phase: Phase) -> list[int]:
    """The batch sizes of one epoch. A last batch of one row joins the previous one, as batch norm needs two (unless all have one)."""
    starts = list(range(0, n_rows, phase.batch_size or n_rows))
    if len(starts) > 1 and n_rows - starts[-1] == 1 and phase.batch_size != 1:
        starts.pop()
    return [end - start for start, end in zip(starts, [*starts[1:], n_rows], strict=True)]


def count_steps(n_rows: int, phase: Phase) -> int:
    lengths = (phase.updates, None if phase.epochs is None else phase.epochs * len(_sizes(n_rows, phase)))
    return min(length for length in lengths if length is not None)


def steps_of(n_rows: int, phase: Phase, draw: Draw, number: int) -> Iterator[tuple[Epoch, ...]]:
    """Tuples of epochs for phase `number`, one epoch for each batch that the rule takes per step. Each has its own random stream."""
    further = range(1, 1 if phase.rule is None else phase.rule.n_batches)
    draws = [draw, *(draw.another(f"batch {k}") for k in further)]
    return zip(*(epochs(n_rows, phase, each, number) for each in draws), strict=True)


def epochs(n_rows: int, phase: Phase, draw: Draw, number: int) -> Iterator[Epoch]:
    """The epochs of phase `number`, which counts from 0."""
    sizes, n_steps = _sizes(n_rows, phase), count_steps(n_rows, phase)
    done = epoch = 0
    while done < n_steps:
        order = draw.order(n_rows, number, epoch)
        taken = sizes[: n_steps - done]
        yield Epoch(order[..., : sum(taken)], taken)
        done += len(taken)
        epoch += 1
