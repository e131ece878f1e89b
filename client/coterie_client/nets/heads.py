"""Trains a linear head under cross entropy with a hand-written gradient, because most steps are head steps."""

from collections.abc import Iterator

import torch
from torch import nn

from coterie_client.learning import Epoch, Phase


def has_written_gradient(head: nn.Module, phase: Phase) -> bool:
    """Whether `train_linear_head` can train this head in this phase, under cross entropy."""
    return type(head) is nn.Linear and phase.optimizer == "sgd" and phase.pull is None and phase.shift is None and phase.rule is None


@torch.no_grad()
def train_linear_head(head: nn.Linear, features: torch.Tensor, targets: torch.Tensor, steps: Iterator[Epoch], phase: Phase) -> float | None:
    """SGD on a linear head under cross entropy, as in `learning.train`: d loss / d scores = (softmax(scores) - one_hot(y)) / m.

    The bias is a column of the weight, for a feature that is always 1, so a step has six operations. Returns the mean loss of the batches,
    None without any.
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
        order, sizes = torch.from_numpy(epoch.order), epoch.sizes
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
