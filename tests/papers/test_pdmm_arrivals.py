"""sampling: arrival. The limit is that of whole rounds, whoever is slow, and hosts that are not do not wait for it."""

import numpy as np
import pytest

from coterie.errors import RunError
from coterie_server.maths.clusters import overlap
from coterie_server.maths.sum_of_norms import sum_of_norms
from coterie_server.methods.pdmm import pairs
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


def test_the_end_says_how_clear_the_clusters_are():
    points = np.array([[0.0, 0.0], [0.2, 0.0], [0.0, 4.0], [0.2, 4.0]])
    run = Run(Points(points), penalty=0.15, sampling="arrival", delays={})
    run.rounds(400)
    found = run.finish()
    assert found.figures["clusters"] == 2
    assert found.figures["cluster_overlap"] == overlap(found.models, found.labels) < 1e-3


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


PATH_OF_SIX = {"pairs": [(f"u{i}", f"u{i + 1}", 0.5 + i) for i in range(5)]}


@pytest.mark.parametrize("delays", [{}, slow([0]), slow([2, 3], 5)], ids=str)
@pytest.mark.parametrize("graph", [PATH_OF_SIX, {"neighbours": 2}], ids=["pairs", "neighbours"])
def test_on_a_graph_the_limit_is_that_of_son_newtons_solver(graph, delays):
    points = np.random.default_rng(5).normal(size=(6, 2))
    run = Run(Points(points), penalty=0.3, sampling="arrival", delays=delays, graph=graph)
    ties = run.method.layout.graph
    best = sum_of_norms(points, (np.stack([ties.first, ties.second], axis=1), ties.weights), 0.3, tolerance=1e-13)
    while not run.figures or max(run.figures[-1][name] for name in ("primal_residual", "dual_residual")) > 1e-9:
        assert len(run.figures) < 3000, run.figures[-1]
        run.round()
    np.testing.assert_allclose(run.state.x, best.x, atol=1e-6)
    assert run.figures[-1]["objective"] == pytest.approx(best.objective, rel=1e-8)
    outcome = run.finish()
    assert outcome.labels.tolist() == best.clusters.tolist()
    assert len(outcome.ties["first"]) == ties.m


def test_residuals_on_a_graph_are_those_of_its_conditions():
    points, lam = np.random.default_rng(1).normal(size=(6, 2)), 0.3
    run = Run(Points(points), penalty=lam, sampling="arrival", delays=slow([2], 5), graph=PATH_OF_SIX)
    run.rounds(30)
    state, layout = run.state, run.method.layout
    weights, first, second = layout.graph.weights, layout.first, layout.second
    assert np.linalg.norm(state.mu, axis=0).max() <= lam * (1 + 1e-12)
    degrees, pulled = np.zeros(6), np.zeros((6, 2))
    for place, (i, j) in enumerate(zip(first, second, strict=True)):
        degrees[[i, j]] += weights[place]
        pulled[i] += weights[place] * state.mu[:, place]
        pulled[j] -= weights[place] * state.mu[:, place]
    wanted = np.linalg.norm(state.x - points + pulled) / (lam * np.linalg.norm(degrees))
    assert run.figures[-1]["dual_residual"] == pytest.approx(wanted, rel=1e-9)
    gap = (weights * np.square(state.x[first] - state.x[second] - state.z.T).sum(axis=1)).sum()
    wanted = np.sqrt(gap / (degrees * np.square(state.x).sum(axis=1)).sum())
    assert run.figures[-1]["primal_residual"] == pytest.approx(wanted, rel=1e-9)


def test_slow_users_hold_up_their_own_edges_alone():
    """Users 3 to 5 are slow, and the edge from 2 to 3 alone leads to them: edges among users 0 to 2 change in each update."""
    run = Run(Data(6), penalty=0.1, sampling="arrival", delays=slow([3, 4, 5], 8), graph=PATH_OF_SIX)
    for number in range(1, 30):
        run.round()
        assert (run.state.changed[:2] == number).all()
        assert run.figures[-1]["pairs"] == (run.state.changed == number).sum()
    assert run.state.changed[2:].min() < 29
    assert run.finish().figures["greatest_staleness"] > 3


def test_on_a_graph_the_closed_form_counts_what_was_really_encoded():
    run = Run(Data(60), n_hosts=4, penalty=0.09, sampling="arrival", delays=slow([0], 3), graph={"neighbours": 5}, start="zero")
    run.rounds(12)
    run.finish()
    assert dict(run.memory.vectors) == {key: value for key, value in run.half.expected_vectors(run.figures).items() if value}
    scalars = run.half.expected_scalars(run.figures)
    for key in (("ties", "down"), ("evaluate", "up"), ("balance", "down")):
        assert scalars[key] == run.memory.scalars[key], key
    assert scalars["ties", "down"] == 60


def test_a_path_goes_on_on_the_same_graph_and_a_stage_on_no_other():
    data = Data(6)
    first = Run(data, penalty=0.2, sampling="arrival", delays={}, stage="one", graph=PATH_OF_SIX)
    first.rounds(60)
    carried = first.finish()
    keys = {"penalty": 0.15, "sampling": "arrival", "delays": {}, "stage": "two"}
    warm = Run(data, **keys, start=carried, memory=first.memory, graph=PATH_OF_SIX)
    np.testing.assert_array_equal(warm.state.mu, first.state.mu)
    cold = Run(data, **keys, graph=PATH_OF_SIX)
    for run in (warm, cold):
        run.rounds(6)
    assert warm.figures[-1]["dual_residual"] < cold.figures[-1]["dual_residual"]
    with pytest.raises(RunError, match=r"the pairs or weights of method.graph are others than those that the run began with"):
        Run(data, **keys, start=carried, memory=first.memory, graph={"pairs": PATH_OF_SIX["pairs"][:-1]})


def test_all_pairs_with_weight_one_have_the_steps_of_the_complete_graph():
    graph = {"pairs": [(f"u{i}", f"u{j}", 1.0) for i in range(6) for j in range(i + 1, 6)]}
    one, other = (Run(Data(6), penalty=0.3, sampling="arrival", delays=slow([1], 4), **keys) for keys in ({}, {"graph": graph}))
    for run in (one, other):
        run.rounds(25)
    np.testing.assert_allclose(other.state.x, one.state.x, atol=1e-9)
    np.testing.assert_allclose(pairs.sums(other.method.layout, other.state.mu), pairs.sums(one.method.layout, one.state.mu), atol=1e-9)


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
