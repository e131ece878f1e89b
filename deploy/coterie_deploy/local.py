"""`coterie run` around the run itself: display, signals, and the report at the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rich.console import Console

from coterie.config import Experiment
from coterie.errors import RunError
from coterie_deploy.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.launch import Launch, launch
from coterie_deploy.progress import display
from coterie_deploy.report import print_report
from coterie_deploy.server import with_advice
from coterie_deploy.signals import stopping_on_signals
from coterie_deploy.telemetry import tracing


def run_here(experiment: Experiment, how: Launch, out: Console, err: Console, *, quiet: bool) -> None:
    """Runs and reports. Raises CoterieError; a run that was asked to stop ends with a RunError that says how to go on."""
    assert how.folder is not None  # noqa: S101 - the command line always has one
    if not (how.resume and is_finished(how.folder)):
        with nothing_left_of_a_failed_start(how.folder):
            asyncio.run(_run(experiment, how, err, quiet=quiet))
    print_report(how.folder, out)


async def _run(experiment: Experiment, how: Launch, err: Console, *, quiet: bool) -> None:
    with stopping_on_signals() as stop, display(err, quiet=quiet) as shown, tracing(how.telemetry, "coordinator", err) as tracer:

        def show_hub(hub: object) -> None:
            shown.hub = hub  # type: ignore[assignment]

        try:
            await launch(experiment, replace(how, observer=shown, stop=stop, on_hub=show_hub, tracer=tracer))
        except RunError as error:
            raise with_advice(error, stop, f"coterie run {how.folder} --resume") from None
