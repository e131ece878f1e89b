"""The plan of a local update: phases of steps, and the interface of rules that take gradients elsewhere than at w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from numpy.typing import NDArray

from coterie.experiment.model import Part, check_part

if TYPE_CHECKING:
    from coterie_client.learning.steps import Gradient, Slope


class Rule(Protocol):
    """A method's rule for taking gradients elsewhere than at the parameters."""

    @property
    def n_batches(self) -> int:
        """Batches of rows per step, each with its own random stream."""

    def on(self, slope: Slope, phase: Phase) -> Gradient:
        """The gradient of a slope in one phase."""


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

    def inside(self, prefix: str) -> Phase:
        """The phase for one module of a network, with the module's `prefix` cut from tensor names."""

        def cut(named: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}

        pull = None if self.pull is None else (self.pull[0], cut(self.pull[1]))
        return replace(self, pull=pull, shift=None if self.shift is None else cut(self.shift))
