"""Local updates of one user's network: phases of minibatch steps on a part of it, with the rest held fixed.

While the head is trained, the representation is in evaluation mode (no dropout, its statistics stay), so its features of the user's rows
are constant and computed once. Of a linear head under cross entropy the gradient is written down; all else is differentiated by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from numpy.typing import NDArray
from torch import nn

from coterie.draws import stream
from coterie.model import Part
from coterie_client.nets.gradients import Rule, Slope, gradient
from coterie_client.nets.optimizers import Adam, Optimizer, Sgd

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Epoch = Sequence[torch.Tensor]  # the row numbers of each of its steps


@dataclass(frozen=True)
class Phase:
    """Minibatch steps on a part of the network: `epochs` over the user's rows, or `updates` steps (tau); one of them is None."""

    part: Part | Literal["all"]
    epochs: int | None
    updates: int | None
    batch_size: int
    lr: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0
    cache: bool = True  # the head's features are computed once, where the phase trains the head
    pull: tuple[float, Mapping[str, NDArray[Any]]] | None = None  # mu and anchor: mu (w - anchor) is added to the gradient
    shift: Mapping[str, NDArray[Any]] | None = None  # added to the gradient
    rule: Rule | None = None  # where the gradient is taken, if not at the parameters as they are

    def inside(self, prefix: str) -> Phase:
        """The phase for one module of the network, where tensors are called without the module's `prefix`."""

        def cut(named: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}

        pull = None if self.pull is None else (self.pull[0], cut(self.pull[1]))
        return replace(self, pull=pull, shift=None if self.shift is None else cut(self.shift))


@dataclass(frozen=True)
class Draw:
    """What names the random streams of one local update."""

    seed: int
    user: str
    round: int
    purpose: str


def _sizes(n_rows: int, phase: Phase) -> list[int]:
    """The batches of one epoch. A last one of one row joins the one before: batch norm needs two."""
    starts = list(range(0, n_rows, phase.batch_size))
    if len(starts) > 1 and n_rows - starts[-1] == 1:
        starts.pop()
    return [end - start for start, end in zip(starts, [*starts[1:], n_rows], strict=True)]


def count_steps(n_rows: int, phase: Phase) -> int:
    """How many steps a phase has."""
    lengths = (phase.updates, None if phase.epochs is None else phase.epochs * len(_sizes(n_rows, phase)))
    return min(length for length in lengths if length is not None)


def epochs(n_rows: int, phase: Phase, draw: Draw, number: int) -> Iterator[Epoch]:
    """The steps of phase `number`, from 0."""
    sizes, n_steps = _sizes(n_rows, phase), count_steps(n_rows, phase)
    done = epoch = 0
    while done < n_steps:
        order = stream(draw.seed, draw.purpose, draw.user, draw.round, number, epoch).order(n_rows)
        taken = torch.split(torch.from_numpy(order), sizes)[: n_steps - done]
        yield taken
        done += len(taken)
        epoch += 1


class Trained(NamedTuple):
    """What a phase leaves."""

    loss: float | None  # mean over its batches, None without any
    beside: Mapping[str, torch.Tensor] = {}  # what its rule has trained beside the parameters


def train(
    module: nn.Module,
    names: Sequence[str],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    steps: Iterable[Sequence[Epoch]],
    phase: Phase,
    loss: Loss,
) -> Trained:
    """Moves the parameters `names` of `module`. `steps` are epochs side by side: of each step one batch, or as many as its rule takes."""
    parameters = dict(module.named_parameters())
    moved = {name: parameters[name] for name in names}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in moved)
        parameter.grad = None
    optimizer = _optimizer(phase, list(moved.values()))
    corrections = _Corrections(phase, moved)
    slope = Slope(module, moved, (inputs, targets), loss)
    follow = gradient(phase.rule, slope, lambda beside: _optimizer(phase, beside), phase.lr)
    total, n_steps = 0.0, 0
    for epoch in steps:
        for batches in zip(*epoch, strict=True):
            value = follow(*batches)
            corrections.apply()
            optimizer.step()
            total += float(value)
            n_steps += 1
    for parameter in moved.values():
        parameter.grad = None
    return Trained(total / n_steps if n_steps else None, follow.beside())


def _optimizer(phase: Phase, parameters: Sequence[torch.Tensor]) -> Optimizer:
    if phase.optimizer == "adam":
        return Adam(parameters, phase.lr, phase.weight_decay)
    return Sgd(parameters, phase.lr, phase.momentum, phase.weight_decay)


class _Corrections:
    """What a method adds to the gradients."""

    def __init__(self, phase: Phase, moved: Mapping[str, torch.Tensor]) -> None:
        self._mu, anchors = phase.pull or (0.0, {})
        self._pulls = [(w, torch.tensor(anchors[name], device=w.device)) for name, w in moved.items() if name in anchors]
        shifts = phase.shift or {}
        self._shifts = [(w, torch.tensor(shifts[name], device=w.device)) for name, w in moved.items() if name in shifts]

    @torch.no_grad()
    def apply(self) -> None:
        """Adds mu (w - anchor) and the shift."""
        for parameter, anchor in self._pulls:
            if parameter.grad is not None:
                parameter.grad += self._mu * (parameter - anchor)
        for parameter, shift in self._shifts:
            if parameter.grad is not None:
                parameter.grad += shift


def has_written_gradient(head: nn.Module, phase: Phase) -> bool:
    """Whether `train_linear_head` is for this head and phase, under cross entropy."""
    return type(head) is nn.Linear and phase.optimizer == "sgd" and phase.pull is None and phase.shift is None and phase.rule is None


@torch.no_grad()
def train_linear_head(head: nn.Linear, features: torch.Tensor, targets: torch.Tensor, steps: Iterator[Epoch], phase: Phase) -> float | None:
    """SGD on a linear head under cross entropy, as `train` does it: d loss / d scores = (softmax(scores) - one_hot(y)) / m.

    The bias is a column of the weight, beside a column of ones: a step is six operations. The mean loss of the batches, None without any.
    """
    has_bias = head.bias is not None
    if has_bias:
        features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
    weight = torch.cat([head.weight, head.bias[:, None]], dim=1) if has_bias else head.weight.clone()  # (classes, p + 1)
    velocity = torch.zeros_like(weight)
    wanted = nn.functional.one_hot(targets, head.out_features).to(features.dtype)
    transposed = weight.t()
    total, n_steps = 0.0, 0
    for epoch in steps:
        order, sizes = torch.cat(list(epoch)), [len(rows) for rows in epoch]
        logs = features.new_empty(len(order), head.out_features)
        for x, y, log in zip(*(torch.split(array, sizes) for array in (features[order], wanted[order], logs)), strict=True):
            torch.log_softmax(torch.mm(x, transposed), 1, out=log)
            slope = log.exp().sub_(y)
            velocity.addmm_(slope.t(), x, beta=phase.momentum, alpha=1 / len(x))
            if phase.weight_decay:
                velocity.add_(weight, alpha=phase.weight_decay)
            weight.sub_(velocity, alpha=phase.lr)
        shares = torch.repeat_interleave(1 / torch.tensor(sizes, dtype=torch.float64), torch.tensor(sizes)).to(logs.device)
        total -= float((logs.gather(1, targets[order][:, None])[:, 0] * shares).sum())  # the batches' means
        n_steps += len(sizes)
    head.weight.copy_(weight[:, : head.in_features])
    if has_bias:
        head.bias.copy_(weight[:, -1])
    return total / n_steps if n_steps else None
