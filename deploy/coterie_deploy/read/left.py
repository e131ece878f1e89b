"""What a stage has left: its users' models, and what it takes to apply one to new rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.text.names import normal, unknown_user
from coterie_server.run.coordinator import SHARED


@dataclass(frozen=True)
class Left:
    """The models of one stage in member order, and the constants that features were filled and standardised with."""

    stage: str
    users: tuple[str, ...]
    models: Array | None  # (n, d), None where they have stayed with their users
    labels: Indices | None = None  # (n,) cluster of each user, numbered by first member
    mean: Array | None = None  # (p,)
    scale: Array | None = None  # (p,)
    columns: tuple[str, ...] = ()  # the names of the p features, in order; empty where the data named none
    shared: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # the shared tensors of a network, or a representation
    fill: Array | None = None  # (p,) what missing cells get, where the run fills them

    def by_user(self) -> dict[str, Array]:
        """Each user's model (d,). ConfigError when the models have stayed with their users."""
        if self.models is None:
            raise ConfigError(f"the models of stage {self.stage!r} have stayed with their users")
        return dict(zip(self.users, self.models, strict=True))

    def clusters(self) -> dict[str, int] | None:
        """Each user's cluster; None for a method without clusters."""
        return None if self.labels is None else dict(zip(self.users, self.labels.tolist(), strict=True))

    def model_of(self, user: str) -> Array:
        """The model (d,) of a user. ConfigError when there is no such user, or the models have stayed with their users."""
        user = normal(user)
        if user not in self.users:
            raise unknown_user(user, self.users)
        return self.by_user()[user]


def left_in(folder: Path, stage: str) -> Left:
    """What a stage has left in a run folder. ConfigError when it has left nothing (yet)."""
    path = folder / "models" / f"{stage}.npz"
    if not path.is_file():
        raise ConfigError(f"stage {stage!r} has left no models in {folder}")
    with np.load(path) as arrays:
        return Left(
            stage,
            tuple(str(user) for user in arrays["users"]),
            arrays.get("x"),
            arrays.get("labels"),
            arrays.get("mean"),
            arrays.get("scale"),
            tuple(str(column) for column in arrays["features"]),
            {key.removeprefix(f"{SHARED}/"): arrays[key] for key in arrays.files if key.startswith(f"{SHARED}/")},
            arrays.get("fill"),
        )


def check_predicts(experiment: Experiment) -> None:
    """ConfigError for models that are points."""
    if experiment.problem.is_distance:
        raise ConfigError(f"the loss {experiment.problem.loss} makes no predictions: its models are points")


def predicted(experiment: Experiment, left: Left, user: str, features: Array) -> Array:
    """(m,) what a user's linear model says of rows (m, p) as they are in the data: -1 or 1 of a classifier, else the value."""
    from coterie_client.problems.resolve import resolve_row_loss  # noqa: PLC0415 - a machine that only coordinates has no losses

    if left.fill is not None:
        features = np.where(np.isnan(features), left.fill, features)
    if left.mean is not None and left.scale is not None:
        features = (features - left.mean) / left.scale
    if experiment.problem.has_intercept:
        features = np.column_stack([features, np.full(len(features), -1.0)])
    return resolve_row_loss(experiment.problem).predict((features * left.model_of(user)).sum(axis=1))
