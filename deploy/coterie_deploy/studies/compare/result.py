"""The results of a comparison, read from the runs' databases alone, and their files.

OUTPUT/compare.csv            a line for each method, and for each kind of fine-tuning that its users judged
OUTPUT/pareto.png, .svg       quality against megabytes, if the library of figures is installed
"""

import contextlib
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.problem import METRICS
from coterie.families.evaluation import COMMON, OWN
from coterie.families.partial import Training, Work
from coterie_deploy.read.cautions import cautions_of
from coterie_deploy.read.costs import common_goal, cost, goal_said
from coterie_deploy.read.report import metric_name, report_of
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_deploy.studies.compare import budget
from coterie_deploy.studies.compare.chart import pareto_chart
from coterie_deploy.studies.compare.plan import Comparing, run_folder
from coterie_deploy.studies.compare.vary import Row, said
from coterie_deploy.terminal.tables import count, counted, duration, figure, is_narrow, is_tiny, say_left_out, size, table
from coterie_deploy.view.charts import WAYS
from coterie_deploy.view.report_page import write_figures
from coterie_server.record import summary
from coterie_server.record.curves import Curves, Goal, curves, reached
from coterie_server.record.rundb import open_run

CSV, FIGURES = "compare.csv", ("png", "svg")
_WIDE = 110  # columns from which all has room in one table
_QUALITIES = {"heldout_metric": "", "heldout_loss": "held-out loss", "sum_of_losses": "sum of losses"}  # the first that all runs have
_SPREAD = ("q1", "median", "q3", "min", "max")
_TUNED = {"": "", "_ft_head": "head tuned", "_ft_all": "all tuned"}
_LINEAR = "tuned"  # of linear models, all of which is head
_MOST_CAUTIONS = 5
_SPARSE = 0.5  # part of the rounds with a figure, below which a note says that the round of its goal is approximate


@dataclass(frozen=True)
class Ran:
    """A finished run. Bytes are useful ones on the wire; bytes and seconds are of all its stages.

    Hellos, heartbeats and books are not counted: they depend on the clock and on how often a run was resumed.
    """

    folder: Path
    qualities: Mapping[str, Mapping[str, float]]  # by fine-tuning ("" without): the mean over users as "", and their spread
    results: Mapping[str, float]
    costs: Mapping[str, float]  # up, down, seconds
    curves: Curves | None  # of the stage in which the method worked
    bytes_before: float  # of earlier stages
    work: Work | None  # of a user that is drawn, in a round
    share: float  # of the users, that are drawn in a round
    cautions: Sequence[str]


@dataclass(frozen=True)
class Line:
    """A row over its seeds; all arrays are (seeds,). NaN is what is not known, or was not reached."""

    row: Row
    tuned: str  # "", or how its users trained on after the end, for which nothing is sent
    how: str  # the same in words
    quality: Mapping[str, Array]  # the mean over the users as "", and their quartiles and extremes
    # up, down, seconds; passes and batches of a drawn user in a round, passes of a user in the run; rounds and bytes to the goal, how many
    # rounds its figure is known in, and whether the first of these has reached it already (1.0)
    costs: Mapping[str, Array]
    work: Work | None

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def mean(self) -> Array:
        return self.quality[""]

    @property
    def megabytes(self) -> float:
        """Both ways, mean over the seeds."""
        return float((self.costs["up"] + self.costs["down"]).mean()) / 1e6

    @property
    def n_reached(self) -> int:
        """Seeds that reached the goal."""
        return int(np.isfinite(self.costs["rounds"]).sum())

    @property
    def is_measured(self) -> bool:
        """Whether the goal's figure is known in some round of every seed."""
        return bool((self.costs["measured"] > 0).all())


@dataclass(frozen=True)
class Compared:
    """All lines, methods in the order of the command."""

    lines: Sequence[Line]
    quality: str  # in words
    is_rising: bool  # more of it is better
    goal: Goal | None
    is_sparse: bool  # the goal's figure is known in few rounds only
    is_late: bool  # there is no goal, because users judged their models in few rounds
    cautions: Mapping[str, Sequence[Path]]  # warnings, and the runs that give them


def result_of(comparing: Comparing, folder: Path) -> Compared:
    """Reads the runs. ConfigError when the target is of a figure that none of them has."""
    ran = {(row.name, seed): _ran(run_folder(folder, row, seed)) for row, seed in comparing.runs()}
    rows = list(comparing.rows.values())
    experiment = comparing.experiment(rows[0].name, comparing.seeds[0])
    key = next((name for name in _QUALITIES if all(name in run.results for run in ran.values())), "sum_of_losses")
    quality = _QUALITIES[key] or metric_name(experiment)
    listed = [run.curves for run in ran.values() if run.curves is not None]
    goal = _goal(comparing, listed)
    known = [] if goal is None else [found.figures[goal.figure] for found in listed if goal.figure in found.figures]
    is_sparse = any(np.isfinite(values).mean() < _SPARSE for values in known)
    is_late = is_sparse and comparing.goal is None
    goal = None if is_late else goal
    lines = []
    for row in rows:
        runs = [ran[row.name, seed] for seed in comparing.seeds]
        for mode, how in _TUNED.items():
            if mode == "" or (key == "heldout_metric" and all(mode in run.qualities for run in runs)):
                lines.append(_line(row, mode, _LINEAR if mode and experiment.model is None else how, runs, key, goal))
    cautions: dict[str, list[Path]] = {}
    for run in ran.values():
        for caution in run.cautions:
            cautions.setdefault(caution, []).append(run.folder)
    return Compared(lines, quality, quality == "accuracy", goal, is_sparse and not is_late, is_late, cautions)


def _ran(folder: Path) -> Ran:
    report = report_of(folder)
    final, own = report.main, report.own
    if final is None or own is None:
        raise ConfigError(f"the run in {folder} has no stage, want a finished run")
    with contextlib.closing(open_run(folder)) as connection:
        found = curves(connection, own)
        sent = [row for row in summary.traffic(connection) if row.stage != summary.SESSION]
        cautions = cautions_of(connection)
    costs = {way: float(sum(row.wire_bytes for row in sent if row.direction == way)) for way in WAYS}
    costs["seconds"] = sum(stage.seconds for stage in report.stages)
    before = float(sum(row.wire_bytes for row in sent if row.stage < own.number))
    work, n_users = budget.work_of(report.experiment), sum(report.hosts.values())
    share = budget.users_in_a_round(report.experiment, n_users) / max(n_users, 1)
    qualities = _qualities(final.results, report.experiment.problem.metric)
    return Ran(folder, qualities, final.results, costs, found, before, work, share, cautions)


def _qualities(results: Mapping[str, float], metric: str) -> dict[str, dict[str, float]]:
    """By fine-tuning: the figures of the users' held-out rows, as far as the run has them."""
    found: dict[str, dict[str, float]] = {}
    for mode in _TUNED:
        names = [f"{whose}{mode}_{metric}" for whose in (OWN, COMMON)]
        name = next((name for name in names if name in results), "" if mode else "heldout_metric")
        if name in results:
            found[mode] = {"": results[name], **{which: results.get(f"{name}_{which}", np.nan) for which in _SPREAD}}
    return found


def _line(row: Row, mode: str, how: str, runs: Sequence[Ran], key: str, goal: Goal | None) -> Line:
    told = [run.qualities.get(mode, {}) if key == "heldout_metric" else {"": run.results.get(key, np.nan)} for run in runs]
    quality = {which: np.array([found.get(which, np.nan) for found in told]) for which in ("", *_SPREAD)}
    costs = [{**run.costs, **_towards(run, goal), **_worked(run)} for run in runs]
    return Line(row, mode, how, quality, {name: np.array([cost[name] for cost in costs]) for name in costs[0]}, runs[0].work)


def _worked(run: Ran) -> dict[str, float]:
    """Passes over the rows of a user: in a round in which it is drawn, and in the mean in the run; NaN where they are not counted."""
    passes, batches = (np.nan, np.nan) if run.work is None else (run.work.passes, run.work.batches)
    rounds = 0 if run.curves is None else run.curves.stage.rounds
    return {"passes": passes, "batches": batches, "passes in run": np.nan if batches else passes * run.share * rounds}


def _goal(comparing: Comparing, listed: Sequence[Curves]) -> Goal | None:
    """The target, or the best metric that all runs reach. No objective: those of different methods are different functions."""
    if comparing.goal is None:
        common = common_goal(listed)
        return common if common is not None and common.figure in METRICS else None
    if listed and not any(comparing.goal.figure in found.figures for found in listed):
        reached(listed[0], comparing.goal)  # says which figures there are
    return comparing.goal


def _towards(run: Ran, goal: Goal | None) -> dict[str, float]:
    """The round in which the goal is reached, and the bytes of the run until then, NaN if it is not; and where its figure is known."""
    values = None if goal is None or run.curves is None else run.curves.figures.get(goal.figure)
    if values is None or goal is None or run.curves is None or np.isnan(values).all():
        return {"rounds": np.nan, "bytes": np.nan, "measured": 0.0, "at first": 0.0}
    known, at = run.curves.rounds[np.isfinite(values)], reached(run.curves, goal)
    found = {"rounds": np.nan, "bytes": np.nan, "measured": float(known.size), "at first": float(at is not None and at == known[0] > 1)}
    return found if at is None else {**found, "rounds": float(at), "bytes": run.bytes_before + float(cost(run.curves, "bytes")[at])}


# ---- files


def write_files(compared: Compared, folder: Path) -> list[Path]:
    """The table, and the plot if its library is installed. Raises RunError when one cannot be written."""
    columns = columns_of(compared)
    write_text(folder / CSV, csv_text(list(columns), zip(*columns.values(), strict=True)))
    points = [(line.name, line.how, line.megabytes, float(line.mean.mean())) for line in compared.lines if np.isfinite(line.mean).all()]
    if not points or importlib.util.find_spec("vl_convert") is None:
        return [folder / CSV]
    what = "setting" if compared.lines[0].row.values else "method"
    chart = pareto_chart(points, compared.quality, is_rising=compared.is_rising, what=what)
    return [folder / CSV, *write_figures([(chart.key, chart)], folder, FIGURES)]


def columns_of(compared: Compared) -> dict[str, list[Any]]:
    """The table, column by column. Numbers are means over seeds, but for `_least` and `_most`; None is what is not known."""
    lines, quality = compared.lines, compared.quality.replace(" ", "_")
    goal = "" if compared.goal is None else str(compared.goal)
    numbers = {
        quality: [line.mean.mean() for line in lines],
        f"{quality}_least": [line.mean.min() for line in lines],
        f"{quality}_most": [line.mean.max() for line in lines],
        **{f"{quality}_{which}": [line.quality[which].mean() for line in lines] for which in _SPREAD},
        "bytes_up": [line.costs["up"].mean() for line in lines],
        "bytes_down": [line.costs["down"].mean() for line in lines],
        "seconds": [line.costs["seconds"].mean() for line in lines],
    }
    aims = {f"{key}_to_target": [np.nan if line.tuned else _mean_known(line.costs[key]) for line in lines] for key in ("rounds", "bytes")}
    return {
        "method": [line.row.method for line in lines],
        **{key: _cells([line.row.values[key] for line in lines]) for key in lines[0].row.values},
        "fine_tuned": [line.tuned.removeprefix("_ft_") for line in lines],
        "seeds": [line.mean.size for line in lines],
        "passes": [_known(line.costs["passes"].mean()) for line in lines],
        "batches": [_known(line.costs["batches"].mean()) for line in lines],
        "passes_in_run": [_known(line.costs["passes in run"].mean()) for line in lines],
        **{name: list(map(_known, values)) for name, values in numbers.items()},
        "target": [goal] * len(lines),
        "rounds_measured": [None if not goal or line.tuned else _known(line.costs["measured"].mean()) for line in lines],
        "seeds_at_target": [None if not goal or line.tuned else line.n_reached for line in lines],
        **{name: list(map(_known, values)) for name, values in aims.items()},
    }


def _cells(values: Sequence[Any]) -> list[Any]:
    """The values of a key that varies: numbers if all are, else texts."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return list(values) if are_numbers else list(map(said, values))


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _mean_known(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


# ---- the table


def print_result(compared: Compared, comparing: Comparing, written: Sequence[Path], console: Console) -> None:
    """One table if there is room for it, else its qualities and its costs below each other; then notes and the files."""
    narrow, tiny, has_range = is_narrow(console), is_tiny(console), len(comparing.seeds) > 1
    seeds, gap = counted(len(comparing.seeds), "seed"), 1 if narrow else 2
    spread = ["q1", *["median"] * (not narrow), "q3", "min" if compared.is_rising else "max"]
    heads = [compared.quality, *["range"] * has_range, *spread[:-1], "worst"]
    has_work = any(line.work is not None for line in compared.lines)
    costs = [*["passes"] * has_work, "up", "down", "time", *["rounds to", "bytes to"] * (compared.goal is not None)]
    by = f" by {comparing.methods[0]}" if comparing.vary and len(comparing.methods) == 1 else ""
    title, first = f"{compared.quality.capitalize()} of the users{by}, mean of {seeds}", "setting" if comparing.vary else "method"
    goal = "" if compared.goal is None else f"; to: {goal_said(compared.goal)}"
    qualities, left_out = [], ["median"] if narrow else []
    for line in compared.lines:
        label = f" +{line.how}" if line.tuned else line.name
        qualities.append([label, *_quality_cells(line, spread, has_range=has_range, is_share=compared.is_rising)])
    if console.width >= _WIDE:
        costs_of = [_cost_cells(line, compared.goal, has_work=has_work) for line in compared.lines]
        rows = [[*cells, *more] for cells, more in zip(qualities, costs_of, strict=True)]
        console.print(table(title + goal, [first, *heads, *costs], rows))
    else:
        rows = [[line.name, *_cost_cells(line, compared.goal, has_work=has_work)] for line in compared.lines if not line.tuned]
        dropped = {"range", "q1", "q3", "passes", "rounds to", "bytes to"} if tiny else set()
        console.print(_without(dropped, title, [first, *heads], qualities, gap))
        console.print()
        console.print(_without(dropped, f"Costs of a run, mean of {seeds}{goal}", [first, *costs], rows, gap))
        left_out += [name for name in [*heads, *costs] if name in dropped]
    say_left_out(console, left_out)
    for sentence in notes(compared, comparing):
        console.print(Text(sentence, style="dim"))
    for caution, folders in list(compared.cautions.items())[:_MOST_CAUTIONS]:
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        console.print(Text(f"{caution} ({folders[0].name}{more})", style="yellow"))
    if (rest := len(compared.cautions) - _MOST_CAUTIONS) > 0:
        console.print(Text(f"{counted(rest, 'more warning')}: `coterie show` of the runs", style="yellow"))
    console.print()
    for path in written:
        print(f"written: {path}", file=console.file)  # not by the console, which would wrap it


def _without(dropped: Collection[str], title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], gap: int) -> Table:
    """The table without some of its columns."""
    places = [place for place, name in enumerate(heads) if name not in dropped]
    return table(title, [heads[place] for place in places], [[row[place] for place in places] for row in rows], gap=gap)


def notes(compared: Compared, comparing: Comparing) -> list[str]:
    """Sentences on what the command has chosen by itself."""
    told = []
    if compared.goal is not None and comparing.target is None:
        told.append(f"The target is the best {compared.quality} that every run reaches; --target sets another.")
    if compared.is_sparse:
        told.append("Users were judged in few of the rounds, so the target may have been reached before: see method.evaluate_every.")
    if compared.is_late:
        told.append(
            "Rounds to a target were not measured: users judged in few rounds. --target, such as accuracy=0.9, measures on the way."
        )
    told += _on_judging(compared, comparing)
    told += _on_work(compared, comparing)
    if untuned := [f"{method} {', '.join(listed)}" for method in comparing.methods if (listed := comparing.untuned(method))]:
        told.append(f"Left at defaults that are not tuned to these data: {'; '.join(untuned)} (--set METHOD:method.KEY=VALUE).")
    if any(np.isnan(line.quality["q1"]).any() for line in compared.lines):
        told.append("A '-' among the quartiles: the run has kept only means over its users.")
    own = comparing.content["method"]["name"]
    by_keys: dict[str, list[str]] = {}
    for method in comparing.methods:
        if keys := comparing.left_out(method):
            by_keys.setdefault(", ".join(keys), []).append(method)
    why = "where they are unknown or mean something else"
    told += [f"Settings of {own} left out for {', '.join(methods)}, {why}: {keys}." for keys, methods in by_keys.items()]
    return told


def _on_judging(compared: Compared, comparing: Comparing) -> list[str]:
    """Which models are judged."""
    mean = "; a run's mean over its last rounds is in `coterie show`" if isinstance(comparing.own.method, Training) else ""
    return [f"{compared.quality}: of the final models, after the last round{mean}."]


def _on_work(compared: Compared, comparing: Comparing) -> list[str]:
    """Sentences on how much users work: by default as much as those of the experiment's own method."""
    own, wanted = comparing.content["method"]["name"], budget.work_of(comparing.own)
    lines = [line for line in compared.lines if not line.tuned and line.work is not None]
    others = [line for line in lines if line.work != wanted and line.work is not None]
    told = []
    if wanted is not None and len(others) < len(lines):
        varies = any(budget.is_by_hand(own, row.overrides) for row in comparing.rows.values())
        has_own = comparing.budget == "same" and not varies
        equal = f", as of {own} in the experiment" if has_own else ""
        told.append(f"passes: of a drawn user in a round. They are {budget.sentence(wanted)}{equal}.")
    for line in others:
        if line.work is not None:
            by_hand = budget.is_by_hand(line.row.method, comparing.settings.get(line.row.method, ()))
            why = "set for it alone" if by_hand else "its own setting" if comparing.budget == "own" else "it cannot have the same"
            why = "it varies" if budget.is_by_hand(line.row.method, line.row.overrides) else why
            told.append(f"{line.name} has {budget.sentence(line.work)}: {why}.")
    in_all = {line.name: float(line.costs["passes in run"].mean()) for line in lines}
    if len({line.row.method for line in lines}) > 1:
        told.append("A pass takes one gradient of each row. Equal passes do not take equal time: see the column time.")
    known = sorted({round(value, 6) for value in in_all.values() if np.isfinite(value)})
    if len(known) > 1:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in in_all.items() if np.isfinite(value))
        told.append(f"Passes over the rows of a user in the whole run differ: {listed}.")
    return told


def _quality_cells(line: Line, spread: Sequence[str], *, has_range: bool, is_share: bool) -> list[str]:
    def shown(value: float) -> str:
        return f"{value:.3f}" if is_share and np.isfinite(value) else figure(value, 3)

    spans = [f"{shown(float(line.mean.min()))}-{shown(float(line.mean.max()))}"] * has_range
    return [shown(float(line.mean.mean())), *spans, *(shown(float(line.quality[which].mean())) for which in spread)]


def _cost_cells(line: Line, goal: Goal | None, *, has_work: bool) -> list[str]:
    """Empty for fine-tuning, which costs no bytes beside those of its method, in the line above."""
    if line.tuned:
        return [""] * (has_work + (3 if goal is None else 5))
    up, down, seconds = (float(line.costs[name].mean()) for name in ("up", "down", "seconds"))
    cells = [*[budget.said(line.work)] * has_work, size(up), size(down), duration(seconds)]
    if goal is None:
        return cells
    if not line.n_reached:
        return [*cells, *(("never", "-") if line.is_measured else ("not", "measured"))]
    some = f" ({line.n_reached}/{line.mean.size})" if line.n_reached < line.mean.size else ""
    rounds, most = _mean_known(line.costs["rounds"]), "\N{LESS-THAN OR EQUAL TO}" if line.costs["at first"].any() else ""
    return [*cells, f"{most}{count(rounds) if rounds.is_integer() else f'{rounds:.1f}'}{some}", size(_mean_known(line.costs["bytes"]))]
