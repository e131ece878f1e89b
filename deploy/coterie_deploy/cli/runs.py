"""The commands that run an experiment, or a part of it: on this machine, and each role on a machine of its own."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from coterie_deploy.cli import jobs, options
from coterie_deploy.cli.options import app, console_on, say_note
from coterie_deploy.telemetry.logs import Log, LogFormat, LogLevel


@app.command()
def experiments() -> None:
    """List the shipped experiments."""
    from coterie_client.data import count_users
    from coterie_deploy.read.shipped import load, shipped
    from coterie_deploy.terminal.tables import count, is_tiny, say_left_out, table

    rows = []
    for name in shipped():
        loaded = load(name)
        first = " ".join(loaded.description.split()).partition(". ")[0].rstrip(".")
        rows.append([name, loaded.method.name, count(count_users(loaded.data, loaded.seed)), first])
    console = console_on()
    left_out = ["method", "users"] if is_tiny(console) else []
    if left_out:
        rows = [[name, first] for name, _, _, first in rows]
    columns = [column for column in ("name", "method", "users", "description") if column not in left_out]
    built = table("Shipped experiments", columns, rows, n_text=2)
    built.columns[0].no_wrap = True
    built.columns[-1].justify, built.columns[-1].no_wrap = "left", False
    console.print(built)
    say_left_out(console, left_out)


@app.command()
def run(
    experiment: options.ExperimentName,
    hosts: Annotated[int | None, typer.Option(min=1, help="How many client hosts.  [default: 4, loopback 1]")] = None,
    transport: options.Transport = "grpc",
    engine: jobs.Engine = None,
    topology: options.Topology = None,
    overrides: options.Overrides = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the run folder.")] = False,
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
        LogLevel | None, typer.Option("--log-level", help="The least important level.  [default: progress and warnings; json info]")
    ] = None,
    detach: jobs.Detach = False,
    time: jobs.Time = None,
    partition: jobs.Partition = None,
    requeue: jobs.Requeue = False,
    apptainer: jobs.Apptainer = None,
    sbatch: jobs.Sbatch = None,
    host_sbatch: jobs.HostSbatch = None,
    ray_address: jobs.RayAddress = None,
    resources: jobs.Resources = None,
    cpus: jobs.Cpus = None,
) -> None:
    """Run an experiment, by default on this machine: a coordinator, the clusters' aggregators if there are any, and the client hosts.

    The run folder is runs/NAME. If that has a run, it is runs/NAME-2, and so on, unless --output, --overwrite or --resume is given.
    """
    of_ray = {"--ray-address": ray_address, "--resources": resources, "--cpus": cpus}
    if engine != "ray" and (given := [option for option, value in of_ray.items() if value is not None]):
        raise typer.BadParameter(f"{given[0]} is for Ray, want --engine ray with it")
    if engine == "slurm":
        here = {
            "--transport": transport != "grpc",
            "--topology": topology not in (None, "flat"),
            "--overwrite": overwrite,
            "--replay-decisions": replay_decisions,
            "--trace": trace,
            "--otlp": otlp,
            "--trace-every": trace_every,
            "--metrics": metrics,
            "--log-format": log_format is not LogFormat.text,
            "--log-level": log_level,
        }
        if given := [option for option, value in here.items() if value]:
            raise typer.BadParameter(f"{given[0]} does not go together with --engine slurm: want it in the script of `coterie slurm`")
        jobs.submitted(
            jobs.slurm_engine(
                *(experiment, hosts, time, partition, requeue, apptainer, sbatch, host_sbatch, overrides, output, seed, data),
                resume=resume,
            ),
            detach=detach,
            quiet=quiet,
        )
        return
    of_jobs = {"--detach": detach, "--time": time, "--partition": partition, "--requeue": requeue, "--apptainer": apptainer}
    if given := [option for option, value in (of_jobs | {"--sbatch": sbatch, "--host-sbatch": host_sbatch}).items() if value]:
        raise typer.BadParameter(f"{given[0]} is for jobs, want --engine slurm with it")
    from coterie_deploy.engines.launch import Launch, default_hosts
    from coterie_deploy.engines.local import Watched, run_here
    from coterie_deploy.read.cautions import links_caution
    from coterie_deploy.read.folders import replaced
    from coterie_deploy.read.shipped import choose, load
    from coterie_deploy.telemetry.spans import telemetry

    if overwrite and resume:
        raise typer.BadParameter("--overwrite starts anew and --resume goes on, want one of the two")
    if engine == "ray" and (transport != "grpc" or topology not in (None, "flat")):
        wrong = "--transport loopback" if transport != "grpc" else f"--topology {topology}"
        raise typer.BadParameter(f"{wrong} does not go together with --engine ray: want hosts that join the coordinator over gRPC")
    if topology is None and (transport == "loopback" or engine == "ray") and load(experiment, overrides or ()).federation.is_two_tier:
        topology = "flat"  # one process, or Ray, has one tier; the bits are the same
        if engine == "ray":
            say_note(jobs.FLAT.format("Ray"))
    keys, find_hosts = options.with_topology(overrides, topology), lambda wanted: default_hosts(wanted, transport, data)
    chosen = choose(experiment, keys, seed=seed, hosts=hosts, default_hosts=find_hosts, output=output, resume=resume, overwrite=overwrite)
    say_note(chosen.note)
    say_note(links_caution(chosen.experiment, transport))
    traced = telemetry(trace, otlp, trace_every)
    how = Launch(transport, chosen.folder, data, resume=resume, decisions_of=replay_decisions, telemetry=traced)
    watched = Watched(metrics, log_format, log_level)
    with contextlib.ExitStack() as stack:
        if engine == "ray":
            again = [*(["--ray-address", ray_address] if ray_address else []), *([] if cpus is None else ["--cpus", f"{cpus:g}"])]
            again += [word for resource in resources or () for word in ("--resources", resource)]
            made = stack.enter_context(jobs.ray_engine(chosen.experiment, ray_address, cpus, resources or ()))
            how = replace(how, engine=made, again=f" {shlex.join(['--engine', 'ray', *again])}")
        if overwrite:
            stack.enter_context(replaced(chosen.folder))
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
    announce: options.Announce = None,
    or_resume: Annotated[bool, typer.Option("--or-resume", help="Start, or go on with the run in the run folder.")] = False,
    quiet: options.Quiet = False,
    trace: options.Trace = False,
    otlp: options.Otlp = None,
    trace_every: options.TraceEvery = None,
    metrics: options.MetricsAddress = None,
    log_format: options.LogFormatName = LogFormat.text,
    log_level: options.LogLevelName = LogLevel.info,
) -> None:
    """Coordinate a run whose hosts are elsewhere. SIGTERM: checkpoint, exit code 143."""
    from coterie_deploy.read.shipped import choose, has_started
    from coterie_deploy.roles.server import Serve, serve_here
    from coterie_deploy.telemetry.spans import telemetry

    resume = resume or (or_resume and has_started(experiment, output))
    keys, command = options.with_topology(overrides, topology), f"server --listen {listen}"
    chosen = choose(experiment, keys, seed=seed, hosts=hosts, default_hosts=lambda _: 1, output=output, resume=resume, command=command)
    say_note(chosen.note)
    traced = telemetry(trace, otlp, trace_every)
    how = Serve(
        chosen.folder, listen, insecure, tls, resume, replay_decisions, traced, metrics, log_format, log_level, announce, tells=or_resume
    )
    serve_here(chosen.experiment, how, console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def client(
    server: Annotated[str, typer.Option(metavar="HOST:PORT|@FILE", help="The coordinator, or its address file.")],
    users: Annotated[str | None, typer.Option(help="u1,u4..u9, positions #0..#19, or 2/8: a share.  [default: all]")] = None,
    cluster: Annotated[str | None, typer.Option(help="All users of this known cluster.")] = None,
    name: Annotated[str | None, typer.Option(metavar="HOST", help="Its name.  [default: the certificate's, or machine and users]")] = None,
    data: options.Data = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="What a restart needs.")] = Path("coterie-state"),
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait so long for a server.")] = 60.0,
    tls: options.TlsFolder = None,
    tls_name: options.TlsName = None,
    insecure: options.Insecure = False,
    allow_code: options.AllowCode = False,
    accept: options.Accept = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the data's owner allows.  [default: policy.yaml with the data]")
    ] = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    log_format: options.LogFormatName = LogFormat.text,
    log_level: options.LogLevelName = LogLevel.info,
) -> None:
    """Serve some users in the run of a server. SIGTERM: state is saved, exit code 143."""
    from coterie.text.names import normal
    from coterie_deploy.roles.client import Client, run_client

    if allow_code or launched:
        options.import_from_here()
    if users is not None and cluster is not None:
        raise typer.BadParameter("--users and --cluster both choose users, want one of the two")
    log = Log(log_format, log_level)
    chosen = Client(
        *(server, users, name, data, state, patience, insecure, launched, allow_code, cluster and normal(cluster)),
        *(tls, tls_name, log, accept, policy),
    )
    raise typer.Exit(run_client(chosen))


@app.command()
def aggregator(
    server: Annotated[str, typer.Option(metavar="HOST:PORT|@FILE", help="The coordinator, or its address file.")],
    cluster: Annotated[str, typer.Option(help="The cluster of its hosts' users.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the cluster's hosts find it.")],
    hosts: Annotated[int | None, typer.Option(min=1, help="How many join.  [default: the experiment's]")] = None,
    name: Annotated[str | None, typer.Option(help="Its name.  [default: the certificate's, or the cluster's]")] = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="What a restart needs.")] = Path("coterie-state"),
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait so long for a coordinator.")] = 60.0,
    tls: options.TlsFolder = None,
    tls_name: options.TlsName = None,
    insecure: options.Insecure = False,
    announce: options.Announce = None,
    trace: options.Trace = False,
    otlp: options.Otlp = None,
    trace_every: options.TraceEvery = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    allow_code: options.AllowCode = False,
    metrics: options.MetricsAddress = None,
    log_format: options.LogFormatName = LogFormat.text,
    log_level: options.LogLevelName = LogLevel.info,
) -> None:
    """Connect a coordinator with the hosts of one known cluster. SIGTERM: state is saved, exit code 143."""
    from coterie.text.names import normal
    from coterie_deploy.roles.aggregator import AggregatorRole, run_aggregator
    from coterie_deploy.telemetry.spans import telemetry

    if allow_code or launched:
        options.import_from_here()
    traced = telemetry(trace, otlp, trace_every)
    log = Log(log_format, log_level)
    role = AggregatorRole(
        *(server, normal(cluster), listen, hosts, name, state, patience, insecure, tls, launched, traced, metrics, log, allow_code),
        *(announce, tls_name),
    )
    raise typer.Exit(run_aggregator(role))


@app.command()
def health(
    server: Annotated[str | None, typer.Argument(metavar="[HOST:PORT]", help="A coordinator or an aggregator.")] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Instead: a client's state folder.")] = None,
    tls: options.TlsFolder = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for an answer.")] = 5.0,
) -> None:
    """Ask whether a server serves its run, or whether a client is alive: exit code 0, or 3. For probes of containers."""
    from coterie.session.tls import load_tls
    from coterie_deploy.roles.health import check

    typer.echo(check(server, state, None if tls is None else load_tls(tls, is_server=False), timeout))
