"""Local updates of networks, driven without a server, and the same steps computed by hand in float64; nothing here is tested itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.draws.streams import stream
from coterie.experiment.model import named_tensors
from coterie.families.partial import AS_IS, AskScores, Scores, Shared, TrainingLoss, Trial, Updated
from coterie.wire.precision import Precision
from coterie_client.data import UserData, load_users
from coterie_client.families.partial import CLIENT, State, travelling
from coterie_client.interface.half import Inbox, Local
from coterie_client.nets import TorchNetwork
from tests.networks import CLASSES, WIDTH, network_experiment, write_users

Tensors = Mapping[str, NDArray[Any]]
Hand = dict[str, torch.Tensor]  # a model's parameters, in float64
Batch = tuple[torch.Tensor, torch.Tensor]  # rows and labels
M = TypeVar("M", Shared, Trial)

STAGE = "stage"  # the same for all methods, so that they draw the same batches
BATCH = 4
PLAIN: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "optimizer": {"lr": 0.05, "momentum": 0.0}}


class Users:
    """The client half of three users, of whom those listed are asked."""

    def __init__(self, method: Mapping[str, Any], **extra: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.experiment = network_experiment(write_users(Path(folder) / "users.npz", n_users=3), method, **extra)
            self.users = load_users(self.experiment.data, self.experiment.seed, None)
        assert self.experiment.model is not None
        self.network = TorchNetwork(self.experiment.model, "cross_entropy", self.experiment.seed, (WIDTH,))
        names = tuple(user.name for user in self.users)
        self.local = Local(5, names, np.arange(3), 3, Precision.of("float64"), self.users, network=self.network)
        options = self.experiment.method.client_options()
        self.shared = travelling(self.network.tensors, options)
        self.state: State = CLIENT.init(options, self.local, None)

    def flat(self, model: Tensors) -> NDArray[np.float32]:
        """The shared numbers of a model, as messages have them."""
        shared = [np.asarray(model[tensor.name], np.float32).reshape(-1) for tensor in self.shared if not tensor.is_integer]
        return np.concatenate([np.zeros(0, np.float32), *shared])

    def counts(self, model: Tensors) -> NDArray[np.int64]:
        """And the shared counts."""
        return np.array([model[tensor.name] for tensor in self.shared if tensor.is_integer], np.int64)

    def named(self, weights: NDArray[Any]) -> Tensors:
        """The shared tensors, without counts, of such numbers."""
        return named_tensors(weights, np.zeros(0, np.int64), self.shared)

    def round(self, number: int, sent: Tensors, asked: tuple[int, ...] = (0, 1, 2)) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """What the asked users return in a round, and their losses."""
        message = self._message(Shared, sent, users=np.array(asked))
        self.state, replies = CLIENT.step(self.state, Inbox(STAGE, number, {Shared: message}), self.local)
        updated = [reply.weights for reply in replies if isinstance(reply, Updated)]
        losses = [reply.loss for reply in replies if isinstance(reply, TrainingLoss)]
        return updated[0] if updated else np.zeros((0, 0), np.float32), losses[0]

    def judged(self, number: int, sent: Tensors, mode: int = AS_IS) -> Scores:
        """What all users say of their models in a mode, given the shared tensors."""
        messages: dict[Any, Any] = {Trial: self._message(Trial, sent), AskScores: AskScores(np.array([mode]))}
        _, (scores,) = CLIENT.step(self.state, Inbox(STAGE, number, messages), self.local)
        assert isinstance(scores, Scores)
        return scores

    def _message(self, cls: type[M], sent: Tensors, **more: Any) -> M:
        return cls(self.flat(sent), self.counts(sent), **more)

    def kept(self, position: int) -> Tensors:
        """What a user keeps beside its private tensors."""
        return {name: rows[position] for name, rows in self.state.kept.items()}

    def batches(
        self, position: int, number: int, epochs: int = 2, purpose: str = f"training of {STAGE}", batch_size: int = BATCH
    ) -> Iterator[Batch]:
        """The rows and labels of each step of an update, as the named streams draw them."""
        user = self.users[position]
        for epoch in range(epochs):
            order = stream(5, purpose, user.name, number, 0, epoch).order(len(user.target))
            splits = [rows for rows in np.split(order, range(batch_size, len(order), batch_size)) if rows.size]
            if len(splits[-1]) == 1:
                splits[-2:] = [np.concatenate(splits[-2:])]
            for rows in splits:
                yield by_hand_rows(user, rows)


def by_hand_rows(user: UserData, rows: NDArray[Any]) -> Batch:
    return torch.tensor(user.features[rows], dtype=torch.float64), torch.tensor(user.target[rows], dtype=torch.int64)


def hand(model: Tensors) -> Hand:
    """A model to compute with by hand."""
    return {name: torch.tensor(np.array(array), dtype=torch.float64) for name, array in model.items()}


def loss_by_hand(w: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of fully connected layers with ReLU between them."""
    arrays = list(w.values())
    for number, (weight, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
        x = (torch.relu(x) if number else x) @ weight.T + bias
    assert x.shape[1] == CLASSES
    return -torch.log_softmax(x, 1)[torch.arange(len(y)), y].mean()


def gradient(w: Hand, batch: Batch) -> Hand:
    """grad f(w; batch)."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in w.items()}
    found = torch.autograd.grad(loss_by_hand(leaves, *batch), list(leaves.values()))
    return dict(zip(w, found, strict=True))


def combined(rule: Callable[..., torch.Tensor], *models: Hand) -> Hand:
    """A formula, tensor by tensor."""
    return {name: rule(*(model[name] for model in models)) for name in models[0]}


def assert_close(found: Tensors, wanted: Hand, tolerance: float = 2e-6) -> None:
    """Within what float32 may lose over an update."""
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=tolerance, err_msg=name)


def a_model(users: Users, scale: float = 0.3, seed: int = 1) -> Tensors:
    """A model that is not that of the seed."""
    rng = np.random.default_rng(seed)
    return {name: a + np.abs(scale * rng.standard_normal(a.shape)).astype(a.dtype) for name, a in users.network.initial().items()}
