"""Who is in a federation of containers: the plan from which `coterie compose` and `coterie kubernetes` write.

A flat federation is one network of the coordinator and the client hosts. With clusters, the coordinator and the aggregators share a
backbone, and each aggregator shares a network of its own with the hosts of its cluster: uplink and downlink, and communication between
and within clusters, are traffic of different networks. Nobody but the coordinator is told the experiment; it tells the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from coterie import __version__
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import consent_hash, named_code
from coterie.experiment.data import HuggingfaceData, PythonData
from coterie.text.names import natural_key
from coterie_client.data import UserHead, list_users
from coterie_deploy.engines.launch import DEFAULT_HOSTS
from coterie_deploy.engines.shares import by_cluster, divided, selection
from coterie_deploy.read.shipped import find, load, shipped
from coterie_server.interface.half import FLAT_ONLY, server_half

COORDINATOR = "coordinator"
FEDERATION, BACKBONE = "federation", "backbone"
MAX_NAME = 20  # characters of a cluster's or an experiment's name in the names of containers, which have room for 52

Role = Literal["coordinator", "aggregator", "host"]


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

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


@dataclass(frozen=True)
class Member:
    """A container that takes part in the run."""

    name: str  # of its service and in its certificate, and what it calls itself
    role: Role
    networks: tuple[str, ...]
    parent: str | None = None  # whom it joins
    n_children: int = 0
    cluster: str | None = None
    selection: tuple[str, ...] = ()  # options that choose a host's users; none: all users of its data
    users: tuple[str, ...] = ()  # those users, where they can be listed here


@dataclass(frozen=True)
class Plan:
    """Everybody: the coordinator, the aggregators, the hosts."""

    name: str  # of the experiment
    file: Path  # the experiment's
    is_shipped: bool  # with the images
    reads_data: bool  # from a folder
    trains_networks: bool
    members: tuple[Member, ...]
    asked: Asked
    accepts: str  # the hash of what hosts are asked for: whoever writes the files has accepted it

    @property
    def networks(self) -> tuple[str, ...]:
        """All networks, the coordinator's first."""
        return tuple(dict.fromkeys(network for member in self.members for network in member.networks))

    @property
    def short_name(self) -> str:
        """The experiment's name as a project of Compose and the objects of Kubernetes can begin with it: a letter first."""
        safe = safe_names([self.name])[self.name]
        return safe if safe[0].isalpha() else f"run-{safe}"[:MAX_NAME].rstrip("-")

    def image(self, role: Role) -> str:
        """What a container of that role runs."""
        target = self.target(role)
        prefix = f"{self.asked.registry.rstrip('/')}/" if self.asked.registry else ""
        return f"{prefix}coterie-{target}:{__version__}"

    def target(self, role: Role) -> str:
        """The stage of the Dockerfile that makes that image."""
        if role != "host":
            return "server"
        return "client-torch" if self.trains_networks else "client"


def planned(asked: Asked) -> Plan:
    """The plan of an experiment. Raises ConfigError for what cannot run in containers, and where users or clusters cannot be known."""
    changes = [*asked.overrides, *([f"federation.topology={asked.topology}"] if asked.topology else [])]
    experiment = load(asked.experiment, changes, seed=asked.seed)
    reads_data = _check(experiment, asked)
    heads = None if asked.private_data is not None else list_users(experiment.data, experiment.seed, asked.data)
    if experiment.federation.is_two_tier:
        members = _in_clusters(experiment, asked.hosts or experiment.federation.hosts_per_cluster, heads)
    else:
        members = list(_flat(_n_hosts(experiment, asked.hosts, heads), heads))
    return Plan(
        experiment.name,
        find(asked.experiment),
        asked.experiment in shipped(),
        reads_data,
        experiment.model is not None,
        tuple(members),
        asked,
        consent_hash(experiment),
    )


def _check(experiment: Experiment, asked: Asked) -> bool:
    """Whether the experiment reads files from a folder. ConfigError when hosts in containers could not run it."""
    source = experiment.data
    if experiment.federation.is_two_tier and server_half(experiment.method.name).tiers == FLAT_ONLY:
        raise ConfigError(f"method {experiment.method.name!r} has no clusters of its own, want --topology flat")
    if (named := [*named_code(experiment), *experiment.packages]) and not asked.allow_code:
        listed = " and ".join(map(repr, named))
        raise ConfigError(f"the experiment imports {listed}, which the images do not have: add it to them and allow it with --allow-code")
    if asked.data is not None and asked.private_data is not None:
        raise ConfigError("--data is for all hosts and --private-data for each its own, want one of the two")
    if isinstance(source, HuggingfaceData) and source.path is None:
        raise ConfigError(f"data.name is {source.name!r} of a hub that closed networks do not reach: want the data set as data.path")
    paths = [] if isinstance(source, PythonData) else [getattr(source, key, None) for key in ("path", "test_path")]
    read = [path for path in paths if path is not None]
    outside = next((path for path in read if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts), None)
    if outside is not None:
        raise ConfigError(f"data path {outside!r} leaves the folder that is mounted in the hosts' containers, want a path inside it")
    if read and asked.data is None and asked.private_data is None:
        raise ConfigError(
            f"the hosts read {read[0]!r}: want the folder it is in with --data DIR, or one for each host with --private-data DIR"
        )
    return bool(read) or asked.private_data is not None


def _n_hosts(experiment: Experiment, hosts: int | None, heads: Sequence[UserHead] | None) -> int:
    if hosts is not None:
        return hosts
    if "hosts" in experiment.federation.model_fields_set:
        return experiment.federation.hosts
    if heads is None:
        raise ConfigError("nothing says how many hosts have private data: want --hosts N, or federation.hosts in the experiment")
    return min(DEFAULT_HOSTS, len(heads))


def _flat(n_hosts: int, heads: Sequence[UserHead] | None) -> Iterator[Member]:
    yield Member(COORDINATOR, "coordinator", (FEDERATION,), n_children=n_hosts)
    shares = [None] * n_hosts if heads is None else divided(range(len(heads)), n_hosts)
    for i, share in enumerate(shares, 1):
        name = f"host-{i}"
        if share is None:
            yield Member(name, "host", (FEDERATION,), COORDINATOR)
        else:
            yield Member(name, "host", (FEDERATION,), COORDINATOR, selection=selection(share), users=_names(heads or (), share))


def _in_clusters(experiment: Experiment, n_hosts: int, heads: Sequence[UserHead] | None) -> list[Member]:
    wanted = experiment.federation.clusters or ()
    if heads is None and not wanted:
        raise ConfigError("the clusters of private data cannot be known here, want their names as federation.clusters in the experiment")
    clusters: Mapping[str, Sequence[int] | None] = dict.fromkeys(wanted) if heads is None else by_cluster(heads, wanted)
    safe = safe_names(sorted(clusters, key=natural_key))
    aggregators, hosts = [], []
    for cluster, name in safe.items():
        aggregator, network, positions = f"aggregator-{name}", f"cluster-{name}", clusters[cluster]
        aggregators.append(Member(aggregator, "aggregator", (BACKBONE, network), COORDINATOR, n_hosts, cluster))
        shares = [None] * n_hosts if positions is None else divided(positions, n_hosts, cluster)
        for i, share in enumerate(shares, 1):
            chosen = () if share is None else selection(share, cluster, n_hosts)
            users = () if share is None else _names(heads or (), share)
            hosts.append(Member(f"host-{name}-{i}", "host", (network,), aggregator, cluster=cluster, selection=chosen, users=users))
    return [Member(COORDINATOR, "coordinator", (BACKBONE,), n_children=len(safe)), *aggregators, *hosts]


def _names(heads: Sequence[UserHead], share: Sequence[int]) -> tuple[str, ...]:
    return tuple(heads[position].name for position in share)


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """What each name is called where only lower-case letters, digits and inner hyphens are allowed: short, and no two the same."""
    safe: dict[str, str] = {}
    for name in names:
        start = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME].strip("-") or "x"
        found, number = start, 1
        while found in safe.values():
            number += 1
            found = f"{start[: MAX_NAME - len(str(number)) - 1]}-{number}"
        safe[name] = found
    return safe
