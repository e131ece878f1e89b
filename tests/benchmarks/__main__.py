"""All benchmarks, one after the other, each in a process of its own. Usage:  python -m tests.benchmarks"""

from __future__ import annotations

import subprocess
import sys

NAMES = (
    "bench_transport",
    "bench_pdmm",
    "bench_rho",
    "bench_cvxpy",
    "bench_memory",
    "bench_known_clusters",
    "bench_networks",
    "bench_fedrep",
    "bench_payload",
    "bench_ledger",
    "bench_report",
)

if __name__ == "__main__":
    for name in NAMES:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
