"""The program, and the options that several commands have."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coterie_deploy.telemetry.logs import LogFormat, LogLevel

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Personalized federated learning over gRPC, with every byte of communication accounted for.",
)


Transport = Annotated[Literal["grpc", "loopback"], typer.Option(help="Processes over gRPC, or all in this process.")]
ExperimentName = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Shipped name, YAML file or run folder.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the experiment: method.penalty=0.05.")]
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder.  [default: runs/NAME]")]
Seed = Annotated[int | None, typer.Option(min=0, help="Replaces the experiment's.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the run folder.")]
Replay = Annotated[Path | None, typer.Option(metavar="RUN", help="Repeat the time-dependent decisions of that run.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Where data paths start.  [default: here]")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Topology = Annotated[
    Literal["flat", "clusters"] | None,
    typer.Option(
        help="Who joins the coordinator: client hosts, or an aggregator a cluster.  [default: the experiment's]", show_default=False
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plain text beyond this machine.")]
TlsFolder = Annotated[Path | None, typer.Option("--tls", metavar="DIR", help="Its certificate: ca.crt, tls.crt, tls.key.")]
Trace = Annotated[bool, typer.Option("--trace", help="Spans to an OpenTelemetry collector.")]
Otlp = Annotated[str | None, typer.Option(metavar="URL", help="Where it is.  [default: OTEL_EXPORTER_OTLP_ENDPOINT]")]
TraceEvery = Annotated[int | None, typer.Option(min=1, metavar="N", help="Every Nth round.  [default: ever fewer]")]
MetricsAddress = Annotated[str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Where Prometheus finds metrics.")]
LogFormatName = Annotated[LogFormat, typer.Option("--log-format", help="Sentences, or a JSON object a line.")]
LogLevelName = Annotated[LogLevel, typer.Option("--log-level", help="What is said.")]
Accept = Annotated[
    str | None,
    typer.Option(metavar="HASH|any", help="The experiment to serve: coterie data EXPERIMENT --hash.  [default: asks]"),
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


def console_on(*, stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)
