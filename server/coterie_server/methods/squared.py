"""`squared`, problem (4): one group of all users on their Moreau envelopes with q = 2 GAM N."""

from __future__ import annotations

import numpy as np

from coterie.methods.squared import Config
from coterie_server.families.consensus import GroupSolver
from coterie_server.interface.half import ServerHalf, Setting, StageHalf, half_of
from coterie_server.maths.consensus import State


def build(config: Config, setting: Setting) -> StageHalf[State]:
    n = len(setting.members)
    labels, ridge = np.zeros(n, dtype=np.int64), 2 * config.gam(n) * n
    solver = GroupSolver(setting.known_facts, labels, config.tolerance, config.newton_up_to, ridge, setting.start_models, setting.sums)
    return half_of(solver)


SERVER = ServerHalf(build=build, needs_everyone="without some losses the sums are those of another problem")
