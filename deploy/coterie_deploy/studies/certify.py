"""`coterie certify`: for which penalties does a partition of an experiment's users solve convex clustering exactly?

The partition is the one the users know, or the one that a finished run has found. It is a federated run of the method `certify`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, load_experiment
from coterie.methods import pdmm
from coterie.methods.certify import Config
from coterie_client.data import list_users
from coterie_deploy.engines.api import Result, run
from coterie_deploy.terminal.tables import counted, figure, is_narrow, table
from coterie_server.record.rundb import read_run

# The penalty in the text's conventions is LAM over these.
CONVENTIONS = ("LAM", "lambda_eq3", "lambda_eq14")
INTERVAL = (
    ("lower end", "lower_end", ""),
    ("upper end", "upper_end", ""),
)
LINES = (
    ("two clusters merge at", "merging_penalty", ""),
    ("penalty looked at", "at", ""),
    ("  exact: at least", "exact", "exact_holds"),
    ("  Theorem 1: at least", "theorem1", "theorem1_holds"),
    ("  Theorem 2: less than", "theorem2", "theorem2_holds"),
)
NOTES = (
    "Every penalty between the ends, if there are any, gives exactly these clusters. holds: whether the penalty looked at meets the "
    "condition; exact: there is a certificate of optimality; Theorems 1 and 2: (6) and (13) of the paper, which ask for more."
)


def certify(
    experiment: Experiment | Path,
    *,
    hosts: int = 1,
    overrides: Sequence[str] = (),
    partition: str | Path = "known",
    data: Path | None = None,
) -> None:
    """Certifies "known", or the final clusters of the run in the folder `partition`, and prints the interval as a table.

    The experiment's data and loss are taken, and of its method the penalty, if it has a single one: there the theorems are looked at.
    `data` is the folder that data paths start in. Raises ConfigError for a folder that is no finished run with clusters, and for users
    without a known cluster.
    """
    chosen = load_experiment(experiment, overrides) if isinstance(experiment, Path) else experiment
    wanted = certification(chosen, partition, data)
    show(run(wanted, hosts=hosts, overrides=() if isinstance(experiment, Path) else overrides, data=data), Console(highlight=False))


def certification(experiment: Experiment, partition: str | Path = "known", data: Path | None = None) -> Experiment:
    """The experiment with the method `certify` in the place of its own."""
    method = experiment.method if isinstance(experiment.method, Config) else Config(at=_penalty_of(experiment, data))
    if str(partition) != "known":
        method = Config(labels=found_labels(Path(partition)), tolerance=method.tolerance, at=method.at)
    return experiment.model_copy(update={"method": method, "references": ()})


def found_labels(folder: Path) -> dict[str, str]:
    """The clusters of the run's final stage, by user name. Raises ConfigError when there are none."""
    with read_run(folder) as connection:
        row = connection.execute("SELECT value FROM run WHERE key = 'final_stage'").fetchone()
    if row is None:
        raise ConfigError(f"the run in {folder} has not finished, want one with final models")
    path = folder / "models" / f"{row[0]}.npz"
    try:
        with np.load(path) as arrays:
            users, labels = arrays["users"], arrays["labels"]
    except KeyError:
        raise ConfigError(f"the final stage {row[0]!r} of the run in {folder} has no clusters, want a run that finds some") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot read the clusters in {path}: {error}") from None
    return {str(user): str(int(label)) for user, label in zip(users, labels, strict=True)}


def show(result: Result, console: Console) -> None:
    """Prints the interval, if there is one, the theorems' conditions and what it cost; each penalty in three conventions."""
    figures, n_users = result.metrics[result.final_stage], len(result.users)
    lines = LINES if np.isinf(figures["lower_end"]) else (*INTERVAL, *LINES)
    rows = [
        (title, *(figure(figures[key] / factor) for factor in (1, 2 * n_users, 2)), _answer(figures, verdict))
        for title, key, verdict in lines
    ]
    console.print(f"{counted(int(figures['clusters']), 'cluster')} of {counted(n_users, 'user')}: {_verdict(figures)}\n")
    console.print(table("Penalties, in three conventions", ("", *CONVENTIONS, "holds"), rows, gap=1 if is_narrow(console) else 2))
    vectors = sum(line["vectors"] for line in result.ledger() if line["stage"] == result.final_stage and line["step"] != "evaluate")
    exchanges = int(figures["exchanges"])
    console.print(f"\n{NOTES}\n")
    console.print(f"{exchanges} exchanges, {vectors:,} vectors; only cluster models, gradients and Hessians travelled")


def _answer(figures: Mapping[str, float], verdict: str) -> str:
    return "" if not verdict else "yes" if figures[verdict] else "no"


def _verdict(figures: Mapping[str, float]) -> str:
    if np.isinf(figures["lower_end"]):
        return "no penalty recovers them exactly"
    return f"exact for LAM in [{figure(figures['lower_end'])}, {figure(figures['upper_end'])}]"


def _penalty_of(experiment: Experiment, data: Path | None) -> float | None:
    """LAM of the experiment's method, when that is convex clustering with a single penalty."""
    method = experiment.method
    if not isinstance(method, pdmm.Config) or (method.path is not None and len(method.path) > 1):
        return None
    return method.lam(len(list_users(experiment.data, experiment.seed, data)))


__all__ = ["certification", "certify", "found_labels", "show"]
