"""`coterie certify`: the penalties for which a partition of an experiment's users solves convex clustering exactly.

The partition is the known one, or that of a finished run. The command is a federated run of the method `certify`. Where the run has kept
duality gaps, they are its certificate, on a graph too: the conditions of the method are for all pairs, with one weight.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_to_json, load_experiment
from coterie.methods import pdmm, son_newton
from coterie.methods.certify import Config
from coterie_client.data import list_users
from coterie_deploy.engines.api import Result, run
from coterie_deploy.read.archives import arrays_of
from coterie_deploy.terminal.tables import counted, figure, is_narrow, is_tiny, say_left_out, table
from coterie_deploy.terminal.waiting import waiting
from coterie_server.record.rundb import read_run

# The penalty in the text's conventions is LAM over these.
CONVENTIONS = ("LAM", "lambda_eq3", "lambda_eq14")
INTERVAL = (("lower end", "lower_end", ""), ("upper end", "upper_end", ""))
LINES = (
    ("two clusters merge at", "merging_penalty", ""),
    ("penalty looked at", "at", ""),
    ("  needed there: exact", "exact", "exact_holds"),
    ("  needed there: Theorem 1", "theorem1", "theorem1_holds"),
    ("  Theorem 2: less than", "theorem2", "theorem2_holds"),
)
NOTES = (
    "Every penalty between the ends, if there are any, gives exactly these clusters. The last lines are about the penalty looked at alone. "
    "needed there: the least pull that holds users around the cluster models at that penalty. With another penalty the models are others "
    "and need another pull, so it is no end of the interval. exact: there is a certificate of optimality; Theorems 1 and 2: (6) and (13) "
    "of the paper, which ask for more."
)

PROOF = (
    "duality gap: by how much of the objective it may be above its minimum. It is that of the quadratic model at the models found: exact "
    "for squared losses, near it at a solution for others, and an estimate where users sent gradients alone. With method.certificate it is "
    "exact for each loss."
)


@dataclass(frozen=True)
class Proved:
    """A stage of a run that has kept its duality gap."""

    stage: str
    clusters: int
    objective: float
    gap: float  # over the objective


def certify(
    experiment: Experiment | Path,
    *,
    hosts: int = 1,
    overrides: Sequence[str] = (),
    partition: str | Path = "known",
    data: Path | None = None,
) -> None:
    """Certifies "known", or the final clusters of the run in the folder `partition`, and prints the interval as a table.

    It takes the experiment's data and loss, and its method's penalty if there is a single one, at which it checks the theorems. `data` is
    the folder that data paths start in. The duality gaps that the run has kept are printed first; with a `graph` they are all. Raises
    ConfigError for a folder that is no finished run with clusters, for users without a known cluster, and for a graph without gaps.
    """
    chosen = load_experiment(experiment, overrides) if isinstance(experiment, Path) else experiment
    if str(partition) != "known":
        check_belongs(Path(partition), chosen)
    proved = [] if str(partition) == "known" else proved_in(Path(partition))
    if proved:
        show_proved(proved, Console(highlight=False))
    if getattr(chosen.method, "graph", "complete") != "complete":
        if proved:
            return
        how = "a run of son_newton keeps duality gaps instead, which --partition RUN prints"
        raise ConfigError(f"method.graph is not complete, but the conditions for clusters are on all pairs of users: {how}")
    wanted = certification(chosen, partition, data)
    with waiting(Console(stderr=True, highlight=False), f"certifying {wanted.name}"):
        result = run(wanted, hosts=hosts, overrides=() if isinstance(experiment, Path) else overrides, data=data)
    show(result, Console(highlight=False))


def certification(experiment: Experiment, partition: str | Path = "known", data: Path | None = None) -> Experiment:
    """The experiment with the method `certify` instead of its own."""
    method = experiment.method if isinstance(experiment.method, Config) else Config(at=_penalty_of(experiment, data))
    if str(partition) != "known":
        method = Config(labels=found_labels(Path(partition)), tolerance=method.tolerance, at=method.at)
    return experiment.model_copy(update={"method": method, "references": (), "inference": False, "exact_sums": False})


def found_labels(folder: Path) -> dict[str, str]:
    """The clusters of the run's final stage, by user name. ConfigError when there are none, RunError when their file is damaged."""
    with read_run(folder) as connection:
        row = connection.execute("SELECT value FROM run WHERE key = 'final_stage'").fetchone()
    if row is None:
        raise ConfigError(f"the run in {folder} has not finished, want one with final models")
    path = folder / "models" / f"{row[0]}.npz"
    with arrays_of(path) as arrays:
        users, labels = arrays["users"], arrays.get("labels")
    if labels is None:
        raise ConfigError(f"the final stage {row[0]!r} of the run in {folder} has no clusters, want a run that finds some")
    return {str(user): str(int(label)) for user, label in zip(users, labels, strict=True)}


def check_belongs(folder: Path, experiment: Experiment) -> None:
    """ConfigError where the run in a folder had other data, another problem or another seed than the experiment."""
    with read_run(folder) as connection:
        row = connection.execute("SELECT value FROM run WHERE key = 'experiment'").fetchone()
    if row is None:
        return
    found, wanted = json.loads(row[0]), json.loads(experiment_to_json(experiment))
    for part in ("data", "problem", "seed"):
        if found.get(part) != wanted[part]:
            run_s, own = f"the run of {found.get('name')!r} in {folder}", f"experiment {wanted['name']!r}"
            raise ConfigError(f"{run_s} has another {part} than {own}: its clusters are of other losses, want a run with the same {part}")


def proved_in(folder: Path) -> list[Proved]:
    """The stages of the finished run in a folder that have kept a duality gap."""
    query = (
        "SELECT number, stages.name, results.name, value FROM stages JOIN results ON stage = number WHERE value IS NOT NULL ORDER BY number"
    )
    stages: dict[tuple[int, str], dict[str, float]] = {}
    with read_run(folder) as connection:
        for number, stage, name, value in connection.execute(query):
            stages.setdefault((number, stage), {})[name] = value
    kept = [(stage, figures) for (_, stage), figures in stages.items() if "duality_gap" in figures]
    return [Proved(stage, int(one["clusters"]), one["objective"], one.get("certified_gap", one["duality_gap"])) for stage, one in kept]


def show_proved(proved: Sequence[Proved], console: Console) -> None:
    """Prints the stages with their gaps."""
    rows = [(one.stage, f"{one.clusters:,}", figure(one.objective), f"{one.gap:.1e}") for one in proved]
    console.print(table("Solutions, and how far from the best they may be", ("stage", "clusters", "objective", "duality gap"), rows))
    console.print(f"\n{PROOF}\n")


def show(result: Result, console: Console) -> None:
    """Prints the interval, if there is one, the theorems' conditions and what it cost; each penalty in three conventions."""
    figures, n_users = result.metrics[result.final_stage], len(result.users)
    lines = LINES if np.isinf(figures["lower_end"]) else (*INTERVAL, *LINES)
    shown = CONVENTIONS[:1] if is_tiny(console) else CONVENTIONS
    rows = []
    for title, key, verdict in lines:
        answer = "" if not verdict else "yes" if figures[verdict] else "no"
        factors = (1, 2 * n_users, 2)[: len(shown)]
        rows.append((title, *(figure(figures[key] / factor) for factor in factors), answer))
    found = "no penalty recovers them exactly"
    if not np.isinf(figures["lower_end"]):
        found = f"exact for LAM in [{figure(figures['lower_end'])}, {figure(figures['upper_end'])}]"
    console.print(f"{counted(int(figures['clusters']), 'cluster')} of {counted(n_users, 'user')}: {found}\n")
    console.print(table("Penalties", ("", *shown, "holds"), rows, gap=1 if is_narrow(console) else 2))
    say_left_out(console, CONVENTIONS[len(shown) :])
    vectors = sum(line["vectors"] for line in result.ledger() if line["stage"] == result.final_stage and line["step"] != "evaluate")
    console.print(f"\n{NOTES}\n")
    console.print(f"{figures['exchanges']:.0f} exchanges, {vectors:,} vectors; only cluster models, gradients and Hessians travelled")


def _penalty_of(experiment: Experiment, data: Path | None) -> float | None:
    """LAM of the experiment's method, when that is convex clustering with a single penalty."""
    method = experiment.method
    if not isinstance(method, pdmm.Config | son_newton.Config) or (method.path is not None and len(method.path) > 1):
        return None
    if isinstance(method, son_newton.Config):
        return method.penalty or (method.path or (None,))[0]
    return method.lam(len(list_users(experiment.data, experiment.seed, data)))


__all__ = ["Proved", "certification", "certify", "check_belongs", "found_labels", "proved_in", "show", "show_proved"]
