"""`local`, problem (2): every user minimizes its own loss. One exchange, one vector up for each user.

Nobody can be left out (skip): without its answer a user has no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array
from coterie.families.consensus import AskLocalModels, UserModels
from coterie.methods.local import Config
from coterie_server.interface.half import CONVERGED, Counts, Federation, Outcome, ServerHalf, Setting, StageHalf


@dataclass(frozen=True)
class State:
    """The users' models (n, d); empty before the only round."""

    x: Array


def build(config: Config, setting: Setting) -> StageHalf[State]:  # noqa: ARG001
    """The server half for one stage, which only collects."""
    n_users = len(setting.members)

    async def init(_: Federation) -> State:
        return State(np.zeros((n_users, 0)))

    async def round_(_: State, federation: Federation, __: int) -> tuple[State, Mapping[str, float]]:
        return State((await federation.exchange(AskLocalModels()))[UserModels].x), {CONVERGED: 1.0}

    async def finish(state: State, _: Federation) -> Outcome:
        return Outcome(state.x)

    def vectors(figures: Sequence[Mapping[str, float]]) -> Counts:
        return {("model", "up"): float(n_users * len(figures))}

    options = {"consensus": {"ridge": None, "with_hessians": False}}  # of the client half, that of the family `consensus`
    return StageHalf(client_options=options, init=init, round=round_, finish=finish, expected_vectors=vectors)


SERVER = ServerHalf(build=build, needs_everyone="each is asked once, and without its answer has no model")
