"""From the experiment and a selection of users to a `Host`: loads the rows and, when first needed, builds the losses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from coterie.config import Experiment, method_module
from coterie.snapshot import SnapshotFile
from coterie.wire import Precision
from coterie_client.data import load_users, standardize
from coterie_client.host import Host
from coterie_client.method import Local
from coterie_client.methods.prepare import State as Preparation
from coterie_client.problems import build_problem


def build_host(
    name: str,
    experiment: Experiment,
    run_id: str,
    users: Sequence[str] | None,
    *,
    data_dir: Path | None = None,
    store: SnapshotFile | None = None,
    instance: str = "",
) -> Host:
    """A host for these users (None: all of its data). Raises ConfigError for what is wrong with the data, naming it."""
    loaded = load_users(experiment.data, experiment.seed, users, data_dir)
    for room in {"prepare", "evaluation", "consensus", experiment.method.name}:
        with contextlib.suppress(ModuleNotFoundError):  # several methods share one room
            method_module("coterie_client", room)  # before the run waits for it
    return Host(name, experiment, run_id, loaded, local_of, store, instance)


def local_of(host: Host) -> Local:
    """What the halves may know: rows standardised by the agreed constants, and the losses on them."""
    preparation = host.states.get("prepare", Preparation())
    users = host.users
    if preparation.mean is not None and preparation.scale is not None:
        mean, scale = preparation.mean, preparation.scale
        users = tuple(standardize(user, mean, scale) for user in users)
    names = [user.name for user in users]
    problem = build_problem(host.experiment.problem, names, [user.features for user in users], [user.target for user in users])
    return Local(
        seed=host.experiment.seed,
        names=tuple(names),
        indices=host.indices,
        numbers=host.numbers,
        clusters=host.clusters,
        n_members=host.n_members,
        precision=Precision.of(host.experiment.payload),
        users=users,
        problem=problem,
    )
