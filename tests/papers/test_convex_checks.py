"""What the theory of local updates says of convex losses: where methods converge, where they stall, and what they reduce to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.arrays import Array
from coterie.draws.streams import normal, stream
from coterie.families.partial import ALL_TUNED, AS_IS
from coterie.methods.l2gd import Coins
from coterie.wire.precision import Precision
from coterie_client.data import load_users
from coterie_client.learning import Draw, Phase, Rows
from coterie_client.problems import ConvexProblem, build_problem
from coterie_client.problems.descent import ConvexLearner
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.interface.half import Members, Outcome, Setting
from coterie_server.methods.l2gd import coins
from tests.convex import BATCH, FULL, N_FEATURES, SEED, STAGE, ConvexUsers, a_model, convex_experiment, write_rows

LR = 0.05
D = N_FEATURES + 1
EVERYONE = (0, 1, 2)
QUIET: Mapping[str, Any] = {"participation": 1.0, "evaluate_last": 0, "fine_tune": []}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "users.npz")


@pytest.fixture(scope="module")
def problem(archive: Path) -> ConvexProblem:
    """The quadratics of five users with 7, 10, 13, 15 and 18 training rows, whose models and curvatures differ."""
    experiment = convex_experiment(archive, {"name": "fedavg"})
    users = load_users(experiment.data, experiment.seed, None)
    found = build_problem(experiment.problem, [u.name for u in users], [u.features for u in users], [u.target for u in users])
    assert len(set(found.n_rows.tolist())) == 5
    return found


def left_by(archive: Path, method: Mapping[str, Any], rounds: int, **extra: Any) -> Outcome:
    experiment = convex_experiment(archive, {**QUIET, **FULL, **method}, stop={"rounds": rounds}, **extra)
    return asyncio.run(launch(experiment, Launch("loopback"))).outcomes[method["name"]]


def model_of(outcome: Outcome) -> Array:
    """The one model of all users."""
    assert outcome.models is not None
    assert (outcome.models == outcome.models[0]).all()
    return outcome.models[0]


def optimum(problem: ConvexProblem, weights: Array) -> Array:
    """argmin sum_i p_i f_i, of quadratics."""
    zero = np.zeros((problem.n_users, problem.d))
    hessian, slope = (np.tensordot(weights, each, 1) for each in (problem.hessian(zero), problem.gradient(zero)))
    return np.linalg.solve(hessian, -slope)


# ---- where methods go


def test_fedavg_with_one_full_local_step_is_gradient_descent(archive: Path, problem: ConvexProblem) -> None:
    """Of sum_i m_i f_i / sum_i m_i, round by round."""
    weights = problem.n_rows / problem.n_rows.sum()
    x, wanted = np.zeros(D), []
    for _ in range(9):
        x = x - LR * weights @ problem.gradient(np.tile(x, (5, 1)))
        wanted.append(x)
    for rounds in (1, 2, 3, 9):
        found = model_of(left_by(archive, {"name": "fedavg", "updates": 1}, rounds))
        np.testing.assert_allclose(found, wanted[rounds - 1], rtol=0, atol=1e-12)


def test_scaffold_converges_to_the_optimum_where_fedavg_stalls(archive: Path, problem: ConvexProblem) -> None:
    """Karimireddy et al.: control variates take the drift away, whatever the users' heterogeneity. The objective is the mean of the f_i."""
    mean = optimum(problem, np.full(5, 0.2))
    steps = {"updates": 5, "average": "plain", "optimizer": {"lr": 0.1, "momentum": 0.0}}
    scaffold, fedavg = (model_of(left_by(archive, {"name": name, **steps}, 40)) for name in ("scaffold", "fedavg"))
    assert np.linalg.norm(scaffold - mean) < 1e-8
    assert np.linalg.norm(fedavg - mean) > 1e-2
    assert np.linalg.norm(optimum(problem, problem.n_rows / problem.n_rows.sum()) - mean) > 1e-2


def l2gd_distances(lr: float, p: float, penalty: float, rounds: int) -> Array:
    """|x^k - x^*|^2 at the end of each round, with the coins of the server's half."""
    method = {"p": p, "penalty": penalty, "batch_size": None, "optimizer": {"lr": lr}}
    users = ConvexUsers({"name": "l2gd", **method})
    zero = np.zeros((3, D))
    system = np.kron(np.eye(3) - 1 / 3, penalty * np.eye(D))  # of lambda/2 sum_i |x_i - xbar|^2
    for i, hessian in enumerate(users.problem.hessian(zero)):
        system[i * D : (i + 1) * D, i * D : (i + 1) * D] += hessian
    best = np.linalg.solve(system, -users.problem.gradient(zero).reshape(-1)).reshape(3, D)
    setting = Setting(3, STAGE, Members((), ()), Precision.of("float64"))
    mean, found = np.zeros(D), []
    for number in range(1, rounds + 1):
        x, _ = users.round(number, mean, EVERYONE, Coins(coins(p, setting, number), users=np.array(EVERYONE)))
        mean = x.mean(axis=0)
        found.append(float(np.square(x - best).sum()))
    return np.array(found)


@pytest.mark.parametrize(
    ("lr", "rounds", "low", "high"),
    [(0.2, 60, 2.5, 8.0), pytest.param(0.04, 1500, 3.2, 4.8, marks=pytest.mark.slow)],
    ids=["roughly", "closely"],
)
def test_l2gd_ends_in_a_ball_whose_squared_radius_is_proportional_to_the_step(lr: float, rounds: int, low: float, high: float) -> None:
    """Hanzely and Richtarik: with a constant alpha, linear convergence to a neighbourhood of the minimiser of
    1/n sum_i f_i(x_i) + lambda/(2n) sum_i |x_i - xbar|^2; here with the gradients of all rows and all users in each round."""
    wide, narrow = (l2gd_distances(lr / times, p=0.8, penalty=2.0, rounds=times * rounds) for times in (1, 4))
    radii = [distances[-3 * distances.size // 4 :].mean() for distances in (wide, narrow)]
    assert low < radii[0] / radii[1] < high
    assert wide[0] > 10 * radii[0]


# ---- clusters

KINDS = np.arange(9) % 3
N_ROWS = 30


def write_kinds(path: Path, models: Array) -> Path:
    """Nine users of three kinds, each with a linear model, whose numbers of rows differ."""
    rng = np.random.default_rng(2)
    rows = [rng.standard_normal((N_ROWS + 2 * user, models.shape[1])) for user in range(9)]
    target = [mine @ models[kind] + 0.001 * rng.standard_normal(len(mine)) for mine, kind in zip(rows, KINDS, strict=True)]
    names = np.repeat([f"u{user}" for user in range(9)], [len(mine) for mine in rows])
    np.savez(path, features=np.concatenate(rows), target=np.concatenate(target), user=names)
    return path


def clustered(path: Path, seed: int, rounds: int = 12) -> Outcome:
    method = {"name": "ifca", "clusters": 3, "updates": 5, "optimizer": {"lr": 0.1, "momentum": 0.0}}
    return left_by(path, method, rounds, seed=seed, problem={"loss": "least_squares", "intercept": False})


@pytest.mark.parametrize("seed", range(3))
def test_ifca_recovers_planted_clusters_from_starts_that_are_near(seed: int, tmp_path: Path) -> None:
    """Ghosh et al.'s condition: each is within a quarter of the planted models' distance of its own one."""
    starts = np.array([np.zeros(8), *(0.01 * normal(stream(seed, "model", number), 8) for number in (1, 2))])
    gaps = [np.linalg.norm(starts[a] - starts[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    away = np.random.default_rng(seed).standard_normal((3, 8))
    planted = starts + 0.15 * min(gaps) * away / np.linalg.norm(away, axis=1, keepdims=True)
    outcome = clustered(write_kinds(tmp_path / "users.npz", planted), seed)
    assert outcome.labels is not None
    assert outcome.labels.tolist() == KINDS.tolist()
    np.testing.assert_allclose(outcome.shared["x"], planted, rtol=0, atol=2e-3)
    assert outcome.models is not None
    np.testing.assert_array_equal(outcome.models, outcome.shared["x"][KINDS])


def test_ifca_recovers_planted_clusters_by_the_best_of_a_few_seeds(tmp_path: Path) -> None:
    """From starts that know nothing, as in the paper's experiments: it depends on them, and one of several is right."""
    planted = np.random.default_rng(0).standard_normal((3, 10))
    path = write_kinds(tmp_path / "users.npz", planted)
    outcomes = [clustered(path, seed) for seed in (2, 3, 4)]
    best = min(outcomes, key=lambda outcome: outcome.figures["heldout_loss"])
    assert best.labels is not None
    assert best.labels.tolist() == KINDS.tolist()
    assert len({tuple(outcome.labels.tolist()) for outcome in outcomes if outcome.labels is not None}) > 1


# ---- what they reduce to


ROUNDS = ((1, EVERYONE), (2, (0, 2)), (3, EVERYONE))
MEMORY: Mapping[str, Any] = {"batch_size": BATCH, "epochs": 2, "optimizer": {"lr": LR, "momentum": 0.5}}


def assert_same_rounds(first: ConvexUsers, second: ConvexUsers) -> None:
    """To the bit: what is returned, the losses, and how users judge what they are sent, also after fine-tuning."""
    for number, asked in ROUNDS:
        sent = a_model(number)
        for found, wanted in zip(first.round(number, sent, asked), second.round(number, sent, asked), strict=True):
            np.testing.assert_array_equal(found, wanted)
        for mode in (AS_IS, ALL_TUNED):
            found, wanted = (users.judged(number, sent, mode) for users in (first, second))
            np.testing.assert_array_equal(found.loss, wanted.loss)
            np.testing.assert_array_equal(found.metric, wanted.metric)


def local_training(rounds: Mapping[int, tuple[int, ...]], epochs: int | None = 2, updates: int | None = None, **optimizer: Any) -> Array:
    """Users' own models from zero, after they have trained alone in the rounds in which they were asked."""
    users = ConvexUsers({"name": "fedavg"})
    learner, models = ConvexLearner(users.problem, SEED), np.zeros((3, D))
    phase = Phase("all", epochs, updates, BATCH, LR, **optimizer)
    for number, asked in rounds.items():
        for i in asked:
            user = users.users[i]
            draw = Draw(SEED, user.name, number, f"training of {STAGE}")
            models[i] = learner.fit({"x": models[i]}, Rows(user.features, user.target, user.name), [phase], draw).tensors["x"]
    return models


def own_models(users: ConvexUsers) -> Array:
    return np.array([users.kept(i)["x"] for i in EVERYONE])


@pytest.mark.parametrize("method", [{"name": "fedprox", "mu": 0.0}, {"name": "ifca", "clusters": 1}], ids=["fedprox", "ifca"])
def test_without_a_pull_or_with_one_model_it_is_fedavg_to_the_bit(method: Mapping[str, Any], archive: Path) -> None:
    """What users return and judge. Whole runs, whose streams have the stage's name, add the rows of a batch in another order."""
    assert_same_rounds(ConvexUsers({**MEMORY, **method}), ConvexUsers({**MEMORY, "name": "fedavg"}))
    runs = [left_by(archive, {"epochs": 2, **each}, 5) for each in (method, {"name": "fedavg"})]
    np.testing.assert_allclose(*(run.shared["x"].reshape(-1) for run in runs), rtol=0, atol=1e-14)
    assert runs[0].figures["heldout_loss"] == pytest.approx(runs[1].figures["heldout_loss"], rel=1e-13)


def test_apfl_without_the_own_model_judges_fedavgs_to_the_bit() -> None:
    """alpha = 0: the mix is w. (The losses that users tell are those of the mix before its steps: w's.)"""
    assert_same_rounds(ConvexUsers({**MEMORY, "name": "apfl", "alpha": 0.0}), ConvexUsers({**MEMORY, "name": "fedavg"}))


@pytest.mark.parametrize("method", [{"name": "ditto", "penalty": 0.0}, {"name": "apfl", "alpha": 1.0}], ids=["ditto", "apfl"])
def test_without_the_others_it_is_local_training_to_the_bit(method: Mapping[str, Any]) -> None:
    """Beside it users return what they would in fedavg."""
    users, fedavg = ConvexUsers({**MEMORY, **method}), ConvexUsers({**MEMORY, "name": "fedavg"})
    for number, asked in ROUNDS:
        sent = a_model(number)
        np.testing.assert_array_equal(users.round(number, sent, asked)[0], fedavg.round(number, sent, asked)[0])
    local = local_training(dict(ROUNDS), momentum=0.5)
    np.testing.assert_array_equal(own_models(users), local)
    scores = users.judged(3, a_model())
    judged = [users.problem.judge(local[i], user.name, user.test_features, user.test_target) for i, user in enumerate(users.users)]
    np.testing.assert_array_equal(np.column_stack([scores.loss, scores.metric]), judged)


def test_l2gd_without_a_penalty_is_local_training_to_the_bit() -> None:
    users = ConvexUsers({"name": "l2gd", "penalty": 0.0, "batch_size": BATCH, "optimizer": {"lr": LR}})
    for number, asked in ROUNDS:
        users.round(number, a_model(number), asked, Coins(np.array([4, 2]), users=np.array(asked)))
    np.testing.assert_array_equal(own_models(users), local_training(dict(ROUNDS), epochs=None, updates=4))


def test_l2gd_with_whole_aggregations_is_fedavg_to_the_bit() -> None:
    """a = 1: x_i is the mean that has come."""
    plain = {"batch_size": BATCH, "optimizer": {"lr": 0.5, "momentum": 0.0}}
    l2gd, fedavg = ConvexUsers({"name": "l2gd", "p": 0.5, "penalty": 2.0, **plain}), ConvexUsers({"name": "fedavg", "updates": 3, **plain})
    for number, asked in ROUNDS:
        sent = a_model(number)
        found = l2gd.round(number, sent, asked, Coins(np.array([3, 1]), users=np.array(asked)))[0]
        np.testing.assert_array_equal(found, fedavg.round(number, sent, asked)[0])
    np.testing.assert_array_equal(l2gd.judged(3, a_model()).loss, fedavg.judged(3, a_model()).loss)


def test_one_step_of_pfedme_of_length_1_over_lambda_is_fedavg() -> None:
    """theta = w - grad f / lambda, so lambda (w - theta) = grad f: up to rounding."""
    pfedme = ConvexUsers({**MEMORY, "name": "pfedme", "penalty": 8.0, "personal_lr": 0.125, "personal_steps": 1})
    fedavg = ConvexUsers({**MEMORY, "name": "fedavg"})
    for number, asked in ROUNDS:
        sent = a_model(number)
        for found, wanted in zip(pfedme.round(number, sent, asked), fedavg.round(number, sent, asked), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)


def test_a_heavy_penalty_makes_pfedme_fedavg_and_holds_personal_models_at_the_global_one() -> None:
    """The envelope tends to f_i: lambda (w - theta) to its gradient, as 1 / lambda."""
    fedavg, sent, gaps = ConvexUsers({"name": "fedavg", **FULL, "updates": 1}), a_model(), []
    (wanted, _) = fedavg.round(1, sent)
    for penalty in (1e3, 1e4):
        heavy = ConvexUsers({"name": "pfedme", **FULL, "updates": 1, "penalty": penalty, "personal_lr": 1 / penalty, "personal_steps": 30})
        returned, _ = heavy.round(1, sent)
        gaps.append(np.abs(returned - wanted).max())
        assert np.abs(own_models(heavy) - sent).max() < 10 / penalty
    assert gaps[0] == pytest.approx(10 * gaps[1], rel=0.05)
    assert gaps[1] < 1e-4


def test_without_control_variates_scaffolds_first_round_is_fedavgs(archive: Path) -> None:
    """c = c_i = 0, before anybody has moved."""
    steps = {"updates": 5, "average": "plain"}
    scaffold, fedavg = (
        [model_of(left_by(archive, {"name": name, **steps}, rounds)) for rounds in (1, 2)] for name in ("scaffold", "fedavg")
    )
    np.testing.assert_allclose(scaffold[0], fedavg[0], rtol=0, atol=1e-14)
    assert (np.abs(scaffold[1] - fedavg[1]) > 1e-5).all()
