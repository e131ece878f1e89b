"""The commands that look at runs, finished or under way."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

from __future__ import annotations

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
    stage: Annotated[str | None, typer.Option(help="Whose clusters.  [default: the result's]")] = None,
) -> None:
    """Show a run, finished or under way: all stages, warnings, and who is in which cluster."""
    from coterie_deploy.view.show import print_run

    print_run(run, stage, console_on())


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
    repeats: Annotated[bool, typer.Option("--repeats", help="Instead: sent again, late or repeated.")] = False,
    sort: Annotated[str | None, typer.Option(metavar="MEASURE", help="Largest first: wire, vectors, ...")] = None,
    format_: Annotated[str | None, typer.Option("--format", metavar="FORMAT", help="table, csv, jsonl, parquet.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: standard output]")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Does it agree with itself? Exit code 1 if not.")] = False,
) -> None:
    """Show what a run communicated, beside the closed form.

    A row is a step of the method: S1 to S10 as numbered in the paper's Algorithm 1, S7+S10 the one vector that takes the place of both in
    placement lean, S0 the start, control what is no message of a method. A vector is one model; wire = message + 5 bytes a gRPC frame.

    Options for a part of it can be given more than once. Without --by, csv, jsonl and parquet have the rows of the ledger itself.
    """
    from coterie_deploy.view.ledger_tables import Wanted, print_part

    wanted = Wanted(
        by=by,
        rounds=rounds,
        members=tuple(member or ()),
        steps=tuple(step or ()),
        directions=tuple(direction or ()),
        scopes=tuple(scope or ()),
        clusters=tuple(cluster or ()),
        links=tuple(link or ()),
        stage=stage,
        until=until,
        sort=sort,
        format=format_,
        output=output,
        repeats=repeats,
        total=total,
    )
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
) -> None:
    """Estimate how long a finished run would take on other links, such as 20Mbit/40ms: from its ledger and the time it has taken.

    Links that are not given stay what they were. A turn is a task and its reply: two delays, and the transmission of both.
    """
    from coterie_deploy.view.project import print_projection

    print_projection(run, {"direct": direct, "between": between, "within": within}, console_on())


class FigureFormat(StrEnum):
    """How a figure is written."""

    pdf = "pdf"
    svg = "svg"
    png = "png"


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: RUN/report.html]")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the charts as figures too.")] = None,
    formats: Annotated[list[FigureFormat] | None, typer.Option("--format", help="Of figures.  [default: pdf]")] = None,
    goal: Annotated[str | None, typer.Option(metavar="FIGURE=VALUE", help="Compare the cost of: gap=1e-3.")] = None,
    up_weight: Annotated[float, typer.Option(min=0, help="Bytes down that a byte up is worth.")] = 1.0,
) -> None:
    """Write a report: one HTML file with curves, traffic, clusters, users and events, that needs no network."""
    if formats and figures is None:
        raise ConfigError(f"--format {formats[0].value} is for figures, want --figures DIR with it")
    from coterie_deploy.read.costs import Weighing
    from coterie_deploy.view.report_page import write_report
    from coterie_server.record.curves import goal_from

    weighing = Weighing(None if goal is None else goal_from(goal), up_weight)
    chosen = [form.value for form in formats or [FigureFormat.pdf]]
    written = write_report(runs, output, weighing, figures, chosen)
    typer.echo(f"report: {written.page}")
    if figures is not None:
        typer.echo(f"{len(written.figures)} figures in {figures}")


@app.command()
def watch(
    run: options.RunFolder,
    patience: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Without a run folder.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, and do not wait.")] = False,
) -> None:
    """Watch a run until it has finished, whoever has started it: exit code 0, or 3 when it has failed or was killed."""
    from coterie_deploy.view.watch import watch as watch_here

    watch_here(run, console_on(), patience_s=patience, once=once)


@app.command()
def export(
    run: options.RunFolder,
    to: Annotated[str, typer.Option(metavar="tensorboard|mlflow", help="For which tool.")],
    output: Annotated[str, typer.Option(metavar="DIR", help="A folder; for MLflow also a tracking URI.")],
    follow: Annotated[bool, typer.Option("--follow", help="Until the run is over.")] = False,
) -> None:
    """Give a run's metrics to TensorBoard or MLflow, each against rounds and against bytes. Again: what is new since."""
    from coterie_deploy.read.export import export as write
    from coterie_deploy.terminal.tables import counted

    typer.echo(f"{counted(write(run, to, output, follow=follow), 'value')} added to {output}")


@app.command()
def events(
    run: options.RunFolder,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; may be given again.")] = None,
    level: Annotated[LogLevel, typer.Option(help="From this one on.")] = LogLevel.debug,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="2026-01-31T12:00Z, or 5m ago.")] = None,
    form: Annotated[Literal["table", "jsonl", "csv"], typer.Option("--format", help="A table, or an event a line.")] = "table",
    follow: Annotated[bool, typer.Option("--follow", help="And those to come, until the run stops.")] = False,
) -> None:
    """Show what has happened in a run: who joined, was refused, lost or left out, warnings, resumes, and how it ended.

    With --follow, exit code 0 when the run has finished, or 3 when it has failed or was killed.
    """
    from coterie_deploy.view.events_page import Asked, print_events

    print_events(run, Asked(kind or (), level, since), form, console_on(), follow=follow)


@app.command()
def dashboard(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="Runs in and below it.")] = Path("runs"),
    listen: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:8700",
    insecure: options.Insecure = False,
) -> None:
    """Show all runs below a folder in a browser: live curves, traffic, who is there, comparisons, downloads. It only reads."""
    from coterie_deploy.view.pages import needed

    needed("uvicorn", "dashboard")
    needed("starlette", "dashboard")
    from coterie_deploy.view.dashboard.serve import serve_dashboard

    raise typer.Exit(serve_dashboard(runs, listen, insecure=insecure))
