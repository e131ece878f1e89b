"""The members of a federation of containers: the plan from which files for Compose, Swarm and Kubernetes are written.

A flat federation is one network of the coordinator and the client hosts. With clusters, the coordinator and the aggregators share a
backbone, and each aggregator shares a network with the hosts of its cluster. With peers, aggregators share one more network. So uplink and
downlink, and communication between and within clusters, are traffic of different networks. Only the coordinator reads the experiment; the
others receive it from the coordinator.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from coterie import __version__
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, named_code
from coterie.experiment.consent import consent_hash
from coterie.experiment.data import HuggingfaceData, PythonData
from coterie.text.names import natural_key
from coterie_client.data import UserHead, list_users
from coterie_deploy.engines.launch import DEFAULT_HOSTS
from coterie_deploy.engines.shares import by_cluster, divided, selection
from coterie_deploy.read.shipped import find, load, shipped
from coterie_server.run.tiers import check_tiers

COORDINATOR = "coordinator"
FEDERATION, BACKBONE, PEERS = "federation", "backbone", "peers"
MAX_NAME = 20  # characters of a cluster's or an experiment's name in the names of containers, which have room for 52

Role = Literal["coordinator", "aggregator", "host"]


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    experiment: str
    overrides: Sequence[str] = ()
    seed: int | None = None
    topology: str | None = None
    hosts: int | None = None  # in all, or of each cluster
    data: Path | None = None  # a folder that every host reads
    private_data: Path | None = None  # a folder with a folder for each host
    certificates: Path | None = None
    monitoring: bool = False
    registry: str = ""
    allow_code: bool = False
    places: Sequence[str] = ()  # MEMBER=LABEL=VALUE, of the nodes where members belong


@dataclass(frozen=True)
class Member:
    """A container that takes part in the run."""

    name: str  # also of its service and in its certificate
    role: Role
    networks: tuple[str, ...]
    parent: str | None = None  # whom it joins
    n_children: int = 0
    cluster: str | None = None
    selection: tuple[str, ...] = ()  # options that choose a host's users; none: all users of its data
    users: tuple[str, ...] = ()  # those users, if they can be listed here

    @property
    def among_peers(self) -> str:
        """Its name on the network of peers alone: by its own, others may find it on the backbone, which they share as well."""
        return f"peer-{self.name}"


@dataclass(frozen=True)
class Plan:
    """All members: the coordinator, the aggregators, the hosts."""

    name: str  # of the experiment
    file: Path  # the experiment's
    is_shipped: bool  # with the images
    reads_data: bool  # from a folder
    trains_networks: bool
    members: tuple[Member, ...]
    asked: Asked
    accepts: str  # the hash of the experiment, which whoever writes the files has accepted
    waits: bool  # for members as long as it takes: the experiment says nothing else

    @property
    def hosts(self) -> list[Member]:
        return [member for member in self.members if member.role == "host"]

    @property
    def servers(self) -> list[Member]:
        return [member for member in self.members if member.role != "host"]

    @property
    def is_secured(self) -> bool:
        """Whether members have certificates."""
        return self.asked.certificates is not None

    @property
    def networks(self) -> tuple[str, ...]:
        """All networks, the coordinator's first."""
        return tuple(dict.fromkeys(network for member in self.members for network in member.networks))

    @property
    def short_name(self) -> str:
        """The experiment's name for a project of Compose, a stack, and the objects of Kubernetes: with a letter first."""
        safe = safe_names([self.name])[self.name]
        return safe if safe[0].isalpha() else f"run-{safe}"[:MAX_NAME].rstrip("-")

    def data_of(self, member: Member) -> Path | None:
        """The folder that a host reads, on the machine where it runs; None for other members, and where no host reads one."""
        if member.role != "host" or not self.reads_data:
            return None
        return self.asked.data if self.asked.private_data is None else self.asked.private_data / member.name

    def image(self, role: Role) -> str:
        """The image of a container of that role."""
        prefix = f"{self.asked.registry.rstrip('/')}/" if self.asked.registry else ""
        return f"{prefix}coterie-{self.target(role)}:{__version__}"

    def target(self, role: Role) -> str:
        """The stage of the Dockerfile that makes that image."""
        if role != "host":
            return "server"
        return "client-torch" if self.trains_networks else "client"


def planned(asked: Asked) -> Plan:
    """The plan of an experiment. Raises ConfigError if it cannot run in containers, or its users or clusters cannot be known."""
    changes = [*asked.overrides, *([f"federation.topology={asked.topology}"] if asked.topology else [])]
    experiment = load(asked.experiment, changes, seed=asked.seed)
    reads_data = _check(experiment, asked)
    heads = None if asked.private_data is not None else list_users(experiment.data, experiment.seed, asked.data)
    if experiment.federation.is_two_tier:
        members = _in_clusters(experiment, asked.hosts or experiment.federation.hosts_per_cluster, heads)
    else:
        n_hosts = _n_hosts(experiment, asked.hosts, heads)
        hosts = _hosts("host", FEDERATION, COORDINATOR, n_hosts, heads, None if heads is None else range(len(heads)), None)
        members = [Member(COORDINATOR, "coordinator", (FEDERATION,), n_children=n_hosts), *hosts]
    is_shipped, trains_networks = asked.experiment in shipped(), experiment.model is not None
    file, accepts = find(asked.experiment), consent_hash(experiment)
    waits = "join_timeout_s" not in experiment.federation.model_fields_set
    return Plan(experiment.name, file, is_shipped, reads_data, trains_networks, tuple(members), asked, accepts, waits)


def _check(experiment: Experiment, asked: Asked) -> bool:
    """Whether the experiment reads files from a folder. ConfigError when hosts in containers could not run it."""
    source = experiment.data
    check_tiers(experiment, [experiment.method.name, *experiment.references])
    if (named := [*named_code(experiment), *experiment.packages]) and not asked.allow_code:
        listed = " and ".join(map(repr, named))
        raise ConfigError(f"the experiment imports {listed}, which the images do not have: add it to them and allow it with --allow-code")
    if asked.data is not None and asked.private_data is not None:
        raise ConfigError("--data is for all hosts and --private-data for each its own, want one of the two")
    if isinstance(source, HuggingfaceData) and source.path is None:
        raise ConfigError(f"data.name is {source.name!r} of a hub that closed networks do not reach: want the data set as data.path")
    paths = [] if isinstance(source, PythonData) else [getattr(source, key, None) for key in ("path", "test_path")]
    read = [path for path in paths if path is not None]
    for path in read:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ConfigError(f"data path {path!r} leaves the folder that is mounted in the hosts' containers, want a path inside it")
    if read and asked.data is None and asked.private_data is None:
        raise ConfigError(f"the hosts read {read[0]!r}: want its folder with --data DIR, or one for each host with --private-data DIR")
    return bool(read) or asked.private_data is not None


def _n_hosts(experiment: Experiment, hosts: int | None, heads: Sequence[UserHead] | None) -> int:
    if hosts is not None:
        return hosts
    if "hosts" in experiment.federation.model_fields_set:
        return experiment.federation.hosts
    if heads is None:
        raise ConfigError("nothing says how many hosts have private data: want --hosts N, or federation.hosts in the experiment")
    return min(DEFAULT_HOSTS, len(heads))


def _hosts(
    prefix: str, network: str, parent: str, n: int, heads: Sequence[UserHead] | None, positions: Sequence[int] | None, cluster: str | None
) -> Iterator[Member]:
    """The hosts of a parent, and the users of each at these positions; None: not known here."""
    for i, share in enumerate([None] * n if positions is None else divided(positions, n, cluster), 1):
        chosen = () if share is None else selection(share, cluster, n)
        users = () if share is None or heads is None else tuple(heads[position].name for position in share)
        yield Member(f"{prefix}-{i}", "host", (network,), parent, cluster=cluster, selection=chosen, users=users)


def _in_clusters(experiment: Experiment, n_hosts: int, heads: Sequence[UserHead] | None) -> list[Member]:
    wanted = experiment.federation.clusters or ()
    if heads is None and not wanted:
        raise ConfigError("the clusters of private data cannot be known here, want their names as federation.clusters in the experiment")
    clusters: Mapping[str, Sequence[int] | None] = dict.fromkeys(wanted) if heads is None else by_cluster(heads, wanted)
    safe = safe_names(sorted(clusters, key=natural_key))
    aggregators, hosts = list[Member](), list[Member]()
    for cluster, name in safe.items():
        aggregator, network = f"aggregator-{name}", f"cluster-{name}"
        networks = (BACKBONE, *[PEERS] * experiment.federation.has_peers, network)
        aggregators.append(Member(aggregator, "aggregator", networks, COORDINATOR, n_hosts, cluster))
        hosts += _hosts(f"host-{name}", network, aggregator, n_hosts, heads, clusters[cluster], cluster)
    return [Member(COORDINATOR, "coordinator", (BACKBONE,), n_children=len(safe)), *aggregators, *hosts]


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """Each name in lower-case letters, digits and inner hyphens: short, and no two the same."""
    safe: dict[str, str] = {}
    for name in names:
        start = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME].strip("-") or "x"
        found, number = start, 1
        while found in safe.values():
            number += 1
            found = f"{start[: MAX_NAME - len(str(number)) - 1]}-{number}"
        safe[name] = found
    return safe
