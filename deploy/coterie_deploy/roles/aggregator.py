"""The role of an aggregator: between the coordinator and the client hosts of one known cluster."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie.experiment.plugins import check_versions, code_allowed
from coterie.findings import Finding
from coterie.record.snapshot import SnapshotFile
from coterie.session.computer import OnLoop
from coterie.session.dial import serve_member
from coterie.session.failures import failures_left
from coterie.session.tls import Tls, load_tls
from coterie_deploy.roles.joining import check_server_address, state_name
from coterie_deploy.telemetry.hub_log import RunLog
from coterie_deploy.telemetry.logs import Log, LogLevel
from coterie_deploy.telemetry.metrics_server import Metrics, metrics_served
from coterie_deploy.telemetry.spans import Telemetry, tracing
from coterie_deploy.terminal.signals import Stop, stopping_at_end_of_input, stopping_on_signals
from coterie_deploy.terminal.tables import counted
from coterie_server.record.rundb import WITHIN, RunDatabase
from coterie_server.run.aggregator import Aggregator, cluster_experiment
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import plain_text, serving

if TYPE_CHECKING:
    from coterie_server.record.tracing import RunTracer

PORT = "port"  # in the state folder: where its hosts find the aggregator, also after a restart
_STOP_S = 5.0  # for the task under way, which may wait for hosts that are not there; one that takes longer is repeated
_LOOK_EVERY_S = 0.1
_LOCK_S = 8.0  # how long a launched aggregator waits for the one before it, whose launcher was killed


@dataclass(frozen=True)
class AggregatorRole:
    """What the command line says about an aggregator."""

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


def run_aggregator(role: AggregatorRole) -> int:
    """Serves the cluster to the end of the run: 0; 130 or 143 when stopped before, with the state written down. Raises CoterieError."""
    check_server_address(role.server, insecure=role.insecure or role.tls is not None)
    if not role.cluster.strip():
        raise ConfigError(f"--cluster is {role.cluster!r}, want the name of a known cluster")
    return asyncio.run(_serve(role))


async def _serve(role: AggregatorRole) -> int:
    name = role.name or role.cluster
    role = replace(role, log=role.log.with_(role="aggregator", aggregator=name, cluster=role.cluster))
    tls = None if role.tls is None else load_tls(role.tls, is_server=True)
    open_hubs: list[Hub] = []
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(code_allowed(role.launched or role.allow_code))
        stop = stack.enter_context(stopping_on_signals())
        if role.launched:
            stack.enter_context(stopping_at_end_of_input(stop))

        stack.enter_context(failures_left(role.state if role.launched else None))
        tracer = stack.enter_context(tracing(role.telemetry, "aggregator", Console(stderr=True)))

        async def make(experiment: Experiment, run_id: str) -> Aggregator:
            return await _started(role, name, experiment, run_id, stack, stop, open_hubs, tls, tracer)

        def say_refused(reason: str) -> None:
            role.log.say("waiting", f"{reason}; trying again for up to {role.patience_s:g} s", server=role.server)

        def say_waiting() -> None:
            role.log.say("waiting", f"waiting for a coordinator at {role.server} (up to {role.patience_s:g} s)", server=role.server)

        outcome = None
        try:
            async with asyncio.timeout(None) as limit, _beside(_limit_after(stop, limit)):
                outcome = await serve_member(
                    make,
                    role.server,
                    name=name,
                    computer=OnLoop(),
                    tls=tls,
                    patience_s=role.patience_s,
                    stop=stop,
                    on_wait=say_waiting,
                    on_refusal=say_refused,
                )
        except _StoppedError:
            pass
        except Exception as error:
            if not limit.expired():
                for hub in open_hubs:
                    if not hub.is_over:
                        await hub.finish("", failed=True, finding=error.below if isinstance(error, CoterieError) else Finding("R6"))
                raise
    if outcome is None:
        role.log.say("stopped", f"stopped by {stop.by}; the same command goes on from here", by=stop.by)
        return stop.exit_code
    role.log.say("finished", outcome)
    return 0


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
    experiment: Experiment,
    run_id: str,
    stack: contextlib.AsyncExitStack,
    stop: Stop,
    open_hubs: list[Hub],
    tls: Tls | None,
    tracer: RunTracer | None,
) -> Aggregator:
    """The aggregator once all its hosts are here, as its newest snapshot left it."""
    check_versions(experiment.packages)
    hosts = role.hosts or experiment.federation.hosts_per_cluster
    below = cluster_experiment(experiment, hosts)
    folder = role.state / state_name(name, run_id)
    await stack.enter_async_context(_locked(folder, _LOCK_S if role.launched else 0.0))
    run_log = RunLog(role.log)
    log = run_log.log
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
    address = _address(role)
    metrics = None if role.metrics is None else Metrics(role.metrics, tls, role.insecure, stop)
    url = await stack.enter_async_context(metrics_served(metrics, hub, folder, "aggregator", name))
    server = await stack.enter_async_context(serving(hub, experiment_to_json(experiment), address, tls, insecure=role.insecure))
    if role.insecure and tls is None:
        log.say("insecure", f"warning: {plain_text(address)}", LogLevel.warning)
    if url is not None:
        log.say("metrics", f"metrics are at {url}", url=url)
    open_hubs.append(hub)
    with contextlib.suppress(OSError):  # only a convenience: the address is printed too
        (role.state / PORT).write_text(f"{server.port}\n", encoding="utf-8")
    place = f"{address.rpartition(':')[0]}:{server.port}"
    sentence = f"aggregator {name!r} of run {run_id} listens on {place} for {counted(hosts, 'host')} of cluster {role.cluster!r}"
    log.say("listen", sentence, address=place)
    if hub.roster.members is None:
        async with _beside(_stop_waiting(stop, hub)):
            await hub.gather()
    else:  # the coordinator is told if they do not come back
        hub.go_on()
    return Aggregator(name, experiment, hub, database, store, secrets.token_hex(8))


async def _limit_after(stop: Stop, limit: asyncio.Timeout) -> None:
    """Limits the time once asked to stop."""
    await stop.wait()
    limit.reschedule(asyncio.get_running_loop().time() + _STOP_S)


async def _stop_waiting(stop: Stop, hub: Hub) -> None:
    """Ends the wait for hosts when asked to stop."""
    await stop.wait()
    hub.fail(_StoppedError(f"stopped by {stop.by} while waiting for hosts", Finding("R4")))


def _address(role: AggregatorRole) -> str:
    """Where to listen: a launched aggregator that is started again must be found where it was."""
    with contextlib.suppress(OSError, ValueError):
        if role.launched:
            return f"127.0.0.1:{int((role.state / PORT).read_text(encoding='utf-8'))}"
    return role.listen


def _check_cluster(hub: Hub, role: AggregatorRole, folder: Path) -> None:
    found = hub.roster.members.cluster_names if hub.roster.members is not None else ()
    if found != (role.cluster,):
        raise RunError(f"the state in {folder} is of cluster {', '.join(map(repr, found))}, wanted {role.cluster!r}", Finding("J5"))


@contextlib.asynccontextmanager
async def _locked(folder: Path, patience_s: float) -> AsyncIterator[None]:
    """One process for one state folder: an advisory lock that goes away with the process. RunError when another has it for so long."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise RunError(f"cannot write the state folder {folder}: {error.strerror or error}", Finding("R5")) from error
    deadline = time.monotonic() + patience_s
    with lock:
        while not _is_taken(lock):
            if time.monotonic() >= deadline:
                raise RunError(f"the state folder {folder} is in use by another aggregator")
            await asyncio.sleep(_LOOK_EVERY_S)
        yield


def _is_taken(lock: IO[str]) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
