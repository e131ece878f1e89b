"""The interface of a server half.

It is one value `SERVER` in `coterie_server/methods/NAME.py`, whose `build(config, setting)` returns a `StageHalf`. One round reads like the
paper's pseudo-code and speaks to a `Federation`. Only the state survives a round, a frozen dataclass of arrays and plain values, so
checkpoints need to know no method. Halves know neither gRPC nor files nor clocks nor processes.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.secret import Secret
from coterie.errors import RunError
from coterie.experiment import problem as problems
from coterie.experiment.config import Experiment
from coterie.experiment.federation import PeersShape
from coterie.experiment.model import TensorInfo
from coterie.experiment.privacy import Privacy
from coterie.experiment.robust import Robust
from coterie.registry import method, typed_part
from coterie.text.names import natural_key
from coterie.wire.messages import Message, PerCluster
from coterie.wire.precision import Precision
from coterie_server.interface.expected import Counts as Counts  # noqa: PLC0414 - words of this module too
from coterie_server.interface.expected import Expected as Expected  # noqa: PLC0414
from coterie_server.interface.expected import Key as Key  # noqa: PLC0414
from coterie_server.interface.merge import one_by_one
from coterie_server.interface.peers import Peers
from coterie_server.interface.stages import Stage, single_stage
from coterie_server.interface.sum_links import SumLinks
from coterie_server.interface.totals import Sum as Sum  # noqa: PLC0414
from coterie_server.interface.totals import Totals as Totals  # noqa: PLC0414
from coterie_server.interface.wanted import Wanted

M = TypeVar("M", bound=Message)
S = TypeVar("S")

# Closing figures: users who were sent nothing at the end of a stage, and users who did not answer. Absent where all did.
UNASKED, ABSENT = "unasked_at_end", "absent_at_end"

# Figures of a round that are 1 where the method ends its stage: it has converged, or has made its iterations.
CONVERGED, ENDED = "converged", "has_ended"

# Figures: how many models have no minimiser, which ends the stage, and how many are one of several minimisers.
UNBOUNDED, FLAT = "without_minimiser", "with_several_minimisers"

# Closing figure: how far a user's model is from its cluster's mean, over the distance of the two closest means.
OVERLAP = "cluster_overlap"

# Figure of a round: users whose local problem ended before its tolerance.
UNCONVERGED = "unconverged"

# Figure of a round: how far the rounding of exact sums may have moved a user's number, and so a mean of them.
ROUNDING = "rounding"


@dataclass(frozen=True)
class Members:
    """The users of a run in member order: natural order of their names, on whatever hosts."""

    names: tuple[str, ...]  #: (n,) of the users
    clusters: tuple[str, ...]  #: the known cluster of each user, "" for none
    numbers: Indices | None = None  #: (n,) of the users in the whole run, where these are only some of its members
    cluster_numbers: Indices | None = None  #: (n,) of the users' clusters in the whole run, likewise

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
    """Facts that users send once, in member order."""

    n_rows: Indices  #: (n,) training rows
    d: int  #: numbers of a model
    smoothness: Array | None = None  #: (n,) L_i of f_i where a method of the run asks for it in `Method.facts`
    strong_convexity: Array | None = None  #: (n,) mu_i of f_i, likewise
    mean: Array | None = None  #: (p,) common constants of standardisation, if any
    scale: Array | None = None  #: (p,)
    n_test: Indices | None = None  #: (n,) held-out rows, where a method needs them
    fill: Array | None = None  #: (p,) the values of missing cells, where they are filled
    n_fewest: Indices | None = None  #: (n,) the fewest cells in any sum that a user has sent, where sums were sent


class Replies:
    """The members' answers to one exchange, in member order."""

    def __init__(
        self,
        messages: Mapping[type[Message], Message],
        answered: Indices | None,
        weights: Mapping[type[Message], Sequence[Message]] | None = None,
        unasked: Indices | None = None,
    ) -> None:
        self._messages, self._weights = messages, weights or {}
        self.answered = answered  # member indices, sorted; None: everyone who was asked
        self._unasked = np.zeros(0, dtype=np.int64) if unasked is None else unasked

    @property
    def messages(self) -> Sequence[Message]:
        """One of each kind."""
        return tuple(self._messages.values())

    def awaited(self, asked: Indices) -> Indices:
        """Of the members asked, sorted, those whose hosts were not skipped."""
        return asked if self.answered is None else np.intersect1d(asked, self.answered)

    def n_unasked(self, asked: Indices) -> int:
        """How many of the members asked (sorted) were sent nothing, because their hosts are lost or late."""
        return np.intersect1d(asked, self._unasked).size

    def left_out(self, n_users: int) -> dict[str, float]:
        """The closing figures `UNASKED` and `ABSENT`, without those that are 0."""
        everyone = np.arange(n_users)
        found = {UNASKED: self.n_unasked(everyone), ABSENT: n_users - self.awaited(everyone).size}
        return {name: float(n) for name, n in found.items() if n}

    def get(self, cls: type[M]) -> M | None:
        """The message of this kind with the rows of all its senders; None when nobody sent one."""
        return self._messages.get(cls)  # type: ignore[return-value]

    def in_runs(self, cls: type[M]) -> Sequence[M]:
        """The messages with `Weights` of this kind in member order, each with the rows of one or more users; RunError when nobody sent one.

        They are not put together into one: each may be most of a process's memory.
        """
        if cls not in self._weights:
            raise RunError(f"no member answered with {cls.kind}, which the method waits for")
        return self._weights[cls]  # type: ignore[return-value]

    def one_by_one(self, cls: type[M]) -> Sequence[M]:
        """The same, one message for each user."""
        return tuple(one_by_one(self.in_runs(cls)))  # type: ignore[arg-type]

    def __getitem__(self, cls: type[M]) -> M:
        """The message of this kind; RunError when nobody sent one."""
        if cls not in self._messages:
            raise RunError(f"no member answered with {cls.kind}, which the method waits for")
        return self._messages[cls]  # type: ignore[return-value]


class Federation(Protocol):
    """The members as a method sees them."""

    async def exchange(
        self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = (), within: int | None = None
    ) -> Replies:
        """Sends each `Rows` to its owners and each `Broadcast` to everyone, and awaits the replies.

        `to` (sorted member indices) limits the exchange to the hosts of these members; by default every host is asked. A host whose reply
        is not what is `wanted` has broken the protocol. Raises RunError when a member cannot be reached in time or returns NaN.

        With `within` nobody waits: the exchange ends once some host has answered it or an earlier one, and every answer that is owed since
        `within` exchanges or longer is there. `answered` of the replies names the users. Only hosts that owe nothing may be asked; no host
        need be. Which hosts' answers an exchange has taken is a decision, which a replay repeats. With 0 it waits for all.
        """

    async def total(self, *messages: Message, of: Sequence[Sum], to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Totals:
        """As `exchange`, but the answers of the kinds in `of` come as sums over the members asked; nobody sees a member's own answer.

        The members who answer with such a kind must be those of `to` (sorted), by default all. With `exact_sums: true` sums are exact but
        for the rounding of each term (`Totals.rounding`), and have the same bits on any hosts. A host that has a number above the bound of
        a sum ends the run. Otherwise terms are added in member order. `wanted` are the replies of kinds that are not summed.

        With messages for aggregators it is the sum of their answers over clusters.
        """


@dataclass(frozen=True)
class Outcome:
    """The results of a stage."""

    models: Array | None  #: (n, d), None when models stay at their users
    labels: Indices | None = None  #: (n,) cluster of each user, numbered by first member
    figures: Mapping[str, float] = field(default_factory=dict)  #: the closing figures, one number each
    by_user: Mapping[str, Array] = field(default_factory=dict)  #: (n,) figures by user, such as "personal_accuracy"; NaN for none
    shared: Mapping[str, NDArray[Any]] = field(default_factory=dict)  #: the shared tensors of a network by name
    constants: Mapping[str, Array] = field(default_factory=dict)  #: "mean", "scale" and "fill" (p,) of another run, if it had any
    carry: Any = None  #: data for a following stage of the same method (a snapshot tree)
    #: For standard errors: the fields of `coterie.families.inference.Moments` by name; empty where nobody was asked.
    moments: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    #: The graph of users, if the method has one that is not complete and the stage before has not left it: "first" and "second" (m,), the
    #: numbers of two members, and "weight" (m,).
    ties: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    is_judged: bool = False  #: whether users have evaluated their models already
    warnings: tuple[str, ...] = ()  #: sentences about how it has ended
    notes: tuple[str, ...] = ()  #: sentences about how it went, which `coterie show` and the report print too


@dataclass(frozen=True)
class ClusterSetting:
    """What the aggregators' half may know when its stage starts."""

    seed: int  #: of the run
    stage: str  #: its name, part of every random stream
    members: Members  #: of one cluster, or of all where the coordinator hosts the aggregators
    precision: Precision  #: of payloads and models
    robust: Robust | None = field(default=None, kw_only=True)  #: the rule that replaces means of users' answers
    #: What is clipped and noised.
    privacy: Privacy | None = field(default=None, kw_only=True)
    #: The key of the server's noise and of users drawn in secret, with `privacy.unit: user`.
    secret: Secret | None = field(default=None, kw_only=True)
    #: Whether `federation.total` has sums of hosts instead of users' answers (`exact_sums`).
    is_exact: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Setting(ClusterSetting):
    """What a server half may know when its stage starts; its members are all of the run."""

    facts: Facts | None = None  #: what users have said of their rows before the first round
    start: Outcome | None = None  #: the outcome of the stage that this one starts from
    beside: Mapping[str, Outcome] = field(default_factory=dict)  #: those of the stages in `Stage.beside`, by name
    rounds: int = 0  #: the greatest number
    residual: float | None = None  #: with which the stage ends
    tensors: tuple[TensorInfo, ...] = ()  #: of the users' models
    problem: problems.ProblemConfig | None = None  #: what users minimise
    truth: Array | None = None  #: (d, k) the representation that generated the data, where it is known
    hosts_of_cluster: Indices | None = None  #: (k,) client hosts with users of each known cluster; None: one
    sums: SumLinks | None = None  #: the links over which sums travel; None without `exact_sums`
    peers: PeersShape = ""  #: how aggregators average among themselves; "" where the coordinator averages

    @property
    def has_peers(self) -> bool:
        """Whether no average of clusters comes to the coordinator."""
        return bool(self.peers)

    @property
    def metric(self) -> str:
        """The users' score besides the loss."""
        return "accuracy" if self.problem is None else self.problem.metric

    @property
    def is_quadratic(self) -> bool:
        """Whether losses have the same second derivatives everywhere."""
        return self.problem is not None and self.problem.is_quadratic

    @property
    def known_facts(self) -> Facts:
        """The users' facts. RunError before the stage 'prepare'."""
        if self.facts is None:
            raise RunError(f"stage {self.stage!r} needs the facts of the stage 'prepare'")
        return self.facts

    @property
    def start_models(self) -> Array | None:
        """(n, d) those of `start`, if there are any."""
        return None if self.start is None else self.start.models


def _has_converged(figures: Mapping[str, float]) -> str:
    if figures.get(CONVERGED, 0.0) >= 1.0:
        return "converged"
    return "no minimiser" if figures.get(UNBOUNDED, 0.0) else ""


@dataclass(frozen=True, kw_only=True)
class StageHalf(Generic[S]):
    """The server half of a method, set up for one stage. Its state S is a frozen dataclass of arrays and plain values.

    `figures` below are those of the rounds so far. The last round also has the closing figures whose names end in "_at_start" or "_at_end".

    With `federation.on_loss: skip` a round may have to do without the users of lost hosts. Figures count them, and closed forms use these:
    `replies.awaited(asked)` are the users that answered, `replies.n_unasked(asked)` is how many were sent nothing. The name of such a count
    begins with "unasked": a repeated run may have another one. A `finish` that exchanges messages adds `replies.left_out(n_users)` to the
    figures of its outcome; their names are `UNASKED` and `ABSENT`.
    """

    client_options: Mapping[str, Any]  #: settings of the client halves, JSON values by their names, sent with the first task
    init: Callable[[Federation], Awaitable[S]]  #: the state before round 1
    #: Round `number` (from 1): the new state, and figures such as "objective" or "primal_residual".
    round: Callable[[S, Federation, int], Awaitable[tuple[S, Mapping[str, float]]]]
    finish: Callable[[S, Federation], Awaitable[Outcome]]  #: the results, after the last round
    expected_vectors: Callable[[Sequence[Mapping[str, float]]], Counts]  #: the closed form of the stage's traffic in d-vectors
    #: The scalars of all fields of a step's messages, for steps without vectors, or with other fields too.
    expected_scalars: Callable[[Sequence[Mapping[str, float]]], Counts] = lambda _: {}
    #: For vectors that are means over random coins: their standard deviations.
    spread_of_vectors: Callable[[Sequence[Mapping[str, float]]], Counts] = lambda _: {}
    #: For vectors that are means over random coins: the vectors for the coins that were drawn.
    drawn_vectors: Callable[[Sequence[Mapping[str, float]]], Counts] = lambda _: {}
    #: The paper's own count of vectors by direction after a number of rounds, where it differs from the closed form.
    printed_vectors: Callable[[int], Mapping[str, float]] | None = None
    labels_of: Callable[[S], Indices | None] = lambda _: None  #: clusters so far, recorded when they change
    #: Why the method ends the stage after a round with these figures, "" where it goes on. A figure may be computed when it is read.
    ends: Callable[[Mapping[str, float]], str] = _has_converged
    #: How much of the stage is over after a round with these figures, 0 to 1; None: the rounds over those of the stop rule.
    part: Callable[[Mapping[str, float]], float] | None = None
    warnings: Sequence[str] = ()  #: sentences about its settings, recorded when the stage starts
    notes: Sequence[str] = ()  #: likewise, without a warning
    #: The epsilon that a number of rounds spends, with `privacy`. The engine makes a figure of it, and `stop.epsilon` looks at it.
    epsilon: Callable[[int], float] | None = None


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


class ClusterMethod(Protocol[S]):
    """The aggregators' half of a two-tier method, for one cluster or for several at once: `ServerHalf.tiers` makes it.

    It receives the coordinator's `PerCluster` messages and speaks to the users of its clusters. Its arithmetic is per cluster, so that an
    aggregator with one cluster and a coordinator with all of them find the same numbers.
    """

    def init(self) -> S:
        """The state when the stage starts."""

    async def step(self, state: S, inbox: Mapping[type[Message], Message], federation: Federation) -> tuple[S, Sequence[PerCluster]]:
        """Handles the coordinator's messages, and answers for each cluster (ascending numbers)."""

    def notes(self, state: S) -> Sequence[str]:
        """Sentences about how the stage went."""


@dataclass(frozen=True)
class Need:
    """The memory that a stage needs at the server."""

    bytes: float
    of: str  #: "pdmm on all pairs of 20,000 users"
    instead: str  #: what needs less, as an order: "use graph: {neighbours: 15}"


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """The server half of a method."""

    build: Callable[[Any, Setting], StageHalf[Any]]  #: for one stage; ConfigError where config, members and start do not fit together
    #: The stages of a run, given the method's configuration and the experiment; by default one.
    stages: Callable[[Any, Experiment], Sequence[Stage]] = single_stage
    #: Why no user can be left out of a stage, "" where one can; a function where it depends on the method's configuration.
    needs_everyone: str | Callable[[Any], str] = ""
    #: What happens in a run with aggregators (`federation.topology: clusters`). None: they pass messages on, and `expected_vectors` must
    #: hold there too. "flat only": such a run is refused. A function: it makes the aggregators' half of a two-tier method.
    tiers: Callable[[Any, ClusterSetting], ClusterMethod[Any]] | Literal["flat only"] | None = None
    #: As `tiers`, where averages go between aggregators (topology peers). None: the coordinator must see them, and such a run is refused.
    peers: Callable[[Any, ClusterSetting, Peers], ClusterMethod[Any]] | None = None
    #: (config, number of users, numbers in a model) -> what a stage will need, where it may be more than a server has.
    memory: Callable[[Any, int, int], Need | None] | None = None


FLAT_ONLY: Final = "flat only"


def server_half(name: str) -> ServerHalf:
    """The half of a method, or of its family where it has none of its own. LookupError where there is no such method."""
    for room in (name, method(name).room):
        if (found := typed_part("coterie_server", room, "SERVER", ServerHalf)) is not None:
            return found
    raise LookupError(f"method {name!r} has no server half")
