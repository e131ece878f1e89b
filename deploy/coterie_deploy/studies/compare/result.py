"""What a comparison has found, read from the runs' databases alone, and the files that say so.

OUTPUT/compare.csv            a line for each method, and for each kind of fine-tuning that its users judged
OUTPUT/pareto.png, .svg       quality against megabytes, where the library of figures is installed
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.problem import METRICS
from coterie_deploy.read.cautions import cautions_of
from coterie_deploy.read.costs import common_goal, cost, goal_said
from coterie_deploy.read.report import metric_name, report_of
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_deploy.studies.compare.chart import pareto_chart
from coterie_deploy.studies.compare.plan import Comparing, run_folder
from coterie_deploy.terminal.tables import count, counted, duration, figure, is_narrow, size, table
from coterie_deploy.view.charts import WAYS
from coterie_deploy.view.report_page import write_figures
from coterie_deploy.view.sections import main_stage, method_stage
from coterie_server.record import summary
from coterie_server.record.curves import Curves, Goal, curves, reached
from coterie_server.record.rundb import open_run

CSV, FIGURES = "compare.csv", ("png", "svg")
_WIDE = 110  # columns from which all has room in one table
_QUALITIES = {"heldout_metric": "", "heldout_loss": "held-out loss", "sum_of_losses": "sum of losses"}  # the first that all runs have
_SPREAD = ("q1", "median", "q3", "min", "max")
_TUNED = {"_ft_head": "head tuned", "_ft_all": "all tuned"}
_LINEAR = "tuned"  # of linear models, all of which is head
_MOST_CAUTIONS = 5
_SPARSE = 0.5  # part of the rounds that a figure is known in, below which the round of a goal is told as approximate


@dataclass(frozen=True)
class Ran:
    """A finished run. Bytes are useful ones on the wire, of all its stages; seconds too.

    What keeps the session alive (hellos, heartbeats, books) is not in them: it depends on the clock and on how often a run was resumed.
    """

    folder: Path
    qualities: Mapping[str, Mapping[str, float]]  # by fine-tuning ("" as it is): the mean over users as "", and their spread
    results: Mapping[str, float]
    up: float
    down: float
    seconds: float
    curves: Curves | None  # of the stage in which the method worked
    bytes_before: float  # what earlier stages of the run had sent
    cautions: Sequence[str]


@dataclass(frozen=True)
class Line:
    """A method over its seeds, (seeds,) each; `tuned` is "", or how its users trained on when all was over, which nothing is sent for.

    NaN is what is not known, or was not reached.
    """

    method: str
    tuned: str
    how: str  # the same in words
    mean: Array
    spread: Mapping[str, Array]  # quartiles and extremes of the users
    up: Array
    down: Array
    seconds: Array
    goal_rounds: Array
    goal_bytes: Array

    @property
    def megabytes(self) -> float:
        """Both ways, mean over the seeds."""
        return float((self.up + self.down).mean()) / 1e6


@dataclass(frozen=True)
class Compared:
    """All lines, methods in the order asked for."""

    lines: Sequence[Line]
    quality: str  # what is compared, in words
    is_rising: bool  # more of it is better
    goal: Goal | None
    is_sparse: bool  # the goal's figure is known in few rounds only
    cautions: Mapping[str, Sequence[Path]] = field(default_factory=dict)  # warnings, and the runs that give them


def result_of(comparing: Comparing, folder: Path) -> Compared:
    """Reads the runs. ConfigError when the target is of a figure that none of them has."""
    ran = {(method, seed): _ran(run_folder(folder, method, seed)) for method, seed in comparing.runs()}
    experiment = comparing.experiment(*comparing.runs()[0])
    key = next((name for name in _QUALITIES if all(name in run.results for run in ran.values())), "sum_of_losses")
    quality = _QUALITIES[key] or metric_name(experiment)
    listed = [run.curves for run in ran.values() if run.curves is not None]
    goal = _goal(comparing, listed)
    lines = []
    for method in comparing.methods:
        runs = [ran[method, seed] for seed in comparing.seeds]
        lines.append(_line(method, "", "", runs, key, goal))
        if key == "heldout_metric":
            told = {mode: how for mode, how in _TUNED.items() if all(mode in run.qualities for run in runs)}
            lines += [_line(method, mode, _LINEAR if experiment.model is None else how, runs, key, goal) for mode, how in told.items()]
    is_sparse = goal is not None and any(_is_sparse(found, goal.figure) for found in listed)
    cautions: dict[str, list[Path]] = {}
    for run in ran.values():
        for caution in run.cautions:
            cautions.setdefault(caution, []).append(run.folder)
    return Compared(lines, quality, quality == "accuracy", goal, is_sparse, cautions)


def _ran(folder: Path) -> Ran:
    report = report_of(folder)
    final, own = main_stage(report), method_stage(report)
    if final is None or own is None:
        raise ConfigError(f"the run in {folder} has no stage, want a finished run")
    with contextlib.closing(open_run(folder)) as connection:
        found = curves(connection, own)
        sent = [row for row in summary.traffic(connection) if row.stage != summary.SESSION]
        cautions = cautions_of(connection)
    up, down = (float(sum(row.wire_bytes for row in sent if row.direction == way)) for way in WAYS)
    earlier = sum(row.wire_bytes for row in sent if row.stage < own.number)
    seconds = sum(stage.seconds for stage in report.stages)
    return Ran(
        folder,
        _qualities(final.results, report.experiment.problem.metric),
        final.results,
        up,
        down,
        seconds,
        found,
        float(earlier),
        cautions,
    )


def _qualities(results: Mapping[str, float], metric: str) -> dict[str, dict[str, float]]:
    """By fine-tuning: what the users' held-out rows say, as far as the run has told it."""
    found: dict[str, dict[str, float]] = {}
    for mode in ("", *_TUNED):
        names = [f"{whose}{mode}_{metric}" for whose in ("personal", "global")]
        name = next((name for name in names if name in results), "" if mode else "heldout_metric")
        if name in results:
            found[mode] = {"": results[name], **{which: results.get(f"{name}_{which}", np.nan) for which in _SPREAD}}
    return found


def _line(method: str, mode: str, how: str, runs: Sequence[Ran], key: str, goal: Goal | None) -> Line:
    told = [run.qualities.get(mode, {}) if key == "heldout_metric" else {"": run.results.get(key, np.nan)} for run in runs]
    spread = {which: np.array([quality.get(which, np.nan) for quality in told]) for which in _SPREAD}
    goals = [_towards(run, goal) for run in runs]
    return Line(
        method,
        mode,
        how,
        np.array([quality.get("", np.nan) for quality in told]),
        spread,
        np.array([run.up for run in runs]),
        np.array([run.down for run in runs]),
        np.array([run.seconds for run in runs]),
        np.array([at for at, _ in goals]),
        np.array([sent for _, sent in goals]),
    )


def _goal(comparing: Comparing, listed: Sequence[Curves]) -> Goal | None:
    """The target, or the best metric that all runs reach; objectives of different methods are different functions, so none of these."""
    if comparing.goal is None:
        common = common_goal(listed)
        return common if common is not None and common.figure in METRICS else None
    if listed and not any(comparing.goal.figure in found.figures for found in listed):
        reached(listed[0], comparing.goal)  # says which figures there are
    return comparing.goal


def _towards(run: Ran, goal: Goal | None) -> tuple[float, float]:
    """The round in which the goal is reached, and the bytes of the run until then; NaN where it is not."""
    if goal is None or run.curves is None or goal.figure not in run.curves.figures:
        return np.nan, np.nan
    at = reached(run.curves, goal)
    return (np.nan, np.nan) if at is None else (float(at), run.bytes_before + float(cost(run.curves, "bytes")[at]))


def _is_sparse(found: Curves, name: str) -> bool:
    values = found.figures.get(name)
    return values is not None and bool(np.isfinite(values).mean() < _SPARSE)


# ---- files


def write_files(compared: Compared, folder: Path) -> list[Path]:
    """The table, and the plot where its library is installed. Raises RunError when one cannot be written."""
    columns = columns_of(compared)
    write_text(folder / CSV, csv_text(list(columns), zip(*columns.values(), strict=True)))
    points = [(line.method, line.how, line.megabytes, float(line.mean.mean())) for line in compared.lines if np.isfinite(line.mean).all()]
    if not points or importlib.util.find_spec("vl_convert") is None:
        return [folder / CSV]
    chart = pareto_chart(points, compared.quality, is_rising=compared.is_rising)
    return [folder / CSV, *write_figures([(chart.key, chart)], folder, FIGURES)]


def columns_of(compared: Compared) -> dict[str, list[Any]]:
    """The table, column by column. Numbers are means over seeds, but for `_least` and `_most`; None is what is not known."""
    lines, quality = compared.lines, compared.quality.replace(" ", "_")
    goal = "" if compared.goal is None else str(compared.goal)
    numbers = {
        quality: [line.mean.mean() for line in lines],
        f"{quality}_least": [line.mean.min() for line in lines],
        f"{quality}_most": [line.mean.max() for line in lines],
        **{f"{quality}_{which}": [line.spread[which].mean() for line in lines] for which in _SPREAD},
        "bytes_up": [line.up.mean() for line in lines],
        "bytes_down": [line.down.mean() for line in lines],
        "seconds": [line.seconds.mean() for line in lines],
    }
    aims = {
        "rounds_to_target": [np.nan if line.tuned else _mean_known(line.goal_rounds) for line in lines],
        "bytes_to_target": [np.nan if line.tuned else _mean_known(line.goal_bytes) for line in lines],
    }
    return {
        "method": [line.method for line in lines],
        "fine_tuned": [line.tuned.removeprefix("_ft_") for line in lines],
        "seeds": [line.mean.size for line in lines],
        **{name: list(map(_known, values)) for name, values in numbers.items()},
        "target": [goal] * len(lines),
        "seeds_at_target": [None if not goal or line.tuned else int(np.isfinite(line.goal_rounds).sum()) for line in lines],
        **{name: list(map(_known, values)) for name, values in aims.items()},
    }


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _mean_known(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


# ---- the table


def print_result(compared: Compared, comparing: Comparing, written: Sequence[Path], console: Console) -> None:
    """One table where there is room for it, else its qualities and its costs below each other; what was decided; the files."""
    narrow = is_narrow(console)
    has_range = len(comparing.seeds) > 1
    seeds = f"{counted(len(comparing.seeds), 'seed')}"
    worst = "min" if compared.is_rising else "max"
    spread = ("q1", "q3", worst) if narrow else ("q1", "median", "q3", worst)
    heads = [compared.quality, *(["range"] if has_range else []), *spread[:-1], "worst"]
    costs = ["up", "down", "time", *([] if compared.goal is None else ["rounds to", "bytes to"])]
    title = f"{compared.quality.capitalize()} of the users, mean of {seeds}"
    goal = "" if compared.goal is None else f"; to: {goal_said(compared.goal)}"
    qualities = [[_label(line), *_quality_cells(line, spread, has_range=has_range, is_share=compared.is_rising)] for line in compared.lines]
    if console.width >= _WIDE:
        rows = [[*cells, *_cost_cells(line, compared.goal)] for cells, line in zip(qualities, compared.lines, strict=True)]
        console.print(table(title + goal, ["method", *heads, *costs], rows))
    else:
        console.print(table(title, ["method", *heads], qualities, gap=1 if narrow else 2))
        rows = [[line.method, *_cost_cells(line, compared.goal)] for line in compared.lines if not line.tuned]
        console.print()
        console.print(table(f"Costs of a run, mean of {seeds}{goal}", ["method", *costs], rows, gap=1 if narrow else 2))
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


def notes(compared: Compared, comparing: Comparing) -> list[str]:
    """What was decided for the reader, in sentences."""
    said = []
    if compared.goal is not None and comparing.target is None:
        said.append(f"The target is the best {compared.quality} that every run reaches; --target sets another.")
    if compared.is_sparse:
        said.append("Users were judged in few of the rounds, so the target may have been reached before: see method.evaluate_every.")
    if any(np.isnan(line.spread["q1"]).any() for line in compared.lines):
        said.append("A '-' among the quartiles: the run has kept means of its users alone.")
    own = comparing.content["method"]["name"]
    by_keys: dict[str, list[str]] = {}
    for method in comparing.methods:
        if keys := comparing.left_out(method):
            by_keys.setdefault(", ".join(keys), []).append(method)
    why = "where they are unknown or mean something else"
    said += [f"Settings of {own} left out for {', '.join(methods)}, {why}: {keys}." for keys, methods in by_keys.items()]
    return said


def _label(line: Line) -> str:
    return f" +{line.how}" if line.tuned else line.method


def _quality_cells(line: Line, spread: Sequence[str], *, has_range: bool, is_share: bool) -> list[str]:
    def said(value: float) -> str:
        return f"{value:.3f}" if is_share and np.isfinite(value) else figure(value, 3)

    cells = [said(float(line.mean.mean()))]
    if has_range:
        cells.append(f"{said(float(line.mean.min()))}-{said(float(line.mean.max()))}")
    return [*cells, *(said(float(line.spread[which].mean())) for which in spread)]


def _cost_cells(line: Line, goal: Goal | None) -> list[str]:
    """Fine-tuning costs no bytes beside those of its method, whose line stands above."""
    if line.tuned:
        return [""] * (3 if goal is None else 5)
    cells = [size(float(line.up.mean())), size(float(line.down.mean())), duration(float(line.seconds.mean()))]
    if goal is None:
        return cells
    n_reached = int(np.isfinite(line.goal_rounds).sum())
    if not n_reached:
        return [*cells, "-", "-"]
    some = f" ({n_reached}/{line.mean.size})" if n_reached < line.mean.size else ""
    rounds = _mean_known(line.goal_rounds)
    return [*cells, f"{count(rounds) if rounds.is_integer() else f'{rounds:.1f}'}{some}", size(_mean_known(line.goal_bytes))]
