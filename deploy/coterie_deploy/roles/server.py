"""The role of a coordinator for hosts on other machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_to_json
from coterie.session.tls import load_tls
from coterie_deploy.read.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.read.report import print_report
from coterie_deploy.telemetry.hub_log import RunLog
from coterie_deploy.telemetry.logs import Log, LogFormat, LogLevel, on_console
from coterie_deploy.telemetry.metrics_server import Metrics, metrics_served
from coterie_deploy.telemetry.spans import Telemetry, tracing
from coterie_deploy.terminal.signals import Stop, stopping_on_signals
from coterie_deploy.terminal.tables import counted
from coterie_deploy.view.progress import Display, display
from coterie_server.run.coordinator import Connect, Options, coordinate
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import plain_text, serving


@dataclass(frozen=True)
class Serve:
    """How an experiment is served, beside what it says itself."""

    folder: Path
    address: str
    insecure: bool = False
    tls: Path | None = None  # the folder of its certificate
    resume: bool = False
    decisions_of: Path | None = None
    telemetry: Telemetry | None = None
    metrics: str | None = None  # HOST:PORT
    log_format: LogFormat = LogFormat.text
    log_level: LogLevel = LogLevel.info


def serve_here(experiment: Experiment, how: Serve, out: Console, err: Console, *, quiet: bool) -> None:
    """Serves, and reports at the end, unless machines read what is said. Raises CoterieError, like `serve`."""
    if not (how.resume and is_finished(how.folder)):
        with nothing_left_of_a_failed_start(how.folder):
            asyncio.run(serve(experiment, how, err, quiet=quiet))
    if how.log_format is LogFormat.text:
        print_report(how.folder, out)


async def serve(experiment: Experiment, how: Serve, console: Console, *, quiet: bool) -> None:
    """Serves the run at HOST:PORT to its end. Raises CoterieError; when asked to stop, a RunError that says how to go on."""
    log = role_log(console, how.log_format, how.log_level, quiet=quiet).with_(role="coordinator")
    run_log = RunLog(log, width=console.width if console.is_terminal else None)
    traced = tracing(how.telemetry, "coordinator", console)
    with stopping_on_signals() as stop, display(console, quiet=quiet, log=run_log.log) as shown, traced as tracer:
        options = Options(how.folder, how.resume, how.decisions_of, shown, stop, tracer=tracer, on_event=run_log)
        try:
            await coordinate(experiment, _connect(experiment, how, shown, run_log, stop), options)
        except RunError as error:
            raise with_advice(error, stop, _again(how)) from None


def _again(how: Serve) -> str:
    security = " --insecure" if how.insecure else "" if how.tls is None else f" --tls {how.tls}"
    metrics = "" if how.metrics is None else f" --metrics {how.metrics}"
    return f"coterie server {how.folder} --listen {how.address} --resume{security}{metrics}"


def role_log(console: Console, log_format: LogFormat, level: LogLevel, *, quiet: bool) -> Log:
    """The log of a role on a console; a quiet one says what is an error."""
    return on_console(console, log_format, LogLevel.error if quiet else level)


def with_advice(error: RunError, stop: Stop, command: str) -> RunError:
    """The error itself, or when the run was asked to stop the same with the command that goes on."""
    return RunError(f"{error}: {command}") if stop.is_set() else error


def _connect(experiment: Experiment, how: Serve, shown: Display, run_log: RunLog, stop: Stop) -> Connect:
    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        shown.hub = run_log.hub = hub
        log, rules = run_log.log, hub.rules
        tls = None if how.tls is None else load_tls(how.tls, is_server=True)
        metrics = None if how.metrics is None else Metrics(how.metrics, tls, how.insecure, stop)
        async with (
            metrics_served(metrics, hub, how.folder, "coordinator", experiment.name) as url,
            serving(hub, experiment_to_json(experiment), how.address, tls, insecure=how.insecure) as server,
        ):
            if how.insecure and tls is None:
                log.say("insecure", f"warning: {plain_text(how.address)}", LogLevel.warning)
            if url is not None:
                log.say("metrics", f"metrics are at {url}", url=url)
            place = f"{how.address.rpartition(':')[0]}:{server.port}"
            sentence = f"run {hub.run_id} of {experiment.name} listens on {place} for {counted(rules.hosts, rules.noun)}"
            log.say("listen", sentence, address=place)
            yield

    return connect
