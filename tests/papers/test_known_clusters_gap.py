"""How far from the optimum the methods for known clusters end: bounds from gradient and curvature, and when they warn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import Result, run
from coterie.experiment.config import experiment_from
from coterie.experiment.problem import ProblemConfig
from coterie_client.families.known_clusters import gaps
from coterie_client.problems import build_problem


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six users in two clusters with 30 counts each, of 0 to 21."""
    random = np.random.default_rng(0)
    features, user = random.normal(size=(180, 3)), np.repeat(np.arange(6), 30)
    models = random.normal(size=(2, 3)) / 2
    target = random.poisson(np.exp(np.clip((features * models[user % 2]).sum(axis=1) + 0.5, -5, 3.5)))
    path = tmp_path_factory.mktemp("counts") / "counts.npz"
    names, clusters = np.array([f"u{i}" for i in user]), np.array([f"c{i % 2}" for i in user])
    np.savez(path, features=features, target=target.astype(float), user=names, cluster=clusters)
    return path


def ended(path: Path, loss: str, method: str, folder: Path | None = None, **settings: Any) -> Result:
    content = {
        "name": "gap",
        "data": {"source": "npz", "path": str(path), "cluster": "cluster"},
        "problem": {"loss": loss, "l2": 0.01, "intercept": False},
        "method": {"name": method, "gamma": 1.0, "alpha": 0.4, **settings},
    }
    return run(experiment_from(content), transport="loopback", output=folder)


def warnings_of(result: Result) -> list[str]:
    with result._connection() as connection:
        return [text for (text,) in connection.execute("SELECT text FROM events WHERE kind = 'warning'")]


@pytest.fixture(scope="module")
def optimum(counts: Path) -> float:
    """F at the minimiser for least squares."""
    return ended(counts, "least_squares", "async_al2sgd", iterations=8000).metrics["async_al2sgd"]["objective"]


@pytest.mark.parametrize("method", ["async_al2sgd", "async_l2gd"])
@pytest.mark.parametrize("iterations", [20, 300])
def test_for_quadratic_losses_the_gap_is_between_its_bounds(method: str, iterations: int, counts: Path, optimum: float) -> None:
    figures = ended(counts, "least_squares", method, iterations=iterations).metrics[method]
    gap = figures["objective"] - optimum
    assert gap > 1e-3, "or nothing could be told"
    assert figures["gap_at_least"] <= gap * (1 + 1e-6)
    assert gap <= figures["gap_at_most"] * (1 + 1e-6)


@pytest.mark.parametrize("method", ["async_al2sgd", "async_l2gd"])
def test_a_poisson_fit_that_ends_far_from_its_optimum_warns_with_the_part_that_is_left(method: str, counts: Path) -> None:
    result = ended(counts, "poisson", method)
    figures = result.metrics[method]
    assert figures["gap_at_least"] > 0.1 * figures["objective"]
    [warning] = warnings_of(result)
    assert warning.startswith(f"{method} ends away from the optimum: its objective can still fall by ")
    assert "want more than 2000 iterations" in warning
    assert ("smaller eta" in warning) == (method == "async_l2gd"), "whose limit is a ball"


def test_a_stage_that_has_converged_does_not_warn(counts: Path) -> None:
    result = ended(counts, "least_squares", "async_al2sgd")
    figures = result.metrics["async_al2sgd"]
    assert figures["gap_at_most"] < 1e-6 * figures["objective"]
    assert not warnings_of(result)


@pytest.mark.parametrize("method", ["async_al2sgd", "async_l2gd"])
def test_the_gap_is_booked_as_its_closed_form_says(method: str, counts: Path) -> None:
    """A vector down to each of two clusters and on to its host, four numbers up from each cluster and from each of six users."""
    rows = [row for row in ended(counts, "least_squares", method, iterations=20).ledger() if row["step"] == "gap"]
    assert rows
    for row in rows:
        assert row["vectors"] == (row["expected"] or 0.0)
        assert row["expected_scalars"] is None or row["scalars"] == row["expected_scalars"]
    assert sum(row["scalars"] for row in rows if row["direction"] == "up") == 4 * 6


def test_a_user_whose_rows_leave_a_direction_free_has_no_upper_bound() -> None:
    random = np.random.default_rng(1)
    rows = [random.normal(size=(2, 3)), random.normal(size=(9, 3))]
    config = ProblemConfig(loss="least_squares", intercept=False)
    problem = build_problem(config, ["few", "many"], rows, [random.normal(size=2), random.normal(size=9)])
    models, gamma, centre = random.normal(size=(2, 3)), np.array([0.5, 0.5]), np.zeros((2, 3))
    squared, least, most, is_flat = gaps(problem, models, gamma, centre)
    gradient = problem.gradient(models) + 0.5 * models
    hessian = problem.hessian(models)
    np.testing.assert_array_equal(is_flat, [1.0, 0.0])
    np.testing.assert_allclose(squared, (gradient**2).sum(axis=1))
    np.testing.assert_allclose(least, [g @ np.linalg.solve(h + 0.5 * np.eye(3), g) / 2 for g, h in zip(gradient, hessian, strict=True)])
    np.testing.assert_allclose(most, [0.0, gradient[1] @ np.linalg.solve(hessian[1], gradient[1]) / 2])
