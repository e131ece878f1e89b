"""The results of a tune: held-out losses by point and fold, the choice, and their files.

OUTPUT/tuned.yaml   the experiment with the chosen settings
OUTPUT/tuned.csv    all points: settings, mean loss, its standard error, mean metric, loss of each fold
OUTPUT/tuned.png    the same as curves, if the library that draws is installed
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.text import Text

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.families.grid import value_text
from coterie_deploy.read.cautions import cautions_of
from coterie_deploy.read.report import metric_name
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_deploy.studies import plots
from coterie_deploy.studies.plots import Axis, curves
from coterie_deploy.studies.tune.plan import Tuning, fold_folder
from coterie_deploy.terminal.tables import counted, figure, is_narrow, table
from coterie_deploy.view.charts import Spec
from coterie_deploy.view.report_page import write_figure
from coterie_server.record import summary
from coterie_server.record.rundb import read_run

MAX_ROWS = 40  # of points that are printed: the best ones


@dataclass(frozen=True)
class Point:
    """One point of the grid; NaN for a fold in which no user had held-out rows."""

    name: str
    entry: Mapping[str, Any]
    losses: Array  # (folds,) mean over the users with held-out rows
    metrics: Array  # (folds,)

    @property
    def loss(self) -> float:
        """Mean over the folds."""
        return float(np.nanmean(self.losses))

    @property
    def error(self) -> float:
        """Standard error of the mean, from the spread of the folds; 0 for a single fold."""
        known = self.losses[~np.isnan(self.losses)]
        return float(known.std(ddof=1) / np.sqrt(len(known))) if len(known) > 1 else 0.0

    @property
    def metric(self) -> float:
        """Mean over the folds."""
        return float(np.nanmean(self.metrics))


@dataclass(frozen=True)
class Tuned:
    """All points in the order of the grid."""

    points: Sequence[Point]
    n_cautious: int  # folds whose runs warn of something
    first_cautious: int  # 0: none

    @property
    def keys(self) -> list[str]:
        """The settings that the grid changes."""
        return list(dict.fromkeys(key for point in self.points for key in point.entry))

    @property
    def best(self) -> Point:
        """The point with the smallest mean loss, the first of equals."""
        return min(self.points, key=lambda point: point.loss)

    def edges(self) -> list[str]:
        """A sentence for each setting whose chosen value is the smallest or the largest of several."""
        said = []
        for key in self.keys:
            numbers = {point.entry[key] for point in self.points if _is_number(point.entry.get(key))}
            chosen = self.best.entry.get(key)
            ends = ((min, "smallest", "smaller"), (max, "largest", "larger")) if len(numbers) > 1 else ()
            for end, which, beyond in ends:
                if chosen == end(numbers):
                    said.append(f"warning: the chosen {key}, {value_text(chosen)}, is the {which} of the grid: {beyond} ones may be better")
        return said


def result_of(tuning: Tuning, folder: Path) -> Tuned:
    """Reads the runs of all folds. RunError when no user had held-out rows in any of them."""
    names = [name for name, _ in tuning.fold(1).method.points()]
    found, cautious = [], []
    for number in range(1, tuning.folds + 1):
        with read_run(fold_folder(folder, number)) as connection:
            stages = {stage.name: stage.results for stage in summary.stages(connection)}
            if cautions_of(connection):
                cautious.append(number)
        found.append([[stages[name].get(key, np.nan) for name in names] for key in ("heldout_loss", "heldout_metric")])
    losses, metrics = np.array(found).transpose(1, 2, 0)  # (points, folds) each
    if np.isnan(losses).all(axis=1).any():
        raise RunError(f"no user has held-out rows in any of the {tuning.folds} folds, want users with at least 2 training rows")
    points = [Point(*line) for line in zip(names, tuning.entries, losses, metrics, strict=True)]
    return Tuned(points, len(cautious), min(cautious, default=0))


def write_files(tuned: Tuned, tuning: Tuning, folder: Path) -> None:
    """The chosen experiment, the table, and the plot if its library is installed. Raises RunError when one cannot be written."""
    head = f"# Chosen by coterie tune for {tuned.best.name}: held-out loss {tuned.best.loss:.6g}, mean of {tuning.folds} folds.\n"
    chosen = yaml.safe_dump(tuning.chosen(tuned.best.entry), sort_keys=False, allow_unicode=True, width=120)
    write_text(folder / "tuned.yaml", head + chosen)
    write_text(folder / "tuned.csv", _csv(tuned, tuning))
    if importlib.util.find_spec("vl_convert") is not None:
        write_figure(chart(tuned, tuning.folds), folder / "tuned.png")


def _csv(tuned: Tuned, tuning: Tuning) -> str:
    folds = [f"loss_fold_{number}" for number in range(1, tuning.folds + 1)]
    rows = []
    for point in tuned.points:
        settings = [value_text(point.entry[key]) if key in point.entry else "" for key in tuned.keys]
        losses = ["" if np.isnan(loss) else repr(float(loss)) for loss in point.losses]
        rows.append([point.name, *settings, repr(point.loss), repr(point.error), repr(point.metric), *losses])
    return csv_text(["point", *tuned.keys, "heldout_loss", "standard_error", "heldout_metric", *folds], rows)


def print_result(tuned: Tuned, tuning: Tuning, folder: Path, console: Console) -> None:
    """Prints the table of points, the choice, warnings, and the next command."""
    shown = sorted(tuned.points, key=lambda point: point.loss)[:MAX_ROWS]
    best, keys = tuned.best, tuned.keys
    rows = []
    for point in tuned.points:
        if point in shown:
            settings = [value_text(point.entry[key]) if key in point.entry else "-" for key in keys]
            rows.append([*settings, figure(point.loss), figure(point.error, 2), figure(point.metric), "*" if point is best else ""])
    title = f"Held-out loss, mean of {tuning.folds} folds (* chosen)"
    columns = [*keys, "loss", "+-", metric_name(tuning.fold(1)), ""]
    console.print(table(title, columns, rows, n_text=len(keys), gap=1 if is_narrow(console) else 2))
    if len(shown) < len(tuned.points):
        print(f"these are the best {len(shown)} of {len(tuned.points)} points: {folder / 'tuned.csv'} has all", file=console.file)
    sentences = tuned.edges()
    if n := tuned.n_cautious:
        verb, place = "warns" if n == 1 else "warn", fold_folder(folder, tuned.first_cautious)
        sentences.append(f"warning: {counted(n, 'fold')} of {tuning.folds} {verb} of something: coterie show {place}")
    for sentence in sentences:
        console.print(Text(sentence, style="yellow"))
    console.print()
    console.print(Text(f"chosen: {best.name}, held-out loss {figure(best.loss)} +- {figure(best.error, 2)}", style="bold"))
    print(f"next: coterie run {folder / 'tuned.yaml'}", file=console.file)  # not by the console, which would wrap it


# ---- the plot: held-out loss against one setting, a curve for each choice of the others, with bars of one standard error

_LOG_FROM = 10.0  # ratio of the largest to the smallest value from which an axis is logarithmic


def chart(tuned: Tuned, n_folds: int) -> Spec:
    """The points at the numbers of one setting, or else at their places in the grid; a ring around the chosen one."""
    along, others = _axis_and_others(tuned)

    def drawn(point: Point) -> plots.Point:
        x = point.name if along is None else float(point.entry[along])
        curve = " ".join(f"{key}={value_text(point.entry.get(key))}" for key in others) or "mean, and its standard error"
        return plots.Point.around(curve, x, point.loss, point.error)

    listed = [drawn(point) for point in sorted(tuned.points, key=lambda point: _order(point, others))]
    y = Axis(f"held-out loss, mean of {n_folds} folds")
    ring = (f"chosen: {tuned.best.name}", drawn(tuned.best))
    if along is None:
        return curves(listed, Axis("point of the grid", is_named=True), y, ring=ring)
    numbers = [float(point.entry[along]) for point in tuned.points]
    is_log = min(numbers) > 0 and max(numbers) >= _LOG_FROM * min(numbers)
    return curves(listed, Axis(along, is_log=is_log), y, ring=ring)


def _axis_and_others(tuned: Tuned) -> tuple[str | None, list[str]]:
    """The setting with the most numbers, for the axis, None if none has two; and the other settings that differ."""
    distinct = {key: {value_text(point.entry.get(key)) for point in tuned.points} for key in tuned.keys}
    numeric = [key for key in tuned.keys if len(distinct[key]) > 1 and all(_is_number(point.entry.get(key)) for point in tuned.points)]
    along = max(numeric, key=lambda key: len(distinct[key]), default=None)
    others = [key for key in tuned.keys if key != along and len(distinct[key]) > 1] if along is not None else []
    return along, others


def _order(point: Point, keys: Sequence[str]) -> tuple[Any, ...]:
    """Numbers by value, other settings by their text."""
    values = [point.entry.get(key) for key in keys]
    return tuple((not _is_number(value), value if _is_number(value) else 0, value_text(value)) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
