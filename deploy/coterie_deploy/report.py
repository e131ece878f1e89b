"""What is said about a run at its end, from its folder alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.config import Experiment, load_experiment
from coterie_deploy.books import SHORT_NOTES, traffic_table
from coterie_deploy.shipped import FROZEN
from coterie_deploy.tables import count, counted, duration, figure, is_narrow, table
from coterie_server import summary
from coterie_server.rundb import open_run
from coterie_server.summary import StageSummary

MAX_STAGES = 12  # shown one by one
_KNOWN_CLUSTERS = ("global", "oracle")  # stages that are given their clusters


def metric_name(experiment: Experiment) -> str:
    """What `heldout_metric` is."""
    return {"squared_hinge": "accuracy", "logistic": "accuracy"}.get(experiment.problem.loss, "squared error")


def print_report(folder: Path, console: Console) -> None:
    """Users, hosts, rounds, clusters, held-out figures of each stage, traffic beside its closed form, and where everything is."""
    experiment = load_experiment(folder / FROZEN)
    with contextlib.closing(open_run(folder)) as connection:
        facts, hosts, stages = summary.facts(connection), summary.hosts(connection), summary.stages(connection)
        traffic = summary.by_step(summary.traffic(connection))
        n_repeated = sum(row.message_bytes for row in summary.traffic(connection, repeats=True))
    final = facts.get("final_stage", "")
    rounds, seconds = sum(stage.rounds for stage in stages), sum(stage.seconds for stage in stages)
    parts = [counted(sum(hosts.values()), "user"), counted(len(hosts), "host"), f"{counted(rounds, 'round')} in {duration(seconds)}"]
    clusters = {stage.name: _n_clusters(folder, stage) for stage in stages}
    if clusters.get(final) is not None and final not in _KNOWN_CLUSTERS:
        parts.append(f"{counted(int(clusters[final] or 0), 'cluster')} found")
    console.print(Text(f"{facts.get('name', folder.name)} {facts.get('status', '')}: {', '.join(parts)}", style="bold"))
    console.print()
    console.print(_stage_table(stages, clusters, final, metric_name(experiment), narrow=is_narrow(console)))
    console.print()
    console.print(traffic_table("Traffic by step", traffic, narrow=is_narrow(console)))
    console.print(Text(SHORT_NOTES, style="dim"))
    if n_repeated:
        console.print(Text("Some traffic was repeated: coterie ledger shows it apart.", style="dim"))
    console.print()
    print(f"run folder: {folder}", file=console.file)  # not by the console, which would wrap it


def _n_clusters(folder: Path, stage: StageSummary) -> float | None:
    """How many clusters a stage ends with: as its method says, or as its models are labelled."""
    path = folder / "models" / f"{stage.name}.npz"
    if "clusters" in stage.results or not path.is_file():
        return stage.results.get("clusters")
    with np.load(path) as arrays:
        return float(arrays["labels"].max() + 1) if "labels" in arrays else None


def _stage_table(stages: list[StageSummary], clusters: Mapping[str, float | None], final: str, metric: str, *, narrow: bool) -> Table:
    shown = [stage for stage in stages if stage.name == final or len(stages) <= MAX_STAGES or stage.method != stages[-1].method]
    columns = ["stage", "ended by", "rounds", "clusters", "held-out loss", metric]
    rows = [
        [
            f"{stage.name} *" if stage.name == final else stage.name,
            stage.outcome,
            count(stage.rounds),
            count(clusters[stage.name]),
            figure(stage.results.get("heldout_loss")),
            figure(stage.results.get("heldout_metric")),
        ]
        for stage in shown
    ]
    hidden = len(stages) - len(shown)
    title = "Stages (* the personalized models)" + (f", {hidden} more in coterie ledger" if hidden else "")
    if narrow:
        columns, rows = [columns[0], *columns[2:4], "loss", *columns[5:]], [[row[0], *row[2:]] for row in rows]
    return table(title, columns, rows, n_text=1 if narrow else 2)
