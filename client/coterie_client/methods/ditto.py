"""Local update of `ditto` (see `coterie.methods.ditto`): the global model as in FedAvg, and the user's own, pulled towards it."""

from __future__ import annotations

from collections.abc import Sequence

from coterie_client.interface.local_update import Fit, LocalUpdate, Moved, Settings, judge_own, own_model, pulled
from coterie_client.learning import Phase, Tensors


def update(model: Tensors, kept: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:
    """w_k to return, v_k to keep; the loss is that of v_k."""
    returned = fit(model, phases)
    own = fit(kept, pulled([Phase(**phase) for phase in settings["personal"]], settings["penalty"], model))
    return Moved(returned.tensors, own.tensors, own.loss)


UPDATE = LocalUpdate(update, own_model, judge_own)
