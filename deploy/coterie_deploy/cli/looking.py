"""The commands that look at runs, finished or under way."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from coterie.errors import ConfigError
from coterie_deploy.cli import options
from coterie_deploy.cli.options import app, console_on
from coterie_deploy.telemetry.logs import LogLevel


@app.command()
def show(
    run: options.RunFolder,
    stage: Annotated[str | None, typer.Option(help="Whose clusters are listed.  [default: the result's]")] = None,
    all_: Annotated[bool, typer.Option("--all", help="List all clusters and all their members.")] = False,
    form: Annotated[Literal["page", "csv", "jsonl"], typer.Option("--format", help="A page, or only users and clusters.")] = "page",
) -> None:
    """Show a run, finished or under way: all stages, warnings, and who is in which cluster."""
    from coterie_deploy.view.show import print_members, print_run

    if form == "page":
        print_run(run, stage, console_on(), in_full=all_)
    else:
        print_members(run, stage, form, console_on())


@app.command()
def coefficients(
    run: options.RunFolder,
    user: Annotated[list[str] | None, typer.Option(metavar="USER", help="Only this user's model; may be given again.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="CLUSTER", help="Only this cluster's models.")] = None,
    everyone: Annotated[bool, typer.Option("--global", help="Only the model of everyone.")] = False,
    stage: Annotated[str | None, typer.Option(help="Whose models.  [default: the result's]")] = None,
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    errors: Annotated[
        Literal["classical", "robust"] | None, typer.Option(help="Standard errors.  [default: classical where they exist]")
    ] = None,
    form: Annotated[Literal["table", "csv", "jsonl"], typer.Option("--format", help="A table, or a coefficient a line.")] = "table",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: standard output]")] = None,
) -> None:
    """Show the coefficients of a run's models by name, in natural units, with standard errors if the run has measured them.

    Runs of experiments with inference: true measure them. With known clusters (hlm_exact) variance components and ICC are below the table.
    """
    from coterie_deploy.read.coefficients import Asked
    from coterie_deploy.view.coefficients_page import print_coefficients

    print_coefficients(run, stage, Asked(tuple(user or ()), cluster, level, errors, everyone), form, output, console_on())


LINK = "RATE/DELAY"
KEYS = "stage, round, step, kind, direction, scope, cluster, link, user, attempt"


@app.command()
def ledger(
    run: options.RunFolder,
    stage: Annotated[str | None, typer.Option(help="Only this stage, or session.")] = None,
    total: Annotated[bool, typer.Option("--total", help="Only all stages together.")] = False,
    by: Annotated[str | None, typer.Option(metavar="KEY,...", help=f"Totals by any of {KEYS}.")] = None,
    rounds: Annotated[str | None, typer.Option(metavar="A:B", help="Only these: 100:200, 100:, :200, 7.")] = None,
    until: Annotated[str | None, typer.Option(metavar="GOAL", help="Only until gap=1e-3, say, was reached.")] = None,
    member: Annotated[list[str] | None, typer.Option(metavar="USER", help="Only this user's share.")] = None,
    step: Annotated[list[str] | None, typer.Option(metavar="STEP", help="Only this step.")] = None,
    direction: Annotated[list[str] | None, typer.Option(metavar="up|down", help="Only one way.")] = None,
    scope: Annotated[list[str] | None, typer.Option(metavar="SCOPE", help="within, between or direct.")] = None,
    cluster: Annotated[list[str] | None, typer.Option(metavar="CLUSTER", help="Only this one.")] = None,
    link: Annotated[list[str] | None, typer.Option(metavar="LINK", help="Only with HOST, or AGGREGATOR/HOST.")] = None,
    repeats: Annotated[bool, typer.Option("--repeats", help="Show repeated and late messages instead.")] = False,
    sort: Annotated[str | None, typer.Option(metavar="MEASURE", help="Largest first: wire, vectors, ...")] = None,
    format_: Annotated[str | None, typer.Option("--format", metavar="FORMAT", help="table, csv, jsonl, parquet.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: standard output]")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the books. Exit code 1 if they differ.")] = False,
) -> None:
    """Show what a run communicated, next to the closed form.

    A row is a step of the method: S1 to S10 as in the paper's Algorithm 1, S7+S10 the vector that replaces both in placement lean, S0 the
    start, control all messages outside the method. A vector is one model; wire = message + 5 bytes for each gRPC frame.

    Options that select a part can be repeated. Without --by, csv, jsonl and parquet have the rows of the ledger itself.
    """
    from coterie_deploy.view.ledger_tables import Wanted, print_part

    parts = {"step": step, "direction": direction, "scope": scope, "cluster": cluster, "link": link, "member": member}
    limits = {what: tuple(values) for what, values in parts.items() if values}
    wanted = Wanted(limits, by, rounds, stage, until, sort, format_, output, repeats, total)
    if verify:
        from coterie_deploy.read.verify import print_verification

        if wanted != Wanted():
            raise ConfigError("--verify judges the whole run, want it without other options")
        raise typer.Exit(0 if print_verification(run, console_on()) else 1)
    if total and stage is not None:
        raise ConfigError(f"--total is all stages together, want it without --stage {stage}")
    if wanted.is_more_than_a_page:
        print_part(run, wanted, console_on())
        return
    from coterie_deploy.read.ledger_page import print_ledger

    print_ledger(run, stage, console_on(), total=total)


@app.command()
def project(
    run: options.RunFolder,
    between: Annotated[str | None, typer.Option(metavar=LINK, help="Coordinator and aggregators.")] = None,
    within: Annotated[str | None, typer.Option(metavar=LINK, help="Aggregator and its hosts.")] = None,
    direct: Annotated[str | None, typer.Option(metavar=LINK, help="Coordinator and hosts, in a flat run.")] = None,
    peers: Annotated[str | None, typer.Option(metavar=LINK, help="Two aggregators, with topology peers.")] = None,
) -> None:
    """Estimate how long a finished run would take on other links, such as 20Mbit/40ms, from its ledger and its measured time.

    Links that are not given stay the same. A turn is a task and its reply: two delays, and the transmission of both.
    """
    from coterie_deploy.view.project import print_projection

    print_projection(run, {"direct": direct, "between": between, "within": within, "peers": peers}, console_on())


class FigureFormat(StrEnum):
    pdf = "pdf"
    svg = "svg"
    png = "png"


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or that of a comparison; several runs are compared.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write.  [default: RUN/report.html]")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the charts as figures too.")] = None,
    formats: Annotated[list[FigureFormat] | None, typer.Option("--format", help="Of figures.  [default: pdf]")] = None,
    goal: Annotated[str | None, typer.Option(metavar="FIGURE=VALUE", help="Compare the cost of: gap=1e-3.")] = None,
    up_weight: Annotated[float, typer.Option(min=0, help="One byte up costs as much as so many down.")] = 1.0,
) -> None:
    """Write a report: one HTML file with curves, traffic, clusters, users and events, that needs no network."""
    if formats and figures is None:
        raise ConfigError(f"--format {formats[0].value} is for figures, want --figures DIR with it")
    from coterie_deploy.read.costs import Weighing
    from coterie_deploy.read.shipped import runs_in
    from coterie_deploy.terminal.tables import counted
    from coterie_deploy.terminal.waiting import waiting
    from coterie_deploy.view.report_page import REPORT, write_report
    from coterie_server.record.curves import goal_from

    weighing = Weighing(None if goal is None else goal_from(goal), up_weight)
    output = output or (runs[0] / REPORT if len(runs) == 1 else None)
    runs = [one for folder in runs for one in runs_in(folder)]
    chosen = [form.value for form in formats or [FigureFormat.pdf]]
    with waiting(console_on(stderr=True), f"writing the report of {counted(len(runs), 'run')}"):
        page, drawn = write_report(runs, output, weighing, figures, chosen)
    typer.echo(f"report: {page}")
    if figures is not None:
        typer.echo(f"{len(drawn)} figures in {figures}")


@app.command()
def watch(
    run: options.RunFolder,
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait so long for the run folder.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and stop.")] = False,
) -> None:
    """Watch a run until it ends, whoever started it: exit code 0, or 3 if it failed or was killed."""
    from coterie_deploy.view.watch import watch as watch_here

    watch_here(run, console_on(), patience_s=patience, once=once)


@app.command()
def export(
    run: options.RunFolder,
    to: Annotated[str, typer.Option(metavar="tensorboard|mlflow", help="The tool.")],
    output: Annotated[str, typer.Option(metavar="DIR", help="A folder; for MLflow also a tracking URI.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
) -> None:
    """Export a run's metrics to TensorBoard or MLflow, against rounds and bytes. A second export adds what is new."""
    from coterie_deploy.read.export import export as write
    from coterie_deploy.terminal.tables import counted

    typer.echo(f"{counted(write(run, to, output, follow=follow), 'value')} added to {output}")


@app.command()
def events(
    run: options.RunFolder,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; may be given again.")] = None,
    level: Annotated[LogLevel, typer.Option(help="The least important level.")] = LogLevel.debug,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="2026-01-31T12:00Z, or 5m ago.")] = None,
    form: Annotated[Literal["table", "jsonl", "csv"], typer.Option("--format", help="A table, or an event a line.")] = "table",
    follow: Annotated[bool, typer.Option("--follow", help="Also print new events until the run stops.")] = False,
) -> None:
    """Show the events of a run: hosts that joined, were refused, lost or left out, warnings, resumes, and the end.

    With --follow, exit code 0 if the run finished, or 3 if it failed or was killed.
    """
    from coterie_deploy.view.events_page import Asked, print_events

    print_events(run, Asked(kind or (), level, since), form, console_on(), follow=follow)


@app.command()
def dashboard(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="Runs in and below it.")] = Path("runs"),
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where browsers find it.")] = "127.0.0.1:8700",
    insecure: options.Insecure = False,
) -> None:
    """Show all runs below a folder in a browser: live curves, traffic, members, comparisons, downloads. It only reads."""
    from coterie.extras import needed

    needed("uvicorn", "dashboard")
    needed("starlette", "dashboard")
    from coterie_deploy.view.dashboard.serve import serve_dashboard

    raise typer.Exit(serve_dashboard(runs, listen, insecure=insecure))
