"""The losses of networks: built in, or from packages or the user's own code."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from coterie.errors import ConfigError, RunError
from coterie.experiment import plugins
from coterie.findings import Finding
from coterie.user_code import user_code

_RAISED = Finding("L1", place="problem.loss")

Of = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class NetworkLoss:
    """The loss that a network minimises on a batch of rows."""

    # (outputs (m, c), targets (m,)) -> the mean over the m rows, a scalar tensor with a gradient in the outputs.
    mean: Of
    # classes: whole numbers from 0, each with an output, as int64; numbers: any numbers, as float32.
    targets: Literal["classes", "numbers"] = "classes"
    n_outputs: int | None = None  # required number of outputs; None: any
    # The metric for held-out rows, as `mean`; None: accuracy for classes, mean squared error of the first output for numbers.
    metric: Of | None = None

    @property
    def has_classes(self) -> bool:
        return self.targets == "classes"

    def total(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The metric of a batch, summed over its rows."""
        if self.metric is None and self.has_classes:
            return float((outputs.argmax(dim=1) == targets).sum())
        return float((self.metric or _squared_error)(outputs, targets)) * len(targets)


def _squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs[:, 0] - targets) ** 2).mean()


CROSS_ENTROPY = NetworkLoss(nn.functional.cross_entropy)
LEAST_SQUARES = NetworkLoss(lambda outputs, targets: _squared_error(outputs, targets) / 2, "numbers", n_outputs=1)


def resolve_network_loss(name: str) -> NetworkLoss:
    """The loss that `problem.loss` names, in an experiment with a network. ConfigError if it is not a network's loss."""
    if name in ("cross_entropy", "least_squares"):
        return CROSS_ENTROPY if name == "cross_entropy" else LEAST_SQUARES
    found = plugins.load("loss", name)
    if not isinstance(found, NetworkLoss):
        sentence = f"loss {name!r} is a {type(found).__name__}, and the experiment has a network: want a coterie.plugin.NetworkLoss"
        raise ConfigError(sentence, Finding("L4", place="problem.loss"))
    return replace(found, mean=_guarded(found.mean, name), metric=None if found.metric is None else _guarded(found.metric, name))


def _guarded(function: Of, name: str) -> Of:
    """The function, with errors that blame the loss: for exceptions, and for results that are not scalars."""

    def guarded(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with user_code(f"loss {name!r}", _RAISED):
            value = function(outputs, targets)
        if not isinstance(value, torch.Tensor) or value.shape != ():
            found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            said = f"loss {name!r} gives a value of {found} for {len(targets)} rows, want a tensor of one number, their mean"
            raise RunError(said, _RAISED)
        if torch.is_grad_enabled() and outputs.requires_grad and not value.requires_grad:
            raise RunError(f"loss {name!r} has no gradient in the outputs: want it to be made of them by torch", _RAISED)
        return value

    return guarded
