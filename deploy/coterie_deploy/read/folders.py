"""Run folders around a run: is there anything left to do in one, and what a failed start leaves of it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from coterie.errors import ConfigError, RunError
from coterie_server.record import summary
from coterie_server.record.rundb import read_run


def is_finished(folder: Path) -> bool:
    """Whether there is nothing to resume, only to report."""
    try:
        with read_run(folder) as connection:
            return summary.facts(connection).get("status") == "finished"
    except (ConfigError, RunError):
        return False


@contextlib.contextmanager
def nothing_left_of_a_failed_start(folder: Path) -> Iterator[None]:
    """Takes a new run folder away when the experiment is wrong before its first round: the corrected command finds it free."""
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except ConfigError:
        if is_new and not _has_rounds(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _has_rounds(folder: Path) -> bool:
    try:
        with read_run(folder) as connection:
            return summary.has_rounds(connection)
    except (ConfigError, RunError):
        return False
