"""The federated runs behind a stand-in for tables 2 and 3 and figure 2 of Lyu, Hanzely and Kolar (2022), and what is measured in them.

The paper's donor data are not public. The shipped experiment `exams` has what matters of them: many small users in known clusters, and
a logistic loss. Four sets of models, by runs on the engine with hosts, messages and a ledger:

    local            method `local`
    single model     method `global`
    single cluster   method `async_l2gd` with alpha = 1: no cluster has an average of its own, all users are tied to that of all
    known clusters   method `async_l2gd` with the weights of the shipped experiment

A seed is a draw of the held-out rows (a fifth of each school's) and of the coins. Schools judge their models themselves, and tell one loss
and one accuracy each. The performance ratio compares two sets of models school by school, so the study collects the models and judges
them once more, with the schools' own code.

The loss of a school whose training rows have one label has no minimiser when its intercept is free. For the local models alone the
intercept is therefore a feature, a column of -1 beside the standardised ones, which the l2 term holds as it does the others; so local
models have the same coordinates as all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import JsonValue

from coterie.arrays import Array
from coterie.experiment.config import Experiment
from coterie.experiment.data import PythonData
from coterie.experiment.problem import ProblemConfig
from coterie_client.data import UserData, deviations, load_users, standardize, totals, user_source
from coterie_client.problems import build_problem
from coterie_deploy.engines.api import Result, run
from coterie_deploy.read import shipped
from coterie_deploy.studies.reproduce.files import fingerprint_of, kept_rows
from coterie_deploy.studies.reproduce.known_clusters import models_of

Estimator = Literal["local", "single_model", "single_cluster", "known_clusters"]


@dataclass(frozen=True)
class Scores:
    """One set of models on the held-out rows of one draw: means over the rows of each user."""

    seed: int
    estimator: Estimator
    users: list[str]
    losses: list[float]  # cross-entropy in nats
    accuracies: list[float]


def rows_of(seed: int, folder: Path) -> list[Scores]:
    """The scores of each estimator, from the folder when they are there. Raises RunError when the folder cannot be written."""
    return kept_rows(folder / f"known-clusters-exams-seed{seed}.json", _fingerprint(seed), Scores, lambda: _measured(seed))


def known_clusters_experiment(seed: int) -> Experiment:
    """The shipped experiment, with the single model as a reference."""
    return shipped.load("exams", [f"seed={seed}", "method.collect_models=true", "method.trace_every=0"])


def single_cluster_experiment(seed: int) -> Experiment:
    """The same with alpha = 1 for all: L2GD of Hanzely and Richtarik (2020)."""
    experiment = known_clusters_experiment(seed)
    return experiment.model_copy(update={"method": experiment.method.model_copy(update={"lam": None, "alpha": 1.0}), "references": ()})


def local_experiment(seed: int) -> Experiment:
    """The local models, with the intercept as a feature."""
    whole = ["references=[]", "method={name: local}", "problem.intercept=false"]
    experiment = shipped.load("exams", [f"seed={seed}", *whole])
    return experiment.model_copy(update={"data": PythonData(source="python", path=f"{__name__}:schools")})


@user_source
def schools(options: dict[str, JsonValue], seed: int) -> Iterable[UserData]:  # noqa: ARG001
    """The schools with the held-out rows of the shipped experiment, standardised as there, and with a column of -1."""
    users = load_users(shipped.load("exams").data, seed, None)
    found = totals(users)
    n_rows = found.n_rows.sum()
    mean = found.sums.sum(axis=0) / n_rows
    scale = np.sqrt((deviations(users, mean) ** 2).sum(axis=0) / n_rows)
    return [_with_intercept(standardize(user, mean, scale)) for user in users]


def _with_intercept(user: UserData) -> UserData:
    features, test_features = (np.column_stack([rows, np.full(len(rows), -1.0)]) for rows in (user.features, user.test_features))
    return replace(user, features=features, test_features=test_features, schema=())


def _measured(seed: int) -> list[Scores]:
    users = list(schools({}, seed))
    known, single, local = (run(make(seed)) for make in (known_clusters_experiment, single_cluster_experiment, local_experiment))
    found: Mapping[Estimator, tuple[Result, str]] = {
        "local": (local, "local"),
        "single_model": (known, "global"),
        "single_cluster": (single, "async_l2gd"),
        "known_clusters": (known, "async_l2gd"),
    }
    return [_scores(seed, estimator, users, models_of(result, stage)) for estimator, (result, stage) in found.items()]


def _scores(seed: int, estimator: Estimator, users: list[UserData], models: Array) -> Scores:
    names = [user.name for user in users]
    config = ProblemConfig(loss="logistic", intercept=False, reduction="mean")
    problem = build_problem(config, names, [user.features for user in users], [user.target for user in users])
    scores: Any = problem.evaluate(models, [user.test_features for user in users], [user.test_target for user in users])
    losses, accuracies = (values.tolist() for values in scores)
    return Scores(seed, estimator, names, losses, accuracies)


def _fingerprint(seed: int) -> str:
    """What the numbers depend on: the experiments and the version."""
    makers = (known_clusters_experiment, single_cluster_experiment, local_experiment)
    return fingerprint_of(*(make(seed) for make in makers))
