"""A whole run of `son_newton` with many users, over gRPC: seconds, CPU seconds and the peak of each process.

The table has 12 rows for each user, a million of them in one row group. Models lie around 20 centres, and users are tied to their 10
nearest. A repetition takes minutes. The peak of a process is read every half second until it ends (Linux only).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie import load_run
from tests.benchmarks import record
from tests.benchmarks.record import Figure

EXPERIMENT = """name: many-users
data: {{source: parquet, path: {path}, user_column: user, target_column: y, test_fraction: 0}}
problem: {{loss: least_squares, l2: 1.0e-3, intercept: false}}
method: {{name: son_newton, penalty: 0.05, graph: {{neighbours: 10, phi: 2}}}}
references: []
federation: {{hosts: {hosts}, join_timeout_s: 900}}
"""


def write(path: Path, n: int, d: int = 3, m: int = 12) -> None:
    """Rows with noise of 1 on their target, and models with a deviation of .5 from their centre."""
    random = np.random.default_rng(0)
    centres = 3 * random.normal(size=(20, d))
    models = centres[random.integers(20, size=n)] + random.normal(size=(n, d)) * 0.5
    x = random.normal(size=(n, m, d))
    y = np.einsum("nmd,nd->nm", x, models) + random.normal(size=(n, m))
    names = [f"u{user:06d}" for user in np.repeat(np.arange(n), m)]
    pq.write_table(pa.table({"user": names, "y": y.ravel(), **{f"x{j}": x[:, :, j].ravel() for j in range(d)}}), path)


def peak_mb(process: int) -> float:
    """0 where it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return max((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), default=0.0)


def children(process: int) -> list[int]:
    """The processes that it has started."""
    try:
        return [int(word) for task in Path(f"/proc/{process}/task").iterdir() for word in (task / "children").read_text().split()]
    except OSError:
        return []


def measured(folder: Path, path: Path, hosts: int) -> tuple[float, float, float, float, int]:
    """(seconds, CPU seconds of all, peak MB of the coordinator, largest peak MB of a host, clusters)."""
    experiment, output = folder / "many-users.yaml", folder / "run"
    experiment.write_text(EXPERIMENT.format(path=path, hosts=hosts), encoding="utf-8")
    started, peaks, before = time.monotonic(), dict[int, float](), os.times()
    command = [sys.executable, "-m", "coterie", "run", str(experiment), "--output", str(output), "--overwrite", "--quiet"]
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for one in (process.pid, *children(process.pid)):
                peaks[one] = max(peaks.get(one, 0.0), peak_mb(one))
            time.sleep(0.5)
    seconds, after = time.monotonic() - started, os.times()
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}, want 0")
    clusters = len(set((load_run(output).clusters or {}).values()))
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    coordinator = peaks.pop(process.pid)
    return seconds, cpu, coordinator, max(peaks.values()), clusters


def figures(users: int = 100_000, hosts: int = 4, repeats: int = 1) -> Iterator[Figure]:
    """The goals are those of 100,000 users."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "users.parquet", users)
        found = [measured(folder, folder / "users.parquet", hosts) for _ in range(repeats)]
    seconds, cpu, coordinator, host, clusters = zip(*found, strict=True)
    yield Figure("whole run", "s", seconds, wanted=900)
    yield Figure("whole run, all processes", "CPU s", cpu)
    yield Figure("peak of the coordinator", "MB", coordinator, wanted=4096)
    yield Figure("largest peak of a host", "MB", host, wanted=300)
    yield Figure("clusters", "clusters", clusters, None)


if __name__ == "__main__":
    record.main(figures)
