"""Small experiments with networks, shared by tests; nothing here is tested itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.experiment.config import Experiment, experiment_from
from coterie.registry import methods

N_USERS, CLASSES, WIDTH = 7, 3, 5


def write_users(path: Path, n_users: int = N_USERS, rows: int = 14) -> Path:
    """An archive of users whose labels depend on a common projection of their rows, each user with its own order of the labels."""
    rng = np.random.default_rng(3)
    projection = rng.standard_normal((WIDTH, CLASSES))
    features, target, user = [], [], []
    for number in range(n_users):
        mine = rng.standard_normal((rows + number, WIDTH))
        labels = (mine @ projection).argmax(axis=1)
        features.append(mine)
        target.append(rng.permutation(CLASSES)[labels])
        user += [f"u{number}"] * len(mine)
    np.savez(path, features=np.concatenate(features), target=np.concatenate(target), user=np.array(user))
    return path


def network_experiment(path: Path, method: Mapping[str, Any], **extra: Any) -> Experiment:
    """Seven users with an MLP, snapshots every few rounds."""
    content = {
        "name": "networks",
        "seed": 5,
        "data": {"source": "npz", "path": str(path), "test_fraction": 0.3},
        "model": {"name": "mlp", "hidden": [6, 4], "classes": CLASSES},
        "method": {"participation": 0.5, "optimizer": {"lr": 0.05}, **method} if method["name"] in methods("network") else dict(method),
        "snapshots": {"every_rounds": 3},
        "stop": {"rounds": 6},
        **extra,
    }
    return experiment_from(content)
