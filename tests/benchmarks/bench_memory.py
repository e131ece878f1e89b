"""Peak resident memory and CPU seconds of a coordinator and a client host at N = 60, and what a client costs before it does anything.

Usage:  python -m tests.benchmarks.bench_memory
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

COMMAND = [sys.executable, "-m", "coterie"]
EXPERIMENT = {
    "name": "memory",
    "data": {"source": "ellipses"},
    "problem": {"loss": "squared_hinge", "l2": 1e-3},
    "method": {"name": "pdmm", "penalty": 0.09},
    "stop": {"rounds": 300},
}


def waited(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """(peak resident MB, CPU seconds) of a process that ends well."""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"a process ended with status {status}")
    process.returncode = 0
    return usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "memory.yaml").write_text(yaml.safe_dump(EXPERIMENT))
        address = "127.0.0.1:50515"
        quiet = {"cwd": folder, "stdout": subprocess.DEVNULL}
        server = subprocess.Popen([*COMMAND, "server", "memory.yaml", "--listen", address, "--hosts", "1"], **quiet)  # type: ignore[call-overload]
        client = subprocess.Popen([*COMMAND, "client", "--server", address, "--accept", "any"], **quiet)  # type: ignore[call-overload]
        client_mb, client_s = waited(client)
        server_mb, server_s = waited(server)
        helped = subprocess.Popen([*COMMAND, "client", "--help"], **quiet)  # type: ignore[call-overload]
        help_mb, help_s = waited(helped)
    code = "import coterie.session.dial, coterie_client.hosting.build, coterie_client.methods.pdmm"
    started = subprocess.Popen([sys.executable, "-c", code])
    start_mb, start_s = waited(started)
    print("60 users, d = 3, 300 rounds      peak MB   CPU s")
    print(f"  client host (all 60 users)     {client_mb:7.1f} {client_s:7.2f}   (wanted: under 80 MB)")
    print(f"  coordinator                    {server_mb:7.1f} {server_s:7.2f}   (wanted: under 150 MB)")
    print(f"  a client's imports alone       {start_mb:7.1f} {start_s:7.2f}   (wanted: under 1 s)")
    print(f"  coterie client --help          {help_mb:7.1f} {help_s:7.2f}")


if __name__ == "__main__":
    main()
