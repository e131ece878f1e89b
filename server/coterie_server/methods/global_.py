"""`global`, problem (1): one model for all users."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.methods.global_ import Config
from coterie_server.families.consensus import GroupSolver
from coterie_server.families.perturbed import noised_half, stages
from coterie_server.interface.half import ServerHalf, Setting, StageHalf, half_of


def build(config: Config, setting: Setting) -> StageHalf[Any]:
    """The server half for one stage: a single group."""
    labels = np.zeros(len(setting.members), dtype=np.int64)
    solver = GroupSolver(setting.known_facts, labels, config.tolerance, config.newton_up_to, start=setting.start_models, sums=setting.sums)
    return half_of(solver) if setting.privacy is None else noised_half(solver, setting)


SERVER = ServerHalf(build=build, stages=stages, needs_everyone="without some losses the sums are those of another problem")
