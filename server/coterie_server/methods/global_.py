"""`global`, problem (1): one model for all users."""

from __future__ import annotations

import numpy as np

from coterie.methods.global_ import Config
from coterie_server.families.consensus import GroupSolver
from coterie_server.interface.half import ServerHalf, Setting, StageHalf, half_of
from coterie_server.maths.consensus import State


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage: a single group."""
    labels = np.zeros(len(setting.members), dtype=np.int64)
    solver = GroupSolver(setting.known_facts, labels, config.tolerance, config.newton_up_to, start=setting.start_models, sums=setting.sums)
    return half_of(solver)


SERVER = ServerHalf(build=build, needs_everyone="without some losses the sums are those of another problem")
