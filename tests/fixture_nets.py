"""Models of a user's own code, for tests: named in experiments as `tests.fixture_nets:NAME`."""

from __future__ import annotations

import random

import torch
from torch import nn

from coterie.plugin import NetworkLoss

SMOOTHED = NetworkLoss(lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1))
CALLS: list[int] = []  # rows that a counting representation was given


class Parts(nn.Module):
    """A representation and a head, with a chance to do more around them."""

    def __init__(self, representation: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.representation = representation
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(len(x))
        scores: torch.Tensor = self.head(self.representation(x))
        return scores


class Ending(Parts):
    """Does something after its head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(super().forward(x), dim=1) * 2


class Named(Parts):
    """Calls its head by keyword."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(len(x))
        scores: torch.Tensor = self.head(input=self.representation(x))
        return scores


class Scaled(nn.Module):
    """A head that doubles what it is given, in place, and has a single number of its own."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, classes)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x.mul_(2)) * self.temperature
        return scores


def plain(width: int = 4, classes: int = 3) -> nn.Module:
    return Parts(nn.Sequential(nn.Linear(width, 5), nn.Tanh()), nn.Linear(5, classes))


def in_a_row(width: int = 4, between: str = "Identity", **options: float) -> nn.Module:
    """Layers one after another, with one of torch's between them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 5, bias=False), nn.ReLU(), getattr(nn, between)(**options), nn.Linear(5, 3))


def without_bias(width: int = 4, classes: int = 3) -> nn.Module:
    return Parts(nn.Sequential(nn.Linear(width, 5), nn.Tanh()), nn.Linear(5, classes, bias=False))


def ending() -> nn.Module:
    return Ending(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3))


def named() -> nn.Module:
    return Named(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3))


def scaled() -> nn.Module:
    return Parts(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), Scaled(5, 3))


def normed(width: int = 4) -> nn.Module:
    """Batch norm on both sides: statistics of 0 dimensions, integer ones, and running means."""
    first = nn.Linear(width, 5, bias=False)  # whose gradient would be 0 before batch norm
    return Parts(nn.Sequential(first, nn.BatchNorm1d(5), nn.ReLU()), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)))


class _OwnNorm(nn.BatchNorm1d):
    """A layer of the user's own that is a batch norm."""


def own_normed() -> nn.Module:
    return Parts(nn.Sequential(nn.Linear(4, 5, bias=False), _OwnNorm(5), nn.ReLU()), Scaled(5, 3))


def mixing() -> nn.Module:
    """Features that depend on the other rows of the batch, even in evaluation mode."""
    return Parts(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False)), nn.Linear(5, 3))


def dropping() -> nn.Module:
    return Parts(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)))


def two_layers(rate: float = 0.0, width: int = 4) -> nn.Module:
    """A flat network whose head is told by the names of its last layers."""
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Dropout(rate), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def frozen() -> nn.Module:
    """A first layer that is not to be trained."""
    first = nn.Linear(4, 5)
    first.requires_grad_(False)
    return Parts(nn.Sequential(first, nn.Tanh()), nn.Linear(5, 3))


class _Counting(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return x + self.seen


def remembering() -> nn.Module:
    """A buffer that is not part of the state, and moves with what was trained."""
    return Parts(nn.Sequential(nn.Linear(4, 5), _Counting()), nn.Linear(5, 3))


def symbols() -> nn.Module:
    return Parts(nn.Sequential(nn.Embedding(6, 2), nn.Flatten(), nn.Linear(6, 5)), nn.Linear(5, 3))


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return Parts(first, second)


def lazy() -> nn.Module:
    return Parts(nn.LazyLinear(5), nn.Linear(5, 3))


def doubles() -> nn.Module:
    return plain().double()


def unseeded() -> nn.Module:
    head = nn.Linear(5, 3)
    with torch.no_grad():
        head.bias.fill_(random.SystemRandom().random())
    return Parts(nn.Linear(4, 5), head)


class _Stateful(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 0}


def stateful() -> nn.Module:
    return Parts(nn.Linear(4, 5), _Stateful(5, 3))


def empty() -> nn.Module:
    return nn.Flatten()


def flat_scores() -> nn.Module:
    return Parts(nn.Linear(4, 1), nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)))


def nothing() -> None:
    return None


def failing() -> nn.Module:
    raise ValueError("no weights here")


NOT_A_FUNCTION = 3
