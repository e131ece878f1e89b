"""Client half of `hlm_exact`: it sends a user's quadratic loss once, and keeps the model that comes back.

The Hessian is the same everywhere, and minus the gradient at zero is b_i. Both include l2, the reduction and the intercept's column.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array
from coterie.methods.hlm_exact import Models, Statistics
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local


@dataclass(frozen=True)
class State:
    """The users' models (n_own, d), once received."""

    theta: Array | None = None


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    if Models in inbox:
        return State(inbox[Models].theta), []
    zeros = np.zeros((local.n_own, local.problem.d))
    rows, columns = np.triu_indices(local.problem.d)
    triangle = np.ascontiguousarray(local.problem.hessian(zeros)[:, rows, columns])
    return state, [Statistics(triangle, -local.problem.gradient(zeros))]


CLIENT = ClientHalf(init=lambda *_: State(), step=step)
