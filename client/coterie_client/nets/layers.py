"""The fully connected layers of a network, and their weights for several users at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.findings import Finding
from coterie_client.learning import Tensors
from coterie_client.nets.models import Composed

Weights = list[torch.Tensor]  # (k, n_out, width) of each layer


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Stacked products. One row or column is doubled: products with vectors have other bits at other addresses."""
    if left.shape[1] == 1:
        return product(left.expand(-1, 2, -1), right)[:, :1]
    if right.shape[2] == 1:
        return product(left, right.expand(-1, -1, 2))[:, :, :1]
    return torch.bmm(left, right)


@dataclass(frozen=True)
class Layer:
    """A fully connected layer. A bias is the last column of its weights, and the layer's inputs are then 1 there."""

    name: str
    n_in: int
    n_out: int
    has_bias: bool
    has_relu: bool = False  # behind it

    @property
    def width(self) -> int:
        return self.n_in + self.has_bias

    def columns(self) -> dict[str, slice | int]:
        """Where the tensors of the model are in its weights."""
        return {f"{self.name}weight": slice(0, self.n_in)} | ({f"{self.name}bias": self.n_in} if self.has_bias else {})

    def room(self, k: int, n: int, like: torch.Tensor) -> torch.Tensor:
        """(k, width, n) for the layer's inputs."""
        found = torch.zeros(k, self.width, n, device=like.device)
        found[:, self.n_in :] = 1
        return found

    def passed(self, outputs: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """The outputs behind the ReLU, in the room for the next layer's inputs."""
        if self.has_relu:
            torch.clamp_min(outputs, 0, out=into[:, : self.n_out])
        else:
            into[:, : self.n_out] = outputs
        return into


@dataclass(frozen=True)
class Plan:
    """The layers of a network that can be trained in stacks."""

    reading: nn.Sequential  # layers without weights, before all others
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Plan:
        """ConfigError that names the first layer of another kind."""
        reading: list[nn.Module] = []
        layers: list[Layer] = []
        for name, leaf in _leaves(module, ""):
            if type(leaf) is nn.Linear and all(parameter.requires_grad for parameter in leaf.parameters()):
                layers.append(Layer(name, leaf.in_features, leaf.out_features, leaf.bias is not None))
            elif type(leaf) is nn.ReLU and layers:
                layers[-1] = replace(layers[-1], has_relu=True)
            elif type(leaf) in (nn.Flatten, nn.Identity, nn.ReLU, nn.AvgPool2d) and not layers:
                reading.append(leaf)
            elif type(leaf) is not nn.Identity:
                raise refused(f"the model has a {type(leaf).__name__}" + (f" named {name.rstrip('.')!r}" if name else ""))
        if not layers or layers[-1].has_relu:
            raise refused("the last layer of the model is not Linear")
        return cls(nn.Sequential(*reading), tuple(layers))

    def stacked(self, named: Tensors, order: Indices, device: torch.device) -> Weights:
        """The weights of users `order`. Missing tensors are 0."""
        found = []
        for layer in self.layers:
            weights = torch.zeros(order.size, layer.n_out, layer.width)
            for name, columns in layer.columns().items():
                if name in named:
                    weights.numpy()[..., columns] = named[name][order]
            found.append(weights.to(device))
        return found

    def outputs(self, weights: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        """(m, n_out) what one user's network gives for rows of inputs of the first layer, in the bits of the modules."""
        for layer in self.layers:
            bias = weights[f"{layer.name}bias"] if layer.has_bias else None
            inputs = functional.linear(inputs, weights[f"{layer.name}weight"], bias)
            inputs = functional.relu(inputs) if layer.has_relu else inputs
        return inputs

    def named(self, weights: Weights, order: Indices) -> dict[str, NDArray[Any]]:
        """The inverse of `stacked`."""
        found = {}
        for layer, own in zip(self.layers, weights, strict=True):
            for name, columns in layer.columns().items():
                part = own[..., columns].cpu().numpy()
                found[name] = np.empty_like(part)
                found[name][order] = part
        return found


def _leaves(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if type(module) in (Composed, nn.Sequential):
        for name, child in module.named_children():
            yield from _leaves(child, f"{prefix}{name}.")
    else:
        yield prefix, module


def refused(what: str) -> ConfigError:
    wanted = "want layers Linear and ReLU one after another, behind Flatten and AvgPool2d alone, or training: alone"
    return ConfigError(f"model.training is stacked, but {what}: {wanted}", Finding("L4", place="model.training"))


class Corrections(NamedTuple):
    """What a phase adds to the gradients: mu (w - anchor), for weights where `is_pulled` is 1, and the shift."""

    mu: float = 0.0
    anchor: Weights | None = None
    is_pulled: Weights | None = None
    shift: Weights | None = None

    def is_whole(self, layer: int) -> bool:
        """Whether none of the layer's weights is without an anchor that others have."""
        return self.is_pulled is None or bool(self.is_pulled[layer].all())

    def take(self, users: slice) -> Corrections:
        return Corrections(self.mu, *(None if listed is None else [own[users] for own in listed] for listed in self[1:]))
