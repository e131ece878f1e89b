"""Local update of `pfedme` (see `coterie.methods.pfedme`): w_i follows the gradient of the Moreau envelope, and theta_i is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie_client.interface.local_update import Fit, LocalUpdate, Moved, Settings, judge_own, own_model
from coterie_client.learning import Envelope, Phase, Tensors


def update(model: Tensors, kept: Tensors, phases: Sequence[Phase], settings: Settings, fit: Fit) -> Moved:
    """w_i to return, theta_i to keep; the loss is that of theta_i's last steps."""
    fitted = fit(model, [replace(phase, rule=Envelope(**settings)) for phase in phases])
    return Moved(fitted.tensors, {**kept, **fitted.beside}, fitted.loss)


UPDATE = LocalUpdate(update, own_model, judge_own)
