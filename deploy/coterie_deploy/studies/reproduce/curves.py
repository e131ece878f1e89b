"""From the rows of all seeds to curves: means and standard errors by penalty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array
from coterie_deploy.studies.reproduce.study import Row

Measure = Callable[[Row], float]


@dataclass(frozen=True)
class Curve:
    """A measure against the penalty; one point, at penalty 0, for a method without."""

    penalty: Array  # (m,) LAM or GAM, ascending
    mean: Array  # (m,) over the seeds
    error: Array  # (m,) standard error of the mean, 0 for a single seed

    def at(self, penalty: float) -> float:
        """The mean at a penalty of the grid."""
        return float(self.mean[np.flatnonzero(self.penalty == penalty)[0]])

    def peak(self) -> tuple[float, float]:
        """The penalty of the largest mean, and that mean."""
        best = int(np.argmax(self.mean))
        return float(self.penalty[best]), float(self.mean[best])


def curve(rows: Sequence[Row], method: str, measure: Measure) -> Curve:
    """The curve of one method."""
    values: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if row.method == method:
            values[row.penalty].append(measure(row))
    penalties = sorted(values)
    table = [np.array(values[penalty]) for penalty in penalties]
    errors = [part.std(ddof=1) / np.sqrt(len(part)) if len(part) > 1 else 0.0 for part in table]
    return Curve(np.array(penalties), np.array([part.mean() for part in table]), np.array(errors))


def accuracy(row: Row) -> float:
    """Of a user's model on its cluster's test rows."""
    return row.accuracy


def within(row: Row) -> float:
    """Mean distance of two models in one known cluster."""
    return row.within


def clusters(row: Row) -> float:
    """Number of distinct models."""
    return float(row.clusters)
