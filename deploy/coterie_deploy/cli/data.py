"""The commands about data and models: an experiment's requests, the owner's policy, and a run's models."""

# ruff: noqa: PLC0415 - each command imports what it needs when it is called, so that a client does not pay for a server

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
    hash_: Annotated[bool, typer.Option("--hash", help="Print the hash for --accept instead.")] = False,
    reveals: Annotated[bool, typer.Option("--reveals", help="Print what hosts are asked, and who learns what.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a data section for a table, or an experiment's: its columns.")] = False,
    split: Annotated[tuple[int, Path] | None, typer.Option(metavar="HOSTS DIR", help="Write a folder of rows for each host.")] = None,
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
    if split is not None:
        from coterie_deploy.cli import data_split

        for sentence in data_split.split(experiment, overrides or (), seed, data, *split):
            typer.echo(sentence)
        return
    loaded = load(experiment, overrides or (), seed=seed)
    if hash_ or reveals:
        from coterie_deploy.roles.consent_page import print_asked

        print_asked(loaded, hash_=hash_, reveals=reveals)
        return
    from coterie_deploy.view.data_page import print_data

    print_data(loaded, data, console_on())


policies = typer.Typer(help="Write a policy: what experiments may ask of this machine's data.")
app.add_typer(policies, name="policy")


@policies.command("init")
def init_policy_file(
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A table: .csv, .csv.gz, .parquet, .dta or .sav.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: policy.yaml beside it]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a first policy for a table, for its owner to edit."""
    from coterie_deploy.cli.policy_init import init_policy

    typer.echo(init_policy(table, output or table.with_name("policy.yaml"), overwrite=overwrite))


@app.command()
def predict(
    run: options.RunFolder,
    table: Annotated[Path, typer.Argument(metavar="DATA", help="A table with the features; for networks NPZ too.")],
    user: Annotated[str | None, typer.Option(help="The user whose model predicts.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="CLUSTER", help="Instead: the model of a cluster, for new users.")] = None,
    everyone: Annotated[bool, typer.Option("--global", help="Instead: the model of everyone, for new users.")] = False,
    stage: Annotated[str | None, typer.Option(help="[default: the final one]")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="[default: standard output]")] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Networks: a client's state folder.")] = None,
) -> None:
    """Apply a model of a run to the rows of a table: a user's, or for users that the run has not seen a cluster's or everyone's.

    The column model says which. Loss logistic has a column probability, that of the label 1; the prediction of poisson is a mean count.
    """
    from coterie_deploy.read.predict import predict as write_predictions
    from coterie_deploy.read.shared_models import Whose

    write_predictions(run, Whose(user, cluster, everyone, stage), table, out, sys.stdout, state)


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
