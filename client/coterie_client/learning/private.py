"""Steps of which no single row decides much: DP-SGD of Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang (2016), Algorithm 1.

In a step each row takes part with probability q, independently, and by numbers that only its host knows. Gradients of rows are shortened to
the norm C, added up, and get normal noise of deviation s C. The sum is divided by q m, the number of rows in the mean. A pull mu (w -
anchor) is part of each row's gradient before it is shortened, as in Liu, Hu, Wu and Smith (2022), "On privacy and personalization in
cross-silo federated learning". Without rows, noise alone is the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.secret import SecretNumbers
from coterie.errors import RunError
from coterie.experiment.privacy import row_draws
from coterie_client.learning.phases import Phase
from coterie_client.learning.steps import Slope


@dataclass(frozen=True)
class RowNoise:
    """Clip C, noise multiplier s, and the numbers of one update."""

    clip: float
    multiplier: float
    numbers: SecretNumbers


@dataclass(frozen=True)
class RowPrivacy:
    """What the experiment asks of all updates of a host."""

    clip: float
    multiplier: Callable[[int], float]  #: given a user's number of rows
    rounds: int  #: for which the noise is enough

    def noise(self, n_rows: int, numbers: SecretNumbers) -> RowNoise:
        """That of one update of a user."""
        return RowNoise(self.clip, self.multiplier(n_rows), numbers)


class RowSlope(Slope, Protocol):
    """A slope of one parameter (d,) that knows the gradient of each row."""

    def of_rows(self, rows: Indices) -> Array:
        """(k, d) the gradients of these rows: their mean over all rows is that of the loss."""


def clipped(vectors: Array, clip: float) -> Array:
    """The rows (k, d), of which those longer than `clip` are shortened to it. Rows whose length is not finite count as zero.

    Otherwise one such row would decide whether the sum is a number.
    """
    norms = np.sqrt(np.vecdot(vectors, vectors))
    found: Array = np.where(np.isfinite(norms)[:, None], vectors * (clip / np.maximum(norms, clip))[:, None], 0.0)
    return found


def train_privately(slope: RowSlope, n_rows: int, phase: Phase, noise: RowNoise) -> None:
    """The steps of one phase. RunError for a phase whose gradients are taken elsewhere than at the parameters."""
    if phase.rule is not None:
        raise RunError("the local update takes gradients elsewhere than at its parameters, so they cannot be clipped row by row")
    draws = row_draws(n_rows, [{"batch_size": phase.batch_size, "epochs": phase.epochs, "updates": phase.updates}])
    (name,), (w,) = slope.names, slope.parameters
    optimizer = slope.optimizer(phase, slope.parameters)
    mu, anchors = phase.pull or (0.0, {})
    shift = None if phase.shift is None else phase.shift.get(name)
    for _ in range(draws.n):
        rows = np.arange(n_rows) if draws.rate >= 1 else np.flatnonzero(noise.numbers.uniform(n_rows) < draws.rate)
        each = slope.of_rows(rows)
        if name in anchors:
            each = each + mu * (w - anchors[name])
        if shift is not None:
            each = each + shift
        total = clipped(each, noise.clip).sum(axis=0) + noise.multiplier * noise.clip * noise.numbers.normal(w.size)
        optimizer.step([total / (draws.rate * n_rows)])
