"""The section `federation` of an experiment: who takes part, in which topology, and how long to wait for whom."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.compress import Compress
from coterie.experiment.links import LinkRules
from coterie.experiment.robust import Robust
from coterie.experiment.settings import Settings

_MAX_SECONDS = 1e9
_MAX_COUNT = 10**9
_SILENT_HEARTBEATS = 10  # after which a host gives its parent up (`coterie.session.dial`)

Seconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS)]
Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]


PeersShape = Literal["", "all", "ring"]  # how aggregators send sums to each other: not at all, each to all others, or around a ring


class FederationRules(Settings):
    """Who must take part, and how long to wait for whom, in seconds."""

    #: flat: hosts talk to the coordinator. clusters: an aggregator stands between the coordinator and the hosts of each known cluster.
    #: peers: so it does, and aggregators send the averages of their clusters to each other, not to the coordinator. All give the same bits.
    topology: Literal["flat", "clusters", "peers"] = "flat"
    #: With topology peers and more aggregators than this, sums go around a ring, of 2(k-1) vectors; with fewer each sends its own to all
    #: others, k(k-1) vectors.
    ring_above: Count = 8
    hosts: Count = 1  #: Number of members that join the coordinator: hosts, or aggregators with topology clusters or peers.
    hosts_per_cluster: Count = 1  #: Number of hosts that each aggregator waits for.
    #: Names of the known clusters that the members must bring, no more and no fewer; null: any.
    clusters: tuple[Name, ...] | None = Field(default=None, min_length=1)
    #: masked: hosts hide their sums from their parent, and aggregators those of their clusters from the coordinator, by masks that cancel
    #: in the total. It wants `exact_sums`, and has its bits. open: the parent sees the sums of each host.
    sums: Literal["open", "masked"] = "open"
    #: With sums: masked, which part of the hosts must be left in an exchange, more than a half. So many hosts can take off others' masks.
    threshold: Annotated[float, Field(gt=0.5, le=1.0)] = 0.66
    #: With sums: masked, parents see totals of at least this many hosts or aggregators; null: of `threshold` times all of them.
    min_summed: Annotated[int, Field(ge=2, le=_MAX_COUNT)] | None = None
    #: How answers of users are averaged where some may lie. null: by their mean, which one user alone can move anywhere.
    robust: Robust | None = None
    log_tasks: bool = False  #: Whether aggregators record an event when a task begins and ends, which shows who waited for whom.
    #: The run starts with this many hosts when join_timeout_s is over, and needs them to go on; null: all of them.
    min_hosts: Count | None = None
    users: Count | None = None  #: Number of users that the hosts must bring together; null: any number.
    #: How long the coordinator waits for its next member, counted from the last that joined, in seconds. none: as long as it takes, for
    #: members that a supervisor starts.
    join_timeout_s: Seconds | Literal["none"] = 60.0
    absence_timeout_s: Seconds = 60.0  #: How long a host may be without a connection before `on_loss` decides, in seconds.
    task_timeout_s: Seconds = 600.0  #: How long a connected host may take to answer, in seconds.
    heartbeat_s: Annotated[float, Field(ge=0.001, le=_MAX_SECONDS)] = 2.0  #: Time between two heartbeats of a connection, in seconds.
    #: How long a connection may bring nothing at all before it is given up, in seconds. At least twice `heartbeat_s`.
    silence_s: Seconds = 20.0
    #: wait: each exchange waits for every host. skip: it goes on without hosts that are late, which makes rounds faster and depends on the
    #: clock.
    late: Literal["wait", "skip"] = "wait"
    late_after_s: Seconds = 5.0  #: With late: skip, how long an exchange waits for the last hosts, in seconds.
    compress: Compress | None = None  #: How vectors and weights are made smaller on their way, `up` and `down`; null: they are not.
    links: LinkRules = LinkRules()  #: Emulated rate and delay of links. A run takes longer, and gives the same bits.
    #: What happens when a host has been absent too long. stop: the run ends and can be resumed. wait: it waits on. skip: it leaves the
    #: host's users out until they are back.
    on_loss: Literal["stop", "wait", "skip"] = "stop"

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.min_hosts is not None and self.min_hosts > self.hosts:
            raise ValueError(f"min_hosts is {self.min_hosts}, want at most hosts, which is {self.hosts}")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ValueError(f"silence_s is {self.silence_s}, want at least twice heartbeat_s, which is {self.heartbeat_s}")
        if self.is_two_tier and (self.min_hosts is not None or "skip" in (self.late, self.on_loss)):
            said = f"with topology {self.topology!r} every aggregator takes part: on_loss 'skip', min_hosts and late 'skip' are for 'flat'"
            raise ValueError(said)
        return self

    @model_validator(mode="after")
    def _links_let_both_ends_be_heard(self) -> Self:
        self.links.check(min(self.silence_s, _SILENT_HEARTBEATS * self.heartbeat_s))
        return self

    @property
    def is_two_tier(self) -> bool:
        """Whether aggregators stand between the coordinator and the client hosts."""
        return self.topology != "flat"

    @property
    def has_peers(self) -> bool:
        """Whether aggregators speak to each other."""
        return self.topology == "peers"

    def peers_of(self, n_clusters: int) -> PeersShape:
        """How the aggregators of so many clusters exchange sums."""
        if not self.has_peers:
            return ""
        return "ring" if n_clusters > self.ring_above else "all"

    @property
    def noun(self) -> Literal["aggregator", "host"]:
        """What joins the coordinator: "host" or "aggregator"."""
        return "aggregator" if self.is_two_tier else "host"
