"""Minibatch steps on users' convex losses, in numpy and float64: the counterpart of `coterie_client.nets`, which uses torch.

Each user's steps use its own rows only, so its numbers do not depend on the other users of its host. Users with equally many rows take
their steps together, with the same bits: products are made user by user, and all else is elementwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.streams import normal, stream
from coterie.experiment.model import TensorInfo, X, convex_tensors
from coterie.experiment.privacy import row_draws
from coterie_client.learning import Draw, Epoch, Fitted, Optimizer, Phase, Rows, Tensors, count_steps, gradient, steps_of, train
from coterie_client.learning.private import RowNoise, train_privately
from coterie_client.problems.blocks import Block
from coterie_client.problems.convex import ConvexProblem

# Standard deviation of the entries of all starts but the first, which is zero. Small: beside starts as long as the users' own models, the
# zero start would fit everybody best.
SPREAD = 0.01


class ConvexLearner:
    """The `Learner` of users with convex losses. Model 0 starts at zero; further models start with small normal entries."""

    def __init__(self, problem: ConvexProblem, seed: int) -> None:
        self._problem, self._seed = problem, seed

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        return convex_tensors(self._problem.d)

    def initial(self, number: int = 0) -> dict[str, NDArray[Any]]:
        d = self._problem.d
        return {X: SPREAD * normal(stream(self._seed, "model", number), d) if number else np.zeros(d)}

    def fit(self, tensors: Tensors, rows: Rows, phases: Sequence[Phase], draw: Draw, noise: RowNoise | None = None) -> Fitted:
        """As `Learner.fit`. The whole model is head, so phases of the representation do nothing."""
        block = self._problem.block(rows.user, rows.features, rows.target)
        if noise is not None:
            slope = ConvexSlope(block, tensors[X])
            for phase in phases:
                train_privately(slope, len(rows.features), phase, noise)
            n_steps = row_draws(len(rows.features), map(vars, phases)).n
            return Fitted({X: slope.x}, 0.0, n_steps).checked(draw)
        return self._fitted(ConvexSlope(block, tensors[X]), len(rows.features), phases, draw)

    def fit_together(self, tensors: Tensors, users: Indices, phases: Sequence[Phase], draw: Draw) -> Fitted:
        """As `fit`, for several users (k,) of the host on their training rows, of which they have equally many: see `alike`."""
        start = np.broadcast_to(tensors[X], (users.size, self._problem.d))
        return self._fitted(SeveralSlopes(self._problem, users, start), int(self._problem.n_rows[users[0]]), phases, draw)

    def alike(self, users: Indices) -> Iterator[Indices]:
        """The places in the list of users for whom `fit_together` can be called."""
        return self._problem.alike(users)

    def _fitted(self, slope: ConvexSlope, n_rows: int, phases: Sequence[Phase], draw: Draw) -> Fitted:
        loss: Any = None
        beside: dict[str, NDArray[Any]] = {}
        phases = [phase for phase in phases if phase.part != "representation"]
        for number, phase in enumerate(phases):
            found = train(slope, gradient(phase, slope), steps_of(n_rows, phase, draw, number), phase)
            loss = loss if found.loss is None else found.loss
            beside |= found.beside
        if loss is None:
            loss = slope.value()
        return Fitted({X: slope.x}, loss, sum(count_steps(n_rows, phase) for phase in phases), beside).checked(draw)

    def judge(self, tensors: Tensors, rows: Rows) -> tuple[float, float]:
        """Mean loss without the penalty; and accuracy, squared error or deviance."""
        with np.errstate(over="ignore", invalid="ignore"):  # the caller reports diverged models
            return self._problem.judge(tensors[X], rows.user, rows.features, rows.target)

    def judge_together(self, tensors: Tensors, users: Indices, features: Sequence[Array], targets: Sequence[Array]) -> tuple[Array, Array]:
        """As `judge`, for several users (k,) of the host, each with its model and rows."""
        with np.errstate(over="ignore", invalid="ignore"):
            loss, metric = self._problem.evaluate(tensors[X], features, targets, users)
        return (loss / np.array([len(rows) for rows in features]) if self._problem.config.reduction == "sum" else loss), metric


class ConvexSlope:
    """The `Slope` of one user's loss at x (d,), which starts as a copy of `start`."""

    names: Sequence[str] = (X,)

    def __init__(self, block: Block, start: NDArray[Any]) -> None:
        self._block, self._share = block, block.share
        self.x: Array = np.array(start, dtype=np.float64, order="C")  # of one model for all users too
        self.parameters = [self.x]

    def value(self) -> float | Array:
        """f_i(x), with all rows and the penalty."""
        x = self.x[None]
        return float(self._block.value(x, self._block.look(x))[0])

    def __call__(self, rows: Indices) -> tuple[float | Array, list[Array]]:
        x, batch = self.x[None], self._block.batch(rows[None], self._share)
        seen = batch.look(x)
        return float(batch.value(x, seen)[0]), [batch.gradient(x, seen)[0]]

    def of_rows(self, rows: Indices) -> Iterator[Array]:
        """All of them at once, as `RowSlope.of_rows`: each row is a batch of its own."""
        x = np.repeat(self.x[None], rows.size, axis=0)
        batch = self._block.batch(rows[:, None], np.repeat(self._share, rows.size))
        yield batch.gradient(x, batch.look(x))

    def flat(self) -> Array:
        return self.x

    def split(self, flat: Array) -> list[Array]:
        return [flat]

    def values(self) -> list[Array]:
        return [self.x.copy()]

    def put(self, values: Sequence[Array]) -> None:
        self.x[:] = values[0]

    def state(self) -> Mapping[str, Array]:
        return {X: self.x}

    def array(self, numbers: NDArray[Any]) -> Array:
        return np.array(numbers, dtype=np.float64)

    def batches(self, epoch: Epoch) -> Sequence[Indices]:
        return np.split(epoch.order, np.cumsum(epoch.sizes)[:-1], axis=-1)

    def optimizer(self, phase: Phase, parameters: Sequence[Array]) -> Optimizer:
        if phase.optimizer == "adam":
            return Adam(parameters, phase.lr, phase.weight_decay)
        return Sgd(parameters, phase.lr, phase.momentum, phase.weight_decay)

    def apart(self, rest: Mapping[str, Array]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - it has no statistics
        return contextlib.nullcontext()


class SeveralSlopes(ConvexSlope):
    """The `Slope` of several users (k,) of a host at x (k, d): losses are (k,), and the rows of a step (k, b)."""

    def __init__(self, problem: ConvexProblem, users: Indices, start: NDArray[Any]) -> None:
        block, starts = problem.all_rows
        super().__init__(block, start)
        self._problem, self._users = problem, users
        self._starts, self._share = starts[users][:, None], block.share[users]

    def value(self) -> Array:
        return self._problem.value(self.x, self._users)

    def __call__(self, rows: Indices) -> tuple[Array, list[Array]]:
        batch = self._block.batch(self._starts + rows, self._share)
        seen = batch.look(self.x)
        return batch.value(self.x, seen), [batch.gradient(self.x, seen)]


class Sgd:
    """v <- momentum v + g + weight_decay w, then w <- w - lr v, for one parameter w."""

    def __init__(self, parameters: Sequence[Array], lr: float, momentum: float, weight_decay: float) -> None:
        (self._w,) = parameters
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._velocity = np.zeros_like(self._w)

    def step(self, gradients: Sequence[Any]) -> None:
        self._velocity = self._momentum * self._velocity + gradients[0] + self._weight_decay * self._w
        self._w -= self._lr * self._velocity


class Adam:
    """Algorithm 1 of Kingma and Ba (2015) for one parameter, with weight decay as part of the gradient."""

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, parameters: Sequence[Array], lr: float, weight_decay: float) -> None:
        (self._w,) = parameters
        self._lr, self._weight_decay = lr, weight_decay
        self._first, self._second = np.zeros_like(self._w), np.zeros_like(self._w)
        self._n_steps = 0

    def step(self, gradients: Sequence[Any]) -> None:
        first_beta, second_beta = self.BETAS
        self._n_steps += 1
        g = gradients[0] + self._weight_decay * self._w
        self._first = first_beta * self._first + (1 - first_beta) * g
        self._second = second_beta * self._second + (1 - second_beta) * g * g
        scale = np.sqrt(self._second / (1 - second_beta**self._n_steps)) + self.EPSILON
        self._w -= self._lr / (1 - first_beta**self._n_steps) * self._first / scale
