"""What users send for standard errors: the sums by hand, who is asked, and which experiments are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError, ProtocolError
from coterie.experiment.config import experiment_from
from coterie.experiment.problem import ProblemConfig
from coterie.families.inference import Moments
from coterie_client.problems import build_problem
from coterie_server.interface.wanted import Wanted, check_wanted
from coterie_server.run.inference import _has_rows

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "ellipses", "users_per_cluster": 2},
    "problem": {"loss": "logistic", "l2": 0.001},
    "method": {"name": "local"},
    "inference": True,
}


def full(triangle: np.ndarray, d: int) -> np.ndarray:
    found = np.zeros((d, d))
    found[np.triu_indices(d)] = triangle
    return found + np.triu(found, 1).T


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["least_squares", "logistic", "poisson"])
def test_users_send_sums_over_their_rows_whatever_the_reduction_and_without_the_penalty(loss: str, reduction: str) -> None:
    random = np.random.default_rng(3)
    features = [random.normal(size=(m, 2)) for m in (5, 9, 21)]
    targets = [np.sign(rows[:, 0]) if loss == "logistic" else np.arange(len(rows)) % 3.0 for rows in features]
    problem = build_problem(ProblemConfig(loss=loss, l2=0.3, reduction=reduction), ["a", "b", "c"], features, targets)
    x = random.normal(size=(3, 3))
    found = problem.moments(x)
    for i, (rows, y) in enumerate(zip(features, targets, strict=True)):
        a = np.column_stack([rows, -np.ones(len(rows))])
        s = a @ x[i]
        if loss == "least_squares":
            slope, curvature = s - y, np.ones(len(y))
            assert found.residual[i] == pytest.approx(((y - s) ** 2).sum(), rel=1e-12)
        else:
            p = 1 / (1 + np.exp(-s)) if loss == "logistic" else np.exp(s)
            slope, curvature = (p - (y + 1) / 2, p * (1 - p)) if loss == "logistic" else (p - y, p)
            assert np.isnan(found.residual[i])
        np.testing.assert_allclose(full(found.hessian[i], 3), (a * curvature[:, None]).T @ a, rtol=1e-11)
        np.testing.assert_allclose(full(found.outer[i], 3), (a * (slope**2)[:, None]).T @ a, rtol=1e-11)
        np.testing.assert_allclose(found.gradient[i], slope @ a, rtol=1e-11, atol=1e-12)


def test_only_stages_whose_models_have_standard_errors_ask_for_them_and_the_ledger_has_the_closed_form() -> None:
    method = {"name": "pdmm", "penalty": 0.3, "refit": True}
    result = coterie.run({**SMALL, "method": method, "references": ["local"], "stop": {"rounds": 5}})
    assert {stage for stage, outcome in result.outcomes.items() if outcome.moments} == {"local", "global", "refit"}
    booked = [row for row in result.ledger() if row["step"] == "inference"]
    assert {row["stage"] for row in booked} == {"local", "global", "refit"}
    n, d = result.outcomes["local"].models.shape  # type: ignore[union-attr]
    for row in booked:
        assert row["vectors"] == row["expected"] == n
        if row["direction"] == "up":
            assert row["scalars"] == row["expected_scalars"] == n * (d + 1) ** 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": {"name": "fedrep"}, "model": {"name": "mlp", "classes": 2}, "problem": {"loss": "cross_entropy"}}, "networks have no"),
        ({"problem": {"loss": "squared_distance"}}, "the loss squared_distance has no targets"),
        ({"method": {"name": "pdmm", "penalty": 0.1}}, r"a penalty biases its models. Want false, a refit \(pdmm: method.refit\)"),
        ({"method": {"name": "squared", "penalty": 0.1}}, "no stage of method 'squared' has standard errors"),
    ],
)
def test_an_experiment_without_a_theory_of_its_errors_is_refused_when_it_is_loaded(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        experiment_from({**SMALL, **changes})
    assert not experiment_from({**SMALL, **changes, "inference": False}).inference


def test_a_reference_is_enough() -> None:
    assert experiment_from({**SMALL, "method": {"name": "pdmm", "penalty": 0.1}, "references": ["global"]}).inference


def test_numbers_of_rows_and_sums_of_squares_that_cannot_be_are_the_hosts_fault() -> None:
    def told(n_rows: int, residual: float) -> Moments:
        return Moments(np.ones((1, 3)), np.ones((1, 3)), np.ones((1, 2)), np.array([residual]), np.array([n_rows]))

    wanted = [Wanted(Moments, extents={"d": 2, "h": 3}, check=_has_rows)]
    check_wanted([told(4, 0.5)], np.array([7]), wanted)
    check_wanted([told(4, np.nan)], np.array([7]), wanted)
    for n_rows, residual in ((0, 0.5), (4, -1.0)):
        with pytest.raises(ProtocolError, match=f"member 7 has {n_rows} rows"):
            check_wanted([told(n_rows, residual)], np.array([7]), wanted)
    with pytest.raises(ProtocolError, match="axis 'h' is 3, wanted 6"):
        check_wanted([told(4, 0.5)], np.array([7]), [Wanted(Moments, extents={"h": 6})])
