"""Local update of `scaffold` (see `coterie.methods.scaffold`): steps corrected by control variates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coterie_client.interface.local_update import Fit, LocalUpdate, Moved, Settings
from coterie_client.learning import Phase, Tensors


def start(model: Tensors, _: Settings) -> Tensors:
    """c_i = 0."""
    return {name: np.zeros_like(array) for name, array in model.items() if array.dtype.kind == "f"}


def update(model: Tensors, kept: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:
    """Algorithm 1, lines 7 to 14: y_i by K steps along g_i(y) - c_i + c, then c_i^+ = c_i - c + (x - y_i) / (K eta_l)."""
    (phase,), sent = phases, settings["variate"]
    fitted = fit(model, [replace(phase, shift={name: sent[name] - kept[name] for name in sent})])
    if not fitted.n_steps:  # no gradient was seen
        return Moved(fitted.tensors, kept, fitted.loss, {name: np.zeros_like(array) for name, array in sent.items()})
    rate = 1 / (fitted.n_steps * phase.lr)
    moves = {name: rate * (model[name] - fitted.tensors[name]) - sent[name] for name in sent}
    return Moved(fitted.tensors, {**kept, **{name: kept[name] + move for name, move in moves.items()}}, fitted.loss, moves)


UPDATE = LocalUpdate(update, start=start)
