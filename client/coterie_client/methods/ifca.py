"""Local update of `ifca` (see `coterie.methods.ifca`): trains the best of several models. All tensors have an axis of models."""

from collections.abc import Set as AbstractSet

import numpy as np

from coterie.methods.ifca import Chosen
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, Received, Settings
from coterie_client.learning import Tensors

CHOICE = "choice"  # j_i


def start(_: Tensors, __: Settings) -> Tensors:
    """j_i, not yet chosen."""
    return {CHOICE: np.array(0)}


def update(context: Context) -> Moved:
    """theta~_i to return."""
    kept, told = choose(context)
    fitted = context.fit(chosen(context.model, kept, frozenset()), context.phases)
    return Moved(fitted.tensors, kept, fitted.loss, told)


def choose(context: Context) -> Received:
    """j_i = argmin_j F_i(theta_j), by the loss of a fit without phases."""
    users = context.kept[CHOICE].shape  # () or (k,)
    n_models = next(iter(context.model.values())).shape[len(users)]
    models = [chosen(context.model, {CHOICE: np.full(users, j)}, frozenset()) for j in range(n_models)]
    best = np.argmin([context.fit(model, ()).loss for model in models], axis=0)
    return Received({CHOICE: np.array(best)}, [Chosen(np.atleast_1d(best))])


def chosen(models: Tensors, kept: Tensors, _: AbstractSet[str]) -> Tensors:
    """theta_j_i."""
    place = (*np.indices(kept[CHOICE].shape), kept[CHOICE])
    return {name: np.asarray(array[place]) for name, array in models.items()}


UPDATE = LocalUpdate(update, start, chosen, choose, up=(Chosen,), told=(Chosen,), together=True)
