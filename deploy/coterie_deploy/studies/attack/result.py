"""What each rule makes of each kind of lies, for honest users alone. Read from the runs' databases.

OUTPUT/attack.csv             a line for each run
OUTPUT/attack.png, .svg       quality by kind of lies, if the library of figures is installed
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from coterie.errors import ConfigError
from coterie_deploy.read.folders import is_finished
from coterie_deploy.read.report import metric_name, report_of
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_deploy.studies.attack.plan import MEAN, NOBODY, Attacking, Cell, run_folder
from coterie_deploy.studies.series import ENDED
from coterie_deploy.terminal.tables import counted, figure, table
from coterie_deploy.view.charts import Chart, number, spec_of, told
from coterie_deploy.view.report_page import write_figures
from coterie_server.record.rundb import open_run

CSV, FIGURES = "attack.csv", ("png", "svg")
_WORDS = {"heldout_loss": "held-out loss"}
_FIRST = ("heldout_metric", "heldout_loss")  # figures of users, the first that there is
_HEADS = {"little_is_enough": "little", "inner_product": "inner", "sign_flip": "sign", "label_flip": "label"}  # of a table of 80 columns


@dataclass(frozen=True)
class Attacked:
    """The results, by cell and seed; NaN where a run could not go on."""

    quality: str  # in words
    is_rising: bool
    values: Mapping[Cell, Sequence[float]]  # means over honest users
    alone: Mapping[Cell, tuple[int, int]]  # of methods that find clusters: users who lie in clusters without honest ones, of all who lie
    ended: Mapping[Cell, str]  # why a run could not go on


def result_of(attacking: Attacking, folder: Path) -> Attacked:
    """Reads the runs. ConfigError where they have no figures of users."""
    values: dict[Cell, list[float]] = {}
    alone: dict[Cell, tuple[int, int]] = {}
    ended: dict[Cell, str] = {}
    name = ""
    for cell in attacking.cells():
        for seed in attacking.seeds:
            place, lying = run_folder(folder, cell, seed), set(attacking.lying[str(seed)])
            if not is_finished(place):
                ended[cell] = (place / ENDED).read_text(encoding="utf-8").strip()
                values.setdefault(cell, []).append(np.nan)
                continue
            name, quality, clusters = _read(place, lying)
            values.setdefault(cell, []).append(quality)
            if clusters is not None and lying:
                before = alone.get(cell, (0, 0))
                alone[cell] = before[0] + clusters, before[1] + len(lying)
    experiment = attacking.experiment(next(attacking.cells()), attacking.seeds[0])
    words = _WORDS.get(name, metric_name(experiment))
    return Attacked(words, words == "accuracy", values, alone, ended)


def _read(folder: Path, lying: set[str]) -> tuple[str, float, int | None]:
    """The name of the figure, its mean over honest users, and how many users who lie are in clusters without honest ones."""
    report = report_of(folder)
    if report.main is None:
        raise ConfigError(f"the run in {folder} has no stage, want a finished run")
    stage = (report.main.number,)
    with contextlib.closing(open_run(folder)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM members ORDER BY position")]
        figures = list(connection.execute("SELECT name, member, value FROM user_results WHERE stage = ?", stage))
        labels = connection.execute("SELECT labels FROM memberships ORDER BY stage DESC, round DESC LIMIT 1").fetchone()  # refits have none
    known = {name for name, _, _ in figures}
    key = next((name for name in (*_FIRST, *sorted(known)) if name in known), None)
    if key is None:
        raise ConfigError(f"the run in {folder} has no figures of its users, want held-out rows")
    quality = float(np.mean([value for name, member, value in figures if name == key and names[member] not in lying]))
    if labels is None:
        return key, quality, None
    clusters = dict(zip(names, json.loads(labels[0]), strict=True))
    honest = {label for user, label in clusters.items() if user not in lying}
    return key, quality, sum(clusters[user] not in honest for user in lying)


def write_files(attacked: Attacked, attacking: Attacking, folder: Path) -> list[Path]:
    """The table, and the picture if its library is installed."""
    rows = [
        (cell.method, cell.rule, cell.kind, seed, None if np.isnan(value) else value)
        for cell, listed in attacked.values.items()
        for seed, value in zip(attacking.seeds, listed, strict=True)
    ]
    write_text(folder / CSV, csv_text(["method", "rule", "kind", "seed", attacked.quality.replace(" ", "_")], rows))
    if importlib.util.find_spec("vl_convert") is None:
        return [folder / CSV]
    chart = chart_of(attacked, attacking)
    return [folder / CSV, *write_figures([(chart.key, chart)], folder, FIGURES)]


def chart_of(attacked: Attacked, attacking: Attacking) -> Chart:
    """A point for each method, rule and kind of lies, side by side within a kind."""
    columns = ("row", "kind", attacked.quality)
    rows: list[tuple[Any, ...]] = []
    for cell, listed in attacked.values.items():
        name, is_alone = cell.method, len(attacking.rules_of(cell.method)) == 1
        row = name if is_alone else cell.rule if len(attacking.methods) == 1 else f"{name}, {cell.rule}"
        rows.append((row, cell.kind, float(np.mean(listed))))
    names = [*dict.fromkeys(row[0] for row in rows)]
    kinds = [NOBODY, *attacking.kinds]
    of_row = {"field": "row", "type": "nominal", "scale": {"domain": names}, "title": None}
    encoding = {
        "x": {
            "field": "kind",
            "type": "nominal",
            "sort": kinds,
            "title": "how hosts lie",
            "axis": {"labelAngle": -30},
            "scale": {"paddingInner": 0.4},
        },
        "xOffset": {"field": "row", "type": "nominal", "sort": names},
        "y": number(attacked.quality, f"{attacked.quality} of honest users", scale={"zero": False}),
        "color": of_row,
        "shape": of_row,
        "tooltip": told("row", "kind", formats={attacked.quality: ".3f"}),
    }
    spec = spec_of(
        {"mark": {"type": "point", "filled": True, "size": 50, "opacity": 1}, "encoding": encoding, "height": 300.0}, columns, rows
    )
    how = f"{attacking.liars} of {attacking.hosts} hosts lie"
    note = f"Mean over honest users and seeds; {how}. Where a point is missing, a run could not go on."
    return Chart("attack", f"{attacked.quality[:1].upper()}{attacked.quality[1:]} where hosts lie", note, spec, columns, rows)


def print_result(attacked: Attacked, attacking: Attacking, written: Sequence[Path], console: Console) -> None:
    """A row for each method and rule, a column for each kind of lies."""
    kinds, rows = [NOBODY, *attacking.kinds], []
    for name in attacking.methods:
        for rule in attacking.rules_of(name):
            cells = [Cell(name, rule, kind) for kind in kinds]
            rows.append([name, rule, *(_shown(float(np.mean(attacked.values[cell])), attacked) for cell in cells)])
    how = f"{attacking.liars} of {attacking.hosts} hosts lie, {counted(len(attacking.seeds), 'seed')}"
    title = f"{attacked.quality.capitalize()} of honest users, {how}"
    console.print(table(title, ["method", "rule", *(_HEADS.get(kind, kind) for kind in kinds)], rows, n_text=2, gap=1))
    for sentence in notes(attacked, attacking):
        console.print(Text(sentence, style="dim"))
    console.print()
    for path in written:
        print(f"written: {path}", file=console.file)


def _shown(value: float, attacked: Attacked) -> str:
    return "ended" if np.isnan(value) else f"{value:.3f}" if attacked.is_rising else figure(value, 3)


def notes(attacked: Attacked, attacking: Attacking) -> list[str]:
    """What the table does not say by itself."""
    said = [f"{NOBODY}: the same hosts, none of which lies; the mean is over the same users."]
    for name in attacking.methods:
        fitting = attacking.rules_of(name)
        if unfit := [rule for rule in attacking.rules if rule not in fitting]:
            does = ": the row is what it does by itself" if fitting == [MEAN] else ""
            said.append(f"{', '.join(unfit)}: refused for {name}{does}.")
    for name in attacking.methods:
        lied = [cell for cell in attacked.alone if (cell.method, cell.rule) == (name, MEAN) and cell.kind != NOBODY]
        found = [attacked.alone[cell] for cell in lied]
        if found:
            n, of = (sum(pair[place] for pair in found) for place in (0, 1))
            said.append(f"{name}: {n} of {of} users who lie end in clusters without honest users, over all kinds and seeds.")
    for cell, why in list(attacked.ended.items())[:3]:
        said.append(f"ended: {cell.method}, {cell.rule}, {cell.kind}: {why}")
    return said
