"""`coterie show`: a run, finished or under way: its state, all stages, warnings, and who is in which cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from coterie.errors import ConfigError
from coterie_deploy.read.feature_lines import feature_lines, features_in
from coterie_deploy.read.ledger_page import status_of
from coterie_deploy.read.report import Report, cluster_rule, headline, print_cautions, print_result, report_of, stage_table
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import counted, is_narrow

MAX_CLUSTERS = 20  # listed with their members


def print_run(folder: Path, stage: str | None, console: Console) -> None:
    """The state of a run and the clusters of one stage, by default of the result. ConfigError for an unknown run or stage."""
    report = report_of(folder)
    name = report.facts.get("final_stage") if stage is None else stage
    if name is not None and name not in report.clusters:
        raise ConfigError(f"the run has no stage {name!r}, want one of {', '.join(report.clusters) or 'none yet'}")
    facts = report.facts
    state = f"{facts.get('name', folder.name)}, run {facts.get('run_id', '?')}: {status_of(report.folder, facts)}"
    console.print(Text(printable(state), style="bold"))
    console.print(Text(headline(report)))
    for line in feature_lines(features_in(facts), console.width):
        print(line, file=console.file)
    console.print()
    if report.stages:
        console.print(stage_table(report, report.stages, narrow=is_narrow(console)))
    print_cautions(report, console)
    for event in report.events:
        console.print(Text(printable(f"note: {event}"), style="yellow"))
    if report.stages:
        console.print()
    for line in _cluster_lines(report, name, console.width):
        print(printable(line), file=console.file)  # not by the console, which would wrap it
    print_result(report, console)
    print(f"run folder: {folder}", file=console.file)


def _cluster_lines(report: Report, stage: str | None, width: int) -> list[str]:
    """The members of each cluster, largest clusters first, and an empty line."""
    path = report.folder / "models" / f"{stage}.npz"
    if stage is None or not path.is_file():
        is_settled = report.is_at_work or report.facts.get("status") == "finished"
        return [f"models and clusters are there when the run has finished{'' if is_settled else ': it can be resumed'}", ""]
    with np.load(path) as arrays:
        users = [str(user) for user in arrays["users"]]
        labels = arrays["labels"].tolist() if "labels" in arrays else None
    if labels is None:
        return []
    members: dict[int, list[str]] = {}
    for user, label in zip(users, labels, strict=True):
        members.setdefault(label, []).append(user)
    groups = sorted((group for group in members.values() if len(group) > 1), key=lambda group: -len(group))
    rule = cluster_rule(report, stage)
    lines = [f"Clusters of {stage}{f': {rule}' if rule else ''}"]
    lines += [shortened(f"  {counted(len(group), 'user')}: ", group, width) for group in groups[:MAX_CLUSTERS]]
    if len(groups) > MAX_CLUSTERS:
        lines.append(f"  and {len(groups) - MAX_CLUSTERS} more clusters with up to {counted(len(groups[MAX_CLUSTERS]), 'user')}")
    if alone := [group[0] for group in members.values() if len(group) == 1]:
        lines.append(shortened(f"  {len(alone)} on their own: " if len(alone) > 1 else "  1 on its own: ", alone, width))
    return [*lines, ""]


def shortened(start: str, names: Sequence[str], width: int) -> str:
    """The names after `start` as far as they fit in a line, at least one."""
    whole = start + ", ".join(names)
    for n_shown in range(len(names) - 1, 0, -1):
        if len(whole) <= width:
            break
        whole = f"{start}{', '.join(names[:n_shown])}, {len(names) - n_shown} more"
    return whole
