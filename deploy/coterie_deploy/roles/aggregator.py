"""The role of an aggregator: between the coordinator and the client hosts of one known cluster."""

import asyncio
import contextlib
import fcntl
import secrets
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.plugins import check_versions
from coterie.findings import Finding
from coterie.record.files import private_folder
from coterie.record.snapshot import SnapshotFile
from coterie.session.computer import OnLoop
from coterie.session.dial import serve_member
from coterie.session.tls import Tls
from coterie.session.where import Where
from coterie_deploy.roles.joining import exit_code, member_process, own_identity, own_tls, state_name, waits
from coterie_deploy.roles.listening import Listening, listening, tell_of_the_end
from coterie_deploy.telemetry.hub_log import RunLog
from coterie_deploy.telemetry.logs import Log
from coterie_deploy.telemetry.spans import Telemetry, tracing
from coterie_deploy.terminal.signals import Stop
from coterie_deploy.terminal.tables import counted
from coterie_server.record.rundb import PEERS, PEERS_FILE, WITHIN, RunDatabase
from coterie_server.run.aggregator import Aggregator, cluster_experiment
from coterie_server.session.hub import Hub
from coterie_server.session.peering import Peering
from coterie_server.transport.peers import PeerDoor, dialling
from coterie_server.transport.serve import check_address

if TYPE_CHECKING:
    from coterie_server.record.tracing import RunTracer

_STOP_S = 5.0  # for the task under way, which may wait for hosts that are not there; one that takes longer is repeated
_LOOK_EVERY_S = 0.1
_LOCK_S = 8.0  # how long a launched aggregator waits for the one before it, whose launcher was killed


@dataclass(frozen=True)
class AggregatorRole:
    """The options of an aggregator."""

    server: str
    cluster: str
    listen: str
    hosts: int | None  # None: the experiment's
    name: str | None
    state: Path
    patience_s: float
    insecure: bool
    tls: Path | None
    launched: bool  # by `coterie run`: ends with its launcher
    telemetry: Telemetry | None = None
    metrics: str | None = None  # HOST:PORT
    log: Log = field(default_factory=Log)
    allow_code: bool = False  # the experiment may name the module of its method
    announce: str | None = None  # the name in its address file
    tls_name: str | None = None  # the name in the coordinator's certificate, if that is another than the one dialled


def run_aggregator(role: AggregatorRole) -> int:
    """Serves the cluster to the end of the run: 0; 130 or 143 when stopped before, with the state written down. Raises CoterieError."""
    if not role.cluster.strip():
        raise ConfigError(f"--cluster is {role.cluster!r}, want the name of a known cluster")
    return asyncio.run(_serve(role))


async def _serve(role: AggregatorRole) -> int:
    where = Where(role.server, role.insecure, role.tls_name, role.tls is not None)
    check_address(role.listen, is_secure=role.insecure or role.tls is not None)
    tls = own_tls(role.tls, role.log.with_(role="aggregator"), is_server=True)
    identity = own_identity(tls, "aggregator", role.cluster)
    name = role.name or (role.cluster if identity is None else identity.name)
    role = replace(role, log=role.log.with_(role="aggregator", aggregator=name, cluster=role.cluster))
    open_hubs: list[Hub] = []
    outcome = None
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(member_process(role.state, launched=role.launched, allow_code=role.allow_code))
        tracer = stack.enter_context(tracing(role.telemetry, "aggregator", Console(stderr=True)))
        make = partial(_started, role, name, stack, stop, open_hubs, tls, tracer)
        waiting = waits(role.log, "a coordinator", role.server, role.patience_s, stop)
        try:
            async with asyncio.timeout(None) as limit, _beside(_limit_after(stop, limit)):
                outcome = await serve_member(make, where, name=name, computer=OnLoop(), tls=tls, **waiting)
                await _pass_on(outcome, role, name, tls, open_hubs, stop)
        except _StoppedError:
            pass
        except Exception as error:
            if not limit.expired():
                for hub in open_hubs:
                    if not hub.is_over:
                        await hub.end(error if isinstance(error, CoterieError) else RunError("a mistake of the program", Finding("R6")))
                raise
    return exit_code(outcome, stop, role.log)


async def _pass_on(outcome: str | None, role: AggregatorRole, name: str, tls: Tls | None, open_hubs: list[Hub], stop: Stop) -> None:
    """Tells the hosts where the coordinator has said that the run has finished before, without its usual end."""
    if outcome is None:
        return
    for hub in open_hubs:
        if not hub.is_over:
            await hub.finish(outcome, failed=False)
    if not open_hubs:
        who, expects = f"the run of aggregator {name!r}", "its hosts" if role.hosts is None else counted(role.hosts, "host")
        own = (tls, role.insecure, role.metrics, role.state, role.announce)
        at = Listening("aggregator", name, who, expects, role.state, role.listen, *own)
        await tell_of_the_end("", role.hosts or sys.maxsize, at, role.log, stop)


class _StoppedError(RunError):
    """The aggregator was asked to stop before its hosts were here."""


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Does the work while the block runs, and ends it there."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _started(
    role: AggregatorRole,
    name: str,
    stack: contextlib.AsyncExitStack,
    stop: Stop,
    open_hubs: list[Hub],
    tls: Tls | None,
    tracer: "RunTracer | None",
    experiment: Experiment,
    run_id: str,
) -> Aggregator:
    """The aggregator, as its newest snapshot left it, once all its hosts have joined."""
    check_versions(experiment.packages)
    hosts = role.hosts or experiment.federation.hosts_per_cluster
    below = cluster_experiment(experiment, hosts)
    if experiment.masks_sums and hosts < (wanted := experiment.federation.hosts_per_cluster):
        raise ConfigError(f"--hosts is {hosts}, but under masks (federation.sums) hosts want {wanted}: federation.hosts_per_cluster")
    folder = role.state / state_name(name, run_id)
    await stack.enter_async_context(_locked(folder, _LOCK_S if role.launched else 0.0))
    run_log = RunLog(role.log)
    database = RunDatabase(folder / "run.db", scope=WITHIN, on_event=run_log)
    stack.callback(database.close)
    attempt = int(database.get("attempt") or 0) + 1
    database.put("attempt", str(attempt))
    reserved = database.reserved
    hub = Hub(below, run_id, database, time.monotonic, attempt=attempt, reserved=reserved, cluster=role.cluster, tracer=tracer)
    run_log.hub = hub
    if tracer is not None:
        tracer.belong_to(run_id)
    store = SnapshotFile(folder, "aggregator")
    if (snapshot := store.load()) is not None:
        hub.restore(snapshot["hub"])
        _check_cluster(hub, role, folder)
        database.event("resume", f"aggregator {name!r} resumed at exchange {hub.seq}", attempt=attempt)
    database.rewind(hub.seq, 0, 0)
    who, expects = f"aggregator {name!r} of run {run_id}", f"{counted(hosts, 'host')} of cluster {role.cluster!r}"
    at = Listening("aggregator", name, who, expects, folder, role.listen, tls, role.insecure, role.metrics, role.state, role.announce)
    peering = None
    if experiment.federation.has_peers and tls is not None:
        tls.check_peer_name(name)
    if experiment.federation.has_peers:  # rows that were booked are never taken back, so they have a file of their own
        between = RunDatabase(folder / PEERS_FILE, scope=PEERS)
        stack.callback(between.close)
        peering = Peering(name, experiment, run_id, between, database.event, attempt)
        await stack.enter_async_context(dialling(peering, tls))
    door = () if peering is None else (PeerDoor(peering, wants_identity=tls is not None).handler(),)
    port = await stack.enter_async_context(listening(hub, experiment, at, run_log.log, stop, door))
    open_hubs.append(hub)
    if hub.roster.members is None:
        async with _beside(_stop_waiting(stop, hub)):
            await hub.gather()
    else:  # the coordinator learns if they do not come back
        hub.state.has_started = True  # until then, tasks wait for them
    aggregator = Aggregator(name, experiment, hub, database, store, secrets.token_hex(8), tls, peering)
    aggregator.peer_address = "" if peering is None else at.found_at(port)
    return aggregator


async def _limit_after(stop: Stop, limit: asyncio.Timeout) -> None:
    """Limits the time once it is to leave."""
    await stop.leave.wait()
    limit.reschedule(asyncio.get_running_loop().time() + _STOP_S)


async def _stop_waiting(stop: Stop, hub: Hub) -> None:
    """Ends the wait for hosts when asked to stop."""
    await stop.wait()
    hub.fail(_StoppedError(f"stopped by {stop.by} while waiting for hosts", Finding("R4")))


def _check_cluster(hub: Hub, role: AggregatorRole, folder: Path) -> None:
    found = hub.roster.members.cluster_names if hub.roster.members is not None else ()
    if found != (role.cluster,):
        raise RunError(f"the state in {folder} is of cluster {', '.join(map(repr, found))}, wanted {role.cluster!r}", Finding("J5"))


@contextlib.asynccontextmanager
async def _locked(folder: Path, patience_s: float) -> AsyncIterator[None]:
    """One process for one state folder: an advisory lock that ends with the process. RunError when another has it for so long."""
    try:
        private_folder(folder)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise RunError(f"cannot write the state folder {folder}: {error.strerror or error}", Finding("R5")) from error
    deadline = time.monotonic() + patience_s
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise RunError(f"the state folder {folder} is in use by another aggregator") from None
            await asyncio.sleep(_LOOK_EVERY_S)
        yield
