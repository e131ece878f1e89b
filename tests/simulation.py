"""A whole run in one process, with faults on purpose: hosts and coordinators that die at a chosen exchange and come back from disk.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coterie.experiment.config import Experiment, experiment_from
from coterie.record.snapshot import SnapshotFile
from coterie.wire.codec import Encoded
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.interface.half import Outcome
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub


class CoordinatorKilledError(BaseException):
    """The coordinator is gone at once, as by SIGKILL."""


@dataclass
class Faults:
    """Exchanges at which somebody dies: hosts before or after they have computed the task, the coordinator before it sends it."""

    hosts_before: Mapping[int, str] = field(default_factory=dict)
    hosts_after: Mapping[int, str] = field(default_factory=dict)
    coordinator: Sequence[int] = ()


class _FaultyLink(LoopbackLink):
    """A link whose ends can die."""

    def __init__(self, world: World, hub: Hub, host: Host) -> None:
        super().__init__(hub, host)
        self._world = world

    def send(self, encoded: Encoded) -> None:
        world, hub, name = self._world, self._hub, self._host.name
        seq = hub.seq
        if seq in world.faults.coordinator and seq not in world.done:
            world.done.add(seq)
            raise CoordinatorKilledError
        if world.faults.hosts_before.get(seq) == name and (seq, name) not in world.done:
            world.done.add((seq, name))
            world.kill(hub, name, self)
            return
        if world.faults.hosts_after.get(seq) == name and (seq, name) not in world.done:
            world.done.add((seq, name))
            self._hub = _Deaf(hub)  # type: ignore[assignment]
            super().send(encoded)
            world.kill(hub, name, self)
            return
        super().send(encoded)


class _Deaf:
    """Takes the host's reply and loses it."""

    def __init__(self, hub: Hub) -> None:
        self.seq = hub.seq

    def received(self, name: str, received: Any) -> None:
        pass

    def failed(self, name: str, failure: Any, link: Any) -> None:
        raise AssertionError(failure.finding.rule)


class World:
    """One run folder, its hosts, and the faults to come."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        n_hosts: int,
        faults: Faults | None = None,
        *,
        keeps_hosts: bool = True,
        start: Outcome | None = None,
    ) -> None:
        content = experiment.federation.model_copy(update={"hosts": n_hosts})
        self.experiment = experiment.model_copy(update={"federation": content})
        self.folder = folder
        self.faults = faults or Faults()
        self.done: set[Any] = set()
        self.start = start  # what another run has left
        self.keeps_hosts = keeps_hosts  # whether hosts outlive a coordinator
        names = [user.name for user in list_users(experiment.data, experiment.seed)]
        self.users = {f"h{i}": names[i::n_hosts] for i in range(n_hosts)}
        self.hosts: dict[str, Host] = {}

    def host(self, name: str, run_id: str) -> Host:
        """The host as it is after a restart: from its newest snapshot."""
        store = SnapshotFile(self.folder / "hosts" / name, "host")
        return build_host(name, self.experiment, run_id, self.users[name], store=store)

    def kill(self, hub: Hub, name: str, link: LoopbackLink) -> None:
        """The host dies and comes back from its newest snapshot."""
        hub.lost(name, link, "killed")
        self.hosts[name] = self.host(name, hub.run_id)
        asyncio.get_running_loop().call_soon(_FaultyLink(self, hub, self.hosts[name]).join)

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        if not self.hosts or not self.keeps_hosts:
            self.hosts = {name: self.host(name, hub.run_id) for name in self.users}
        for host in self.hosts.values():
            _FaultyLink(self, hub, host).join()
        yield

    def attempt(self, *, resume: bool) -> Finished:
        """Runs until the end or the coordinator's."""
        options = Options(folder=self.folder, resume=resume, start=self.start)
        return asyncio.run(coordinate(self.experiment, self.connect, options))

    def run(self) -> Finished:
        """Runs to the end, restarting the coordinator as often as it dies."""
        resume = False
        for _ in range(1 + len(self.faults.coordinator)):
            try:
                return self.attempt(resume=resume)
            except CoordinatorKilledError:
                resume = True
        raise AssertionError("the coordinator died more often than it should")


def bits(finished: Finished) -> dict[str, bytes]:
    """All final models, to the bit."""
    return {name: outcome.models.tobytes() for name, outcome in finished.outcomes.items() if outcome.models is not None}


def query(folder: Path, sql: str) -> list[Any]:
    """Rows of the run's database."""
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection:
        return connection.execute(sql).fetchall()


def small_experiment(method: Mapping[str, Any], **extra: Any) -> Experiment:
    """Nine users in three clusters, with snapshots every few rounds."""
    content = {
        "name": "small",
        "seed": 5,
        "data": {"source": "ellipses", "users_per_cluster": 3, "test_per_class": 50},
        "problem": {"loss": "squared_hinge", "l2": 1e-3},
        "method": dict(method),
        "snapshots": {"every_rounds": 4},
        "stop": {"rounds": 30},
        **extra,
    }
    return experiment_from(content)


def random_faults(seed: int, n_exchanges: int, hosts: Sequence[str]) -> Faults:
    """Two dying hosts and a dying coordinator, at random exchanges."""
    draws = np.random.default_rng(seed)
    first, second, third = (int(seq) for seq in draws.choice(np.arange(1, n_exchanges + 1), 3, replace=False))
    return Faults({first: str(draws.choice(hosts))}, {second: str(draws.choice(hosts))}, (third,))
