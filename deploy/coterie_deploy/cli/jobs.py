"""The engines of `coterie run`: the script of a job, a run as a job, and hosts as actors of Ray."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie_deploy.cli import options
from coterie_deploy.cli.options import app, console_on, say_note

if TYPE_CHECKING:
    from coterie.experiment.config import Experiment
    from coterie_deploy.engines.launch import MakeEngine
    from coterie_deploy.engines.slurm import SlurmEngine

Engine = Annotated[
    Literal["slurm", "ray"] | None,
    typer.Option(help="Who starts the members.  [default: this command, on this machine]", show_default=False),
]
Detach = Annotated[bool, typer.Option("--detach", help="With an engine that has jobs: submit, and leave it running.")]
Time = Annotated[str | None, typer.Option(metavar="H:MM:SS", help="Slurm: the time limit.  [default: the partition's]")]
Partition = Annotated[str | None, typer.Option(help="Slurm: the partition.  [default: the cluster's]")]
Requeue = Annotated[bool, typer.Option("--requeue", help="Slurm: start again after a preemption or the loss of a node.")]
Apptainer = Annotated[str | None, typer.Option(metavar="IMAGE", help="Slurm: an image with coterie.  [default: the PATH's]")]
Sbatch = Annotated[list[str] | None, typer.Option(metavar="OPTION", help="Slurm: more for sbatch: --sbatch=--account=lab.")]
HostSbatch = Annotated[list[str] | None, typer.Option(metavar="OPTION", help="Slurm: for the hosts: --host-sbatch=--gres=gpu:1.")]
RayAddress = Annotated[str | None, typer.Option(metavar="ADDR", help="Ray: the cluster.  [default: that of this machine]")]
Resources = Annotated[list[str] | None, typer.Option(metavar="HOST=NAME", help="Ray: a host's custom resource; again for more.")]
Cpus = Annotated[float | None, typer.Option(min=0, help="Ray: CPUs of each host.  [default: 1]")]

FLAT = "on {} hosts join the coordinator without aggregators (federation.topology=flat); the bits are the same"


@app.command()
def slurm(
    experiment: options.ExperimentName,
    hosts: Annotated[int | None, typer.Option(min=1, help="Client hosts.  [default: the experiment's, or 4]")] = None,
    time: Time = None,
    partition: Partition = None,
    requeue: Requeue = False,
    apptainer: Apptainer = None,
    sbatch: Sbatch = None,
    host_sbatch: HostSbatch = None,
    overrides: options.Overrides = None,
    output: options.Output = None,
    seed: options.Seed = None,
    data: options.Data = None,
    allow_code: options.AllowCode = False,
) -> None:
    """Write a batch script with which Slurm runs the experiment: a node for the coordinator, others for the hosts."""
    from coterie_deploy.engines.slurm_script import script

    engine = slurm_engine(
        experiment, hosts, time, partition, requeue, apptainer, sbatch, host_sbatch, overrides, output, seed, data, allow_code, resume=True
    )
    typer.echo(script(engine.asked, engine.experiment, engine.command), nl=False)


def slurm_engine(
    experiment: str,
    hosts: int | None,
    time: str | None,
    partition: str | None,
    requeue: bool,
    apptainer: str | None,
    sbatch: Sequence[str] | None,
    host_sbatch: Sequence[str] | None,
    overrides: list[str] | None,
    output: Path | None,
    seed: int | None,
    data: Path | None,
    allow_code: bool = False,
    *,
    resume: bool,
) -> "SlurmEngine":
    """The job of these options. A run that is there is resumed, or the next free folder is taken."""
    from coterie_deploy.engines.launch import default_hosts
    from coterie_deploy.engines.slurm import SlurmEngine
    from coterie_deploy.engines.slurm_script import Asked
    from coterie_deploy.read.shipped import choose, has_started, load

    if load(experiment, overrides or ()).federation.is_two_tier:
        overrides = options.with_topology(overrides, "flat")
        say_note(FLAT.format("Slurm"))
    chosen = choose(
        experiment,
        overrides or (),
        seed=seed,
        hosts=hosts,
        default_hosts=lambda wanted: default_hosts(wanted, "grpc", data),
        output=output,
        resume=resume and has_started(experiment, output),
        overwrite=False,
    )
    say_note(chosen.note)
    n_hosts = chosen.experiment.federation.hosts
    asked = Asked(
        *(experiment, chosen.folder, n_hosts, time, partition, requeue, apptainer, data),
        *(overrides or (), seed, sbatch or (), host_sbatch or (), allow_code),
    )
    return SlurmEngine(asked, chosen.experiment, shlex.join(["coterie", *sys.argv[1:]]))


def submitted(engine: "SlurmEngine", *, detach: bool, quiet: bool) -> None:
    """Submits the job, and follows it to its end unless it is to be left."""
    from coterie_deploy.engines.following import leave_job, run_job
    from coterie_deploy.read.report import print_report

    if detach:
        leave_job(engine, engine.asked.folder, console_on())
        return
    run_job(engine, engine.asked.folder, console_on(stderr=True), quiet=quiet)
    print_report(engine.asked.folder, console_on())


@contextlib.contextmanager
def ray_engine(experiment: "Experiment", address: str | None, cpus: float | None, resources: Sequence[str]) -> Iterator["MakeEngine"]:
    """Hosts as actors of Ray, with certificates for as long as the block runs. ConfigError for hosts that do not exist."""
    from functools import partial

    from coterie_deploy.containers.certs import federation
    from coterie_deploy.engines.ray_engine import TLS_NAME, Places, RayEngine

    n_hosts, places = experiment.federation.hosts, Places(1.0 if cpus is None else cpus, resources)
    places.of([f"host-{i}" for i in range(1, n_hosts + 1)])
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        federation(Path(folder) / "certs", n_hosts, [TLS_NAME])
        yield partial(RayEngine, address=address or "auto", places=places, certificates=Path(folder) / "certs")
