"""Small runs for the tests of what looks at runs. Nothing here is tested itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from coterie_deploy.cli import app as cli

ROWS = [
    ("u0", 0.9, 0.1, 1), ("u0", -0.8, 0.3, -1), ("u0", 0.4, -0.2, 1), ("u0", -0.1, 0.5, 1), ("u0", 0.2, 0.2, -1),
    ("u1", 0.7, -0.4, 1), ("u1", -0.9, 0.2, -1), ("u1", 0.1, 0.1, -1), ("u1", 0.3, 0.6, 1), ("u1", -0.2, -0.1, 1),
    ("u2", 0.5, 0.4, 1), ("u2", -0.6, -0.3, -1), ("u2", 0.2, -0.5, -1), ("u2", -0.3, 0.1, 1), ("u2", 0.1, 0.7, 1),
]  # fmt: skip
EXPERIMENT = """
name: small
data: {source: csv, path: rows.csv, user_column: user, target_column: y, feature_columns: [a, b], standardize: true}
problem: {loss: logistic, l2: 0.01}
method: {name: pdmm, penalty: 0.05}
stop: {rounds: 40, residual: 1.0e-12}
references: [local]
"""


def write_experiment(folder: Path) -> Path:
    """A small experiment with its table; its file."""
    (folder / "rows.csv").write_text("user,a,b,y\n" + "".join(f"{','.join(map(str, row))}\n" for row in ROWS))
    (folder / "small.yaml").write_text(EXPERIMENT)
    return folder / "small.yaml"


def make_run(folder: Path, output: Path, *options: str) -> Path:
    """A finished run in `output`, made in this process."""
    experiment = write_experiment(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert cli._run(["run", str(experiment), "--transport", "loopback", "--quiet", "--output", str(output), *options]) == 0
    return output


def as_table(connection: sqlite3.Connection) -> None:
    """Turns the view that is the ledger into a table, so that a test can change rows of it."""
    connection.executescript("CREATE TABLE changed AS SELECT * FROM ledger; DROP VIEW ledger; ALTER TABLE changed RENAME TO ledger")
