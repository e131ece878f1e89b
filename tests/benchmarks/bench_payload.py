"""How fast the weights of large networks travel, and how often a process holds them.

For 50 MB a user each way: rounds per second of `Hub.exchange` with users that return what they were sent, over those of the bare stream of
`bench_transport`, which sends the same bytes; and the peak resident memory above that of a run with next to nothing in its messages, in
copies of what the process receives in a round.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray

from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.session import dial
from coterie.wire.messages import Rows, Weights, declare
from coterie_client.data import UserData
from coterie_client.hosting.host import Host
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import serving
from tests.benchmarks import record
from tests.benchmarks.bench_transport import ADDRESS, EXPERIMENT, NoRecorder, _rate, bare
from tests.benchmarks.record import Figure


@declare(method="benchweights", step="B2")
@dataclass(frozen=True)
class Down(Rows):
    """The same for all."""

    weights: Annotated[NDArray[np.float32], Weights("shared")]


@declare(method="benchweights", step="B2")
@dataclass(frozen=True)
class Up(Rows):
    """Each user's own."""

    weights: Annotated[NDArray[np.float32], Weights("rows", "shared")]


class Echo:
    """The client half."""

    def init(self, options: Any, local: Local, previous: Any) -> int:
        return 0

    def step(self, state: int, inbox: Inbox, local: Local) -> tuple[int, list[Rows]]:
        return state + 1, [Up(inbox[Down].weights[np.newaxis], users=np.zeros(1, np.int64))]


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _host(address: str, name: str, peaks: Any) -> None:
    module: Any = types.ModuleType("coterie_client.methods.benchweights")
    module.CLIENT = ClientHalf(init=Echo().init, step=Echo().step)
    sys.modules[module.__name__] = module
    empty = np.zeros((0, 1))

    def make_host(experiment: Experiment, run_id: str) -> Host:
        data = [UserData(name, None, empty, empty[:, 0], empty, empty[:, 0])]
        return Host(name, experiment, run_id, data, lambda _: cast(Local, None), None, name)

    asyncio.run(dial.serve_member(make_host, address, name=name))
    peaks.put(_peak_mb())


async def _rounds(size: int, n_hosts: int, seconds: float, peaks: Any) -> float:
    experiment = experiment_from({**EXPERIMENT, "payload": "float32", "federation": {"hosts": n_hosts}})
    hub = Hub(experiment, "bench", NoRecorder(), time.monotonic, keep_log=False)
    weights = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    users = np.arange(n_hosts)
    async with serving(hub, experiment_to_json(experiment), ADDRESS) as server:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_host, args=(f"127.0.0.1:{server.port}", f"h{i}", peaks), daemon=True) for i in users]
        for process in processes:
            process.start()
        await hub.gather()
        hub.begin_stage(1, '{"stage": "bench", "options": {"benchweights": {}}}')

        async def one_round() -> None:
            nonlocal weights
            replies = await hub.exchange(Down(weights, users=users))
            listed = replies.one_by_one(Up)
            weights = listed[0].weights[0]  # as the next round's tensors: what a round leaves is one copy

        rate = await _rate(one_round, seconds)
        await hub.finish("done", failed=False)
        await asyncio.to_thread(lambda: [process.join(10) for process in processes])
    return rate


def _ours(size: int, n_hosts: int, seconds: float, results: Any) -> None:
    peaks = multiprocessing.get_context("spawn").Queue()
    rate = asyncio.run(_rounds(size, n_hosts, seconds, peaks))
    results.put((rate, _peak_mb(), max(peaks.get(timeout=10) for _ in range(n_hosts))))


def measured(size: int, n_hosts: int, seconds: float) -> tuple[float, float, float]:
    """(rounds per second, peak MB of the coordinator, of the largest host), in processes of their own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=cast(Callable[..., None], _ours), args=(size, n_hosts, seconds, results))
    process.start()
    found: tuple[float, float, float] = results.get(timeout=300)
    process.join(30)
    return found


def figures(seconds: float = 4.0, repeats: int = 3, megabytes: float = 50.0) -> Iterator[Figure]:
    """For one host and two with a user each, whose weights have so many megabytes each way."""
    n_bytes, n_mb = int(megabytes * 1e6), megabytes * 1e6 / 2**20
    for n_hosts in (1, 2):
        _, idle_server, idle_host = measured(1000, n_hosts, 0.5)
        there, found = [], []
        for _ in range(repeats):
            there.append(asyncio.run(bare(n_hosts, n_bytes // 8, n_hosts, seconds)))
            found.append(measured(n_bytes // 4, n_hosts, seconds))
        case = f"{n_hosts} host{'s' * (n_hosts > 1)}"
        yield Figure(f"{case}, bare stream", "rounds/s", there, None)
        yield Figure(f"{case}, coterie", "rounds/s", [rate for rate, _, _ in found], "more")
        ratios = [rate / bare_rate for bare_rate, (rate, _, _) in zip(there, found, strict=True)]
        yield Figure(f"{case}, of the bare stream", "times", ratios, "more", wanted=0.5)
        yield Figure(f"{case}, at the coordinator", "copies", [(mb - idle_server) / (n_hosts * n_mb) for _, mb, _ in found], wanted=3)
        yield Figure(f"{case}, at the larger host", "copies", [(mb - idle_host) / n_mb for _, _, mb in found], wanted=3)


if __name__ == "__main__":
    record.main(figures)
