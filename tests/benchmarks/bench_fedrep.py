"""What a round of FedRep costs beside the training itself, and what a thousand users of one host weigh.

The paper's CNN, 10 users a round with 500 rows each, over gRPC with one host process: the share of the rounds' time in which the host
does not train. Then a run of 1,000 users of the digits' MLP on one host: its peak resident memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.record.snapshot import SnapshotFile
from coterie.session import dial
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_client.nets import TorchNetwork
from coterie_server.run.coordinator import Options, coordinate
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import serving
from tests.benchmarks import record
from tests.benchmarks.record import Figure

CNN = {"name": "cnn", "channels": [64, 64], "hidden": [120, 64], "classes": 10}
MLP = {"name": "mlp", "hidden": [128, 64], "classes": 10}


def experiment(path: Path, model: dict[str, Any], rounds: int, **method: Any) -> Experiment:
    """FedRep on the users of an archive."""
    content = {
        "name": "bench",
        "data": {"source": "npz", "path": str(path), "test_fraction": 0},
        "model": model,
        "method": {"name": "fedrep", "evaluate_last": 0, "fine_tune": [], "optimizer": {"lr": 0.01, "momentum": 0.5}, **method},
        "stop": {"rounds": rounds},
    }
    return experiment_from(content)


def archive(path: Path, n_users: int, rows: int, shape: tuple[int, ...]) -> Path:
    """Bytes at random, in ten classes."""
    rng = np.random.default_rng(0)
    features = rng.integers(0, 256, (n_users * rows, *shape), dtype=np.uint8)
    users = np.repeat([f"u{i}" for i in range(n_users)], rows)
    np.savez(path, features=features, target=rng.integers(0, 10, n_users * rows), user=users)
    return path


def _host(address: str, folder: str, results: Any) -> None:
    """A host process that counts the seconds of its training and weighs itself."""
    trained_s = 0.0
    fit = TorchNetwork.fit

    def counted(self: TorchNetwork, *args: Any) -> Any:
        nonlocal trained_s
        began = time.perf_counter()
        fitted = fit(self, *args)
        trained_s += time.perf_counter() - began
        return fitted

    TorchNetwork.fit = counted  # type: ignore[method-assign]

    def make_host(content: Experiment, run_id: str) -> Host:
        return build_host("host", content, run_id, None, store=SnapshotFile(Path(folder), "host"), instance="one")

    asyncio.run(dial.serve_member(make_host, address, name="host"))
    results.put((trained_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measured(content: Experiment, folder: Path) -> tuple[float, float, float]:
    """(seconds of all rounds, of training in them, peak MB of the host)."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    times: list[float] = []

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        async with serving(hub, experiment_to_json(content), "127.0.0.1:0") as server:
            process = context.Process(target=_host, args=(f"127.0.0.1:{server.port}", str(folder / "host"), results), daemon=True)
            process.start()
            yield

    begin_stage = Hub.begin_stage

    def begins(self: Hub, *args: Any) -> None:
        times.append(time.perf_counter())
        begin_stage(self, *args)

    Hub.begin_stage = begins  # type: ignore[method-assign]
    try:
        options = Options(folder=folder / "run", observer=lambda _: times.append(time.perf_counter()))
        asyncio.run(coordinate(content, connect, options))
    finally:
        Hub.begin_stage = begin_stage  # type: ignore[method-assign]
    trained_s, peak_mb = results.get(timeout=60)
    return times[-1] - times[0], trained_s, peak_mb


def figures(rounds: int = 3, repeats: int = 3) -> Iterator[Figure]:
    """The paper's CNN, then many users of one host."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        images = archive(folder / "images.npz", 10, 500, (3, 32, 32))
        cnn = experiment(images, CNN, rounds, participation=1.0)
        found = [measured(cnn, folder / f"cnn{number}") for number in range(repeats)]
        yield Figure("the paper's CNN, a round of 10 users", "s", [all_s / rounds for all_s, _, _ in found])
        yield Figure("the paper's CNN, a round's training", "s", [trained_s / rounds for _, trained_s, _ in found])
        yield Figure("the paper's CNN, not training", "%", [100 * (1 - trained_s / all_s) for all_s, trained_s, _ in found], wanted=5)
        mlp = experiment(archive(folder / "digits.npz", 1000, 20, (1, 8, 8)), MLP, 5, participation=0.1)
        found = [measured(mlp, folder / f"mlp{number}") for number in range(repeats)]
        yield Figure("1,000 users of one host, a round of the digits' MLP", "s", [many_s / 5 for many_s, _, _ in found])
        yield Figure("1,000 users of one host, its peak memory", "MB", [peak_mb for _, _, peak_mb in found], wanted=1000)


if __name__ == "__main__":
    record.main(figures)
