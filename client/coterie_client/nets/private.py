"""Gradients of single rows of a network, for steps with noise (`coterie_client.learning.private`), by torch's `vmap` of `grad`.

Each row goes through the network alone. So rows must be apart: batch norm mixes the rows of a batch, and the masks of dropout follow the
seed and the place of a row among others. Both are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.findings import Finding
from coterie_client.nets.slope import Loss, TorchSlope

_AT_ONCE: Final = 1 << 22  # numbers in the gradients of rows that are made at once: 16 MiB, and 32 in float64
_APART: Final = (
    (nn.modules.batchnorm._BatchNorm, "mixes the rows of a batch", "a norm by rows, such as GroupNorm or LayerNorm"),
    (nn.modules.batchnorm._NormBase, "keeps statistics of rows without noise", "track_running_stats=False"),
    (nn.modules.dropout._DropoutNd, "follows the public seed and the place of a row among others", "no dropout"),
)


def check_rows_apart(module: nn.Module) -> None:
    """ConfigError that names a layer in which rows are not apart."""
    for name, layer in module.named_modules():
        for kind, why, wanted in _APART:
            if isinstance(layer, kind) and (kind is not _APART[1][0] or layer.track_running_stats):
                said = f"privacy.unit is 'row', but layer {name!r} of the model is {type(layer).__name__}, which {why}: want {wanted}"
                raise ConfigError(said, Finding("L4", place="model.build"))


class RowwiseSlope(TorchSlope):
    """A `RowSlope` of the parameters `names` of a module."""

    def __init__(self, module: nn.Module, names: Sequence[str], inputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> None:
        super().__init__(module, names, inputs, targets, loss)

        def value(parameters: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(functional_call(module, dict(parameters), (x[None],)), y[None])

        self._of_each = vmap(grad(value), in_dims=(None, 0, 0), randomness="error")
        self._n_at_once = max(1, _AT_ONCE // max(1, sum(w.numel() for w in self.parameters)))

    def of_rows(self, rows: Indices) -> Iterator[Array]:
        named = {name: w.detach() for name, w in zip(self.names, self.parameters, strict=True)}
        for some in torch.split(torch.from_numpy(rows), self._n_at_once):
            if not len(some):
                continue
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)  # of LSTM: row by row inside torch
                found = self._of_each(named, self._inputs[some], self._targets[some])
            yield np.concatenate([found[name].flatten(1).cpu().numpy() for name in self.names], axis=1).astype(np.float64)

    def flat(self) -> Array:
        return np.concatenate([w.detach().flatten().cpu().numpy() for w in self.parameters]).astype(np.float64)

    def split(self, flat: Array) -> list[torch.Tensor]:
        pieces = torch.split(torch.from_numpy(flat), [w.numel() for w in self.parameters])
        return [piece.reshape(w.shape).to(w) for piece, w in zip(pieces, self.parameters, strict=True)]
