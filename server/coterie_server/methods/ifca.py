"""Server half of `ifca`: partial sharing of several models, each the mean of those that have come from it (see `coterie.methods.ifca`).

Left out (skip): as in `partial`, cluster by cluster. A user that is away at the end stays in the cluster that it took last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError
from coterie.experiment.model import X, named_tensors, stacked
from coterie.families.partial import Chosen, Updated
from coterie.methods.ifca import Config
from coterie_server.families import partial
from coterie_server.families.partial import PartialSharing, State, owners
from coterie_server.interface.half import FLAT_ONLY, Federation, Replies, ServerHalf, Setting, StageHalf
from coterie_server.interface.merge import check_senders
from coterie_server.interface.wanted import Wanted
from coterie_server.maths.clusters import canonical


@dataclass(frozen=True, kw_only=True)
class Ifca(PartialSharing):
    """The server half for one stage; its tensors have an axis of models."""

    one: PartialSharing  # of a single model

    def as_half(self) -> StageHalf[State]:
        """With the clusters that users have taken."""
        return replace(super().as_half(), labels_of=self.labels_of)

    async def init(self, federation: Federation) -> State:
        """theta_1 to theta_K; all users are of the first until they say otherwise."""
        return replace(await super().init(federation), choices=np.zeros(self.n_rows.size, np.int64))

    def returned(self, chosen: Indices) -> list[Wanted]:
        """One model, and which it is."""
        return [*self.one.returned(chosen), self._choice(chosen)]

    def delivered_to(self, modes: Indices) -> list[Wanted]:
        """And the model that is kept."""
        return [*self.scored(modes), self._choice(None)]

    def _choice(self, users: Indices | None) -> Wanted:
        return Wanted(Chosen, users, check=lambda said, _: self._check_models(said))

    def taken(self, state: State, replies: Replies, answered: Indices) -> State:
        """theta_j is the mean of the models of those who have chosen j."""
        updates = replies.one_by_one(Updated)
        check_senders(Updated.kind, owners(updates), answered)
        choices = self._chosen(replies, answered)
        weights, counts = state.weights.copy(), state.counts.copy()
        models = named_tensors(weights, counts, self.tensors)  # views
        for j in np.unique(choices).tolist():
            mean = self.one.average([update for update, choice in zip(updates, choices, strict=True) if choice == j])
            for name, tensor in named_tensors(*mean, self.one.tensors).items():
                models[name][j] = tensor
        return replace(state, weights=weights, counts=counts, choices=_with(state.choices, answered, choices))

    def clusters(self, state: State, replies: Replies) -> Indices:
        """Those of the models that users have kept."""
        return canonical(self._last_choices(state, replies))

    def convex_models(self, state: State, replies: Replies) -> Array:
        """The models that users have kept, as they have them."""
        models = named_tensors(self.setting.precision.rounded_weights(state.weights), state.counts, self.tensors)[X]
        chosen: Array = models[self._last_choices(state, replies)]
        return chosen

    def labels_of(self, state: State) -> Indices:
        """The clusters that users took last."""
        return canonical(state.choices)

    def _last_choices(self, state: State, replies: Replies) -> Indices:
        answered = replies.awaited(np.arange(self.n_rows.size))
        return _with(state.choices, answered, self._chosen(replies, answered))

    def _chosen(self, replies: Replies, answered: Indices) -> Indices:
        """j_i of those who answered. ProtocolError for a model that there is not."""
        if not answered.size:
            return np.zeros(0, np.int64)
        said = replies[Chosen]
        check_senders(Chosen.kind, answered if said.users is None else said.users, answered)
        self._check_models(said)
        return said.model

    def _check_models(self, said: Chosen) -> None:
        n_models = self.tensors[0].shape[0]
        if not ((said.model >= 0) & (said.model < n_models)).all():
            raise ProtocolError(f"{Chosen.kind} came with models {said.model.tolist()}, wanted numbers from 0 to {n_models - 1}")


def _with(choices: Indices, users: Indices, new: Indices) -> Indices:
    found = choices.copy()
    found[users] = new
    return found


def set_up(config: Config, setting: Setting) -> Ifca:
    """The server half for one stage."""
    one = partial.set_up(config, setting)
    tensors = stacked(one.tensors, config.clusters)
    return Ifca(config, setting, tensors, one.n_rows, one.n_test, one.are_personal, one=one)


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """As `set_up`, for the engine."""
    return set_up(config, setting).as_half()


SERVER = ServerHalf(build=build, tiers=FLAT_ONLY)  # its clusters are not the known ones of aggregators
