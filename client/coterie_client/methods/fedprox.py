"""Local update of `fedprox` (see `coterie.methods.fedprox`): training with a pull towards the received model."""

from coterie_client.interface.local_update import Context, LocalUpdate, Moved, pulled


def update(context: Context) -> Moved:
    """w_k^{t+1}, a minimiser of h_k(w; w^t), approximately."""
    fitted = context.fit(context.model, pulled(context.phases, context.settings["mu"], context.model))
    return Moved(fitted.tensors, context.kept, fitted.loss)


UPDATE = LocalUpdate(update, together=True)
