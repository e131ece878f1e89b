"""Several runs side by side: the values that they reached, and the cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from coterie_deploy.read.costs import AXES, Weighing, axes_of, best, common_goal, cost, figures_shown, goal_said, is_comparable
from coterie_deploy.terminal.tables import count, duration, figure, size
from coterie_deploy.view import charts
from coterie_deploy.view.charts import Section, Table, figure_name
from coterie_deploy.view.run_view import RunView, progress_charts
from coterie_server.record.curves import GAP, Curves, Goal, reached

_MOST_FIGURES = 4
_MEGABYTE = 1e6


def comparison_of(views: Sequence[RunView], weighing: Weighing) -> Section:
    """Lines of all runs in one chart, a point for each, and a table. ConfigError when no run has the figure of the goal."""
    named = named_curves(views)
    figures = _figures(list(named.values()), weighing.goal)
    goal = weighing.goal or common_goal(named.values())
    axes = sorted(axes_of(named.values()), key=lambda axis: axis != "bytes")
    tabs = {f"against {AXES[axis]}": progress_charts(named, figures, axis, weighing) for axis in axes}
    said = []
    if weighing.up_weight != 1:
        said.append(f"In costs and in bytes on the wire, a byte up counts as {weighing.up_weight:g} bytes down.")
    if weighing.goal is not None:
        said.append(f"The goal is {goal_said(weighing.goal)}.")
    elif goal is not None:
        said.append(f"The goal is what every run has reached, {goal_said(goal)}; --goal sets another.")
    if GAP in figures and not is_comparable(GAP, named.values()):
        said.append("Gaps of runs without a reference objective are relative to the smallest objective of the run itself.")
    points = _points(named, figures, weighing)
    return Section("comparison", "Comparison", said, tabs if figures else {}, points, [_table(views, named, goal, weighing)])


def named_curves(views: Sequence[RunView]) -> dict[str, Curves]:
    """The curves of each run that has any, by names of which no two are the same."""
    return {label: view.curves for label, view in zip(labels_of(views), views, strict=True) if view.curves is not None}


def labels_of(views: Sequence[RunView]) -> list[str]:
    """The names of runs, or, of those with the same name, as much of the end of their folders' paths as tells them apart."""
    again = Counter(view.name for view in views)
    folders = [view.folder.resolve() for view in views]
    labels = [view.name if again[view.name] == 1 else _ending(folder, folders) for view, folder in zip(views, folders, strict=True)]
    twice = Counter(labels)
    return [label if twice[label] == 1 else f"{label} ({number})" for number, label in enumerate(labels, start=1)]


def _ending(folder: Path, folders: Sequence[Path]) -> str:
    for start in range(-1, -len(folder.parts), -1):
        if [other.parts[start:] for other in folders].count(folder.parts[start:]) == 1:
            return "/".join(folder.parts[start:])
    return folder.name


def _figures(listed: Sequence[Curves], goal: Goal | None) -> list[str]:
    found = [name for curves in listed for name in figures_shown(curves) if is_comparable(name, listed)]
    ordered = sorted(dict.fromkeys(found), key=lambda name: -found.count(name))[:_MOST_FIGURES]
    if goal is None:
        return ordered
    if not any(goal.figure in curves.figures for curves in listed):
        for curves in listed:
            reached(curves, goal)  # raises an error that lists the figures
    return [goal.figure, *(name for name in ordered if name != goal.figure)][:_MOST_FIGURES]


def _points(named: Mapping[str, Curves], figures: Sequence[str], weighing: Weighing) -> list[charts.Chart]:
    """The best value of the first figure and the bytes that it took, where at least two runs have it."""
    outcomes = []
    for label, found in named.items():
        value = best(found, figures[0]) if figures else None
        at = None if value is None else reached(found, Goal(figures[0], value))
        if value is not None and at is not None:
            outcomes.append((label, round(float(cost(found, "bytes", up_weight=weighing.up_weight)[at])), value))
    weighted = "" if weighing.up_weight == 1 else f", up {weighing.up_weight:g} times"
    return [charts.outcomes_chart(outcomes, figures[0], f"bytes on the wire{weighted}")] if len(outcomes) > 1 else []


def _table(views: Sequence[RunView], named: Mapping[str, Curves], goal: Goal | None, weighing: Weighing) -> Table:
    rising = goal is not None and goal.is_rising
    columns = ["run", "status", "users", "rounds", "time", "up", "down", "held-out"]
    if goal is not None:
        columns += ["best", *(["per MB"] if rising else []), "rounds to goal", "bytes to goal"]
        columns += [] if weighing.up_weight == 1 else ["cost of goal"]
    rows = []
    for label, view in zip(labels_of(views), views, strict=True):
        found = named.get(label)
        if found is None:
            rows.append([label, view.status, *("-" for _ in columns[2:])])
            continue
        up, down = (float(found.bytes_by(direction=way)[-1]) for way in charts.WAYS)
        line = [label, view.status, count(view.n_users), count(found.stage.rounds), duration(found.stage.seconds), size(up), size(down)]
        line.append(figure(found.stage.results.get("heldout_metric")))
        rows.append(line if goal is None else [*line, *_towards(found, goal, weighing, rising=rising)])
    towards = "" if goal is None else f"; best: {figure_name(goal.figure)}; goal: {goal_said(goal)}"
    return Table(f"The stage of each run's method{towards}", columns, rows, n_text=2)


def _towards(found: Curves, goal: Goal, weighing: Weighing, *, rising: bool) -> list[str]:
    """The best value, that value per megabyte, and the cost of the goal."""
    value = best(found, goal.figure)
    at = reached(found, goal) if value is not None else None
    plain, weighted = cost(found, "bytes"), cost(found, "bytes", up_weight=weighing.up_weight)
    cells = [figure(value)]
    if rising:
        until = None if value is None else reached(found, Goal(goal.figure, value))
        cells.append("-" if value is None or until is None or not plain[until] else figure(value / float(plain[until]) * _MEGABYTE, 3))
    cells += ["-", "-"] if at is None else [count(at), size(float(plain[at]))]
    if weighing.up_weight != 1:
        cells.append("-" if at is None else size(float(weighted[at])))
    return cells
