"""The report of a run in a terminal, at its end and by `coterie show`, from its folder alone."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, load_experiment
from coterie.experiment.privacy import uncounted
from coterie.families.evaluation import COMMON, OWN
from coterie.families.shares import n_noised, shared
from coterie.registry import method
from coterie_deploy.read.archives import arrays_of
from coterie_deploy.read.cautions import cautions_of, events_of, shortfalls_of
from coterie_deploy.read.ledger_page import SHORT_NOTES, saved_sentences, traffic_left_out, traffic_table
from coterie_deploy.read.sentences import held_out_sentence, steps_said
from coterie_deploy.read.shipped import FROZEN
from coterie_deploy.terminal.tables import count, counted, duration, figure, is_narrow, is_tiny, say, say_left_out, table_of
from coterie_server.interface.stages import Stage
from coterie_server.record import summary
from coterie_server.record.compressed import Saving, savings
from coterie_server.record.rundb import read_run
from coterie_server.record.summary import StageSummary, Traffic
from coterie_server.run.coordinator import is_held
from coterie_server.run.plan import stages_of

MAX_STAGES = 12  # shown at the end of a run
_ENDS = {
    "residuals": "residual",
    "objective": "gap",
    "epsilon": "epsilon",
    "converged": "converged",
    "no": "no minimum!",
}  # by the first word of an outcome


@dataclass(frozen=True)
class Report:
    """The content of a run folder."""

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
    is_at_work: bool  # whether a coordinator is running
    savings: Sequence[Saving] = ()  # by compression

    @property
    def final(self) -> StageSummary | None:
        return next((stage for stage in self.stages if stage.name == self.facts.get("final_stage")), None)

    @functools.cached_property
    def plan(self) -> Mapping[str, Stage]:
        return {stage.name: stage for stage in stages_of(self.experiment)}

    def is_refit(self, stage: StageSummary) -> bool:
        """Whether the stage fits models to the clusters of another stage."""
        return stage.name in self.plan and bool(self.plan[stage.name].refits)

    @property
    def main(self) -> StageSummary | None:
        """The stage that is the result, or the latest one."""
        return self.final or (self.stages[-1] if self.stages else None)

    @property
    def own(self) -> StageSummary | None:
        """The stage in which the experiment's method worked: the result, or what the result refits; or else the latest one."""
        return own_stage(self.stages, self.main, self.experiment)

    @property
    def best_refit(self) -> StageSummary | None:
        """The refit with the smallest held-out loss."""
        judged = [stage for stage in self.stages if self.is_refit(stage) and "heldout_loss" in stage.results]
        return min(judged, key=lambda stage: stage.results["heldout_loss"], default=None)


def own_stage(stages: Sequence[StageSummary], main: StageSummary | None, experiment: Experiment) -> StageSummary | None:
    """Of the stages of a run, `main`, or, if another method made it, the stage of the experiment's method whose clusters it refits."""
    own = {stage.name: stage for stage in stages if stage.method == experiment.method.name}
    if main is None or main.name in own or not own:
        return main
    refitted = next((stage.refits for stage in stages_of(experiment) if stage.name == main.name), "")
    return own.get(refitted, list(own.values())[-1])


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
            is_at_work,
            savings(connection),
        )


def print_report(folder: Path, console: Console) -> None:
    """Users, hosts, rounds, clusters, held-out figures of stages, traffic beside its closed form, the result, and where everything is."""
    report, narrow = report_of(folder), is_narrow(console)
    say(console, f"{report.facts.get('name', folder.name)} {report.facts.get('status', '')}: {extent(report)}", style="bold")
    console.print()
    shown = chosen_stages(report)
    console.print(stage_table(report, shown, narrow=narrow))
    if len(shown) < len(report.stages):
        print(f"all {len(report.stages)} stages: coterie show {folder}", file=console.file)  # not by the console, which would wrap it
    say(console, held_out_sentence(report.experiment.data), style="dim")
    say(console, *report.cautions, style="yellow")
    console.print()
    if _print_figures(report, console):
        console.print()
    console.print(traffic_table("Traffic by step", report.traffic, narrow=narrow, tiny=is_tiny(console)))
    say_left_out(console, traffic_left_out(report.traffic, narrow=narrow, tiny=is_tiny(console)))
    steps = steps_said((row.step for row in report.traffic), report.facts, paper=True)
    repeated = "Some traffic was repeated: coterie ledger lists it separately." if report.n_repeated_bytes else ""
    say(console, SHORT_NOTES, steps, averages_sentence(report.final), repeated, style="dim")
    say(console, *saved_sentences(report.savings))
    console.print()
    _print_folder(report, console)


def print_result(report: Report, console: Console) -> None:
    """How well the result does, what users judge of their networks, and where the run is."""
    _print_figures(report, console)
    _print_folder(report, console)


def _print_figures(report: Report, console: Console) -> bool:
    """Whether there are any."""
    result, others = result_sentence(report), [*judgement_sentences(report), *privacy_sentences(report), adapted_sentence(report)]
    say(console, result, style="bold")
    say(console, *others)
    return any((result, *others))


def _print_folder(report: Report, console: Console) -> None:
    print(f"run folder: {report.folder}", file=console.file)


def averages_sentence(final: StageSummary | None) -> str:
    """How often the method averaged, and how often its coins are expected to make it average; "" for methods without such figures."""
    results, averages = ({}, {}) if final is None else (final.results, method(final.method).averages)
    listed = [(words, results[key], results[f"{key}_expected"]) for key, words in averages.items() if f"{key}_expected" in results]
    said = ", ".join(f"{words} {count(made)} (expected {count(expected)})" for words, made, expected in listed)
    return said and f"rounds of averages: {said}"


def headline(report: Report) -> str:
    if report.hosts:
        return extent(report)
    noun = report.experiment.federation.noun
    return f"waiting for {noun}s" if report.is_at_work else f"stopped before all {noun}s were there"


def extent(report: Report) -> str:
    """Users, hosts or aggregators, rounds, time, clusters."""
    n_users, final = sum(report.hosts.values()), report.final
    rounds, seconds = sum(stage.rounds for stage in report.stages), sum(stage.seconds for stage in report.stages)
    parts = [counted(n_users, "user"), counted(len(report.hosts), report.experiment.federation.noun)]
    parts.append(f"{counted(rounds, 'round')} in {duration(seconds)}")
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
    others = [stage for stage in report.stages if stage.number not in wanted]
    others.sort(key=lambda stage: (report.is_refit(stage), abs(stage.number - centre)))
    wanted |= {stage.number for stage in others[: max(0, MAX_STAGES - len(wanted))]}
    return [stage for stage in report.stages if stage.number in wanted]


def stage_table(report: Report, stages: Sequence[StageSummary], *, narrow: bool) -> Table:
    """One line for each stage. The held-out loss is left out where it is half of the squared error, and says nothing more."""
    judged = [(stage.results["heldout_loss"], stage.results["heldout_metric"]) for stage in stages if "heldout_metric" in stage.results]
    with_loss = any(abs(metric - 2 * loss) > 1e-9 * abs(metric) for loss, metric in judged)
    with_clusters = any(report.clusters[stage.name] is not None for stage in stages) or not stages
    columns = {
        "stage": [f"{stage.name} *" if stage.name == report.facts.get("final_stage") else stage.name for stage in stages],
        "ended by": [ended_by(stage, report) for stage in stages],
        "rounds": [count(stage.rounds) for stage in stages],
        "clusters": [count(report.clusters[stage.name]) for stage in stages] if with_clusters else None,
        "loss": [figure(stage.results.get("heldout_loss")) for stage in stages] if with_loss else None,
        metric_name(report.experiment): [figure(stage.results.get("heldout_metric")) for stage in stages] if judged else None,
    }
    title = "Stages (* the result)" + (", judged on held-out rows" if judged else "")
    return table_of(title, columns, n_text=2, gap=1 if narrow else 2)


def adapted(stage: StageSummary) -> tuple[float, float] | None:
    """The first and the last value of the parameter that the method adapted in a stage; None for other methods."""
    name = method(stage.method).adapts
    return (stage.results[f"{name}_first"], stage.results[name]) if name and f"{name}_first" in stage.results else None


def adapted_sentence(report: Report) -> str:
    """The adapted parameter at the start of the first stage and at the end of the last one; "" for methods without one."""
    found = [values for stage in report.stages if (values := adapted(stage))]
    if not found:
        return ""
    first, last = figure(found[0][0], 2), figure(found[-1][1], 2)
    name = method(report.experiment.method.name).adapts
    return f"{name}: {first}" if found[0][0] == found[-1][1] else f"{name}: {first} at the start, {last} at the end"


def cluster_rule(report: Report, stage: str) -> str:
    """When users of a stage count as together; empty where it finds no clusters of its own."""
    is_own = any(one.name == stage and one.method == report.experiment.method.name for one in report.stages)
    return method(report.experiment.method.name).cluster_rule(report.experiment.method) if is_own else ""


def is_reference(stage: StageSummary) -> bool:
    """Whether it is a reference, not another use of the same method, such as a refit."""
    return stage.name == stage.method and method(stage.method).is_reference


def ended_by(stage: StageSummary, report: Report) -> str:
    """Why a stage ended, in a word or two."""
    if not stage.outcome:
        return "under way" if report.is_at_work else "stopped"
    first = stage.outcome.partition(" ")[0]
    limit = "time" if stage.outcome.endswith(" s") else stage.outcome.rpartition(" ")[2]
    return _ENDS.get(first, f"max {limit}!" if stage.name in report.short else limit)


def metric_name(experiment: Experiment) -> str:
    """The name of `heldout_metric`."""
    if (known := experiment.problem.metric) != "metric":
        return known.replace("_", " ")
    try:  # a machine that only coordinates has no losses, and no torch
        if experiment.model is not None:
            from coterie_client.nets.losses import resolve_network_loss  # noqa: PLC0415

            loss = resolve_network_loss(experiment.problem.loss)
            return "metric" if loss.metric is not None else "accuracy" if loss.has_classes else "squared error"
        from coterie_client.problems.losses import resolve_row_loss  # noqa: PLC0415

        return "accuracy" if resolve_row_loss(experiment.problem).is_classifier else "squared error"
    except (ConfigError, ImportError):
        return "metric"  # the loss is code that is not here


def result_sentence(report: Report) -> str:
    """How well the result does beside the references; "" where nobody has held-out rows."""
    final, refit = report.final, report.best_refit
    value = {stage.name: figure(stage.results.get("heldout_metric"), 3) for stage in report.stages if "heldout_metric" in stage.results}
    parts = []
    if final is not None and final.name in value and not is_reference(final):
        whose = "one model for all" if f"{COMMON}_{report.experiment.problem.metric}" in final.results else "personalized"
        parts.append(f"{whose} {value[final.name]} ({final.name})")
    if refit is not None and refit is not final and refit.name in value:
        parts.append(f"refitted clusters {value[refit.name]} ({refit.name}, {counted(int(report.clusters[refit.name] or 0), 'cluster')})")
    parts += [f"{name} {value[name]}" for name in sorted(stage.name for stage in report.stages if is_reference(stage)) if name in value]
    metric = metric_name(report.experiment).replace("squared error", "mean squared error")
    return f"held-out {metric}: {', '.join(parts)}" if parts else ""


_JUDGED = {OWN: "personal models", COMMON: "the global model"}
_TUNED = {"": "", "_ft_head": " with the head fine-tuned", "_ft_all": " with all of it fine-tuned"}


def judgement_sentences(report: Report) -> list[str]:
    """The users' own judgement of their models, before and after fine-tuning; empty for methods that do not ask for it."""
    results = {} if report.final is None else report.final.results
    metric, said = report.experiment.problem.metric, []
    for (whose, words), (mode, how) in itertools.product(_JUDGED.items(), _TUNED.items()):
        if (name := f"{whose}{mode}_{metric}") in results:
            tuned = how if report.experiment.model is not None else how and " fine-tuned"
            low, middle, high = (figure(results[f"{name}_{which}"], 3) for which in ("q1", "median", "q3"))
            said.append(f"{words}{tuned}: {figure(results[name], 3)} on average (quartiles of the users {low}, {middle}, {high})")
    if f"{metric}_before" in results:
        said.insert(0, f"before the head was trained: {figure(results[f'{metric}_before'], 3)}")
    if f"last_rounds_{metric}" in results:
        said.append(f"mean over the last rounds: {figure(results[f'last_rounds_{metric}'], 3)}")
    return said


def privacy_sentences(report: Report) -> list[str]:
    """What the result has spent of a privacy budget, and for what; empty without `privacy`."""
    privacy, results = report.experiment.privacy, {} if report.final is None else report.final.results
    if privacy is None or "epsilon" not in results:
        return []
    unit = {"row": "a single training row", "user": "a single user"}[privacy.unit]
    most = "at most " if privacy.unit == "row" else ""  # by the users' numbers of rows
    noise = f"clip {privacy.clip:g} and noise of {most}{results['noise_multiplier']:.3g} clips"
    spent = f"privacy of {unit}: epsilon {results['epsilon']:.3g} at delta {privacy.delta:g}, with {noise}"
    by_hosts = [f"privacy: noise is added by hosts; {shared(n_noised(report.experiment))}"] if privacy.is_shared else []
    return [spent, *by_hosts, *uncounted(report.experiment)]


def _n_clusters(folder: Path, stage: StageSummary) -> float | None:
    """How many clusters a stage ends with: as its method says, or as its models are labelled."""
    path = folder / "models" / f"{stage.name}.npz"
    if "clusters" in stage.results or not path.is_file():
        return stage.results.get("clusters")
    with arrays_of(path) as arrays:
        return float(arrays["labels"].max() + 1) if "labels" in arrays else None
