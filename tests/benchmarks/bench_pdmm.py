"""What a PDMM round costs: over gRPC beside its own arithmetic and an echo, and in simulation with many users.

Usage:  python -m tests.benchmarks.bench_pdmm [--rounds 400] [--hosts 1]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median
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
from tests.benchmarks import bare_halves, bench_transport


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
    facts = Facts(local.problem.n_rows, local.problem.smoothness(), local.problem.strong_convexity(), local.problem.d)
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


def round_s(described: Experiment, transport: Any, hosts: int) -> float:
    """Seconds for a round of the whole system, over the second half of its rounds."""
    times: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.stage.method == "pdmm":
            times.append(time.perf_counter())

    run(described, transport=transport, hosts=hosts, observer=watch)
    half = len(times) // 2
    return (times[-1] - times[half]) / (len(times) - 1 - half)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--large", type=int, default=999, help="users of the simulation")
    options = parser.parse_args()
    described = experiment(60, options.rounds)
    # In turn, over windows of about the same length: a shared machine's speed changes by the second.
    found = []
    for _ in range(options.repeats):
        arithmetic = arithmetic_s(described, 2 * options.rounds)
        echo = 1 / asyncio.run(bench_transport.bare(60, 3, options.hosts, 0.3))
        least = asyncio.run(bare_halves.round_s(described, options.rounds))
        whole = round_s(described, "grpc", options.hosts)
        found.append((arithmetic, echo, least, whole, least / (arithmetic + echo), whole / (arithmetic + echo)))
    arithmetic, echo, least, whole, least_ratio, ratio = (median(column) for column in zip(*found, strict=True))
    ratios = [row[-1] for row in found]
    print(f"PDMM lean, 60 users x 3, {options.hosts} host(s), ms a round, medians of {options.repeats}")
    print(f"  arithmetic {arithmetic * 1e3:.2f}   echo {echo * 1e3:.2f}   over gRPC {whole * 1e3:.2f}")
    print(f"  over gRPC / (arithmetic + echo) = {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})   (wanted: at most 1.5)")
    print(f"  the same halves with a bare stream between them, one host: {least * 1e3:.2f}, {least_ratio:.2f} times as much")
    simulated = round_s(experiment(options.large, 40), "loopback", 1)
    print(f"PDMM lean in simulation, {options.large} users x 3: {1 / simulated:.1f} rounds/s   (wanted: at least 5)")


if __name__ == "__main__":
    main()
