"""What is printed, drawn and written of Table 1 of Collins et al. (2021): a table for each column, the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
from rich.console import Console

from coterie_deploy.studies.reproduce.fedrep_table1 import COLUMNS, METHODS, Score, chosen_columns, scores_of
from coterie_deploy.studies.reproduce.files import save_figure, write_csv
from coterie_deploy.terminal.tables import duration, is_narrow, size, table

NAME = "fedrep-table1"
_TUNED = "+FT"
_SAID = (
    "+FT: with ten more epochs of each user's head, at the end. Worst: the user whose model is worst. Up, down: what users send and are "
    "sent in a run to train, each on a device of its own. Not at hand: the paper's CIFAR-100, Sent140 and FEMNIST."
)
_ORDER = ("fedrep", "fedper", "fedavg")  # what the paper finds, the best first


@dataclass(frozen=True)
class Line:
    """A line of a column. Accuracies in per cent, one for each seed."""

    title: str
    accuracies: list[float]
    worst: list[float]
    paper: str  # as printed, "" where the paper has none
    scores: Sequence[Score]


def reproduce(seeds: int, output: Path, data: Path | None, console: Console, columns: str | None) -> Sequence[Score]:
    """Measures what the folder `output` does not have, seed by seed, prints the tables, and writes plot and numbers there."""
    chosen = chosen_columns(columns, data)
    scores: list[Score] = []
    with console.status("") as status:
        for seed in range(seeds):
            for column in chosen:
                scores += scores_of(seed, column, output, data, status.update)
    for column in chosen:
        _print(column, [score for score in scores if score.column == column], seeds, console)
    console.print(_SAID)
    console.print(settings_said(chosen), style="dim")
    _draw({column: lines_of([score for score in scores if score.column == column]) for column in chosen}, output / f"{NAME}.png")
    write_csv([field.name for field in fields(Score)], map(astuple, scores), output / f"{NAME}.csv")
    console.print(f"\nplot: {output / NAME}.png\nnumbers: {output / NAME}.csv", soft_wrap=True)
    return scores


def settings_said(columns: Sequence[str]) -> str:
    """With what the runs were made, beside what the shipped experiments say, in sentences."""
    said = [f"{COLUMNS[name].title}: experiment {COLUMNS[name].experiment} with {', '.join(COLUMNS[name].overrides)}." for name in columns]
    own = [f"{entry.title} {', '.join(entry.settings)}" for entry in METHODS.values() if entry.settings]
    return f"Settings. {' '.join(said)} Of one method: {'; '.join(own)}. Local updates of the others: 1 epoch."


def lines_of(scores: Sequence[Score]) -> list[Line]:
    """The lines of one column, in the order of `METHODS`."""
    found = []
    for name, method in METHODS.items():
        own = [score for score in scores if score.method == name]
        if own:
            found.append(_line(method.title, own, lambda score: (score.accuracy, score.worst)))
            if method.is_tuned:
                found.append(_line(f"{method.title}{_TUNED}", own, lambda score: (score.tuned, score.tuned_worst)))
    return found


def _line(title: str, scores: Sequence[Score], told: Callable[[Score], tuple[float, float]]) -> Line:
    accuracies, worst = ([100 * value for value in values] for values in zip(*map(told, scores), strict=True))
    return Line(title, accuracies, worst, COLUMNS[scores[0].column].paper.get(title, ""), scores)


def _print(column: str, scores: Sequence[Score], seeds: int, console: Console) -> None:
    has_paper, has_range, narrow = bool(COLUMNS[column].paper), seeds > 1, is_narrow(console)
    heads = ["", "accuracy", *(["range"] if has_range else []), *(["paper"] if has_paper else []), "worst"]
    heads += [] if narrow else ["up", "down", "time"]
    rows = []
    for line in lines_of(scores):
        cells = [line.title, f"{np.mean(line.accuracies):.1f}"]
        cells += [f"{min(line.accuracies):.1f}-{max(line.accuracies):.1f}"] if has_range else []
        cells += [line.paper or "-"] if has_paper else []
        rows.append([*cells, f"{np.mean(line.worst):.1f}", *([] if narrow else _costs(line))])
    which = "seed 0" if seeds == 1 else f"seeds 0 to {seeds - 1}"
    console.print(table(f"{COLUMNS[column].title}: accuracy in %, {which}", heads, rows))
    if not has_paper:
        console.print("A stand-in: no column of the paper.")
    kept = sum(_is_in_order([score for score in scores if score.seed == seed]) for seed in range(seeds))
    console.print(f"FedRep >= FedPer > FedAvg, as in the paper: from {kept} of {seeds} {'seed' if seeds == 1 else 'seeds'}.\n")


def _costs(line: Line) -> list[str]:
    """Tuning sends nothing, and its time is its method's, whose line stands above."""
    if line.title.endswith(_TUNED):
        return ["", "", ""]
    means = [float(np.mean(values)) for values in zip(*((s.megabytes_up, s.megabytes_down, s.seconds) for s in line.scores), strict=True)]
    return [size(means[0] * 1e6), size(means[1] * 1e6), duration(means[2])]


def _is_in_order(scores: Sequence[Score]) -> bool:
    best, middle, last = (next(score.accuracy for score in scores if score.method == name) for name in _ORDER)
    return best >= middle > last


def _draw(columns: dict[str, list[Line]], path: Path) -> None:
    """A panel for each column, a line for each of its lines: dots are ours, a cross the paper's."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - needs the extra `plots`

    from coterie_deploy.studies.reproduce.plots import BLUE, FONT, VERMILION  # noqa: PLC0415

    titles = [line.title for line in next(iter(columns.values()))]
    figure = Figure(figsize=(2.2 + 3.0 * len(columns), 1.6 + 0.32 * len(titles)), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (column, lines) in zip(panels, columns.items(), strict=True):
        for place, line in enumerate(lines):
            means, spots = float(np.mean(line.accuracies)), [place] * len(line.accuracies)
            axes.plot(line.accuracies, spots, color=BLUE, linestyle="", marker="|", markersize=9, label="each seed")
            axes.plot(means, place, color=BLUE, linestyle="", marker="o", markersize=6, label="mean of ours")
            if line.paper:
                axes.plot(float(line.paper), place, color=VERMILION, linestyle="", marker="x", markersize=8, mew=2, label="the paper's")
        axes.set_title(COLUMNS[column].title, fontsize=FONT)
        axes.set_yticks(range(len(titles)), titles, fontsize=FONT - 1)
        axes.tick_params(axis="x", labelsize=FONT - 1)
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
    panels[0].invert_yaxis()
    figure.supxlabel("mean local test accuracy, %", fontsize=FONT)
    by_label = {label: mark for axes in panels for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper center", ncols=3, fontsize=FONT - 1, frameon=False)
    save_figure(figure, path)
