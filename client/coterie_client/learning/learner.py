"""The interface between local updates of the methods and the losses: training and evaluating one user's model."""

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
    user: str = ""  # for messages


@dataclass(frozen=True)
class Draw:
    """The key of the random streams of one local update."""

    seed: int
    user: str
    round: int
    purpose: str

    def another(self, what: str) -> Draw:
        """The key of other streams for the same update."""
        return replace(self, purpose=f"{self.purpose}, {what}")

    @property
    def place(self) -> str:
        """The user and round, for messages."""
        return f"user {self.user!r} in round {self.round}"


@dataclass(frozen=True)
class Fitted:
    """The result of a local update."""

    tensors: dict[str, NDArray[Any]]
    loss: float  # mean over the batches of the last phase that had a batch
    n_steps: int  # of all phases
    beside: dict[str, NDArray[Any]] = field(default_factory=dict)  # trained by the rules, beside the model

    def checked(self, place: str) -> Fitted:
        """Itself. RunError naming place and tensor if a number is not finite."""
        for name, array in (*self.tensors.items(), *self.beside.items()):
            _check_finite(place, f"tensor {name!r}", array)
        _check_finite(place, "the loss", np.array(self.loss))
        return self


class Learner(Protocol):
    """Trains and evaluates models of one kind. It never changes its arguments, returns fresh arrays, and keeps no state between users."""

    @property
    def tensors(self) -> Sequence[TensorInfo]: ...

    def initial(self, number: int = 0) -> dict[str, NDArray[Any]]:
        """The tensors' initial values, drawn from the seed. Models with another number start elsewhere."""

    def fit(self, tensors: Tensors, rows: Rows, phases: Sequence[Phase], draw: Draw) -> Fitted:
        """One local update of one user. RunError naming user, round and tensor if a number is not finite."""

    def judge(self, tensors: Tensors, rows: Rows) -> tuple[float, float]:
        """Mean loss, and accuracy or another metric of the loss, on the rows."""


class Network(Learner, Protocol):
    """The network of a host's users, which torch builds and trains (`coterie_client.nets`). Halves see its tensors as arrays."""

    @property
    def numerics(self) -> str:
        """Describes what determines the bits of its arithmetic."""


def _check_finite(place: str, what: str, found: NDArray[Any]) -> None:
    if not np.isfinite(found).all():
        value = "nan" if np.isnan(found).any() else "inf"
        raise RunError(f"{place}: {what} has {value} after training, want finite numbers: a smaller learning rate may help", Finding("M1"))
