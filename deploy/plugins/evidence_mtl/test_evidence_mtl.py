"""The weight that is learnt is that of the data, its fixed point holds, and with a given weight the models are those of `fed_mtl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie import ConfigError
from coterie.plugin import User

HLM: dict[str, Any] = {
    "name": "evidence",
    "data": {"source": "hlm", "clusters": 1, "users_per_cluster": 40, "d": 3, "rows_per_user": 6, "sigma_cluster": 0.0, "sigma_user": 0.5},
    "problem": {"loss": "least_squares", "intercept": False, "reduction": "sum"},
    "method": {"name": "evidence_mtl:METHOD"},
    "stop": {"rounds": 500, "residual": 1e-9},
}


@pytest.mark.parametrize(("spread", "noise"), [(0.5, "one"), (0.25, "one"), (0.5, "learned")])
def test_the_weight_is_that_of_the_data(spread: float, noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lambda = 1 / sigma^2, over beta = 1 / noise^2: the data's own; from other seeds of 400 users it is 0.95 to 1.11 of that."""
    monkeypatch.chdir(Path(__file__).parent)
    sigma = 1.0 if noise == "one" else 2.0
    overrides = [f"data.sigma_user={spread}", f"data.sigma_noise={sigma}", f"method.noise={noise}", "references=[]"]
    result = coterie.run("experiment.yaml", overrides=overrides)
    assert result.metrics["evidence_mtl"]["weight"] == pytest.approx(sigma**2 / spread**2, rel=0.15)


def test_the_fixed_point_holds() -> None:
    """(1), and w_i = argmin f_i + lambda/2 ||w - c||^2, from the rows themselves: c is the mean of the w_i."""
    draws = np.random.default_rng(3)
    rows = {f"u{i}": draws.normal(size=(5, 2)) for i in range(8)}
    targets = {user: a @ (np.array([1.0, -1.0]) + 0.7 * draws.normal(size=2)) + draws.normal(size=5) for user, a in rows.items()}
    found = run_on(rows, targets)
    w, weight = np.array(list(found.models.values())), found.metrics["evidence_mtl"]["weight"]
    c, determined = w.mean(axis=0), 0.0
    for place, user in enumerate(rows):
        hessian = rows[user].T @ rows[user]
        np.testing.assert_allclose(
            w[place], np.linalg.solve(hessian + weight * np.eye(2), rows[user].T @ targets[user] + weight * c), rtol=1e-6
        )
        determined += np.trace(hessian @ np.linalg.inv(hessian + weight * np.eye(2)))
    assert weight == pytest.approx(determined / ((w - c) ** 2).sum(), rel=1e-6)


def run_on(rows: dict[str, Any], targets: dict[str, Any]) -> Any:
    """A run on rows that are at hand."""

    @coterie.user_source
    def users(options: Any, seed: int) -> list[Any]:  # noqa: ARG001
        return [User(name, rows[name], targets[name]) for name in rows]

    globals()["USERS"] = users
    return coterie.run({**HLM, "data": {"source": f"{__name__}:USERS", "test_fraction": 0.0}})


def test_with_a_given_weight_the_models_are_those_of_fed_mtl() -> None:
    found = coterie.run({**HLM, "method": {"name": "evidence_mtl:METHOD", "learns": False, "start": 2.0}}).models
    wanted = coterie.run({**HLM, "method": {"name": "fed_mtl", "mu": 2.0}}).models
    for user, model in wanted.items():
        np.testing.assert_allclose(found[user], model, rtol=1e-6, atol=1e-8)


def test_the_learnt_weight_does_as_well_as_the_best_of_a_grid() -> None:
    errors = {
        mu: coterie.run({**HLM, "method": {"name": "fed_mtl", "mu": mu}}).metrics["fed_mtl"]["heldout_metric"]
        for mu in (0.1, 1.0, 4.0, 16.0, 100.0)
    }
    learnt = coterie.run(HLM).metrics["evidence_mtl"]["heldout_metric"]
    assert learnt < 1.02 * min(errors.values()) < 0.95 * max(errors.values())


def test_means_instead_of_sums_are_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"evidence_mtl weighs .* problem.reduction is 'mean': want sum$"):
        coterie.run({**HLM, "problem": {"loss": "least_squares"}})


def test_both_books_agree_with_the_closed_form() -> None:
    ledger = {(row["step"], row["direction"]): row for row in coterie.run(HLM).ledger() if row["stage"] == "evidence_mtl"}
    for key in (("center", "down"), ("model", "up")):
        assert ledger[key]["vectors"] == ledger[key]["expected"] > 0
        assert ledger[key]["scalars"] == ledger[key]["expected_scalars"] > 0
