"""The loss of a network on some rows, with gradients by torch, for the loop in `coterie_client.learning`.

SGD and Adam have the bits of torch's. The first torch optimizer in a process costs a second and 70 MB.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from coterie_client.learning import Epoch, Optimizer, Phase

Gradients = Sequence[torch.Tensor | None]
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


class Sgd:
    """v <- momentum v + g + weight_decay w, then w <- w - lr v: the rule of `torch.optim.SGD`, to the bit."""

    def __init__(self, parameters: Sequence[torch.Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        self._parameters = parameters
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._velocities: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, gradients: Gradients) -> None:
        for number, parameter, gradient in _moved(self._parameters, gradients, self._weight_decay):
            velocity = gradient
            if self._momentum:
                before = self._velocities.get(number)
                velocity = gradient.clone() if before is None else before.mul_(self._momentum).add_(gradient)
                self._velocities[number] = velocity
            parameter.sub_(velocity, alpha=self._lr)


class Adam:
    """Algorithm 1 of Kingma and Ba (2015), with weight decay as part of the gradient: the rule of `torch.optim.Adam`, to the bit."""

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, parameters: Sequence[torch.Tensor], lr: float, weight_decay: float) -> None:
        self._parameters = parameters
        self._lr, self._weight_decay = lr, weight_decay
        self._moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps: dict[int, int] = {}

    @torch.no_grad()
    def step(self, gradients: Gradients) -> None:
        first_beta, second_beta = self.BETAS
        for number, parameter, gradient in _moved(self._parameters, gradients, self._weight_decay):
            steps = self._steps[number] = self._steps.get(number, 0) + 1
            first, second = self._moments.setdefault(number, (torch.zeros_like(parameter), torch.zeros_like(parameter)))
            first.lerp_(gradient, 1 - first_beta)
            second.mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
            scale = (second.sqrt() / math.sqrt(1 - second_beta**steps)).add_(self.EPSILON)
            parameter.addcdiv_(first, scale, value=-self._lr / (1 - first_beta**steps))


def _moved(
    parameters: Sequence[torch.Tensor], gradients: Gradients, weight_decay: float
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Number, parameter and gradient (with weight decay) of each parameter that has a gradient."""
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is not None:
            yield number, parameter, gradient.add(parameter, alpha=weight_decay) if weight_decay else gradient
