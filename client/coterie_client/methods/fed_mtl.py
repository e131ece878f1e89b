"""Local update of `fed_mtl` (see `coterie.methods.fed_mtl`): the user's own model, pulled towards the mean that was sent."""

from __future__ import annotations

from collections.abc import Sequence

from coterie_client.learning import Phase, Tensors
from coterie_client.local_update import Fit, LocalUpdate, Moved, Settings, judge_own, own_model, pulled


def update(model: Tensors, kept: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:
    """w_i, both to return and to keep."""
    fitted = fit(kept, pulled(phases, settings["mu"], model))
    return Moved(fitted.tensors, fitted.tensors, fitted.loss)


UPDATE = LocalUpdate(update, own_model, judge_own)
