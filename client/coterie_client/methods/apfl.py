"""Local update of `apfl` (see `coterie.methods.apfl`): the global model as in FedAvg, and beside it, step by step, the user's own v_i."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from coterie_client.interface.local_update import Fit, LocalUpdate, Moved, Settings
from coterie_client.learning import ALPHA, Mixed, Phase, Tensors


def start(model: Tensors, settings: Settings) -> Tensors:
    """v_i and alpha_i."""
    return {**model, ALPHA: np.array(settings["alpha"])}


def update(model: Tensors, kept: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:
    """w_i to return, v_i and alpha_i to keep; the loss is that of the mix."""
    (phase,) = phases
    own = {name: array for name, array in kept.items() if name != ALPHA}
    fitted = fit(model, [replace(phase, rule=Mixed(own, float(kept[ALPHA]), settings["adaptive"]))])
    return Moved(fitted.tensors, {**kept, **fitted.beside}, fitted.loss)


def personal(model: Tensors, kept: Tensors, parameters: AbstractSet[str]) -> Tensors:
    """alpha_i v_i + (1 - alpha_i) w, with the mix's own running statistics."""
    alpha = float(kept[ALPHA])
    return {name: alpha * kept[name] + (1 - alpha) * w if name in parameters else kept[name] for name, w in model.items()}


UPDATE = LocalUpdate(update, start, personal)
