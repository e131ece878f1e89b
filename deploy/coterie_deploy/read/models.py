"""The models of a run: those of each stage, those that stay with users' hosts, and their predictions for new rows.

`coterie models` writes networks as safetensors, one file for each user, and the configuration that builds them again.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie.experiment.model import TensorInfo, X, convex_tensors, from_json
from coterie.extras import needed
from coterie.record.snapshot import SnapshotFile
from coterie.text.names import natural_key, normal, unknown_user
from coterie_client.interface.half import client_half
from coterie_deploy.read.archives import arrays_of
from coterie_deploy.read.shipped import HOSTS, frozen_in
from coterie_server.record import summary
from coterie_server.record.rundb import read_run
from coterie_server.run.coordinator import MOMENTS, SHARED, TIES


@dataclass(frozen=True)
class StageModels:
    """The models of one stage in member order, and the constants that features were filled and standardised with."""

    stage: str
    users: tuple[str, ...]
    models: Array | None  # (n, d), None if they stay with their users
    labels: Indices | None = None  # (n,) cluster of each user, numbered by first member
    mean: Array | None = None  # (p,)
    scale: Array | None = None  # (p,)
    columns: tuple[str, ...] = ()  # the names of the p features, in order; empty where the data named none
    shared: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # the shared tensors of a network, or a representation
    fill: Array | None = None  # (p,) what missing cells get, where the run fills them
    moments: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # fields of `coterie.families.inference.Moments`, if measured
    ties: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # `Outcome.ties`

    def by_user(self) -> dict[str, Array]:
        """Each user's model (d,). ConfigError when the models have stayed with their users."""
        if self.models is None:
            raise ConfigError(f"the models of stage {self.stage!r} have stayed with their users")
        return dict(zip(self.users, self.models, strict=True))

    def clusters(self) -> dict[str, int] | None:
        return None if self.labels is None else dict(zip(self.users, self.labels.tolist(), strict=True))

    def model_of(self, user: str) -> Array:
        """The model (d,) of a user. ConfigError when there is no such user, or the models have stayed with their users."""
        user = normal(user)
        if user not in self.users:
            raise unknown_user(user, self.users)
        return self.by_user()[user]


def stage_models(folder: Path, stage: str) -> StageModels:
    """The models of a stage in a run folder. ConfigError if there are none (yet), RunError if their file is damaged."""
    path = folder / "models" / f"{stage}.npz"
    if not path.is_file():
        raise ConfigError(f"stage {stage!r} has left no models in {folder}")
    with arrays_of(path) as arrays:
        users, columns = (tuple(map(str, arrays[name])) for name in ("users", "features"))
        groups = (SHARED, MOMENTS, TIES)
        shared, moments, ties = (
            {key.removeprefix(f"{group}/"): arrays[key] for key in arrays if key.startswith(f"{group}/")} for group in groups
        )
        models, labels, mean, scale, fill = (arrays.get(name) for name in ("x", "labels", "mean", "scale", "fill"))
    return StageModels(stage, users, models, labels, mean, scale, columns, shared, fill, moments, ties)


def check_predicts(experiment: Experiment) -> None:
    """ConfigError for models that are points."""
    if experiment.problem.is_distance:
        raise ConfigError(f"the loss {experiment.problem.loss} makes no predictions: its models are points")


def predicted(experiment: Experiment, models: StageModels, user: str, features: Array) -> Array:
    """(m,) predictions of a user's linear model for rows (m, p) as they are in the data: -1 or 1 of a classifier, else the value."""
    return predictions_of(experiment, scores(experiment, models, models.model_of(user), features))


def predictions_of(experiment: Experiment, found: Array) -> Array:
    """(m,) of scores (m,): labels, expected counts, or values in the units of the data."""
    from coterie_client.problems.losses import resolve_row_loss  # noqa: PLC0415 - a machine that only coordinates has no losses

    values = resolve_row_loss(experiment.problem).predict(found)
    centre, unit = experiment.data.target_scale or (0.0, 1.0)
    return values if experiment.data.target_scale is None else centre + unit * values


def scores(experiment: Experiment, models: StageModels, x: Array, features: Array) -> Array:
    """(m,) what a linear model x (d,) of a stage gives rows (m, p) as they are in the data, before the loss makes a prediction of it."""
    if models.fill is not None:
        features = np.where(np.isnan(features), models.fill, features)
    if models.mean is not None and models.scale is not None:
        features = (features - models.mean) / models.scale
    if experiment.problem.has_intercept:
        features = np.column_stack([features, np.full(len(features), -1.0)])
    found: Array = (features * x).sum(axis=1)
    return found


Tensors = dict[str, NDArray[Any]]

_SNAPSHOT = ".snapshot"
_FILE_NAME = re.compile(r"(?!\.)[A-Za-z0-9._ -]{0,200}")  # without its ending
MODEL_FILE = "model.json"


@dataclass(frozen=True)
class FinishedRun:
    """A finished run whose users share tensors of a model or a linear representation, or have networks of their own."""

    folder: Path
    run_id: str
    stage: str
    experiment: Experiment
    last_seq: int  # of its exchanges: all hosts take part in it
    tensors: tuple[TensorInfo, ...]  # of the whole model, empty where a representation is shared
    shared: Tensors
    constants: Mapping[str, Array]  # of its features: those of "mean", "scale" and "fill" that it has


def finished_run(folder: Path) -> FinishedRun:
    """Reads a run folder. ConfigError if its run has not finished, or neither shared anything nor trained networks."""
    experiment = frozen_in(folder)
    with read_run(folder) as connection:
        facts = summary.facts(connection)
        (last_seq,) = connection.execute("SELECT MAX(seq) FROM ledger_rows").fetchone()
    stage = facts.get("final_stage")
    if stage is None or facts.get("status") != "finished":
        raise ConfigError(f"the run in {folder} has not finished, so it has no models yet")
    models = stage_models(folder, stage)
    shared, found = dict(models.shared), {"mean": models.mean, "scale": models.scale, "fill": models.fill}
    constants = {name: values for name, values in found.items() if values is not None}
    if not shared and experiment.model is None:
        raise ConfigError(f"the run in {folder} of method {experiment.method.name!r} has shared no representation and no network")
    tensors = from_json(facts["model"]) if "model" in facts else convex_tensors(shared[X].shape[-1]) if X in shared else ()
    return FinishedRun(folder, facts["run_id"], stage, experiment, last_seq, tensors, shared, constants)


def models_of(run: FinishedRun, state: Path | None, users: Sequence[str] | None = None) -> dict[str, Tensors]:
    """All tensors of each user (None: of all that are found), in natural order of names.

    `state` is the state folder of hosts that were not launched with the run; the default is the run folder's own hosts.
    Raises ConfigError if a user's private tensors are missing, and RunError if they may be in a snapshot that cannot be read.
    """
    found: dict[str, Tensors] = {}
    unreadable: RunError | None = None
    where = run.folder / HOSTS if state is None else state
    for path in sorted(where.rglob(f"*{_SNAPSHOT}")) if where.is_dir() else ():
        try:
            tree = SnapshotFile(path.parent, path.name.removesuffix(_SNAPSHOT)).load()
        except RunError as error:  # perhaps of another run: a state folder may be that of many
            unreadable = unreadable or error
            continue
        if tree is not None and tree.get("run_id") == run.run_id:  # beside hosts' states there may be a run's checkpoints
            found |= _models_in(run, tree)
    unknown = next((user for user in users or () if user not in found), None)
    if unreadable is not None and (not found or unknown is not None):
        raise unreadable
    if not found:
        raise ConfigError(f"no host of the run has left its state in {where}, want the folder that its clients were given with --state")
    if unknown is not None:
        raise unknown_user(unknown, list(found))
    return {user: found[user] for user in sorted(found if users is None else users, key=natural_key)}


def with_kept(models: StageModels, folder: Path, state: Path | None, user: str) -> StageModels:
    """The models of a stage, with the convex model that stays with this user. ConfigError if there is none."""
    if models.models is not None or X not in models.shared:
        return models
    run = finished_run(folder)
    if run.stage != models.stage:
        return models
    return replace(models, users=(user,), models=models_of(run, state, [user])[user][X][None])


def _models_in(run: FinishedRun, tree: Mapping[str, Any]) -> dict[str, Tensors]:
    if tree["last_seq"] < run.last_seq:
        raise ConfigError(f"the state of user {tree['users'][0]!r} is from before the end of the run: its host has not saved the last one")
    models = {}
    for room, state in tree["states"].items():
        _, half = client_half(room) or ("", None)
        if half is None or half.model_of is None:
            continue
        for position, user in enumerate(tree["users"]):
            whole = half.model_of(state, position, run.shared, run.tensors)
            models[user] = {tensor.name: whole[tensor.name] for tensor in run.tensors}
    return models


def export(folder: Path, output: Path, state: Path | None, users: Sequence[str] | None) -> list[Path]:
    """Writes USER.safetensors for each user and the configuration of the network; the files. Raises ConfigError."""
    needed("safetensors", "torch", "users' networks need safetensors")
    from safetensors.numpy import save_file  # noqa: PLC0415 - an extra

    run = finished_run(folder)
    if run.experiment.model is None:
        raise ConfigError(f"the run in {folder} trained no networks, want a run of an experiment with a model")
    models = models_of(run, state, users)
    content = json.loads(experiment_to_json(run.experiment))
    kept = {"run_id": run.run_id, "stage": run.stage, "model": content["model"], "problem": content["problem"], "seed": content["seed"]}
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / MODEL_FILE).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        written = []
        for name, (user, tensors) in zip(_file_names(models), models.items(), strict=True):
            path = output / f"{name}.safetensors"
            save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata={"user": user})
            written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write the models to {output}: {error.strerror or error}") from error
    return written


def _file_names(users: Iterable[str]) -> list[str]:
    """The users' names if they can be file names; else "user-" and the next number that is free."""
    taken = {user for user in users if _FILE_NAME.fullmatch(user)}
    free = (name for number in itertools.count(1) if (name := f"user-{number}") not in taken)
    return [user if user in taken else next(free) for user in users]
