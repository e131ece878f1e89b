"""What a local update is to do: phases, and the rules by which methods take gradients elsewhere than at the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import NDArray

from coterie.experiment.model import Part, check_part

ALPHA = "alpha of the mix"  # beside the tensors of a mix's own model


@dataclass(frozen=True)
class Adapted:
    """Of f(w - rate grad f(w)), with independent batches D, D' and D'' for inner step, outer gradient and Hessian: Per-FedAvg.

    "fo": g = grad f(w - rate grad f(w; D); D'). "hf": g - rate H(w) g, the product with the Hessian from gradients on both sides of w,
    (grad f(w + delta g; D'') - grad f(w - delta g; D'')) / (2 delta).
    """

    rate: float
    hessian: Literal["fo", "hf"]
    delta: float

    @property
    def n_batches(self) -> int:
        return 3 if self.hessian == "hf" else 2


@dataclass(frozen=True)
class Envelope:
    """Of min_theta f(theta) + penalty/2 |theta - w|^2, which is penalty (w - theta): pFedMe. Beside w stands the last theta.

    theta is what `n_steps` gradient steps on one batch make of w.
    """

    penalty: float
    rate: float
    n_steps: int
    n_batches = 1


@dataclass(frozen=True)
class Mixed:
    """Of f(w); beside w moves v, by the gradient of f(alpha v + (1 - alpha) w) in v, and alpha by that in alpha if it is adaptive: APFL."""

    own: Mapping[str, NDArray[Any]]  # v, with the running statistics of the mix
    alpha: float
    is_adaptive: bool
    n_batches = 1


Rule = Adapted | Envelope | Mixed


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
