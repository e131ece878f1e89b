"""`coterie show`: a run, finished or under way: its state, all stages, warnings, and the members of each cluster."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from coterie.errors import ConfigError
from coterie_deploy.read.ledger_page import title_of
from coterie_deploy.read.models import stage_models
from coterie_deploy.read.report import Report, cluster_rule, headline, print_result, report_of, stage_table
from coterie_deploy.read.sentences import feature_lines, features_in
from coterie_deploy.read.tabular import csv_text
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import counted, is_narrow, say
from coterie_server.record.summary import unknown_stage

MAX_CLUSTERS = 20  # listed with their members


def print_run(folder: Path, stage: str | None, console: Console, *, in_full: bool = False) -> None:
    """The state of a run and the clusters of one stage, by default of the result. ConfigError for an unknown run or stage.

    Long lists are cut to the width of the console, unless they are asked for `in_full`.
    """
    report = report_of(folder)
    name = _chosen(report, stage)
    say(console, title_of(folder, report.facts, ": "), style="bold")
    say(console, headline(report))
    for line in feature_lines(features_in(report.facts), console.width):
        print(line, file=console.file)
    console.print()
    if report.stages:
        console.print(stage_table(report, report.stages, narrow=is_narrow(console)))
    say(console, *report.cautions, *(f"note: {event}" for event in report.events), style="yellow")
    if report.stages:
        console.print()
    for line in _cluster_lines(report, name, None if in_full else console.width):
        print(printable(line), file=console.file)  # not by the console, which would wrap it
    print_result(report, console)


def print_members(folder: Path, stage: str | None, form: Literal["csv", "jsonl"], console: Console) -> None:
    """The cluster of each user, in member order, as `Run.clusters` has it. ConfigError for a stage without clusters."""
    name = _chosen(report_of(folder), stage)
    if name is None:
        raise ConfigError(f"the run in {folder} has not finished, so it has no clusters yet")
    clusters = stage_models(folder, name).clusters()
    if clusters is None:
        raise ConfigError(f"stage {name!r} has no clusters")
    if form == "csv":
        console.file.write(csv_text(["user", "cluster"], clusters.items()))
    else:
        console.file.writelines(f"{json.dumps({'user': user, 'cluster': label})}\n" for user, label in clusters.items())


def _chosen(report: Report, stage: str | None) -> str | None:
    name = report.facts.get("final_stage") if stage is None else stage
    if name is not None and name not in report.clusters:
        raise unknown_stage(name, report.clusters)
    return name


def _cluster_lines(report: Report, stage: str | None, width: int | None) -> list[str]:
    """The members of each cluster, largest clusters first, and an empty line."""
    if stage is None or not (report.folder / "models" / f"{stage}.npz").is_file():
        is_settled = report.is_at_work or report.facts.get("status") == "finished"
        return [f"models and clusters are there when the run has finished{'' if is_settled else ': it can be resumed'}", ""]
    clusters = stage_models(report.folder, stage).clusters()
    if clusters is None:
        return []
    members: dict[int, list[str]] = {}
    for user, label in clusters.items():
        members.setdefault(label, []).append(user)
    groups = sorted((group for group in members.values() if len(group) > 1), key=lambda group: -len(group))
    most = MAX_CLUSTERS if width is not None else len(groups)
    rule = cluster_rule(report, stage)
    title = f"Clusters of {stage}{f': {rule}' if rule else ''}"
    lines = [title] if width is None else textwrap.wrap(title, width, subsequent_indent="    ")
    listed = [(f"  {counted(len(group), 'user')}: ", group) for group in groups[:most]]
    lines += [shortened(start, names, width) for start, names in listed]
    if len(groups) > most:
        lines.append(f"  and {len(groups) - most} more clusters with up to {counted(len(groups[most]), 'user')}")
    if alone := [group[0] for group in members.values() if len(group) == 1]:
        listed.append((f"  {len(alone)} on their own: " if len(alone) > 1 else "  1 on its own: ", alone))
        lines.append(shortened(*listed[-1], width))
    is_cut = len(groups) > most or any(shortened(*one, width) != shortened(*one, None) for one in listed)
    return [*lines, *["  all of them: coterie show RUN --all, or --format csv"] * is_cut, ""]


def shortened(start: str, names: Sequence[str], width: int | None) -> str:
    """The names after `start`, as many as fit in a line, at least one."""
    whole = start + ", ".join(names)
    if width is None:
        return whole
    for n_shown in range(min(len(names) - 1, width), 0, -1):  # more than `width` names cannot fit
        if len(whole) <= width:
            break
        whole = f"{start}{', '.join(names[:n_shown])}, {len(names) - n_shown} more"
    return whole
