"""Local update of `per_fedavg` (see `coterie.methods.per_fedavg`): steps along the gradient at the point that an inner step leads to."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from coterie_client.interface.local_update import Fit, LocalUpdate, Moved, Settings
from coterie_client.learning import Adapted, Phase, Tensors


def update(model: Tensors, kept: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:
    """w to return; nothing is kept before the end. The loss is that at the adapted points."""
    fitted = fit(model, [replace(phase, rule=Adapted(**settings)) for phase in phases])
    return Moved(fitted.tensors, kept, fitted.loss)


def personal(model: Tensors, kept: Tensors, _: AbstractSet[str]) -> Tensors:
    """w as it was sent, and at the end what the user has made of it."""
    return kept or model


UPDATE = LocalUpdate(update, personal=personal)
