"""`oracle`: one model for each cluster of the known partition, or of the partition that the stage before has found (refit)."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.methods.oracle import Config
from coterie_server.families.consensus import GroupSolver
from coterie_server.families.perturbed import noised_half, stages
from coterie_server.interface.half import Members, ServerHalf, Setting, StageHalf, half_of


def build(config: Config, setting: Setting) -> StageHalf[Any]:
    """The server half for one stage. ConfigError when a user has no known cluster, and the known partition is wanted."""
    if config.partition == "known":
        labels = known_labels(setting.members)
    elif setting.start is not None and setting.start.labels is not None:
        labels = setting.start.labels
    else:
        raise ConfigError("method 'oracle' with partition 'found' needs a stage before it that finds clusters")
    solver = GroupSolver(setting.known_facts, labels, config.tolerance, config.newton_up_to, start=setting.start_models, sums=setting.sums)
    return half_of(solver) if setting.privacy is None else noised_half(solver, setting)


def known_labels(members: Members) -> Indices:
    """The known clusters (n,), numbered by their first member."""
    if "" in members.clusters:
        found = f"user {members.names[members.clusters.index('')]!r} has no known cluster, want one for every user"
        cure = "or certify the clusters that a run has found with --partition RUN"
        raise ConfigError(f"{found}: name their column in data.cluster_column (npz: cluster), {cure}")
    order = {cluster: number for number, cluster in enumerate(dict.fromkeys(members.clusters))}
    return np.array([order[cluster] for cluster in members.clusters], dtype=np.int64)


SERVER = ServerHalf(build=build, stages=stages, needs_everyone="without some losses the sums are those of another problem")
