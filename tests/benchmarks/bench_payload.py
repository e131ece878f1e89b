"""How fast the weights of large networks travel, and how often a process holds them.

For 50 MB a user each way: rounds per second of `Hub.exchange` with users that return what they were sent, over those of the bare stream of
`bench_transport`, which sends the same bytes; and the peak resident memory above that of a run with next to nothing in its messages, in
copies of what the process receives in a round. Usage:

    python -m tests.benchmarks.bench_payload [--seconds 4] [--megabytes 50]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import sys
import time
import types
from collections.abc import Callable
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
from tests.benchmarks.bench_transport import ADDRESS, EXPERIMENT, NoRecorder, _rate, bare


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
    experiment = experiment_from({**EXPERIMENT, "federation": {"hosts": n_hosts}})
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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of measuring, for each number")
    parser.add_argument("--repeats", type=int, default=3, help="alternating measurements, of which the best counts")
    parser.add_argument("--megabytes", type=float, default=50.0, help="of weights, each way and user")
    arguments = parser.parse_args()
    n_bytes = int(arguments.megabytes * 1e6)
    print(f"{arguments.megabytes:g} MB a user and way     bare 1/s  coterie 1/s  ratio   copies at the coordinator, at a host")
    for n_hosts in (1, 2):
        _, idle_server, idle_host = measured(1000, n_hosts, 0.5)
        there = here = server_mb = host_mb = 0.0
        for _ in range(arguments.repeats):
            there = max(there, asyncio.run(bare(n_hosts, n_bytes // 8, n_hosts, arguments.seconds)))
            rate, server, host = measured(n_bytes // 4, n_hosts, arguments.seconds)
            here, server_mb, host_mb = max(here, rate), max(server_mb, server), max(host_mb, host)
        at_server = (server_mb - idle_server) / (n_hosts * arguments.megabytes * 1e6 / 2**20)
        at_host = (host_mb - idle_host) / (arguments.megabytes * 1e6 / 2**20)
        print(
            f"  {n_hosts} hosts, a user each {there:12.2f} {here:12.2f} {here / there:6.2f} {at_server:12.2f} {at_host:12.2f}", flush=True
        )
    print("                                              wanted: 0.5 or more, under 3 copies")


if __name__ == "__main__":
    main()
