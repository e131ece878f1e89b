"""The commands for members in containers: the files that start them, and their certificates."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

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
Registry = Annotated[str, typer.Option(metavar="PREFIX", help="Prefix of the names of images.")]
Places = Annotated[list[str] | None, typer.Option("--place", metavar="MEMBER=LABEL=VALUE", help="Nodes with this label; again for more.")]
Tolerations = Annotated[
    list[str] | None, typer.Option("--tolerate", metavar="MEMBER=TAINT", help="TAINT[=VALUE][:EFFECT] of nodes; again for more.")
]
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
def swarm(
    experiment: options.ExperimentName,
    hosts: ContainerHosts = None,
    topology: options.Topology = None,
    overrides: options.Overrides = None,
    seed: options.Seed = None,
    data: HostData = None,
    private_data: PrivateData = None,
    mtls: Certificates = None,
    registry: Registry = "",
    allow_code: options.AllowCode = False,
    place: Places = None,
    output: TextFile = None,
) -> None:
    """Write a stack of Docker Swarm in which the experiment runs on several machines, each member as a service."""
    from coterie_deploy.containers.members import Asked, planned
    from coterie_deploy.containers.swarm import stack_file

    asked = Asked(experiment, overrides or (), seed, topology, hosts, data, private_data, mtls, False, registry, allow_code, place or ())
    _write(stack_file(planned(asked), output), output)


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
    namespace: Annotated[str | None, typer.Option(help="The namespace.  [default: kubectl's]")] = None,
    storage_class: Annotated[str | None, typer.Option(help="Of the volumes.  [default: the cluster's]")] = None,
    storage: Annotated[str, typer.Option(metavar="SIZE", help="Of each volume.")] = "1Gi",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of each container.  [default: at most 2Gi, 4Gi with torch]")] = None,
    pull_secret: Annotated[str | None, typer.Option(metavar="NAME", help="The secret of the images' registry.")] = None,
    place: Places = None,
    tolerate: Tolerations = None,
    check: Annotated[bool, typer.Option("--check", help="Check them by the schemas of Kubernetes, and by the cluster of kubectl.")] = False,
    output: TextFile = None,
) -> None:
    """Write Kubernetes manifests with which the experiment runs, each member in a pod of its own."""
    from coterie_deploy.containers.kubernetes import Where, manifests
    from coterie_deploy.containers.manifest_check import checked
    from coterie_deploy.containers.members import Asked, planned

    named = (data, private_data, mtls, monitoring, registry, allow_code, place or ())
    asked = Asked(experiment, overrides or (), seed, topology, hosts, *named)
    where = Where(namespace, storage_class, storage, memory, pull_secret, tolerate or ())
    text = manifests(planned(asked), where, output)
    for said in checked(text) if check else ():
        typer.echo(said, err=True)
    _write(text, output)


certs = typer.Typer(help="Make a private certificate authority, and certificates for the members of a federation.")
app.add_typer(certs, name="certs")
Authority = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the authority.")]


@certs.command("init")
def init_authority(folder: Authority, days: Annotated[float, typer.Option(help="How long it is valid.")] = 3650.0) -> None:
    """Make a certificate authority: DIR/ca.crt, and DIR/ca.key, which must not leave this machine."""
    from coterie_deploy.containers.certs import init

    init(folder, days)
    typer.echo(f"a certificate authority in {folder}; next: coterie certs issue {folder} NAME --role ...")


@certs.command("issue")
def issue_certificate(
    folder: Authority,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What a host or an aggregator calls itself with --name.")],
    role: Annotated[Literal["coordinator", "aggregator", "host", "monitor"], typer.Option(help="Its role.")],
    address: Annotated[list[str] | None, typer.Option(help="DNS name or IP where it is found; again for more.")] = None,
    cluster: Annotated[str | None, typer.Option(help="The only cluster whose users it may bring.")] = None,
    users: Annotated[str | None, typer.Option(help="u0..u19,u31: whom it may speak for.  [default: anybody]")] = None,
    days: Annotated[float, typer.Option(help="How long it is valid.")] = 365.0,
) -> None:
    """Issue a certificate: DIR/NAME with the three files that --tls wants."""
    from coterie.text.names import normal, split_users
    from coterie_deploy.containers.certs import Asked, issue, valid_until

    listed = [] if users is None else split_users(users)
    target = issue(folder, Asked(role, name, address or (), cluster and normal(cluster), listed, days))
    typer.echo(f"issued {target}, valid until {valid_until(target)}")


@certs.command("federation")
def issue_federation(
    folder: Authority,
    hosts: Annotated[int, typer.Option(min=1, help="How many: host-1, host-2, ...")],
    address: Annotated[list[str], typer.Option(help="DNS name or IP of the coordinator; again for more.")],
    days: Annotated[float, typer.Option(help="How long they are valid.")] = 365.0,
) -> None:
    """Make what is missing of a flat federation: an authority, a coordinator's certificate, and one for each host, for any users."""
    from coterie_deploy.containers.certs import federation

    typer.echo(f"certificates in {folder}: {federation(folder, hosts, address, days)} made, {hosts + 1} in all")


@certs.command("show")
def show_certificates(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a member, or of the authority.")]) -> None:
    """Show for whom certificates are, how long they are valid, and of which authority they are."""
    from coterie_deploy.containers.certs import shown
    from coterie_deploy.terminal.printable import printable

    for line in shown(folder):
        typer.echo(printable(line))


def _write(text: str, output: Path | None) -> None:
    from coterie.errors import ConfigError

    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from error
    typer.echo(f"written: {output}, which begins with what to do next")
