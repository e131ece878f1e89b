"""Local update of `ifca` (see `coterie.methods.ifca`): the best of several models, trained. All tensors come with an axis of models."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from coterie_client.interface.local_update import CHOICE, Fit, LocalUpdate, Moved, Settings
from coterie_client.learning import Phase, Tensors


def start(_: Tensors, __: Settings) -> Tensors:
    """j_i, of which nothing is known."""
    return {CHOICE: np.array(0)}


def update(models: Tensors, _: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:  # noqa: ARG001
    """theta~_i to return."""
    kept = choose(models, {}, fit)
    fitted = fit(personal(models, kept, frozenset()), phases)
    return Moved(fitted.tensors, kept, fitted.loss)


def choose(models: Tensors, _: Tensors, fit: Fit) -> Tensors:
    """j_i = argmin_j F_i(theta_j): the loss after no training at all."""
    n_models = len(next(iter(models.values())))
    losses = [fit(personal(models, {CHOICE: np.array(j)}, frozenset()), ()).loss for j in range(n_models)]
    return {CHOICE: np.array(np.argmin(losses))}


def personal(models: Tensors, kept: Tensors, _: AbstractSet[str]) -> Tensors:
    """theta_j_i."""
    return {name: np.asarray(array[kept[CHOICE]]) for name, array in models.items()}


UPDATE = LocalUpdate(update, start, personal, choose)
