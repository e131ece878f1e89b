"""The hosts of a run and their users: who is connected, the order of the members, and which part of a message goes to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from coterie.arrays import Indices
from coterie.errors import RunError
from coterie.experiment.config import Experiment
from coterie.experiment.features import Feature, named_columns
from coterie.experiment.federation import FederationRules
from coterie.text.names import natural_key
from coterie.v1 import session_pb2
from coterie.wire.assembler import Held
from coterie.wire.messages import Message
from coterie_server.interface.half import Members
from coterie_server.interface.merge import Layout
from coterie_server.session.ports import Link
from coterie_server.session.run_state import Host
from coterie_server.session.schemas import schema_of

_MAX_LISTED = 3  # hosts of a sentence


class Roster:
    """The hosts of one parent. `cluster`: this is an aggregator, only users of the cluster may join, and its parent numbers them."""

    def __init__(self, experiment: Experiment, run_id: str, cluster: str | None) -> None:
        self.rules, self.run_id, self.cluster = experiment.federation, run_id, cluster
        self.hosts: dict[str, Host] = {}  # before members are fixed, only those that are connected
        self.members: Members | None = None
        self.named = named_columns(experiment.data)  # the columns that the experiment names
        self.schema: tuple[Feature, ...] = ()  # the features, where the hosts' data has names
        self.model = ""  # the tensors of the hosts' model, in runs with a network
        self._layout: Layout | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, where the hosts' data has names."""
        return tuple(feature.name for feature in self.schema)

    @property
    def connected(self) -> list[Host]:
        """The hosts that have a stream."""
        return [host for host in self.hosts.values() if host.link is not None]

    @property
    def replied_bytes(self) -> int:
        """Bytes of the replies of the host that has sent the most."""
        return max((host.replied_bytes for host in self.hosts.values()), default=0)

    def on(self, name: str, link: Link | None) -> Host | None:
        """The host whose stream this is; None when it has another, or none."""
        host = self.hosts.get(name)
        return host if host is not None and link is not None and host.link is link else None

    def connect(self, hello: session_pb2.Hello, link: Link, now: float) -> Host:
        """Takes a host whose hello has passed all checks. A stream that it had is closed."""
        host = self.hosts.get(hello.host)
        if host is None:
            host = self.hosts[hello.host] = Host(hello.host, tuple(u.name for u in hello.users), tuple(u.cluster for u in hello.users))
        elif host.link is not None:
            host.link.close("UNAVAILABLE", f"host {host.name!r} has opened a new stream")
        if host.absent_since is not None:
            host.absent_s += now - host.absent_since
        # Another process may have computed a reply anew.
        host.held, host.holds = host.held.reopened() if host.instance == hello.instance else Held(), hello.held
        host.link, host.instance, host.absent_since, host.heard_at, host.is_struck = link, hello.instance, None, now, False
        host.reached, host.peer_address = hello.last_seq, hello.peer_address
        self.schema = self.schema or schema_of(hello)
        self.model = self.model or hello.model
        return host

    def disconnect(self, host: Host, now: float) -> None:
        """A host's stream has ended. Before members are fixed its place is free again, for it or for another."""
        host.link, host.absent_since = None, now
        if self.members is None:
            del self.hosts[host.name]

    def listed(self, hosts: Sequence[Host]) -> str:
        """The hosts with their users, for a sentence."""
        noun = self.rules.noun
        named = [f"{noun} {host.name!r} (users {host.users[0]}{f' to {host.users[-1]}' if len(host.users) > 1 else ''})" for host in hosts]
        more = [f"{len(named) - _MAX_LISTED} more"] if len(named) > _MAX_LISTED else []
        return " and ".join(named[:_MAX_LISTED] + more)

    @property
    def fixed(self) -> Members:
        """The members. RunError before they are fixed."""
        if self.members is None:
            raise RunError("no members yet: the join barrier has not been passed")
        return self.members

    def fix(self) -> Members:
        """Fixes the order of hosts and members. RunError when the users or clusters are not those of the experiment."""
        for name in sorted(self.hosts, key=natural_key):
            self.hosts[name] = self.hosts.pop(name)
        clusters = {user: cluster for host in self.hosts.values() for user, cluster in zip(host.users, host.clusters, strict=True)}
        names = tuple(sorted(clusters, key=natural_key))
        if self.rules.users is not None and len(names) != self.rules.users:
            raise RunError(f"the hosts bring {len(names)} users together, wanted {self.rules.users}")
        members = self._lay_out(Members(names, tuple(clusters[name] for name in names)))
        if self.cluster is None and (wanted := self.rules.clusters) is not None:
            missing, unknown = sorted({*wanted} - {*members.cluster_names}), sorted({*members.cluster_names} - {*wanted})
            if missing:
                raise RunError(f"cluster {missing[0]!r} has no users, but federation.clusters names it")
            if unknown:
                raise RunError(f"cluster {unknown[0]!r} is not in federation.clusters, want one of {', '.join(wanted)}")
        return members

    def number(self, numbers: Indices, clusters: Indices) -> None:
        """Sets the numbers of an aggregator's users and of their clusters in the whole run."""
        self._lay_out(Members(self.fixed.names, self.fixed.clusters, numbers, clusters))

    @property
    def is_numbered(self) -> bool:
        """Whether hosts can be welcomed."""
        return self.members is not None and (self.cluster is None or self.members.numbers is not None)

    def welcome(self, host: Host) -> session_pb2.JoinResponse:
        """What a host receives when members are numbered."""
        members = self.fixed
        place = {name: i for i, name in enumerate(members.names)}
        indices = [place[user] for user in host.users]
        numbers, clusters = members.number_of[indices].tolist(), (members.cluster_of[indices] + 1).tolist()
        welcome = session_pb2.Welcome(member_indices=indices, numbers=numbers, clusters=clusters)
        welcome.run_id, welcome.n_members, welcome.heartbeat_s = self.run_id, len(members), self.rules.heartbeat_s
        return session_pb2.JoinResponse(welcome=welcome)

    def peers(self) -> session_pb2.JoinResponse:
        """The aggregators in the order of their clusters, for each of them."""
        number = {cluster: i for i, cluster in enumerate(self.fixed.cluster_names)}
        hosts = sorted(self.hosts.values(), key=lambda host: number[host.clusters[0]])
        listed = [session_pb2.Peer(name=host.name, address=host.peer_address, cluster=number[host.clusters[0]]) for host in hosts]
        return session_pb2.JoinResponse(peers=session_pb2.PeerList(peers=listed))

    def _lay_out(self, members: Members) -> Members:
        place = {name: i for i, name in enumerate(members.names)}
        own = {name: np.array(sorted(place[user] for user in host.users), dtype=np.int64) for name, host in self.hosts.items()}
        self.members, self._layout = members, Layout(own, len(members), members.cluster_of)
        return members

    @property
    def layout(self) -> Layout:
        """Which members live on which host. RunError before members are fixed."""
        if self._layout is None:
            raise RunError("no members yet: the join barrier has not been passed")
        return self._layout

    def parts(self, messages: Sequence[Message], to: Indices | None) -> dict[str, list[Message]]:
        """The parts of the messages for each host of the members `to` (None: all hosts). Hosts without a part are left out."""
        layout = self.layout
        return {
            host: parts
            for host in layout.hosts_of(to)
            if (parts := [part for message in messages if (part := layout.part_for(host, message)) is not None])
        }

    def users_of(self, hosts: Iterable[str]) -> Indices:
        """The members of these hosts, sorted."""
        own = [self.layout.own[name] for name in hosts]
        return np.sort(np.concatenate(own)) if own else np.zeros(0, dtype=np.int64)


def missing_clusters(rules: FederationRules, here: Iterable[Host]) -> str:
    """The end of a sentence on which aggregators are here, where it is known which must be."""
    wanted = (rules.clusters or ()) if rules.is_two_tier else ()
    found = {cluster for host in here for cluster in host.clusters}
    missing = sorted(set(wanted) - found, key=natural_key)
    return f"; nobody speaks for cluster {' and '.join(map(repr, missing))}" if missing else ""
