"""What a report costs: seconds, megabytes of its page, and megabytes of memory, of `coterie report` on large ledgers that are made here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from coterie.experiment.config import experiment_from, experiment_to_json
from tests.benchmarks import record
from tests.benchmarks.bench_ledger import make_large
from tests.benchmarks.record import Figure

EXPERIMENT = {
    "name": "large",
    "data": {"source": "ellipses"},
    "problem": {"loss": "squared_hinge"},
    "method": {"name": "pdmm", "penalty": 0.1},
}


def figures(rows: Sequence[int] = (10_000, 1_000_000), repeats: int = 3) -> Iterator[Figure]:
    """For each number of rows of the ledger."""
    for n_rows in rows:
        with tempfile.TemporaryDirectory() as here:
            folder = Path(here)
            (folder / "experiment.json").write_text(experiment_to_json(experiment_from(EXPERIMENT)))
            make_large(folder, n_rows)
            seconds, used, memory_mb = zip(*(report(folder) for _ in range(repeats)), strict=True)
            page_mb = (folder / "report.html").stat().st_size / 1e6
        yield Figure(f"{n_rows:,} rows", "s", seconds, wanted=20)
        yield Figure(f"{n_rows:,} rows, computing", "CPU s", used)
        yield Figure(f"{n_rows:,} rows, page", "MB", [page_mb], wanted=10)
        yield Figure(f"{n_rows:,} rows, memory", "MB", memory_mb)


def report(folder: Path) -> tuple[float, float, float]:
    """Seconds and seconds of computing of the command, and its largest resident memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "coterie", "report", str(folder)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"coterie report ended with status {status}, want 0")
    process.returncode = 0
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


if __name__ == "__main__":
    record.main(figures)
