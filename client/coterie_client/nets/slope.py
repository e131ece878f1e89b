"""The loss of a network on some rows, with gradients by torch, for the loop in `coterie_client.learning`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from coterie_client.learning import Epoch, Optimizer, Phase
from coterie_client.nets.optimizers import Adam, Sgd

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TorchSlope:
    """A `Slope` of the parameters `names` of a module; other parameters are fixed. Arithmetic on its tensors needs `torch.no_grad`."""

    def __init__(self, module: nn.Module, names: Sequence[str], inputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> None:
        self._module, self._inputs, self._targets, self._loss = module, inputs, targets, loss
        self.names = names
        listed = dict(module.named_parameters())
        self.parameters = [listed[name] for name in names]
        for name, parameter in listed.items():
            parameter.requires_grad_(name in set(names))
            parameter.grad = None

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        with torch.enable_grad():
            value = self._loss(self._module(self._inputs[rows]), self._targets[rows])
            torch.autograd.backward(value)
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return value.detach(), gradients

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def put(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._module.state_dict()

    def array(self, numbers: NDArray[Any]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._inputs.device)

    def batches(self, epoch: Epoch) -> Sequence[torch.Tensor]:
        return torch.split(torch.from_numpy(epoch.order), epoch.sizes)

    def optimizer(self, phase: Phase, parameters: Sequence[torch.Tensor]) -> Optimizer:
        if phase.optimizer == "adam":
            return Adam(parameters, phase.lr, phase.weight_decay)
        return Sgd(parameters, phase.lr, phase.momentum, phase.weight_decay)

    @contextlib.contextmanager
    def apart(self, rest: Mapping[str, torch.Tensor]) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            self._exchange(rest)
            yield
            self._exchange(rest)

    def _exchange(self, rest: Mapping[str, torch.Tensor]) -> None:
        here = self._module.state_dict()
        for name, other in rest.items():
            kept = here[name].clone()
            here[name].copy_(other)
            other.copy_(kept)
