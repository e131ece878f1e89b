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


class WorldLink(LoopbackLink):
    """A link between the hub and a host of a world, which decides what happens to each task and reply."""

    def __init__(self, world: World, hub: Hub, host: Host) -> None:
        super().__init__(hub, host)
        self.world, self.hub, self.host = world, hub, host
        self.loses_reply = False

    def send(self, encoded: Encoded) -> None:
        """Hands a task to the world."""
        self.world.task(self, encoded)

    def hand_over(self, encoded: Encoded) -> None:
        """Hands a task to the host, and its reply to the hub."""
        super().send(encoded)

    def deliver(self, reply: Encoded) -> None:
        """Hands the reply to the hub, unless the host dies with it."""
        self.world.reply(self, reply)
        if not self.loses_reply:
            super().deliver(reply)


class World:
    """One run folder, its hosts h0, h1, ..., and the faults to come. The hosts take turns in receiving the users."""

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
        self.folder, self.data, self.decisions_of = folder, data, decisions_of
        self.faults = faults or Faults()
        self.done: set[Any] = set()  # faults that have happened
        self.start = start  # what another run has left
        self.keeps_hosts = keeps_hosts  # whether hosts outlive a coordinator
        names = [user.name for user in list_users(experiment.data, experiment.seed, data)]
        self.users = {f"h{i}": names[i::n_hosts] for i in range(n_hosts)}
        self.hosts: dict[str, Host] = {}
        self.links: list[LoopbackLink] = []  # of this attempt, in the order in which they were made

    def host(self, name: str, run_id: str) -> Host:
        """The host as it is after a restart: from its newest snapshot."""
        store = SnapshotFile(self.folder / "hosts" / name, "host")
        return build_host(name, self.experiment, run_id, self.users[name], data_dir=self.data, store=store)

    def task(self, link: WorldLink, encoded: Encoded) -> None:
        """Hands a task to the host, unless one of them is to die now."""
        seq, faults = link.hub.seq, self.faults
        if seq in faults.coordinator and seq not in self.done:
            self.done.add(seq)
            raise CoordinatorKilledError
        is_new = (seq, link.name) not in self.done
        dies_before, dies_after = (is_new and found.get(seq) == link.name for found in (faults.hosts_before, faults.hosts_after))
        if dies_before or dies_after:
            self.done.add((seq, link.name))
        if not dies_before:
            link.loses_reply = dies_after
            link.hand_over(encoded)
        if dies_before or dies_after:
            self.kill(link)

    def reply(self, link: WorldLink, encoded: Encoded) -> None:
        """A host has answered."""

    def kill(self, link: WorldLink) -> None:
        """The host dies and comes back from its newest snapshot."""
        link.hub.lost(link.name, link, "killed")
        self.hosts[link.name] = self.host(link.name, link.hub.run_id)
        self.links.append(WorldLink(self, link.hub, self.hosts[link.name]))
        asyncio.get_running_loop().call_soon(self.links[-1].join)

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        """The transport of the run."""
        if not self.hosts or not self.keeps_hosts:
            self.hosts = {name: self.host(name, hub.run_id) for name in self.users}
        self.links[:] = [WorldLink(self, hub, host) for host in self.hosts.values()]
        for link in self.links:
            link.join()
        yield

    def attempt(self, *, resume: bool) -> Finished:
        """Runs until the end or until the coordinator dies."""
        options = Options(folder=self.folder, resume=resume, start=self.start, decisions_of=self.decisions_of)
        return asyncio.run(coordinate(self.experiment, self.connect, options))

    def run(self) -> Finished:
        """Runs to the end, and restarts the coordinator as often as it dies."""
        for number in range(1 + len(self.faults.coordinator)):
            with contextlib.suppress(CoordinatorKilledError):
                return self.attempt(resume=number > 0)
        raise AssertionError("the coordinator died more often than it should")


class Shuffled(World):
    """Hosts join in reverse order, and answer each exchange in an order that the seed draws."""

    def __init__(self, seed: int, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._draws = np.random.default_rng(seed)
        self._held: list[tuple[WorldLink, Encoded]] = []
        self.users = dict(reversed(self.users.items()))
        self.orders: set[tuple[str, ...]] = set()

    def task(self, link: WorldLink, encoded: Encoded) -> None:
        """Keeps a task until those of all hosts are there."""
        if not self._held:
            asyncio.get_running_loop().call_soon(self._release)
        self._held.append((link, encoded))

    def _release(self) -> None:
        held, self._held = self._held, []
        ordered = [held[place] for place in self._draws.permutation(len(held))]
        self.orders.add(tuple(link.name for link, _ in ordered))
        for link, encoded in ordered:
            link.hand_over(encoded)


class Leaving(World):
    """A host is gone from one exchange on, and comes back at a later one."""

    def __init__(self, leaver: str, lost_at: int, back_at: int, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.leaver, self.lost_at, self.back_at = leaver, lost_at, back_at
        self.is_away, self._was_away = False, False

    def task(self, link: WorldLink, encoded: Encoded) -> None:
        """Hands over a task; before the first one of an exchange the leaver goes, or comes back."""
        own, hub = next(link for link in self.links if link.name == self.leaver), link.hub
        if hub.seq >= self.lost_at and not self._was_away:
            self.is_away = self._was_away = True
            hub.lost(self.leaver, own, "gone")
        if hub.seq >= self.back_at and self.is_away:
            self.is_away = False
            asyncio.get_running_loop().call_soon(own.join)
        if link is not own or not self.is_away:
            link.hand_over(encoded)

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
