"""What is said about a run, at its end and by `coterie show`, from its folder alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, load_experiment
from coterie.registry import method
from coterie_deploy.read.cautions import cautions_of, events_of, shortfalls_of
from coterie_deploy.read.held_out import held_out_sentence
from coterie_deploy.read.ledger_page import SHORT_NOTES, traffic_table
from coterie_deploy.read.shipped import FROZEN
from coterie_deploy.read.steps import steps_said
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, counted, duration, figure, is_narrow, is_tiny, table
from coterie_server.interface.stages import Stage
from coterie_server.record import summary
from coterie_server.record.rundb import read_run
from coterie_server.record.summary import StageSummary, Traffic
from coterie_server.run.coordinator import is_held
from coterie_server.run.plan import stages_of

MAX_STAGES = 12  # shown at the end of a run
_ENDS = {"residuals": "residual", "objective": "gap", "converged": "converged", "no": "no minimum!"}  # by the first word of an outcome


@dataclass(frozen=True)
class Report:
    """What a run folder says."""

    folder: Path
    experiment: Experiment
    facts: Mapping[str, str]
    hosts: Mapping[str, int]  # how many users each has
    stages: Sequence[StageSummary]
    clusters: Mapping[str, float | None]  # of each stage
    traffic: Sequence[Traffic]  # by step
    n_repeated_bytes: int
    short: Mapping[str, None]  # stages that ended too early
    cautions: Sequence[str]
    events: Sequence[str]
    is_at_work: bool  # whether somebody is

    @property
    def final(self) -> StageSummary | None:
        """The stage whose models are the result."""
        return next((stage for stage in self.stages if stage.name == self.facts.get("final_stage")), None)

    @functools.cached_property
    def plan(self) -> Mapping[str, Stage]:
        """The stages that the experiment has, by name."""
        return {stage.name: stage for stage in stages_of(self.experiment)}

    def is_refit(self, stage: StageSummary) -> bool:
        """Whether it gives models to clusters that another stage has found."""
        return stage.name in self.plan and bool(self.plan[stage.name].refits)

    @property
    def best_refit(self) -> StageSummary | None:
        """Of the models for found clusters, those that held-out rows like best."""
        judged = [stage for stage in self.stages if self.is_refit(stage) and "heldout_loss" in stage.results]
        return min(judged, key=lambda stage: stage.results["heldout_loss"], default=None)


def report_of(folder: Path) -> Report:
    """Reads a run folder, also of a run under way. ConfigError when it is none."""
    is_at_work = is_held(folder)  # before what it has written: the last it writes is that it has finished
    with read_run(folder) as connection:
        stages, short = summary.stages(connection), shortfalls_of(connection)
        return Report(
            folder,
            load_experiment(folder / FROZEN),
            summary.facts(connection),
            summary.hosts(connection),
            stages,
            {stage.name: _n_clusters(folder, stage) for stage in stages},
            summary.by_step(summary.traffic(connection)),
            sum(row.message_bytes for row in summary.traffic(connection, repeats=True)),
            dict.fromkeys(shortfall.stage for shortfall in short),
            cautions_of(connection),
            events_of(connection),
            is_at_work=is_at_work,
        )


def print_report(folder: Path, console: Console) -> None:
    """Users, hosts, rounds, clusters, held-out figures of stages, traffic beside its closed form, the result, and where everything is."""
    report, narrow = report_of(folder), is_narrow(console)
    state = f"{report.facts.get('name', folder.name)} {report.facts.get('status', '')}: {extent(report)}"
    console.print(Text(printable(state), style="bold"))
    console.print()
    shown = chosen_stages(report)
    console.print(stage_table(report, shown, narrow=narrow))
    if len(shown) < len(report.stages):
        print(f"all {len(report.stages)} stages: coterie show {folder}", file=console.file)  # not by the console, which would wrap it
    if sentence := held_out_sentence(report.experiment.data):
        console.print(Text(sentence, style="dim"))
    print_cautions(report, console)
    console.print()
    console.print(traffic_table("Traffic by step", report.traffic, narrow=narrow, tiny=is_tiny(console)))
    console.print(Text(SHORT_NOTES, style="dim"))
    console.print(Text(steps_said((row.step for row in report.traffic), report.facts, paper=True), style="dim"))
    if sentence := rounds_sentence(report.final):
        console.print(Text(sentence, style="dim"))
    if report.n_repeated_bytes:
        console.print(Text("Some traffic was repeated: coterie ledger shows it apart.", style="dim"))
    console.print()
    print_result(report, console)
    print(f"run folder: {folder}", file=console.file)


def print_result(report: Report, console: Console) -> None:
    """How well the result does, and, of networks, what users judge."""
    if sentence := result_sentence(report):
        console.print(Text(sentence, style="bold"))
    for sentence in (*judgement_sentences(report), rho_sentence(report)):
        if sentence:
            console.print(Text(sentence))


def print_cautions(report: Report, console: Console) -> None:
    """The warnings, if any."""
    for caution in report.cautions:
        console.print(Text(caution, style="yellow"))


def rounds_sentence(final: StageSummary | None) -> str:
    """How often was averaged, beside what is expected of the coins; empty for methods without."""
    results = {} if final is None else final.results
    scopes = (("between clusters", "between_rounds"), ("inside clusters", "within_rounds"), ("for a new anchor", "anchor_rounds"))
    parts = [
        f"{words} {count(results[key])} (expected {count(results[f'{key}_expected'])})"
        for words, key in scopes
        if key in results and f"{key}_expected" in results
    ]
    return f"rounds of averages: {', '.join(parts)}" if parts else ""


def headline(report: Report) -> str:
    """The extent of a run, or that it has none yet."""
    if report.hosts:
        return extent(report)
    noun = report.experiment.federation.noun
    return f"waiting for {noun}s" if report.is_at_work else f"stopped before all {noun}s were there"


def extent(report: Report) -> str:
    """Users, hosts or aggregators, rounds, time, clusters."""
    n_users, final = sum(report.hosts.values()), report.final
    rounds, seconds = sum(stage.rounds for stage in report.stages), sum(stage.seconds for stage in report.stages)
    parts = [
        counted(n_users, "user"),
        counted(len(report.hosts), report.experiment.federation.noun),
        f"{counted(rounds, 'round')} in {duration(seconds)}",
    ]
    finds_none = final is None or is_reference(final) or method(final.method).has_known_clusters
    n_clusters = None if final is None or finds_none else report.clusters[final.name]
    if n_clusters is not None:
        parts.append("every user has its own model" if n_clusters == n_users > 1 else f"{counted(int(n_clusters), 'cluster')} found")
    return ", ".join(parts)


def chosen_stages(report: Report) -> list[StageSummary]:
    """References, start, result and best refit; of the others those near the result, as long as there is room."""
    final, refit = report.final, report.best_refit
    wanted = {stage.number for stage in report.stages if stage in (final, refit) or is_reference(stage)}
    centre = len(report.stages) if final is None else final.number
    others = sorted(
        (stage for stage in report.stages if stage.number not in wanted),
        key=lambda stage: (report.is_refit(stage), abs(stage.number - centre)),
    )
    wanted |= {stage.number for stage in others[: max(0, MAX_STAGES - len(wanted))]}
    return [stage for stage in report.stages if stage.number in wanted]


def stage_table(report: Report, stages: Sequence[StageSummary], *, narrow: bool) -> Table:
    """One line for each stage. The held-out loss is left out where it is half of the squared error, and says nothing more."""
    judged = [(stage.results["heldout_loss"], stage.results["heldout_metric"]) for stage in stages if "heldout_metric" in stage.results]
    with_loss = any(abs(metric - 2 * loss) > 1e-9 * abs(metric) for loss, metric in judged)
    with_clusters = any(report.clusters[stage.name] is not None for stage in stages) or not stages
    rows = []
    for stage in stages:
        name = f"{stage.name} *" if stage.name == report.facts.get("final_stage") else stage.name
        loss = [figure(stage.results.get("heldout_loss"))] if with_loss else []
        clusters = [count(report.clusters[stage.name])] if with_clusters else []
        metric = [figure(stage.results.get("heldout_metric"))] if judged else []
        rows.append([name, ended_by(stage, report), count(stage.rounds), *clusters, *loss, *metric])
    more = [*(["clusters"] if with_clusters else []), *(["loss"] if with_loss else [])]
    columns = ["stage", "ended by", "rounds", *more, *([metric_name(report.experiment)] if judged else [])]
    title = "Stages (* the result)" + (", judged on held-out rows" if judged else "")
    return table(title, columns, rows, n_text=2, gap=1 if narrow else 2)


def rho_of(stage: StageSummary) -> str:
    """The first and the last rho of a stage of `pdmm`, a dash for others."""
    first, last = stage.results.get("rho_first"), stage.results.get("rho")
    if first is None or last is None:
        return figure(None)
    return figure(last, 2) if first == last else f"{figure(first, 2)} to {figure(last, 2)}"


def rho_sentence(report: Report) -> str:
    """The rho that the first stage of `pdmm` began with, and that with which the last one ended; empty for other methods."""
    found = [stage for stage in report.stages if "rho_first" in stage.results and "rho" in stage.results]
    if not found:
        return ""
    first, last = found[0].results["rho_first"], found[-1].results["rho"]
    return f"rho: {figure(first, 2)}" if first == last else f"rho: {figure(first, 2)} at the start, {figure(last, 2)} at the end"


def cluster_rule(report: Report, stage: str) -> str:
    """When users of a stage count as together; empty where it finds no clusters of its own."""
    is_own = any(one.name == stage and one.method == report.experiment.method.name for one in report.stages)
    return method(report.experiment.method.name).cluster_rule(report.experiment.method) if is_own else ""


def is_reference(stage: StageSummary) -> bool:
    """Whether it is that of a reference, and not what another method makes of it, such as a refit."""
    return stage.name == stage.method and method(stage.method).is_reference


def ended_by(stage: StageSummary, report: Report) -> str:
    """Why a stage ended, in a word or two."""
    if not stage.outcome:
        return "under way" if report.is_at_work else "stopped"
    first = stage.outcome.partition(" ")[0]
    limit = "time" if stage.outcome.endswith(" s") else stage.outcome.rpartition(" ")[2]
    return _ENDS.get(first, f"max {limit}!" if stage.name in report.short else limit)


def metric_name(experiment: Experiment) -> str:
    """What `heldout_metric` is."""
    if (known := experiment.problem.metric) != "metric":
        return known.replace("_", " ")
    try:  # a machine that only coordinates has no losses, and no torch
        if experiment.model is not None:
            from coterie_client.nets.losses import resolve_network_loss  # noqa: PLC0415

            loss = resolve_network_loss(experiment.problem.loss)
            return "metric" if loss.metric is not None else "accuracy" if loss.has_classes else "squared error"
        from coterie_client.problems.resolve import resolve_row_loss  # noqa: PLC0415

        return "accuracy" if resolve_row_loss(experiment.problem).is_classifier else "squared error"
    except (ConfigError, ImportError):
        return "metric"  # the loss is code that is not here


def result_sentence(report: Report) -> str:
    """How well the result does beside the references; "" where nobody has held-out rows."""
    final, refit = report.final, report.best_refit
    value = {stage.name: figure(stage.results.get("heldout_metric"), 3) for stage in report.stages if "heldout_metric" in stage.results}
    parts = []
    if final is not None and final.name in value and not is_reference(final):
        whose = "one model for all" if f"global_{report.experiment.problem.metric}" in final.results else "personalized"
        parts.append(f"{whose} {value[final.name]} ({final.name})")
    if refit is not None and refit is not final and refit.name in value:
        parts.append(f"refitted clusters {value[refit.name]} ({refit.name}, {counted(int(report.clusters[refit.name] or 0), 'cluster')})")
    parts += [f"{name} {value[name]}" for name in sorted(stage.name for stage in report.stages if is_reference(stage)) if name in value]
    metric = metric_name(report.experiment).replace("squared", "mean squared")
    return f"held-out {metric}: {', '.join(parts)}" if parts else ""


_JUDGED = {  # what users judge, in the order in which it is said
    "personal": "personal models",
    "personal_ft_head": "personal models with the head fine-tuned",
    "personal_ft_all": "personal models with all of it fine-tuned",
    "global": "the global model",
    "global_ft_head": "the global model with the head fine-tuned",
    "global_ft_all": "the global model with all of it fine-tuned",
}


def judgement_sentences(report: Report) -> list[str]:
    """How well users do who judge their models themselves, before and after fine-tuning; empty for other methods."""
    results = {} if report.final is None else report.final.results
    metric, said = report.experiment.problem.metric, []
    for key, words in _JUDGED.items():
        if (name := f"{key}_{metric}") in results:
            whose = words if report.experiment.model is not None else words.replace(" with the head", "").replace(" with all of it", "")
            low, middle, high = (figure(results[f"{name}_{which}"], 3) for which in ("q1", "median", "q3"))
            said.append(f"{whose}: {figure(results[name], 3)} on average (quartiles of the users {low}, {middle}, {high})")
    if f"{metric}_before" in results:
        said.insert(0, f"before the head was trained: {figure(results[f'{metric}_before'], 3)}")
    if f"last_rounds_{metric}" in results:
        said.append(f"mean over the last rounds: {figure(results[f'last_rounds_{metric}'], 3)}")
    return said


def _n_clusters(folder: Path, stage: StageSummary) -> float | None:
    """How many clusters a stage ends with: as its method says, or as its models are labelled."""
    path = folder / "models" / f"{stage.name}.npz"
    if "clusters" in stage.results or not path.is_file():
        return stage.results.get("clusters")
    with np.load(path) as arrays:
        return float(arrays["labels"].max() + 1) if "labels" in arrays else None
