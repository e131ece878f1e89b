"""Server half of `ifca`: partial sharing of several models, each the mean of those that have come from it (see `coterie.methods.ifca`).

Left out (skip): as in `partial`, cluster by cluster. A user that is away at the end stays in the cluster that it took last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError
from coterie.experiment.model import X, named_tensors, stacked
from coterie.families.partial import Single, Updated
from coterie.methods.ifca import Chosen, Config
from coterie_server.families import partial
from coterie_server.families.partial import PartialSharing, ServerUpdate, SharedState
from coterie_server.families.robust import counted
from coterie_server.interface.half import Replies, Setting, StageHalf
from coterie_server.interface.merge import check_senders
from coterie_server.interface.wanted import Wanted
from coterie_server.maths.clusters import canonical

CHOICES = "choices"  # (n,) the model that each user took last


def start(half: PartialSharing, _: Single) -> Mapping[str, Indices]:
    """All users have the first model until they choose."""
    return {CHOICES: np.zeros(half.n_rows.size, np.int64)}


def choice(half: PartialSharing, users: Indices | None = None) -> list[Wanted]:
    """The numbers of the models that users (None: all) return or keep."""
    return [Wanted(Chosen, users, check=lambda said, _: _check_models(half, said))]


def taken(half: PartialSharing, state: SharedState, replies: Replies, answered: Indices) -> SharedState:
    """theta_j is the mean of the models of those who have chosen j."""
    assert half.one is not None  # noqa: S101 - see `build`
    updates = half.one_by_one(replies, Updated, answered)
    choices = _chosen(half, replies, answered)
    weights, counts = state.weights.copy(), state.counts.copy()
    models, left = named_tensors(weights, counts, half.tensors), [answered[:0]]  # views
    for j in np.unique(choices).tolist():
        before = np.concatenate([models[tensor.name][j].ravel() for tensor in half.one if not tensor.is_integer])
        mean = half.average([update for update, choice in zip(updates, choices, strict=True) if choice == j], before)
        left.append(mean.left)
        for name, tensor in named_tensors(mean.weights, mean.counts, half.one).items():
            models[name][j] = tensor
    beside = {**counted(state.beside, np.concatenate(left)), CHOICES: _with(state.beside[CHOICES], answered, choices)}
    return replace(state, weights=weights, counts=counts, beside=beside)


def clusters(half: PartialSharing, state: SharedState, replies: Replies) -> Indices:
    """Users that have kept the same model are a cluster."""
    return canonical(_last_choices(half, state, replies))


def models(half: PartialSharing, state: SharedState, replies: Replies) -> Array:
    """The models that users have kept, as they have them."""
    listed = named_tensors(half.setting.precision.rounded_weights(state.weights), state.counts, half.tensors)[X]
    return np.asarray(listed[_last_choices(half, state, replies)])


def labels_of(state: SharedState) -> Indices:
    """The clusters that users took last."""
    return canonical(state.beside[CHOICES])


def _last_choices(half: PartialSharing, state: SharedState, replies: Replies) -> Indices:
    answered = replies.awaited(np.arange(half.n_rows.size))
    return _with(state.beside[CHOICES], answered, _chosen(half, replies, answered))


def _chosen(half: PartialSharing, replies: Replies, answered: Indices) -> Indices:
    """j_i of those who answered. ProtocolError for a model that there is not."""
    if not answered.size:
        return np.zeros(0, np.int64)
    said = replies[Chosen]
    check_senders(Chosen.kind, answered if said.users is None else said.users, answered)
    _check_models(half, said)
    return said.model


def _check_models(half: PartialSharing, said: Chosen) -> None:
    n_models = half.tensors[0].shape[0]
    if not ((said.model >= 0) & (said.model < n_models)).all():
        raise ProtocolError(f"{Chosen.kind} came with models {said.model.tolist()}, wanted numbers from 0 to {n_models - 1}")


def _with(choices: Indices, users: Indices, new: Indices) -> Indices:
    found = choices.copy()
    found[users] = new
    return found


OWN = ServerUpdate(start=start, returned=choice, told=choice, taken=taken, clusters=clusters, labels_of=labels_of, models=models)


def build(config: Config, setting: Setting) -> StageHalf[SharedState]:
    """The server half for one stage. Its tensors have an axis of models."""
    one = partial.set_up(config, setting)
    return replace(one, tensors=stacked(one.tensors, config.clusters), one=one.tensors, own=OWN).as_half()


SERVER = replace(partial.SERVER, build=build)  # its clusters are not the known ones of aggregators
