"""Problems (1), (2), (4) and the oracle of Armacki, Bajovic, Jakovetic and Kar (2022), solved by a federation: against CVXPY's optima."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from coterie.experiment.problem import ProblemConfig
from coterie.families.consensus import Curvatures, GroupModel, Slopes
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_client.families.consensus import CLIENT
from coterie_client.interface.half import Inbox, Local
from coterie_client.problems import build_problem
from coterie_deploy.engines.api import Result, run
from coterie_server.maths.clusters import within_distance
from tests.papers.fixture_data import experiment, fixture

SIZES = (6, 60)
SQUARED = [(n_users, place) for n_users in SIZES for place in range(len(fixture(n_users)["sq"]))]
REFERENCES = ("global", "local", "oracle")


@functools.cache
def solved(n_users: int, hosts: int, place: int = 0) -> Result:
    """The references, then (4) with the fixture's GAM number `place`."""
    method = {"name": "squared", "penalty": fixture(n_users)["sq"][place]["GAM"]}
    return run(experiment(n_users, method, references=REFERENCES), hosts=hosts)


def models(result: Result, stage: str) -> np.ndarray:
    found = result.outcomes[stage].models
    assert found is not None
    return found


@pytest.mark.parametrize("n_users", SIZES)
@pytest.mark.parametrize("name", REFERENCES)
def test_references_reach_the_optimum(name, n_users):
    result, wanted = solved(n_users, 1), fixture(n_users)[name]
    assert result.metrics[name]["sum_of_losses"] == pytest.approx(wanted["sum_f"], rel=1e-6)


@pytest.mark.parametrize(("n_users", "place"), SQUARED)
def test_the_squared_penalty_reaches_the_optimum_of_4(n_users, place):
    wanted = fixture(n_users)["sq"][place]
    result = solved(n_users, 1, place)
    x = models(result, "squared")
    phi = result.metrics["squared"]["sum_of_losses"] + wanted["GAM"] * np.square(pdist(x)).sum()
    assert phi == pytest.approx(n_users * wanted["cvxpy4"], rel=1e-6)
    assert result.outcomes["squared"].figures["objective"] == pytest.approx(phi, rel=1e-9)
    np.testing.assert_allclose(x, wanted["x"], atol=1e-8)
    assert within_distance(x, np.array(fixture(n_users)["label"])) == pytest.approx(wanted["within"], rel=1e-6)


@pytest.mark.parametrize("n_users", SIZES)
def test_gamma_of_4_is_gam_over_2n(n_users):
    by_gamma = run(experiment(n_users, {"name": "squared", "gamma_eq4": fixture(n_users)["sq"][0]["gam4"]}))
    np.testing.assert_allclose(models(by_gamma, "squared"), models(solved(n_users, 1), "squared"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n_users", SIZES)
def test_the_reference_models_are_those_of_cvxpy(n_users):
    content, result = fixture(n_users), solved(n_users, 1)
    np.testing.assert_allclose(models(result, "global"), np.tile(content["global"]["x"], (n_users, 1)), atol=1e-8)
    assert (models(result, "global") == models(result, "global")[0]).all()
    np.testing.assert_allclose(models(result, "oracle"), np.array(content["oracle"]["w"])[content["label"]], atol=1e-8)
    np.testing.assert_allclose(models(result, "local"), content["local"]["x"], atol=1e-7)


@pytest.mark.parametrize(("n_users", "place"), SQUARED)
def test_one_host_and_three_give_the_same_bits(n_users, place):
    one, three = solved(n_users, 1, place), solved(n_users, 3, place)
    for name in (*REFERENCES, "squared"):
        assert models(one, name).tobytes() == models(three, name).tobytes(), name
        assert one.metrics[name] == three.metrics[name]


@pytest.mark.parametrize("n_users", SIZES)
def test_the_traffic_is_the_closed_form(n_users):
    counted = [line for line in solved(n_users, 3).ledger() if line["expected"] is not None]
    assert {(line["stage"], line["step"]) for line in counted} >= {("squared", "query"), ("squared", "model"), ("global", "gradient")}
    for line in counted:
        assert line["vectors"] == line["expected"], line


@pytest.mark.parametrize("loss", ["logistic", "squared_hinge", "huber"])
@pytest.mark.parametrize("ridge", [None, 0.3, 5.0])
def test_the_hessian_of_a_users_term_is_the_slope_of_its_gradient(ridge: float | None, loss: str) -> None:
    """By central differences; `ridge` q gives the Moreau envelope, whose Hessian is q (I - q (H + q I)^-1)."""
    random = np.random.default_rng(4)
    rows, targets = random.normal(size=(2, 12, 3)), np.sign(random.normal(size=(2, 12)))
    problem = build_problem(ProblemConfig(loss=loss, l2=0.1), ["u0", "u1"], list(rows), list(targets))
    local = Local(0, ("u0", "u1"), np.arange(2), 2, Precision.of("float64"), (), problem)
    state = CLIENT.init({"ridge": ridge, "with_hessians": True}, local, None)

    def answer(x: np.ndarray) -> dict[type[Message], Message]:
        return {type(m): m for m in CLIENT.step(state, Inbox("", 1, {GroupModel: GroupModel(x)}), local)[1]}

    point, step = random.normal(size=(2, problem.d)), 1e-5
    curvatures = answer(point)[Curvatures]
    assert isinstance(curvatures, Curvatures)
    rows_of, columns = np.triu_indices(problem.d)
    found = np.zeros((2, problem.d, problem.d))
    found[:, rows_of, columns] = found[:, columns, rows_of] = curvatures.triangle
    for k, direction in enumerate(np.eye(problem.d)):
        ahead, behind = (answer(point + sign * step * direction)[Slopes] for sign in (1, -1))
        assert isinstance(ahead, Slopes)
        assert isinstance(behind, Slopes)
        np.testing.assert_allclose((ahead.gradient - behind.gradient) / (2 * step), found[:, k], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(
            (ahead.value - behind.value) / (2 * step), (ahead.gradient + behind.gradient)[:, k] / 2, rtol=1e-5, atol=1e-7
        )
