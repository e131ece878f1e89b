"""Table 1 of Collins, Hassani, Mokhtari and Shakkottai (2021), by federated runs of each method, on the data that is available.

The paper's CIFAR-10 columns need `cifar10_jpeg_train.npz` and `_test.npz` in the folder of `--data`. They train an MLP on 8x8 pixels for 50
rounds, where the paper trains a CNN for 100. Without these files scikit-learn's digits stand in: 20 users of about 70 rows, which is no
column of the paper. CIFAR-100, Sent140 and FEMNIST are not available.

A tenth of the users takes part in a round, as in the paper (of the digits' few users a fifth; for local training, all). Local updates last
one epoch, as FedRep's of the representation do. `METHODS` has the settings of single methods, the same for all data. The digits' common
settings were chosen with seeds 0 and 7 to 9, methods' own settings with seed 7: not for one seed's test rows, but not blind to all either.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, as_written
from coterie.text.names import similar_names
from coterie_deploy.engines.api import run
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.compare import Comparing
from coterie_deploy.studies.plots import WIDTH, panels
from coterie_deploy.studies.reproduce.study import Study, Work, seeds_of
from coterie_deploy.terminal.tables import counted, duration, is_narrow, size, table
from coterie_deploy.view.charts import Spec, spec_of

_CIFAR = ("cifar10_jpeg_train.npz", "cifar10_jpeg_test.npz")
_WEIGHT_BYTES = 4  # weights of networks travel as float32
_JUDGING = ("evaluation", "delivery")  # steps that are needed to judge, not to train


@dataclass(frozen=True)
class Column:
    """Whose data, and how they are divided."""

    title: str
    experiment: str  # shipped
    overrides: Sequence[str]
    paper: Mapping[str, str] = field(default_factory=dict)  # by title of a line, in per cent as printed; {}: no column of the paper

    @property
    def files(self) -> Sequence[str]:
        """What is not shipped."""
        return _CIFAR if self.experiment == "cifar10-jpeg" else ()


# Inputs have mean 0 and deviation 1, as CIFAR-10's do. Otherwise 50 rounds of so few rows leave even local training near its start.
# A fifth of the 20 users takes part: with a tenth, the average would be of two users.
_DIGITS = ("method.participation=0.2", "stop.rounds=50", "model.input_mean=[0.3]", "model.input_std=[0.38]")
_LINES = (
    *("Local Only", "FedAvg", "FedAvg+FT", "FedProx", "FedProx+FT", "SCAFFOLD", "SCAFFOLD+FT", "Fed-MTL", "PerFedAvg"),
    *("LG-Fed", "L2GD", "APFL", "Ditto", "FedPer", "FedRep"),
)


def _digits(classes: int) -> Column:
    return Column(f"digits (20, {classes})", "digits", (*_DIGITS, f"data.partition.classes_per_user={classes}"))


def _cifar(users: int, classes: int, printed: str) -> Column:
    """`printed` is the paper's column, in the order of its lines."""
    partition = (f"data.partition.users={users}", f"data.partition.classes_per_user={classes}")
    return Column(f"CIFAR-10 ({users}, {classes})", "cifar10-jpeg", partition, dict(zip(_LINES, printed.split(), strict=True)))


COLUMNS = {
    "digits-2": _digits(2),
    "digits-5": _digits(5),
    "cifar10-100-2": _cifar(100, 2, "89.79 42.65 87.65 39.92 85.81 37.72 86.35 80.46 82.27 84.14 81.04 83.77 85.39 87.13 87.70"),
    "cifar10-100-5": _cifar(100, 5, "70.68 51.78 73.68 50.99 72.75 47.33 68.23 58.31 67.20 63.02 59.98 72.29 70.34 73.84 75.68"),
    "cifar10-1000-2": _cifar(1000, 2, "78.30 44.31 82.04 21.93 75.41 33.79 78.24 76.53 67.36 77.48 71.96 82.39 80.36 81.73 83.27"),
}
_ONLY_IF_ASKED = ("cifar10-1000-2",)  # ten times the users to judge


@dataclass(frozen=True)
class Entry:
    """A method of the table, and its settings beside those of all."""

    title: str  # as the paper has it
    method: str
    settings: Sequence[str] = ()
    is_tuned: bool = False  # whether it has a line "+FT" too


# SCAFFOLD and L2GD have steps without memory. With momentum 0.5 a gradient moves the others by lr / (1 - 0.5) = 0.02 in all.
_PLAIN = ("method.optimizer.momentum=0", "method.optimizer.lr=0.02")

# The strengths of regularisation and mixing are the methods' defaults: with seed 7 no other value tried was better on all data.
METHODS = {
    # Every user trains for 30 rounds of one epoch: the mean over the last ten is of 21 to 30 epochs.
    "local_network": Entry("Local Only", "local_network", ("method.participation=1", "stop.rounds=30")),
    "fedavg": Entry("FedAvg", "fedavg", is_tuned=True),
    "fedprox": Entry("FedProx", "fedprox", ("method.mu=0.1",), is_tuned=True),
    "scaffold": Entry("SCAFFOLD", "scaffold", _PLAIN, is_tuned=True),
    "fed_mtl": Entry("Fed-MTL", "fed_mtl", ("method.mu=0.1",)),
    "per_fedavg": Entry("PerFedAvg", "per_fedavg"),
    "per_fedavg_5": Entry("PerFedAvg, 5 epochs", "per_fedavg", ("method.adaptation_epochs=5",)),
    "lg_fedavg": Entry("LG-Fed", "lg_fedavg"),
    # A local step is an epoch, and the coin is fair: two epochs a round in the mean, then two aggregations. With steps of one batch a round
    # would have 1/p batches, whatever the number of rows.
    "l2gd": Entry("L2GD", "l2gd", (*_PLAIN, "method.epochs=1", "method.p=0.5")),
    "apfl": Entry("APFL", "apfl", ("method.alpha=0.5",)),
    "ditto": Entry("Ditto", "ditto", ("method.penalty=1",)),
    # With its defaults users of few rows learn too slowly: 0.77 instead of 0.95 on digits with two classes.
    "pfedme": Entry("pFedMe", "pfedme", ("method.optimizer.lr=0.02", "method.personal_lr=0.02")),
    "ifca": Entry("IFCA", "ifca"),
    "fedper": Entry("FedPer", "fedper"),
    "fedrep": Entry("FedRep", "fedrep", is_tuned=True),
}


@dataclass(frozen=True)
class Score:
    """A method on a column from a seed. Accuracies are means over all users, shares of 1."""

    column: str
    method: str
    seed: int
    accuracy: float  # mean over the last ten rounds
    worst: float  # user's accuracy, at the end
    tuned: float  # accuracy after ten more epochs of the head
    tuned_worst: float
    megabytes_up: float  # float32 numbers that users send to train, each on a device of its own; nothing that only judges
    megabytes_down: float
    seconds: float


def chosen_columns(asked: str | None, data: Path | None) -> list[str]:
    """The columns A,B of `--columns`, or else all that the data at hand allows. Raises ConfigError."""
    there = {name: all(data is not None and (data / file).is_file() for file in column.files) for name, column in COLUMNS.items()}
    if asked is None:
        return [name for name, is_there in there.items() if is_there and name not in _ONLY_IF_ASKED]
    names = list(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in COLUMNS:
            raise ConfigError(f"--columns has {name!r}, want some of {', '.join(similar_names(name, list(COLUMNS)) or COLUMNS)}")
        if not there[name]:
            files, where = " and ".join(COLUMNS[name].files), data or "a folder that --data names"
            raise ConfigError(f"the column {name} needs {files}, not both in {where}: want --data DIR with them")
    return names


def scores_of(seed: int, column: str, work: Work) -> list[Score]:
    """Every method from one seed. Raises RunError when the folder cannot be written."""
    found: list[Score] = []
    for method, entry in METHODS.items():
        experiment = experiment_of(column, method, seed)
        name, said = f"fedrep-table1-{column}-{method}-{seed}", f"seed {seed}, {COLUMNS[column].title}: {entry.title}"
        found += work.rows(name, said, [experiment], Score, _measured, experiment, column, method, work.data)
    return found


def experiment_of(column: str, method: str, seed: int) -> Experiment:
    """The run of one method: the column's experiment, whose optimizer and participation it takes over, with the method's own settings."""
    content = as_written(load(COLUMNS[column].experiment, COLUMNS[column].overrides))
    entry = METHODS[method]
    return Comparing(content, [entry.method], [seed], {entry.method: entry.settings}, {"hosts": 1}).experiment(entry.method, seed)


def _measured(experiment: Experiment, column: str, method: str, data: Path | None) -> list[Score]:
    began = time.monotonic()
    result = run(experiment, data=data)
    seconds = time.monotonic() - began
    figures = result.metrics[result.final_stage]
    whose = "personal" if "personal_accuracy" in figures else "global"
    names = ("last_rounds_accuracy", *(f"{whose}_{which}" for which in ("accuracy_min", "ft_head_accuracy", "ft_head_accuracy_min")))
    sent = {"up": 0, "down": 0}
    for row in result.ledger():
        if row["step"] not in _JUDGING:
            sent[row["direction"]] += int(row["scalars"])
    values = [*(figures[name] for name in names), *(_WEIGHT_BYTES * scalars / 1e6 for scalars in sent.values()), seconds]
    return [Score(column, method, experiment.seed, *values)]


# ---- what is printed and drawn: a table for each column

_TUNED = "+FT"
_SAID = (
    "+FT: with ten more epochs of each user's head, at the end. Worst: the user whose model is worst. Up, down: what users send and "
    "receive in a run to train, each on a device of its own. Not available: the paper's CIFAR-100, Sent140 and FEMNIST."
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


def _show(scores: Sequence[Score], console: Console) -> None:
    by_column = _by_column(scores)
    for column, of_column in by_column.items():
        _print(COLUMNS[column], of_column, console)
    console.print(_SAID)
    columns = [COLUMNS[name] for name in by_column]
    said = [f"{column.title}: experiment {column.experiment} with {', '.join(column.overrides)}." for column in columns]
    own = [f"{entry.title} {', '.join(entry.settings)}" for entry in METHODS.values() if entry.settings]
    settings = f"Settings. {' '.join(said)} Of one method: {'; '.join(own)}. Local updates of the others: 1 epoch."
    console.print(settings, style="dim")


def _by_column(scores: Sequence[Score]) -> dict[str, list[Score]]:
    return {column: [score for score in scores if score.column == column] for column in dict.fromkeys(score.column for score in scores)}


def lines_of(scores: Sequence[Score]) -> list[Line]:
    """The lines of one column, in the order of `METHODS`."""
    found = []
    for name, method in METHODS.items():
        own = [score for score in scores if score.method == name]
        told = [(method.title, [(score.accuracy, score.worst) for score in own])]
        told += [(f"{method.title}{_TUNED}", [(score.tuned, score.tuned_worst) for score in own])] if method.is_tuned else []
        for title, values in told if own else ():
            accuracies, worst = ([100 * value for value in listed] for listed in zip(*values, strict=True))
            found.append(Line(title, accuracies, worst, COLUMNS[own[0].column].paper.get(title, ""), own))
    return found


def _print(column: Column, scores: Sequence[Score], console: Console) -> None:
    seeds = {score.seed for score in scores}
    has_paper, has_range, has_costs = bool(column.paper), len(seeds) > 1, not is_narrow(console)
    heads = ["", "accuracy", *["range"] * has_range, *["paper"] * has_paper, "worst", *["up", "down", "time"] * has_costs]
    rows = []
    for line in lines_of(scores):
        spread = [f"{min(line.accuracies):.1f}-{max(line.accuracies):.1f}"] * has_range
        cells = [line.title, f"{np.mean(line.accuracies):.1f}", *spread, *[line.paper or "-"] * has_paper, f"{np.mean(line.worst):.1f}"]
        if has_costs and not line.title.endswith(_TUNED):  # tuning sends nothing, and its time is that of its method
            up, down, seconds = np.mean([(each.megabytes_up, each.megabytes_down, each.seconds) for each in line.scores], axis=0).tolist()
            cells += [size(up * 1e6), size(down * 1e6), duration(seconds)]
        rows.append(cells)
    console.print(table(f"{column.title}: accuracy in %, {seeds_of(scores)}", heads, rows))
    if not has_paper:
        console.print("A stand-in: no column of the paper.")
    kept = sum(_is_in_order([score for score in scores if score.seed == seed]) for seed in seeds)
    console.print(f"FedRep >= FedPer > FedAvg, as in the paper: from {kept} of {counted(len(seeds), 'seed')}.\n")


def _is_in_order(scores: Sequence[Score]) -> bool:
    best, middle, last = (next(score.accuracy for score in scores if score.method == name) for name in _ORDER)
    return best >= middle > last


def _chart(scores: Sequence[Score]) -> Spec:
    """A panel for each column, a line for each of its lines: diamonds are seeds, a dot is their mean, a cross the paper's."""
    marks = ("each seed", "mean of ours", "the paper's")
    rows: list[tuple[object, ...]] = []
    for column, of_column in _by_column(scores).items():
        for line in lines_of(of_column):
            found = [*((marks[0], value) for value in line.accuracies), (marks[1], float(np.mean(line.accuracies)))]
            found += [(marks[2], float(line.paper))] if line.paper else []
            rows += [(COLUMNS[column].title, line.title, *one) for one in found]
    n_panels, titles = len({row[0] for row in rows}), list(dict.fromkeys(row[1] for row in rows))
    mark: dict[str, Any] = {"field": "mark", "type": "nominal", "sort": marks}
    encoding = {
        "x": {"field": "accuracy", "type": "quantitative", "title": "accuracy, %", "scale": {"zero": False}},
        "y": {"field": "line", "type": "nominal", "sort": titles, "title": None, "axis": {"grid": True}},
        "color": {**mark, "scale": {"domain": marks}},
        "shape": {**mark, "scale": {"domain": marks, "range": ["diamond", "circle", "cross"]}},
        "size": {**mark, "scale": {"domain": marks, "range": [14, 40, 40]}},
    }
    unit = {"mark": {"type": "point", "filled": True}, "encoding": encoding, "width": WIDTH, "height": 27 * len(titles)}
    return panels(spec_of(unit, ("panel", "line", "mark", "accuracy"), rows), columns=n_panels)


def _measure(seed: int, work: Work) -> list[Score]:
    return [score for column in chosen_columns(work.columns, work.data) for score in scores_of(seed, column, work)]


STUDIES = {"fedrep-table1": Study(_measure, _show, _chart)}
