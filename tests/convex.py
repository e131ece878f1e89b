"""Small experiments in which methods of local updates descend convex losses, shared by tests; nothing here is tested itself.

`ConvexUsers` drives the client half of a method, as `tests.local_updates.Users` does for networks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.streams import stream
from coterie.experiment.config import Experiment, experiment_from
from coterie.families.partial import AS_IS, AskScores, Scores, Shared, TrainingLoss, Trial, Updated
from coterie.wire.codec import Precision
from coterie.wire.messages import Message
from coterie_client.data import load_users
from coterie_client.families.partial import CLIENT, State
from coterie_client.interface.half import Inbox, Local
from coterie_client.learning import Tensors
from coterie_client.problems import build_problem

N_FEATURES = 3
STAGE = "stage"  # the same for all methods, so that they draw the same batches
BATCH = 4
SEED = 5
LEAST_SQUARES: Mapping[str, Any] = {"loss": "least_squares", "l2": 0.1}
PLAIN: Mapping[str, Any] = {"batch_size": BATCH, "epochs": 2, "optimizer": {"lr": 0.05, "momentum": 0.0}}
FULL: Mapping[str, Any] = {"batch_size": None, "optimizer": {"lr": 0.05, "momentum": 0.0}}  # gradients of f_i

# One of each method whose users share a model that is convex.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox"},
    "scaffold": {"name": "scaffold"},
    "apfl": {"name": "apfl", "adaptive": True},
    "ditto": {"name": "ditto"},
    "l2gd": {"name": "l2gd", "p": 0.4, "penalty": 3.0},
    "pfedme": {"name": "pfedme", "beta": 0.5},
    "ifca": {"name": "ifca", "clusters": 3},
}


def targets_of(loss: str, scores: Array) -> Array:
    """Targets that the loss knows, by the scores of a linear model."""
    if loss in ("logistic", "squared_hinge"):
        return np.where(scores >= 0, 1.0, -1.0)
    return np.floor(np.exp(np.clip(scores, -2.0, 2.0))) if loss == "poisson" else scores


def write_rows(path: Path, loss: str = "least_squares", n_users: int = 5, rows: int = 10, spread: float = 0.5) -> Path:
    """An archive of users with uneven numbers of rows, and models and scales of their own."""
    rng = np.random.default_rng(4)
    common = rng.standard_normal(N_FEATURES)
    features, target, user = [], [], []
    for number in range(n_users):
        mine = rng.standard_normal((rows + 4 * number, N_FEATURES)) * (1 + 0.2 * number)
        model = common + spread * rng.standard_normal(N_FEATURES)
        features.append(mine)
        target.append(targets_of(loss, mine @ model + 0.3 * rng.standard_normal(len(mine))))
        user += [f"u{number}"] * len(mine)
    np.savez(path, features=np.concatenate(features), target=np.concatenate(target), user=np.array(user))
    return path


def convex_experiment(path: Path, method: Mapping[str, Any], **extra: Any) -> Experiment:
    """Five users with least squares, snapshots every few rounds."""
    content = {
        "name": "convex",
        "seed": SEED,
        "data": {"source": "npz", "path": str(path), "test_fraction": 0.3},
        "problem": LEAST_SQUARES,
        "method": {"participation": 0.5, "batch_size": BATCH, "optimizer": {"lr": 0.05}, **method},
        "snapshots": {"every_rounds": 3},
        "stop": {"rounds": 6},
        **extra,
    }
    return experiment_from(content)


class ConvexUsers:
    """The client half of three users with 7, 10 and 13 training rows, of whom those listed are asked."""

    def __init__(self, method: Mapping[str, Any], **problem: Any) -> None:
        config = {**LEAST_SQUARES, **problem}
        with tempfile.TemporaryDirectory() as folder:
            path = write_rows(Path(folder) / "users.npz", config["loss"], n_users=3)
            self.experiment = convex_experiment(path, method, problem=config)
            self.users = load_users(self.experiment.data, self.experiment.seed, None)
        self.names = tuple(user.name for user in self.users)
        self.problem = build_problem(
            self.experiment.problem, self.names, [user.features for user in self.users], [user.target for user in self.users]
        )
        precision = Precision.of("float64", is_convex=True)
        self.local = Local(SEED, self.names, np.arange(3), 3, precision, self.users, losses=self.problem)
        self.state: State = CLIENT.init(self.experiment.method.client_options(), self.local, None)

    def answers(self, number: int, messages: Mapping[Any, Any]) -> dict[Any, Any]:
        """What the users reply in a round, by kind."""
        self.state, replies = CLIENT.step(self.state, Inbox(STAGE, number, dict(messages)), self.local)
        return {type(reply): reply for reply in replies}

    def round(self, number: int, sent: Array, asked: tuple[int, ...] = (0, 1, 2), *beside: Message) -> tuple[Array, Array]:
        """What the asked users return in a round, and their losses."""
        said = self.answers(number, shared(sent, asked, *beside))
        return said[Updated].weights, said[TrainingLoss].loss

    def judged(self, number: int, sent: Array, mode: int = AS_IS) -> Scores:
        """What all users say of their models in a mode, given the shared one."""
        trial = Trial(sent, np.zeros(0, np.int64), users=np.arange(3))
        scores: Scores = self.answers(number, {Trial: trial, AskScores: AskScores(np.array([mode]))})[Scores]
        return scores

    def kept(self, position: int) -> Tensors:
        """What a user keeps."""
        return {name: rows[position] for name, rows in self.state.kept.items()}

    def batches(self, position: int, number: int, epochs: int = 2, purpose: str = f"training of {STAGE}") -> Iterator[Indices]:
        """The rows of each step of an update, as the named streams draw them."""
        n_rows = len(self.users[position].target)
        for epoch in range(epochs):
            order = stream(SEED, purpose, self.names[position], number, 0, epoch).order(n_rows)
            splits = [rows for rows in np.split(order, range(BATCH, n_rows, BATCH)) if rows.size]
            if len(splits[-1]) == 1:
                splits[-2:] = [np.concatenate(splits[-2:])]
            yield from splits


def shared(sent: Array, asked: tuple[int, ...], *beside: Message) -> dict[Any, Message]:
    """What the asked users are sent in a round."""
    messages = (Shared(sent, np.zeros(0, np.int64), users=np.array(asked)), *beside)
    return {type(message): message for message in messages}


def a_model(seed: int = 1, scale: float = 0.3) -> Array:
    """A model of three features and an intercept that is not that of the seed."""
    return scale * np.random.default_rng(seed).standard_normal(N_FEATURES + 1)
