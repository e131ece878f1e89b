"""sampling: arrival. The limit is that of whole rounds, whoever is slow, and hosts that are not do not wait for it."""

import numpy as np
import pytest

from tests.papers.pdmm_federation import Data, Points, Run


def slow(users, delay=20):
    return {f"u{i}": delay for i in users}


@pytest.mark.parametrize("delays", [{}, slow([0]), {**slow([1], 7), **slow([4], 3)}], ids=str)
def test_the_limit_is_the_optimum_whoever_is_slow(delays):
    run = Run(Data(6), penalty=0.05, sampling="arrival", delays=delays)
    run.until(1e-8, 1000)
    last = run.figures[-1]
    assert max(last["primal_residual"], last["dual_residual"]) < 1e-3
    assert last["rho"] < run.method.steps.rho, "it is balanced, as with whole rounds"


def test_without_delays_everyone_answers_in_each_update():
    run = Run(Data(6), penalty=0.1, sampling="arrival", delays={})
    run.rounds(5)
    assert [(row["x_blocks"], row["pairs"], row["staleness"]) for row in run.figures] == [(6, 15, 0)] * 5


def test_a_pair_is_updated_once_both_users_have_answered_its_latest_value():
    """User 0 takes 1 to 3 updates, and a pair of it changes in those in which it answers; the other pairs change in each."""
    run = Run(Data(6), penalty=0.1, sampling="arrival", delays=slow([0], 2), seed=3)
    run.rounds(40)
    found = {(row["x_blocks"], row["pairs"]) for row in run.figures}
    assert found == {(6, 15), (5, 10)}
    ages = [row["staleness"] for row in run.figures if row["x_blocks"] == 6]
    assert set(ages) == {0, 1, 2}
    assert run.finish().figures["greatest_staleness"] == 2


def test_residuals_are_those_of_the_optimality_conditions():
    """Of f_i = |x - a_i|^2 / 2 the gradient is known, and the mu of the state are within LAM."""
    points, lam = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0], [4.0, 4.0]]), 0.3
    run = Run(Points(points), penalty=lam, sampling="arrival", delays=slow([2], 5))
    run.rounds(30)
    state, i, j = run.state, *np.triu_indices(4, 1)
    assert np.linalg.norm(state.mu, axis=0).max() <= lam * (1 + 1e-12)
    pulled = np.zeros((4, 2))
    np.add.at(pulled, i, state.mu.T)
    np.subtract.at(pulled, j, state.mu.T)
    wanted = np.linalg.norm(state.x - points + pulled) / (lam * 3 * np.sqrt(4))
    assert run.figures[-1]["dual_residual"] == pytest.approx(wanted, rel=1e-9)
    gap = np.linalg.norm(state.x[i] - state.x[j] - state.z.T) / (2 * np.linalg.norm(state.x))
    assert run.figures[-1]["primal_residual"] == pytest.approx(gap, rel=1e-9)


def test_a_path_goes_on_from_the_pairs_of_the_stage_before():
    data = Data(6)
    first = Run(data, penalty=0.2, sampling="arrival", delays={}, stage="one")
    first.rounds(60)
    carried = first.finish()
    warm = Run(data, penalty=0.15, sampling="arrival", delays={}, start=carried, memory=first.memory, stage="two")
    cold = Run(data, penalty=0.15, sampling="arrival", delays={}, stage="two")
    for run in (warm, cold):
        run.rounds(6)
    assert warm.figures[-1]["dual_residual"] < cold.figures[-1]["dual_residual"]


@pytest.mark.slow
@pytest.mark.parametrize(("penalty", "is_faster"), [(0.01, False), (0.05, True), (0.09, True), (0.15, False)])
def test_sixty_users_of_whom_six_are_twenty_times_slower_reach_the_optimum(penalty, is_faster):
    """The clock counts the tasks of fast users: whole rounds would take 20 of it each."""
    data = Data(60)
    run = Run(data, penalty=penalty, sampling="arrival", delays=slow(range(6)), evaluate_every=10)
    run.until(1e-6, 3000)
    clock = 10 * (1 + np.argmax(run.gaps() <= 1e-4))
    whole = 20 * Run(data, penalty=penalty).until(1e-4, 400)
    assert (clock < 0.8 * whole) == is_faster, (clock, whole)
