"""The role of a coordinator for hosts on other machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coterie.config import Experiment, experiment_to_json
from coterie.errors import RunError
from coterie.tls import load_tls
from coterie_deploy.folders import is_finished, nothing_left_of_a_failed_start
from coterie_deploy.handshakes import handshakes_reported
from coterie_deploy.printable import printable
from coterie_deploy.progress import Display, display
from coterie_deploy.report import print_report
from coterie_deploy.signals import Stop, stopping_on_signals
from coterie_deploy.tables import counted
from coterie_deploy.telemetry import Telemetry, tracing
from coterie_server.coordinator import Connect, Options, coordinate
from coterie_server.hub import Hub
from coterie_server.serve import plain_text, serving

_LOOK_EVERY_S = 0.25


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


def serve_here(experiment: Experiment, how: Serve, out: Console, err: Console, *, quiet: bool) -> None:
    """Serves, and reports at the end. Raises CoterieError, like `serve`."""
    if not (how.resume and is_finished(how.folder)):
        with nothing_left_of_a_failed_start(how.folder):
            asyncio.run(serve(experiment, how, err, quiet=quiet))
    print_report(how.folder, out)


async def serve(experiment: Experiment, how: Serve, console: Console, *, quiet: bool) -> None:
    """Serves the run at HOST:PORT to its end. Raises CoterieError; when asked to stop, a RunError that says how to go on."""
    with stopping_on_signals() as stop, display(console, quiet=quiet) as shown, tracing(how.telemetry, "coordinator", console) as tracer:
        options = Options(how.folder, how.resume, how.decisions_of, shown, stop, tracer=tracer)
        try:
            await coordinate(experiment, _connect(experiment, how, shown, quiet=quiet), options)
        except RunError as error:
            raise with_advice(error, stop, _again(how)) from None


def _again(how: Serve) -> str:
    security = " --insecure" if how.insecure else "" if how.tls is None else f" --tls {how.tls}"
    return f"coterie server {how.folder} --listen {how.address} --resume{security}"


def with_advice(error: RunError, stop: Stop, command: str) -> RunError:
    """The error itself, or when the run was asked to stop the same with the command that goes on."""
    return RunError(f"{error}: {command}") if stop.is_set() else error


def _connect(experiment: Experiment, how: Serve, shown: Display, *, quiet: bool) -> Connect:
    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        shown.hub, rules = hub, hub.rules
        tls = None if how.tls is None else load_tls(how.tls, is_server=True)
        async with (
            handshakes_reported(hub, tls, lambda sentence: _say(shown, sentence)),
            serving(hub, experiment_to_json(experiment), how.address, tls, insecure=how.insecure) as server,
        ):
            if how.insecure and tls is None and not quiet:
                _say(shown, f"warning: {plain_text(how.address)}")
            place = f"{how.address.rpartition(':')[0]}:{server.port}"
            if quiet:
                yield
                return
            _say(shown, f"run {hub.run_id} of {experiment.name} listens on {place} for {counted(rules.hosts, rules.noun)}")
            reporting = asyncio.create_task(_report_hosts(hub, shown))
            try:
                yield
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)

    return connect


async def _report_hosts(hub: Hub, shown: Display) -> None:
    """Says who comes and goes, who is turned away why, and who is waited for or left out."""
    here: set[str] = set()
    refused: dict[str, str] = {}
    notice = ""
    noun, of_all = hub.rules.noun, f"of {counted(hub.rules.hosts, hub.rules.noun)}"
    while True:
        now = {host.name for host in list(hub.hosts.values()) if host.link is not None}
        for name in sorted(here - now):
            here.remove(name)
            if not hub.is_over:
                _say(shown, f"{noun} {name!r} is gone: {len(here)} {of_all} left")
        for name in sorted(now - here):
            here.add(name)
            _say(shown, f"{noun} {name!r} is here with {counted(len(hub.hosts[name].users), 'user')}: {len(here)} {of_all}")
        for reason in (reason for name, reason in hub.refused.items() if refused.get(name) != reason):
            _say(shown, reason)
        if hub.notice != notice:
            _say(shown, hub.notice)
        refused, notice = dict(hub.refused), hub.notice
        await asyncio.sleep(_LOOK_EVERY_S)


def _say(shown: Display, sentence: str) -> None:
    shown.console.print(printable(sentence), markup=False, highlight=False, soft_wrap=True)
