"""Figures 5 and 6 of Collins, Hassani, Mokhtari and Shakkottai (2021), by federated runs of networks, seed by seed.

Figure 5: the test error of FedRep against the epochs of its heads, and of FedAvg against the epochs of its local update, on images with two
classes a user. Figure 6: the heads of new users trained on what FedRep and FedAvg have learnt from other classes. Data that is not shipped
is looked for in the folder of `--data`; without it figure 5 takes scikit-learn's digits, which is said in its table.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.adapt import adapted_from
from coterie_deploy.studies.reproduce.files import fingerprint_of, kept_rows
from coterie_server.interface.half import Outcome
from coterie_server.run.coordinator import Finished

EPOCHS = (1, 2, 5, 10)  # E of figure 5
METHODS = ("fedrep", "fedavg")
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


def figure5(seed: int, folder: Path, data: Path | None, say: Callable[[str], None]) -> list[Point]:
    """Mean local accuracy over the last 10 rounds, for each method and number of local epochs."""
    name = "cifar10-jpeg" if data is not None and (data / _CIFAR).is_file() else "digits"
    points = []
    for method in METHODS:
        for epochs in EPOCHS:
            say(f"seed {seed}: {method} with {epochs} local epochs on {name}")
            key = "head_epochs" if method == "fedrep" else "epochs"
            base = load(name, [f"seed={seed}"])
            experiment = _with_method(base, {"name": method, key: epochs, "fine_tune": []})
            points += _kept(
                folder, f"fedrep-figure5-{name}-{method}-{epochs}-{seed}", experiment, data, _last_rounds(seed, name, method, epochs)
            )
    return points


def figure6(seed: int, folder: Path, data: Path | None, say: Callable[[str], None]) -> list[Point]:
    """Mean accuracy of new users after each epoch of their heads, on what each method has learnt. ConfigError without the writers."""
    if data is None or not (data / _WRITERS).is_file():
        raise ConfigError(f"figure 6 trains on {_WRITERS}, which is not in {data or 'a folder that --data names'}: want --data DIR with it")
    points = []
    for method in METHODS:
        say(f"seed {seed}: {method} on the digits {TRAINED[0]} to {TRAINED[-1]} of the writers, then new users with the others")
        base = load("writers", [f"seed={seed}", "data.partition.classes_per_user=null"])
        trained = _with_classes(
            _with_method(base, {"name": method, "fine_tune": [], **({"epochs": 5} if method == "fedavg" else {})}), TRAINED
        )
        points += _kept(folder, f"fedrep-figure6-{method}-{seed}", trained, data, _new_users(seed, method))
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


def _kept(folder: Path, name: str, experiment: Experiment, data: Path | None, measure: Measure) -> list[Point]:
    return kept_rows(folder / f"{name}.json", fingerprint_of(experiment), Point, lambda: measure(experiment, data))
