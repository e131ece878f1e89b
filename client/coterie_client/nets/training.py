"""Local updates of one user's network: phases of minibatch steps on a part of it, with the rest held fixed.

While the head is trained, the representation is in evaluation mode (no dropout, its statistics stay), so its features of the user's rows
are constant and computed once. Of a linear head under cross entropy the gradient is written down; all else is differentiated by torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import nn

from coterie.draws import stream
from coterie.model import Part


@dataclass(frozen=True)
class Phase:
    """Minibatch steps on a part of the network: `epochs` over the user's rows, or `updates` steps (tau)."""

    part: Part | Literal["all"]
    epochs: int | None
    updates: int | None
    batch_size: int
    lr: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    cache: bool = True
    pull: tuple[float, Mapping[str, NDArray[Any]]] | None = None  # mu and anchor: mu (w - anchor) is added to the gradient
    shift: Mapping[str, NDArray[Any]] | None = None  # added to the gradient


@dataclass(frozen=True)
class Draw:
    """What names the random streams of one local update."""

    seed: int
    user: str
    round: int
    purpose: str


def batches(n_rows: int, phase: Phase, draw: Draw, number: int) -> Iterator[torch.Tensor]:
    """The rows of each step of phase `number`, from 0. A last batch of one row joins the one before: batch norm needs two."""
    left = phase.updates if phase.updates is not None else math.inf
    epoch = 0
    while left > 0 and (phase.epochs is None or epoch < phase.epochs):
        order = torch.from_numpy(stream(draw.seed, draw.purpose, draw.user, draw.round, number, epoch).order(n_rows))
        starts = list(range(0, n_rows, phase.batch_size))
        if len(starts) > 1 and n_rows - starts[-1] == 1:
            starts.pop()
        for start, end in zip(starts, [*starts[1:], n_rows], strict=True):
            if left <= 0:
                return
            left -= 1
            yield order[start:end]
        epoch += 1


def train(
    module: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    steps: Iterator[torch.Tensor],
    phase: Phase,
    loss: Any,
    names: Sequence[str],
) -> list[float]:
    """Moves the parameters `names` of `module` along the steps; the losses of the batches."""
    parameters = dict(module.named_parameters())
    moved = {name: parameters[name] for name in names}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in moved)
    optimizer = _optimizer(phase, list(moved.values()))
    correction = _Correction(phase, moved)
    losses = []
    for rows in steps:
        optimizer.zero_grad(set_to_none=True)
        value = loss(module(inputs[rows]), targets[rows])
        value.backward()
        correction.apply()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def _optimizer(phase: Phase, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if phase.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=phase.lr, weight_decay=phase.weight_decay, foreach=False)
    return torch.optim.SGD(parameters, lr=phase.lr, momentum=phase.momentum, weight_decay=phase.weight_decay, foreach=False)


class _Correction:
    """What a method adds to the gradients."""

    def __init__(self, phase: Phase, moved: Mapping[str, nn.Parameter]) -> None:
        self._moved = moved
        self._mu, anchor = phase.pull or (0.0, {})
        self._anchor = {name: torch.tensor(anchor[name]) for name in moved if name in anchor}
        self._shift = {name: torch.tensor(phase.shift[name]) for name in moved if phase.shift and name in phase.shift}

    def apply(self) -> None:
        """Adds mu (w - anchor) and the shift."""
        with torch.no_grad():
            for name, anchor in self._anchor.items():
                parameter = self._moved[name]
                if parameter.grad is not None:
                    parameter.grad += self._mu * (parameter - anchor)
            for name, shift in self._shift.items():
                gradient = self._moved[name].grad
                if gradient is not None:
                    gradient += shift


def train_linear_head(
    head: nn.Linear, features: torch.Tensor, targets: torch.Tensor, steps: Iterator[torch.Tensor], phase: Phase
) -> list[float]:
    """SGD on a linear head under cross entropy: d loss / d scores = (softmax(scores) - one_hot(y)) / m. The losses of the batches."""
    weight, bias = head.weight, head.bias
    one_hot = nn.functional.one_hot(targets, head.out_features).to(features.dtype)
    velocity_w, velocity_b = torch.zeros_like(weight), torch.zeros_like(bias)
    losses = []
    with torch.no_grad():
        for rows in steps:
            x, y = features[rows], one_hot[rows]
            logs = torch.log_softmax(torch.addmm(bias, x, weight.t()), dim=1)
            slope = (logs.exp() - y) / len(rows)
            losses.append(-(logs * y).sum() / len(rows))
            gradient_w, gradient_b = slope.t() @ x, slope.sum(dim=0)
            if phase.weight_decay:
                gradient_w, gradient_b = gradient_w + phase.weight_decay * weight, gradient_b + phase.weight_decay * bias
            velocity_w.mul_(phase.momentum).add_(gradient_w)
            velocity_b.mul_(phase.momentum).add_(gradient_b)
            weight.sub_(velocity_w, alpha=phase.lr)
            bias.sub_(velocity_b, alpha=phase.lr)
    return [float(value) for value in torch.stack(losses)] if losses else []


def has_written_gradient(head: nn.Module, phase: Phase, loss_name: str) -> bool:
    """Whether `train_linear_head` is for this head and phase."""
    is_plain = phase.pull is None and phase.shift is None and phase.optimizer == "sgd"
    return is_plain and type(head) is nn.Linear and head.bias is not None and loss_name == "cross_entropy"
