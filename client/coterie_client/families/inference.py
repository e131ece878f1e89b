"""Client half of `inference`: sums over a user's rows at its final model, from which standard errors are computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.families.inference import FittedModels, Moments
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local


def init(options: Mapping[str, Any], local: Local, previous: None) -> None:
    """There is no state."""


def step(state: None, inbox: Inbox, local: Local) -> tuple[None, Sequence[Message]]:
    found = local.problem.moments(inbox[FittedModels].x)
    return state, [Moments(found.hessian, found.outer, found.gradient, found.residual, local.problem.n_rows)]


CLIENT = ClientHalf(init=init, step=step)
