"""All benchmarks, one after the other, each in a process of its own; then what moved. Usage:  python -m tests.benchmarks"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks import record

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))

if __name__ == "__main__":
    failed, moved = [], []
    for name in NAMES:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}", "--keep"], check=False).returncode:
            failed.append(name)
        else:
            moved += record.moved(name.removeprefix("bench_"))
    print("\n".join(["== better or worse than the last time by more than the noise", *(moved or ["nothing"])]))
    if failed:
        raise SystemExit(f"ended with an error: {', '.join(failed)}")
