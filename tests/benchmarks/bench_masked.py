"""What masks cost: one sum of the users' vectors in which the parent sees each host's part, and one in which it sees the total alone.

The hosts are in this process, behind the frames of the network. Of each sum: the CPU seconds of all members, those of the parent and one
host, which work one after the other on machines of their own, and the bytes that travel. The terms are ready; a run computes them first.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np

from coterie.arrays import Array
from coterie.experiment.config import Experiment, experiment_from
from coterie.record.snapshot import SnapshotFile
from coterie.wire.codec import Encoded, Received
from coterie.wire.messages import Broadcast, Rows, Vectors, declare
from coterie_client.data import UserData
from coterie_client.hosting.host import Host
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.interface.half import Sum
from coterie_server.session.hub import Hub
from tests.benchmarks import record
from tests.benchmarks.bench_transport import EXPERIMENT, NoRecorder
from tests.benchmarks.record import Figure

WAYS: Mapping[str, Mapping[str, Any]] = {
    "open": {},
    "masked": {"sums": "masked"},
    "masked, hosts may be lost": {"sums": "masked", "on_loss": "skip"},
}


@declare(method="benchsums", step="B3")
@dataclass(frozen=True)
class Ask(Broadcast):
    """Asks every user for its vector."""


@declare(method="benchsums", step="B3", total=True)
@dataclass(frozen=True)
class Term(Rows):
    """Each user's own."""

    x: Annotated[Array, Vectors("rows", "d")]


class Ready:
    """The client half: the vectors are there."""

    def __init__(self, x: Array) -> None:
        self._x = x

    def init(self, options: Any, local: Local, previous: Any) -> int:
        return 0

    def step(self, state: int, inbox: Inbox, local: Local) -> tuple[int, list[Rows]]:
        return state, [Term(self._x)]


class TimedLink(LoopbackLink):
    """Measures what the host takes, and counts the bytes of both directions."""

    host_s = 0.0
    n_bytes = 0

    def _handle(self, received: Received) -> None:
        type(self).n_bytes += received.n_bytes
        super()._handle(received)

    def deliver(self, reply: Encoded) -> None:
        type(self).n_bytes += reply.n_bytes
        super().deliver(reply)


class TimedHost(Host):
    def handle(self, received: Received) -> Encoded | None:
        start = time.process_time()
        try:
            return super().handle(received)
        finally:
            TimedLink.host_s += time.process_time() - start


async def _sums(experiment: Experiment, n_hosts: int, x: Array, folder: Path, repeats: int) -> Iterator[tuple[float, float, int]]:
    module: Any = types.ModuleType("coterie_client.methods.benchsums")
    half = Ready(x)
    module.CLIENT = ClientHalf(init=half.init, step=half.step)
    sys.modules[module.__name__] = module
    hub, empty = Hub(experiment, "bench", NoRecorder(), time.monotonic, keep_log=False), np.zeros((0, 1))
    for place in range(n_hosts):
        data = [UserData(f"u{place}", None, empty, empty[:, 0], empty, empty[:, 0])]
        local = cast(Any, types.SimpleNamespace(n_own=1, names=(f"u{place}",)))
        store = SnapshotFile(folder / f"h{place}", "state")
        TimedLink(hub, TimedHost(f"h{place}", experiment, "bench", data, lambda _, local=local: local, store)).join()
    await hub.gather()
    hub.begin_stage(1, '{"stage": "bench", "options": {"benchsums": {}}}')
    hub.participation.needs_everyone, hub.participation.may_skip = "", True
    found = []
    for _ in range(repeats + 1):
        TimedLink.host_s, TimedLink.n_bytes, start = 0.0, 0, time.process_time()
        total = (await hub.total(Ask(), of=[Sum(Term, bounds={"x": 8.0}, extents={"d": x.shape[1]})]))[Term].x
        found.append((time.process_time() - start, TimedLink.host_s, TimedLink.n_bytes))
    assert np.allclose(total[0], n_hosts * x[0])
    return iter(found[1:])  # the first one has the keys of the stage


def figures(hosts: int = 20, values: int = 1_000_000, repeats: int = 5) -> Iterator[Figure]:
    """Each way, and the masked ones over the open one."""
    x = np.random.default_rng(0).standard_normal((1, values)).clip(-8, 8)
    seen: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for way, rules in WAYS.items():
        experiment = experiment_from(
            {**EXPERIMENT, "method": {"name": "global"}, "exact_sums": True, "federation": {"hosts": hosts, **rules}}
        )
        with tempfile.TemporaryDirectory() as folder:
            rows = list(asyncio.run(_sums(experiment, hosts, x, Path(folder), repeats)))
        every = [all_s for all_s, _, _ in rows]
        path = [all_s - host_s + host_s / hosts for all_s, host_s, _ in rows]
        n_bytes = [float(n) for _, _, n in rows]
        seen[way] = every, path, n_bytes
        yield Figure(f"{hosts} hosts x {values:,}, {way}, all members", "CPU s", every)
        yield Figure(f"{hosts} hosts x {values:,}, {way}, the parent and one host", "CPU s", path)
        yield Figure(f"{hosts} hosts x {values:,}, {way}, bytes", "MB", [n / 1e6 for n in n_bytes])
    for way in list(WAYS)[1:]:
        for name, now, before, wanted in zip(
            ("all members", "the parent and one host", "bytes"), seen[way], seen["open"], (None, 1.5, 1.1), strict=True
        ):
            ratio = [one / float(np.median(before)) for one in now]
            yield Figure(f"{hosts} hosts x {values:,}, {way} over open, {name}", "times", ratio, "less", wanted)


if __name__ == "__main__":
    record.main(figures)
