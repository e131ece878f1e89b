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
from coterie.families.partial import AS_IS, AskScores, Scores, Shared, TrainingLoss, Trial, Updated
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_client.data import load_users
from coterie_client.families.partial import CLIENT, State
from coterie_client.interface.half import Inbox, Local
from coterie_client.learning import Tensors
from coterie_client.problems import build_problem
from coterie_deploy.studies.check.federations import CONVEX_METHODS as METHODS
from coterie_deploy.studies.check.federations import LEAST_SQUARES, N_FEATURES, convex_experiment, targets_of, write_rows

STAGE = "stage"  # the same for all methods, so that they draw the same batches
BATCH = 4
SEED = 5
PLAIN: Mapping[str, Any] = {"batch_size": BATCH, "epochs": 2, "optimizer": {"lr": 0.05, "momentum": 0.0}}
FULL: Mapping[str, Any] = {"batch_size": None, "optimizer": {"lr": 0.05, "momentum": 0.0}}  # gradients of f_i


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


__all__ = [
    "BATCH",
    "FULL",
    "LEAST_SQUARES",
    "METHODS",
    "N_FEATURES",
    "PLAIN",
    "SEED",
    "STAGE",
    "ConvexUsers",
    "a_model",
    "convex_experiment",
    "shared",
    "targets_of",
    "write_rows",
]
