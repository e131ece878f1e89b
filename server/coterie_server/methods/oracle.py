"""`oracle`: one model for each cluster, of the known partition or of the one that the stage before has found (refit)."""

from __future__ import annotations

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ConfigError, RunError
from coterie.methods.oracle import Config
from coterie_server.families.consensus import GroupSolver
from coterie_server.interface.half import Members, ServerHalf, Setting, StageHalf, half_of
from coterie_server.maths.consensus import State


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage. ConfigError when a user has no known cluster, and the known partition is wanted."""
    if setting.facts is None:
        raise RunError("method 'oracle' needs the facts of the stage 'prepare'")
    start = setting.start.models if setting.start else None
    if config.partition == "known":
        labels = known_labels(setting.members)
    elif setting.start is not None and setting.start.labels is not None:
        labels = setting.start.labels
    else:
        raise ConfigError("method 'oracle' with partition 'found' needs a stage before it that finds clusters")
    return half_of(GroupSolver(setting.facts, labels, config.tolerance, config.newton_up_to, start=start))


def known_labels(members: Members) -> Indices:
    """The known clusters (n,), numbered by their first member."""
    for name, cluster in zip(members.names, members.clusters, strict=True):
        if not cluster:
            raise ConfigError(
                f"user {name!r} has no known cluster, want one for every user: name their column in data.cluster_column (npz: cluster), "
                "or certify the clusters that a run has found with --partition RUN"
            )
    order = {cluster: number for number, cluster in enumerate(dict.fromkeys(members.clusters))}
    return np.array([order[cluster] for cluster in members.clusters], dtype=np.int64)


SERVER = ServerHalf(build=build, needs_everyone="without some losses the sums are those of another problem")
