"""What the shipped experiments `hsb-newton` and `growth-newton` find, beside `pdmm` on the same schools and the children's schools."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from coterie_deploy.engines.api import Result, run

SCHOOLS = [0.07, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.007]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@functools.cache
def finished(name: str) -> Result:
    return run(name)


def test_a_school_answers_once_for_the_whole_path_where_pdmm_takes_over_a_hundred_rounds() -> None:
    ours, theirs = finished("hsb-newton"), finished("hsb")
    assert [len(ours.history(f"son_newton-{lam}")) for lam in SCHOOLS] == [2, 1, 1, 1, 1, 1, 1, 1]
    assert sum(row["asked"] for lam in SCHOOLS for row in ours.history(f"son_newton-{lam}")) == 160
    assert sum(len(theirs.history(f"pdmm-{lam}")) for lam in SCHOOLS) > 100


def test_each_solution_is_at_least_as_good_as_that_of_pdmm_and_its_gap_proves_it() -> None:
    ours, theirs = finished("hsb-newton"), finished("hsb")
    for lam in SCHOOLS:
        found, other = ours.outcomes[f"son_newton-{lam}"].figures, theirs.outcomes[f"pdmm-{lam}"].figures
        assert found["duality_gap"] <= 1e-10
        assert found["objective"] * (1 - 1e-10) <= other["objective"] <= found["objective"] * (1 + 2e-3)
    assert ours.final_stage == "son_newton-0.015"
    assert theirs.final_stage == "pdmm-0.015"
    judged, other = (each.metrics[each.final_stage]["heldout_metric"] for each in (ours, theirs))
    assert judged == pytest.approx(37.77, abs=0.01)
    assert judged == pytest.approx(other, rel=1e-3)


def test_no_two_schools_share_a_model_at_the_best_penalty_though_pdmm_within_its_tolerance_says_so() -> None:
    outcome = finished("hsb-newton").outcomes["son_newton-0.015"]
    assert len(np.unique(outcome.labels)) == 160
    assert pdist(outcome.models).min() > 1e-4
    assert len(np.unique(finished("hsb").outcomes["pdmm-0.015"].labels)) < 150


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_children_tied_to_those_with_near_lines_are_predicted_better_than_alone_or_by_their_schools(seed: int) -> None:
    overrides = [f"seed={seed}"]
    figures = run("growth-newton", overrides=overrides)
    found = figures.metrics[figures.final_stage]["heldout_metric"]
    assert figures.final_stage in ("son_newton-0.7", "son_newton-0.5", "son_newton-0.4")
    assert found < 0.85 * min(figures.metrics[each]["heldout_metric"] for each in ("local", "global"))
    assert found < 0.99 * run("growth", overrides=overrides).metrics["hlm_exact"]["heldout_metric"]
    assert 200 < figures.outcomes[figures.final_stage].labels.max() + 1 < 600
    assert [len(figures.history(f"son_newton-{lam}")) for lam in (5.0, 3.0, 2.0, 1.0, 0.7, 0.5, 0.4, 0.3)] == [2, 1, 1, 1, 1, 1, 1, 1]
