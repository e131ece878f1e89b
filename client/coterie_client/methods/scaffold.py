"""Local update of `scaffold` (see `coterie.methods.scaffold`): steps corrected by control variates."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.methods.scaffold import Variate, VariateMove
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, Settings
from coterie_client.learning import Tensors


def start(model: Tensors, _: Settings) -> Tensors:
    """c_i = 0."""
    return {name: np.zeros_like(array) for name, array in model.items() if array.dtype.kind == "f"}


def update(context: Context) -> Moved:
    """Algorithm 1, lines 7 to 14: y_i by K steps along g_i(y) - c_i + c, then c_i^+ = c_i - c + (x - y_i) / (K eta_l)."""
    (phase,), model, kept, sent = context.phases, context.model, context.kept, context.named(context[Variate].weights)
    fitted = context.fit(model, [replace(phase, shift={name: sent[name] - kept[name] for name in sent})])
    moves: dict[str, NDArray[Any]] = {}
    if fitted.n_steps:  # else no gradient was seen
        rate = 1 / (fitted.n_steps * phase.lr)
        moves = {name: rate * (model[name] - fitted.tensors[name]) - sent[name] for name in sent}
    kept = {**kept, **{name: kept[name] + move for name, move in moves.items()}}
    return Moved(fitted.tensors, kept, fitted.loss, [VariateMove(context.packed(moves))])


UPDATE = LocalUpdate(update, start=start, down=(Variate,), up=(VariateMove,), together=True)
