"""`coterie run`: a run with its display, signals, and the report at the end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from rich.console import Console

from coterie.errors import RunError
from coterie.experiment.config import Experiment
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.read.report import print_report
from coterie_deploy.roles.server import role_log, with_advice
from coterie_deploy.telemetry.hub_log import RunLog
from coterie_deploy.telemetry.logs import NOTE, LogFormat, LogLevel
from coterie_deploy.telemetry.metrics_server import Metrics, metrics_served
from coterie_deploy.telemetry.spans import tracing
from coterie_deploy.terminal.signals import stopping_on_signals
from coterie_deploy.view.progress import display
from coterie_server.session.hub import Hub


@dataclass(frozen=True)
class Watched:
    """How a run is observed from outside: by Prometheus at HOST:PORT, and by its log."""

    metrics: str | None = None
    log_format: LogFormat = LogFormat.text
    log_level: LogLevel | None = None  # None: of a run for a person, its progress, and events from warnings on; otherwise info


def run_here(experiment: Experiment, how: Launch, out: Console, err: Console, *, quiet: bool, watched: Watched | None = None) -> None:
    """Runs, and reports unless machines read the log. Raises CoterieError; a stopped run raises a RunError that says how to go on."""
    assert how.folder is not None  # noqa: S101 - the command line always has one
    if not (how.resume and is_finished(how.folder)):
        with nothing_left_of_a_failed_start(how.folder):
            asyncio.run(_run(experiment, how, err, watched or Watched(), quiet=quiet))
    if watched is None or watched.log_format is LogFormat.text:
        print_report(how.folder, out)


async def _run(experiment: Experiment, how: Launch, err: Console, watched: Watched, *, quiet: bool) -> None:
    assert how.folder is not None  # noqa: S101 - as above
    folder = how.folder
    log = role_log(err, watched.log_format, watched.log_level or LogLevel.info, quiet=quiet).with_(role="coordinator")
    is_plain = watched.log_level is None and not log.is_json
    width = err.width if err.is_terminal else None
    run_log = RunLog(replace(log, level=LogLevel.warning) if is_plain and log.says(LogLevel.warning) else log, log, width)
    log = log.with_(where=run_log.where)
    with stopping_on_signals() as stop, display(err, quiet=quiet, log=log) as shown, tracing(how.telemetry, "coordinator", err) as tracer:

        @contextlib.asynccontextmanager
        async def beside(hub: Hub) -> AsyncIterator[None]:
            shown.hub = run_log.hub = hub
            metrics = None if watched.metrics is None else Metrics(watched.metrics, stop=stop)
            async with metrics_served(metrics, hub, folder, "coordinator", experiment.name) as url:
                if url is not None:
                    log.say("metrics", f"metrics are at {url}", url=url)
                yield

        def on_note(sentence: str) -> None:
            log.say("note", f"{NOTE}{sentence}")

        how_shown = replace(how, observer=shown, stop=stop, beside=beside, on_event=run_log, on_note=on_note, tracer=tracer)
        try:
            await launch(experiment, how_shown)
        except RunError as error:
            again = f"coterie run {how.folder} --resume{how.again}" + ("" if watched.metrics is None else f" --metrics {watched.metrics}")
            raise with_advice(error, stop, again) from None
