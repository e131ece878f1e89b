"""Who may join a parent: what a hello must look like, and what it must say to fit the run and the hosts before. Nothing is changed here."""

from __future__ import annotations

import itertools

from coterie.experiment.model import difference
from coterie.v1 import session_pb2
from coterie.wire.codec import PROTOCOL_VERSION
from coterie_server.session.refusal import Refusal, short_name
from coterie_server.session.roster import Roster
from coterie_server.session.schemas import check_schema, schema_of, why_not

_MAX_NAME_CHARS = 255  # of hosts, users and clusters
_MAX_WORD_CHARS = 1000  # of what else a hello says of its host
_MAX_MODEL_CHARS = 4 << 20
_MOST_BREACHES = 3  # of the protocol: so often a run goes on without a host and takes it back, but no more


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
    """Refusal of what is wrong with a hello, whatever the run."""
    host = short_name(hello.host)
    if hello.protocol != PROTOCOL_VERSION:
        raise Refusal("FAILED_PRECONDITION", f"host {host!r} speaks protocol {hello.protocol}, wanted {PROTOCOL_VERSION}")
    if not hello.host or not hello.users:
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} brings {len(hello.users)} users, wanted a name and at least one user")
    _check_texts(host, hello)
    check_schema(host, hello)
    names = [user.name for user in hello.users]
    if len(set(names)) != len(names) or not all(names):
        seen: set[str] = set()
        twice = next((name for name in names if not name or name in seen or seen.add(name)), "")  # type: ignore[func-returns-value]
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} names user {short_name(twice)!r} more than once or without a name")


def _check_texts(host: str, hello: session_pb2.Hello) -> None:
    """Refusal of names and other texts that are kept and shown for as long as the run lasts, and are too long for that."""
    names = itertools.chain([hello.host], (user.name for user in hello.users), (user.cluster for user in hello.users))
    wrong = next((name for name in names if len(name) > _MAX_NAME_CHARS or not name.isprintable()), None)
    if wrong is not None:
        what = f"{short_name(wrong)!r} of {len(wrong)} characters"
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} brings the name {what}, wanted at most {_MAX_NAME_CHARS}, all printable")
    words = {
        "instance": (len(hello.instance), _MAX_WORD_CHARS),
        "numerics": (len(hello.numerics), _MAX_WORD_CHARS),
        "run_id": (len(hello.run_id), _MAX_WORD_CHARS),
        "model": (len(hello.model), _MAX_MODEL_CHARS),
    }
    for word, (found, most) in words.items():
        if found > most:
            raise Refusal("INVALID_ARGUMENT", f"the {word} of host {host!r} has {found} characters, wanted at most {most}")


def _check_tier(parent: Roster, hello: session_pb2.Hello) -> None:
    """Refusal of an aggregator or a client host where the other is waited for, and of users of a wrong cluster."""
    if hello.aggregator != parent.rules.is_two_tier:
        found, wanted = ("an aggregator", "client hosts") if hello.aggregator else ("a client host", "the clusters' aggregators")
        raise Refusal("INVALID_ARGUMENT", f"{hello.host!r} is {found}, but this parent waits for {wanted} (federation.topology)")
    if hello.aggregator:
        _check_cluster(parent, hello.host, hello.users[0].cluster)
    wanted_cluster = hello.users[0].cluster if hello.aggregator else parent.cluster
    for user in hello.users if wanted_cluster is not None else ():
        if user.cluster != wanted_cluster:
            found = f"cluster {user.cluster!r}" if user.cluster else "no known cluster"
            whose = "aggregator" if hello.aggregator else "host"
            raise Refusal(
                "INVALID_ARGUMENT", f"user {user.name!r} of {whose} {hello.host!r} is of {found}, wanted cluster {wanted_cluster!r}"
            )


def _check_cluster(parent: Roster, aggregator: str, cluster: str) -> None:
    """Refusal of an aggregator without a cluster, of one that nobody waits for, and of one that another aggregator speaks for."""
    if not cluster:
        raise Refusal("INVALID_ARGUMENT", f"aggregator {aggregator!r} brings users without a known cluster, wanted those of one cluster")
    wanted = parent.rules.clusters
    if wanted is not None and cluster not in wanted:
        raise Refusal("INVALID_ARGUMENT", f"cluster {cluster!r} is not in federation.clusters, want one of {', '.join(wanted)}")
    other = next((host.name for host in parent.hosts.values() if host.name != aggregator and host.clusters[0] == cluster), None)
    if other is not None:
        claim = f"cluster {cluster!r} is claimed by aggregator {aggregator!r}, but"
        raise Refusal("ALREADY_EXISTS", f"{claim} another aggregator speaks for it", f"{claim} aggregator {other!r} speaks for it")
