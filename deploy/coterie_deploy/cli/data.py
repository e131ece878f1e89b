"""The commands about data and models: what is asked of a host, its owner's policy, and what a run has left."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from coterie_deploy.cli import options
from coterie_deploy.cli.options import app, console_on


@app.command("data")
def describe_data(
    experiment: options.ExperimentName,
    overrides: options.Overrides = None,
    seed: options.Seed = None,
    data: options.Data = None,
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


policies = typer.Typer(help="Write down what an experiment may ask of this machine's data.")
app.add_typer(policies, name="policy")


@policies.command("init")
def init_policy_file(
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A table: .csv, .csv.gz, .parquet, .dta or .sav.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: policy.yaml beside it]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also where there is one.")] = False,
) -> None:
    """Write a first policy for a table, to be read and cut down by its owner."""
    from coterie_deploy.cli.policy_init import init_policy

    typer.echo(init_policy(table, output or table.with_name("policy.yaml"), overwrite=overwrite))


@app.command()
def predict(
    run: options.RunFolder,
    table: Annotated[Path, typer.Argument(metavar="DATA", help="A table with the features; for networks NPZ too.")],
    user: Annotated[str, typer.Option(help="Whose model.")],
    stage: Annotated[str | None, typer.Option(help="[default: the final one]")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: standard output]")] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Networks: a client's state folder.")] = None,
) -> None:
    """Apply a user's final model to the rows of a table."""
    from coterie_deploy.read.predict import predict as write_predictions

    write_predictions(run, user, table, stage, out, sys.stdout, state)


@app.command()
def models(
    run: options.RunFolder,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("models"),
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="State folder of clients elsewhere.  [default: the run's own]")] = None,
    user: Annotated[list[str] | None, typer.Option(help="Only this user; may be given again.")] = None,
) -> None:
    """Export the users' networks, shared and private tensors together: a safetensors file each, and the model's configuration."""
    from coterie_deploy.read.models import export
    from coterie_deploy.terminal.tables import counted

    written = export(run, output, state, user)
    typer.echo(f"{counted(len(written), 'model')} in {output}")
