"""The commands for members in containers: the files that start them, and their certificates."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from coterie_deploy.cli import options
from coterie_deploy.cli.options import app

ContainerHosts = Annotated[int | None, typer.Option(min=1, help="Client hosts; with clusters, of each.  [default: the experiment's]")]
HostData = Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of data that all hosts read.")]
PrivateData = Annotated[Path | None, typer.Option(metavar="DIR", help="Instead: a folder with one for each host.")]
Certificates = Annotated[Path | None, typer.Option("--mtls", metavar="DIR", help="A folder of coterie certs.")]
Monitoring = Annotated[bool, typer.Option("--monitoring", help="With metrics, and in Compose Prometheus and Grafana.")]
Registry = Annotated[str, typer.Option(metavar="PREFIX", help="Before the names of images.")]
TextFile = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="[default: standard output]")]


@app.command()
def compose(
    experiment: options.ExperimentName,
    hosts: ContainerHosts = None,
    topology: options.Topology = None,
    overrides: options.Overrides = None,
    seed: options.Seed = None,
    data: HostData = None,
    private_data: PrivateData = None,
    mtls: Certificates = None,
    monitoring: Monitoring = False,
    registry: Registry = "",
    allow_code: options.AllowCode = False,
    build: Annotated[Path | None, typer.Option(metavar="DIR", help="Images are built from this clone of the repository.")] = None,
    output: TextFile = None,
) -> None:
    """Write a Compose file in which the experiment runs, each member in a container of its own."""
    from coterie_deploy.containers.compose import compose_file
    from coterie_deploy.containers.members import Asked, planned
    from coterie_deploy.containers.monitoring import write_files

    asked = Asked(experiment, overrides or (), seed, topology, hosts, data, private_data, mtls, monitoring, registry, allow_code)
    plan = planned(asked)
    text = compose_file(plan, output, build)
    if monitoring:
        write_files(plan, output)
    _write(text, output)


@app.command()
def kubernetes(
    experiment: options.ExperimentName,
    hosts: ContainerHosts = None,
    topology: options.Topology = None,
    overrides: options.Overrides = None,
    seed: options.Seed = None,
    data: HostData = None,
    private_data: PrivateData = None,
    mtls: Certificates = None,
    monitoring: Monitoring = False,
    registry: Registry = "",
    allow_code: options.AllowCode = False,
    namespace: Annotated[str | None, typer.Option(help="[default: kubectl's]")] = None,
    storage_class: Annotated[str | None, typer.Option(help="Of the volumes.  [default: the cluster's]")] = None,
    storage: Annotated[str, typer.Option(metavar="SIZE", help="Of each volume.")] = "1Gi",
    output: TextFile = None,
) -> None:
    """Write Kubernetes manifests with which the experiment runs, each member in a pod of its own."""
    from coterie_deploy.containers.kubernetes import Where, manifests
    from coterie_deploy.containers.members import Asked, planned

    asked = Asked(experiment, overrides or (), seed, topology, hosts, data, private_data, mtls, monitoring, registry, allow_code)
    where = Where(namespace, storage_class, storage)
    _write(manifests(planned(asked), where, output), output)


certs = typer.Typer(help="Make a private certificate authority, and certificates for the members of a federation.")
app.add_typer(certs, name="certs")
Authority = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the authority.")]


@certs.command("init")
def init_authority(folder: Authority, days: Annotated[float, typer.Option(help="How long it is valid.")] = 3650.0) -> None:
    """Make a certificate authority: DIR/ca.crt, and DIR/ca.key, which leaves this machine for nobody."""
    from coterie_deploy.containers.certs import init

    init(folder, days)
    typer.echo(f"a certificate authority in {folder}; next: coterie certs issue {folder} NAME --role ...")


@certs.command("issue")
def issue_certificate(
    folder: Authority,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What a host or an aggregator calls itself with --name.")],
    role: Annotated[Literal["coordinator", "aggregator", "host", "monitor"], typer.Option(help="What it may be.")],
    address: Annotated[list[str] | None, typer.Option(help="DNS name or IP where it is found; again for more.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Whose users alone it may bring.")] = None,
    users: Annotated[str | None, typer.Option(help="u0..u19,u31: whom it may speak for.  [default: anybody]")] = None,
    days: Annotated[float, typer.Option(help="How long it is valid.")] = 365.0,
) -> None:
    """Issue a certificate: DIR/NAME with the three files that --tls wants."""
    from coterie.text.names import normal
    from coterie_deploy.containers.certs import Asked, issue

    listed = [] if users is None else normal(users).split(",")
    typer.echo(f"issued {issue(folder, Asked(role, name, address or (), cluster and normal(cluster), listed, days))}")


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
