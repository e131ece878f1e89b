"""Seconds and peak memory of reading a large text table, as ratios to pyarrow and NumPy alone.

CPU time counts, and not time by the clock: the machine may be busy with other things.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.benchmarks import record
from tests.benchmarks.record import Figure

COLUMNS = 18  # of features, beside user and target
PLAIN = """
import sys, numpy as np, pyarrow.csv as arrow
table = arrow.read_csv(sys.argv[1])
values = np.column_stack([table.column(place).to_numpy() for place in range(1, table.num_columns)]).astype(float)
users = table.column(0).to_numpy(zero_copy_only=False)
"""
OURS = """
import sys
from coterie.experiment.tables import CsvData
from coterie_client.data import load_users
users = load_users(CsvData(source="csv", path=sys.argv[1], user_column="user", target_column="y"), 0, None)
assert len(users) == 1000
"""


def write(path: Path, n_rows: int) -> None:
    """Users one after the other, numbers of six decimals."""
    draws = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        file.write("user," + ",".join(f"x{place}" for place in range(COLUMNS)) + ",y\n")
        for start in range(0, n_rows, 10_000):
            rows = draws.normal(size=(min(10_000, n_rows - start), COLUMNS)).round(6).tolist()
            file.writelines(f"u{(start + row) % 1000},{','.join(map(repr, cells))},{row % 7}\n" for row, cells in enumerate(rows))


def measured(code: str, *arguments: str) -> tuple[float, float]:
    """(CPU seconds, peak resident MB) of a process that ends well."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        raise SystemExit(f"a process ended with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def figures(rows: int = 1_000_000, repeats: int = 3) -> Iterator[Figure]:
    """In turn: pyarrow.csv with numpy, and `load_users`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.csv")
        write(path, rows)
        file_mb = path.stat().st_size / 2**20
        both = [(measured(PLAIN, str(path)), measured(OURS, str(path))) for _ in range(repeats)]
    yield Figure("pyarrow.csv and numpy", "CPU s", [plain for (plain, _), _ in both], None)
    yield Figure("load_users", "CPU s", [ours for _, (ours, _) in both])
    yield Figure("load_users, of pyarrow.csv and numpy", "times", [ours / plain for (plain, _), (ours, _) in both], wanted=10)
    yield Figure("pyarrow.csv and numpy, peak memory", "of file", [peak / file_mb for (_, peak), _ in both], None)
    yield Figure("load_users, peak memory", "of file", [peak / file_mb for _, (_, peak) in both], wanted=4)


if __name__ == "__main__":
    record.main(figures)
