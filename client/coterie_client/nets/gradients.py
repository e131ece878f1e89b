"""Where a step takes its gradient, if not at the parameters as they are: rules that a method gives to a phase.

A rule evaluates the plain gradient of the step's rows (`Slope`) wherever its formula says, leaves the parameters w as they were and, as
their gradients, what the optimizer is to follow. What it trains beside w is handed out in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, assert_never

import torch
from numpy.typing import NDArray
from torch import nn

from coterie_client.nets.optimizers import Optimizer

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


class Slope:
    """The plain loss of some rows and its gradients, where the parameters are."""

    def __init__(
        self,
        module: nn.Module,
        moved: Mapping[str, torch.Tensor],
        rows: tuple[torch.Tensor, torch.Tensor],  # inputs and targets
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self.module, self.moved = module, moved
        self.parameters = list(moved.values())
        self._inputs, self._targets = rows
        self._loss = loss

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss; the gradients are those of the parameters."""
        for parameter in self.parameters:
            parameter.grad = None
        value = self._loss(self.module(self._inputs[rows]), self._targets[rows])
        torch.autograd.backward(value)
        return value.detach()

    def values(self) -> list[torch.Tensor]:
        """What the parameters are now."""
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Sets the parameters."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    def gradients(self) -> list[torch.Tensor]:
        """Those of the last evaluation, 0 where the loss does not depend on a parameter."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    def follow(self, gradients: Sequence[torch.Tensor]) -> None:
        """Sets what the optimizer is to follow."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


class Gradient(Protocol):
    """A rule at work."""

    def __call__(self, rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """The loss that is told of a step; the parameters' gradients are those to follow. `others` are its further batches."""
        ...

    def beside(self) -> dict[str, torch.Tensor]:
        """What was trained beside the parameters."""
        ...


def gradient(rule: Rule | None, slope: Slope, optimizer: Callable[[Sequence[torch.Tensor]], Optimizer], lr: float) -> Gradient:
    """The rule at work on a module; `optimizer` makes another one like that of the phase, whose steps have length `lr`."""
    match rule:
        case None:
            return _Plain(slope)
        case Adapted():
            return _Adapted(rule, slope)
        case Envelope():
            return _Envelope(rule, slope)
        case Mixed():
            return _Mixed(rule, slope, optimizer, lr)
        case _:
            assert_never(rule)


class _Plain:
    def __init__(self, slope: Slope) -> None:
        self._slope = slope

    def __call__(self, rows: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return self._slope(rows)

    def beside(self) -> dict[str, torch.Tensor]:
        return {}


class _Adapted:
    def __init__(self, rule: Adapted, slope: Slope) -> None:
        self._rule, self._slope = rule, slope

    def __call__(self, rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        slope, rate, delta = self._slope, self._rule.rate, self._rule.delta
        w = slope.values()
        inner, *curving = others
        slope(inner)
        slope.put([a - rate * g for a, g in zip(w, slope.gradients(), strict=True)])
        value, g = slope(rows), slope.gradients()
        for batch in curving:
            ends = []
            for length in (delta, -delta):
                slope.put([a + length * b for a, b in zip(w, g, strict=True)])
                slope(batch)
                ends.append(slope.gradients())
            g = [a - rate * (above - below) / (2 * delta) for a, above, below in zip(g, *ends, strict=True)]
        slope.put(w)
        slope.follow(g)
        return value

    def beside(self) -> dict[str, torch.Tensor]:
        return {}


class _Envelope:
    def __init__(self, rule: Envelope, slope: Slope) -> None:
        self._rule, self._slope = rule, slope
        self._theta: dict[str, torch.Tensor] = {}

    def __call__(self, rows: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        slope, penalty, rate = self._slope, self._rule.penalty, self._rule.rate
        w = theta = slope.values()
        for _step in range(self._rule.n_steps):
            value = slope(rows)
            theta = [t - rate * (g + penalty * (t - a)) for t, g, a in zip(theta, slope.gradients(), w, strict=True)]
            slope.put(theta)
        slope.put(w)
        slope.follow([penalty * (a - t) for a, t in zip(w, theta, strict=True)])
        self._theta = dict(zip(slope.moved, theta, strict=True))
        return value

    def beside(self) -> dict[str, torch.Tensor]:
        return {**self._slope.module.state_dict(), **self._theta} if self._theta else {}


class _Mixed:
    def __init__(self, rule: Mixed, slope: Slope, optimizer: Callable[[Sequence[torch.Tensor]], Optimizer], lr: float) -> None:
        self._slope, self._lr, self._alpha, self._is_adaptive = slope, lr, rule.alpha, rule.is_adaptive
        here = slope.module.state_dict()
        own = {name: torch.tensor(rule.own[name], device=tensor.device) for name, tensor in here.items()}
        self._v = {name: own[name] for name in slope.moved}
        self._rest = {name: tensor for name, tensor in own.items() if name not in self._v}
        self._swapped = [(here[name], tensor) for name, tensor in self._rest.items()]
        self._optimizer = optimizer(list(self._v.values()))

    def __call__(self, rows: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """The loss is that of the mix, before the step."""
        slope, v = self._slope, list(self._v.values())
        w = slope.values()
        with torch.random.fork_rng(devices=[]):  # the mix drops out what w does
            slope.put([self._alpha * own + (1 - self._alpha) * shared for own, shared in zip(v, w, strict=True)])
            self._swap()
            value, g = slope(rows), slope.gradients()
            self._swap()
            slope.put(w)
        in_alpha = sum(float(((own - shared) * slant).sum()) for own, shared, slant in zip(v, w, g, strict=True))
        for own, slant in zip(v, g, strict=True):
            own.grad = self._alpha * slant
        self._optimizer.step()
        if self._is_adaptive:
            self._alpha = min(max(self._alpha - self._lr * in_alpha, 0.0), 1.0)
        slope(rows)
        return value

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges the running statistics of w and of the mix."""
        for here, own in self._swapped:
            kept = here.clone()
            here.copy_(own)
            own.copy_(kept)

    def beside(self) -> dict[str, torch.Tensor]:
        return {**self._v, **self._rest, ALPHA: torch.tensor(self._alpha)}
