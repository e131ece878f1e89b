"""The federated runs behind table 1 and figure 1 of Lyu, Hanzely and Kolar (2022), and what is measured in them.

Section 6.1's data: 20 clusters of 20 users, d = 20, unit variances, m rows per user (`coterie_client.data.hlm`). Measured is
|theta_i - theta*_i|, not squared, whatever the captions of the paper say. Five estimators, by runs on the engine with hosts, messages and a
ledger:

    local            method `local`
    single model     method `global`
    single cluster   method `hlm_exact` with alpha = 1; gamma is cross-validated on the users' rows, outside of the federation
    known clusters   method `hlm_exact` with gamma = lambda = 1
    single coin      method `async_l2gd`, variant `single_coin`, with the same weights: the algorithm that the paper has run, with its
                     p = 0.1, eta = 1e-4 and 50,000 iterations. Users send their models at the end, or nobody could tell how far they are
                     from the truth. A run takes ten seconds to a minute, so it is made for some m only.

Numbers are kept in the output folder, so that the figure costs nothing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.data import HlmData
from coterie_client.data import load_users
from coterie_client.data.hlm import truth
from coterie_deploy.engines.api import Result, run
from coterie_deploy.studies.reproduce.files import fingerprint_of, kept_rows
from coterie_server.maths import hlm

Estimator = Literal["local", "single_model", "single_cluster", "known_clusters", "single_coin"]
R = TypeVar("R")

# "20 evenly spaced points in [0.01, 2]"
PENALTIES = tuple(float(penalty) for penalty in np.linspace(0.01, 2.0, 20))
N_FOLDS = 5  # the paper does not say
# "communication probability p = 0.1, stepsize eta = 1e-4, and maximum number of iterations 50000"
SINGLE_COIN: Mapping[str, Any] = {"variant": "single_coin", "p0": 0.1, "eta": 1e-4, "iterations": 50_000}
SINGLE_COIN_SIZES = (1, 5, 10, 100)  # m: where it has not converged, and the two of table 1


@dataclass(frozen=True)
class Row:
    """The distances |theta_i - theta*_i| of one estimator in one draw of the data: mean, standard deviation and maximum over the users."""

    seed: int
    rows_per_user: int  # m
    estimator: Estimator
    mean: float
    spread: float
    maximum: float
    gamma: float  # what ties the models, 0 where nothing does


def rows_of(seed: int, rows_per_user: int, folder: Path) -> list[Row]:
    """One row for each estimator, from the folder when they are there. Raises RunError when the folder cannot be written."""
    kept = folder / f"known-clusters-seed{seed}-m{rows_per_user}.json"
    return kept_rows(kept, _fingerprint(seed, rows_per_user), Row, lambda: _measured(seed, rows_per_user))


def baselines_experiment(seed: int, rows_per_user: int) -> Experiment:
    """The local and the single model."""
    # Both methods want losses with a minimiser, which fewer rows than d have not; this little l2 gives that of least norm to seven digits.
    return _experiment(seed, rows_per_user, {"name": "local"}, l2=1e-8, references=("global",))


def tied_experiment(seed: int, rows_per_user: int, **weights: float) -> Experiment:
    """The minimiser of (2.1) with these weights."""
    return _experiment(seed, rows_per_user, {"name": "hlm_exact", **weights}, l2=0.0)


def single_coin_experiment(seed: int, rows_per_user: int) -> Experiment:
    """The paper's algorithm of section 6, on its way to the minimiser of (2.1) with the weights of Theorem 5.1 for unit variances."""
    method = {"name": "async_l2gd", "gamma": 1.0, "lam": 1.0, **SINGLE_COIN, "collect_models": True}
    return _experiment(seed, rows_per_user, method, l2=0.0)


def _experiment(seed: int, rows_per_user: int, method: Mapping[str, Any], *, l2: float, references: Sequence[str] = ()) -> Experiment:
    content = {
        "name": "known-clusters",
        "seed": seed,
        "data": _data(rows_per_user),
        "problem": {"loss": "least_squares", "reduction": "sum", "intercept": False, "l2": l2},
        "references": references,
        "method": dict(method),
        "evaluate": False,
    }
    return experiment_from(content)


def _data(rows_per_user: int) -> HlmData:
    return HlmData(source="hlm", rows_per_user=rows_per_user, test_per_user=0)


def _measured(seed: int, rows_per_user: int) -> list[Row]:
    data = _data(rows_per_user)
    users = load_users(data, seed, None)
    theta = truth(data, seed, [user.name for user in users])
    gamma = hlm.cross_validated([user.features for user in users], [user.target for user in users], PENALTIES, N_FOLDS)
    baselines = run(baselines_experiment(seed, rows_per_user))
    single = run(tied_experiment(seed, rows_per_user, gamma=gamma, alpha=1.0))
    known = run(tied_experiment(seed, rows_per_user, gamma=1.0, lam=1.0))  # Theorem 5.1 for unit variances
    found: list[tuple[Estimator, Array, float]] = [
        ("local", models_of(baselines, "local"), 0.0),
        ("single_model", models_of(baselines, "global"), 0.0),
        ("single_cluster", models_of(single, "hlm_exact"), gamma),
        ("known_clusters", models_of(known, "hlm_exact"), 1.0),
    ]
    if rows_per_user in SINGLE_COIN_SIZES:
        found.append(("single_coin", models_of(run(single_coin_experiment(seed, rows_per_user)), "async_l2gd"), 1.0))
    return [_row(seed, rows_per_user, estimator, np.linalg.norm(models - theta, axis=1), tie) for estimator, models, tie in found]


def _row(seed: int, rows_per_user: int, estimator: Estimator, distances: Any, gamma: float) -> Row:
    return Row(seed, rows_per_user, estimator, float(distances.mean()), float(distances.std()), float(distances.max()), gamma)


def models_of(result: Result, stage: str) -> Array:
    """The models (n, d) of a stage; RunError where they have stayed with their users."""
    models = result.outcomes[stage].models
    if models is None:
        raise RunError(f"stage {stage!r} has left no models")
    return models


def _fingerprint(seed: int, rows_per_user: int) -> str:
    """What the numbers depend on: the experiments, the cross-validation and the version."""
    tied = tied_experiment(seed, rows_per_user, gamma=1.0, lam=1.0)
    experiments = (baselines_experiment(seed, rows_per_user), tied, single_coin_experiment(seed, rows_per_user))
    return fingerprint_of(*experiments, also=repr((PENALTIES, N_FOLDS, SINGLE_COIN_SIZES)))
