"""Figures of users whose models have run away: as large as they are, and no warning of numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import RunError
from coterie.experiment.model import TensorInfo
from coterie.experiment.problem import ProblemConfig
from coterie.families.partial import Scores
from coterie.methods.fedavg import Config
from coterie.wire.precision import Precision
from coterie_client.learning import Rows
from coterie_client.problems import build_problem
from coterie_client.problems.descent import ConvexLearner
from coterie_server.families.averages import mean_of
from coterie_server.families.known_clusters import spread_of
from coterie_server.families.partial import PartialSharing
from coterie_server.interface.half import Members, Replies, Setting

BIG = 1e300


def test_users_far_apart_have_a_spread() -> None:
    values = np.array([3.0, 1.0, BIG, 2.0])
    assert spread_of(values) == {"sd": np.inf, "q1": 1.75, "median": 2.5, "q3": pytest.approx(BIG / 4), "min": 1.0, "max": BIG}


def test_an_infinite_figure_is_in_the_spread_and_makes_no_quartile_nan() -> None:
    values = np.array([3.0, 1.0, np.inf, 2.0])
    assert spread_of(values) == {"sd": np.inf, "q1": 2.0, "median": 3.0, "q3": np.inf, "min": 1.0, "max": np.inf}


def test_a_model_that_has_run_away_is_judged_without_a_warning() -> None:
    rows, target = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]), np.array([1.0, 2.0, 3.0])
    problem = build_problem(ProblemConfig(loss="least_squares", intercept=False), ["u"], [rows], [target])
    loss, metric = ConvexLearner(problem, 0).judge({"x": np.full(2, BIG)}, Rows(rows, target, "u"))
    assert not np.isfinite([loss, metric]).any()


def test_means_of_what_has_run_away_are_infinite_and_nan_is_refused() -> None:
    rows, tensors = np.full(2, 10), (TensorInfo("x", (2,), False, "head"),)
    setting = Setting(
        0, "fedavg", Members(("u0", "u1"), ("", "")), Precision.of("float64", is_convex=True), problem=ProblemConfig(loss="least_squares")
    )
    half = PartialSharing(Config(), setting, tensors, rows, rows, are_personal=False)

    def judged(second: float) -> dict[str, float]:
        metric = np.array([[1.5e308], [second]])
        return half.judged(Replies({Scores: Scores(metric, metric)}, None), np.array([0]))[0]

    assert judged(1.5e308)["heldout_metric"] == np.inf
    assert judged(np.inf)["global_squared_error"] == np.inf
    assert judged(np.inf)["global_squared_error_min"] == 1.5e308
    with pytest.raises(RunError, match="user 'u1' judged its model to be nan, wanted a number: a smaller learning rate may help"):
        judged(np.nan)
    assert mean_of(np.full(2, 1e308), rows) == np.inf
