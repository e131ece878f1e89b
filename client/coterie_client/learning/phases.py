"""What a local update is to do: phases of minibatch steps, and where a step takes its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from numpy.typing import NDArray

from coterie.experiment.model import Part, check_part

if TYPE_CHECKING:
    from coterie_client.learning.steps import Gradient, Slope


class Rule(Protocol):
    """How a method takes its gradients elsewhere than at the parameters."""

    @property
    def n_batches(self) -> int:
        """How many batches of rows a step takes, each from draws of its own."""
        ...

    def on(self, slope: Slope, phase: Phase) -> Gradient:
        """The rule at work on a slope, for one phase."""
        ...


@dataclass(frozen=True)
class Phase:
    """Minibatch steps on a part of the model: `epochs` over the user's rows, or `updates` steps (tau); one of them is None."""

    part: Part | Literal["all"]
    epochs: int | None
    updates: int | None
    batch_size: int | None  # rows; None: all of them
    lr: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0
    cache: bool = True  # the head's features are computed once, where the phase trains the head
    pull: tuple[float, Mapping[str, NDArray[Any]]] | None = None  # mu and anchor: mu (w - anchor) is added to the gradient
    shift: Mapping[str, NDArray[Any]] | None = None  # added to the gradient
    rule: Rule | None = None  # where the gradient is taken, if not at the parameters as they are

    def __post_init__(self) -> None:
        """ConfigError for a part that models do not have: a misspelt head would be the representation."""
        check_part(self.part)

    def inside(self, prefix: str) -> Phase:
        """The phase for one module of a network, where tensors are called without the module's `prefix`."""

        def cut(named: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}

        pull = None if self.pull is None else (self.pull[0], cut(self.pull[1]))
        return replace(self, pull=pull, shift=None if self.shift is None else cut(self.shift))
