"""What a PDMM round costs: over gRPC beside its own arithmetic and an echo, and in simulation with many users.

Each is measured in turn, over windows of about the same length: a shared machine's speed changes by the second.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from coterie import run
from coterie.experiment.config import Experiment, experiment_from
from coterie.wire.precision import Precision
from coterie_client.hosting.build import build_host
from coterie_client.interface.half import Inbox
from coterie_client.methods.pdmm import CLIENT
from coterie_server.interface.half import Facts, Members, Replies, Setting
from coterie_server.methods.pdmm.half import build
from coterie_server.run.engine import Progress
from tests.benchmarks import bare_halves, bench_transport, record
from tests.benchmarks.record import Figure


def experiment(n_users: int, rounds: int, **method: Any) -> Experiment:
    """The paper's kind of data: three clusters, ten rows each, d = 3, a penalty inside the recovery interval."""
    content = {
        "name": "bench",
        "seed": 3,
        "data": {"source": "ellipses", "users_per_cluster": n_users // 3, "test_per_class": 0},
        "problem": {"loss": "squared_hinge", "l2": 1e-3},
        "method": {"name": "pdmm", "penalty": 5.4 / n_users, "start": "zero", "evaluate_every": 0, **method},
        "stop": {"rounds": rounds},
        "evaluate": False,
    }
    return experiment_from(content)


class _InPlace:
    """A federation without messages: the halves call each other, so only arithmetic is left."""

    def __init__(self, described: Experiment) -> None:
        self.host = build_host("all", described, "bench", None)
        self.host.indices, self.host.n_members = np.arange(len(self.host.users)), len(self.host.users)
        self.state: Any = None
        self.number = 0

    async def exchange(self, *messages: Any, to: Any = None, wanted: Any = ()) -> Replies:
        inbox = Inbox("pdmm", self.number, {type(message): message for message in messages})
        self.state, answers = CLIENT.step(self.state, inbox, self.host.local)
        return Replies({type(answer): answer for answer in answers}, None)


def arithmetic_s(described: Experiment, rounds: int) -> float:
    """Seconds for a round of both halves' plain numpy, without messages."""
    federation = _InPlace(described)
    local = federation.host.local
    n = local.n_own
    facts = Facts(local.problem.n_rows, local.problem.d, local.problem.smoothness())
    members = Members(local.names, ("",) * n)
    method = build(described.method, Setting(3, "pdmm", members, Precision.of("float64"), facts))
    federation.state = CLIENT.init(method.client_options["pdmm"], local, None)

    async def go() -> float:
        state = await method.init(federation)
        started = 0.0
        for number in range(1, rounds + 1):
            if number == rounds // 2:
                started = time.perf_counter()
            federation.number = number
            state, figures = await method.round(state, federation, number)
            dict(figures)  # some are computed when they are looked at
        return (time.perf_counter() - started) / (rounds - rounds // 2 + 1)

    return asyncio.run(go())


def round_s(described: Experiment, transport: Any, hosts: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds for a round of the whole system, over the second half of its rounds."""
    times: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.stage.method == "pdmm":
            times.append(clock())

    run(described, transport=transport, hosts=hosts, observer=watch)
    half = len(times) // 2
    return (times[-1] - times[half]) / (len(times) - 1 - half)


def on_graph(n_users: int) -> tuple[float, float]:
    """Rounds in a second of CPU time, and the peak memory in MB, with 15 neighbours and everything in this process."""
    described = experiment(n_users, 30, penalty=0.05, graph={"neighbours": 15}, evaluate_every=1)
    rate = 1 / round_s(described, "loopback", 1, time.process_time)
    return rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def figures(rounds: int = 400, hosts: int = 1, repeats: int = 8, large: int = 999, graph: int = 20_001) -> Iterator[Figure]:
    """60 users over gRPC, then `large` on all pairs and `graph` on 15 neighbours in simulation, d = 3."""
    described = experiment(60, rounds)
    found = []
    for _ in range(repeats):
        arithmetic = arithmetic_s(described, 2 * rounds)
        echo = 1 / asyncio.run(bench_transport.bare(60, 3, hosts, 0.3))
        least = asyncio.run(bare_halves.round_s(described, rounds))
        whole = round_s(described, "grpc", hosts)
        found.append((1e3 * arithmetic, 1e3 * echo, 1e3 * least, 1e3 * whole, least / (arithmetic + echo), whole / (arithmetic + echo)))
    arithmetic_ms, echo_ms, least_ms, whole_ms, least_ratios, ratios = zip(*found, strict=True)
    yield Figure("60 users, a round's arithmetic", "ms", arithmetic_ms)
    yield Figure("60 users, an echo", "ms", echo_ms, None)
    yield Figure("60 users, a round over gRPC", "ms", whole_ms)
    yield Figure("60 users, over gRPC / (arithmetic + echo)", "times", ratios, wanted=1.5)
    yield Figure("60 users, the halves with a bare stream, one host", "ms", least_ms, None)
    yield Figure("60 users, halves with a bare stream / (arithmetic + echo)", "times", least_ratios, None)
    simulated = experiment(large, 40)
    rates = [1 / round_s(simulated, "loopback", 1) for _ in range(3)]
    yield Figure(f"{large} users in simulation", "rounds/s", rates, "more", wanted=5)
    cases = []
    for _ in range(3):  # each in a process of its own, whose memory it is
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            cases.append(pool.submit(on_graph, graph).result())
    speeds, sizes = zip(*cases, strict=True)
    yield Figure(f"{graph} users on 15 neighbours in simulation", "rounds/CPU s", speeds, "more", wanted=5)
    yield Figure(f"{graph} users on 15 neighbours, peak memory with all users", "MB", sizes, wanted=1000)


if __name__ == "__main__":
    record.main(figures)
