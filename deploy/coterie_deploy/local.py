"""`coterie run` and `coterie server` around the run itself: display, signals, the report at the end, and what a failed start leaves."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from coterie.config import Experiment
from coterie.errors import ConfigError, RunError
from coterie_deploy.launch import Launch, launch
from coterie_deploy.progress import display
from coterie_deploy.report import print_report
from coterie_deploy.server import Serve, serve, with_advice
from coterie_deploy.signals import stopping_on_signals
from coterie_server import summary
from coterie_server.rundb import open_run


def run_here(experiment: Experiment, how: Launch, out: Console, err: Console, *, quiet: bool) -> None:
    """Runs and reports. Raises CoterieError; a run that was asked to stop ends with a RunError that says how to go on."""
    assert how.folder is not None  # noqa: S101 - the command line always has one
    if not (how.resume and is_finished(how.folder)):
        with nothing_left_of_a_failed_start(how.folder):
            asyncio.run(_run(experiment, how, err, quiet=quiet))
    print_report(how.folder, out)


async def _run(experiment: Experiment, how: Launch, err: Console, *, quiet: bool) -> None:
    with stopping_on_signals() as stop, display(err, quiet=quiet) as shown:

        def show_hub(hub: object) -> None:
            shown.hub = hub  # type: ignore[assignment]

        try:
            await launch(experiment, replace(how, observer=shown, stop=stop, on_hub=show_hub))
        except RunError as error:
            raise with_advice(error, stop, f"coterie run {how.folder} --resume") from None


def serve_here(experiment: Experiment, how: Serve, out: Console, err: Console, *, quiet: bool) -> None:
    """Serves and reports, like `run_here`."""
    if not (how.resume and is_finished(how.folder)):
        with nothing_left_of_a_failed_start(how.folder):
            asyncio.run(serve(experiment, how, err, quiet=quiet))
    print_report(how.folder, out)


def is_finished(folder: Path) -> bool:
    """Whether there is nothing to resume, only to report."""
    try:
        with contextlib.closing(open_run(folder)) as connection:
            return summary.facts(connection).get("status") == "finished"
    except (ConfigError, sqlite3.Error):
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
        with contextlib.closing(open_run(folder)) as connection:
            return summary.has_rounds(connection)
    except (ConfigError, sqlite3.Error):
        return False
