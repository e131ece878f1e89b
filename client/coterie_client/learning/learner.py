"""What trains and judges the model of a user: the seam between the methods' local updates and the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.experiment.model import TensorInfo
from coterie.findings import Finding
from coterie_client.learning.phases import Phase

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Rows:
    """A user's rows (m, ...) and targets (m,)."""

    features: NDArray[Any]
    target: NDArray[Any]
    user: str = ""  # whose they are, for sentences


@dataclass(frozen=True)
class Draw:
    """What names the random streams of one local update."""

    seed: int
    user: str
    round: int
    purpose: str

    def another(self, what: str) -> Draw:
        """For numbers beside those of this one."""
        return replace(self, purpose=f"{self.purpose}, {what}")

    @property
    def place(self) -> str:
        """The middle of a sentence about the update."""
        return f"user {self.user!r} in round {self.round}"


@dataclass(frozen=True)
class Fitted:
    """What a local update leaves."""

    tensors: dict[str, NDArray[Any]]
    loss: float  # mean over the batches of the last phase that had any
    n_steps: int  # of all phases
    beside: dict[str, NDArray[Any]] = field(default_factory=dict)  # what the rules of the phases have trained beside the model

    def checked(self, place: str) -> Fitted:
        """Itself. RunError that names place and tensor of a number that is not finite."""
        for name, array in (*self.tensors.items(), *self.beside.items()):
            _check_finite(place, f"tensor {name!r}", array)
        _check_finite(place, "the loss", np.array(self.loss))
        return self


class Learner(Protocol):
    """Trains and judges models of one kind. Arrays handed in are never changed, results are fresh, and nothing stays for the next user."""

    @property
    def tensors(self) -> Sequence[TensorInfo]: ...

    def initial(self, number: int = 0) -> dict[str, NDArray[Any]]:
        """The tensors' first values, which the seed gives; of a model with another number others."""

    def fit(self, tensors: Tensors, rows: Rows, phases: Sequence[Phase], draw: Draw) -> Fitted:
        """One local update of one user, from its tensors. RunError that names user, round and tensor of a number that is not finite."""

    def judge(self, tensors: Tensors, rows: Rows) -> tuple[float, float]:
        """Mean loss, and accuracy or another metric of the loss, on the rows."""


class Network(Learner, Protocol):
    """The network of a host's users, which torch builds and trains (`coterie_client.nets`); halves see its tensors as arrays."""

    @property
    def numerics(self) -> str:
        """What decides the bits of its arithmetic."""
        ...


def _check_finite(place: str, what: str, found: NDArray[Any]) -> None:
    if not np.isfinite(found).all():
        value = "nan" if np.isnan(found).any() else "inf"
        raise RunError(f"{place}: {what} has {value} after training, want finite numbers: a smaller learning rate may help", Finding("M1"))
