"""The commands and their options. Each imports what it needs when it is called, so that a client does not pay for a server."""

# ruff: noqa: PLC0415

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie_deploy.telemetry.logs import Log, LogFormat, LogLevel

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Personalized federated learning over gRPC, with every byte of communication accounted for.",
)


class TopologyName(StrEnum):
    """Who stands between the coordinator and the client hosts."""

    flat = "flat"
    clusters = "clusters"


class RoleName(StrEnum):
    """What a certificate is for."""

    coordinator = "coordinator"
    aggregator = "aggregator"
    host = "host"
    monitor = "monitor"


class TransportName(StrEnum):
    """How coordinator and hosts speak."""

    grpc = "grpc"
    loopback = "loopback"


ExperimentName = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Shipped name, YAML file or run folder.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the experiment: method.penalty=0.05.")]
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder.  [default: runs/NAME]", show_default=False)]
Seed = Annotated[int | None, typer.Option(min=0, help="Replaces the experiment's.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the run folder.")]
Replay = Annotated[Path | None, typer.Option(metavar="RUN", help="Repeat the time-dependent decisions of that run.", show_default=False)]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Where data paths start.  [default: here]", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Topology = Annotated[
    TopologyName | None,
    typer.Option(
        help="Who joins the coordinator: client hosts, or an aggregator a cluster.  [default: the experiment's]", show_default=False
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plain text beyond this machine.")]
TlsFolder = Annotated[
    Path | None, typer.Option("--tls", metavar="DIR", help="Its certificate: ca.crt, tls.crt, tls.key.", show_default=False)
]
Trace = Annotated[bool, typer.Option("--trace", help="Spans to an OpenTelemetry collector.")]
Otlp = Annotated[str | None, typer.Option(metavar="URL", help="Where it is.  [default: OTEL_EXPORTER_OTLP_ENDPOINT]", show_default=False)]
TraceEvery = Annotated[int | None, typer.Option(min=1, metavar="N", help="Every Nth round.  [default: ever fewer]", show_default=False)]
MetricsAddress = Annotated[
    str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Where Prometheus finds metrics.", show_default=False)
]
LogFormatName = Annotated[LogFormat, typer.Option("--log-format", help="Sentences, or a JSON object a line.")]
LogLevelName = Annotated[LogLevel, typer.Option("--log-level", help="What is said.")]
Accept = Annotated[
    str | None,
    typer.Option(metavar="HASH|any", help="The experiment to serve: coterie data EXPERIMENT --hash.  [default: asks]", show_default=False),
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Let the experiment name code to import here.")]
ContainerHosts = Annotated[
    int | None, typer.Option(min=1, help="Client hosts; with clusters, of each.  [default: the experiment's]", show_default=False)
]
HostData = Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of data that all hosts read.", show_default=False)]
PrivateData = Annotated[Path | None, typer.Option(metavar="DIR", help="Instead: a folder with one for each host.", show_default=False)]
Certificates = Annotated[Path | None, typer.Option("--mtls", metavar="DIR", help="A folder of coterie certs.", show_default=False)]
Monitoring = Annotated[bool, typer.Option("--monitoring", help="With metrics, and in Compose Prometheus and Grafana.")]
Registry = Annotated[str, typer.Option(metavar="PREFIX", help="Before the names of images.", show_default=False)]
TextFile = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="[default: standard output]", show_default=False)]


@app.callback(invoke_without_command=True)
def coterie(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Personalized federated learning over gRPC, with every byte of communication accounted for."""
    if version:
        from coterie import __version__

        typer.echo(f"coterie {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif context.invoked_subcommand != "client":  # a client decides by its own options
        _import_from_here()


@app.command()
def experiments() -> None:
    """List the shipped experiments."""
    from coterie_deploy.cli.listing import print_experiments

    print_experiments(console_on())


@app.command("data")
def describe_data(
    experiment: ExperimentName,
    overrides: Overrides = None,
    seed: Seed = None,
    data: Data = None,
    hash_: Annotated[bool, typer.Option("--hash", help="Instead: what clients accept with --accept.")] = False,
    reveals: Annotated[bool, typer.Option("--reveals", help="Instead: what is asked of a host, and who learns what.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a data section for a table, or an experiment's: its columns.")] = False,
) -> None:
    """Show how an experiment's rows are divided among its users: numbers of rows and classes, and never a row.

    With --schema, EXPERIMENT may be a table: .csv, .csv.gz, .parquet, .dta or .sav.
    """
    from coterie_deploy.read.shipped import load

    if schema:
        from coterie_deploy.cli.data_schema import is_table, schema_of, schema_of_data

        place = Path(experiment)
        text = schema_of(place) if is_table(place) else schema_of_data(load(experiment, overrides or (), seed=seed).data, data)
        print(text, end="")  # noqa: T201 - YAML, not to be wrapped
        return
    loaded = load(experiment, overrides or (), seed=seed)
    if hash_ or reveals:
        from coterie_deploy.roles.consent_page import print_asked

        print_asked(loaded, hash_=hash_, reveals=reveals)
        return
    from coterie_deploy.view.data_page import print_data

    print_data(loaded, data, console_on())


@app.command()
def run(
    experiment: ExperimentName,
    hosts: Annotated[int | None, typer.Option(min=1, help="[default: 4, loopback 1]", show_default=False)] = None,
    transport: Annotated[TransportName, typer.Option(help="Processes over gRPC, or all in this process.")] = TransportName.grpc,
    topology: Topology = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
    replay_decisions: Replay = None,
    seed: Seed = None,
    data: Data = None,
    quiet: Quiet = False,
    trace: Trace = False,
    otlp: Otlp = None,
    trace_every: TraceEvery = None,
    metrics: MetricsAddress = None,
    log_format: LogFormatName = LogFormat.text,
    log_level: Annotated[
        LogLevel | None, typer.Option("--log-level", help="What is said.  [default: progress and warnings; json info]", show_default=False)
    ] = None,
) -> None:
    """Run an experiment on this machine: a coordinator, the clusters' aggregators if there are any, and the client hosts."""
    from coterie_deploy.engines.launch import Launch, default_hosts
    from coterie_deploy.engines.local import Watched, run_here
    from coterie_deploy.read.cautions import links_caution
    from coterie_deploy.read.shipped import choose, load
    from coterie_deploy.telemetry.spans import telemetry

    if topology is None and transport is TransportName.loopback and load(experiment, overrides or ()).federation.is_two_tier:
        topology = TopologyName.flat  # one process has one tier; the bits are the same
    chosen = choose(
        experiment,
        _with_topology(overrides, topology),
        seed=seed,
        hosts=hosts,
        default_hosts=lambda wanted: default_hosts(wanted, transport.value, data),
        output=output,
        resume=resume,
    )
    _say(chosen.note)
    _say(links_caution(chosen.experiment, transport.value))
    traced = telemetry(trace, otlp, trace_every)
    how = Launch(transport.value, chosen.folder, data, resume=resume, decisions_of=replay_decisions, telemetry=traced)
    watched = Watched(metrics, log_format, log_level)
    run_here(chosen.experiment, how, console_on(), console_on(stderr=True), quiet=quiet, watched=watched)


@app.command()
def tune(
    experiment: ExperimentName,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="method.gamma=0.1,1,10 or method.lam=0.1..100:7, all with all.", show_default=False),
    ] = None,
    folds: Annotated[int | None, typer.Option(help="[default: 5]", show_default=False)] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="[default: 4, loopback 1]", show_default=False)] = None,
    transport: Annotated[TransportName, typer.Option(help="Processes over gRPC, or all in this process.")] = TransportName.grpc,
    topology: Topology = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="[default: runs/NAME-tune]", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the tune in the folder.")] = False,
    seed: Seed = None,
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Choose settings of a method by cross-validation on the clients' training rows.

    Runs every point of the grid on every fold, and writes the experiment with the best one to DIR/tuned.yaml. Test rows play no part.
    """
    from coterie_deploy.engines.launch import default_hosts
    from coterie_deploy.studies.tune import Asked, How, choose, tune_here

    asked = Asked(
        experiment,
        grid or (),
        folds,
        overrides or (),
        seed=seed,
        hosts=hosts,
        topology=None if topology is None else topology.value,
        transport=transport.value,
        output=output,
        resume=resume,
    )
    tuning, folder = choose(asked, lambda wanted: default_hosts(wanted, transport.value, data))
    tune_here(tuning, folder, How(transport.value, data), console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def compare(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="Shipped name, YAML file, or with --resume the folder.", show_default=False)
    ],
    methods: Annotated[str | None, typer.Option(metavar="A,B,C", help="What is compared.", show_default=False)] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="FIRST:END", help="0:3 is 0, 1 and 2; or 0,2,5.  [default: 0:3]", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="FIGURE=VALUE", help="accuracy=0.8.  [default: the best accuracy that all reach]", show_default=False),
    ] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="[default: 1, grpc 4]", show_default=False)] = None,
    transport: Annotated[TransportName, typer.Option(help="Processes over gRPC, or all in this process.")] = TransportName.loopback,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the experiment; METHOD:KEY=VALUE for one method.", show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="[default: runs/NAME-compare]", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in the folder.")] = False,
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Run methods on one experiment, from the same seeds: what each reaches, and what that costs.

    Each run has a folder DIR/METHOD-SEED. A method takes over the settings of the experiment's own that it knows too.
    """
    from coterie_deploy.engines.launch import default_hosts
    from coterie_deploy.studies.compare import Asked, How, choose, compare_here

    asked = Asked(experiment, methods, seeds, overrides or (), hosts, transport.value, output, resume, target)
    comparing, folder = choose(asked, lambda wanted: default_hosts(wanted, transport.value, data))
    compare_here(comparing, folder, How(transport.value, data), console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def server(
    experiment: ExperimentName,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where hosts find this server.")],
    hosts: Annotated[int | None, typer.Option(min=1, help="How many join.  [default: the experiment's]", show_default=False)] = None,
    topology: Topology = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
    replay_decisions: Replay = None,
    seed: Seed = None,
    tls: TlsFolder = None,
    insecure: Insecure = False,
    or_resume: Annotated[bool, typer.Option("--or-resume", help="Start, or go on with the run in the run folder.")] = False,
    quiet: Quiet = False,
    trace: Trace = False,
    otlp: Otlp = None,
    trace_every: TraceEvery = None,
    metrics: MetricsAddress = None,
    log_format: LogFormatName = LogFormat.text,
    log_level: LogLevelName = LogLevel.info,
) -> None:
    """Coordinate a run whose hosts are elsewhere. SIGTERM: checkpoint, exit code 3."""
    from coterie_deploy.read.shipped import choose, has_started
    from coterie_deploy.roles.server import Serve, serve_here
    from coterie_deploy.telemetry.spans import telemetry

    resume = resume or (or_resume and has_started(experiment, output))
    chosen = choose(
        experiment,
        _with_topology(overrides, topology),
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
    users: Annotated[str | None, typer.Option(help="u1,u4-u9, or positions: #0-#19.  [default: all]", show_default=False)] = None,
    cluster: Annotated[str | None, typer.Option(help="All users of this known cluster.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(metavar="HOST", help="[default: the machine's and which users]", show_default=False)] = None,
    data: Data = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="What a restart needs.")] = Path("coterie-state"),
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Without a server.")] = 60.0,
    tls: TlsFolder = None,
    insecure: Insecure = False,
    allow_code: AllowCode = False,
    accept: Accept = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What its owner allows.  [default: policy.yaml with the data]", show_default=False),
    ] = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    log_format: LogFormatName = LogFormat.text,
    log_level: LogLevelName = LogLevel.info,
) -> None:
    """Serve some users in the run of a server. SIGTERM: state is written down, exit code 143."""
    from coterie.text.names import normal
    from coterie_deploy.roles.client import Client, run_client

    if allow_code or launched:
        _import_from_here()
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
    hosts: Annotated[int | None, typer.Option(min=1, help="How many join.  [default: the experiment's]", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="[default: the cluster's]", show_default=False)] = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="What a restart needs.")] = Path("coterie-state"),
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Without a coordinator.")] = 60.0,
    tls: TlsFolder = None,
    insecure: Insecure = False,
    trace: Trace = False,
    otlp: Otlp = None,
    trace_every: TraceEvery = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    metrics: MetricsAddress = None,
    log_format: LogFormatName = LogFormat.text,
    log_level: LogLevelName = LogLevel.info,
) -> None:
    """Stand between a coordinator and the hosts of one known cluster. SIGTERM: state is written down, exit code 143."""
    from coterie.text.names import normal
    from coterie_deploy.roles.aggregator import AggregatorRole, run_aggregator
    from coterie_deploy.telemetry.spans import telemetry

    traced = telemetry(trace, otlp, trace_every)
    log = Log(log_format, log_level)
    role = AggregatorRole(server, normal(cluster), listen, hosts, name, state, patience, insecure, tls, launched, traced, metrics, log)
    raise typer.Exit(run_aggregator(role))


@app.command()
def health(
    server: Annotated[str | None, typer.Argument(metavar="[HOST:PORT]", help="A coordinator or an aggregator.", show_default=False)] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Instead: a client's state folder.", show_default=False)] = None,
    tls: TlsFolder = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1)] = 5.0,
) -> None:
    """Ask whether a server serves its run, or whether a client is alive: exit code 0, or 3. For probes of containers."""
    from coterie.session.tls import load_tls
    from coterie_deploy.roles.health import check

    typer.echo(check(server, state, None if tls is None else load_tls(tls, is_server=False), timeout))


certs = typer.Typer(help="Make a private certificate authority, and certificates for the members of a federation.")
app.add_typer(certs, name="certs")
Authority = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the authority.", show_default=False)]


@certs.command("init")
def init_authority(folder: Authority, days: Annotated[float, typer.Option(help="How long it is valid.")] = 3650.0) -> None:
    """Make a certificate authority: DIR/ca.crt, and DIR/ca.key, which leaves this machine for nobody."""
    from coterie_deploy.containers.certs import init

    init(folder, days)
    typer.echo(f"a certificate authority in {folder}; next: coterie certs issue {folder} NAME --role ...")


@certs.command("issue")
def issue_certificate(
    folder: Authority,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What a host or an aggregator calls itself with --name.", show_default=False)],
    role: Annotated[RoleName, typer.Option(help="What it may be.")],
    address: Annotated[list[str] | None, typer.Option(help="DNS name or IP where it is found; again for more.", show_default=False)] = None,
    cluster: Annotated[str | None, typer.Option(help="Whose users alone it may bring.", show_default=False)] = None,
    users: Annotated[str | None, typer.Option(help="u0..u19,u31: whom it may speak for.  [default: anybody]", show_default=False)] = None,
    days: Annotated[float, typer.Option(help="How long it is valid.")] = 365.0,
) -> None:
    """Issue a certificate: DIR/NAME with the three files that --tls wants."""
    from coterie.text.names import normal
    from coterie_deploy.containers.certs import Asked, issue

    listed = [] if users is None else normal(users).split(",")
    typer.echo(f"issued {issue(folder, Asked(role.value, name, address or (), cluster and normal(cluster), listed, days))}")


policies = typer.Typer(help="Write down what an experiment may ask of this machine's data.")
app.add_typer(policies, name="policy")


@policies.command("init")
def init_policy_file(
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A table: .csv, .csv.gz, .parquet, .dta or .sav.", show_default=False)],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: policy.yaml beside it]", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also where there is one.")] = False,
) -> None:
    """Write a first policy for a table, to be read and cut down by its owner."""
    from coterie_deploy.cli.policy_init import init_policy

    typer.echo(init_policy(table, output or table.with_name("policy.yaml"), overwrite=overwrite))


@app.command()
def predict(
    run: RunFolder,
    table: Annotated[Path, typer.Argument(metavar="DATA", help="CSV with the feature columns; for networks NPZ too.", show_default=False)],
    user: Annotated[str, typer.Option(help="Whose model.")],
    stage: Annotated[str | None, typer.Option(help="[default: the final one]", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: standard output]", show_default=False)] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Networks: a client's state folder.", show_default=False)] = None,
) -> None:
    """Apply a user's final model to the rows of a table."""
    from coterie_deploy.read.predict import predict as write_predictions

    write_predictions(run, user, table, stage, out, sys.stdout, state)


@app.command()
def adapt(
    run: RunFolder,
    data: Annotated[Path, typer.Option(metavar="FILE", help="The new users' rows: CSV, Parquet or NPZ.")],
    epochs: Annotated[int, typer.Option(min=1, help="Of the head.")] = 10,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="[default: RUN-adapt-1, ...]", show_default=False)] = None,
    quiet: Quiet = False,
) -> None:
    """Let new users join a finished run: they get what it shares, and train the rest on their own rows."""
    from coterie_deploy.studies.adapt import adapt as adapt_here

    adapt_here(run, data, overrides or (), output, epochs, console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def models(
    run: RunFolder,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("models"),
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="State folder of clients elsewhere.  [default: the run's own]", show_default=False)
    ] = None,
    user: Annotated[list[str] | None, typer.Option(help="Only this user; may be given again.", show_default=False)] = None,
) -> None:
    """Export the users' networks, shared and private tensors together: a safetensors file each, and the model's configuration."""
    from coterie_deploy.read.user_models import export
    from coterie_deploy.terminal.tables import counted

    written = export(run, output, state, user)
    typer.echo(f"{counted(len(written), 'model')} in {output}")


@app.command()
def certify(
    experiment: ExperimentName,
    hosts: Annotated[int, typer.Option(min=1)] = 1,
    overrides: Overrides = None,
    partition: Annotated[str, typer.Option(metavar="known|RUN", help="The known clusters, or those a run has found.")] = "known",
    data: Data = None,
) -> None:
    """Certify for which penalties clusters are provably found."""
    from coterie_deploy.read.shipped import find
    from coterie_deploy.studies.certify import certify as print_certificate

    print_certificate(find(experiment), hosts=hosts, overrides=overrides or (), partition=partition, data=data)


@app.command()
def compose(
    experiment: ExperimentName,
    hosts: ContainerHosts = None,
    topology: Topology = None,
    overrides: Overrides = None,
    seed: Seed = None,
    data: HostData = None,
    private_data: PrivateData = None,
    mtls: Certificates = None,
    monitoring: Monitoring = False,
    registry: Registry = "",
    allow_code: AllowCode = False,
    build: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images are built from this clone of the repository.", show_default=False)
    ] = None,
    output: TextFile = None,
) -> None:
    """Write a Compose file in which the experiment runs, each member in a container of its own."""
    from coterie_deploy.containers.compose import compose_file
    from coterie_deploy.containers.members import Asked, planned
    from coterie_deploy.containers.monitoring import write_files

    chosen = None if topology is None else topology.value
    asked = Asked(experiment, overrides or (), seed, chosen, hosts, data, private_data, mtls, monitoring, registry, allow_code)
    plan = planned(asked)
    text = compose_file(plan, output, build)
    if monitoring:
        write_files(plan, output)
    _write(text, output)


@app.command()
def kubernetes(
    experiment: ExperimentName,
    hosts: ContainerHosts = None,
    topology: Topology = None,
    overrides: Overrides = None,
    seed: Seed = None,
    data: HostData = None,
    private_data: PrivateData = None,
    mtls: Certificates = None,
    monitoring: Monitoring = False,
    registry: Registry = "",
    allow_code: AllowCode = False,
    namespace: Annotated[str | None, typer.Option(help="[default: kubectl's]", show_default=False)] = None,
    storage_class: Annotated[str | None, typer.Option(help="Of the volumes.  [default: the cluster's]", show_default=False)] = None,
    storage: Annotated[str, typer.Option(metavar="SIZE", help="Of each volume.")] = "1Gi",
    output: TextFile = None,
) -> None:
    """Write Kubernetes manifests with which the experiment runs, each member in a pod of its own."""
    from coterie_deploy.containers.kubernetes import Where, manifests
    from coterie_deploy.containers.members import Asked, planned

    chosen = None if topology is None else topology.value
    asked = Asked(experiment, overrides or (), seed, chosen, hosts, data, private_data, mtls, monitoring, registry, allow_code)
    where = Where(namespace, storage_class, storage)
    _write(manifests(planned(asked), where, output), output)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="What to reproduce; without it, what there is.", show_default=False)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 8,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where plots and tables go.")] = Path("reproduced"),
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Data sets that are not shipped.", show_default=False)] = None,
    columns: Annotated[str | None, typer.Option(metavar="A,B", help="Of fedrep-table1, those to run.", show_default=False)] = None,
) -> None:
    """Reproduce a paper's figure: its table beside the paper's, and plots."""
    from coterie_deploy.studies import reproduce as papers

    if name is None:
        typer.echo("\n".join(papers.names()))
    else:
        papers.reproduce(name, seeds=seeds, output=output, data=data, columns=columns)


def _import_from_here() -> None:
    """Losses and sources of data that an experiment names by import path may be in the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def _with_topology(overrides: list[str] | None, topology: TopologyName | None) -> list[str]:
    return [*(overrides or ()), *([] if topology is None else [f"federation.topology={topology.value}"])]


def _write(text: str, output: Path | None) -> None:
    """To the file, or standard output. ConfigError when it cannot be written."""
    from coterie.errors import ConfigError

    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from error


def _say(note: str) -> None:
    if note:
        typer.echo(f"note: {note}", err=True)


def console_on(*, stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)
