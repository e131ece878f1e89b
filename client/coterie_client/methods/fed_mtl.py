"""Client half of `fed_mtl` (see `coterie.methods.fed_mtl`).

With a network it is a local update: the user's own model, pulled towards the received mean. With convex losses it is a half of its own: the
exact minimiser of loss plus pull.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.arrays import Array
from coterie.methods.fed_mtl import Pull, Pulled
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, judge_own, own_model, pulled


def update(context: Context) -> Moved:
    """w_i, both to return and to keep."""
    fitted = context.fit(context.kept, pulled(context.phases, context.settings["mu"], context.model))
    return Moved(fitted.tensors, fitted.tensors, fitted.loss)


UPDATE = LocalUpdate(update, own_model, judge_own, returns=lambda _: True)


@dataclass(frozen=True)
class State:
    w: Array  # (n_own, d) the users' latest models, from which Newton's method starts


def init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:  # noqa: ARG001
    return State(np.zeros((local.n_own, local.problem.d)))


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    """w_i = argmin f_i(w) + weight/2 ||w - y_i||^2, rounded as it is sent, and its loss."""
    task, w = inbox[Pull], state.w.copy()
    who = slice(None) if task.users is None else task.users
    found = local.problem.argmin(task.weight[:, None] * task.y, task.weight, w[who], task.users)
    w[who] = local.precision.rounded(found)
    return State(w), [Pulled(w[who], local.problem.value(w[who], task.users), users=task.users)]


CLIENT = ClientHalf(init=init, step=step)
