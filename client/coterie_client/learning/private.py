"""Steps of which no single row decides much: DP-SGD of Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang (2016), Algorithm 1.

In a step each row takes part with probability q, independently, and by numbers that only its host knows. Gradients of rows are shortened to
the norm C, added up, and get normal noise of deviation s C. The sum is divided by q m, the number of rows in the mean. A pull mu (w -
anchor) is part of each row's gradient before it is shortened, as in Liu, Hu, Wu and Smith (2022), "On privacy and personalization in
cross-silo federated learning". Without rows, noise alone is the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.secret import SecretNumbers
from coterie.errors import ProtocolError, RunError
from coterie.experiment.privacy import row_draws
from coterie_client.learning.phases import Phase
from coterie_client.learning.steps import Numbers, Slope


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
    clip_hessian: float | None = None  #: of a row's part in a sum of Hessians, where such sums get the noise

    def noise(self, n_rows: int, numbers: SecretNumbers) -> RowNoise:
        """That of one update of a user."""
        return RowNoise(self.clip, self.multiplier(n_rows), numbers)


@dataclass(frozen=True)
class UserPrivacy:
    """What the experiment asks of what users return, where hosts add noise to its sum."""

    clip: float
    rounds: int  #: for which the noise is enough
    keeps_models: bool  #: whether users keep models of their own, which have no noise

    def changes(self, rows: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        """(k, size) rows - before, each shortened to the clip."""
        return clipped(rows.astype(np.float64) - before, self.clip).astype(rows.dtype)

    def check_scores(self, modes: Collection[int]) -> None:
        """ProtocolError for scores of models that were trained without noise, which would say more of a user than epsilon."""
        if self.keeps_models or any(modes):
            raise ProtocolError("the parent asks for scores of models that users train without noise, which privacy.where 'hosts' refuses")


class RowSlope(Slope, Protocol):
    """A slope that knows the gradient of each row. Here all of its parameters are concatenated in their order, (d,)."""

    def flat(self) -> Array:
        """(d,) the parameters."""

    def of_rows(self, rows: Indices) -> Iterator[Array]:
        """The gradients of these rows, in pieces (k, d): their mean over all rows is that of the loss."""

    def split(self, flat: Array) -> list[Numbers]:
        """An array (d,) by parameters, in the slope's library."""


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
    optimizer, corrected = slope.optimizer(phase, slope.parameters), _corrected(phase, slope)
    size = slope.flat().size
    for _ in range(draws.n):
        rows = np.arange(n_rows) if draws.rate >= 1 else np.flatnonzero(noise.numbers.uniform(n_rows) < draws.rate)
        total = np.zeros(size)
        for each in slope.of_rows(rows):
            total += clipped(corrected(each), noise.clip).sum(axis=0)
        total += noise.multiplier * noise.clip * noise.numbers.normal(size)
        optimizer.step(slope.split(total / (draws.rate * n_rows)))


def _corrected(phase: Phase, slope: RowSlope) -> Callable[[Array], Array]:
    """Adds mu (w - anchor) and the shift of the phase to the gradients (k, d) of rows."""
    mu, anchors = phase.pull or (0.0, {})
    named = [(name, np.prod(w.shape, dtype=int)) for name, w in zip(slope.names, slope.parameters, strict=True)]

    def joined(arrays: Mapping[str, NDArray[Any]]) -> Array:
        return np.concatenate([np.ravel(arrays[name]) if name in arrays else np.zeros(size) for name, size in named]).astype(np.float64)

    pulls = mu * np.concatenate([np.full(size, float(name in anchors)) for name, size in named])
    anchor, shift = joined(anchors), None if phase.shift is None else joined(phase.shift)

    def apply(each: Array) -> Array:
        if phase.pull is not None:
            each = each + pulls * (slope.flat() - anchor)
        return each if shift is None else each + shift

    return apply
