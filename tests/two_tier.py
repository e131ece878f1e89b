"""A whole two-tier run as tasks of one event loop, over gRPC, with members that die at a chosen exchange and come back from disk.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.record.snapshot import SnapshotFile
from coterie.session.dial import serve_member
from coterie.session.tls import load_tls
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.roles import aggregator
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub
from coterie_server.session.masking import Collected
from coterie_server.transport.serve import serving
from tests.tries import no_task_is_left

COORDINATOR = ""
L2GD = {"name": "async_l2gd", "iterations": 60, "gamma": 1.0, "alpha": 0.4, "p0": 0.3, "p": 0.3, "collect_models": True}
QUICK = {"heartbeat_s": 0.2, "silence_s": 10.0, "join_timeout_s": 20.0, "absence_timeout_s": 20.0}


@dataclass(frozen=True)
class Death:
    """Who dies (a cluster's aggregator, a host, the coordinator) before the answers to an exchange of `parent` are back."""

    who: str
    parent: str  # the cluster of an aggregator, or the coordinator
    seq: int


def small(method: dict[str, Any] | None = None, **more: Any) -> Experiment:
    """Twelve users in three clusters."""
    options = {"clusters": 3, "users_per_cluster": 4, "rows": 3, "d": 3}
    return experiment_from(
        {
            "name": "tiers",
            "seed": 4,
            "data": {"source": "python", "path": "tests.papers.known_clusters_fixture:made_users", "options": options},
            "problem": {"loss": "least_squares", "l2": 0.1, "intercept": False},
            "method": method or L2GD,
            "snapshots": {"every_rounds": 4},
            **more,
            "federation": {"topology": "clusters", "hosts": 3, **QUICK, **more.get("federation", {})},
        }
    )


def flat(experiment: Experiment, hosts: int = 1) -> Finished:
    """The same run without aggregators, in one process."""
    rules = experiment.federation.model_copy(update={"topology": "flat", "hosts": hosts})
    return asyncio.run(launch(experiment.model_copy(update={"federation": rules}), Launch("loopback")))


# Of each process that runs tests its own ports.
_PLACE, _N = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS = range(20_000 + _PLACE, 32_000, _N)
_GIVEN: set[int] = set()


def free_port() -> int:
    """A free port below those that the kernel gives to whoever dials, so that it is still free when somebody comes back to it.

    Each time another one: who was given it before may not have begun to listen, or may come back.
    """
    while True:
        port = secrets.choice(_PORTS)
        if port in _GIVEN:
            continue
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            _GIVEN.add(port)
            return port


class Tiers:
    """A coordinator, its aggregators and their hosts."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        hosts_per_cluster: int = 1,
        deaths: Sequence[Death] = (),
        authority: Path | None = None,  # with the certificates of all members
    ) -> None:
        self.experiment, self.folder, self.n_hosts, self.authority = experiment, folder, hosts_per_cluster, authority
        self.deaths = list(deaths)
        self.port = free_port()
        self.clusters: dict[str, list[str]] = {}
        for user in list_users(experiment.data, experiment.seed):
            self.clusters.setdefault(str(user.cluster), []).append(user.name)
        self.ports = {cluster: free_port() for cluster in self.clusters}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.codes: dict[str, int] = {}

    # ---- roles

    def role(self, cluster: str, **changes: Any) -> aggregator.AggregatorRole:
        fields: dict[str, Any] = {
            "server": f"127.0.0.1:{self.port}",
            "cluster": cluster,
            "listen": f"127.0.0.1:{self.ports[cluster]}",
            "hosts": self.n_hosts,
            "name": None,
            "state": self.folder / f"aggregator-{cluster}",
            "patience_s": 20.0,
            "insecure": False,
            "tls": None if self.authority is None else self.authority / cluster,
            "launched": False,
        }
        return aggregator.AggregatorRole(**{**fields, **changes})

    async def aggregate(self, cluster: str) -> None:
        self.codes[cluster] = await aggregator._serve(self.role(cluster))

    async def host(self, name: str) -> str | None:
        cluster, _, place = name.partition("-")
        users = self.clusters[cluster][int(place) :: self.n_hosts]

        tls = None if self.authority is None else load_tls(self.authority / name, is_server=False)

        def make(experiment: Experiment, run_id: str) -> Host:
            return build_host(name, experiment, run_id, users, store=SnapshotFile(self.folder / name, "host"), tls=tls)

        return await serve_member(make, f"127.0.0.1:{self.ports[cluster]}", name=name, patience_s=20.0, tls=tls)

    def starts(self) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
        """All members by name."""
        hosts = [f"{cluster}-{i}" for cluster in self.clusters for i in range(self.n_hosts)]
        made: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {name: lambda name=name: self.host(name) for name in hosts}
        return made | {cluster: lambda cluster=cluster: self.aggregate(cluster) for cluster in self.clusters}

    def start(self, name: str) -> None:
        self.tasks[name] = asyncio.create_task(self.starts()[name](), name=name)

    @contextlib.asynccontextmanager
    async def members(self) -> AsyncIterator[None]:
        """All members run while the block does, and are waited for where it ends well."""
        for name in self.starts():
            self.start(name)
        try:
            yield
            await asyncio.gather(*self.tasks.values())
        finally:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    # ---- deaths

    @contextlib.contextmanager
    def deadly(self) -> Iterator[None]:
        """While the block runs, members die at their exchanges."""
        collect, tiers = Hub.collect, self

        async def deadly_collect(hub: Hub, *what: Any, **how: Any) -> Collected:
            parent = hub.cluster or COORDINATOR
            here = [death for death in tiers.deaths if (death.parent, death.seq) == (parent, hub.seq + 1)]
            for death in here:
                tiers.deaths.remove(death)
                # A member is quick: a moment later it may have answered, and then it is not missed before the end.
                asyncio.get_running_loop().call_later(0.001 if death.who == parent else 0, tiers.kill, death.who)
            if any(death.who == parent for death in here):
                with contextlib.suppress(Exception):
                    await collect(hub, *what, **how)
                await asyncio.Event().wait()  # until the end comes
            return await collect(hub, *what, **how)

        with mock.patch.object(Hub, "collect", deadly_collect):
            yield

    def kill(self, name: str) -> None:
        """Somebody is gone, and started again."""
        if name == COORDINATOR:
            self.coordinator.cancel()
            return

        async def again(dying: asyncio.Task[Any]) -> Any:
            dying.cancel()
            await asyncio.gather(dying, return_exceptions=True)
            return await self.starts()[name]()

        self.tasks[name] = asyncio.create_task(again(self.tasks[name]), name=f"{name} again")

    # ---- the run

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        tls = None if self.authority is None else load_tls(self.authority / "server", is_server=True)
        async with serving(hub, experiment_to_json(self.experiment), f"127.0.0.1:{self.port}", tls):
            yield

    async def coordinated(self, *, is_resumed: bool = False) -> Finished:
        """The run, with the coordinator started again as often as it dies."""
        while True:
            options = Options(self.folder / "run", is_resumed)
            self.coordinator = asyncio.create_task(coordinate(self.experiment, self.connect, options), name="coordinator")
            try:
                await asyncio.wait((self.coordinator,))
            finally:
                self.coordinator.cancel()
            if not self.coordinator.cancelled():
                return self.coordinator.result()
            is_resumed = True

    def run(self, seconds: float = 50.0) -> Finished:
        """Runs to the end, with all deaths; nobody's tasks are left."""

        async def whole() -> Finished:
            async with asyncio.timeout(seconds):
                with self.deadly():
                    async with self.members():
                        finished = await self.coordinated()
            await no_task_is_left()
            assert not self.deaths, "all must have died"
            return finished

        return asyncio.run(whole())

    def books(self) -> summary.Books:
        with contextlib.closing(open_run(self.folder / "run")) as connection:
            return summary.reconcile(connection)

    def query(self, sql: str) -> list[Any]:
        with contextlib.closing(open_run(self.folder / "run")) as connection:
            return connection.execute(sql).fetchall()


def bits(finished: Finished) -> dict[str, bytes]:
    """All final models, to the bit."""
    return {name: outcome.models.tobytes() for name, outcome in finished.outcomes.items() if outcome.models is not None}
