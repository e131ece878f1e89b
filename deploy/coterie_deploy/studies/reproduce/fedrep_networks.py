"""Figures 5 and 6 of Collins, Hassani, Mokhtari and Shakkottai (2021), by federated runs of networks, seed by seed.

Figure 5: the test error of FedRep against the epochs of its heads, and of FedAvg against the epochs of its local update, on images with two
classes a user. Figure 6: the heads of new users trained on what FedRep and FedAvg have learnt from other classes. Data that is not shipped
comes from the folder of `--data`. Without it figure 5 takes scikit-learn's digits, and its table says so. The paper prints no numbers.
"""

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from coterie_deploy.studies.reproduce.study import Study, Work, deviation, seeds_of
from coterie_deploy.terminal.tables import table
from coterie_deploy.view.charts import Spec
from coterie_server.interface.half import Outcome

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
    for method, epochs in itertools.product(METHODS, EPOCHS):
        key = "head_epochs" if method == "fedrep" else "epochs"
        experiment = _with_method(load(name, [f"seed={seed}"]), {"name": method, key: epochs, "fine_tune": []})
        kept, said = f"fedrep-figure5-{name}-{method}-{epochs}-{seed}", f"seed {seed}: {method} with {epochs} local epochs on {name}"
        points += work.rows(kept, said, [experiment], Point, _last_rounds, experiment, work.data, name, method, epochs)
    return points


def _last_rounds(experiment: Experiment, data: Path | None, name: str, method: str, epochs: int) -> list[Point]:
    return [Point(experiment.seed, name, method, epochs, _run(experiment, data).figures["last_rounds_accuracy"])]


def figure6(seed: int, work: Work) -> list[Point]:
    """Mean accuracy of new users after each epoch of their heads, on what each method has learnt. ConfigError without the writers."""
    if work.data is None or not (work.data / _WRITERS).is_file():
        where = work.data or "a folder that --data names"
        raise ConfigError(f"figure 6 trains on {_WRITERS}, which is not in {where}: want --data DIR with it")
    points = []
    for method, epochs in (("fedrep", {}), ("fedavg", {"epochs": 5})):
        base = load("writers", [f"seed={seed}", "data.partition.classes_per_user=null"])
        trained = _with_classes(_with_method(base, {"name": method, "fine_tune": [], **epochs}), TRAINED)
        said = f"seed {seed}: {method} on the digits {TRAINED[0]} to {TRAINED[-1]} of the writers, then new users with the others"
        points += work.rows(f"fedrep-figure6-{method}-{seed}", said, [trained], Point, _new_users, trained, work.data, method)
    return points


def _new_users(trained: Experiment, data: Path | None, method: str) -> list[Point]:
    learnt = replace(_run(trained, data), carry=None)
    section = json.loads(_with_classes(trained, NEW).data.model_dump_json())
    section["partition"]["rows_per_user"] = NEW_ROWS
    found: list[float] = []
    new = adapted_from(trained, section, [], NEW_EPOCHS)
    outcome = _run(new, data, start=learnt, observer=lambda progress: found.append(progress.figures["accuracy"]))
    listed = enumerate([outcome.figures["accuracy_before"], *found])
    return [Point(trained.seed, "writers", method, epoch, accuracy) for epoch, accuracy in listed]


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


def _run(experiment: Experiment, data: Path | None, **more: Any) -> Outcome:
    finished = asyncio.run(launch(experiment, Launch(transport="loopback", data=data, **more)))
    return finished.outcomes[finished.final_stage]


# ---- what is printed and drawn


@dataclass(frozen=True)
class Figure:
    """What is printed and drawn of a figure."""

    title: str
    x: str
    y: str
    said: str  # by the paper, in words
    shown: Sequence[int]  # which x go into the table
    is_error: bool = False  # whether 1 - accuracy is shown


FIGURE5 = Figure(
    "Local test error against local epochs E",
    "local epochs E: of the head (FedRep), of the update (FedAvg)",
    "mean local test error",
    "The paper: FedRep's performance is monotonically non-decreasing with E; more local updates do not necessarily improve FedAvg.",
    EPOCHS,
    is_error=True,
)
FIGURE6 = Figure(
    "New users' accuracy after training the head",
    "epochs of the new users' heads",
    "mean accuracy on held-out rows",
    f"The paper: FedRep is significantly better than the other methods. New users have at most {NEW_ROWS} rows.",
    (0, 1, 5, 10, NEW_EPOCHS),
)


def _show(figure: Figure, points: Sequence[Point], console: Console) -> None:
    values = _values(figure, points)
    lines = []
    for method, title in METHODS.items():
        lines.append((title, *(f"{np.mean(values[method][x]):.3f}" for x in figure.shown)))
        if len(values[method][figure.shown[0]]) > 1:
            lines.append(("  +-", *(f"{deviation(values[method][x]):.3f}" for x in figure.shown)))
    console.print(table(f"{figure.title}, {seeds_of(points)}, {points[0].data}", ("", *map(str, figure.shown)), lines))
    console.print(figure.said)
    if points[0].data == "digits":
        console.print("These are scikit-learn's digits: the paper's CIFAR-10 needs --data DIR with cifar10_jpeg_train.npz and _test.npz.")


def _values(figure: Figure, points: Sequence[Point]) -> dict[str, dict[int, list[float]]]:
    """By method and x, one value for each seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for point in points:
        value = 1 - point.accuracy if figure.is_error else point.accuracy
        found.setdefault(point.method, {}).setdefault(point.epochs, []).append(value)
    return found


def _chart(figure: Figure, points: Sequence[Point]) -> Spec:
    listed = [(METHODS[method], *at) for method, by_x in _values(figure, points).items() for at in sorted(by_x.items())]
    drawn = [Drawn.around(title, x, float(np.mean(values)), float(np.std(values))) for title, x, values in listed]
    return curves(drawn, Axis(figure.x), Axis(figure.y, low=0))


STUDIES = {
    f"fedrep-figure{number}": Study(measure, partial(_show, figure), partial(_chart, figure))
    for number, measure, figure in ((5, figure5, FIGURE5), (6, figure6, FIGURE6))
}
