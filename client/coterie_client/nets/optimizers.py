"""SGD and Adam with the bits of torch's. The first torch optimizer in a process costs a second and 70 MB."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

Gradients = Sequence[torch.Tensor | None]


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
