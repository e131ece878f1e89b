"""The role of a coordinator for hosts on other machines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coterie.errors import RunError, StoppedError
from coterie.experiment.config import Experiment
from coterie.session.tls import Tls
from coterie_deploy.read.folders import is_finished, is_over, nothing_left_of_a_failed_start
from coterie_deploy.read.report import print_report
from coterie_deploy.roles.joining import own_tls
from coterie_deploy.roles.listening import Listening, listening, tell_of_the_end
from coterie_deploy.telemetry.hub_log import RunLog
from coterie_deploy.telemetry.logs import Log, LogFormat, LogLevel, on_console
from coterie_deploy.telemetry.spans import Telemetry, tracing
from coterie_deploy.terminal.signals import Stop, stopping_on_signals
from coterie_deploy.terminal.tables import counted
from coterie_deploy.view.progress import Display, display
from coterie_server.run.coordinator import CHECKPOINTS, RUN_ID, Connect, Options, close_record, coordinate
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import check_address


@dataclass(frozen=True)
class Serve:
    """How an experiment is served, besides its own settings."""

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
    announce: str | None = None  # the name in the address file
    tells: bool = False  # its members, where the run has finished before: they were started with it


def serve_here(experiment: Experiment, how: Serve, out: Console, err: Console, *, quiet: bool) -> None:
    """Serves, and reports at the end unless machines read the log. Raises CoterieError, like `serve`."""
    if was_cut := how.resume and is_over(how.folder) and not is_finished(how.folder):
        close_record(how.folder)  # its hosts may wait for the word
    had_finished = how.resume and is_finished(how.folder)
    if not had_finished:
        with nothing_left_of_a_failed_start(how.folder):
            asyncio.run(serve(experiment, how, err, quiet=quiet))
    if how.log_format is LogFormat.text:
        print_report(how.folder, out)
    if had_finished and (how.tells or was_cut):
        asyncio.run(_tell(experiment, how, err, quiet=quiet))


async def _tell(experiment: Experiment, how: Serve, console: Console, *, quiet: bool) -> None:
    log = role_log(console, how.log_format, how.log_level, quiet=quiet).with_(role="coordinator")
    run_id = (how.folder / CHECKPOINTS / RUN_ID).read_text(encoding="utf-8").strip()
    at = _listening(experiment, how, run_id, own_tls(how.tls, log, is_server=True))
    with stopping_on_signals() as stop:
        await tell_of_the_end(run_id, experiment.federation.hosts, at, log, stop)


async def serve(experiment: Experiment, how: Serve, console: Console, *, quiet: bool) -> None:
    """Serves the run at HOST:PORT to its end. Raises CoterieError; when asked to stop, a RunError that says how to go on."""
    log = role_log(console, how.log_format, how.log_level, quiet=quiet).with_(role="coordinator")
    # Before the run is touched: a resume that cannot be served is no attempt.
    check_address(how.address, is_secure=how.insecure or how.tls is not None)
    tls = own_tls(how.tls, log, is_server=True)
    run_log = RunLog(log, width=console.width if console.is_terminal else None)
    traced = tracing(how.telemetry, "coordinator", console)
    with stopping_on_signals() as stop, display(console, quiet=quiet, log=run_log.log) as shown, traced as tracer:
        options = Options(how.folder, how.resume, how.decisions_of, shown, stop, tracer=tracer, on_event=run_log)
        try:
            await coordinate(experiment, _connect(experiment, how, tls, shown, run_log, stop), options)
        except RunError as error:
            raise with_advice(error, stop, _again(how)) from None


def _again(how: Serve) -> str:
    security = " --insecure" if how.insecure else "" if how.tls is None else f" --tls {how.tls}"
    metrics = "" if how.metrics is None else f" --metrics {how.metrics}"
    announce = "" if how.announce is None else f" --announce {how.announce}"
    return f"coterie server {how.folder} --listen {how.address} --resume{security}{metrics}{announce}"


def role_log(console: Console, log_format: LogFormat, level: LogLevel, *, quiet: bool) -> Log:
    """The log of a role on a console; a quiet one has only errors."""
    return on_console(console, log_format, LogLevel.error if quiet else level)


def with_advice(error: RunError, stop: Stop, command: str) -> RunError:
    """The error; where a signal has stopped the run, with the command that resumes it and the exit code of the signal."""
    if not isinstance(error, StoppedError):
        return error
    stopped = StoppedError(f"{error}: {command}")
    stopped.exit_code = stop.exit_code
    return stopped


def _connect(experiment: Experiment, how: Serve, tls: Tls | None, shown: Display, run_log: RunLog, stop: Stop) -> Connect:
    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        shown.hub = run_log.hub = hub
        async with listening(hub, experiment, _listening(experiment, how, hub.run_id, tls), run_log.log, stop):
            yield

    return connect


def _listening(experiment: Experiment, how: Serve, run_id: str, tls: Tls | None) -> Listening:
    who, expects = f"run {run_id} of {experiment.name}", counted(experiment.federation.hosts, experiment.federation.noun)
    own = (tls, how.insecure, how.metrics, how.folder, how.announce)
    return Listening("coordinator", experiment.name, who, expects, how.folder, how.address, *own)
