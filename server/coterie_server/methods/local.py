"""`local`, problem (2): every user minimizes its own loss. One exchange, one vector up for each user.

Nobody can be left out (skip): without its answer a user has no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.families.consensus import AskLocalModels, UserModels
from coterie.methods.local import Config
from coterie_server.interface.half import CONVERGED, Counts, Federation, Outcome, ServerHalf, Setting, StageHalf, half_of


@dataclass(frozen=True)
class State:
    """The users' models (n, d); empty before the only round."""

    x: Array


@dataclass(frozen=True)
class Local:
    """The server half; it only collects."""

    n_users: int

    @property
    def client_options(self) -> Mapping[str, Any]:
        """Settings of the client half, which is the room `consensus`."""
        return {"consensus": {"ridge": None, "with_hessians": False}}

    async def init(self, federation: Federation) -> State:  # noqa: ARG002
        """Nothing is known yet."""
        return State(np.zeros((self.n_users, 0)))

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:  # noqa: ARG002
        """Asks every user for its own minimizer."""
        replies = await federation.exchange(AskLocalModels())
        return State(replies[UserModels].x), {CONVERGED: 1.0}

    async def finish(self, state: State, federation: Federation) -> Outcome:  # noqa: ARG002
        """The users' models."""
        return Outcome(state.x)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One vector up for each user."""
        return {("model", "up"): float(self.n_users * len(figures))}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:  # noqa: ARG002
        """Those of the vectors alone."""
        return {}


def build(config: Config, setting: Setting) -> StageHalf[State]:  # noqa: ARG001
    """The server half for one stage."""
    return half_of(Local(len(setting.members)))


SERVER = ServerHalf(build=build, needs_everyone="each is asked once, and without its answer has no model")
