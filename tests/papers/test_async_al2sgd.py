"""Algorithm 2 of Lyu, Hanzely and Kolar (2022): what each test checks is quoted from the paper, or from its corrected form.

The corrected estimator (4.1) is in `coterie.methods.async_al2sgd`; "fixture" is as in `known_clusters_fixture`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.draws.coins import DrawnCoin
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.families.schedule import CLUSTER, GLOBAL, schedule_of
from coterie.methods.async_al2sgd import ClusterConstants
from coterie.wire.messages import Rows
from coterie_client.methods.async_al2sgd import drawn_rows, keys_of
from coterie_server.record import summary
from tests.papers.known_clusters_fixture import KINDS, Run, Tiers, experiment, fixture, made_experiment, optimum, run, run_apart
from tests.simulation import World, bits, query, random_faults

AL2SGD = {"name": "async_al2sgd"}
WEIGHTS = {"gamma": {"c0": 1.0, "c1": 0.5, "u8": 1.0, "u9": 2.0, "u10": 1.0, "u11": 1.0}, "lam": {"c0": 1.0, "c1": 2.0, "c2": 0.5}}
SPREADS = [[range(12)], [[0, 3, 4, 9], [1, 2, 5, 6, 7, 8, 10, 11]], [[11, 0], [5, 1, 2, 3, 4], [10, 6, 7, 8, 9]]]

Matrix = np.ndarray[Any, Any]


# ---- the fixtures


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_coins_and_rows_give_the_recorded_iterates(kind: str) -> None:
    """Algorithm 2 from x = y = z = 0, with "l selected uniformly at random" and xi' as recorded."""
    trace = fixture(kind)["alg2"]
    method = {**AL2SGD, "iterations": 20, "coins": trace["coins"], "rho": trace["rho"]}
    found = run(experiment(kind, {**method, "round_iterations": 1}), watch=["x", "y", "z"])
    assert sorted(found.states) == list(range(1, 21))
    for iteration, state in found.states.items():
        for name in ("y", "z", "x"):
            np.testing.assert_allclose(state[name], trace["states"][iteration][name], atol=1e-12, err_msg=f"{name} at {iteration}")
    spread = run(experiment(kind, method), [[0, 3], [5, 1], [2, 4]])
    np.testing.assert_allclose(spread.models, trace["states"][20]["y"], atol=1e-12)
    assert np.abs(spread.models - np.array(trace["y_with_printed_41"][20])).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_separate_aggregators_over_grpc_give_the_recorded_iterates(kind: str) -> None:
    """The same, with a process for each aggregator."""
    trace = fixture(kind)["alg2"]
    method = {**AL2SGD, "iterations": 20, "coins": trace["coins"], "rho": trace["rho"]}
    np.testing.assert_allclose(run_apart(experiment(kind, method)), trace["states"][20]["y"], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_not_given_are_those_of_corollary_4_4(kind: str) -> None:
    """ "L_F = L~ + max gamma, eta = 1/4 max{L_F, calL}^{-1}, a1 = min{1/2, sqrt(eta mu max{1/2, a2/rho})}, ..." in this order."""
    trace = fixture(kind)["alg2"]
    tiers = Tiers(experiment(kind, {**AL2SGD, "iterations": 1, "rho": trace["rho"]}))
    figures, found = tiers.run().figures, tiers.users[0].state.parameters
    for name in ("eta", "a1", "a2", "b1", "b2"):
        np.testing.assert_allclose(getattr(found, name), trace["params"][name], rtol=1e-12)
    for name, wanted in (("p0", trace["p0"]), ("p", trace["pj"]), ("tau", trace["tau"])):
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-12)
    assert figures["contraction"] == pytest.approx(trace["params"]["rate"], rel=1e-12)


def test_rho_is_p0_where_it_is_not_given_and_all_else_can_be_given() -> None:
    given = {"p0": 0.3, "p": 0.2, "tau": 0.5, "eta": 0.01, "a1": 0.2, "a2": 0.4, "b1": 0.9, "b2": 0.05}
    figures = Tiers(made_experiment({**AL2SGD, **WEIGHTS, "iterations": 1, **given})).run().figures
    assert figures["rho"] == 0.3
    assert {name: figures[name] for name in ("p0", "eta", "a1", "a2", "b1", "b2")} == {
        name: given[name] for name in ("p0", "eta", "a1", "a2", "b1", "b2")
    }
    assert "contraction" not in figures, "the theorem speaks of the parameters that are not given"


@pytest.mark.parametrize(("rho", "place"), [(0.01, 2), (0.2, 0)])
def test_the_contraction_is_the_smallest_of_three(rho: float, place: int) -> None:
    """ "min{b2 mu, a1/2, rho a1/(2 a2 + a1)}", with b2 mu = 1 - b1; a small rho makes the last one the smallest."""
    figures = Tiers(linear(2.0, iterations=1, rho=rho)).run().figures
    a1, a2, b1 = (figures[name] for name in ("a1", "a2", "b1"))
    terms = [1 - b1, a1 / 2, rho * a1 / (2 * a2 + a1)]
    assert figures["contraction"] == pytest.approx(terms[place]) == pytest.approx(min(terms))


def test_the_step_is_right_for_a_tau_that_is_given_too() -> None:
    """calL of Lemma 4.2 before tau_j is chosen: (1-alpha_j) max gamma_i (2 tau_j^2/p0 + (1-tau_j)^2/((1-p0)p_j)), here the largest term."""
    given = {"gamma": 10.0, "alpha": 0.1, "p0": 0.02, "p": 0.3, "tau": 0.8, "rho": 0.2}
    figures = Tiers(made_experiment({**AL2SGD, **given, "iterations": 1})).run().figures
    cal_l = 9 * (2 * 0.8**2 / 0.02 + 0.2**2 / (0.98 * 0.3))
    assert figures["eta"] == pytest.approx(1 / (4 * cal_l))
    assert figures["a2"] == pytest.approx(1 / 2)


def test_coins_and_rows_are_drawn_anew_in_each_iteration() -> None:
    """What the shared seed says, written down, gives the same bits."""
    method = {**AL2SGD, **WEIGHTS, "p0": 0.1, "p": 0.2, "rho": 0.2, "iterations": 80}
    asked = made_experiment(method)
    schedule = schedule_of(asked.seed, 0.1, (0.2, 0.2, 0.2), (0, 1, 2), None)
    operations = np.stack([schedule.operations(j, 0, 80) for j in range(3)], axis=1)
    keys, n_rows = keys_of(asked.seed, np.arange(12)), Tiers(asked).everyone.local.problem.n_rows
    refreshes = DrawnCoin(asked.seed, "coin of the anchors", 0.2).flips(0, 80)
    coins = [
        [int(line[0] == GLOBAL), [int(op == CLUSTER) for op in line], drawn_rows(keys, np.full(12, t), n_rows).tolist(), int(refreshes[t])]
        for t, line in enumerate(operations)
    ]
    assert run(made_experiment({**method, "coins": coins})).models.tobytes() == run(asked).models.tobytes()


# ---- the estimator (4.1)


class Probe:
    """x, y, z somewhere, and what an iteration there subtracts."""

    def __init__(self, kind: str) -> None:
        self.kind, content = kind, fixture(kind)
        self.content, self.trace = content, content["alg2"]
        draws = np.random.default_rng(7)
        x, y, z = draws.standard_normal((3, 6, 2))
        a1, a2, self.eta = (self.trace["params"][name] for name in ("a1", "a2", "eta"))
        self.x, self.theta = x, a1 * z + a2 * x + (1 - a1 - a2) * y
        self.gamma, self.place = np.array(content["gamma"]), np.array(content["cid"])
        self.alpha, self.tau = np.array(content["alpha"])[self.place], np.array(self.trace["tau"])[self.place]
        self.start = {"x": x, "y": y, "z": z, "cluster_anchor": self.bar_j(x), "global_anchor": np.tile(self.bar(x), (3, 1))}

    def bar_j(self, models: Matrix) -> Matrix:
        return np.array([np.average(models[self.place == j], axis=0, weights=self.gamma[self.place == j]) for j in range(3)])

    def bar(self, models: Matrix) -> Matrix:
        average: Matrix = np.average(models, axis=0, weights=self.alpha * self.gamma)
        return average

    def estimate(self, xi_0: int, xi: tuple[int, ...], row: int) -> Matrix:
        """g (6, 2), with the row `row` modulo their number for each user."""
        rows = [row % n for n in self.content["cnt"]]
        coins = [[xi_0, list(xi), rows, 0]]
        tiers = Tiers(experiment(self.kind, {**AL2SGD, "iterations": 1, "rho": self.trace["rho"], "coins": coins}), start=self.start)
        tiers.run()
        return (self.theta - tiers.array("y")) / self.eta

    def gradient(self) -> Matrix:
        """grad F (6, 2) at theta."""
        own = Tiers(experiment(self.kind, {**AL2SGD, "iterations": 1})).everyone.local.problem.gradient(self.theta)
        away, away_j = self.theta - self.bar(self.theta), self.theta - self.bar_j(self.theta)[self.place]
        pull: Matrix = self.alpha[:, None] * away + (1 - self.alpha)[:, None] * away_j
        return own + self.gamma[:, None] * pull

    def missing(self) -> Matrix:
        """The term that is not printed, times p0: gamma_i tau_j (1-alpha_j) ((theta_i - bar_j) - (x_i - xbar_j))."""
        difference = self.theta - self.x - self.bar_j(self.theta - self.x)[self.place]
        missing: Matrix = (self.gamma * self.tau * (1 - self.alpha))[:, None] * difference
        return missing


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimator_is_unbiased_over_all_coins_and_rows_and_the_printed_one_is_not(kind: str) -> None:
    """E g = grad F(theta); 12 rows go evenly into the 2, 3 or 4 that users have."""
    probe = Probe(kind)
    p0, pj = probe.trace["p0"], probe.trace["pj"]
    mean = p0 * probe.estimate(1, (0, 0, 0), 0)
    for xi in itertools.product((0, 1), repeat=3):
        chance = (1 - p0) * np.prod([p if flip else 1 - p for p, flip in zip(pj, xi, strict=True)])
        rows = [0] if all(xi) else range(12)
        mean += chance * np.mean([probe.estimate(0, xi, row) for row in rows], axis=0)
    np.testing.assert_allclose(mean, probe.gradient(), atol=1e-12)
    assert np.abs(probe.missing()).max() > 0.1
    assert np.abs(mean - probe.missing() - probe.gradient()).max() > 0.1


def test_the_recorded_iterates_of_the_printed_estimator_are_those_without_the_term() -> None:
    """What is called missing above is what the fixture's second trace leaves out: they part with the first global round."""
    trace = fixture("linear")["alg2"]
    first = next(t for t, line in enumerate(trace["coins"]) if line[0])
    ours, printed = (np.array(listed) for listed in ([state["y"] for state in trace["states"]], trace["y_with_printed_41"]))
    np.testing.assert_allclose(ours[: first + 1], printed[: first + 1], atol=1e-12)
    assert np.abs(ours[first + 1] - printed[first + 1]).max() > 1e-4


# ---- convergence


def linear(mu: float, seed: int = 0, **method: Any) -> Experiment:
    """The linear fixture with another ridge."""
    asked = experiment("linear", {**AL2SGD, "rho": 0.2, **method}, seed=seed)
    return asked.model_copy(update={"problem": asked.problem.model_copy(update={"l2": mu})})


def best_of(asked: Experiment) -> Matrix:
    content, everyone = fixture("linear"), Tiers(asked).everyone.local
    return optimum(everyone.problem, np.array(content["gamma"]), content["alpha"], everyone.clusters)


def errors(found: Run, best: Matrix) -> dict[int, float]:
    """|y - opt|^2/|opt|^2 by iteration."""
    return {at: float(((state["y"] - best) ** 2).sum() / (best**2).sum()) for at, state in found.states.items()}


def test_the_solver_of_these_tests_agrees_with_the_fixture() -> None:
    np.testing.assert_allclose(best_of(experiment("linear", AL2SGD)), fixture("linear")["optimum"], atol=1e-12)


@pytest.mark.parametrize(
    ("mu", "count"), [(0.1, 450), pytest.param(0.01, 1350, marks=pytest.mark.slow), pytest.param(0.001, 2400, marks=pytest.mark.slow)]
)
def test_the_optimum_itself_is_reached_within_the_known_number_of_iterations(mu: float, count: int) -> None:
    """ "((1/rho + sqrt(calL/(rho mu))) log(1/eps))": 1e-8 within 450, 1350, 2400 iterations (+20 %) for rho = .2, and 1e-12 later."""
    asked = linear(mu, iterations=2 * count, round_iterations=20)
    found = errors(run(asked, watch=["y"]), best_of(asked))
    assert min(at for at, error in found.items() if error < 1e-8) <= 1.2 * count
    assert found[2 * count] < 1e-12


@pytest.mark.parametrize("two_tier", [False, True], ids=["flat", "two_tier"])
def test_users_and_clusters_at_the_edges_reach_the_optimum(two_tier: bool) -> None:
    """gamma_i = 0, a cluster of one user, alpha of 0 and of 1; short rounds, and a trace that does not come out even."""
    gamma, alpha = [1.0, 0.0, 2.0, 2.0, 2.0, 0.8], [0.0, 1.0, 0.5]
    weights = {
        "gamma": {f"u{i}": value for i, value in enumerate(gamma)},
        "lam": None,
        "alpha": dict(zip(("c0", "c1", "c2"), alpha, strict=True)),
    }
    method = {**weights, "rho": 0.2, "p0": 0.2, "p": 0.3, "iterations": 900, "round_iterations": 3, "trace_every": 400}
    tiers = Tiers(experiment("linear", {**AL2SGD, **method}), two_tier=two_tier)
    everyone = tiers.everyone.local
    best = optimum(everyone.problem, np.array(gamma), alpha, everyone.clusters)
    np.testing.assert_allclose(tiers.run().models, best, atol=1e-4)


def lyapunov(found: Run, tiers: Tiers, best: Matrix, rho: float) -> dict[int, float]:
    """Psi = |z - opt|^2 + (2 b1 b2/a1) (F(y) - F*) + ((2 a2 + a1) b1 b2/(a1 rho)) (F(x) - F*) by iteration."""
    p, problem = tiers.users[0].state.parameters, tiers.everyone.local.problem
    a1, a2, b1, b2 = (float(values[0]) for values in (p.a1, p.a2, p.b1, p.b2))
    content, place = fixture("linear"), np.array(fixture("linear")["cid"])
    gamma, alpha = np.array(content["gamma"]), np.array(content["alpha"])[place]

    def objective(models: Matrix) -> float:
        averages = [np.average(models[place == j], axis=0, weights=gamma[place == j]) for j in range(3)]
        away, away_j = models - np.average(models, axis=0, weights=alpha * gamma), models - np.array(averages)[place]
        pull = alpha * (away**2).sum(axis=1) + (1 - alpha) * (away_j**2).sum(axis=1)
        return float((problem.value(models) + gamma / 2 * pull).sum())

    least = objective(best)
    return {
        at: float(((state["z"] - best) ** 2).sum())
        + 2 * b1 * b2 / a1 * (objective(state["y"]) - least)
        + (2 * a2 + a1) * b1 * b2 / (a1 * rho) * (objective(state["x"]) - least)
        for at, state in found.states.items()
    }


def check_contraction(seeds: range, iterations: int) -> None:
    best, every = best_of(linear(0.1)), 20
    tiers = Tiers(linear(0.1, iterations=1))
    contraction = tiers.run().figures["contraction"]
    listed = []
    for seed in seeds:
        asked = linear(0.1, seed, iterations=iterations, trace_every=every, round_iterations=every)
        listed.append(lyapunov(run(asked, watch=["x", "y", "z"]), tiers, best, 0.2))
    start = Run(run(linear(0.1, iterations=1)).finished, [], {0: dict.fromkeys(("x", "y", "z"), np.zeros((6, 2)))})
    first = lyapunov(start, tiers, best, 0.2)[0]
    for at in range(every, iterations, every):
        assert np.mean([psi[at] for psi in listed]) <= (1 - contraction) ** at * first


def test_the_lyapunov_function_contracts() -> None:
    """ "min{b2 mu, a1/2, rho a1/(2 a2 + a1)}" per step in the mean, here over few seeds."""
    check_contraction(range(3), 101)


@pytest.mark.slow
def test_the_lyapunov_function_contracts_over_many_seeds() -> None:
    """The same."""
    check_contraction(range(20), 301)


def test_the_squared_penalty_is_a_special_case() -> None:
    """Problem (4) of the convex clustering paper with GAM is one cluster with alpha = 1 and gamma = 2 n GAM: the same minimiser."""
    penalty, n = 0.03, 4
    squared = run(made_experiment({"name": "squared", "penalty": penalty}, clusters=1))
    method = {**AL2SGD, "gamma": 2 * n * penalty, "alpha": 1.0, "iterations": 2500, "rho": 0.2}
    ours = run(made_experiment(method, clusters=1))
    np.testing.assert_allclose(ours.models, squared.models, atol=1e-8)
    assert ours.figures["objective"] == pytest.approx(squared.figures["objective"], rel=1e-12)


# ---- communication


def within_three_deviations(found: float, wanted: float, n: float) -> bool:
    return abs(found - wanted) <= 3 * (wanted * (1 - wanted / n)) ** 0.5


def check_counts(iterations: int) -> None:
    p = (0.1, 0.2, 0.3)
    method = {**AL2SGD, **WEIGHTS, "iterations": iterations, "p0": 0.1, "rho": 0.15, "p": {f"c{j}": pj for j, pj in enumerate(p)}}
    found = run(made_experiment(method, d=1, rows=2))
    figures = found.figures
    for name, wanted, n in (
        ("between_rounds", 0.1 * iterations, iterations),
        ("anchor_rounds", 0.15 * (iterations - 1), iterations - 1),
        ("within_rounds", 0.9 * sum(p) * iterations, 3 * iterations),
    ):
        assert figures[f"{name}_expected"] == pytest.approx(wanted)
        assert within_three_deviations(figures[name], wanted, n), name
    found.finished.database.flush()
    traffic = {(row.step, row.direction): row for row in summary.traffic(found.finished.database.connection)}
    assert traffic["within-anchor", "up"].vectors == 12 * figures["anchor_rounds"]
    assert traffic["within-anchor", "down"].vectors == 6 * figures["anchor_rounds"]
    assert traffic["within-average", "up"].vectors == 4 * (3 * figures["between_rounds"] + figures["within_rounds"])
    for step in ("within-average", "within-anchor"):
        expected = traffic[step, "up"].expected
        assert expected is not None
        assert traffic[step, "up"].vectors == pytest.approx(expected, rel=0.2)


def test_every_averaging_round_communicates_and_so_does_every_anchor() -> None:
    """ "no reuse: p0 T and (1-p0) p_j T, plus rho T anchor rounds, which are global barriers"."""
    check_counts(600)


@pytest.mark.slow
def test_every_averaging_round_communicates_in_20_000_iterations() -> None:
    """The same."""
    check_counts(20_000)


def test_between_the_clusters_only_pairs_averages_and_extremes_travel() -> None:
    """ "An aggregator forwards the pair, never a client's vector", and of its users' constants the largest and the smallest."""
    method = {**AL2SGD, **WEIGHTS, "iterations": 100, "p0": 0.1, "p": 0.2, "collect_models": False}
    tiers = Tiers(made_experiment(method), two_tier=True)
    outcome = tiers.run()
    assert outcome.models is None
    rows = [message for message in tiers.federation.sent if isinstance(message, Rows)]
    assert {type(message).__name__ for message in rows} == {"Judgement"}
    vectors: dict[str, int] = {}
    for message in tiers.federation.sent:
        for name, spec in message.specs:
            vectors[type(message).__name__] = vectors.get(type(message).__name__, 0) + spec.count(getattr(message, name).shape)[0]
    assert vectors["ClusterSums"] == vectors["GlobalAverage"] == 3 * outcome.figures["between_rounds"] > 0
    assert vectors["AnchorSums"] == vectors["GlobalAnchor"] == 3 * outcome.figures["anchor_rounds"] > 0


def test_of_the_users_constants_the_clusters_largest_and_smallest_travel() -> None:
    """With one feature, rows differ in their strong convexity too."""
    tiers = Tiers(made_experiment({**AL2SGD, **WEIGHTS, "iterations": 1}, d=1), two_tier=True)
    tiers.run()
    told = next(message for message in tiers.federation.sent if isinstance(message, ClusterConstants))
    problem = tiers.everyone.local.problem
    assert told.smoothness[0] == problem.row_smoothness()[:4].max() > problem.row_smoothness()[:4].min()
    assert told.strong_convexity[0] == problem.row_strong_convexity()[:4].min() < problem.row_strong_convexity()[:4].max()


def test_an_anchor_after_the_last_iteration_is_not_shared() -> None:
    """Nobody needs its averages."""
    coins = [[0, [0, 0, 0], [0] * 12, 1]] * 5
    found = run(made_experiment({**AL2SGD, **WEIGHTS, "iterations": 5, "coins": coins}))
    assert found.figures["anchor_rounds"] == 4


# ---- bits


@pytest.mark.parametrize("payload", ["float64", "float32"])
def test_neither_hosts_nor_aggregators_change_a_bit(payload: str) -> None:
    asked = made_experiment({**AL2SGD, **WEIGHTS, "iterations": 120, "p0": 0.1, "p": 0.2}, payload=payload)
    alone = run(asked, SPREADS[0])
    for spread in SPREADS[1:]:
        assert run(asked, spread).models.tobytes() == alone.models.tobytes()
    for two_tier in (False, True):
        outcome = Tiers(asked, two_tier=two_tier).run()
        assert outcome.models is not None
        assert outcome.models.tobytes() == alone.models.tobytes()
        assert outcome.figures["objective"] == alone.figures["objective"]


def test_a_float32_run_stays_near_the_float64_run() -> None:
    method = {**AL2SGD, **WEIGHTS, "iterations": 300, "p0": 0.1, "p": 0.2}
    exact, rounded = (run(made_experiment(method, payload=payload)).models for payload in ("float64", "float32"))
    assert 0 < np.abs(exact - rounded).max() < 1e-5


@pytest.mark.parametrize("limit", [1, 7])
def test_how_far_the_coordinator_asks_at_once_changes_no_bit(limit: int) -> None:
    method = {**AL2SGD, **WEIGHTS, "iterations": 150, "p0": 0.05, "p": 0.2, "rho": 0.04}
    whole, found = (run(made_experiment({**method, "round_iterations": n})) for n in (150, limit))
    assert found.models.tobytes() == whole.models.tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_killed_hosts_and_a_killed_coordinator_end_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    asked = made_experiment({**AL2SGD, **WEIGHTS, "iterations": 120, "p0": 0.1, "p": 0.2}, snapshots={"every_rounds": 4})
    calm = World(asked, tmp_path / "calm", 3).run()
    n_exchanges = int(query(tmp_path / "calm", "SELECT max(seq) FROM ledger")[0][0])
    world = World(asked, tmp_path / "faulty", 3, random_faults(seed, n_exchanges, ["h0", "h1", "h2"]), keeps_hosts=bool(seed % 2))
    assert bits(world.run()) == bits(calm)
    assert len(world.done) == 3


# ---- the end


def test_the_trace_has_the_objective_of_y_at_the_iterations_that_are_asked_for() -> None:
    method = {**AL2SGD, **WEIGHTS, "iterations": 200, "p0": 0.1, "p": 0.2, "trace_every": 50}
    found = run(made_experiment(method))
    traced = {int(figures["iteration"]): figures["objective"] for figures in found.rounds() if "objective" in figures}
    assert sorted(traced) == [50, 100, 150, 200]
    assert traced[200] == found.figures["objective"] < traced[50]


def test_a_point_of_a_grid_goes_on_from_the_one_before() -> None:
    """Its first round shares the averages of the anchors that it starts from."""
    method = {**AL2SGD, "gamma": 1.0, "lam": 1.0, "iterations": 60, "rho": 0.2}
    points = [{"iterations": 1000}, {"iterations": 60}]
    warm = run(made_experiment({**method, "iterations": 2, "grid": points})).finished.outcomes["iterations=60"]
    cold = run(made_experiment(method))
    everyone = Tiers(made_experiment(method)).everyone.local
    best = optimum(everyone.problem, np.ones(12), np.full(3, 1 / 5), everyone.clusters)
    assert np.abs(cold.models - best).max() > 0.1
    np.testing.assert_allclose(warm.models, best, atol=1e-3)
    for name in ("anchor_rounds", "anchor_rounds_expected"):
        assert warm.figures[name] == cold.figures[name] + 1


# ---- mistakes


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"lam": 1.0, "gamma": 1.0, "p0": 0.0}, r"method\.p0 is 0, but cluster 'c0' has alpha"),
        ({"alpha": 0.0, "gamma": 1.0}, r"method\.rho would be p0, which is 0"),
        ({"rho": 0.0}, r"method\.rho: is 0\.0, want more than 0"),
        ({"a1": 0.7, "a2": 0.5}, r"method\.a1 is 0\.7 and a2 is 0\.5, want at most 1 together"),
        ({"coins": [[0, [0, 0], [0] * 12, 0]] * 10}, r"2 coins of clusters in iteration 0, want one for each of 3"),
        ({"coins": [[0, [0, 0, 0], [0] * 11, 0]] * 10}, r"11 rows in iteration 0, want one for each of 12 users"),
        ({"coins": [[0, [0, 0, 0], [0] * 11 + [9], 0]] * 10}, r"row 9 for user 11 in iteration 0, want less than 4"),
        ({"coins": [[0, [0, 0, 0], [0] * 12, 0]] * 9}, r"coins are given for 9 iterations, want one for each of 10"),
        ({"coins": [[0, [0, 0, 0], [0] * 12]] * 10}, r"method\.coins\.0\.3: is missing"),
    ],
)
def test_a_mistake_gets_one_clear_sentence_before_the_first_iteration(method: dict[str, Any], sentence: str) -> None:
    weights = {} if "alpha" in method or "lam" in method else WEIGHTS
    with pytest.raises(ConfigError, match=sentence):
        run(made_experiment({**AL2SGD, **weights, "iterations": 10, **method}))


def test_a_loss_that_is_not_strongly_convex_is_a_mistake_that_names_the_user() -> None:
    asked = made_experiment({**AL2SGD, **WEIGHTS, "iterations": 10}, problem={"l2": 0.0}, rows=5)
    with pytest.raises(ConfigError, match=r"user 'u0' has row losses that are not strongly convex \(mu = 0\), .* set problem\.l2, or"):
        run(asked)


def test_where_row_losses_are_flat_mu_can_be_given_and_the_optimum_is_reached() -> None:
    """F may be strongly convex though a single row of least squares in three features never is."""
    asked = made_experiment({**AL2SGD, "gamma": 1.0, "alpha": 0.4, "iterations": 2500, "rho": 0.1, "mu": 0.2}, problem={"l2": 0.0}, rows=5)
    everyone = Tiers(asked).everyone.local
    best = optimum(everyone.problem, np.ones(12), np.full(3, 0.4), everyone.clusters)
    np.testing.assert_allclose(run(asked).models, best, atol=1e-8)


def test_a_run_that_diverges_ends_with_a_sentence() -> None:
    with pytest.raises(RunError, match=r"host '.+': .*is not finite"):
        run(made_experiment({**AL2SGD, **WEIGHTS, "iterations": 5000, "eta": 9.0, "p0": 0.1, "p": 0.1}))
