"""What a report costs: seconds, megabytes of its page, and megabytes of memory, of `coterie report` on large ledgers that are made here.

The wanted: 1,000,000 rows in less than 20 s and 10 MB. Usage:  python -m tests.benchmarks.bench_report [--rows 10000 1000000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from coterie.experiment.config import experiment_from, experiment_to_json
from tests.benchmarks.bench_ledger import make_large

EXPERIMENT = {
    "name": "large",
    "data": {"source": "ellipses"},
    "problem": {"loss": "squared_hinge"},
    "method": {"name": "pdmm", "penalty": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    print(f"{'rows':>12} {'seconds':>9} {'CPU s':>9} {'page MB':>9} {'memory MB':>10}", flush=True)
    for n_rows in parser.parse_args().rows:
        with tempfile.TemporaryDirectory() as here:
            folder = Path(here)
            (folder / "experiment.json").write_text(experiment_to_json(experiment_from(EXPERIMENT)))
            make_large(folder, n_rows)
            seconds, used, memory_mb = report(folder)
            page_mb = (folder / "report.html").stat().st_size / 1e6
            print(f"{n_rows:>12,} {seconds:>9.1f} {used:>9.1f} {page_mb:>9.2f} {memory_mb:>10.0f}", flush=True)


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
    main()
