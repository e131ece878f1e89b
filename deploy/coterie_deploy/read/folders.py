"""Run folders before and after a run: whether its run has finished, and clean-up after a failed start."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from coterie.errors import ConfigError, RunError
from coterie_server.record import summary
from coterie_server.record.rundb import read_run
from coterie_server.run.coordinator import OVER


def is_finished(folder: Path) -> bool:
    """Whether the folder has a finished run: nothing to resume."""
    return _answer(folder, lambda connection: summary.facts(connection).get("status") == "finished")


def is_over(folder: Path) -> bool:
    """Whether the hosts of the folder's run may have heard that it has finished, so that they do not come back."""
    return _answer(folder, lambda connection: bool(summary.facts(connection).get(OVER)))


@contextlib.contextmanager
def nothing_left_of_a_failed_start(folder: Path) -> Iterator[None]:
    """Removes a new run folder if the experiment turns out wrong before the first round, so that the corrected command can use it."""
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except ConfigError:
        if is_new and not _answer(folder, summary.has_rounds):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[None]:
    """The block starts a run in the folder anew. An earlier run there is deleted at the end, and is back if the new one has not begun.

    ConfigError if a killed command has left an even earlier run.
    """
    aside = folder.with_name(f".{folder.name}.replaced")
    if folder.is_dir():
        if aside.exists():
            raise ConfigError(f"{aside} has an earlier run, which a killed --overwrite has left: want it moved away or deleted first")
        folder.rename(aside)
    try:
        yield
    finally:
        if aside.is_dir() and not folder.exists():
            aside.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)


def _answer(folder: Path, question: Callable[[sqlite3.Connection], bool]) -> bool:
    """The answer of the run database; False if there is none."""
    try:
        with read_run(folder) as connection:
            return question(connection)
    except (ConfigError, RunError):
        return False
