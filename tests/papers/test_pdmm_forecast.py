"""`forecast` of `pdmm`: only users are asked whose answers the server cannot foretell. It is not in Armacki and others (2022).

The symmetric rank-one update is (6.24) of Nocedal and Wright, *Numerical Optimization* (2006); that it finds the Hessian of a quadratic
function in d steps is their theorem 6.1.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError
from coterie_deploy.read import shipped
from coterie_server.methods.pdmm import forecast
from coterie_server.run.plan import check_absence, stages_of
from tests.papers.pdmm_federation import Data, Run

SIXTY = Data(60)
FLOAT = float(np.finfo(float).eps)


def minimisers(a, b, v, q):
    """argmin of x.A x / 2 + b.x + q/2 |x|^2 - v.x for each user."""
    return np.linalg.solve(a + q * np.eye(a.shape[1]), (v - b)[..., None])[..., 0]


def test_a_quadratic_loss_is_known_after_one_answer_more_than_it_has_coefficients_whatever_rho_was() -> None:
    random = np.random.default_rng(1)
    root, b = random.normal(size=(3, 4, 4)), random.normal(size=(3, 4))
    a = root @ root.transpose(0, 2, 1)
    known, everyone = forecast.nothing(3, 4), np.arange(3)
    for number in range(5):
        v, q = random.normal(size=(3, 4)), 1.0 + number
        assert np.isinf(forecast.foretold(known, v, q)[1]).all() == (number < 2)
        known = forecast.learned(known, everyone, v, q, minimisers(a, b, v, q), FLOAT)
    v = random.normal(size=(3, 4))
    assert forecast.foretold(known, v, 0.5)[0] == pytest.approx(minimisers(a, b, v, 0.5), rel=1e-8)
    h = np.einsum("nij,nj,nkj->nik", known.axes, known.values, known.axes)
    assert h == pytest.approx(a, rel=1e-6, abs=1e-8)


def test_what_is_learned_of_a_user_depends_on_its_own_answers_alone_and_rounding_teaches_nothing() -> None:
    random = np.random.default_rng(2)
    v, x = random.normal(size=(2, 3)), random.normal(size=(2, 3))
    known = forecast.learned(forecast.nothing(2, 3), np.array([0, 1]), v, 2.0, x, FLOAT)
    one = forecast.learned(known, np.array([1]), v + 1.0, 2.0, x + 0.1, FLOAT)
    assert one.answers.tolist() == [1, 2]
    assert (one.values[0] == 0.0).all()
    assert one.values[1].max() > 0.0
    moved = x + 1e-17 * np.arange(6).reshape(2, 3) + 1e-16
    same = forecast.learned(known, np.array([0, 1]), v, 2.0, moved, FLOAT)
    assert (same.values == 0.0).all()


def ended_by(residual, data=SIXTY, limit=400, **config):
    """A run that is driven until its residuals are small enough, as the engine does."""
    run = Run(data, n_hosts=3, **config)
    run.method = dataclasses.replace(run.method, setting=dataclasses.replace(run.method.setting, residual=residual))
    while not run.figures or max(run.figures[-1]["primal_residual"], run.figures[-1]["dual_residual"]) > residual:
        assert len(run.figures) < limit
        run.round()
    return run


@pytest.mark.parametrize(
    ("residual", "more"),
    [(1e-7, {"penalty": 0.15}), (1e-5, {"penalty": 0.1, "graph": {"neighbours": 30, "phi": 0}})],
    ids=["all pairs", "graph"],
)
def test_the_limit_is_that_of_whole_rounds_with_a_fifth_of_the_vectors_and_the_last_round_asks_everyone(residual, more) -> None:
    whole, few = (ended_by(residual, **more, **given) for given in ({}, {"forecast": 0.1}))
    assert few.figures[-1]["objective"] == pytest.approx(whole.figures[-1]["objective"], rel=10 * residual)
    assert np.abs(few.state.x - whole.state.x).max() < 1e4 * residual
    asked = [figures["x_blocks"] for figures in few.figures]
    assert asked[-1] == 60
    assert sum(asked) < 60 * len(whole.figures) / 5
    assert [figures["foretold"] for figures in few.figures] == [60 - number for number in asked]
    assert not few.finish().warnings
    for way in ("up", "down"):
        sent = {step: count for (step, direction), count in few.memory.vectors.items() if direction == way}
        assert sent == {step: count for (step, direction), count in few.method.expected_vectors(few.figures).items() if direction == way}
    booked = {key: few.memory.scalars[key] for key in few.method.expected_scalars(few.figures) if key[0] != "balance"}
    assert booked == {key: count for key, count in few.method.expected_scalars(few.figures).items() if key[0] != "balance"}


def test_losses_are_asked_for_where_everyone_is_and_a_stage_that_ends_otherwise_says_what_is_foretold() -> None:
    run = Run(SIXTY, penalty=0.05, forecast=0.1)
    run.rounds(30)
    for figures in run.figures:
        assert ("objective" in figures) == (figures["x_blocks"] == 60) == (figures["told"] == 60)
    n_foretold = int(run.figures[-1]["foretold"])
    assert n_foretold > 0
    (warning,) = run.finish().warnings
    assert warning.startswith(f"the models of {n_foretold} of 60 users are the server's forecasts: ")
    last = dataclasses.replace(run.method, setting=dataclasses.replace(run.method.setting, rounds=31))
    run.method = last
    run.round()
    assert run.figures[-1]["x_blocks"] == 60
    assert not run.finish().warnings


def test_what_is_learned_at_one_penalty_is_kept_for_the_next(tmp_path: Path) -> None:
    sets = ["references=[]", "method.refit=false", "method.penalty=null", "stop.residual=1e-6", "method.forecast=0.1"]
    found = coterie.run("ellipses", overrides=[*sets, "method.path=[0.09, 0.05]"])
    alone = coterie.run("ellipses", overrides=[*sets, "method.path=[0.05]"])
    second, first = found.history("pdmm-0.05"), alone.history(alone.final_stage)
    assert first[0]["x_blocks"] == 60
    assert second[0]["x_blocks"] < 60
    assert sum(row["x_blocks"] for row in second) < sum(row["x_blocks"] for row in first)
    assert second[-1]["objective"] == pytest.approx(first[-1]["objective"], rel=1e-6)


def check(overrides: list[str]) -> None:
    """What is checked of `ellipses` with these overrides before a run."""
    experiment = shipped.load("ellipses", overrides)
    check_absence(experiment, stages_of(experiment))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["method.placement=paper"], "forecast is 0.1, which foretells exact answers of whole rounds: placement is paper, want lean"),
        (["method.sampling=paired", "method.primal_fraction=0.5", "method.order=jacobi"], "sampling is paired, want full; order is jacobi"),
        (["method.x_update=linearized"], "x_update is linearized, want exact"),
        (["method.acceleration=anderson"], "acceleration is anderson, want none"),
        (["stop.objective_gap=1e-3", "stop.reference_objective=1"], "method.forecast is given with stop.objective_gap: the objective is"),
        (["federation.on_loss=skip"], "needs every user: with 'forecast' a stage ends by the answers of all users; want on_loss"),
    ],
)
def test_what_cannot_be_foretold_is_refused(changes: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(["method.order=null", "method.forecast=0.1", "method.refit=false", *changes])
    assert sentence in str(refused.value)
