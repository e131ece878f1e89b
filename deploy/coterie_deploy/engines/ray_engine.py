"""Ray: the hosts of a run as actors of a cluster, beside a coordinator in the process of the command.

The coordinator's run folder is that of the command. A process of its own (`ray_driver`) speaks with Ray.
"""

import asyncio
import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie.findings import Finding
from coterie.session.tls import CA, CERTIFICATE, KEY, load_tls
from coterie.text.addresses import with_port
from coterie_deploy.engines.hosts import Ended, HostNotes, MemberProcess, host_processes, notes_in
from coterie_deploy.engines.interface import GRACE_S, LOG, MemberEngine
from coterie_deploy.engines.ray_member import STATE, TLS, TOKEN
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import serving

TLS_NAME = "coordinator.run"  # in the coordinator's certificate, since nobody knows beforehand where it listens
RAY_LOG = "ray.log"  # beside the folders of the hosts
START_S = 60.0  # for the cluster's answer
_SHARE = 0.001  # of a custom resource for each host: it says where, not how much
_PATIENCE_S = 10.0  # beyond the grace of a member


@dataclass(frozen=True)
class Places:
    """Where hosts belong: the CPUs of each, and the custom resource of some."""

    cpus: float = 1.0
    resources: Sequence[str] = ()  # HOST=NAME

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cpus) and self.cpus >= 0):
            raise ConfigError(f"--cpus is {self.cpus:g}, want CPUs for each host, 0 or more")

    def of(self, names: Sequence[str]) -> dict[str, str]:
        """The resource of each host that has one. ConfigError for what is no HOST=NAME, an unknown host, and one named twice."""
        found: dict[str, str] = {}
        for text in self.resources:
            host, _, resource = text.partition("=")
            if not host or not resource.isprintable() or not resource.strip():
                raise ConfigError(f"--resources is {text!r}, want HOST=NAME, such as host-1=nodeA")
            if host not in names:
                raise ConfigError(f"--resources is {text!r}, but the hosts are {names[0]} to {names[-1]}")
            if found.setdefault(host, resource) != resource:
                raise ConfigError(f"--resources names {host} twice: {found[host]!r} and {resource!r}")
        return found


@dataclass(frozen=True)
class RayEngine(MemberEngine):
    """The hosts of an experiment; `certificates` is the folder of the run's authority, with a folder for each member."""

    experiment: Experiment
    hosts: Sequence[MemberProcess]
    notes: HostNotes
    address: str  # of the cluster
    places: Places
    certificates: Path

    @cached_property
    def resources(self) -> Mapping[str, str]:
        """The custom resource of each host that has one."""
        return self.places.of([host.name for host in self.hosts])

    @contextlib.asynccontextmanager
    async def members(self, hub: Hub) -> AsyncIterator[None]:
        tls = load_tls(self.certificates / "coordinator", is_server=True)
        folder = self.hosts[0].folder.parent
        async with _linked(self, hub, folder / RAY_LOG) as link:
            here = with_port(link.here, 0)
            async with serving(hub, experiment_to_json(self.experiment), here, tls) as server:
                try:
                    async with host_processes(hub, with_port(link.here, server.port), self.hosts, link.once):
                        yield
                finally:
                    for host in self.hosts:
                        self.notes.of(notes_in(host.folder / LOG))  # those of a folder that is not shared are here only now

    def start_of(self, host: MemberProcess, server: str, token: str) -> dict[str, Any]:
        """What the driver is told: plain values, as JSON has them."""
        tls = self.certificates / host.name
        resource = self.resources.get(host.name)
        return {
            "name": host.name,
            "arguments": [*replace(host, folder=Path(STATE)).command(server), "--tls", TLS, "--tls-name", TLS_NAME],
            "folder": os.fspath(host.folder.absolute()),
            "token": token,
            "tls": {name: (tls / name).read_text() for name in (CA, CERTIFICATE, KEY)},
            "here": os.getcwd(),
            "cpus": self.places.cpus,
            "resources": {} if resource is None else {resource: _SHARE},
        }


@dataclass
class _Link:
    """The lines to and from the driver."""

    engine: RayEngine
    hub: Hub
    process: asyncio.subprocess.Process
    log: Path
    here: str = ""  # this machine, as the nodes of the cluster know it
    ends: dict[str, asyncio.Future[Ended]] = field(default_factory=dict)

    async def once(self, server: str, host: MemberProcess, closing: asyncio.Event) -> Ended:
        """One actor from its start to its end. RunError when the driver has ended."""
        host.folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(16)
        (host.folder / TOKEN).write_text(token)
        end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.ends[host.name] = end
        if self.process.returncode is not None:
            raise self.gone()
        self._tell(start=self.engine.start_of(host, server, token))
        closed = asyncio.create_task(closing.wait())
        try:
            both: list[asyncio.Future[Any]] = [end, closed]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return end.result()
            self._tell(end=host.name)
            async with asyncio.timeout(GRACE_S + _PATIENCE_S):
                return await end
        except TimeoutError:
            return Ended(0)  # the end of the driver ends it
        finally:
            closed.cancel()

    async def first(self) -> None:
        """Waits for the cluster. ConfigError when there is none."""
        try:
            async with asyncio.timeout(START_S):
                line = await self._line()
        except TimeoutError:
            raise ConfigError(f"the Ray cluster at {self.engine.address!r} has not answered for {START_S:g} s") from None
        if "ready" not in line:
            raise ConfigError(line.get("failed") or f"Ray has ended before it was asked: see {self.log}")
        self.here = line["ready"]

    async def read(self) -> None:
        """Takes lines until the driver ends; then all its members have."""
        while line := await self._line():
            name, event = line["name"], self.hub.recorder.event
            if "waits" in line:
                waited = f"host {name!r} has waited {line['waits']:g} s"
                event("late", f"{waited} for Ray to start it on a node with {self._needs(name)}", host=name)
            elif "placed" in line:
                where = "" if line["shared"] else ", and has its state there: a loss of that node would lose it"
                event("placed" if line["shared"] else "warning", f"host {name!r} is an actor of Ray on {line['placed']}{where}", host=name)
            elif not (end := self.ends[name]).done():
                end.set_result(Ended.with_code(line["ended"]) if "ended" in line else Ended(1, f"was lost by Ray ({line['lost']})"))
        for end in self.ends.values():
            if not end.done():
                end.set_exception(self.gone())
                end.exception()  # nobody may be waiting any more

    def gone(self) -> RunError:
        why = "the process that speaks with Ray has ended"
        return RunError(f"{why}: see {self.log}", Finding("R5"), public=why)

    def _needs(self, name: str) -> str:
        resource = self.engine.resources.get(name)
        return f"free CPUs ({self.engine.places.cpus:g})" + ("" if resource is None else f" and the resource {resource!r}")

    async def _line(self) -> Mapping[str, Any]:
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        line = await self.process.stdout.readline()
        found: Mapping[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        return found

    def _tell(self, **message: Any) -> None:
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        self.process.stdin.write(f"{json.dumps(message)}\n".encode())


@contextlib.asynccontextmanager
async def _linked(engine: RayEngine, hub: Hub, log: Path) -> AsyncIterator[_Link]:
    """The driver runs while the block does. Its end ends what it has started in Ray."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "coterie_deploy.engines.ray_driver", engine.address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
            start_new_session=True,
        )
    link = _Link(engine, hub, process, log)
    reading = None
    try:
        await link.first()
        reading = asyncio.create_task(link.read())
        yield link
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(GRACE_S + _PATIENCE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if reading is not None:
            await reading
