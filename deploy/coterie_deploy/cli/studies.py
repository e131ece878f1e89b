"""The commands that make several runs, or start from a finished one."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

from pathlib import Path
from typing import Annotated

import typer

from coterie_deploy.cli import options
from coterie_deploy.cli.options import app, console_on


@app.command()
def tune(
    experiment: options.ExperimentName,
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUES", help="method.gamma=0.1,1,10 or method.lam=0.1..100:7, all with all.")
    ] = None,
    folds: Annotated[int | None, typer.Option(help="Into how many parts the rows are dealt.  [default: 5]")] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="How many client hosts.  [default: 4, loopback 1]")] = None,
    transport: options.Transport = "grpc",
    topology: options.Topology = None,
    overrides: options.Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write.  [default: runs/NAME-tune]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the tune in the folder.")] = False,
    seed: options.Seed = None,
    data: options.Data = None,
    jobs: options.Jobs = None,
    quiet: options.Quiet = False,
) -> None:
    """Choose settings of a method by cross-validation on the clients' training rows.

    Runs every point of the grid on every fold, and writes the experiment with the best one to DIR/tuned.yaml. Test rows play no part.
    """
    from coterie_deploy.engines.launch import default_hosts
    from coterie_deploy.studies.tune import Asked, How, choose, tune_here

    asked = Asked(experiment, grid or (), folds, overrides or (), seed, hosts, topology, transport, output, resume)
    tuning, folder = choose(asked, lambda wanted: default_hosts(wanted, transport, data))
    tune_here(tuning, folder, How(transport, data, jobs), console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Shipped name, YAML file, or with --resume the folder.")],
    methods: Annotated[str | None, typer.Option(metavar="A,B,C", help="The methods to compare.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Settings as rows: method.penalty=0.05,0.09. Values are YAML; several keys are a grid."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="FIRST:END", help="0:3 is 0, 1 and 2; or 0,2,5.  [default: 0:3]")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="FIGURE=VALUE", help="accuracy=0.8.  [default: the best accuracy that all reach]")
    ] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="How many client hosts.  [default: 1, grpc 4]")] = None,
    transport: options.Transport = "loopback",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the experiment; METHOD:KEY=VALUE for one method.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write.  [default: runs/NAME-compare]")] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="same|own", help="Local work: as the experiment's method, or each its own settings.  [default: same]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in the folder.")] = False,
    data: options.Data = None,
    jobs: options.Jobs = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare methods on one experiment with the same seeds: the quality and the cost of each. Or settings of a method, with --vary.

    Each run has a folder DIR/METHOD-SEED, with --vary DIR/METHOD-SETTINGS-SEED. A method takes over those settings of the experiment's
    method that it knows, and its users make as many passes over their rows in a round. With a target, users evaluate along the way.
    """
    from coterie_deploy.engines.launch import default_hosts
    from coterie_deploy.studies.compare import Asked, How, choose, compare_here, parsed

    asked = Asked(experiment, methods, seeds, overrides or (), hosts, transport, output, resume, target, budget, parsed(vary or ()))
    comparing, folder = choose(asked, lambda wanted: default_hosts(wanted, transport, data))
    compare_here(comparing, folder, How(transport, data, jobs), console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def attack(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Shipped name, YAML file, or with --resume the folder.")],
    hosts: Annotated[int, typer.Option(min=1, help="How many hosts lie, the last ones.")] = 2,
    of: Annotated[int | None, typer.Option(min=3, help="Of how many hosts.  [default: 10, or the experiment's]")] = None,
    kind: Annotated[
        str, typer.Option(metavar="A,B", help="sign_flip, gauss, label_flip, little_is_enough, inner_product, or all.")
    ] = "all",
    rule: Annotated[str, typer.Option(metavar="A,B", help="mean, or rules of federation.robust; or all of ours.")] = "all",
    methods: Annotated[str | None, typer.Option(metavar="A,B,C", help="Instead of the experiment's method.")] = None,
    seeds: Annotated[str, typer.Option(metavar="FIRST:END", help="0:3 is 0, 1 and 2; or 0,2,5.")] = "0:1",
    strength: Annotated[float | None, typer.Option(min=0.0, help="Of the lies.  [default: that of each kind]")] = None,
    overrides: options.Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write.  [default: runs/NAME-attack]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the drill in the folder.")] = False,
    data: options.Data = None,
    jobs: options.Jobs = None,
    quiet: options.Quiet = False,
) -> None:
    """See what hosts that lie do to an experiment, and what each rule of federation.robust makes of it: a drill in this process.

    Each run has a folder DIR/METHOD-RULE-KIND-SEED. The quality is that of honest users alone. No other command makes hosts lie.
    """
    from coterie_deploy.studies.attack import Asked, How, attack_here, choose

    asked = Asked(experiment, hosts, of, kind, rule, methods, seeds, strength, overrides or (), output, resume, data)
    attacking, folder = choose(asked)
    attack_here(attacking, folder, How("loopback", data, jobs), console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def adapt(
    run: options.RunFolder,
    data: Annotated[Path, typer.Option(metavar="FILE", help="The new users' rows: a table or NPZ.")],
    epochs: Annotated[int, typer.Option(min=1, help="Of the head.")] = 10,
    overrides: options.Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write.  [default: RUN-adapt-1, ...]")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Let new users join a finished run: they get what it shares, and train the rest on their own rows."""
    from coterie_deploy.studies.adapt import adapt as adapt_here

    adapt_here(run, data, overrides or (), output, epochs, console_on(), console_on(stderr=True), quiet=quiet)


@app.command()
def certify(
    experiment: options.ExperimentName,
    hosts: Annotated[int, typer.Option(min=1, help="How many client hosts.")] = 1,
    overrides: options.Overrides = None,
    partition: Annotated[str, typer.Option(metavar="known|RUN", help="The known clusters, or those a run has found.")] = "known",
    data: options.Data = None,
) -> None:
    """Certify for which penalties clusters are provably found."""
    from coterie_deploy.read.shipped import find
    from coterie_deploy.studies.certify import certify as print_certificate

    print_certificate(find(experiment), hosts=hosts, overrides=overrides or (), partition=partition, data=data)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="The figure or table; without it, list them.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 8,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where plots and tables go.")] = Path("reproduced"),
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Data sets that are not shipped.")] = None,
    columns: Annotated[str | None, typer.Option(metavar="A,B", help="Of fedrep-table1, those to run.")] = None,
    jobs: options.Jobs = None,
) -> None:
    """Reproduce a paper's figure: its table beside the paper's, and plots."""
    from coterie_deploy.studies import reproduce as papers

    if name is None:
        typer.echo("\n".join(papers.names()))
    else:
        papers.reproduce(name, seeds=seeds, output=output, data=data, columns=columns, jobs=jobs)


checks = typer.Typer(help="Check that a method or compressor of your own keeps what Coterie promises.")
app.add_typer(checks, name="check")


@checks.command("method")
def check_a_method(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The method.")] = None,
    experiment: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Instead of a small federation of ours: a short one of your own.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Only this one; again for more.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Instead: the checks, and what each proves.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws the processes and times of kills.")] = 0,
    overrides: options.Overrides = None,
    data: options.Data = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the runs here.")] = None,
) -> None:
    """Check a method: same bits wherever it is computed and after kills, true counts, and nothing private sent. Exit code 1 if not.

    Runs of a small federation, in this process and in processes over gRPC: a minute or two.
    """
    from coterie.errors import ConfigError
    from coterie_deploy.studies.check.show import Asked, check_here, list_checks

    if list_:
        list_checks(console_on())
        return
    if name is None:
        raise ConfigError("coterie check method wants the name of a method, or --list")
    asked = Asked(name, experiment, only or (), seed, overrides or (), data, output)
    raise typer.Exit(0 if check_here(asked, console_on(), console_on(stderr=True)) else 1)


@checks.command("compressor")
def check_a_compressor(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Of a package, or module:NAME.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Only this one; again for more.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Instead: the checks, and what each proves.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws the processes and times of kills.")] = 0,
    overrides: options.Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the runs here.")] = None,
) -> None:
    """Check a compressor: its rows have the bytes that it says and the same bits each time, and so do runs. Exit code 1 if not.

    Rows of many kinds, then runs of a small federation, in this process and in processes over gRPC: half a minute.
    """
    from coterie.errors import ConfigError
    from coterie_deploy.studies.check.show import check_compressor_here, list_checks

    if list_:
        list_checks(console_on(), "compressor")
        return
    if name is None:
        raise ConfigError("coterie check compressor wants the name of a compressor, or --list")
    is_right = check_compressor_here(name, only or (), seed, overrides or (), output, console_on(), console_on(stderr=True))
    raise typer.Exit(0 if is_right else 1)
