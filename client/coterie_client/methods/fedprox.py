"""Local update of `fedprox` (see `coterie.methods.fedprox`): training that is pulled towards the model as it was sent."""

from __future__ import annotations

from collections.abc import Sequence

from coterie_client.interface.local_update import Fit, LocalUpdate, Moved, Settings, pulled
from coterie_client.learning import Phase, Tensors


def update(model: Tensors, kept: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:
    """w_k^{t+1}, a minimiser of h_k(w; w^t), approximately."""
    fitted = fit(model, pulled(phases, settings["mu"], model))
    return Moved(fitted.tensors, kept, fitted.loss)


UPDATE = LocalUpdate(update)
