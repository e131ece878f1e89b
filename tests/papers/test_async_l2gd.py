"""Algorithm 1 of Lyu, Hanzely and Kolar (2022): what each test checks is quoted from the paper, or from its corrected form.

The corrections are named in `coterie.families.known_clusters`; "fixture" is as in `known_clusters_fixture`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.wire.messages import Rows
from coterie_server.methods.async_l2gd.walk import SHARED
from coterie_server.record import summary
from tests.papers.known_clusters_fixture import KINDS, Tiers, experiment, fixture, made_experiment, optimum, run, run_apart
from tests.simulation import World, bits, query, random_faults
from tests.slow import slow_after

L2GD = {"name": "async_l2gd"}
EVEN = {"gamma": 1.0, "alpha": 0.4}  # bar_j and bar may be used again
UNEQUAL = {"gamma": 1.0, "alpha": {"c0": 0.3, "c1": 0.5, "c2": 0.6}}  # bar_j alone
MIXED = {"gamma": {"c0": 1.0, "c1": 0.5, "u8": 1.0, "u9": 2.0, "u10": 1.0, "u11": 1.0}, "lam": 1.0}  # bar_j of the first two clusters
LEVEL = {"gamma": {f"u{i}": 1 - 0.5 * (i == 9) for i in range(12)}, "alpha": 0.4}  # the same, though alpha_j max gamma_i is the same in all
UNEVEN = {"gamma": {f"u{i}": 1 + 0.1 * i for i in range(12)}, "lam": 1.0}  # nothing
WEIGHTS: Mapping[str, dict[str, Any]] = {"even": EVEN, "unequal": UNEQUAL, "mixed": MIXED, "level": LEVEL, "uneven": UNEVEN}
Matrix = np.ndarray[Any, Any]
SPREADS = [[range(12)], [[0, 3, 4, 9], [1, 2, 5, 6, 7, 8, 10, 11]], [[11, 0], [5, 1, 2, 3, 4], [10, 6, 7, 8, 9]]]


# ---- the fixtures


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_coins_give_the_recorded_iterates(kind: str) -> None:
    """Algorithm 1, lines 2 to 19, from theta = 0."""
    trace = fixture(kind)["alg1"]
    method = {**L2GD, "iterations": 20, "coins": trace["coins"]}
    found = run(experiment(kind, {**method, "round_iterations": 1}), watch=["theta"])
    assert sorted(found.states) == list(range(1, 21))
    for iteration, state in found.states.items():
        np.testing.assert_allclose(state["theta"], trace["theta"][iteration], atol=1e-12)
    spread = run(experiment(kind, method), [[0, 3], [5, 1], [2, 4]])
    np.testing.assert_allclose(spread.models, trace["theta"][20], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_separate_aggregators_over_grpc_give_the_recorded_iterates(kind: str) -> None:
    """The same, with a process for each aggregator."""
    trace = fixture(kind)["alg1"]
    method = {**L2GD, "iterations": 20, "coins": trace["coins"]}
    np.testing.assert_allclose(run_apart(experiment(kind, method)), trace["theta"][20], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_not_given_are_those_of_corollary_3_6(kind: str) -> None:
    """ "eta = 1/(2 calL), p0 = 2 C1/(C1+C2+L), p_j = (C2-C1)/(C2-C1+L)" for C2 > C1, tau by Proposition 3.3."""
    trace, tiers = fixture(kind)["alg1"], Tiers(experiment(kind, {**L2GD, "iterations": 1}))
    tiers.run()
    found = tiers.users[0].state.parameters
    for name, wanted in (("p0", trace["p0"]), ("p", trace["pj"]), ("tau", trace["tau"]), ("eta", trace["eta"])):
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-12)
    np.testing.assert_allclose(found.alpha, fixture(kind)["alpha"], rtol=1e-12)


def test_parameters_that_are_given_are_taken() -> None:
    given = {"p0": 0.3, "p": {"c0": 0.1, "c1": 0.2, "c2": 0.25}, "tau": 0.5, "eta": 0.01}
    tiers = Tiers(made_experiment({**L2GD, **EVEN, "iterations": 1, **given}))
    tiers.run()
    found = tiers.users[0].state.parameters
    np.testing.assert_array_equal(found.p, [0.1, 0.2, 0.25])
    assert set(found.p0) == {0.3}
    assert set(found.tau) == {0.5}
    assert set(found.eta) == {0.01}


def test_without_a_stronger_pull_to_the_clusters_there_are_no_rounds_inside_them() -> None:
    """ "When C2 <= C1, p0 = 2 C1/(2 C1 + L), and p_j = 0"."""
    tiers = Tiers(made_experiment({**L2GD, "gamma": 1.0, "alpha": 0.8, "iterations": 50}))
    figures, smoothness = tiers.run().figures, tiers.everyone.local.problem.smoothness().max()
    assert figures["p0"] == pytest.approx(1.6 / (1.6 + smoothness))
    assert figures["within_rounds"] == figures["within_rounds_expected"] == 0
    assert set(tiers.users[0].state.parameters.tau) == {1.0}


def smoothest(asked: Experiment) -> float:
    """L."""
    return float(Tiers(asked).everyone.local.problem.smoothness().max())


@pytest.mark.parametrize("alpha", [0.1, 0.8])
def test_the_single_coin_is_tossed_for_both_averages(alpha: float) -> None:
    """With p_j = 0 and tau_j = 1, (3.3) is max{2 C1/p, 2 C2/p, L/(1-p)}, smallest for p = 2C/(2C + L) with C = max{C1, C2}."""
    asked = made_experiment({**L2GD, "variant": "single_coin", "gamma": 2.0, "alpha": alpha, "iterations": 1})
    largest, smoothness = 2 * max(alpha, 1 - alpha), smoothest(asked)
    figures = run(asked).figures
    assert figures["p0"] == pytest.approx(2 * largest / (2 * largest + smoothness))
    assert figures["eta"] == pytest.approx(1 / (2 * (2 * largest + smoothness)))


@pytest.mark.parametrize(("p0", "p", "tau"), slow_after(1, [(0.01, 0.5, 1.0), (0.2, 0.05, 0.0), (0.2, 0.3, 0.6)]))
def test_the_step_is_right_for_a_tau_that_is_given_too(p0: float, p: float, tau: float) -> None:
    """The proof of Proposition 3.3 weighs psi_j with 2 tau_j^2/p0 + (1-tau_j)^2/((1-p0)p_j); (3.3) is that with the best tau_j."""
    asked = made_experiment({**L2GD, "gamma": 1.0, "alpha": 0.01, "p0": p0, "p": p, "tau": tau, "iterations": 3000})
    terms = [2 * 0.01 / p0, 0.99 * (2 * tau**2 / p0 + (1 - tau) ** 2 / ((1 - p0) * p)), smoothest(asked) / ((1 - p0) * (1 - p))]
    found = run(asked)
    assert found.figures["eta"] == pytest.approx(1 / (2 * max(terms)))
    assert np.abs(found.models).max() < 10  # in the ball, which a step by (3.3) with tau 1 leaves for 1e6


@pytest.mark.parametrize("kind", KINDS)
def test_the_objective_is_2_1_with_both_sums_in_bar(kind: str) -> None:
    """F at the fixture's probe, where bar weighs users, not clusters."""
    probe = fixture(kind)["probe"]
    tiers = Tiers(experiment(kind, {**L2GD, "iterations": 1, "eta": 1e-300}), start={"theta": np.array(probe["theta"])})
    assert tiers.run().figures["objective"] == pytest.approx(probe["F"], rel=1e-12)


# ---- the oracle


def oracle(kind: str, xi_0: int, xi: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """G (6, 2) at the fixture's probe for these coins: what an iteration subtracts, over eta."""
    theta = np.array(fixture(kind)["probe"]["theta"])
    eta = fixture(kind)["alg1"]["eta"]
    tiers = Tiers(experiment(kind, {**L2GD, "iterations": 1, "coins": [[xi_0, list(xi)]]}), start={"theta": theta})
    tiers.run()
    return (theta - tiers.array("theta")) / eta


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_is_unbiased_over_all_coins(kind: str) -> None:
    """ "G_i(theta_i) is an unbiased estimator of grad_i F(theta) for all i": E G = grad F."""
    content = fixture(kind)
    p0, pj = content["alg1"]["p0"], content["alg1"]["pj"]
    mean = p0 * oracle(kind, 1, (0, 0, 0))
    for xi in itertools.product((0, 1), repeat=3):
        mean += (1 - p0) * np.prod([p if flip else 1 - p for p, flip in zip(pj, xi, strict=True)]) * oracle(kind, 0, xi)
    np.testing.assert_allclose(mean, content["probe"]["grad"], atol=1e-12)
    for name, xi in (("G_xi0_0_all1", (1, 1, 1)), ("G_xi0_0_all0", (0, 0, 0))):
        np.testing.assert_allclose(oracle(kind, 0, xi), content["probe"][name], atol=1e-12)
    np.testing.assert_allclose(oracle(kind, 1, (1, 0, 1)), content["probe"]["G_xi0_1"], atol=1e-12)


def tail_error(eta: float, iterations: int) -> float:
    """Mean squared distance to the optimum at the coordinator's rounds after the first tenth of the iterations."""
    method = {**L2GD, **UNEQUAL, "variant": "single_coin", "p0": 0.1, "iterations": iterations, "eta": eta}
    asked = made_experiment(method)
    found, everyone = run(asked, watch=["theta"]), Tiers(asked).everyone.local
    best = optimum(everyone.problem, np.ones(12), list(UNEQUAL["alpha"].values()), everyone.clusters)
    return float(np.mean([((state["theta"] - best) ** 2).sum() for at, state in found.states.items() if at >= iterations // 10]))


@pytest.mark.slow
def test_the_error_that_stays_is_proportional_to_eta() -> None:
    """Theorem 3.5: "E|theta^t - opt|^2 <= (1 - eta mu)^t |theta^0 - opt|^2 + 2 eta sigma^2/mu"."""
    assert tail_error(0.02, 20_000) / tail_error(0.005, 40_000) == pytest.approx(4, rel=0.2)


# ---- communication


@pytest.mark.parametrize("variant", [{}, {"variant": "single_coin", "p": None}], ids=["two_coins", "single_coin"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_average_that_is_used_again_is_the_one_that_would_be_sent(weights: str, variant: dict[str, Any]) -> None:
    """After a global round bar_j has moved by -(eta gamma alpha_j/p0)(bar_j - bar); within a cluster it stays."""
    method = {**L2GD, **WEIGHTS[weights], "p0": 0.4, "p": 0.5, "iterations": 200, "round_iterations": 7, **variant}
    reused, sent = run(made_experiment(method)), run(made_experiment({**method, "reuse": "never"}))
    np.testing.assert_allclose(reused.models, sent.models, atol=1e-12)
    fewer = (reused.figures["between_rounds"] < sent.figures["between_rounds"]) == (weights == "even")
    assert fewer, "bar is used again where alpha_j gamma is the same in all clusters"
    if not variant:
        assert (reused.figures["within_rounds"] < sent.figures["within_rounds"]) == (weights != "uneven")


def within_three_deviations(found: float, wanted: float, n: float) -> bool:
    """For a count of about `wanted` of n events; neighbouring rounds hinder each other, so that a binomial's deviation is the larger."""
    return abs(found - wanted) <= 3 * (wanted * (1 - wanted / n)) ** 0.5


def check_counts(method: Mapping[str, Any], p0: float, p: tuple[float, ...], *, bar_j: bool, bar: bool) -> None:
    found = run(made_experiment(method, d=1, rows=1))
    n = method["iterations"]
    needless = p0 / (1 - (1 - p0) * float(np.prod(p))) if bar else 0.0
    each = [(1 - p0) ** 2 * pj * (1 - pj) if bar_j else (1 - p0) * pj for pj in p]
    figures = found.figures
    assert figures["between_rounds_expected"] == pytest.approx(p0 * (1 - needless) * n)
    assert figures["within_rounds_expected"] == pytest.approx(sum(each) * n)
    assert within_three_deviations(figures["between_rounds"], p0 * (1 - needless) * n, n)
    assert within_three_deviations(figures["within_rounds"], sum(each) * n, n * len(p))
    found.finished.database.flush()
    up = {(row.step, row.direction): row for row in summary.traffic(found.finished.database.connection)}["within-average", "up"]
    assert up.expected is not None
    assert up.vectors == pytest.approx(up.expected, rel=0.1)


COUNTS = [("even", True, True), ("unequal", True, False), ("uneven", False, False)]


@pytest.mark.parametrize(("weights", "bar_j", "bar"), COUNTS)
def test_rounds_are_as_many_as_are_needed(weights: str, bar_j: bool, bar: bool) -> None:
    """p0 (1 - p0/(1-(1-p0)P)) T and (1-p0)^2 p_j (1-p_j) T where averages hold; p0 T and (1-p0) p_j T otherwise."""
    p = {"c0": 0.2, "c1": 0.5, "c2": 0.4}
    method = {**L2GD, **WEIGHTS[weights], "iterations": 1000, "p0": 0.3, "p": p}
    check_counts(method, 0.3, (0.2, 0.5, 0.4), bar_j=bar_j, bar=bar)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "bar_j", "bar"), COUNTS)
def test_rounds_are_as_many_as_are_needed_in_20_000_iterations(weights: str, bar_j: bool, bar: bool) -> None:
    """The same."""
    p = (0.6, 0.9, 0.85) if bar else (0.05, 0.1, 0.2)
    by_name = {f"c{place}": pj for place, pj in enumerate(p)}
    method = {**L2GD, **WEIGHTS[weights], "iterations": 20_000, "p0": 0.2, "p": by_name}
    check_counts(method, 0.2, p, bar_j=bar_j, bar=bar)


def test_a_run_of_local_steps_is_one_instruction() -> None:
    """ "A communication is needed when averaging follows a local step": with one coin, two messages down for each global round."""
    found = run(made_experiment({**L2GD, **UNEVEN, "variant": "single_coin", "iterations": 900, "p0": 0.01}))
    found.finished.database.flush()
    sql = "SELECT count(*) FROM ledger WHERE kind = 'async_l2gd.Steps' AND direction = 'down'"
    n_instructions = found.finished.database.connection.execute(sql).fetchone()[0]
    assert found.figures["between_rounds"] > 3
    assert n_instructions == found.figures["between_rounds"] + 1


def test_between_the_clusters_only_pairs_and_averages_travel() -> None:
    """An aggregator forwards the pair (alpha_j sum gamma_i theta_i, alpha_j Gamma_j), never a user's vector."""
    method = {**L2GD, **UNEQUAL, "iterations": 200, "p0": 0.1, "p": 0.3, "collect_models": False}
    tiers = Tiers(made_experiment(method), two_tier=True)
    outcome = tiers.run()
    assert outcome.models is None
    sent = tiers.federation.sent
    rows = [message for message in sent if isinstance(message, Rows)]
    assert {type(message).__name__ for message in rows} == {"Judgement"}
    assert not any(spec.counts_vectors for message in rows for _, spec in message.specs)
    vectors: dict[str, int] = {}
    for message in sent:
        for name, spec in message.specs:
            vectors[type(message).__name__] = vectors.get(type(message).__name__, 0) + spec.count(getattr(message, name).shape)[0]
    n_rounds = outcome.figures["between_rounds"]
    assert vectors["ClusterSums"] == vectors["GlobalAverage"] == 3 * n_rounds > 0


# ---- bits


@pytest.mark.parametrize("payload", ["float64", "float32"])
@pytest.mark.parametrize("weights", ["even", "mixed"])
def test_neither_hosts_nor_aggregators_change_a_bit(weights: str, payload: str) -> None:
    method = {**L2GD, **WEIGHTS[weights], "iterations": 150, "p0": 0.1, "p": 0.3}
    asked = made_experiment(method, payload=payload)
    alone = run(asked, SPREADS[0])
    for spread in SPREADS[1:]:
        assert run(asked, spread).models.tobytes() == alone.models.tobytes()
    for two_tier in (False, True):
        outcome = Tiers(asked, two_tier=two_tier).run()
        assert outcome.models is not None
        assert outcome.models.tobytes() == alone.models.tobytes()
        # The engine judges what was collected, and so rounded to float32, once more.
        names = outcome.figures if payload == "float64" else ("objective", "between_rounds", "within_rounds")
        assert {name: alone.figures[name] for name in names} == {name: outcome.figures[name] for name in names}


@pytest.mark.parametrize("weights", ["even", "mixed"])
def test_a_float32_run_stays_near_the_float64_run(weights: str) -> None:
    method = {**L2GD, **WEIGHTS[weights], "iterations": 300, "p0": 0.1, "p": 0.3}
    exact, rounded = (run(made_experiment(method, payload=payload)).models for payload in ("float64", "float32"))
    assert 0 < np.abs(exact - rounded).max() < 1e-5


def test_an_aggregator_has_the_averages_that_its_users_have_in_a_float32_run_too() -> None:
    """bar_j moves at both ends; what one has to round, the other has rounded."""
    tiers = Tiers(made_experiment({**L2GD, **EVEN, "iterations": 200, "p0": 0.4, "p": 0.8, "round_iterations": 1}, payload="float32"))

    async def compared() -> int:
        state, n_compared, iteration = await tiers.method.init(tiers.federation), 0, 0.0
        while iteration < 200:
            state, figures = await tiers.method.round(state, tiers.federation, 0)
            iteration = figures["iteration"]
            shared = state.clusters.known == SHARED
            np.testing.assert_array_equal(state.clusters.cluster_average[shared], tiers.users[0].state.cluster_average[shared])
            n_compared += int(shared.sum())
        return n_compared

    assert asyncio.run(compared()) > 100


@pytest.mark.parametrize("seed", range(3))
def test_killed_hosts_and_a_killed_coordinator_end_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    method = {**L2GD, **EVEN, "iterations": 200, "p0": 0.1, "p": 0.3}
    asked = made_experiment(method).model_copy(
        update={"snapshots": made_experiment(method).snapshots.model_copy(update={"every_rounds": 4})}
    )
    calm = World(asked, tmp_path / "calm", 3).run()
    n_exchanges = int(query(tmp_path / "calm", "SELECT max(seq) FROM ledger")[0][0])
    world = World(asked, tmp_path / "faulty", 3, random_faults(seed, n_exchanges, ["h0", "h1", "h2"]), keeps_hosts=bool(seed % 2))
    assert bits(world.run()) == bits(calm)
    assert len(world.done) == 3


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_how_far_the_coordinator_asks_at_once_changes_nothing_but_rounding(limit: int) -> None:
    method = {**L2GD, **EVEN, "iterations": 120, "p0": 0.2, "p": 0.5, "round_iterations": limit}
    whole = run(made_experiment({**method, "round_iterations": 120}))
    found = run(made_experiment(method))
    np.testing.assert_allclose(found.models, whole.models, atol=1e-13)
    assert found.figures["between_rounds"] == whole.figures["between_rounds"]
    assert found.figures["within_rounds"] == whole.figures["within_rounds"]


# ---- special cases, and the end


def weighted(theta: Matrix, weights: Matrix) -> Matrix:
    """Where no weight is, nobody looks."""
    mean: Matrix = weights @ theta / (weights.sum() or 1.0)
    return mean


def printed(asked: Experiment, gamma: Matrix, alpha: Matrix) -> Matrix:
    """Algorithm 1 line by line, user by user, on the coins of `asked`."""
    method, everyone = asked.method, Tiers(asked).everyone.local
    problem, place = everyone.problem, everyone.clusters
    p0, p, tau, eta = method.p0, method.p, method.tau, method.eta
    theta, own = np.zeros((problem.n_users, problem.d)), alpha[place]
    for xi_0, xi in method.coins[: method.iterations]:
        bar_j = [weighted(theta[place == j], gamma[place == j]) for j in range(len(alpha))]
        bar, gradient, after = weighted(theta, own * gamma), problem.gradient(theta), theta.copy()
        for i, j in enumerate(place):
            if xi_0:
                away = alpha[j] * (theta[i] - bar) + tau * (1 - alpha[j]) * (theta[i] - bar_j[j])
                after[i] -= eta * gamma[i] / p0 * away
            elif xi[j]:
                after[i] -= eta * gamma[i] * (1 - tau) * (1 - alpha[j]) / ((1 - p0) * p) * (theta[i] - bar_j[j])
            else:
                after[i] -= eta / ((1 - p0) * (1 - p)) * gradient[i]
        theta = after
    return theta


@pytest.mark.parametrize("two_tier", [False, True], ids=["flat", "two_tier"])
@pytest.mark.parametrize("iterations", [1, 60])
@pytest.mark.parametrize(
    "gamma",
    [[1.0, 0.0, 2.0, 2.0, 2.0, 0.8], [1.0, 1.0, 0.5, 0.5, 0.5, 0.0], [1.0, 1.0, 0.5, 0.5, 0.5, 3.0]],
    ids=["gamma_0", "cluster_of_0", "even"],
)
def test_users_and_clusters_at_the_edges_go_as_printed(gamma: list[float], iterations: int, two_tier: bool) -> None:
    """gamma_i = 0, a cluster of one user, alpha of 0 and of 1; short rounds, and a trace that does not come out even."""
    alpha, draws = [0.0, 1.0, 0.5], np.random.default_rng(4)
    coins = [[int(line[0] < 0.3), [int(flip < 0.5) for flip in line[1:]]] for line in draws.random((60, 4))]
    weights = {
        "gamma": {f"u{i}": value for i, value in enumerate(gamma)},
        "lam": None,
        "alpha": dict(zip(("c0", "c1", "c2"), alpha, strict=True)),
    }
    rates = {"p0": 0.3, "p": 0.5, "tau": 0.4, "eta": 0.02, "coins": coins}
    asked = experiment("linear", {**L2GD, **weights, **rates, "iterations": iterations, "round_iterations": 2, "trace_every": 7})
    tiers = Tiers(asked, two_tier=two_tier)
    np.testing.assert_allclose(tiers.run().models, printed(asked, np.array(gamma), np.array(alpha)), atol=1e-12)


def test_one_cluster_with_alpha_1_is_l2gd() -> None:
    """ "When alpha_j = 1 for all j, we train the single-cluster model studied in Hanzely and Richtarik (2020)": L2GD, step by step."""
    p, eta, gamma = 0.3, 0.01, 2.0
    coins = (np.random.default_rng(1).random(80) < p).astype(int)
    method = {**L2GD, "gamma": gamma, "alpha": 1.0, "p0": p, "eta": eta, "iterations": 80, "coins": [[int(xi), [0]] for xi in coins]}
    tiers = Tiers(made_experiment(method, clusters=1))
    problem, theta = tiers.everyone.local.problem, np.zeros((4, 3))
    for xi in coins:
        step = gamma / p * (theta - theta.mean(axis=0)) if xi else problem.gradient(theta) / (1 - p)
        theta = theta - eta * step
    np.testing.assert_allclose(tiers.run().models, theta, atol=1e-12)


def test_the_single_coin_is_algorithm_1_with_p_j_0_and_tau_1() -> None:
    """Section 6: "one coin toss is used to determine whether the clients should perform a local step or a communication round"."""
    method = {**L2GD, **UNEQUAL, "p0": 0.2, "eta": 0.02, "iterations": 150}
    single, double = (run(made_experiment({**method, **way})) for way in ({"variant": "single_coin"}, {"p": 0.0, "tau": 1.0}))
    assert single.models.tobytes() == double.models.tobytes()


def test_the_trace_has_the_objective_at_the_iterations_that_are_asked_for() -> None:
    method = {**L2GD, **EVEN, "iterations": 100, "p0": 0.1, "p": 0.3, "trace_every": 25}
    found = run(made_experiment(method))
    traced = {int(figures["iteration"]): figures["objective"] for figures in found.rounds() if "objective" in figures}
    assert sorted(traced) == [25, 50, 75, 100]
    assert traced[100] == found.figures["objective"] < traced[25]


def test_users_judge_their_own_models() -> None:
    found = run(made_experiment({**L2GD, **EVEN, "iterations": 100}))
    silent = run(made_experiment({**L2GD, **EVEN, "iterations": 100, "collect_models": False}))
    assert silent.finished.outcomes["async_l2gd"].models is None
    names = ["sum_of_losses", "heldout_loss", "heldout_metric", "heldout_loss_max", "heldout_loss_sd", "objective"]
    assert [silent.figures[name] for name in names] == [found.figures[name] for name in names]
    labels = found.finished.outcomes["async_l2gd"].labels
    assert labels is not None
    np.testing.assert_array_equal(labels, np.repeat([0, 1, 2], 4))


# ---- mistakes


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"gamma": 1.0, "alpha": 1.5}, r"method\.alpha: is 1\.5, want a number from 0 to 1"),
        ({"gamma": 1.0}, r"want exactly one of lam"),
        ({**EVEN, "p0": 1.0}, r"method\.p0: is 1\.0, want less than 1"),
        ({**EVEN, "p0": 0.0}, r"method\.p0 is 0, but cluster 'c0' has alpha 0\.4"),
        ({"gamma": 1.0, "alpha": 0.0, "p0": 0.1}, r"method\.p0 is 0\.1, but alpha_j gamma_i is 0 for all"),
        ({**EVEN, "p0": 0.1, "p": 0.0, "tau": 0.5}, r"method\.p is 0 for cluster 'c0', but tau is 0\.5"),
        ({"gamma": 1.0, "alpha": 0.0, "tau": 0.5}, r"method\.tau is 0\.5 for cluster 'c0', but p0 is 0"),
        ({**EVEN, "p": {"c0": 0.1, "c1": 0.1}}, r"method\.p has no value for cluster 'c2'"),
        ({**EVEN, "p": {"c0": 0.1, "c1": 0.1, "c2": 0.1, "c9": 0.1}}, r"method\.p names cluster 'c9'"),
        ({"gamma": 1.0, "alpha": 0.0, "variant": "single_coin"}, r"method\.variant is 'single_coin', but alpha_j gamma_i is 0 for all"),
        ({**EVEN, "variant": "single_coin", "p": 0.1}, r"variant 'single_coin' has p_j = 0 and tau_j = 1"),
        ({**EVEN, "coins": [[0, [0, 0]]] * 10}, r"a coin for each of the 3 clusters"),
        ({**EVEN, "coins": [[0, [0, 0, 0]]] * 9}, r"coins are given for 9 iterations, want one for each of 10"),
        ({**EVEN, "coins": [[2, [0, 0, 0]]] * 10}, r"method\.coins\.0\.0: is 2, want at most 1"),
    ],
)
def test_a_mistake_gets_one_clear_sentence_before_the_first_iteration(method: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(made_experiment({**L2GD, "iterations": 10, **method}))


def test_a_user_without_a_cluster_is_a_mistake() -> None:
    asked = made_experiment({**L2GD, **EVEN, "iterations": 10}, unclustered=5)
    with pytest.raises(ConfigError, match="user 'u5' has no known cluster"):
        run(asked)


def test_a_run_that_diverges_ends_with_a_sentence() -> None:
    with pytest.raises(RunError, match=r"host '.+': .*is not finite"):
        run(made_experiment({**L2GD, **EVEN, "iterations": 5000, "eta": 9.0, "p0": 0.1, "p": 0.1}))
