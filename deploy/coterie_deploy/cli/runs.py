"""The commands that run an experiment, or a part of it: on this machine, and each role on a machine of its own."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie_deploy.cli import options
from coterie_deploy.cli.options import app, console_on
from coterie_deploy.telemetry.logs import Log, LogFormat, LogLevel


@app.command()
def experiments() -> None:
    """List the shipped experiments."""
    from coterie_client.data import count_users
    from coterie_deploy.read.shipped import load, shipped
    from coterie_deploy.terminal.tables import count, table

    rows = []
    for name in shipped():
        loaded = load(name)
        first = " ".join(loaded.description.split()).partition(". ")[0].rstrip(".")
        rows.append([name, loaded.method.name, count(count_users(loaded.data, loaded.seed)), first])
    built = table("Shipped experiments", ["name", "method", "users", "description"], rows, n_text=2)
    built.columns[0].no_wrap = True
    built.columns[3].justify, built.columns[3].no_wrap = "left", False
    console_on().print(built)


@app.command()
def run(
    experiment: options.ExperimentName,
    hosts: Annotated[int | None, typer.Option(min=1, help="[default: 4, loopback 1]")] = None,
    transport: options.Transport = "grpc",
    topology: options.Topology = None,
    overrides: options.Overrides = None,
    output: options.Output = None,
    resume: options.Resume = False,
    replay_decisions: options.Replay = None,
    seed: options.Seed = None,
    data: options.Data = None,
    quiet: options.Quiet = False,
    trace: options.Trace = False,
    otlp: options.Otlp = None,
    trace_every: options.TraceEvery = None,
    metrics: options.MetricsAddress = None,
    log_format: options.LogFormatName = LogFormat.text,
    log_level: Annotated[
        LogLevel | None, typer.Option("--log-level", help="What is said.  [default: progress and warnings; json info]")
    ] = None,
) -> None:
    """Run an experiment on this machine: a coordinator, the clusters' aggregators if there are any, and the client hosts."""
    from coterie_deploy.engines.launch import Launch, default_hosts
    from coterie_deploy.engines.local import Watched, run_here
    from coterie_deploy.read.cautions import links_caution
    from coterie_deploy.read.shipped import choose, load
    from coterie_deploy.telemetry.spans import telemetry

    if topology is None and transport == "loopback" and load(experiment, overrides or ()).federation.is_two_tier:
        topology = "flat"  # one process has one tier; the bits are the same
    chosen = choose(
        experiment,
        options.with_topology(overrides, topology),
        seed=seed,
        hosts=hosts,
        default_hosts=lambda wanted: default_hosts(wanted, transport, data),
        output=output,
        resume=resume,
    )
    _say(chosen.note)
    _say(links_caution(chosen.experiment, transport))
    traced = telemetry(trace, otlp, trace_every)
    how = Launch(transport, chosen.folder, data, resume=resume, decisions_of=replay_decisions, telemetry=traced)
    watched = Watched(metrics, log_format, log_level)
    run_here(chosen.experiment, how, console_on(), console_on(stderr=True), quiet=quiet, watched=watched)


@app.command()
def server(
    experiment: options.ExperimentName,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where hosts find this server.")],
    hosts: Annotated[int | None, typer.Option(min=1, help="How many join.  [default: the experiment's]")] = None,
    topology: options.Topology = None,
    overrides: options.Overrides = None,
    output: options.Output = None,
    resume: options.Resume = False,
    replay_decisions: options.Replay = None,
    seed: options.Seed = None,
    tls: options.TlsFolder = None,
    insecure: options.Insecure = False,
    or_resume: Annotated[bool, typer.Option("--or-resume", help="Start, or go on with the run in the run folder.")] = False,
    quiet: options.Quiet = False,
    trace: options.Trace = False,
    otlp: options.Otlp = None,
    trace_every: options.TraceEvery = None,
    metrics: options.MetricsAddress = None,
    log_format: options.LogFormatName = LogFormat.text,
    log_level: options.LogLevelName = LogLevel.info,
) -> None:
    """Coordinate a run whose hosts are elsewhere. SIGTERM: checkpoint, exit code 3."""
    from coterie_deploy.read.shipped import choose, has_started
    from coterie_deploy.roles.server import Serve, serve_here
    from coterie_deploy.telemetry.spans import telemetry

    resume = resume or (or_resume and has_started(experiment, output))
    chosen = choose(
        experiment,
        options.with_topology(overrides, topology),
        seed=seed,
        hosts=hosts,
        default_hosts=lambda _: 1,
        output=output,
        resume=resume,
        command=f"server --listen {listen}",
    )
    _say(chosen.note)
    traced = telemetry(trace, otlp, trace_every)
    how = Serve(chosen.folder, listen, insecure, tls, resume, replay_decisions, traced, metrics, log_format, log_level)
    serve_here(chosen.experiment, how, console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def client(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator.")],
    users: Annotated[str | None, typer.Option(help="u1,u4-u9, or positions: #0-#19.  [default: all]")] = None,
    cluster: Annotated[str | None, typer.Option(help="All users of this known cluster.")] = None,
    name: Annotated[str | None, typer.Option(metavar="HOST", help="[default: the machine's and which users]")] = None,
    data: options.Data = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="What a restart needs.")] = Path("coterie-state"),
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Without a server.")] = 60.0,
    tls: options.TlsFolder = None,
    insecure: options.Insecure = False,
    allow_code: options.AllowCode = False,
    accept: options.Accept = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What its owner allows.  [default: policy.yaml with the data]"),
    ] = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    log_format: options.LogFormatName = LogFormat.text,
    log_level: options.LogLevelName = LogLevel.info,
) -> None:
    """Serve some users in the run of a server. SIGTERM: state is written down, exit code 143."""
    from coterie.text.names import normal
    from coterie_deploy.roles.client import Client, run_client

    if allow_code or launched:
        options.import_from_here()
    if users is not None and cluster is not None:
        raise typer.BadParameter("--users and --cluster both choose users, want one of the two")
    log = Log(log_format, log_level)
    chosen = Client(
        server, users, name, data, state, patience, insecure, launched, allow_code, cluster and normal(cluster), tls, log, accept, policy
    )
    raise typer.Exit(run_client(chosen))


@app.command()
def aggregator(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator.")],
    cluster: Annotated[str, typer.Option(help="Whose users its hosts bring.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the cluster's hosts find it.")],
    hosts: Annotated[int | None, typer.Option(min=1, help="How many join.  [default: the experiment's]")] = None,
    name: Annotated[str | None, typer.Option(help="[default: the cluster's]")] = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="What a restart needs.")] = Path("coterie-state"),
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Without a coordinator.")] = 60.0,
    tls: options.TlsFolder = None,
    insecure: options.Insecure = False,
    trace: options.Trace = False,
    otlp: options.Otlp = None,
    trace_every: options.TraceEvery = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    allow_code: options.AllowCode = False,
    metrics: options.MetricsAddress = None,
    log_format: options.LogFormatName = LogFormat.text,
    log_level: options.LogLevelName = LogLevel.info,
) -> None:
    """Stand between a coordinator and the hosts of one known cluster. SIGTERM: state is written down, exit code 143."""
    from coterie.text.names import normal
    from coterie_deploy.roles.aggregator import AggregatorRole, run_aggregator
    from coterie_deploy.telemetry.spans import telemetry

    if allow_code or launched:
        options.import_from_here()
    traced = telemetry(trace, otlp, trace_every)
    log = Log(log_format, log_level)
    role = AggregatorRole(
        server, normal(cluster), listen, hosts, name, state, patience, insecure, tls, launched, traced, metrics, log, allow_code
    )
    raise typer.Exit(run_aggregator(role))


@app.command()
def health(
    server: Annotated[str | None, typer.Argument(metavar="[HOST:PORT]", help="A coordinator or an aggregator.")] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Instead: a client's state folder.")] = None,
    tls: options.TlsFolder = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1)] = 5.0,
) -> None:
    """Ask whether a server serves its run, or whether a client is alive: exit code 0, or 3. For probes of containers."""
    from coterie.session.tls import load_tls
    from coterie_deploy.roles.health import check

    typer.echo(check(server, state, None if tls is None else load_tls(tls, is_server=False), timeout))


def _say(note: str) -> None:
    if note:
        typer.echo(f"note: {note}", err=True)
