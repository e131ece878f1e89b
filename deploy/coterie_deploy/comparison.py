"""Several runs side by side: what each has reached, and what that has cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coterie_deploy import charts
from coterie_deploy.charts import AXES, Against, cost
from coterie_deploy.run_view import MAIN_FIGURES, RunView, Section, Table, figures_shown
from coterie_deploy.tables import count, duration, figure, size
from coterie_server.curves import Curves, Goal, reached

_AXES: Sequence[Against] = ("bytes", "round", "seconds")


@dataclass(frozen=True)
class Weighing:
    """How costs are weighed: a byte up counts as `up_weight` bytes down. `goal`: what a run is to reach."""

    goal: Goal | None = None
    up_weight: float = 1.0


def comparison_of(views: Sequence[RunView], weighing: Weighing) -> Section:
    """Lines of all runs in one chart, and a table. ConfigError when no run has the figure of the goal."""
    named = named_curves(views)
    figures = _figures(named, weighing.goal)
    tabs = {
        f"against {AXES[against]}": [charts.progress_chart(named, name, against, up_weight=weighing.up_weight) for name in figures]
        for against in _AXES
    }
    said = []
    if weighing.up_weight != 1:
        said.append(f"A byte up counts as {weighing.up_weight:g} bytes down.")
    if weighing.goal is not None:
        said.append(f"The goal is {weighing.goal}.")
    return Section("comparison", "Comparison", said, tabs=tabs, tables=[_table(views, named, weighing)])


def named_curves(views: Sequence[RunView]) -> dict[str, Curves]:
    """The curves of each run that has any, by names of which no two are the same."""
    names = [view.name for view in views]
    labels = [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, start=1)]
    return {label: view.curves for label, view in zip(labels, views, strict=True) if view.curves is not None}


def _figures(named: Mapping[str, Curves], goal: Goal | None) -> list[str]:
    """Those that most runs have come first."""
    listed = [name for found in named.values() for name in figures_shown(found)]
    ordered = sorted(
        dict.fromkeys(listed), key=lambda name: (-listed.count(name), MAIN_FIGURES.index(name) if name in MAIN_FIGURES else 99)
    )
    if goal is not None:
        if not any(goal.figure in found.figures for found in named.values()):
            for found in named.values():
                reached(found, goal)  # says which figures there are
        ordered = [goal.figure, *(name for name in ordered if name != goal.figure)]
    return ordered[:4]


def _table(views: Sequence[RunView], named: Mapping[str, Curves], weighing: Weighing) -> Table:
    columns = ["run", "status", "rounds", "time", "up", "down", "result"]
    columns += [] if weighing.goal is None else [f"rounds to {weighing.goal}", "cost to it"]
    rows = []
    of_label = dict(zip(named, (view for view in views if view.curves is not None), strict=True))
    for label, view in of_label.items():
        found = named[label]
        up, down = (float(found.bytes_by(direction=way)[-1]) for way in ("up", "down"))
        results = found.stage.results
        metric = results.get("heldout_metric")
        line = [label, view.status, count(found.stage.rounds), duration(found.stage.seconds), size(up), size(down), figure(metric)]
        if weighing.goal is not None:
            at = reached(found, weighing.goal) if weighing.goal.figure in found.figures else None
            price = None if at is None else float(cost(found, "bytes", up_weight=weighing.up_weight)[at])
            line += [count(at), "-" if price is None else size(price)]
        rows.append(line)
    return Table("The stage that is each run's result", columns, rows, n_text=2)
