"""Async-L2GD at two scales: a simulation against a plain loop of the same arithmetic, and the paper's number of users in two tiers.

1. The data of the paper's section 6.1 (20 clusters of 20 users, d = 20, 10 rows each), the single-coin variant: seconds of a whole
   simulated run, ledger included, over those of a vectorised numpy loop that does the same steps on one array; and the share of the run
   that is not arithmetic.
2. 29,490 users in 5 clusters, logistic, d = 3, uneven rows of 5 or more: a simulation, and 5 aggregators with a host each over gRPC; the
   seconds and the peak resident memory of all processes together.
3. As many users in 300 clusters, d = 10, 2,000 iterations of both methods in one process: CPU seconds, and its memory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

import numpy as np

from coterie import run
from coterie.draws.streams import generator
from coterie_client.data import load_users
from coterie_client.problems.convex import ConvexProblem
from tests.benchmarks import record
from tests.benchmarks.record import Figure

SECTION_6_1: dict[str, Any] = {"source": "hlm", "clusters": 20, "users_per_cluster": 20, "d": 20, "rows_per_user": 10}


def plain_loop(data: Any, seed: int, iterations: int, figures: Mapping[str, float], alpha: float, gamma: float) -> float:
    """Seconds of Algorithm 1 with one coin on stacked arrays, with neither messages nor users of their own."""
    users = load_users(data, seed, None)
    x, y = np.stack([user.features for user in users]), np.stack([user.target for user in users])
    n, clusters = len(users), 20
    p0, eta = figures["p0"], figures["eta"]
    coins = generator(seed, "plain").random(iterations) < p0
    theta = np.zeros((n, x.shape[2]))
    start = time.perf_counter()
    for coin in coins:
        if coin:
            bar_j = theta.reshape(clusters, -1, theta.shape[1]).mean(axis=1)
            bar = bar_j.mean(axis=0)
            towards = np.repeat(alpha * bar + (1 - alpha) * bar_j, n // clusters, axis=0)
            theta = (1 - eta * gamma / p0) * theta + (eta * gamma / p0) * towards
        else:
            residual = np.matmul(x, theta[:, :, None])[:, :, 0] - y
            theta -= eta / (1 - p0) * np.matmul(residual[:, None, :], x)[:, 0]
    return time.perf_counter() - start


def section_6_1(iterations: int, p0: float) -> tuple[float, float, float]:
    """Seconds of the simulation, of its gradients and of the plain loop."""
    experiment: dict[str, Any] = {
        "name": "bench",
        "data": SECTION_6_1,
        "problem": {"loss": "least_squares", "reduction": "sum", "intercept": False},
        "method": {"name": "async_l2gd", "variant": "single_coin", "iterations": iterations, "gamma": 1.0, "alpha": 0.05, "p0": p0},
        "evaluate": False,
    }
    with _timed_gradients() as in_gradients:
        start = time.perf_counter()
        result = run(experiment)
        ours = time.perf_counter() - start
    return ours, sum(in_gradients), plain_loop(_data(), 0, iterations, result.metrics["async_l2gd"], 0.05, 1.0)


def _data() -> Any:
    from coterie.experiment.config import experiment_from

    content = {"name": "b", "data": SECTION_6_1, "problem": {"loss": "least_squares"}, "method": {"name": "local"}}
    return experiment_from(content).data


@contextlib.contextmanager
def _timed_gradients() -> Iterator[list[float]]:
    """The seconds of each call of `ConvexProblem.gradient`."""
    seconds: list[float] = []
    original = ConvexProblem.gradient

    def gradient(self: ConvexProblem, *arguments: Any) -> Any:
        start = time.perf_counter()
        found = original(self, *arguments)
        seconds.append(time.perf_counter() - start)
        return found

    ConvexProblem.gradient = gradient  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        ConvexProblem.gradient = original  # type: ignore[method-assign]


def scale(
    n_users: int, iterations: int, transport: Any, rules: dict[str, Any], name: str = "async_l2gd", clusters: int = 5, d: int = 3
) -> tuple[float, float, float]:
    """Seconds, CPU seconds of this process, and peak MB of all processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "donors.npz"
        _write(path, n_users, clusters, d)
        experiment: dict[str, Any] = {
            "name": "scale",
            "data": {"source": "npz", "path": str(path), "cluster": "cluster"},
            "problem": {"loss": "logistic", "reduction": "sum", "intercept": False, "l2": 0.01},
            "method": {"name": name, "iterations": iterations, "gamma": 0.5, "lam": 50.0},
            "federation": {**rules, "join_timeout_s": 600},  # ten processes that read so many users, on a machine that may be busy
        }
        start, busy = time.perf_counter(), time.process_time()
        with _Peak() as peak:
            run(experiment, transport=transport)
        return time.perf_counter() - start, time.process_time() - busy, peak.megabytes


def _write(path: Path, n_users: int, clusters: int, d: int) -> None:
    draws = np.random.default_rng(0)
    counts = 5 + draws.poisson(4, n_users)
    user = np.repeat(np.arange(n_users), counts)
    cluster = np.arange(n_users) % clusters
    centres = draws.normal(size=(clusters, d))
    models = centres[cluster] + 0.5 * draws.normal(size=(n_users, d))
    features = draws.normal(size=(user.size, d))
    chance = 1 / (1 + np.exp(-(features * models[user]).sum(axis=1)))
    target = np.where(draws.random(user.size) < chance, 1.0, -1.0)
    np.savez(path, features=features, target=target, user=user, cluster=cluster[user])


class _Peak:
    """The largest sum of resident memory of this process and its children while the block runs, sampled."""

    megabytes = 0.0

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._over.wait(0.1):
            pages = sum(_resident(pid) for pid in _family())
            self.megabytes = max(self.megabytes, pages * page / 1e6)


def _family() -> list[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


def figures(
    iterations: int = 50_000,
    p0: float = 0.02,
    users: int = 29_490,
    scale_iterations: int = 5_000,
    many_iterations: int = 2_000,
    repeats: int = 2,
) -> Iterator[Figure]:
    """All three; no iterations leave one out."""
    if iterations:
        ours, gradients, plain = zip(*(section_6_1(iterations, p0) for _ in range(repeats)), strict=True)
        yield Figure("20 x 20 users, simulation", "s", ours)
        yield Figure("20 x 20 users, plain loop", "s", plain, None)
        ratios = [one / other for one, other in zip(ours, plain, strict=True)]
        yield Figure("20 x 20 users, simulation of the plain loop", "times", ratios, wanted=3)
        shares = [100 * (1 - of_it / whole) for whole, of_it in zip(ours, gradients, strict=True)]
        yield Figure("20 x 20 users, simulation without its gradients", "%", shares)
    tiers = {"topology": "clusters", "hosts": 5}
    for transport, rules in (("loopback", {}), ("grpc", tiers)) if scale_iterations else ():
        seconds, _, peaks = zip(*(scale(users, scale_iterations, transport, rules) for _ in range(repeats)), strict=True)
        yield Figure(f"{users:,} users, {transport}", "s", seconds)
        yield Figure(f"{users:,} users, {transport}, all processes' memory", "MB", peaks)
    for name in ("async_l2gd", "async_al2sgd") if many_iterations else ():
        case = (users, many_iterations, "loopback", {}, name, 300, 10)
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:  # with no memory of the run before
            _, busy, peaks = zip(*(fresh.submit(scale, *case).result() for _ in range(repeats)), strict=True)
        yield Figure(f"{users:,} users in 300 clusters, {name}", "s of CPU", busy, wanted=60)
        yield Figure(f"{users:,} users in 300 clusters, {name}, memory", "MB", peaks, wanted=300)


if __name__ == "__main__":
    record.main(figures)
