"""The federated runs behind figures 1 and 2 of Armacki, Bajovic, Jakovetic and Kar (2022), seed by seed, and what is measured in them.

Section V's data (N = 60, three clusters; `coterie_client.data.ellipses`). For each seed a run solves (1), (2), the oracle and (3) along a
decreasing path, two more go on with (3) at weaker penalties, and one for each penalty solves (4). Each is a run on the engine with hosts,
messages and a ledger; only the network is missing. Numbers are kept in the output folder, so that the second figure costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie_deploy.engines.api import Result, run
from coterie_deploy.studies.reproduce.files import fingerprint_of, kept_rows
from coterie_server.maths.clusters import partition, same_partition, within_distance


@dataclass(frozen=True)
class Segment:
    """LAMs of (3) on one path, each a start for the next."""

    lams: tuple[float, ...]
    rho: float | None  # of PDMM; the recommended one, .57 here, suits LAM near .1 and needs ten times the rounds at .001
    residual: float


# From where all models are one to where they are nearly those that users have on their own. A cluster is told from a user close to it by
# the last digits only, hence the small residual where clusters are to be counted.
SEGMENTS = (
    Segment((0.2, 0.15, 0.12, 0.11, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.045, 0.04), None, 1e-6),
    Segment((0.035, 0.03, 0.025, 0.02, 0.015, 0.01), 0.2, 3e-5),
    Segment((0.005, 0.002, 0.001), 0.02, 3e-5),
)
LAMS = tuple(lam for segment in SEGMENTS for lam in segment.lams)
# GAM of (4). Its models meet at infinity only, so the grid goes on where that of (3) has ended.
GAMS = (10.0, 3.0, 1.0, 0.5, 0.3, *LAMS)
REFERENCES = ("global", "local", "oracle")
_ROUNDS = 1500


@dataclass(frozen=True)
class Row:
    """One set of models: means over the users of one seed."""

    seed: int
    method: str  # global, local, oracle, squared (4) or sum_of_norms (3)
    penalty: float  # LAM or GAM, 0 where there is none
    lambda_eq3: float  # the lambda of (3) or the gamma of (4): penalty / (2 N)
    accuracy: float  # on the cluster's test rows
    within: float  # mean distance of two models in one known cluster
    clusters: int  # distinct models
    is_exact: bool  # the models are those of the known clusters
    rounds: int


def rows_of_seed(seed: int, folder: Path) -> list[Row]:
    """All rows of a seed, from the folder when they are there. Raises RunError when the folder cannot be written."""
    kept = folder / f"convex-clustering-seed{seed}.json"
    return kept_rows(kept, _fingerprint(seed), Row, lambda: _measured(seed))


def path_experiment(seed: int, segment: Segment) -> Experiment:
    """(3) along a segment, in the first one after (1), (2) and the oracle."""
    method = {"name": "pdmm", "path": segment.lams, "rho": segment.rho, "evaluate_every": 0}
    references = REFERENCES if segment is SEGMENTS[0] else ()
    return _experiment(seed, "sum-of-norms", method, references=references, stop={"residual": segment.residual, "rounds": _ROUNDS})


def squared_experiment(seed: int, penalty: float) -> Experiment:
    """(4) at one GAM."""
    return _experiment(seed, "squared", {"name": "squared", "penalty": penalty})


def _experiment(seed: int, name: str, method: Mapping[str, Any], **more: Any) -> Experiment:
    problem = {"loss": "squared_hinge", "l2": 1e-3}
    content = {"name": f"figures-{name}", "seed": seed, "data": {"source": "ellipses"}, "problem": problem, "method": dict(method)}
    return experiment_from({**content, **more})


def _measured(seed: int) -> list[Row]:
    paths = [run(path_experiment(seed, segment)) for segment in SEGMENTS]
    known = paths[0].outcomes["oracle"].labels
    if known is None:
        raise RunError("the oracle has left no clusters")
    rows = [_row(seed, name, 0.0, paths[0], name, known) for name in REFERENCES]
    for segment, path in zip(SEGMENTS, paths, strict=True):
        rows += [_row(seed, "sum_of_norms", lam, path, f"pdmm-{lam!r}", known) for lam in segment.lams]
    return rows + [_row(seed, "squared", gam, run(squared_experiment(seed, gam)), "squared", known) for gam in GAMS]


def _row(seed: int, method: str, penalty: float, result: Result, stage: str, known: Indices) -> Row:
    models, labels = _models_and_labels(result, stage)
    return Row(
        seed=seed,
        method=method,
        penalty=penalty,
        lambda_eq3=penalty / (2 * len(known)),
        accuracy=result.metrics[stage]["heldout_metric"],
        within=within_distance(models, known),
        clusters=int(labels.max()) + 1,
        is_exact=same_partition(labels, known),
        rounds=len(result.history(stage)),
    )


def _models_and_labels(result: Result, stage: str) -> tuple[Array, Indices]:
    """Models (n, d), and the clusters (n,) that their method has found or, where it looks for none, the equal models."""
    outcome = result.outcomes[stage]
    if outcome.models is None:
        raise RunError(f"stage {stage!r} has left no models")
    return outcome.models, partition(outcome.models) if outcome.labels is None else outcome.labels


def _fingerprint(seed: int) -> str:
    """What the numbers depend on: the experiments and the version."""
    paths = (path_experiment(seed, segment) for segment in SEGMENTS)
    return fingerprint_of(*paths, *(squared_experiment(seed, penalty) for penalty in GAMS))
