"""Async-L2GD at two scales: a simulation against a plain loop of the same arithmetic, and the paper's number of users in two tiers.

1. The data of the paper's section 6.1 (20 clusters of 20 users, d = 20, 10 rows each), the single-coin variant: seconds of a whole
   simulated run, ledger included, over those of a vectorised numpy loop that does the same steps on one array; and the share of the run
   that is not arithmetic.
2. 29,490 users in 5 clusters, logistic, d = 3, uneven rows of 5 or more: a simulation, and 5 aggregators with a host each over gRPC; the
   seconds and the peak resident memory of all processes together.

Usage: python tests/benchmarks/bench_known_clusters.py [--iterations 50000] [--p0 .02] [--users 29490] [--scale-iterations 5000] [--only 1]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from coterie import run
from coterie.draws.streams import generator
from coterie_client.data import load_users
from coterie_client.problems.convex import ConvexProblem

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


def section_6_1(iterations: int, p0: float) -> None:
    experiment: dict[str, Any] = {
        "name": "bench",
        "data": SECTION_6_1,
        "problem": {"loss": "least_squares", "reduction": "sum", "intercept": False},
        "method": {"name": "async_l2gd", "variant": "single_coin", "iterations": iterations, "gamma": 1.0, "alpha": 0.05, "p0": p0},
        "evaluate": False,
    }
    in_gradients = _timed_gradients()
    start = time.perf_counter()
    result = run(experiment)
    ours = time.perf_counter() - start
    figures = result.metrics["async_l2gd"]
    plain = plain_loop(_data(), 0, iterations, figures, 0.05, 1.0)
    rounds = figures["between_rounds"]
    print(f"20 x 20 users, {iterations} iterations, p0 = {p0:g}, {rounds:.0f} global rounds")
    print(f"  simulation {ours:.2f} s, plain loop {plain:.2f} s: ratio {ours / plain:.2f} (wanted at most 3)")
    print(f"  gradients {in_gradients():.2f} s; all else, messages and set-up included: {1 - in_gradients() / ours:.0%} of the run")


def _data() -> Any:
    from coterie.experiment.config import experiment_from

    content = {"name": "b", "data": SECTION_6_1, "problem": {"loss": "least_squares"}, "method": {"name": "local"}}
    return experiment_from(content).data


def _timed_gradients() -> Any:
    """Counts the seconds inside `ConvexProblem.gradient` from now on."""
    seconds = 0.0
    original = ConvexProblem.gradient

    def gradient(self: ConvexProblem, *arguments: Any) -> Any:
        nonlocal seconds
        start = time.perf_counter()
        found = original(self, *arguments)
        seconds += time.perf_counter() - start
        return found

    ConvexProblem.gradient = gradient  # type: ignore[method-assign]
    return lambda: seconds


def scale(n_users: int, iterations: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "donors.npz"
        _write(path, n_users)
        experiment: dict[str, Any] = {
            "name": "scale",
            "data": {"source": "npz", "path": str(path), "cluster": "cluster"},
            "problem": {"loss": "logistic", "reduction": "sum", "intercept": False, "l2": 0.01},
            "method": {"name": "async_l2gd", "iterations": iterations, "gamma": 0.5, "lam": 50.0},
        }
        for transport, rules in (("loopback", {}), ("grpc", {"topology": "clusters", "hosts": 5})):
            start = time.perf_counter()
            with _Peak() as peak:
                result = run({**experiment, "federation": rules}, transport=transport)
            figures = result.metrics["async_l2gd"]
            print(
                f"{n_users} users, {iterations} iterations, {transport}: {time.perf_counter() - start:.1f} s, "
                f"{peak.megabytes:.0f} MB in all processes, {figures['between_rounds']:.0f} global rounds, "
                f"{figures['within_rounds']:.0f} inside clusters, held-out accuracy {figures['heldout_metric']:.3f}"
            )


def _write(path: Path, n_users: int) -> None:
    draws = np.random.default_rng(0)
    counts = 5 + draws.poisson(4, n_users)
    user = np.repeat(np.arange(n_users), counts)
    cluster = np.arange(n_users) % 5
    centres = draws.normal(size=(5, 3))
    models = centres[cluster] + 0.5 * draws.normal(size=(n_users, 3))
    features = draws.normal(size=(user.size, 3))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=50_000)
    parser.add_argument("--p0", type=float, default=0.02)
    parser.add_argument("--users", type=int, default=29_490)
    parser.add_argument("--scale-iterations", type=int, default=5_000)
    parser.add_argument("--only", choices=["1", "2"])
    arguments = parser.parse_args()
    if arguments.only != "2":
        section_6_1(arguments.iterations, arguments.p0)
    if arguments.only != "1":
        scale(arguments.users, arguments.scale_iterations)


if __name__ == "__main__":
    main()
