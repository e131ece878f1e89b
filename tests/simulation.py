"""Runs in one process with faults, of which the product has the machinery, and what tests look at in them.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from coterie_deploy.studies.check.federations import small_experiment
from coterie_deploy.studies.check.world import CoordinatorKilledError, Faults, World, random_faults
from coterie_server.run.coordinator import Finished


def bits(finished: Finished) -> dict[str, bytes]:
    """All final models, to the bit."""
    return {name: outcome.models.tobytes() for name, outcome in finished.outcomes.items() if outcome.models is not None}


def query(folder: Path, sql: str) -> list[Any]:
    """Rows of the run's database."""
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection:
        return connection.execute(sql).fetchall()


__all__ = ["CoordinatorKilledError", "Faults", "World", "bits", "query", "random_faults", "small_experiment"]
