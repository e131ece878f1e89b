"""A network without a head of its own name."""

from __future__ import annotations

from torch import nn


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4))
