"""A whole run at once: the coordinator in this process, its hosts in processes of their own (gRPC) or in this one (loopback)."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie_client.data import UserHead, list_users
from coterie_client.hosting.build import build_host
from coterie_deploy.engines.host_notes import HostNotes
from coterie_deploy.engines.hosts import AggregatorProcess, HostProcess, Launched, OnProcess, host_processes
from coterie_deploy.engines.loopback import joined, public_alone
from coterie_deploy.engines.shares import by_cluster, divided, selection
from coterie_deploy.read.cautions import links_caution
from coterie_deploy.read.shipped import HOSTS
from coterie_deploy.roles.client import store_of
from coterie_deploy.telemetry.spans import Telemetry
from coterie_server.interface.half import Outcome
from coterie_server.record.rundb import OnEvent
from coterie_server.run.coordinator import Connect, Finished, Options, coordinate
from coterie_server.run.engine import Observer
from coterie_server.session.hub import Hub
from coterie_server.session.ports import Tracer
from coterie_server.transport.serve import serving

Transport = Literal["grpc", "loopback"]
TRANSPORTS: tuple[Transport, ...] = ("grpc", "loopback")
DEFAULT_HOSTS = 4  # processes


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
    tracer: Tracer | None = None
    telemetry: Telemetry | None = None  # for the aggregators of a run in processes
    on_event: OnEvent | None = None
    on_note: Callable[[str], None] | None = None  # receives each sentence on the hosts' data
    on_process: OnProcess | None = None  # receives name and process id of each member that is started in a process of its own
    beside: Callable[[Hub], AbstractAsyncContextManager[object]] | None = None  # is entered before hosts join, and left after all else


def default_hosts(experiment: Experiment, transport: Transport, data: Path | None) -> int:
    """How many hosts join the coordinator, when nobody says: a few processes, but none without users; an aggregator for each cluster."""
    if experiment.federation.is_two_tier:
        return len(by_cluster(list_users(experiment.data, experiment.seed, data)))
    return 1 if transport == "loopback" else min(DEFAULT_HOSTS, len(list_users(experiment.data, experiment.seed, data)))


async def launch(experiment: Experiment, how: Launch) -> Finished:
    """Runs the experiment with its users spread evenly over `federation.hosts` hosts. Raises CoterieError."""
    n_hosts = experiment.federation.hosts
    heads = await asyncio.to_thread(list_users, experiment.data, experiment.seed, how.data)
    notes = HostNotes(how.on_note, how.on_event)
    options = Options(how.folder, how.resume, how.decisions_of, how.observer, how.stop, how.start, how.tracer, notes)
    if experiment.federation.is_two_tier:
        if how.transport == "loopback":
            raise ConfigError("transport 'loopback' has one process, want federation.topology 'flat'")
        return await coordinate(experiment, _with_what_is_beside(_in_two_tiers(experiment, how, heads, notes), how), options)
    names = [head.name for head in heads]
    shares = {f"host-{i}": share for i, share in enumerate(divided(range(len(names)), n_hosts), 1)}
    if how.transport == "grpc":
        connect = _in_processes(experiment, how, shares, notes)
    else:
        connect = _in_this_process(experiment, how, shares, names, notes)
    return await coordinate(experiment, _with_what_is_beside(connect, how), options)


def _with_what_is_beside(connect: Connect, how: Launch) -> Connect:
    if (beside := how.beside) is None:
        return connect

    @contextlib.asynccontextmanager
    async def connect_both(hub: Hub) -> AsyncIterator[None]:
        async with beside(hub), connect(hub):
            yield

    return connect_both


def _in_two_tiers(experiment: Experiment, how: Launch, heads: Sequence[UserHead], notes: HostNotes) -> Connect:
    """An aggregator process for each known cluster, and below it `hosts_per_cluster` host processes."""
    clusters = by_cluster(heads, experiment.federation.clusters or ())
    if len(clusters) != experiment.federation.hosts:
        raise ConfigError(f"{experiment.federation.hosts} aggregators for {len(clusters)} known clusters: want one for each cluster")

    def processes(folder: Path) -> list[AggregatorProcess]:
        return [_aggregator(experiment, how, folder, *item) for item in enumerate(clusters.items(), 1)]

    return _over_grpc(experiment, how, processes, notes)


def _aggregator(experiment: Experiment, how: Launch, folder: Path, number: int, cluster: tuple[str, list[int]]) -> AggregatorProcess:
    name, positions = cluster
    n_hosts = experiment.federation.hosts_per_cluster
    hosts = []
    for i, share in enumerate(divided(positions, n_hosts, name), 1):
        hosts.append(HostProcess(f"host-{number}-{i}", selection(share, name, n_hosts), folder / f"host-{number}-{i}", how.data))
    return AggregatorProcess(name, name, hosts, folder / f"aggregator-{number}", how.telemetry)


def _in_processes(experiment: Experiment, how: Launch, shares: dict[str, Sequence[int]], notes: HostNotes) -> Connect:
    def processes(folder: Path) -> list[HostProcess]:
        return [HostProcess(name, selection(share), folder / name, how.data) for name, share in shares.items()]

    return _over_grpc(experiment, how, processes, notes)


def _over_grpc(experiment: Experiment, how: Launch, processes: Callable[[Path], Sequence[Launched]], notes: HostNotes) -> Connect:
    """These processes, whose folders are in the one given, join a server on this machine."""

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        _announce(how, hub)
        with contextlib.ExitStack() as stack:
            folder = how.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
            started = processes(folder / HOSTS)
            notes.watch(started)
            async with (
                serving(hub, experiment_to_json(experiment), "127.0.0.1:0") as server,
                host_processes(hub, server.port, started, how.on_process, keeps_logs=how.folder is not None),
            ):
                yield

    return connect


def _in_this_process(experiment: Experiment, how: Launch, shares: dict[str, Sequence[int]], names: list[str], notes: HostNotes) -> Connect:
    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        _announce(how, hub)
        if caution := links_caution(experiment, how.transport):
            hub.recorder.event("warning", caution)
        hosts = []
        for name, share in shares.items():
            store = None if how.folder is None else store_of(how.folder / HOSTS / name, name, hub.run_id)
            with public_alone(hub, name):
                hosts.append(build_host(name, experiment, hub.run_id, [names[place] for place in share], data_dir=how.data, store=store))
        for host in hosts:
            notes.of(note.sentence for note in host.notes)
        with joined(hub, hosts):
            yield

    return connect


def _announce(how: Launch, hub: Hub) -> None:
    if how.on_hub is not None:
        how.on_hub(hub)
