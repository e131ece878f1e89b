"""`squared`, problem (4): one group of all users on their Moreau envelopes with q = 2 GAM N."""

from __future__ import annotations

import numpy as np

from coterie.errors import RunError
from coterie.methods.squared import Config
from coterie_server.families.consensus import GroupSolver
from coterie_server.interface.half import ServerHalf, Setting, StageHalf, half_of
from coterie_server.maths.consensus import State


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage."""
    if setting.facts is None:
        raise RunError("method 'squared' needs the facts of the stage 'prepare'")
    n = len(setting.members)
    labels = np.zeros(n, dtype=np.int64)
    start = setting.start.models if setting.start else None
    ridge = 2 * config.gam(n) * n
    return half_of(GroupSolver(setting.facts, labels, config.tolerance, config.newton_up_to, ridge=ridge, start=start))


SERVER = ServerHalf(build=build, needs_everyone="without some losses the sums are those of another problem")
