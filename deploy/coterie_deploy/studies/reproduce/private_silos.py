"""Schools that protect their pupils: figure 3 (c) of Liu, Hu, Wu and Smith (2022), "On privacy and personalization in cross-silo federated
learning", at epsilon 6.

A linear model of the examination scores of 139 schools, with differential privacy of each pupil: 200 rounds of a pass in batches of 32,
gradients of rows shortened to 1, and noise that spends an epsilon of 6 at delta 1e-3. The errors are those that the authors' repository
(kenziyuliu/private-cross-silo-fl) prints for these settings: means over five splits of squared errors, averaged over all held-out pupils.

Deviations: our splits are others, and rows take part in a step independently, as the accountant assumes. The authors cut shuffled rows into
batches. Noise is not drawn from a seed, so a repeated study differs in the fourth decimal.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.plots import Axis, curves
from coterie_deploy.studies.plots import Point as Drawn
from coterie_deploy.studies.reproduce.study import Study, Work, deviation, seeds_of
from coterie_deploy.terminal.tables import table
from coterie_deploy.view.charts import Spec
from coterie_server.run.engine import Progress

# Title, settings and printed error of each method with noise. Without a pull to the mean, every school trains alone.
METHODS: Mapping[str, tuple[str, Mapping[str, Any], float]] = {
    "mr-mtl": ("MR-MTL, lambda 1", {"name": "fed_mtl", "mu": 1.0}, 0.02394),
    "fedavg": ("FedAvg", {"name": "fedavg"}, 0.02564),
    "local": ("local training", {"name": "fed_mtl", "mu": 0.0}, 0.02628),
}
ALONE, ALONE_TITLE = "alone", "local training without noise"  # nothing is sent, so that nothing is spent
_KEPT = ("average", "batch_size", "epochs", "optimizer", "evaluate_every", "evaluate_last")  # of the shipped method


@dataclass(frozen=True)
class Point:
    """The models after a round."""

    seed: int
    method: str
    round: int
    epsilon: float  # spent so far
    of_schools: float  # mean over the schools of their mean squared errors
    of_pupils: float | None  # mean squared error of all held-out pupils, of the last round


def measure(seed: int, work: Work) -> list[Point]:
    """Errors along the rounds of each method."""
    points = []
    for method, (title, settings, _) in METHODS.items():
        experiment = of_method(settings, seed)
        said = f"seed {seed}: {title} with noise in 139 schools"
        points += work.rows(f"private-silos-{method}-{seed}", said, [experiment], Point, _run, experiment, method)
    alone = of_method({"name": "fed_mtl", "mu": 0.0, "solver": "steps", "fine_tune": []}, seed, privacy=None)
    said = f"seed {seed}: {ALONE_TITLE} in 139 schools"
    return points + work.rows(f"private-silos-{ALONE}-{seed}", said, [alone], Point, _run, alone, ALONE)


def of_method(settings: Mapping[str, Any], seed: int, **changes: Any) -> Experiment:
    """The shipped experiment with another method."""
    content = json.loads(experiment_to_json(load("silos", [f"seed={seed}"])))
    kept = {key: content["method"][key] for key in _KEPT}
    return experiment_from({**content, "method": {**kept, **settings}, **changes})


def _run(experiment: Experiment, method: str) -> list[Point]:
    points: list[Point] = []

    def observe(progress: Progress) -> None:
        if (error := progress.figures.get("squared_error")) is not None:
            points.append(Point(experiment.seed, method, progress.round, progress.figures.get("epsilon", 0.0), error, None))

    finished = asyncio.run(launch(experiment, Launch(transport="loopback", observer=observe)))
    outcome, n_test = finished.outcomes[finished.final_stage], finished.facts.n_test
    (errors,) = (found for name, found in outcome.by_user.items() if name in ("personal_squared_error", "global_squared_error"))
    last = Point(
        experiment.seed,
        method,
        experiment.stop.rounds,
        outcome.figures.get("epsilon", 0.0),
        float(errors.mean()),
        float(np.average(errors, weights=n_test)),
    )
    return [*(point for point in points if point.round < last.round), last]


def show(points: Sequence[Point], console: Console) -> None:
    """The errors beside the printed ones."""
    lines = []
    for method, title, printed in (
        *((name, title, f"{error:.5f}") for name, (title, _, error) in METHODS.items()),
        (ALONE, ALONE_TITLE, ""),
    ):
        last = [point for point in points if point.method == method and point.of_pupils is not None]
        errors = [point.of_pupils for point in last if point.of_pupils is not None]
        epsilon = max(point.epsilon for point in last)
        lines.append((title, f"{np.mean(errors):.5f}", f"{deviation(errors):.5f}", printed, f"{epsilon:.2f}"))
    columns = ("", "squared error", "+-", "printed", "epsilon")
    console.print(table(f"Held-out pupils of 139 schools, {seeds_of(points)}", columns, lines))
    console.print(
        "Epsilon is for a single pupil at delta 0.001, spent by 200 rounds. Row counts, the schools' scaling of features and errors on "
        "held-out pupils are not protected, as in the paper. A school that sends nothing needs no noise, and spends nothing."
    )


def chart(points: Sequence[Point]) -> Spec:
    """Mean error of the schools against epsilon."""
    drawn = []
    for method, (title, _, _) in METHODS.items():
        for number in sorted({point.round for point in points}):
            here = [point for point in points if (point.method, point.round) == (method, number)]
            if here:
                errors = [point.of_schools for point in here]
                drawn.append(
                    Drawn.around(title, float(np.mean([point.epsilon for point in here])), float(np.mean(errors)), deviation(errors))
                )
    alone = [point.of_schools for point in points if point.method == ALONE and point.of_pupils is not None]
    error = Axis("mean squared error of the schools", high=0.06)
    return curves(drawn, Axis("epsilon spent"), error, levels={ALONE_TITLE: float(np.mean(alone))})


STUDIES = {"private-silos": Study(measure, show, chart)}
