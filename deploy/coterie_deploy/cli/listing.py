"""`coterie experiments`."""

from __future__ import annotations

from rich.console import Console

from coterie_client.data import count_users
from coterie_deploy.read.shipped import load, shipped
from coterie_deploy.terminal.tables import count, table


def print_experiments(console: Console) -> None:
    """The shipped experiments with method, number of users and the first sentence of their description."""
    rows = []
    for name in shipped():
        experiment = load(name)
        n_users = count_users(experiment.data, experiment.seed)
        rows.append([name, experiment.method.name, count(n_users), " ".join(experiment.description.split()).partition(". ")[0].rstrip(".")])
    built = table("Shipped experiments", ["name", "method", "users", "description"], rows, n_text=2)
    built.columns[0].no_wrap = True
    built.columns[3].justify, built.columns[3].no_wrap = "left", False
    console.print(built)
