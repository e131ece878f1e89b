"""Proximal Newton steps for convex clustering: Lee, Sun and Saunders (2014), Algorithm 1, on the sum-of-norms problem.

1. given a starting point x_0
2. repeat
3.   choose H_k, a positive definite approximation to the Hessian
4.   solve the subproblem for a search direction: Delta x_k <- argmin_d grad f(x_k)' d + d' H_k d / 2 + h(x_k + d)
5.   select t_k with a backtracking line search
6.   update: x_{k+1} <- x_k + t_k Delta x_k
7. until stopping conditions are satisfied
"""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.families.consensus import Curvatures, GroupModel, Slopes
from coterie.methods.son_newton import Config
from coterie.wire.precision import Precision
from coterie_client.data import UserData
from coterie_client.data.sources import user_source
from coterie_deploy.engines.api import Result, run
from coterie_server.families import ties
from coterie_server.interface.half import Facts, Members, Outcome, Replies, Setting
from coterie_server.maths import graphs, sieving, ssnal
from coterie_server.maths.clusters import same_partition
from coterie_server.methods import son_newton
from coterie_server.methods.son_newton import SonNewton
from tests.papers.fixture_data import experiment, fixture
from tests.papers.pdmm_federation import finished
from tests.sums_of_norms import groups

SIXTY = [entry["LAM"] for entry in fixture(60)["son"]]


@functools.cache
def solved(lam: float, tolerance: float = 1e-16, hosts: int = 1, hessian: str = "exact") -> Result:
    return run(experiment(60, {"name": "son_newton", "penalty": lam, "tolerance": tolerance, "hessian": hessian}), hosts=hosts)


@pytest.mark.parametrize("entry", fixture(60)["son"], ids=lambda entry: f"LAM{entry['LAM']}")
def test_few_rounds_reach_the_optimum_of_cvxpy_and_its_clusters(entry: dict[str, Any]) -> None:
    result = solved(entry["LAM"])
    outcome = result.outcomes["son_newton"]
    assert len(result.history()) <= 6
    assert outcome.figures["objective"] == pytest.approx(entry["Phi"], rel=1e-11)
    np.testing.assert_allclose(outcome.models, entry["x"], atol=1e-7)
    assert same_partition(outcome.labels, np.array(entry["partition"]))
    assert outcome.figures["duality_gap"] <= 1e-16


@pytest.mark.parametrize("entry", fixture(60)["son"], ids=lambda entry: f"LAM{entry['LAM']}")
def test_gradients_alone_reach_the_same_optimum_in_more_rounds(entry: dict[str, Any]) -> None:
    """Step 3 with approximations. Their gap is an estimate, which after the first rounds is no smaller than what is left."""
    result = solved(entry["LAM"], 1e-12, hessian="bfgs")
    outcome, rounds = result.outcomes["son_newton"], result.history()
    assert 7 < len(rounds) <= 22
    assert outcome.figures["objective"] == pytest.approx(entry["Phi"], rel=1e-11)
    np.testing.assert_allclose(outcome.models, entry["x"], atol=1e-5)
    assert same_partition(outcome.labels, np.array(entry["partition"]))
    for row in rounds[:-2]:
        assert row["duality_gap"] * row["objective"] > 0.1 * (row["objective"] - entry["Phi"])


def test_gradients_alone_send_d_plus_1_numbers_a_round() -> None:
    result = solved(0.09, 1e-12, hessian="bfgs")
    n_asked = 60 * len(result.history())
    lines = {(line["step"], line["direction"]): line for line in result.ledger() if line["stage"] == "son_newton"}
    assert lines["gradient", "up"]["scalars"] == 4 * n_asked
    assert "hessian" not in {step for step, _ in lines}


def test_the_gap_falls_quadratically() -> None:
    gaps = [row["duality_gap"] for row in solved(0.01).history()]
    assert len(gaps) == 6
    assert gaps[4] < 1e-7
    assert gaps[5] < gaps[4] ** 1.5


def test_along_a_path_each_penalty_takes_at_most_three_rounds_but_the_last() -> None:
    path = [0.15, 0.1, 0.09, 0.05, 0.03, 0.02]
    result = run(experiment(60, {"name": "son_newton", "path": path, "tolerance": 1e-8}))
    rounds = [len(result.history(f"son_newton-{lam}")) for lam in path]
    assert max(rounds) <= 3
    for lam in (0.1, 0.05):
        found, wanted = result.outcomes[f"son_newton-{lam}"], solved(lam).outcomes["son_newton"]
        np.testing.assert_allclose(found.models, wanted.models, atol=1e-5)
        assert same_partition(found.labels, wanted.labels)


@user_source
def rows(options: dict[str, Any], seed: int) -> list[UserData]:
    """12 users of three kinds, 9 rows each."""
    random = np.random.default_rng(0)
    made = []
    for place in range(12):
        features = random.normal(size=(9, 2))
        margin = features @ np.array([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])[place % 3] + 0.3 * random.normal(size=9)
        targets = np.sign(margin) if options["labels"] else margin
        made.append(UserData(f"u{place}", "all", features, targets, features, targets))
    return made


def described(loss: str, method: dict[str, Any]) -> Any:
    labels = loss in ("logistic", "squared_hinge")
    data = {"source": "python", "path": "tests.papers.test_son_newton:rows", "options": {"labels": labels}}
    return experiment_from({"name": "kinds", "data": data, "problem": {"loss": loss, "l2": 0.01}, "method": method})


@pytest.mark.parametrize("loss", ["least_squares", "squared_distance"])
def test_one_answer_is_enough_for_a_whole_path_of_quadratics(loss: str) -> None:
    """The quadratic is the function: the first answer gives all solutions, and what users would answer there."""
    path = (0.2, 0.1, 0.05)
    result = run(described(loss, {"name": "son_newton", "path": path}))
    assert [[row["asked"] for row in result.history(f"son_newton-{lam}")] for lam in path] == [[12, 0], [0], [0]]
    moved = [
        line for line in result.ledger() if line["stage"].startswith("son_newton") and line["step"] in ("query", "gradient", "hessian")
    ]
    assert {(line["stage"], line["step"]) for line in moved if line["vectors"] or line["scalars"]} == {
        ("son_newton-0.2", "query"),
        ("son_newton-0.2", "gradient"),
        ("son_newton-0.2", "hessian"),
    }
    for lam in path:
        alone = run(described(loss, {"name": "son_newton", "penalty": lam, "tolerance": 1e-14})).outcomes["son_newton"]
        np.testing.assert_allclose(result.outcomes[f"son_newton-{lam}"].models, alone.models, atol=1e-7)


def test_the_solution_is_that_of_pdmm() -> None:
    stop = {"rounds": 5000, "residual": 1e-12}
    pdmm = {"name": "pdmm", "penalty": 0.05, "start": "zero", "acceleration": "anderson"}
    first = described("least_squares", pdmm)
    slow = run(first.model_copy(update={"stop": first.stop.model_copy(update=stop)})).outcomes["pdmm"]
    quick = run(described("least_squares", {"name": "son_newton", "penalty": 0.05, "tolerance": 1e-18})).outcomes["son_newton"]
    np.testing.assert_allclose(quick.models, slow.models, atol=1e-9)


def test_refits_have_one_model_for_each_found_cluster() -> None:
    result = run(described("least_squares", {"name": "son_newton", "penalty": 0.08, "refit": True}))
    found, refit = result.outcomes["son_newton"], result.outcomes["refit"]
    assert 1 < found.labels.max() + 1 < 12
    assert same_partition(found.labels, refit.labels)
    assert len(np.unique(refit.models, axis=0)) == found.labels.max() + 1


@pytest.mark.parametrize("lam", [0.05])
def test_the_traffic_is_the_closed_form(lam: float) -> None:
    counted = [line for line in solved(lam, hosts=3).ledger() if line["expected"] is not None]
    assert {line["step"] for line in counted if line["stage"] == "son_newton"} >= {"query", "gradient"}
    for line in counted:
        assert line["vectors"] == line["expected"], line


class Line:
    """A federation of two users on the line with f_i(x) = sqrt(1 + (x - a_i)^2): full Newton steps from afar overshoot."""

    def __init__(self) -> None:
        self.asked: list[np.ndarray] = []

    async def exchange(self, message: GroupModel) -> Replies:
        self.asked.append(message.x)
        away = message.x[:, 0] - np.array([3.0, 4.0])
        root = np.sqrt(1 + away**2)
        return Replies({Slopes: Slopes(root, (away / root)[:, None]), Curvatures: Curvatures((1 / root**3)[:, None])}, None)


def test_hosts_hear_from_the_server_while_it_solves_a_large_subproblem(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(0, "son_newton", Members(("u0", "u1"), ("", "")), Precision.of("float64"), Facts(np.ones(2, np.int64), 1))
    half, line, heard, minimise = SonNewton(Config(penalty=0.01), setting), Line(), threading.Event(), sieving.minimise
    alone = finished(half.round(finished(half.init(line)), line, 1))

    def patient(*given: Any, **more: Any) -> ssnal.Minimum:
        assert heard.wait(10), "the event loop stands still"
        return minimise(*given, **more)

    async def watched() -> tuple[son_newton.State, Any]:
        state = await half.init(line)
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, heard.set)
        return await half.round(state, line, 1)

    monkeypatch.setattr(sieving, "minimise", patient)
    monkeypatch.setattr(son_newton, "_QUICK", 1)
    state, figures = asyncio.run(watched())
    np.testing.assert_array_equal(state.target, alone[0].target)
    assert figures == alone[1]


def test_a_step_that_does_not_lower_the_objective_is_shortened() -> None:
    """Step 5: the full step first, then a tenth to a half of it, from the same point."""
    setting = Setting(0, "son_newton", Members(("u0", "u1"), ("", "")), Precision.of("float64"), Facts(np.ones(2, np.int64), 1))
    half, line = SonNewton(Config(penalty=0.01), setting), Line()
    state = finished(half.init(line))
    objectives = []
    for number in range(1, 40):
        state, figures = finished(half.round(state, line, number))
        objectives.append(figures["objective"])
        if figures["converged"]:
            break
    assert figures["converged"]
    shares = (line.asked[2] - line.asked[0]) / (line.asked[1] - line.asked[0])
    assert shares.max() - shares.min() < 1e-12
    assert 0.1 - 1e-12 < shares[0, 0] < 0.5 + 1e-12
    assert (np.diff(objectives) <= 0).all()


def test_a_graph_of_neighbours_is_connected_and_its_weights_have_no_units() -> None:
    points = groups(40, 2, 3) + 100 * (np.arange(40) % 4)[:, None]
    graph, scaled = graphs.nearest(points, 3, 2.0), graphs.nearest(2.0**40 * points, 3, 2.0)
    assert graph.components().max() == 0
    assert graph.m < 40 * 3 + 3
    near = graph.first % 4 == graph.second % 4
    assert (~near).sum() == 3
    np.testing.assert_array_equal(graph.weights, scaled.weights)
    assert graph.weights[near].min() > graph.weights[~near].max() > 0
    squares = np.square(points[graph.first] - points[graph.second]).sum(axis=1)
    np.testing.assert_allclose(graph.weights[near], np.exp(-2 * squares / np.median(squares))[near])


def test_users_with_equal_models_are_tied_with_weight_one() -> None:
    graph = graphs.nearest(np.repeat([[0.0], [1.0]], 5, axis=0), 2, 2.0)
    assert graph.components().max() == 0
    same = graph.first // 5 == graph.second // 5
    np.testing.assert_array_equal(graph.weights[same], 1.0)


def test_pairs_are_users_by_name() -> None:
    members = Members(("u0", "u1", "u2"), ("", "", ""))
    setting = Setting(0, "son_newton", members, Precision.of("float64"), Facts(np.ones(3, np.int64), 1))
    config = Config(penalty=1.0, graph={"pairs": [["u2", "u0", 2.5]]})
    graph = ties.graph_of(config.graph, setting)
    assert (graph.first.tolist(), graph.second.tolist(), graph.weights.tolist()) == ([0], [2], [2.5])
    for pair in (["u0", "u9", 1.0], ["u1", "u1", 1.0]):
        with pytest.raises(ConfigError, match=f"a pair of method.graph is '{pair[0]}' and '{pair[1]}', want two different users"):
            son_newton.build(Config(penalty=1.0, graph={"pairs": [pair]}), setting)


def test_pairs_in_a_file_are_those_of_the_experiment(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    setting = Setting(0, "x", Members(("u0", "u1", "u2"), ("",) * 3), Precision.of("float64"), Facts(np.ones(3, np.int64), 1))
    config = Config(penalty=1.0, graph={"file": str(file)})
    file.write_text("u2,u0,2.5\nu1, u2,1\n", encoding="utf-8")
    found = ties.graph_of(config.graph, setting)
    wanted = ties.graph_of(Config(penalty=1.0, graph={"pairs": [["u0", "u2", 2.5], ["u1", "u2", 1.0]]}).graph, setting)
    for name in ("first", "second", "weights"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    for content, sentence in {
        "": "is empty, want a line for each pair",
        "u0,u1": "line 1 of .* has 2 cells, want two users and a weight",
        "u0,u1,1\nu1,u2,much": "line 2 of .* has no number as weight",
        "u0,u1,-1": "'u0' and 'u1', has the weight -1.0, want a number from 1e-100 to 1e\\+100",
        "u0,u1,1e300": "'u0' and 'u1', has the weight 1e\\+300, want a number from",
        "u0,u1,1\nu1,u0,1": "'u1' and 'u0', is there twice, want each pair once, in either order",
        "u0,u1,1\n\n\nu1,u2,much": "line 4 of .* has no number as weight",
        'u0,"u1': "line 1 of .* has 2 cells",
        "u0,u7,1": "'u0' and 'u7', want two different users",
    }.items():
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=sentence):
            ties.graph_of(config.graph, setting)
    file.write_bytes("u0,u1,1\nu2,\xfc,1".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not a text in UTF-8"):
        ties.graph_of(config.graph, setting)
    file.write_text("u0,u1,1\nu1,u2," + "9" * 200_000, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line [12] of .* has no number as weight"):
        ties.graph_of(config.graph, setting)
    file.write_text("\ufeffu2,u0,2.5\n\nu1,u2,1\n\n", encoding="utf-8")  # as spreadsheets write it
    np.testing.assert_array_equal(ties.graph_of(config.graph, setting).weights, wanted.weights)
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        ties.graph_of(config.graph, setting)


def test_a_graph_of_neighbours_needs_local_models() -> None:
    setting = Setting(0, "x", Members(("u0",), ("",)), Precision.of("float64"), Facts(np.ones(1, np.int64), 1))
    config = Config(penalty=1.0, graph={"neighbours": 2})
    with pytest.raises(ConfigError, match="a graph of neighbours needs local models, but no stage before has any"):
        son_newton.build(config, setting)
    assert son_newton.build(config, replace(setting, start=Outcome(np.zeros((1, 1))))) is not None


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "the penalty is given by nothing, want exactly one of penalty and path"),
        ({"penalty": 1.0, "path": [1.0]}, "the penalty is given by penalty and path, want exactly one of penalty and path"),
        ({"path": [1.0, 2.0]}, r"path is \[1.0, 2.0\], want strictly decreasing penalties"),
    ],
)
def test_the_penalty_is_given_once(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        described("least_squares", {"name": "son_newton", **keys})


def test_clusters_are_those_of_the_models_also_where_the_start_ends_a_stage_or_time_is_up() -> None:
    """Clusters of the next subproblem, or of none, would be those of other models."""
    far = {"penalty": 1e-9, "graph": {"neighbours": 2}, "tolerance": 1e-4}
    for keys, n_rounds, n_clusters in ((far, 300, 60), ({"penalty": 0.01}, 1, 1)):
        found = run(experiment(60, {"name": "son_newton", **keys}, stop={"rounds": n_rounds})).outcomes["son_newton"]
        assert found.labels.max() + 1 == len(np.unique(found.models, axis=0)) == n_clusters
        assert found.figures["clusters"] == n_clusters
