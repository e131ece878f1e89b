"""Steps on a wide layer of a user with few rows."""

from __future__ import annotations

import numpy as np
import torch

from coterie.arrays import Array, Indices
from coterie_client.learning import Phase, count_steps
from coterie_client.nets.layers import Corrections, Weights, product
from coterie_client.nets.ticks import whole_size


def has_few_rows(n_rows: int, phase: Phase, width: int) -> bool:
    """Whether `ByRows` is faster for a user: few rows, and several steps."""
    return phase.optimizer == "sgd" and 4 * whole_size(n_rows) <= width and count_steps(n_rows, phase) >= 6


class ByRows:
    """A layer W with fixed inputs X (m, p) of a user and m much smaller than p, trained by sgd without touching W at each step.

    Each gradient is D X for a matrix D (n_out, m), and a step is linear in gradients. So after t steps W_t = a_t W_0 + C_t X, and with an
    anchor A and a shift S also + b_t A + c_t S. Steps need W_t X^T and C_t only, which follow the same rule from gradients D X X^T and D.
    """

    def __init__(self, first: int, weights: Weights, added: Corrections, inputs: torch.Tensor, phase: Phase, lengths: Indices) -> None:
        self._whole, self._inputs, self._original = weights[first], inputs, added
        self._first, self._phase, self._lengths = first, phase, lengths
        across = inputs.transpose(1, 2)
        k, m, _ = inputs.shape

        def projected(listed: Weights | None) -> Weights | None:
            if listed is None:
                return None
            found = product(listed[first], across)
            return [*listed[:first], torch.cat([found, torch.zeros_like(found)], 2), *listed[first + 1 :]]

        self.weights: Weights = projected(weights) or []
        ones = None if added.is_pulled is None else [*added.is_pulled]
        if ones is not None:
            ones[first] = torch.ones_like(self.weights[first])
        self.added = Corrections(added.mu, projected(added.anchor), ones, projected(added.shift))
        self.slants = torch.cat([product(inputs, across), torch.eye(m, device=inputs.device).expand(k, m, m)], 2)  # X X^T and 1

    def finish(self) -> None:
        """Sets W to W_t."""
        m = self._inputs.shape[1]
        scales = self._scales(int(self._lengths[0])).astype(np.float32)[self._lengths]
        of_start, of_anchor, of_shift = (torch.from_numpy(each)[:, None, None].to(self._inputs.device) for each in scales.T)
        self._whole.mul_(of_start)
        for listed, scale in ((self._original.anchor, of_anchor), (self._original.shift, of_shift)):
            if listed is not None:
                self._whole.addcmul_(listed[self._first], scale)
        self._whole.add_(product(self.weights[self._first][..., m:], self._inputs))

    def _scales(self, n_steps: int) -> Array:
        """(a_t, b_t, c_t) for t = 0 to n_steps."""
        mu, phase = self.added.mu, self._phase
        w, v = np.array([1.0, 0.0, 0.0]), np.zeros(3)
        found = [w]
        for _ in range(n_steps):
            v = phase.momentum * v + (phase.weight_decay + mu) * w + np.array([0.0, -mu, 1.0])
            found.append(w := w - phase.lr * v)
        return np.array(found)
