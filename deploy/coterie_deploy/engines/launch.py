"""A whole run at once: the coordinator in this process, its hosts in processes of their own (gRPC) or in this one (loopback)."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie_client.data import UserHead, list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.hosts import (
    HostNotes,
    MemberProcess,
    OnProcess,
    aggregator_process,
    host_process,
    host_processes,
    on_this_machine,
)
from coterie_deploy.engines.interface import MemberEngine
from coterie_deploy.engines.loopback import explained, join_all, public_alone
from coterie_deploy.engines.shares import by_cluster, divided, selection
from coterie_deploy.read.cautions import links_caution
from coterie_deploy.read.shipped import HOSTS
from coterie_deploy.roles.client import store_of
from coterie_deploy.telemetry.spans import Telemetry
from coterie_server.interface.half import Outcome
from coterie_server.record.rundb import OnEvent
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.run.engine import Observer
from coterie_server.session.hub import Hub
from coterie_server.session.ports import Tracer
from coterie_server.transport.serve import serving

Transport = Literal["grpc", "loopback"]
TRANSPORTS: tuple[Transport, ...] = ("grpc", "loopback")
DEFAULT_HOSTS = 4  # processes
MakeEngine = Callable[[Experiment, Sequence[MemberProcess], HostNotes], MemberEngine]


@dataclass(frozen=True)
class Launch:
    """How an experiment is run, besides its own settings."""

    transport: Transport = "grpc"
    folder: Path | None = None
    data: Path | None = None
    resume: bool = False
    decisions_of: Path | None = None
    observer: Observer | None = None
    stop: asyncio.Event | None = None
    start: Outcome | None = None  # what another run has left, to start from
    tracer: Tracer | None = None
    telemetry: Telemetry | None = None  # for the aggregators of a run in processes
    on_event: OnEvent | None = None
    on_note: Callable[[str], None] | None = None  # receives each sentence on the hosts' data
    on_process: OnProcess | None = None  # receives name and process id of each member that is started in a process of its own
    engine: MakeEngine | None = None  # of hosts that are processes; None: of this machine
    disguise: Callable[[Host], None] | None = None  # of hosts in this process: a drill makes some of them lie
    again: str = ""  # options of the command that a resume needs too
    beside: Callable[[Hub], AbstractAsyncContextManager[object]] | None = None  # entered before hosts join, and left last


def default_hosts(experiment: Experiment, transport: Transport, data: Path | None) -> int:
    """The usual number of hosts: a few processes, each with users, or one on the loopback; with clusters an aggregator for each."""
    if transport == "loopback" and not experiment.federation.is_two_tier:
        return 1
    heads = list_users(experiment.data, experiment.seed, data)
    return len(by_cluster(heads)) if experiment.federation.is_two_tier else min(DEFAULT_HOSTS, len(heads))


async def launch(experiment: Experiment, how: Launch) -> Finished:
    """Runs the experiment with its users spread evenly over `federation.hosts` hosts. Raises CoterieError."""
    n_hosts = experiment.federation.hosts
    heads = await asyncio.to_thread(list_users, experiment.data, experiment.seed, how.data)
    notes = HostNotes(how.on_note, how.on_event)
    options = Options(how.folder, how.resume, how.decisions_of, how.observer, how.stop, how.start, how.tracer, notes)
    if experiment.federation.is_two_tier:
        if how.transport == "loopback":
            raise ConfigError("transport 'loopback' has one process, want federation.topology 'flat'")
        engine: MemberEngine = LocalEngine(experiment, how, _aggregators(experiment, how, heads), notes)
    else:
        shares = {f"host-{i}": share for i, share in enumerate(divided(range(len(heads)), n_hosts), 1)}
        if how.transport == "grpc":

            def processes(folder: Path) -> list[MemberProcess]:
                return [host_process(name, selection(share), folder / name, how.data) for name, share in shares.items()]

            if how.engine is None:
                engine = LocalEngine(experiment, how, processes, notes)
            else:
                assert how.folder is not None  # noqa: S101 - the command line always has one
                hosts = processes(how.folder / HOSTS)
                notes.watch(hosts)
                engine = how.engine(experiment, hosts, notes)
        else:
            names = {host: [heads[place].name for place in share] for host, share in shares.items()}
            engine = LoopbackEngine(experiment, how, names, notes)

    @contextlib.asynccontextmanager
    async def connect_beside(hub: Hub) -> AsyncIterator[None]:
        async with how.beside(hub) if how.beside is not None else contextlib.nullcontext(), engine.members(hub):
            yield

    return await coordinate(experiment, connect_beside, options)


def _aggregators(experiment: Experiment, how: Launch, heads: Sequence[UserHead]) -> Callable[[Path], list[MemberProcess]]:
    """An aggregator process for each known cluster, and below it `hosts_per_cluster` host processes."""
    rules = experiment.federation
    clusters = by_cluster(heads, rules.clusters or ())
    if len(clusters) != rules.hosts:
        raise ConfigError(f"{rules.hosts} aggregators for {len(clusters)} known clusters: want one for each cluster")

    def processes(folder: Path) -> list[MemberProcess]:
        found = []
        for number, (name, positions) in enumerate(clusters.items(), 1):
            hosts, n = [], rules.hosts_per_cluster
            for i, share in enumerate(divided(positions, n, name), 1):
                hosts.append(host_process(f"host-{number}-{i}", selection(share, name, n), folder / f"host-{number}-{i}", how.data))
            found.append(aggregator_process(name, hosts, folder / f"aggregator-{number}", how.telemetry))
        return found

    return processes


@dataclass(frozen=True)
class LocalEngine(MemberEngine):
    """Processes of this machine, whose folders are in the one that `processes` is given."""

    experiment: Experiment
    how: Launch
    processes: Callable[[Path], list[MemberProcess]]
    notes: HostNotes

    @contextlib.asynccontextmanager
    async def members(self, hub: Hub) -> AsyncIterator[None]:
        how = self.how
        with contextlib.ExitStack() as stack:
            folder = how.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
            started = self.processes(folder / HOSTS)
            self.notes.watch(started)
            async with (
                serving(hub, experiment_to_json(self.experiment), "127.0.0.1:0") as server,
                host_processes(
                    *(hub, f"127.0.0.1:{server.port}", started, on_this_machine(how.on_process)), keeps_logs=how.folder is not None
                ),
            ):
                yield


@dataclass(frozen=True)
class LoopbackEngine(MemberEngine):
    """Hosts of this process, with the users named."""

    experiment: Experiment
    how: Launch
    users: Mapping[str, list[str]]
    notes: HostNotes

    @contextlib.asynccontextmanager
    async def members(self, hub: Hub) -> AsyncIterator[None]:
        experiment, how = self.experiment, self.how
        if caution := links_caution(experiment, how.transport):
            hub.recorder.event("warning", caution)
        hosts = []
        for name, own in self.users.items():
            store = None if how.folder is None else store_of(how.folder / HOSTS / name, name, hub.run_id)
            with public_alone(hub, name):
                hosts.append(build_host(name, experiment, hub.run_id, own, data_dir=how.data, store=store))
            if how.disguise is not None:
                how.disguise(hosts[-1])
        for host in hosts:
            self.notes.of(note.sentence for note in host.notes)
        with explained(join_all(hub, hosts)):
            yield
