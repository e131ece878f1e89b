"""Checks the hellos of hosts: their form, and whether they fit the run and the hosts before. Nothing is changed here."""

from __future__ import annotations

import itertools

from coterie.errors import ConfigError
from coterie.experiment.model import difference
from coterie.text.addresses import host_and_port
from coterie.v1 import session_pb2
from coterie.wire.codec import PROTOCOL_VERSION
from coterie_server.session.refusal import Refusal, short_name
from coterie_server.session.roster import Roster
from coterie_server.session.schemas import check_schema, schema_of, why_not

_MAX_NAME_CHARS = 255  # of hosts, users and clusters
_MAX_CHARS = {"instance": 1000, "numerics": 1000, "run_id": 1000, "peer_address": 300, "model": 4 << 20}  # of the other texts of a hello
_MOST_BREACHES = 3  # of the protocol: after so many a run does not take a host back


def check_hello(parent: Roster, hello: session_pb2.Hello, numbered: int) -> None:
    """Refusal of a host that cannot take part; `numbered` is the last exchange that it can have seen."""
    _check_form(hello)
    _check_tier(parent, hello)
    names = [user.name for user in hello.users]
    if hello.run_id and hello.run_id != parent.run_id:
        raise Refusal("FAILED_PRECONDITION", f"host {hello.host!r} holds the state of run {hello.run_id}, this is run {parent.run_id}")
    if hello.last_seq > numbered:
        state = f"it is at task {hello.last_seq}, but none above {numbered} was ever sent"
        raise Refusal("FAILED_PRECONDITION", f"host {hello.host!r} came with a state that is not of this run: {state}")
    known = parent.hosts.get(hello.host)
    if known is not None and known.n_breaches >= _MOST_BREACHES:
        found = f"has broken the protocol {known.n_breaches} times, and the run goes on without it"
        raise Refusal("FAILED_PRECONDITION", f"host {hello.host!r} {found}")
    if known is not None and parent.members is not None and hello.last_seq < known.forgotten:
        state = f"it is at task {hello.last_seq}, wanted at least {known.forgotten}"
        raise Refusal("FAILED_PRECONDITION", f"host {hello.host!r} came back without its state: {state}")
    if known is not None and known.link is not None and known.instance != hello.instance:
        raise Refusal("UNAVAILABLE", f"host {hello.host!r} is still connected from another process; give each process its own name")
    if known is not None and set(known.users) != set(names):
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} came back with other users than it had")
    _check_alike(parent, hello)
    owners = {user: host.name for host in parent.hosts.values() if host.name != hello.host for user in host.users}
    for name in names:
        if name in owners:
            claim = f"user {name!r} is claimed by host {hello.host!r}, but"
            raise Refusal("ALREADY_EXISTS", f"{claim} another host speaks for it", f"{claim} host {owners[name]!r} speaks for it")
    if parent.members is not None and known is None:
        known_users = set(parent.members.names)
        unknown = next((name for name in names if name not in known_users), names[0])
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} brings user {unknown!r}, whom the run, already started, does not know")
    if len(parent.hosts) >= parent.rules.hosts and hello.host not in parent.hosts:
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} would be host {len(parent.hosts) + 1} of {parent.rules.hosts}")


def _check_alike(parent: Roster, hello: session_pb2.Hello) -> None:
    """Refusal of a host whose features or model are not those of the hosts before."""
    if parent.schema and hello.schema and (why := why_not(schema_of(hello), parent.schema, parent.named)):
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} has other features: {why}")
    if parent.model and hello.model != parent.model:
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} {difference(hello.model, parent.model)} the hosts before")
    if parent.members is not None and ((hello.model and not parent.model) or (hello.schema and not parent.schema)):
        raise Refusal("INVALID_ARGUMENT", f"host {hello.host!r} has a model or named features, unlike the hosts before")


def _check_form(hello: session_pb2.Hello) -> None:
    """Refusal of a hello that is wrong in any run; names and other texts are kept as long as the run lasts, so their length is bounded."""
    host = short_name(hello.host)
    if hello.protocol != PROTOCOL_VERSION:
        raise Refusal("FAILED_PRECONDITION", f"host {host!r} speaks protocol {hello.protocol}, wanted {PROTOCOL_VERSION}")
    if not hello.host or not hello.users:
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} brings {len(hello.users)} users, wanted a name and at least one user")
    names = [user.name for user in hello.users]
    shown = itertools.chain([hello.host], names, (user.cluster for user in hello.users))
    wrong = next((name for name in shown if len(name) > _MAX_NAME_CHARS or not name.isprintable()), None)
    if wrong is not None:
        what = f"{short_name(wrong)!r} of {len(wrong)} characters"
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} brings the name {what}, wanted at most {_MAX_NAME_CHARS}, all printable")
    for word, most in _MAX_CHARS.items():
        if (found := len(getattr(hello, word))) > most:
            raise Refusal("INVALID_ARGUMENT", f"the {word} of host {host!r} has {found} characters, wanted at most {most}")
    check_schema(host, hello)
    if len(set(names)) != len(names) or not all(names):
        seen: set[str] = set()
        twice = next((name for name in names if not name or name in seen or seen.add(name)), "")  # type: ignore[func-returns-value]
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} names user {short_name(twice)!r} more than once or without a name")


def _check_tier(parent: Roster, hello: session_pb2.Hello) -> None:
    """Refusal of an aggregator where a client host is wanted, or the other way round, and of users of a wrong cluster."""
    if hello.aggregator != parent.rules.is_two_tier:
        found, wanted = ("an aggregator", "client hosts") if hello.aggregator else ("a client host", "the clusters' aggregators")
        raise Refusal("INVALID_ARGUMENT", f"{hello.host!r} is {found}, but this parent waits for {wanted} (federation.topology)")
    if hello.aggregator:
        _check_cluster(parent, hello.host, hello.users[0].cluster)
    if parent.rules.has_peers and (why := _not_an_address(hello.peer_address)):
        raise Refusal(
            "INVALID_ARGUMENT", f"aggregator {hello.host!r} says no address for the others (federation.topology is 'peers'): {why}"
        )
    wanted_cluster = hello.users[0].cluster if hello.aggregator else parent.cluster
    for user in hello.users if wanted_cluster is not None else ():
        if user.cluster != wanted_cluster:
            found = f"cluster {user.cluster!r}" if user.cluster else "no known cluster"
            whose = "aggregator" if hello.aggregator else "host"
            raise Refusal(
                "INVALID_ARGUMENT", f"user {user.name!r} of {whose} {hello.host!r} is of {found}, wanted cluster {wanted_cluster!r}"
            )


def _not_an_address(text: str) -> str:
    """Why the text is not HOST:PORT; "" if it is."""
    try:
        host_and_port(text, "its address")
    except ConfigError as error:
        return str(error)
    return ""


def _check_cluster(parent: Roster, aggregator: str, cluster: str) -> None:
    """Refusal of an aggregator without a cluster, with one that the run does not have, or with one that has an aggregator already."""
    if not cluster:
        raise Refusal("INVALID_ARGUMENT", f"aggregator {aggregator!r} brings users without a known cluster, wanted those of one cluster")
    wanted = parent.rules.clusters
    if wanted is not None and cluster not in wanted:
        raise Refusal("INVALID_ARGUMENT", f"cluster {cluster!r} is not in federation.clusters, want one of {', '.join(wanted)}")
    other = next((host.name for host in parent.hosts.values() if host.name != aggregator and host.clusters[0] == cluster), None)
    if other is not None:
        claim = f"cluster {cluster!r} is claimed by aggregator {aggregator!r}, but"
        raise Refusal("ALREADY_EXISTS", f"{claim} another aggregator speaks for it", f"{claim} aggregator {other!r} speaks for it")
