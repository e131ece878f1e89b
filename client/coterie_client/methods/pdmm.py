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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from coterie.arrays import Array, Indices
from coterie.draws.streams import stream
from coterie.errors import RunError
from coterie.families.pdmm_messages import (
    Aggregates,
    AllBlocks,
    AllDuals,
    AllSplits,
    BroadcastModels,
    ChosenModels,
    ChosenSplits,
    Degrees,
    Duals,
    Excesses,
    OwnStart,
    OwnValuesWanted,
    OwnWeights,
    StartModels,
    UpdatedModels,
    UpdatedSplits,
    Values,
    ValuesWanted,
    Weight,
)
from coterie.methods.pdmm import Constants
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
    stochastic: Mapping[str, Any]  # the rule of x-updates from few rows at a time, {} for others
    in_pairs: bool  # (i,j) and (j,i) are drawn together; the user with i < j sends z_ij
    on_graph: bool  # users learn their degrees
    penalty: float  # lambda in (17)
    rho: float
    eta: float
    nu: float


@dataclass(frozen=True)
class LeanState:
    """One model per user."""

    options: Options
    smoothness: Array  # (n_own,) L_i of `linearized`, else NaN
    x: Array  # (n_own, d)
    degree: Array  # (n_own,) with a graph, else (0,)


@dataclass(frozen=True)
class PaperState:
    """What users keep in Algorithm 1. Axis 1 of z and muhat is the N-1 partners in member order."""

    options: Options
    smoothness: Array  # (n_own,) as above
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
    smoothness = local.problem.smoothness() if chosen.linearized else np.full(local.n_own, np.nan)
    d = local.problem.d
    if chosen.placement == "lean":
        return LeanState(chosen, smoothness, np.zeros((local.n_own, d)), np.zeros(local.n_own if chosen.on_graph else 0))
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
    if isinstance(state, LeanState) and (task := inbox.get(Aggregates)) and task.users is None and not state.options.stochastic:
        return partial(local.problem.look_ahead, state.x, None if state.options.linearized else _weight(state, local, None))
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
    if sent := inbox.get(Degrees):
        state = replace(state, degree=_with(state.degree, sent.degree, sent.users))
    x, replies = state.x, list[Message]()
    if common := inbox.get(StartModels):
        x = np.array(np.broadcast_to(common.x, x.shape))
    if own := inbox.get(OwnStart):
        x = _with(x, own.x, own.users)
    if (task := inbox.get(Aggregates)) and len(task.v):
        own_weights = inbox.get(OwnWeights)
        ratio = None if own_weights is None else own_weights.rho / state.options.rho
        old = x if task.users is None else x[task.users]
        if state.options.stochastic:
            new, excess = _from_few_rows(state, task.v, old, task.users, local, inbox.round)
            replies.append(Excesses(excess, users=task.users))
        else:
            new = _minimized(state, task.v, old, task.users, local, ratio)
        x = _with(x, new, task.users)
        replies.append(UpdatedModels(new, users=task.users))
    if ValuesWanted in inbox:
        replies.append(Values(local.problem.value(x)))
    if some := inbox.get(OwnValuesWanted):
        replies.append(Values(local.problem.value(x[_rows(some.users)], some.users), users=some.users))
    return replace(state, x=x), replies


def _with(x: Array, new: Array, users: Indices | None) -> Array:
    """x (n_own, ...) with the new rows of the listed users."""
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
        options, rows = state.options, _rows(users)
        others = state.x.sum(axis=0) - own[rows]
        v = options.rho * (others + state.z[rows].sum(axis=1)) + options.eta * own[rows] - state.muhat[rows].sum(axis=1)
        new = _minimized(state, v, own[rows], users, local)
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


def _minimized(state: State, v: Array, x: Array, users: Indices | None, local: Local, ratio: Array | None = None) -> Array:
    """x^{t+1} (n, d) of the listed users from their x^t, rounded as it is sent: (16), argmin f_i(x) + q/2 |x|^2 - v_i.x.

    `ratio` (n,) is each user's rho over that of the options, where users have their own.
    """
    options, q = state.options, _weight(state, local, users)
    q = q if ratio is None else q * ratio
    if options.linearized:
        curvature = state.smoothness[_rows(users), None]
        whole = curvature + (q if isinstance(q, float) else q[:, None])
        return local.precision.rounded((curvature * x - local.problem.gradient(x, users) + v) / whole)
    return local.precision.rounded(local.problem.argmin(v, q, x, users))


def _from_few_rows(state: LeanState, v: Array, x: Array, users: Indices | None, local: Local, round_number: int) -> tuple[Array, Array]:
    """(16) by SVRG or SAGA from x^t: x^{t+1} (n, d) of the listed users as it is sent, and (n,) gradient norms over tolerances."""
    from coterie_client.problems import stochastic  # noqa: PLC0415 - few runs need it

    rule, listed = stochastic.Rule(**state.options.stochastic), np.arange(local.n_own) if users is None else users
    q = np.broadcast_to(_weight(state, local, users), listed.shape)
    new, excess, purpose = np.empty_like(x), np.empty(len(x)), f"pdmm x-update of {state.options.stage}"
    for place, user in enumerate(listed.tolist()):
        member = int(local.indices[user])
        draws = partial(stream, local.seed, purpose, member, round_number)
        rows = stochastic.rows_of(local.problem, user)
        new[place], excess[place] = stochastic.minimise(rows, rule, v[place], float(q[place]), x[place], draws)
    return local.precision.rounded(new), excess


def _weight(state: State, local: Local, users: Indices | None) -> float | Array:
    """q; with a graph that of each listed user, (rho + eta) times its degree."""
    if isinstance(state, LeanState) and state.options.on_graph:
        return np.asarray((state.options.rho + state.options.eta) * state.degree[_rows(users)])
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
    return x[local.indices, None] - x[partners]


def _place(member: Indices, partner: Indices) -> Indices:
    """The index of a partner among the N-1 partners of a member."""
    return partner - (partner > member)


def _rows(users: Indices | None) -> Indices | slice:
    return slice(None) if users is None else users


CLIENT = ClientHalf(init=init, step=step, ahead=ahead)
