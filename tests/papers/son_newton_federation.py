"""Server half of `son_newton` with its users in one process, from any start, and how far what it finds is from optimal."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie.experiment.problem import ProblemConfig
from coterie.families.consensus import AskConjugates, Curvatures, GroupModel, Slopes
from coterie.methods.son_newton import Config
from coterie.wire.precision import Precision
from coterie_client.data import UserData
from coterie_client.families import consensus
from coterie_client.interface.half import Inbox
from coterie_client.problems import build_problem
from coterie_server.interface.half import Facts, Members, Outcome, Replies, Setting
from coterie_server.methods.son_newton import Carry, SonNewton
from tests.papers.pdmm_federation import finished


class Residuals(NamedTuple):
    """Of the optimality conditions, each 0 at a solution."""

    forces: float  # the largest of grad f_i + sum_j z_ij
    outside: float  # by how much of its radius a z is outside
    turned: float  # the largest t |x_i - x_j| - z_ij.(x_i - x_j)


class Users:
    """A federation of users with a loss."""

    def __init__(self, loss: str, made: Sequence[UserData], **problem: Any) -> None:
        names, features, targets = zip(*((user.name, user.features, user.target) for user in made), strict=True)
        self.problem = build_problem(ProblemConfig(loss=loss, **problem), list(names), list(features), list(targets))
        self.n, self.d, self.asked = len(names), self.problem.d, list[Indices]()

    async def exchange(self, message: GroupModel | AskConjugates, to: Indices | None = None) -> Replies:
        if isinstance(message, AskConjugates):
            local: Any = SimpleNamespace(problem=self.problem, row_privacy=None)
            (answer,) = consensus.step(consensus.State(None, True), Inbox("x", 0, {AskConjugates: message}), local)[1]
            return Replies({type(answer): answer}, None)
        self.asked.append(np.arange(self.n) if to is None else to)
        at, users, (first, second) = message.x, message.users, np.triu_indices(self.d)
        triangles = np.ascontiguousarray(self.problem.hessian(at, users)[:, first, second])
        slopes = Slopes(self.problem.value(at, users), self.problem.gradient(at, users), users=users)
        return Replies({Slopes: slopes, Curvatures: Curvatures(triangles, users=users)}, None)

    def half(self, config: Config, start: Array | None = None) -> SonNewton:
        """From local models unless there is a start."""
        members = Members(tuple(f"u{i}" for i in range(self.n)), ("",) * self.n)
        models = self.problem.argmin(np.zeros((self.n, self.d)), 0.0) if start is None else start
        facts = Facts(self.problem.n_rows, self.d, smoothness=self.problem.smoothness())
        own = Setting(0, "x", members, Precision.of("float64"), facts, Outcome(models), problem=self.problem.config)
        return SonNewton(config, own)

    def solved(self, config: Config, start: Array | None = None, limit: int = 80) -> Carry:
        """What a stage carries on, from local models unless there is a start. Its gradients are the users' own."""
        half = self.half(config, start)
        state, figures, number = finished(half.init(self)), {"converged": 0.0}, 0
        while not figures["converged"]:
            number += 1
            assert number < limit, f"a gap of {figures.get('duality_gap')} after {limit} rounds"
            state, figures = finished(half.round(state, self, number))
        carry = finished(half.finish(state, self)).carry
        assert isinstance(carry, Carry)
        np.testing.assert_allclose(carry.answers.gradients, self.problem.gradient(carry.answers.x), rtol=1e-9, atol=1e-12)
        return carry


def residuals(carry: Carry) -> Residuals:
    """How far sum_j z_ij = -grad f_i, |z_ij| <= LAM w_ij, and z_ij along x_i - x_j, are from true."""
    forces, x, graph = carry.answers.gradients.copy(), carry.answers.x, carry.graph
    np.add.at(forces, graph.first, carry.z)
    np.subtract.at(forces, graph.second, carry.z)
    radii, apart = carry.lam * graph.weights, x[graph.first] - x[graph.second]
    turned = np.abs(radii * np.linalg.norm(apart, axis=1) - (carry.z * apart).sum(axis=1))
    outside = np.linalg.norm(carry.z, axis=1) / radii - 1
    return Residuals(float(np.abs(forces).max()), float(outside.max(initial=0.0)), float(turned.max(initial=0.0)))
