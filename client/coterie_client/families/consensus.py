"""Client half of `global`, `oracle`, `squared` and `local`: a user's term and its derivatives at a requested point.

The term is f_i, or with the option `ridge` q its Moreau envelope (see `coterie.methods.squared`):

    env_i(y) = min_x f_i(x) + q/2 |x - y|^2,   grad = q (y - x_i(y)),   Hessian = q (I - q (H_i + q I)^{-1})

Rows are not sent, but replies are per user and can be solved for rows. The first point is usually zero. There a user with one row (a, y)
has the gradient phi'(0, y) [a, -1], which reveals a, and with it y. The Hessian of m < d rows reveals the space that they span. Each
further point adds d equations about the m rows.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError
from coterie.experiment.config import Experiment
from coterie.experiment.data import MAX_USERS
from coterie.families.consensus import AskConjugates, AskLocalModels, AskModels, Conjugates, Curvatures, GroupModel, Slopes, UserModels
from coterie.findings import Finding
from coterie.wire.messages import Message
from coterie_client.families.perturbed import noised
from coterie_client.interface.half import ClientHalf, Inbox, Local, check_rounds


@dataclass(frozen=True)
class State:
    """Settings of the stage, and the last proximal points (n_own, d), from which Newton's method starts."""

    ridge: float | None
    with_hessians: bool
    x: Array | None = None
    n_noised: int = 0  # answers with noise so far


def allows(options: Mapping[str, Any], experiment: Experiment, n_members: int) -> bool:
    """Only the ridges of `squared`: with a ridge, each requested model is a gradient at a point of the parent's choice."""
    ridge, method = options["ridge"], experiment.method
    points = [method, *(point for _, point in method.points())] if method.name == "squared" else []
    # Below an aggregator a host knows the users of its cluster alone: those of the whole run may be any number that gives such a ridge.
    sizes = range(n_members, MAX_USERS + 1) if experiment.federation.is_two_tier else range(n_members, n_members + 1)
    return ridge is None or any(_is_among(ridge, sizes, point) for point in points)


def _is_among(ridge: float, sizes: range, point: Any) -> bool:
    """Whether `squared` with these settings has this ridge for one of these numbers of users: it grows with them."""
    place = bisect_left(sizes, ridge, key=lambda n: 2 * point.gam(n) * n)
    return place < len(sizes) and bool(ridge == 2 * point.gam(sizes[place]) * sizes[place])


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    if local.row_privacy is not None:
        return _noised(state, inbox, local)
    if AskLocalModels in inbox:
        zeros = np.zeros((local.n_own, local.problem.d))
        return state, [UserModels(local.problem.argmin(zeros, 0.0))]
    if AskModels in inbox:
        if state.ridge is None:  # with several minimisers, each start could find another one
            raise ProtocolError("the parent asks for models near a point, but the stage has no ridge", Finding("C10"))
        return state, [UserModels(_proximal_points(state, inbox[AskModels].y, local))]
    if AskConjugates in inbox:
        return state, [_conjugates(inbox[AskConjugates].u, local)]
    point, users, ridge = inbox[GroupModel].x, inbox[GroupModel].users, state.ridge
    if ridge is None:
        value, gradient = local.problem.value(point, users), local.problem.gradient(point, users)
        hessian = local.problem.hessian(point, users) if state.with_hessians else None
    elif users is not None:  # proximal points are kept of all users
        raise ProtocolError("the parent asks some users for a stage with a ridge, want all", Finding("C10"))
    else:
        x = _proximal_points(state, point, local)
        state = replace(state, x=x)
        value = local.problem.value(x) + ridge / 2 * np.square(x - point).sum(axis=1)
        gradient = ridge * (point - x)
        hessian = _envelope_hessian(local.problem.hessian(x), ridge) if state.with_hessians else None
    return state, _replies(value, gradient, hessian, users)


def _noised(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    """Sums with noise, which protects rows. Values would need noise of their own, so 0 stands for them."""
    if (asked := inbox.get(GroupModel)) is None or asked.users is not None or state.ridge is not None:
        raise ProtocolError("the parent asks for models, but the rows are to be protected by noise", Finding("C10"))
    check_rounds(local, state.n_noised)
    gradient, hessian = noised(asked.x, inbox, local)
    found = _replies(np.zeros(local.n_own), gradient, hessian if state.with_hessians else None)
    return replace(state, n_noised=state.n_noised + 1), found


def _replies(value: Array, gradient: Array, hessian: Array | None, users: Indices | None = None) -> list[Message]:
    replies: list[Message] = [Slopes(value, gradient, users=users)]
    if hessian is not None:
        rows, columns = np.triu_indices(hessian.shape[1])
        replies.append(Curvatures(np.ascontiguousarray(hessian[:, rows, columns]), users=users))
    return replies


def _init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:  # noqa: ARG001
    return State(options["ridge"], options["with_hessians"], n_noised=0 if previous is None else previous.n_noised)


def _conjugates(u: Array, local: Local) -> Conjugates:
    y = local.problem.argmin(u, 0.0, allow_unbounded=True)
    is_lost = np.isnan(y[:, 0])
    y[is_lost] = 0.0
    value = (u * y).sum(axis=1) - local.problem.value(y)
    value[is_lost] = 0.0
    return Conjugates(value, 1.0 - is_lost)


def _proximal_points(state: State, y: Array, local: Local) -> Array:
    ridge = state.ridge or 0.0
    return local.problem.argmin(ridge * y, ridge, y if state.x is None else state.x)


def _envelope_hessian(hessian: Array, q: float) -> Array:
    """q (I - q (H + q I)^{-1}) = q (H + q I)^{-1} H, (n, d, d), symmetric up to rounding."""
    identity = np.eye(hessian.shape[1])
    inner = q * np.linalg.solve(hessian + q * identity, hessian)
    return (inner + inner.transpose(0, 2, 1)) / 2


CLIENT = ClientHalf(allows=allows, init=_init, step=step)
