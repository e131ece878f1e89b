"""The loop of steps of one phase, for arrays of any library that has the operators of numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from coterie_client.learning.batches import Epoch
from coterie_client.learning.phases import Phase

Numbers = Any  # an array of the slope's library
Gradients = list[Any]  # one for each parameter, None where the loss does not depend on it


class Optimizer(Protocol):
    """Moves its parameters along their gradients; its memory begins with it."""

    def step(self, gradients: Sequence[Numbers | None]) -> None:
        """One step. Parameters without a gradient stay."""


class Slope(Protocol):
    """The plain loss of some rows and its gradients, where the parameters are."""

    @property
    def names(self) -> Sequence[str]: ...  # of the parameters that move

    @property
    def parameters(self) -> Sequence[Numbers]: ...  # which are moved in place

    def __call__(self, rows: Numbers) -> tuple[Numbers, Gradients]:
        """The loss and its gradients, which are fresh."""

    def values(self) -> list[Numbers]:
        """What the parameters are now."""

    def put(self, values: Sequence[Numbers]) -> None:
        """Sets the parameters."""

    def state(self) -> Mapping[str, Numbers]:
        """All tensors of the model as they are now, those that no gradient moves among them."""

    def array(self, numbers: NDArray[Any]) -> Numbers:
        """A copy in the slope's library."""

    def batches(self, epoch: Epoch) -> Sequence[Numbers]:
        """The row numbers of each step."""

    def optimizer(self, phase: Phase, parameters: Sequence[Numbers]) -> Optimizer:
        """A new one of the kind that the phase says."""

    def apart(self, rest: Mapping[str, Numbers]) -> AbstractContextManager[None]:
        """For a model beside the parameters' own: `rest` are then its running statistics, and what is drawn is drawn again afterwards."""


class Gradient(Protocol):
    """Where a step takes its gradient."""

    def __call__(self, rows: Numbers, *others: Numbers) -> tuple[Numbers, Gradients]:
        """The loss that is told of a step, and what the optimizer is to follow. `others` are its further batches."""

    def beside(self) -> dict[str, Numbers]:
        """What was trained beside the parameters."""


class Trained(NamedTuple):
    """What a phase leaves."""

    loss: float | None  # mean over its batches, None without any
    beside: Mapping[str, Numbers] = {}  # what its rule has trained beside the parameters


def train(slope: Slope, follow: Gradient, steps: Iterable[Sequence[Epoch]], phase: Phase) -> Trained:
    """Moves the parameters of `slope`. `steps` are epochs side by side: of each step one batch, or as many as its rule takes."""
    optimizer = slope.optimizer(phase, slope.parameters)
    correct = _corrections(phase, slope)
    total, n_steps = 0.0, 0
    for epoch in steps:
        for batches in zip(*(slope.batches(drawn) for drawn in epoch), strict=True):
            value, gradients = follow(*batches)
            correct(gradients)
            optimizer.step(gradients)
            total += float(value)
            n_steps += 1
    return Trained(total / n_steps if n_steps else None, follow.beside())


def _corrections(phase: Phase, slope: Slope) -> Callable[[Gradients], None]:
    """Adds mu (w - anchor) and the shift of the phase to gradients."""
    mu, anchors = phase.pull or (0.0, {})
    shifts = phase.shift or {}
    pulled = [(place, slope.array(anchors[name])) for place, name in enumerate(slope.names) if name in anchors]
    shifted = [(place, slope.array(shifts[name])) for place, name in enumerate(slope.names) if name in shifts]

    def apply(gradients: Gradients) -> None:
        for place, anchor in pulled:
            if gradients[place] is not None:
                gradients[place] += mu * (slope.parameters[place] - anchor)
        for place, shift in shifted:
            if gradients[place] is not None:
                gradients[place] += shift

    return apply
