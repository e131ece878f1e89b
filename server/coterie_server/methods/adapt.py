"""Server half of `adapt`: the shared tensors of a finished run are delivered to new users, who train the rest on their own.

Nobody can be left out (skip): the tensors are delivered once, and a user that is not there has nothing to adapt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.experiment.model import shared_tensors
from coterie.families.partial import AS_IS, AskScores, Delivery, TrainHead, TrainingLoss
from coterie.methods.adapt import Config
from coterie_server.families.partial import PartialSharing, SharedState, sizes_of
from coterie_server.interface.half import FLAT_ONLY, Counts, Federation, Outcome, ServerHalf, Setting, StageHalf, half_of


@dataclass(frozen=True)
class Adapt:
    """The server half for one stage."""

    half: PartialSharing  # judges and names as the methods that train do
    start: Mapping[str, Any]  # the shared tensors by name

    @property
    def client_options(self) -> Mapping[str, Any]:
        return self.half.client_options

    async def init(self, federation: Federation) -> SharedState:
        """Delivers the shared tensors, once."""
        named = [(tensor, np.asarray(self.start[tensor.name]).reshape(-1)) for tensor in self.half.tensors]
        weights = np.concatenate([np.zeros(0, np.float32), *(array for tensor, array in named if not tensor.is_integer)], dtype=np.float32)
        counts = np.concatenate([np.zeros(0, np.int64), *(array for tensor, array in named if tensor.is_integer)], dtype=np.int64)
        everyone = np.arange(len(self.half.setting.members))
        modes = np.array([AS_IS])
        figures, _ = self.half.judged(await federation.exchange(Delivery(weights, counts, users=everyone), AskScores(modes)), modes)
        return SharedState(weights, counts, tuple(figures[name] for name in ("heldout_metric",) if name in figures))

    async def round(self, state: SharedState, federation: Federation, number: int) -> tuple[SharedState, Mapping[str, float]]:  # noqa: ARG002
        """An epoch of the head, and the users' scores after it."""
        modes = np.array([AS_IS])
        replies = await federation.exchange(TrainHead(), AskScores(modes))
        figures, _ = self.half.judged(replies, modes)
        judged = {self.half.setting.metric: figures["heldout_metric"]} if figures else {}
        return state, {"loss": float(replies[TrainingLoss].loss.mean()), **judged}

    async def finish(self, state: SharedState, federation: Federation) -> Outcome:
        """The users evaluate their models, with and without fine-tuning."""
        modes = np.array(self.half.config.modes, dtype=np.int64)
        figures, by_user = self.half.judged(await federation.exchange(AskScores(modes)), modes)
        if state.recent:
            figures[f"{self.half.setting.metric}_before"] = state.recent[0]
        return Outcome(None, None, figures, by_user=by_user, shared=self.half.delivered(state))

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:  # noqa: ARG002
        """The shared tensors, once for each new user."""
        return {("delivery", "down"): float(len(self.half.setting.members))}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """Loss and accuracy of each user before the first round, after each, and in each mode at the end; a training loss a round."""
        n_users, n_rounds = len(self.half.setting.members), len(figures)
        n_judged = n_users * (1 + n_rounds + len(self.half.config.modes))
        return {("evaluation", "up"): 2.0 * n_judged, ("loss", "up"): float(n_users * n_rounds)}


def build(config: Config, setting: Setting) -> StageHalf[SharedState]:
    """The server half for one stage. ConfigError where no finished run is given, or its model is another one."""
    start, (n_rows, n_test) = setting.start, sizes_of(setting)
    if start is None or not start.shared:
        raise ConfigError("method 'adapt' starts from what a finished run shares: want coterie adapt RUN")
    tensors = shared_tensors(setting.tensors, config.shared, statistics_travel=config.batch_norm == "shared")
    for tensor in tensors:
        if tensor.name not in start.shared:
            raise ConfigError(f"the new users' model has the tensor {tensor.name!r}, which the run does not share: want the run's model")
        if (found := start.shared[tensor.name].shape) != tensor.shape:
            shapes = f"{list(found)}, that of the new users' model {list(tensor.shape)}"
            raise ConfigError(f"tensor {tensor.name!r} of the run has shape {shapes}: want the same")
    return half_of(Adapt(PartialSharing(config, setting, tensors, n_rows, n_test, are_personal=True), start.shared))


SERVER = ServerHalf(
    build=build,
    needs_everyone="the shared tensors are delivered once, and a user without them has nothing to adapt",
    tiers=FLAT_ONLY,  # it knows no clusters
)
