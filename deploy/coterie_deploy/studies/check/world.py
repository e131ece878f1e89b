"""A whole run in this process, with faults on purpose: hosts and coordinators that die at a chosen exchange and come back from disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coterie.experiment.config import Experiment
from coterie.record.snapshot import SnapshotFile
from coterie.wire.codec import Encoded
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.interface.half import Outcome
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub

_TICK_S = 0.005  # between two looks at the hub's deadlines, where hosts may be absent


class CoordinatorKilledError(BaseException):
    """The coordinator is gone at once, as by SIGKILL."""


@dataclass
class Faults:
    """Exchanges at which somebody dies: hosts before or after they have computed the task, the coordinator before it sends it."""

    hosts_before: Mapping[int, str] = field(default_factory=dict)
    hosts_after: Mapping[int, str] = field(default_factory=dict)
    coordinator: Sequence[int] = ()


def random_faults(seed: int, n_exchanges: int, hosts: Sequence[str]) -> Faults:
    """Two hosts and the coordinator die at random exchanges; where there are fewer than three, at the first and the last."""
    draws = np.random.default_rng(seed)
    if n_exchanges < 3:
        return Faults({1: hosts[0]}, {}, (n_exchanges,))
    first, second, third = (int(seq) for seq in draws.choice(np.arange(1, n_exchanges + 1), 3, replace=False))
    return Faults({first: str(draws.choice(hosts))}, {second: str(draws.choice(hosts))}, (third,))


class FaultyLink(LoopbackLink):
    """A link whose ends can die."""

    def __init__(self, world: World, hub: Hub, host: Host) -> None:
        super().__init__(hub, host)
        self._world = world
        self._loses_reply = False

    def send(self, encoded: Encoded) -> None:
        """Hands a task to the host, unless one of them is to die now."""
        world, seq = self._world, self._hub.seq
        if seq in world.faults.coordinator and seq not in world.done:
            world.done.add(seq)
            raise CoordinatorKilledError
        dies_before, dies_after = (
            found.get(seq) == self.name and (seq, self.name) not in world.done
            for found in (world.faults.hosts_before, world.faults.hosts_after)
        )
        if dies_before or dies_after:
            world.done.add((seq, self.name))
        if not dies_before:
            self._loses_reply = dies_after
            super().send(encoded)
        if dies_before or dies_after:
            world.kill(self._hub, self.name, self)

    def deliver(self, reply: Encoded) -> None:
        """Hands the reply to the hub, unless the host dies with it."""
        if not self._loses_reply:
            super().deliver(reply)


class World:
    """One run folder, its hosts h0, h1, ..., and the faults to come. The users are dealt to the hosts in turn."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        n_hosts: int,
        faults: Faults | None = None,
        *,
        keeps_hosts: bool = True,
        start: Outcome | None = None,
        data: Path | None = None,
        decisions_of: Path | None = None,
    ) -> None:
        content = experiment.federation.model_copy(update={"hosts": n_hosts})
        self.experiment = experiment.model_copy(update={"federation": content})
        self.folder = folder
        self.faults = faults or Faults()
        self.done: set[Any] = set()
        self.start = start  # what another run has left
        self.keeps_hosts = keeps_hosts  # whether hosts outlive a coordinator
        self.data = data
        self.decisions_of = decisions_of
        names = [user.name for user in list_users(experiment.data, experiment.seed, data)]
        self.users = {f"h{i}": names[i::n_hosts] for i in range(n_hosts)}
        self.hosts: dict[str, Host] = {}
        self.links: list[LoopbackLink] = []  # of this attempt, in the order in which they were made

    def host(self, name: str, run_id: str) -> Host:
        """The host as it is after a restart: from its newest snapshot."""
        store = SnapshotFile(self.folder / "hosts" / name, "host")
        return build_host(name, self.experiment, run_id, self.users[name], data_dir=self.data, store=store)

    def link(self, hub: Hub, host: Host) -> LoopbackLink:
        """Between the two."""
        return FaultyLink(self, hub, host)

    def kill(self, hub: Hub, name: str, link: LoopbackLink) -> None:
        """The host dies and comes back from its newest snapshot."""
        hub.lost(name, link, "killed")
        self.hosts[name] = self.host(name, hub.run_id)
        self.links.append(self.link(hub, self.hosts[name]))
        asyncio.get_running_loop().call_soon(self.links[-1].join)

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        """The transport of the run."""
        if not self.hosts or not self.keeps_hosts:
            self.hosts = {name: self.host(name, hub.run_id) for name in self.users}
        self.links[:] = [self.link(hub, host) for host in self.hosts.values()]
        for link in self.links:
            link.join()
        yield

    def attempt(self, *, resume: bool) -> Finished:
        """Runs until the end or the coordinator's."""
        options = Options(folder=self.folder, resume=resume, start=self.start, decisions_of=self.decisions_of)
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


class Shuffled(World):
    """Hosts join in reverse order, and answer each exchange in an order that the seed draws."""

    def __init__(self, seed: int, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._draws = np.random.default_rng(seed)
        self._held: list[tuple[_HeldLink, Encoded]] = []
        self.users = dict(reversed(self.users.items()))
        self.orders: set[tuple[str, ...]] = set()

    def link(self, hub: Hub, host: Host) -> LoopbackLink:
        """One whose tasks wait for those of the others."""
        return _HeldLink(self, hub, host)

    def hold(self, link: _HeldLink, encoded: Encoded) -> None:
        """Keeps a task until those of all hosts are there."""
        if not self._held:
            asyncio.get_running_loop().call_soon(self._release)
        self._held.append((link, encoded))

    def _release(self) -> None:
        held, self._held = self._held, []
        ordered = [held[place] for place in self._draws.permutation(len(held))]
        self.orders.add(tuple(link.name for link, _ in ordered))
        for link, encoded in ordered:
            link.send_now(encoded)


class _HeldLink(LoopbackLink):
    def __init__(self, world: Shuffled, hub: Hub, host: Host) -> None:
        super().__init__(hub, host)
        self._world = world

    def send(self, encoded: Encoded) -> None:
        self._world.hold(self, encoded)

    def send_now(self, encoded: Encoded) -> None:
        super().send(encoded)


class Leaving(World):
    """A host is gone from one exchange on, and comes back at a later one."""

    def __init__(self, leaver: str, lost_at: int, back_at: int, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.leaver, self.lost_at, self.back_at = leaver, lost_at, back_at
        self.is_away, self._was_away = False, False

    def link(self, hub: Hub, host: Host) -> LoopbackLink:
        """One that notices what is to happen."""
        return _LeavingLink(self, hub, host)

    def before_task(self, hub: Hub) -> None:
        """Before any host is sent a task: the leaver goes, or comes back."""
        link = next(link for link in self.links if link.name == self.leaver)
        if hub.seq >= self.lost_at and not self._was_away:
            self.is_away = self._was_away = True
            hub.lost(self.leaver, link, "gone")
        if hub.seq >= self.back_at and self.is_away:
            self.is_away = False
            asyncio.get_running_loop().call_soon(link.join)

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        """The transport of the run, with a clock that ticks."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(_TICK_S)
                hub.tick()

        async with super().connect(hub):
            ticking = asyncio.create_task(tick())
            try:
                yield
            finally:
                ticking.cancel()


class _LeavingLink(LoopbackLink):
    def __init__(self, world: Leaving, hub: Hub, host: Host) -> None:
        super().__init__(hub, host)
        self._world = world

    def send(self, encoded: Encoded) -> None:
        self._world.before_task(self._hub)
        if self.name != self._world.leaver or not self._world.is_away:
            super().send(encoded)
