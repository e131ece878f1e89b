"""Local update of `l2gd` (see `coterie.methods.l2gd`): the user's own model x_i, moved towards the mean and then trained."""

from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.methods.l2gd import Coins
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, Settings, of_each
from coterie_client.learning import Tensors

LEFT = "left of the distance"  # (1 - a)^m for the m pending aggregations, beside the tensors of x_i


def start(model: Tensors, settings: Settings) -> Tensors:
    """x_i, with one pending aggregation."""
    return {**model, LEFT: np.array(settings["left"])}


def update(context: Context) -> Moved:
    """The pending aggregations with the received mean, then the local steps of this round."""
    n_steps, n_aggregations = context[Coins].lengths.tolist()
    start = aggregated(context.model, context.kept, frozenset())
    longer = [replace(phase, epochs=_times(phase.epochs, n_steps), updates=_times(phase.updates, n_steps)) for phase in context.phases]
    fitted = context.fit(start, longer)
    left = np.full(context.kept[LEFT].shape, context.settings["left"] ** n_aggregations)
    return Moved(fitted.tensors, {**fitted.tensors, LEFT: left}, fitted.loss)


def _times(length: int | None, n: int) -> int | None:
    return None if length is None else length * n


def aggregated(mean: Tensors, kept: Tensors, _: AbstractSet[str]) -> Tensors:
    """xbar + left (x_i - xbar), without rounding errors if a is 0 or 1."""
    left = kept[LEFT]  # () or (k,)
    if (left == 1).all():
        return {name: kept[name] for name in mean}
    moved: dict[str, NDArray[Any]] = {}
    for name, xbar in mean.items():
        share = of_each(left, xbar)
        x = np.where(share == 1, kept[name], xbar + share * (kept[name] - xbar))
        moved[name] = x if xbar.dtype.kind == "f" else np.rint(x).astype(np.int64)
    return moved


UPDATE = LocalUpdate(update, start, aggregated, down=(Coins,), returns=lambda _: True, together=True)
