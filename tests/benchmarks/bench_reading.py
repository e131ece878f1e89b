"""Seconds and peak memory of reading a large text table, with and without pyarrow, as ratios to pyarrow and NumPy alone.

Usage:  python -m tests.benchmarks.bench_reading [ROWS]      (1,000,000 rows of 20 columns by default)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

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
from coterie_client.data.tables import csv_arrow
if sys.argv[2] == "without":
    csv_arrow.LARGE_BYTES = 1 << 62
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
    """(CPU seconds, peak resident MB) of a process that ends well: the machine may be busy with other things."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        raise SystemExit(f"a process ended with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Prints the table."""
    n_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.csv")
        write(path, n_rows)
        file_mb = path.stat().st_size / 2**20
        plain = measured(PLAIN, str(path))
        print(f"{n_rows} rows x {COLUMNS + 2} columns, {file_mb:.0f} MB     CPU s   ratio   peak MB   of the file")
        print(f"  pyarrow.csv and numpy            {plain[0]:7.2f}   {1:5.2f}   {plain[1]:7.0f}   {plain[1] / file_mb:5.2f}")
        for how, wanted in (("with", 3), ("without", 10)):
            seconds, peak_mb = measured(OURS, str(path), how)
            ratios = f"{seconds / plain[0]:5.2f}   {peak_mb:7.0f}   {peak_mb / file_mb:5.2f}"
            print(f"  load_users {how + ' pyarrow':<15}       {seconds:7.2f}   {ratios}   (wanted: under {wanted} and 4)")


if __name__ == "__main__":
    main()
