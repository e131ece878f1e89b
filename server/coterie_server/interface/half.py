"""The interface of a server half.

It is one value `SERVER` in `coterie_server/methods/NAME.py`, whose `build(config, setting)` returns a `StageHalf`. Within one round it
reads like the paper's pseudo-code and speaks to a `Federation`; nothing survives a round but the state, a frozen dataclass of arrays and
plain values, so that a checkpoint is generic. Halves know neither gRPC nor files nor clocks nor processes.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie.experiment.config import Experiment
from coterie.experiment.model import TensorInfo
from coterie.registry import method, typed_part
from coterie.text.names import natural_key
from coterie.wire.messages import Message, PerCluster
from coterie.wire.precision import Precision
from coterie_server.interface.expected import Counts, Expected, Key
from coterie_server.interface.stages import Stage, single_stage
from coterie_server.interface.wanted import Wanted

M = TypeVar("M", bound=Message)
S = TypeVar("S")

# Closing figures on the users that the end of a stage did without; there are none where it had everybody.
UNASKED, ABSENT = "unasked_at_end", "absent_at_end"

# Figures of a round that are 1 where the method ends its stage: it has found the models that it looks for, or made its iterations.
CONVERGED, ENDED = "converged", "has_ended"

# Figures on models that are not the minimisers: how many have none, which ends the stage, and how many are one of several.
UNBOUNDED, FLAT = "without_minimiser", "with_several_minimisers"


@dataclass(frozen=True)
class Members:
    """The users of a run in member order: natural order of their names, whatever host they came with."""

    names: tuple[str, ...]
    clusters: tuple[str, ...]  # the known cluster of each user, "" for none
    numbers: Indices | None = None  # (n,) of the users in the whole run, where these are only some of its members
    cluster_numbers: Indices | None = None  # (n,) of the users' clusters in the whole run, likewise

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def cluster_names(self) -> tuple[str, ...]:
        """The known clusters (k,) in natural order of their names: a cluster's place here is its number in the whole run."""
        return tuple(sorted({cluster for cluster in self.clusters if cluster}, key=natural_key))

    @functools.cached_property
    def cluster_of(self) -> Indices:
        """(n,) the number of each user's cluster in the whole run, -1 for users without one."""
        if self.cluster_numbers is not None:
            return self.cluster_numbers
        place = {name: number for number, name in enumerate(self.cluster_names)}
        return np.array([place.get(cluster, -1) for cluster in self.clusters], dtype=np.int64)

    @functools.cached_property
    def number_of(self) -> Indices:
        """(n,) the number of each user in the whole run: its place among all members."""
        return np.arange(len(self.names)) if self.numbers is None else self.numbers


@dataclass(frozen=True)
class Facts:
    """What users told about themselves once, in member order; one exchange of scalars, booked."""

    n_rows: Indices  # (n,) training rows
    smoothness: Array  # (n,) L_i of f_i; NaN for networks, like mu_i
    strong_convexity: Array  # (n,) mu_i of f_i
    d: int
    mean: Array | None = None  # (p,) constants of standardisation, when the members have agreed on some
    scale: Array | None = None  # (p,)
    n_test: Indices | None = None  # (n,) held-out rows, where a method needs them
    fill: Array | None = None  # (p,) what missing cells get, where they are filled
    n_fewest: Indices | None = None  # (n,) the fewest cells that a sum each user told is about, when sums were told


class Replies:
    """What the members answered to one exchange, put together in member order."""

    def __init__(
        self,
        messages: Mapping[type[Message], Message],
        answered: Indices | None,
        weights: Mapping[type[Message], Sequence[Message]] | None = None,
        unasked: Indices | None = None,
    ) -> None:
        self._messages = messages
        self._weights = weights or {}
        self.answered = answered  # member indices, sorted; None: everyone who was asked
        self._unasked = np.zeros(0, dtype=np.int64) if unasked is None else unasked

    @property
    def messages(self) -> Sequence[Message]:
        """All of them."""
        return tuple(self._messages.values())

    def awaited(self, asked: Indices) -> Indices:
        """Of the members asked, sorted, those whose hosts were not skipped."""
        return asked if self.answered is None else np.intersect1d(asked, self.answered)

    def n_unasked(self, asked: Indices) -> int:
        """How many of the members asked (sorted) were sent nothing: their hosts are lost, or behind."""
        return np.intersect1d(asked, self._unasked).size

    def left_out(self, n_users: int) -> dict[str, float]:
        """The closing figures on those of all users who were sent nothing, and who have not answered; none for 0."""
        everyone = np.arange(n_users)
        found = {UNASKED: self.n_unasked(everyone), ABSENT: n_users - self.awaited(everyone).size}
        return {name: float(n) for name, n in found.items() if n}

    def get(self, cls: type[M]) -> M | None:
        """The message of this kind with the rows of all who sent it; None when nobody did."""
        return self._messages.get(cls)  # type: ignore[return-value]

    def one_by_one(self, cls: type[M]) -> Sequence[M]:
        """The messages with `Weights` of this kind, one for each user in member order; RunError when nobody sent one.

        They are not put together into one: each may be most of a process's memory.
        """
        if cls not in self._weights:
            raise RunError(f"no member answered with {cls.kind}, which the method waits for")
        return self._weights[cls]  # type: ignore[return-value]

    def __getitem__(self, cls: type[M]) -> M:
        """The message of this kind; RunError when nobody sent one."""
        if cls not in self._messages:
            raise RunError(f"no member answered with {cls.kind}, which the method waits for")
        return self._messages[cls]  # type: ignore[return-value]


class Federation(Protocol):
    """The members as a method sees them."""

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Replies:
        """Sends `Rows` to their owners and `Broadcast`s to everyone, and awaits the replies.

        `to` (sorted member indices) limits the exchange to the hosts of these members; by default every host is asked. A host that
        brings something else than is `wanted` has broken the protocol.
        Raises RunError when a member cannot be reached before the deadline or returns NaN.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """What a stage leaves."""

    models: Array | None  # (n, d), None when models stay at their users
    labels: Indices | None = None  # (n,) cluster of each user, numbered by first member
    figures: Mapping[str, float] = field(default_factory=dict)
    by_user: Mapping[str, Array] = field(
        default_factory=dict
    )  # (n,) figures of each user, such as "personal_accuracy"; NaN where it has none
    shared: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # the shared tensors of a network by name
    # "mean", "scale" and "fill" (p,) of the features, where the models are of another run and it had any.
    constants: Mapping[str, Array] = field(default_factory=dict)
    carry: Any = None  # what a following stage of the same method may start from (a snapshot tree)
    is_judged: bool = False  # whether users have judged their models already
    warnings: tuple[str, ...] = ()  # what a person should know of how it has ended


@dataclass(frozen=True)
class Setting:
    """What a server half may know when its stage starts."""

    seed: int
    stage: str  # its name, part of every random stream
    members: Members
    precision: Precision
    facts: Facts | None = None
    start: Outcome | None = None  # the outcome of the stage that this one starts from
    rounds: int = 0  # the most there will be
    tensors: tuple[TensorInfo, ...] = ()  # of the users' models
    metric: str = "accuracy"  # what users judge their models by, beside the loss (`ProblemConfig.metric`)
    truth: Array | None = None  # (d, k) the representation that generated the data, where it is known
    hosts_of_cluster: Indices | None = None  # (k,) client hosts with users of each known cluster; None: one


def _nothing_counted(_: Sequence[Mapping[str, float]]) -> Counts:
    return {}


def _no_labels(_: Any) -> None:
    return None


def _has_converged(figures: Mapping[str, float]) -> str:
    if figures.get(CONVERGED, 0.0) >= 1.0:
        return "converged"
    return "no minimiser" if figures.get(UNBOUNDED, 0.0) else ""


@dataclass(frozen=True, kw_only=True)
class StageHalf(Generic[S]):
    """The server half of a method, set up for one stage. Its state S is a frozen dataclass of arrays and plain values.

    `figures` below are those of the rounds so far. The last round has the closing figures beside whose names end in "_at_start" or
    "_at_end", such as `UNASKED`.
    """

    client_options: Mapping[str, Any]  # JSON-able settings that client halves get with the first task of the stage, by their names
    init: Callable[[Federation], Awaitable[S]]  # the state before round 1
    # Round `number` (from 1): the new state, and figures such as "objective" or "primal_residual".
    round: Callable[[S, Federation, int], Awaitable[tuple[S, Mapping[str, float]]]]
    finish: Callable[[S, Federation], Awaitable[Outcome]]  # what the stage leaves, after its last round
    # The closed form of the stage's communication: d-vectors, given the figures.
    expected_vectors: Callable[[Sequence[Mapping[str, float]]], Counts]
    # The scalars of all fields of a step's messages, for steps without vectors, or with more than these.
    expected_scalars: Callable[[Sequence[Mapping[str, float]]], Counts] = _nothing_counted
    # Of vectors that are means over random coins: their standard deviations, and the vectors for the coins that were drawn.
    spread_of_vectors: Callable[[Sequence[Mapping[str, float]]], Counts] = _nothing_counted
    drawn_vectors: Callable[[Sequence[Mapping[str, float]]], Counts] = _nothing_counted
    # The paper's own count of vectors by direction after a number of rounds, where it differs from the closed form.
    printed_vectors: Callable[[int], Mapping[str, float]] | None = None
    labels_of: Callable[[S], Indices | None] = _no_labels  # clusters so far, recorded when they change
    # Why the method itself ends the stage after a round with these figures, "" where it goes on. Figures may be computed when looked at.
    ends: Callable[[Mapping[str, float]], str] = _has_converged
    # Which part of the stage is over after a round with these figures; None: as many rounds as the stop rule has.
    part: Callable[[Mapping[str, float]], float] | None = None
    warnings: Sequence[str] = ()  # sentences about its settings, recorded when the stage starts


class Hooks(Protocol[S]):
    """An object with the hooks that nearly every half has."""

    @property
    def client_options(self) -> Mapping[str, Any]: ...
    async def init(self, federation: Federation) -> S: ...
    async def round(self, state: S, federation: Federation, number: int) -> tuple[S, Mapping[str, float]]: ...
    async def finish(self, state: S, federation: Federation) -> Outcome: ...
    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts: ...
    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts: ...


def half_of(hooks: Hooks[S]) -> StageHalf[S]:
    """The half with these hooks; `dataclasses.replace` adds others."""
    return StageHalf(
        client_options=hooks.client_options,
        init=hooks.init,
        round=hooks.round,
        finish=hooks.finish,
        expected_vectors=hooks.expected_vectors,
        expected_scalars=hooks.expected_scalars,
    )


@dataclass(frozen=True)
class ClusterSetting:
    """What the aggregators' half may know when its stage starts."""

    seed: int
    stage: str
    members: Members  # of the clusters at hand: one cluster's, or, where the coordinator hosts the aggregators, everybody
    precision: Precision


class ClusterMethod(Protocol[S]):
    """The third half of a two-tier method, for one cluster or for several at once: `build_clusters(config, setting)` makes it.

    It sees the coordinator's `PerCluster` messages from above and the users of its clusters below. Whether an aggregator runs it for its
    cluster or the coordinator for all of them, the numbers of a cluster are the same, so its arithmetic is per cluster.
    """

    def init(self) -> S:
        """The state when the stage starts."""
        ...

    async def step(self, state: S, inbox: Mapping[type[Message], Message], federation: Federation) -> tuple[S, Sequence[PerCluster]]:
        """Handles what the coordinator sent, and answers for each cluster (ascending numbers)."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """The server half of a method."""

    build: Callable[[Any, Setting], StageHalf[Any]]  # for one stage; ConfigError where config, members and start do not fit together
    stages: Callable[[Any, Experiment], Sequence[Stage]] = single_stage
    # Why no user can be left out of a stage, "" where one can; a function of the method's configuration where that decides.
    needs_everyone: str | Callable[[Any], str] = ""
    # The aggregators' half of a two-tier method; FLAT_ONLY: it cannot run with aggregators; None: they pass messages on.
    tiers: Callable[[Any, ClusterSetting], ClusterMethod[Any]] | Literal["flat only"] | None = None


FLAT_ONLY: Final = "flat only"


def server_half(name: str) -> ServerHalf:
    """That of a method, or of its family where it has none of its own. LookupError where there is no such method."""
    for room in (name, method(name).room):
        if (found := typed_part("coterie_server", room, "SERVER", ServerHalf)) is not None:
            return found
    raise LookupError(f"method {name!r} has no server half")


__all__ = [
    "ABSENT",
    "CONVERGED",
    "ENDED",
    "FLAT",
    "FLAT_ONLY",
    "UNASKED",
    "UNBOUNDED",
    "ClusterMethod",
    "ClusterSetting",
    "Counts",
    "Expected",
    "Facts",
    "Federation",
    "Key",
    "Members",
    "Outcome",
    "Replies",
    "ServerHalf",
    "Setting",
    "StageHalf",
    "half_of",
    "server_half",
]
