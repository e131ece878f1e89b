"""Local update of `l2gd` (see `coterie.methods.l2gd`): the user's own model x_i, moved towards the mean and then trained."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from coterie.methods.l2gd import Coins
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, Settings
from coterie_client.learning import Phase, Tensors

LEFT = "left of the distance"  # (1 - a)^m for the m pending aggregations, beside the tensors of x_i


def start(model: Tensors, settings: Settings) -> Tensors:
    """x_i, with one pending aggregation."""
    return {**model, LEFT: np.array(settings["left"])}


def update(context: Context) -> Moved:
    """The pending aggregations with the received mean, then the local steps of this round."""
    n_steps, n_aggregations = context[Coins].lengths.tolist()
    start = aggregated(context.model, context.kept, frozenset())
    fitted = context.fit(start, [_repeated(phase, n_steps) for phase in context.phases])
    return Moved(fitted.tensors, {**fitted.tensors, LEFT: np.array(context.settings["left"] ** n_aggregations)}, fitted.loss)


def _repeated(phase: Phase, times: int) -> Phase:
    epochs, updates = (None if length is None else length * times for length in (phase.epochs, phase.updates))
    return replace(phase, epochs=epochs, updates=updates)


def aggregated(mean: Tensors, kept: Tensors, _: AbstractSet[str]) -> Tensors:
    """xbar + left (x_i - xbar), without rounding errors if a is 0 or 1."""
    left = float(kept[LEFT])
    if left == 1:
        return {name: kept[name] for name in mean}
    moved = {name: xbar + left * (kept[name] - xbar) for name, xbar in mean.items()}
    return {name: x if mean[name].dtype.kind == "f" else np.rint(x).astype(np.int64) for name, x in moved.items()}


UPDATE = LocalUpdate(update, start, aggregated, down=(Coins,), returns_kept=True)
