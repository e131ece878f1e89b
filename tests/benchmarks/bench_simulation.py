"""How fast many users are simulated: `fedavg` on least squares, one full-batch step a round, hosts over gRPC.

A size is users x d, or users x d x rows of a user (4); with "+sums" behind it hosts send exact sums. In a round the server draws a tenth of
the users, or the given participation.
Time by the clock means little on a busy machine. CPU time does: no more rounds a second are possible than 1000 / (CPU ms of a round), with
a core for each process.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from coterie.experiment.config import Experiment, experiment_from
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.run.engine import Progress
from tests.benchmarks import record
from tests.benchmarks.record import Figure

ROWS = 4
# Bytes on the wire of one round, by direction.
WIRE = (
    "SELECT direction, SUM(message_bytes + 5 * frames) FROM ledger WHERE useful AND seq > 0 AND stage = 0 AND round = ? GROUP BY direction"
)
WARM_UP = 3  # rounds


def archive(path: Path, n_users: int, d: int, rows: int = ROWS) -> Path:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((n_users * rows, d))
    users = np.repeat([f"u{i}" for i in range(n_users)], rows)
    np.savez(path, features=features, target=rng.standard_normal(n_users * rows), user=users)
    return path


def experiment(path: Path, rounds: int, hosts: int, participation: float, *, sums: bool = False) -> Experiment:
    return experiment_from(
        {
            "name": "bench",
            "data": {"source": "npz", "path": str(path), "test_fraction": 0},
            "problem": {"loss": "least_squares", "intercept": False},
            "method": {
                "name": "fedavg",
                "participation": participation,
                "batch_size": None,
                "evaluate_last": 0,
                "fine_tune": [],
                "optimizer": {"lr": 1e-3, "momentum": 0.0},
            },
            "federation": {"hosts": hosts},
            "exact_sums": sums,
            "stop": {"rounds": rounds},
        }
    )


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def measured(n_users: int, d: int, rows: int, rounds: int, hosts: int, participation: float, *, sums: bool) -> Iterator[Figure]:
    pids: list[int] = []
    at: dict[int, tuple[float, float, list[float]]] = {}  # round -> time, CPU of this process and of the hosts
    peaks: list[float] = []

    def cpu() -> tuple[float, float, list[float]]:
        return time.monotonic(), time.process_time(), [cpu_s(pid) for pid in pids]

    def observe(progress: Progress) -> None:
        if progress.round in (WARM_UP, rounds):
            at[progress.round] = cpu()
            peaks[:] = [peak_mb(pid) for pid in pids]

    on_process: Callable[[str, int], None] = lambda _, pid: pids.append(pid)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        chosen = experiment(archive(Path(folder) / "users.npz", n_users, d, rows), rounds, hosts, participation, sums=sums)
        begun = cpu()
        finished = asyncio.run(launch(chosen, Launch("grpc", observer=observe, on_process=on_process)))
    finished.database.flush()
    (start, own, theirs), (end, own_end, theirs_end) = at[WARM_UP], at[rounds]
    n, case = rounds - WARM_UP, f"{n_users} x {d} x {rows}{' in sums' if sums else ''}"
    of_hosts = [1000 * (after - before) / n for before, after in zip(theirs, theirs_end, strict=True)]
    of_server = 1000 * (own_end - own) / n
    wire = dict(finished.database.connection.execute(WIRE, (rounds,)).fetchall())
    finished.database.close()
    yield Figure(f"{case}, rounds a second", "1/s", [n / (end - start)], "more")
    yield Figure(f"{case}, a round at the coordinator", "ms of CPU", [of_server])
    yield Figure(f"{case}, a round at the busier host", "ms of CPU", [max(of_hosts)])
    yield Figure(f"{case}, before round 1, all processes", "s of CPU", [own - begun[1] + sum(theirs)])
    yield Figure(f"{case}, largest host", "MB", [max(peaks)])
    yield Figure(f"{case}, up in a round", "bytes", [wire["up"]], exact=True)
    yield Figure(f"{case}, down in a round", "bytes", [wire["down"]], exact=True)


def figures(
    sizes: Sequence[str] = ("100x1000", "1000x1000", "10000x100"), rounds: int = 200, hosts: int = 2, participation: float = 0.1
) -> Iterator[Figure]:
    """The sizes in turn."""
    for size in sizes:
        plain = size.removesuffix("+sums")
        n_users, d, rows = map(int, (plain if plain.count("x") == 2 else f"{plain}x{ROWS}").split("x"))
        yield from measured(n_users, d, rows, rounds, hosts, participation, sums=plain != size)


if __name__ == "__main__":
    record.main(figures)
