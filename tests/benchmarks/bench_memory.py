"""Peak resident memory and CPU seconds of a coordinator and a client host at N = 60, and what a client costs before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.benchmarks import record
from tests.benchmarks.record import Figure

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


def measured() -> dict[str, tuple[float, float]]:
    """Of each process."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "memory.yaml").write_text(yaml.safe_dump(EXPERIMENT))
        address = "127.0.0.1:50515"
        quiet = {"cwd": folder, "stdout": subprocess.DEVNULL}
        server = subprocess.Popen([*COMMAND, "server", "memory.yaml", "--listen", address, "--hosts", "1", "--quiet"], **quiet)  # type: ignore[call-overload]
        client = subprocess.Popen([*COMMAND, "client", "--server", address, "--accept", "any"], **quiet)  # type: ignore[call-overload]
        found = {"client host with all 60 users": waited(client), "coordinator": waited(server)}
        helped = subprocess.Popen([*COMMAND, "client", "--help"], **quiet)  # type: ignore[call-overload]
        found["coterie client --help"] = waited(helped)
    code = "import coterie.session.dial, coterie_client.hosting.build, coterie_client.methods.pdmm"
    found["a client's imports alone"] = waited(subprocess.Popen([sys.executable, "-c", code]))
    return found


WANTED_MB = {"client host with all 60 users": 80, "coordinator": 150}
WANTED_S = {"a client's imports alone": 1}


def figures(repeats: int = 3) -> Iterator[Figure]:
    """60 users, d = 3, 300 rounds."""
    found = [measured() for _ in range(repeats)]
    for name in found[0]:
        peaks, seconds = zip(*(one[name] for one in found), strict=True)
        yield Figure(f"{name}, peak", "MB", peaks, wanted=WANTED_MB.get(name))
        yield Figure(name, "CPU s", seconds, wanted=WANTED_S.get(name))


if __name__ == "__main__":
    record.main(figures)
