"""A whole run at once: the coordinator in this process, its hosts in processes of their own (gRPC) or in this one (loopback)."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from coterie.config import Experiment, experiment_to_json
from coterie.errors import ConfigError
from coterie.ledger import as_ranges
from coterie.names import natural_key
from coterie_client.build import build_host
from coterie_client.data import UserHead, list_users
from coterie_deploy.client import store_of
from coterie_deploy.hosts import AggregatorProcess, HostProcess, host_processes
from coterie_deploy.loopback import join_all
from coterie_server.coordinator import Connect, Finished, Options, coordinate
from coterie_server.engine import Observer
from coterie_server.hub import Hub
from coterie_server.method import Outcome
from coterie_server.serve import serving

Transport = Literal["grpc", "loopback"]
TRANSPORTS: tuple[Transport, ...] = ("grpc", "loopback")
DEFAULT_HOSTS = 4  # processes
HOSTS = "hosts"  # in the run folder: state and log of each launched host


@dataclass(frozen=True)
class Launch:
    """How an experiment is run, beside what it says itself."""

    transport: Transport = "grpc"
    folder: Path | None = None
    data: Path | None = None
    resume: bool = False
    decisions_of: Path | None = None
    observer: Observer | None = None
    stop: asyncio.Event | None = None
    start: Outcome | None = None  # what another run has left, to start from
    on_hub: Callable[[Hub], None] | None = None  # is told the hub before hosts join


def default_hosts(experiment: Experiment, transport: Transport, data: Path | None) -> int:
    """How many hosts join the coordinator, when nobody says: a few processes, but none without users; an aggregator for each cluster."""
    if experiment.federation.is_two_tier:
        return len(_by_cluster(list_users(experiment.data, experiment.seed, data)))
    return 1 if transport == "loopback" else min(DEFAULT_HOSTS, len(list_users(experiment.data, experiment.seed, data)))


async def launch(experiment: Experiment, how: Launch) -> Finished:
    """Runs the experiment with its users spread evenly over `federation.hosts` hosts. Raises CoterieError."""
    n_hosts = experiment.federation.hosts
    heads = await asyncio.to_thread(list_users, experiment.data, experiment.seed, how.data)
    options = Options(how.folder, how.resume, how.decisions_of, how.observer, how.stop, how.start)
    if experiment.federation.is_two_tier:
        if how.transport == "loopback":
            raise ConfigError("transport 'loopback' has one process, want federation.topology 'flat'")
        return await coordinate(experiment, _in_two_tiers(experiment, how, heads), options)
    names = [head.name for head in heads]
    if n_hosts > len(names):
        raise ConfigError(f"{n_hosts} hosts for {len(names)} users: want at most one host for each user")
    bounds = [len(names) * i // n_hosts for i in range(n_hosts + 1)]
    shares = {f"host-{i + 1}": range(bounds[i], bounds[i + 1]) for i in range(n_hosts)}
    connect = _in_processes(experiment, how, shares) if how.transport == "grpc" else _in_this_process(experiment, how, shares, names)
    return await coordinate(experiment, connect, options)


def _by_cluster(heads: Sequence[UserHead]) -> dict[str, list[int]]:
    """The positions of each known cluster's users. ConfigError when a user has none."""
    positions: dict[str, list[int]] = {}
    for position, head in enumerate(heads):
        if not head.cluster:
            raise ConfigError(f"user {head.name!r} has no known cluster, want one for every user with federation.topology 'clusters'")
        positions.setdefault(head.cluster, []).append(position)
    return {cluster: positions[cluster] for cluster in sorted(positions, key=natural_key)}


def _in_two_tiers(experiment: Experiment, how: Launch, heads: Sequence[UserHead]) -> Connect:
    """An aggregator process for each known cluster, and below it `hosts_per_cluster` host processes."""
    clusters = _by_cluster(heads)
    if len(clusters) != experiment.federation.hosts:
        raise ConfigError(f"{experiment.federation.hosts} aggregators for {len(clusters)} known clusters: want one for each cluster")
    missing = next((name for name in experiment.federation.clusters or () if name not in clusters), None)
    if missing is not None:
        raise ConfigError(f"cluster {missing!r} has no users, but federation.clusters names it")

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        _announce(how, hub)
        with contextlib.ExitStack() as stack:
            folder = how.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
            processes = [_aggregator(experiment, how, folder / HOSTS, *item) for item in enumerate(clusters.items(), 1)]
            async with (
                serving(hub, experiment_to_json(experiment), "127.0.0.1:0") as server,
                host_processes(hub, server.port, processes),
            ):
                yield

    return connect


def _aggregator(experiment: Experiment, how: Launch, folder: Path, number: int, cluster: tuple[str, list[int]]) -> AggregatorProcess:
    name, positions = cluster
    n_hosts = experiment.federation.hosts_per_cluster
    if n_hosts > len(positions):
        raise ConfigError(f"{n_hosts} hosts for the {len(positions)} users of cluster {name!r}: want at most one host for each user")
    hosts = []
    for i in range(n_hosts):
        share = positions[len(positions) * i // n_hosts : len(positions) * (i + 1) // n_hosts]
        selection = ("--cluster", name) if n_hosts == 1 else ("--users", as_ranges(np.array(share)))
        hosts.append(HostProcess(f"host-{number}-{i + 1}", selection, folder / f"host-{number}-{i + 1}", how.data))
    return AggregatorProcess(name, name, hosts, folder / f"aggregator-{number}")


def _in_processes(experiment: Experiment, how: Launch, shares: dict[str, range]) -> Connect:
    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        _announce(how, hub)
        with contextlib.ExitStack() as stack:
            folder = how.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
            hosts = [
                HostProcess(name, ("--users", f"{share.start}-{share.stop - 1}"), folder / HOSTS / name, how.data)
                for name, share in shares.items()
            ]
            async with (
                serving(hub, experiment_to_json(experiment), "127.0.0.1:0") as server,
                host_processes(hub, server.port, hosts),
            ):
                yield

    return connect


def _in_this_process(experiment: Experiment, how: Launch, shares: dict[str, range], names: list[str]) -> Connect:
    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        _announce(how, hub)
        hosts = [
            build_host(
                name,
                experiment,
                hub.run_id,
                [names[place] for place in share],
                data_dir=how.data,
                store=None if how.folder is None else store_of(how.folder / HOSTS / name, name, hub.run_id),
            )
            for name, share in shares.items()
        ]
        join_all(hub, hosts)
        yield

    return connect


def _announce(how: Launch, hub: Hub) -> None:
    if how.on_hub is not None:
        how.on_hub(hub)
