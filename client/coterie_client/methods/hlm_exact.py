"""Client half of `hlm_exact`: it sends a user's quadratic loss once, and keeps the model that comes back.

The Hessian is the same everywhere, and minus the gradient at zero is b_i. Both include l2, the reduction and the intercept's column. With
`privacy.unit: row` both have noise (`coterie_client.families.perturbed`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.methods.hlm_exact import Models, Statistics
from coterie.wire.messages import Message
from coterie_client.families.perturbed import noised
from coterie_client.interface.half import ClientHalf, Inbox, Local, check_rounds


@dataclass(frozen=True)
class State:
    """The users' models (n_own, d), once received."""

    theta: Array | None = None
    n_noised: int = 0  # answers with noise so far


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    if Models in inbox:
        return replace(state, theta=inbox[Models].theta), []
    zeros = np.zeros((local.n_own, local.problem.d))
    if local.row_privacy is None:
        gradient, hessian = local.problem.gradient(zeros), local.problem.hessian(zeros)
    else:
        check_rounds(local, state.n_noised)
        gradient, hessian = noised(zeros, inbox, local)
    rows, columns = np.triu_indices(local.problem.d)
    state = replace(state, n_noised=state.n_noised + (local.row_privacy is not None))
    return state, [Statistics(np.ascontiguousarray(hessian[:, rows, columns]), -gradient)]


def _init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:  # noqa: ARG001
    return State(n_noised=0 if previous is None else previous.n_noised)


CLIENT = ClientHalf(init=_init, step=step)
