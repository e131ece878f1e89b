"""Figures 5 and 6 of Collins, Hassani, Mokhtari and Shakkottai (2021), by federated runs of networks, seed by seed.

Figure 5: the test error of FedRep against the epochs of its heads, and of FedAvg against the epochs of its local update, on images with two
classes a user. Figure 6: the heads of new users trained on what FedRep and FedAvg have learnt from other classes. Data that is not shipped
is looked for in the folder of `--data`; without it figure 5 takes scikit-learn's digits, which is said in its table. The paper gives no
numbers for these figures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.adapt import adapted_from
from coterie_deploy.studies.plots import Axis, curves
from coterie_deploy.studies.plots import Point as Drawn
from coterie_deploy.studies.reproduce.study import Study, Work, fingerprint_of, kept_rows, seeds_of
from coterie_deploy.terminal.tables import table
from coterie_deploy.view.charts import Spec
from coterie_server.interface.half import Outcome
from coterie_server.run.coordinator import Finished

EPOCHS = (1, 2, 5, 10)  # E of figure 5
METHODS = {"fedrep": "FedRep", "fedavg": "FedAvg"}
TRAINED, NEW = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)  # the digits of figure 6
NEW_ROWS = 500  # of new users, at most: the paper's "500 samples at this new client"
NEW_EPOCHS = 20
_CIFAR, _WRITERS = "cifar10_jpeg_train.npz", "mnist_writers.npz"


@dataclass(frozen=True)
class Point:
    """One number of a figure."""

    seed: int
    data: str
    method: str
    epochs: int
    accuracy: float


def figure5(seed: int, work: Work) -> list[Point]:
    """Mean local accuracy over the last 10 rounds, for each method and number of local epochs."""
    name = "cifar10-jpeg" if work.data is not None and (work.data / _CIFAR).is_file() else "digits"
    points = []
    for method in METHODS:
        for epochs in EPOCHS:
            work.say(f"seed {seed}: {method} with {epochs} local epochs on {name}")
            key = "head_epochs" if method == "fedrep" else "epochs"
            base = load(name, [f"seed={seed}"])
            experiment = _with_method(base, {"name": method, key: epochs, "fine_tune": []})
            points += _kept(work, f"figure5-{name}-{method}-{epochs}-{seed}", experiment, _last_rounds(seed, name, method, epochs))
    return points


def figure6(seed: int, work: Work) -> list[Point]:
    """Mean accuracy of new users after each epoch of their heads, on what each method has learnt. ConfigError without the writers."""
    if work.data is None or not (work.data / _WRITERS).is_file():
        raise ConfigError(
            f"figure 6 trains on {_WRITERS}, which is not in {work.data or 'a folder that --data names'}: want --data DIR with it"
        )
    points = []
    for method in METHODS:
        work.say(f"seed {seed}: {method} on the digits {TRAINED[0]} to {TRAINED[-1]} of the writers, then new users with the others")
        base = load("writers", [f"seed={seed}", "data.partition.classes_per_user=null"])
        trained = _with_classes(
            _with_method(base, {"name": method, "fine_tune": [], **({"epochs": 5} if method == "fedavg" else {})}), TRAINED
        )
        points += _kept(work, f"figure6-{method}-{seed}", trained, _new_users(seed, method))
    return points


Measure = Callable[[Experiment, "Path | None"], list[Point]]


def _last_rounds(seed: int, name: str, method: str, epochs: int) -> Measure:
    def measure(experiment: Experiment, data: Path | None) -> list[Point]:
        figures = _outcome(_run(experiment, data)).figures
        return [Point(seed, name, method, epochs, figures["last_rounds_accuracy"])]

    return measure


def _new_users(seed: int, method: str) -> Measure:
    def measure(experiment: Experiment, data: Path | None) -> list[Point]:
        learnt = _outcome(_run(experiment, data))
        section = json.loads(_with_classes(experiment, NEW).data.model_dump_json())
        section["partition"]["rows_per_user"] = NEW_ROWS
        new = adapted_from(experiment, section, [], NEW_EPOCHS)
        accuracies: list[float] = []
        finished = _run(
            new, data, start=replace(learnt, carry=None), observer=lambda progress: accuracies.append(progress.figures["accuracy"])
        )
        before = _outcome(finished).figures["accuracy_before"]
        return [Point(seed, "writers", method, epoch, accuracy) for epoch, accuracy in enumerate([before, *accuracies])]

    return measure


def _with_method(base: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """The experiment with another method of the same optimizer and participation."""
    content = json.loads(experiment_to_json(base))
    kept = {key: content["method"][key] for key in ("participation", "batch_size", "optimizer")}
    if changes["name"] == "fedrep":
        kept |= {key: content["method"][key] for key in ("head_epochs", "representation_epochs")}
    return experiment_from({**content, "method": {**kept, **changes}})


def _with_classes(base: Experiment, classes: Sequence[int]) -> Experiment:
    content = json.loads(experiment_to_json(base))
    content["data"]["partition"] |= {"classes": list(classes), "relabel": True}
    content["model"]["classes"] = len(classes)
    return experiment_from(content)


def _run(experiment: Experiment, data: Path | None, **more: Any) -> Finished:
    return asyncio.run(launch(experiment, Launch(transport="loopback", data=data, **more)))


def _outcome(finished: Finished) -> Outcome:
    return finished.outcomes[finished.final_stage]


def _kept(work: Work, name: str, experiment: Experiment, measure: Measure) -> list[Point]:
    return kept_rows(work.folder / f"fedrep-{name}.json", fingerprint_of(experiment), Point, lambda: measure(experiment, work.data))


# ---- what is printed and drawn


@dataclass(frozen=True)
class Figure:
    """How a figure is measured and what is said of it."""

    measure: Callable[[int, Work], list[Point]]
    title: str
    x: str
    y: str
    is_error: bool  # whether 1 - accuracy is shown
    said: str  # by the paper, in words
    shown: tuple[int, ...]  # which x go into the table


FIGURES = {
    "fedrep-figure5": Figure(
        figure5,
        "Local test error against local epochs E",
        "local epochs E: of the head (FedRep), of the update (FedAvg)",
        "mean local test error",
        True,
        "The paper: FedRep's performance is monotonically non-decreasing with E; more local updates do not necessarily improve FedAvg.",
        (1, 2, 5, 10),
    ),
    "fedrep-figure6": Figure(
        figure6,
        "New users' accuracy after training the head",
        "epochs of the new users' heads",
        "mean accuracy on held-out rows",
        False,
        f"The paper: FedRep is significantly better than what is compared. New users have at most {NEW_ROWS} rows.",
        (0, 1, 5, 10, NEW_EPOCHS),
    ),
}


def _show(points: Sequence[Point], figure: Figure, console: Console) -> None:
    values = _values(points, figure)
    lines = []
    for method, title in METHODS.items():
        lines.append((title, *(f"{np.mean(values[method][x]):.3f}" for x in figure.shown)))
        if len(values[method][figure.shown[0]]) > 1:
            lines.append(("  +-", *(f"{np.std(values[method][x], ddof=1):.3f}" for x in figure.shown)))
    console.print(table(f"{figure.title}, {seeds_of(points)}, {points[0].data}", ("", *map(str, figure.shown)), lines))
    console.print(figure.said)
    if points[0].data == "digits":
        console.print("These are scikit-learn's digits: the paper's CIFAR-10 needs --data DIR with cifar10_jpeg_train.npz and _test.npz.")


def _values(points: Sequence[Point], figure: Figure) -> dict[str, dict[int, list[float]]]:
    """By method and x, one value for each seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for point in points:
        value = 1 - point.accuracy if figure.is_error else point.accuracy
        found.setdefault(point.method, {}).setdefault(point.epochs, []).append(value)
    return found


def _chart(points: Sequence[Point], figure: Figure) -> Spec:
    drawn = []
    for method, by_x in _values(points, figure).items():
        for x, values in sorted(by_x.items()):
            mean, spread = float(np.mean(values)), float(np.std(values))
            drawn.append(Drawn(METHODS[method], x, mean, mean - spread, mean + spread))
    return curves(drawn, Axis(figure.x), Axis(figure.y, low=0))


def _study(figure: Figure) -> Study:
    return Study(figure.measure, lambda points, console: _show(points, figure, console), lambda points: _chart(points, figure))


STUDIES = {name: _study(figure) for name, figure in FIGURES.items()}
