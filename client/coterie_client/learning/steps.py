"""The loop of steps of one phase, for arrays of any library with numpy's operators.

A step takes its gradient at the parameters w, or where the rule of the phase says: it evaluates the plain gradient (`Slope`) there, and
restores w. What it trains beside w is returned at the end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie_client.learning.phases import Epoch, Phase

Numbers = Any  # an array of the slope's library
Gradients = list[Any]  # one for each parameter, None if the loss does not depend on it


class Optimizer(Protocol):
    """Moves its parameters along their gradients. Its state starts empty."""

    def step(self, gradients: Sequence[Numbers | None]) -> None:
        """One step. Parameters without a gradient stay."""


class Slope(Protocol):
    """The loss of some rows, and its gradients at the current parameters."""

    @property
    def names(self) -> Sequence[str]: ...  # of the parameters that move

    @property
    def parameters(self) -> Sequence[Numbers]: ...  # which are moved in place

    def __call__(self, rows: Numbers) -> tuple[Numbers, Gradients]:
        """The loss and its gradients, in fresh arrays."""

    def values(self) -> list[Numbers]:
        """Copies of the parameters."""

    def put(self, values: Sequence[Numbers]) -> None:
        """Sets the parameters."""

    def state(self) -> Mapping[str, Numbers]:
        """All current tensors of the model, including those without a gradient."""

    def array(self, numbers: NDArray[Any]) -> Numbers:
        """A copy in the slope's library."""

    def batches(self, epoch: Epoch) -> Sequence[Numbers]:
        """The row numbers of each step."""

    def optimizer(self, phase: Phase, parameters: Sequence[Numbers]) -> Optimizer:
        """A new optimizer of the phase's kind."""

    def apart(self, rest: Mapping[str, Numbers]) -> AbstractContextManager[None]:
        """A context for another model, with running statistics `rest`. Afterwards the random state is as before."""


class Gradient(Protocol):
    """Computes the gradient of a step."""

    def __call__(self, rows: Numbers, *others: Numbers) -> tuple[Numbers, Gradients]:
        """The loss to report, and the gradients for the optimizer. `others` are the step's further batches."""

    def beside(self) -> dict[str, Numbers]:
        """What was trained beside the parameters."""


def gradient(phase: Phase, slope: Slope) -> Gradient:
    return _Plain(slope) if phase.rule is None else phase.rule.on(slope, phase)


class _Plain:
    def __init__(self, slope: Slope) -> None:
        self._slope = slope

    def __call__(self, rows: Numbers, *_: Numbers) -> tuple[Numbers, Gradients]:
        return self._slope(rows)

    def beside(self) -> dict[str, Numbers]:
        return {}


def evaluated(slope: Slope, rows: Numbers) -> tuple[Numbers, Gradients]:
    """Loss and gradients; 0 for parameters that the loss does not depend on."""
    value, gradients = slope(rows)
    return value, [0 * w if g is None else g for w, g in zip(slope.parameters, gradients, strict=True)]


class Trained(NamedTuple):
    """The result of a phase."""

    loss: Any  # mean over its batches, None without any; (k,) of several users
    beside: Mapping[str, Numbers] = {}  # trained by its rule, beside the parameters


def train(slope: Slope, follow: Gradient, steps: Iterable[Sequence[Epoch]], phase: Phase) -> Trained:
    """Moves the parameters of `slope`. `steps` holds tuples of epochs: one for each batch that the rule takes per step.

    Everything here is elementwise, so a slope may have the parameters and losses of several users, with a first axis of users.
    """
    optimizer = slope.optimizer(phase, slope.parameters)
    correct = _corrections(phase, slope)
    total: Any = 0.0
    n_steps = 0
    for epoch in steps:
        for batches in zip(*(slope.batches(drawn) for drawn in epoch), strict=True):
            value, gradients = follow(*batches)
            correct(gradients)
            optimizer.step(gradients)
            total = total + (value if isinstance(value, np.ndarray) else float(value))
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
