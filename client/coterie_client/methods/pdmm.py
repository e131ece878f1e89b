"""Convex clustering by PDMM: the client half.

These are the users' steps S2 to S6 and S11 of Algorithm 1 of Armacki, Bajovic, Jakovetic and Kar (2022). In placement `paper` a user keeps
all models, its splits z_ij and its mu^_ij. In placement `lean` it keeps only its own model, from which the next minimization starts. The
server half names the deviations from the paper. Arithmetic is per user, and sums over j run in member order, so other users of the host do
not matter.

The x-update (16) is exact, or `linearized`: next to eta/2 |x - y|^2 it takes B_i(x, y) = L_i/2 |x - y|^2 - f_i(x) + f_i(y) + <grad f_i(y),
x - y> (section 2.1 of Wang, Banerjee and Luo, 2014). This needs one gradient,

    x_i^{t+1} = (L_i x_i^t - grad f_i(x_i^t) + v_i) / (L_i + q),     q = rho (N-1) + eta,
    v_i = rho sum_{j!=i} (x_j^t + z_ij^t) + eta x_i^t - sum_{j!=i} mu^_ij^t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie.methods.pdmm import (
    Aggregates,
    AllBlocks,
    AllDuals,
    AllSplits,
    BroadcastModels,
    ChosenModels,
    ChosenSplits,
    Constants,
    Duals,
    OwnStart,
    StartModels,
    UpdatedModels,
    UpdatedSplits,
    Values,
    ValuesWanted,
    Weight,
)
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local


@dataclass(frozen=True)
class Options:
    """The server half's options for the stage."""

    stage: str
    warm_from: str  # the stage whose state is kept, "" for none
    placement: str
    z_after_x: bool
    linearized: bool
    in_pairs: bool  # (i,j) and (j,i) are drawn together; the user with i < j sends z_ij
    penalty: float  # lambda in (17)
    rho: float
    eta: float
    nu: float


@dataclass(frozen=True)
class LeanState:
    """One model per user."""

    options: Options
    smoothness: Array  # (n_own,) L_i
    x: Array  # (n_own, d)


@dataclass(frozen=True)
class PaperState:
    """What users keep in Algorithm 1. Axis 1 of z and muhat is the N-1 partners in member order."""

    options: Options
    smoothness: Array  # (n_own,) L_i
    x: Array  # (N, d) everyone's models
    z: Array  # (n_own, N-1, d)
    muhat: Array  # (n_own, N-1, d)


State = LeanState | PaperState
S = TypeVar("S", LeanState, PaperState)


def init(options: Mapping[str, Any], local: Local, previous: State | None) -> State:
    """Zeros, or the previous state along a path. RunError if the host does not have it."""
    chosen = Options(**options)
    if chosen.warm_from:
        is_missed = previous is not None and previous.options.stage != chosen.warm_from
        # In placement lean a host may miss a stage, because its state is only a starting point.
        if previous is None or (is_missed and chosen.placement == "paper"):
            found = "no state" if previous is None else f"the state of stage {previous.options.stage!r}"
            raise RunError(f"stage {chosen.stage!r} starts from stage {chosen.warm_from!r}, but the host has {found}")
        return replace(previous, options=chosen)
    smoothness, d = local.problem.smoothness(), local.problem.d
    if chosen.placement == "lean":
        return LeanState(chosen, smoothness, np.zeros((local.n_own, d)))
    nothing = np.zeros((local.n_own, local.n_members - 1, d))
    return PaperState(chosen, smoothness, np.zeros((local.n_members, d)), nothing, nothing)


def step(state: State, inbox: Inbox, local: Local) -> tuple[State, Sequence[Message]]:
    """Handles one task of either placement."""
    if isinstance(state, LeanState):
        return _lean_step(_weighted(state, inbox), inbox, local)
    # S11 belongs to the previous round, and uses its rho.
    return _paper_step(_weighted(_received(state, inbox, local), inbox), inbox, local)


def ahead(state: State, inbox: Inbox, local: Local) -> Callable[[], None] | None:
    """In placement lean, prepares the next minimization, which starts from the models just sent if all are requested again."""
    if isinstance(state, LeanState) and (task := inbox.get(Aggregates)) and task.users is None:
        return partial(local.problem.look_ahead, state.x, None if state.options.linearized else _weight(state, local))
    return None


def _weighted(state: S, inbox: Inbox) -> S:
    """The state with the rho of this round, and with eta in the same ratio to it."""
    if not (sent := inbox.get(Weight)):
        return state
    options = state.options
    steps = Constants(options.rho, options.eta, options.nu, 0.0).at(float(sent.rho[0]))
    return replace(state, options=replace(options, rho=steps.rho, eta=steps.eta))


def _lean_step(state: LeanState, inbox: Inbox, local: Local) -> tuple[LeanState, list[Message]]:
    """(16) from v_i alone."""
    x, replies = state.x, list[Message]()
    if common := inbox.get(StartModels):
        x = np.array(np.broadcast_to(common.x, x.shape))
    if own := inbox.get(OwnStart):
        x = _with(x, own.x, own.users)
    if (task := inbox.get(Aggregates)) and len(task.v):
        new = _minimized(state, task.v, x if task.users is None else x[task.users], task.users, local)
        x = _with(x, new, task.users)
        replies.append(UpdatedModels(new, users=task.users))
    if ValuesWanted in inbox:
        replies.append(Values(local.problem.value(x)))
    return replace(state, x=x), replies


def _with(x: Array, new: Array, users: Indices | None) -> Array:
    """x (n_own, d) with the new rows of the listed users."""
    if users is None:
        return new
    x = x.copy()
    x[users] = new
    return x


def _received(state: PaperState, inbox: Inbox, local: Local) -> PaperState:
    """S0 and S7, then S11 on the mu_ij of S10."""
    x, muhat = state.x, state.muhat
    if start := inbox.get(StartModels):
        x = np.array(np.broadcast_to(start.x, x.shape))
    if sent := inbox.get(BroadcastModels):
        x = x.copy()
        x[sent.members if sent.members.size else slice(None)] = sent.x
    weight = state.options.nu * state.options.rho
    if every := inbox.get(AllDuals):
        muhat = every.mu - weight * (_differences(x, local) - state.z)
    if (some := inbox.get(Duals)) and some.users is not None:
        member, place = local.indices[some.users], _place(local.indices[some.users], some.partner)
        muhat = muhat.copy()
        residual = x[member] - x[some.partner] - state.z[some.users, place]
        muhat[some.users, place] = some.mu - weight * residual
    return replace(state, x=x, muhat=muhat)


def _paper_step(state: PaperState, inbox: Inbox, local: Local) -> tuple[PaperState, list[Message]]:
    """S2 and S5, S3 and S6. A new x_i enters the state when S7 brings it, a new z_ij at once."""
    replies: list[Message] = []
    wants_all, chosen = AllBlocks in inbox, inbox.get(ChosenModels)
    own = state.x[local.indices]
    if wants_all or chosen:
        users = None if chosen is None else chosen.users
        new = _minimized(state, _aggregates(state, own, users), own[_rows(users)], users, local)
        replies.append(UpdatedModels(new, users=users))
        own = own.copy()
        own[_rows(users)] = new
    if ValuesWanted in inbox:
        replies.append(Values(local.problem.value(own)))
    z = state.z
    if BroadcastModels in inbox if state.options.z_after_x else wants_all:
        z = _shrunk(_differences(state.x, local) + state.muhat / state.options.rho, state, local)
        replies.append(AllSplits(z))
    if (splits := inbox.get(ChosenSplits)) and splits.users is not None:
        z, message = _chosen_splits(state, splits.users, splits.partner, local)
        replies.append(message)
    return replace(state, z=z), replies


def _chosen_splits(state: PaperState, users: Indices, partner: Indices, local: Local) -> tuple[Array, UpdatedSplits]:
    """S3 and S6 on some pairs. One user of a drawn pair sends; the other computes z_ji = -z_ij itself."""
    member = local.indices[users]
    place = _place(member, partner)
    w = state.x[member] - state.x[partner] + state.muhat[users, place] / state.options.rho
    new, z = _shrunk(w, state, local), state.z.copy()
    z[users, place] = new
    sends = member < partner if state.options.in_pairs else np.ones(len(member), dtype=bool)
    return z, UpdatedSplits(new[sends], partner[sends], users=users[sends])


def _aggregates(state: PaperState, own: Array, users: Indices | None) -> Array:
    """v (n, d) of the listed users, from their state."""
    options, rows = state.options, _rows(users)
    others = state.x.sum(axis=0) - own[rows]
    v: Array = options.rho * (others + state.z[rows].sum(axis=1)) + options.eta * own[rows] - state.muhat[rows].sum(axis=1)
    return v


def _minimized(state: State, v: Array, x: Array, users: Indices | None, local: Local) -> Array:
    """x^{t+1} (n, d) of the listed users from their x^t, rounded as it is sent: (16), argmin f_i(x) + q/2 |x|^2 - v_i.x."""
    options, q = state.options, _weight(state, local)
    if options.linearized:
        curvature = state.smoothness[_rows(users), None]
        return local.precision.rounded((curvature * x - local.problem.gradient(x, users) + v) / (curvature + q))
    return local.precision.rounded(local.problem.argmin(v, q, x, users))


def _weight(state: State, local: Local) -> float:
    """q."""
    return state.options.rho * (local.n_members - 1) + state.options.eta


def _shrunk(w: Array, state: PaperState, local: Local) -> Array:
    """(17): the block soft threshold of the last axis, rounded as it is sent."""
    norms = np.sqrt((w * w).sum(axis=-1, keepdims=True))
    with np.errstate(divide="ignore"):
        kept = np.maximum(0.0, 1.0 - state.options.penalty / state.options.rho / norms)  # a norm of 0 gives -inf, hence 0
    return local.precision.rounded(kept * w)


def _differences(x: Array, local: Local) -> Array:
    """(n_own, N-1, d): x_i - x_j of the host's users and their partners."""
    place = np.arange(local.n_members - 1)
    partners = place + (place >= local.indices[:, None])
    difference: Array = x[local.indices, None] - x[partners]
    return difference


def _place(member: Indices, partner: Indices) -> Indices:
    """The index of a partner among the N-1 partners of a member."""
    place: Indices = partner - (partner > member)
    return place


def _rows(users: Indices | None) -> Indices | slice:
    return slice(None) if users is None else users


CLIENT = ClientHalf(init=init, step=step, ahead=ahead)
