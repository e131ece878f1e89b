"""The program, and the options that several commands have."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coterie_deploy.cli.help import GroupedCommands
from coterie_deploy.telemetry.logs import LogFormat, LogLevel

app = typer.Typer(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Personalized federated learning over gRPC, with every byte of communication accounted for.",
    epilog="coterie help COMMAND, or COMMAND -h, shows the options of a command. "
    "coterie help NAME explains the keys of a method, a data source, a model or a section such as stop.",
)


Transport = Annotated[Literal["grpc", "loopback"], typer.Option(help="Processes over gRPC, or all in this process.")]


def _shipped_like(incomplete: str) -> list[str]:
    """For the completion of shells: it must be fast, so nothing is read. Without a match, shells offer files."""
    names = sorted(path.stem for path in (Path(__file__).parents[1] / "experiments").glob("*.yaml"))
    return [name for name in names if name.startswith(incomplete)]


ExperimentName = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="Shipped name, YAML file or run folder.", autocompletion=_shipped_like)
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the experiment: method.penalty=0.05.")]
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder.  [default: runs/NAME]")]
Seed = Annotated[int | None, typer.Option(min=0, help="Replaces the experiment's.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the run folder.")]
Replay = Annotated[Path | None, typer.Option(metavar="RUN", help="Repeat the time-dependent decisions of that run.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Data paths are relative to it.  [default: here]")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", envvar="COTERIE_JOBS", show_default=False, help="Runs at a time.  [default: one for each core, grpc 1]"
    ),
]
Topology = Annotated[
    Literal["flat", "clusters", "peers"] | None,
    typer.Option(help="Client hosts join, or aggregators, or these average as peers.  [default: the experiment's]", show_default=False),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plain text beyond this machine.")]
TlsFolder = Annotated[Path | None, typer.Option("--tls", metavar="DIR", help="Its certificate: ca.crt, tls.crt, tls.key.")]
TlsName = Annotated[str | None, typer.Option("--tls-name", metavar="NAME", help="In its certificate, instead of HOST.")]
Announce = Annotated[str | None, typer.Option(metavar="HOST", help="As others dial it.  [default: --listen's, or this machine]")]
Trace = Annotated[bool, typer.Option("--trace", help="Spans to an OpenTelemetry collector.")]
Otlp = Annotated[str | None, typer.Option(metavar="URL", help="Where it is.  [default: OTEL_EXPORTER_OTLP_ENDPOINT]")]
TraceEvery = Annotated[int | None, typer.Option(min=1, metavar="N", help="Every Nth round.  [default: ever fewer]")]
MetricsAddress = Annotated[str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus here.")]
LogFormatName = Annotated[LogFormat, typer.Option("--log-format", help="Sentences, or a JSON object per line.")]
LogLevelName = Annotated[LogLevel, typer.Option("--log-level", help="The least important level.")]
Accept = Annotated[
    str | None, typer.Option(metavar="HASH|any", help="The experiment to serve: coterie data EXPERIMENT --hash.  [default: asks]")
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Let the experiment name code to import here.")]


@app.callback(invoke_without_command=True)
def coterie(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Personalized federated learning over gRPC, with every byte of communication accounted for."""
    if version:
        from coterie import __version__

        typer.echo(f"coterie {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif context.invoked_subcommand not in ("client", "aggregator"):  # which decide by their own options
        import_from_here()


def import_from_here() -> None:
    """Losses and sources of data that an experiment names by import path may be in the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def with_topology(overrides: list[str] | None, topology: str | None) -> list[str]:
    return [*(overrides or ()), *([] if topology is None else [f"federation.topology={topology}"])]


def say_note(note: str) -> None:
    """A line on standard error for the person who started the command; none for ""."""
    if note:
        typer.echo(f"note: {note}", err=True)


def console_on(*, stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)
