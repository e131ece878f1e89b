"""Local update of `ditto` (see `coterie.methods.ditto`): the global model as in FedAvg, and the user's own model pulled towards it."""

from coterie_client.interface.local_update import Context, LocalUpdate, Moved, judge_own, own_model, pulled
from coterie_client.learning import Phase


def update(context: Context) -> Moved:
    """w_k to return, v_k to keep; the loss is that of v_k."""
    settings = context.settings
    returned = context.fit(context.model, context.phases)
    own = context.fit(context.kept, pulled([Phase(**phase) for phase in settings["personal"]], settings["penalty"], context.model))
    return Moved(returned.tensors, own.tensors, own.loss)


UPDATE = LocalUpdate(update, own_model, judge_own, together=True)
