"""x_update: svrg or saga, the x-update (16) from few rows at a time.

Armacki, Bajovic, Jakovetic and Kar (2022), section VI: "it is of interest to study in more detail its computational and communication
costs (complexity), for example in terms of properly defined oracles that determine how the primal variable "argmin" updates are carried
out, e.g., in terms of the number of stochastic gradient descent iterations."
"""

import numpy as np
import pytest

from coterie.draws.streams import stream
from coterie.errors import ConfigError
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems import build_problem
from coterie_client.problems.stochastic import ACCURACY, Rows, Rule, minimise
from tests.integration.test_late import run as run_federation
from tests.papers.pdmm_federation import Data, Run
from tests.simulation import bits, query, small_experiment

RULES = [{"name": "svrg", "batch_size": 4, "epochs": 100}, {"name": "saga", "batch_size": 3, "epochs": 40}]
LOSSES = ["squared_hinge", "logistic", "least_squares", "huber", "poisson"]


def problem_of(loss, m=700, d=4, **config):
    random = np.random.default_rng([m, d])
    features = random.normal(size=(m, d)) / 2
    margins = features @ random.normal(size=d)
    labels = np.where(margins + random.normal(size=m) > 0, 1.0, -1.0)
    targets = {"squared_hinge": labels, "logistic": labels, "poisson": random.poisson(np.exp(margins)).astype(float)}.get(loss, margins)
    return build_problem(
        ProblemConfig(loss=loss, l2=1e-3, **config), ["one", "two"], [features, features[: m // 2]], [targets, targets[: m // 2]]
    )


def draws(epoch):
    return stream(3, "steps", epoch)


@pytest.mark.parametrize("name", ["svrg", "saga"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("how", [{}, {"intercept": False}, {"reduction": "sum"}], ids=str)
def test_the_minimiser_is_that_of_newtons_method_to_the_tolerance(loss, name, how):
    """Started at the last answer, again and again, it comes as near as floating point allows."""
    problem = problem_of(loss, **how)
    ridge, tilt = float(problem.smoothness()[0]), np.linspace(-1, 2, problem.d)[None]
    exact = problem.argmin(tilt, ridge, users=np.array([0]))[0]
    rows, x = Rows(problem, 0), np.zeros(problem.d)

    def slope(x):
        return np.linalg.norm(problem.gradient(x[None], np.array([0]))[0] + ridge * x - tilt[0])

    first = slope(x)
    for repeat in range(8):
        before = slope(x)
        x, excess = minimise(rows, Rule(name, 16, 60), tilt[0], ridge, x, draws)
        assert excess <= 1.0
        if repeat == 0:
            assert slope(x) <= 1.001 * ACCURACY * before
    assert slope(x) < 1e-9 * first
    np.testing.assert_allclose(x, exact, rtol=1e-7, atol=1e-9)


def test_the_scales_of_the_curvature_are_those_of_the_rows():
    problem = problem_of("squared_hinge")
    rows = Rows(problem, 0)
    assert 0.6 * problem.smoothness()[0] < rows.smoothness <= 1.001 * problem.smoothness()[0]
    assert rows.row_smoothness == pytest.approx(problem.row_smoothness()[0], rel=0.02)


def test_too_few_epochs_are_said_and_the_best_snapshot_is_returned():
    problem = problem_of("logistic")
    rows, x = Rows(problem, 0), np.full(problem.d, 5.0)
    best, excess = minimise(rows, Rule("svrg", 1, 1), np.ones(problem.d), 1e-3, x, draws)
    assert excess > 1.0
    found = [np.linalg.norm(problem.gradient(y[None], np.array([0]))[0] + 1e-3 * y - 1) for y in (x, best)]
    assert found[1] <= found[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
def test_the_whole_run_reaches_the_optimum_of_the_fixture(rule):
    run = Run(Data(6), penalty=0.3, x_update=rule)
    n_rounds = run.until(1e-8, 200)
    assert n_rounds < 1.5 * Run(Data(6), penalty=0.3).until(1e-8, 200) + 5
    assert all(figures["unconverged"] == 0 for figures in run.figures)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
@pytest.mark.parametrize("penalty", [0.01, 0.05, 0.09])
def test_sixty_users_reach_the_optimum_of_the_fixture(rule, penalty):
    run = Run(Data(60), penalty=penalty, x_update=rule)
    assert run.until(1e-6, 400) < 1.5 * Run(Data(60), penalty=penalty).until(1e-6, 400)


def test_a_run_whose_users_do_not_converge_says_so_and_hosts_do_not_matter(tmp_path):
    method = {"name": "pdmm", "penalty": 0.3, "start": "zero", "x_update": {"name": "svrg", "batch_size": 2, "epochs": 1}}
    experiment = small_experiment(method, federation={"hosts": 3}, stop={"rounds": 6})
    found = run_federation(experiment, tmp_path / "three", slow=False)
    ((said,),) = query(tmp_path / "three", "SELECT text FROM events WHERE kind = 'warning' AND text LIKE '%tolerance%'")
    assert said.startswith("in ")
    assert "of 6 rounds of stage 'pdmm' the local problem of " in said
    assert query(tmp_path / "three", "SELECT max(value) > 0 FROM figures WHERE name = 'unconverged'") == [(1,)]
    again = run_federation(experiment, tmp_path / "again", slow=False)
    assert bits(again) == bits(found)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"placement": "paper"}, "x_update is svrg in placement paper, want placement: lean"),
        (
            {"sampling": "arrival"},
            "exact answers in placement lean and constants of its own: x_update is svrg",
        ),
        ({"acceleration": "anderson"}, "x_update is svrg, want exact"),
    ],
)
def test_settings_that_need_another_x_update_refuse_it(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        small_experiment({"name": "pdmm", "penalty": 0.3, "x_update": {"name": "svrg"}, **wrong})
