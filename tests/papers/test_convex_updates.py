"""Local updates of convex losses against computations by hand in float64: the batches' gradients, each method's steps, the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from coterie.arrays import Array, Indices
from coterie.draws.streams import normal, stream
from coterie.experiment.problem import ProblemConfig
from coterie.families.partial import ALL_TUNED, HEAD_TUNED, AskStart, Start, Updated
from coterie.methods.ifca import Chosen
from coterie.methods.l2gd import Coins
from coterie.methods.scaffold import Variate, VariateMove
from coterie_client.learning import Draw, Epoch, Phase, Rows
from coterie_client.methods.apfl import ALPHA
from coterie_client.methods.l2gd import LEFT
from coterie_client.problems import build_problem
from coterie_client.problems.descent import Adam, ConvexLearner, ConvexSlope, Sgd
from tests.convex import BATCH, N_FEATURES, PLAIN, SEED, ConvexUsers, a_model, shared, targets_of

LR, C = 0.05, 0.1
D = N_FEATURES + 1
USERS = range(3)
PROBLEMS: Mapping[str, Mapping[str, Any]] = {
    "least_squares": {},
    "least_squares summed": {"reduction": "sum"},
    "least_squares without intercept": {"intercept": False},
    "huber": {"huber_delta": 0.4},
    "logistic": {},
    "logistic summed": {"reduction": "sum"},
    "squared_hinge": {},
    "poisson": {"log_mean_limit": 3.0},
    "squared_distance": {},
    "squared_distance summed": {"reduction": "sum"},
    "huber_distance": {"huber_delta": 0.6},
}


def row_loss(config: ProblemConfig, x: Array, a: Array, y: float) -> float:
    """f_il without the reduction: phi(<w, a> - b, y), or the distance."""
    if config.is_distance:
        r = float(np.linalg.norm(x - a))
        return r * r / 2 if config.loss == "squared_distance" else _huber(r, config.huber_delta)
    s = float(x[: len(a)] @ a - (x[-1] if config.intercept else 0.0))
    match config.loss:
        case "least_squares":
            return (s - y) ** 2 / 2
        case "huber":
            return _huber(abs(s - y), config.huber_delta)
        case "logistic":
            return float(np.log1p(np.exp(-y * s)))
        case "squared_hinge":
            return max(0.0, 1 - y * s) ** 2
        case _:
            assert config.loss == "poisson"
            assert s < config.log_mean_limit
            return float(np.exp(s)) - y * s


def _huber(t: float, delta: float) -> float:
    return t * t / 2 if t <= delta else delta * (t - delta / 2)


def batch_loss(config: ProblemConfig, x: Array, features: Array, target: Array, n_rows: int) -> float:
    """The mean of f_il over some rows of a user with n_rows."""
    w = x[:-1] if config.has_intercept else x
    times = n_rows if config.reduction == "sum" else 1
    rows = [times * row_loss(config, x, a, y) for a, y in zip(features, target, strict=True)]
    return float(np.mean(rows) + config.l2 / 2 * (w @ w))


def numerical_gradient(f: Callable[[Array], float], x: Array) -> Array:
    """Central differences."""
    h = 1e-6
    return np.array([(f(x + h * e) - f(x - h * e)) / (2 * h) for e in np.eye(x.size)])


def user_of(name: str, n_rows: int = 12) -> tuple[ProblemConfig, Array, Array]:
    """A loss, and rows and targets that it knows."""
    loss = name.partition(" ")[0]
    rng = np.random.default_rng(7)
    features = rng.standard_normal((n_rows, N_FEATURES))
    target = targets_of(loss, features @ rng.standard_normal(N_FEATURES))
    return ProblemConfig(loss=loss, l2=C, **PROBLEMS[name]), features, target


# ---- gradients of batches


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_batch_has_the_mean_of_the_losses_of_its_rows(name: str) -> None:
    config, features, target = user_of(name)
    problem = build_problem(config, ["u"], [features], [target])
    x = a_model()[: problem.d]
    slope = ConvexSlope(problem.block("u", features, target), x)
    for rows in (np.array([3]), np.array([7, 0, 2]), np.arange(12)[::-1]):
        value, (gradient,) = slope(rows)

        def f(z: Array, rows: Indices = rows) -> float:
            return batch_loss(config, z, features[rows], target[rows], 12)

        assert value == pytest.approx(f(x), rel=1e-13)
        np.testing.assert_allclose(gradient, numerical_gradient(f, x), rtol=1e-7, atol=1e-8)
    assert slope.x.tolist() == x.tolist()


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_mean_over_an_epoch_of_equal_batches_is_the_gradient_of_the_user(name: str) -> None:
    """As `ConvexProblem.gradient` and `ConvexProblem.row_gradient` say."""
    config, features, target = user_of(name)
    problem = build_problem(config, ["u"], [features], [target])
    x = a_model(2)[: problem.d]
    slope = ConvexSlope(problem.block("u", features, target), x)
    order = np.random.default_rng(0).permutation(12)
    found = [slope(rows) for rows in slope.batches(Epoch(order, [4, 4, 4]))]
    np.testing.assert_allclose(np.mean([gradients[0] for _, gradients in found], axis=0), problem.gradient(x[None])[0], rtol=0, atol=1e-12)
    assert np.mean([value for value, _ in found]) == pytest.approx(problem.value(x[None])[0], rel=1e-13)
    assert slope.value() == problem.value(x[None])[0]
    for row in range(12):
        alone = slope(np.array([row]))[1][0]
        np.testing.assert_allclose(alone, problem.row_gradient(x[None], np.array([row]))[0], rtol=0, atol=1e-12)


# ---- optimizers


def descended(phase: Phase, n_rows: int = 12) -> tuple[Array, Array, Array]:
    """What a phase makes of a user's model, from where, and the rows of its one batch: all of them."""
    config, features, target = user_of("logistic", n_rows)
    learner = ConvexLearner(build_problem(config, ["u"], [features], [target]), SEED)
    start = a_model(3)
    fitted = learner.fit({"x": start}, Rows(features, target, "u"), [phase], Draw(SEED, "u", 1, "training"))
    assert fitted.n_steps == 10
    return fitted.tensors["x"], features, target


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"momentum": 0.7}, lambda w: torch.optim.SGD(w, LR, momentum=0.7)),
        ({"momentum": 0.7, "weight_decay": 0.2}, lambda w: torch.optim.SGD(w, LR, momentum=0.7, weight_decay=0.2)),
        ({"optimizer": "adam"}, lambda w: torch.optim.Adam(w, LR)),
        ({"optimizer": "adam", "weight_decay": 0.2}, lambda w: torch.optim.Adam(w, LR, weight_decay=0.2)),
    ],
)
def test_optimizers_make_the_steps_of_torch_in_float64(ours: dict[str, Any], theirs: Callable[[Any], torch.optim.Optimizer]) -> None:
    found, features, target = descended(Phase("all", None, 10, None, LR, **ours))
    x = torch.tensor(a_model(3), dtype=torch.float64, requires_grad=True)
    rows, y = torch.tensor(features), torch.tensor(target)
    optimizer = theirs([x])
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.softplus(-y * (rows @ x[:-1] - x[-1])).mean() + C / 2 * (x[:-1] ** 2).sum()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(found, x.detach().numpy(), rtol=0, atol=1e-12)


def test_optimizers_make_the_steps_of_their_formulas() -> None:
    gradients = [np.array([1.0, -2.0]), np.array([0.5, 0.0]), np.array([-1.0, 4.0])]
    start = np.array([0.3, -0.7])
    w, v = start.copy(), np.zeros(2)
    for g in gradients:
        v = 0.9 * v + g + 0.1 * w
        w = w - LR * v
    moved = start.copy()
    sgd = Sgd([moved], LR, 0.9, 0.1)
    for g in gradients:
        sgd.step([g])
    np.testing.assert_allclose(moved, w, rtol=0, atol=1e-15)

    w, m, s = start.copy(), np.zeros(2), np.zeros(2)
    for t, gradient in enumerate(gradients, 1):
        g = gradient + 0.1 * w
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
        w = w - LR * (m / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.999**t)) + 1e-8)
    moved = start.copy()
    adam = Adam([moved], LR, 0.1)
    for g in gradients:
        adam.step([g])
    np.testing.assert_allclose(moved, w, rtol=0, atol=1e-15)


# ---- the methods' steps


class Hand:
    """Least squares with c = 0.1 on the rows of `ConvexUsers`, by their formula."""

    def __init__(self, users: ConvexUsers) -> None:
        self.users = users
        self.rows = [np.column_stack([user.features, -np.ones(len(user.target))]) for user in users.users]
        self.targets = [user.target for user in users.users]

    def gradient(self, position: int, x: Array, batch: Indices | slice = slice(None)) -> Array:
        """grad f_i(x; batch)."""
        a, y = self.rows[position][batch], self.targets[position][batch]
        return a.T @ (a @ x - y) / len(y) + C * np.append(x[:-1], 0.0)

    def value(self, position: int, x: Array) -> float:
        """f_i(x)."""
        return float(np.mean((self.rows[position] @ x - self.targets[position]) ** 2) / 2 + C / 2 * x[:-1] @ x[:-1])

    def steps(self, position: int, number: int, x: Array, along: Callable[[Array, Indices], Array] | None = None) -> Array:
        """x after the steps of a round, along g(x, batch): the plain gradient where none is given."""
        for batch in self.users.batches(position, number):
            x = x - LR * (self.gradient(position, x, batch) if along is None else along(x, batch))
        return x


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def driven(method: str, **changes: Any) -> tuple[ConvexUsers, Hand]:
    users = ConvexUsers({"name": method, **PLAIN, **changes})
    return users, Hand(users)


def test_fedavg_makes_steps_on_the_minibatches_of_the_named_streams() -> None:
    users, hand = driven("fedavg")
    assert [len(user.target) for user in users.users] == [7, 10, 13]
    assert [len(batch) for batch in users.batches(2, 1, epochs=1)] == [4, 4, 5]
    for number, asked in ((1, (0, 1, 2)), (2, (0, 2))):
        sent = a_model(number)
        returned, losses = users.round(number, sent, asked)
        for row, position in enumerate(asked):
            values = []
            x = sent
            for batch in users.batches(position, number):
                a, y = hand.rows[position][batch], hand.targets[position][batch]
                values.append(np.mean((a @ x - y) ** 2) / 2 + C / 2 * x[:-1] @ x[:-1])
                x = x - LR * hand.gradient(position, x, batch)
            close(returned[row], x)
            close(losses[row], np.mean(values))


def test_fedprox_pulls_towards_the_model_that_was_sent() -> None:
    users, hand = driven("fedprox", mu=0.7)
    sent = a_model()
    returned, _ = users.round(1, sent)
    for position in USERS:
        wanted = hand.steps(position, 1, sent, lambda x, batch, i=position: hand.gradient(i, x, batch) + 0.7 * (x - sent))
        close(returned[position], wanted)


def test_scaffold_corrects_by_control_variates() -> None:
    users, hand = driven("scaffold")
    own = np.zeros((3, D))
    for number, asked in ((1, (0, 1)), (2, (0, 2)), (3, (0, 1, 2))):
        x, c = a_model(number), a_model(10 + number)
        said = users.answers(number, shared(x, asked, Variate(c, users=np.array(asked))))
        returned, moves = said[Updated].weights, said[VariateMove].weights
        for row, position in enumerate(asked):
            y = hand.steps(position, number, x, lambda z, batch, i=position, c=c: hand.gradient(i, z, batch) + c - own[i])
            n_steps = len(list(users.batches(position, number)))
            new = own[position] - c + (x - y) / (n_steps * LR)
            close(returned[row], y)
            close(moves[row], new - own[position])
            own[position] = new
    close([users.kept(position)["x"] for position in USERS], own)


def test_apfl_moves_the_mix_and_alpha() -> None:
    users, hand = driven("apfl", alpha=0.4, adaptive=True)
    v, alpha = np.zeros((3, D)), np.full(3, 0.4)
    for number, asked in ((1, (0, 1, 2)), (2, (2,))):
        sent = a_model(number)
        returned, _ = users.round(number, sent, asked)
        for row, position in enumerate(asked):
            w, a = sent, alpha[position]
            for batch in users.batches(position, number):
                g = hand.gradient(position, a * v[position] + (1 - a) * w, batch)
                in_alpha = float((v[position] - w) @ g)
                v[position] -= LR * a * g
                a -= LR * in_alpha
                w = w - LR * hand.gradient(position, w, batch)
            assert 0 < a < 1
            alpha[position] = a
            close(returned[row], w)
    close([users.kept(position)["x"] for position in USERS], v)
    close([users.kept(position)[ALPHA] for position in USERS], alpha)


def test_ditto_has_a_model_of_its_own_pulled_towards_the_global_one() -> None:
    users, hand = driven("ditto", penalty=2.0)
    v = np.zeros((3, D))
    for number, asked in ((1, (0, 1, 2)), (2, (1,))):
        sent = a_model(number)
        returned, _ = users.round(number, sent, asked)
        for row, position in enumerate(asked):
            close(returned[row], hand.steps(position, number, sent))
            v[position] = hand.steps(
                position, number, v[position], lambda x, batch, i=position, w=sent: hand.gradient(i, x, batch) + 2.0 * (x - w)
            )
    close([users.kept(position)["x"] for position in USERS], v)


def test_l2gd_aggregates_and_then_makes_local_steps() -> None:
    p, penalty = 0.2, 3.0
    a = LR * penalty * (1 - p) / p
    users = ConvexUsers({"name": "l2gd", "p": p, "penalty": penalty, "batch_size": BATCH, "optimizer": {"lr": LR}})
    hand = Hand(users)
    x, to_come = np.zeros((3, D)), [1, 1, 1]
    for number, coins, asked in ((1, (3, 2), (0, 1)), (2, (2, 1), (0, 2)), (3, (1, 3), (0, 1, 2))):
        mean = a_model(number)
        returned, _ = users.round(number, mean, asked, Coins(np.array(coins), users=np.array(asked)))
        for row, position in enumerate(asked):
            for _ in range(to_come[position]):
                x[position] = (1 - a) * x[position] + a * mean
            for batch in list(users.batches(position, number))[: coins[0]]:
                x[position] -= LR * hand.gradient(position, x[position], batch)
            to_come[position] = coins[1]
            close(returned[row], x[position])
    close([users.kept(position)["x"] for position in USERS], x)
    close([users.kept(position)[LEFT] for position in USERS], [(1 - a) ** times for times in to_come])


def test_pfedme_follows_the_envelope() -> None:
    users, hand = driven("pfedme", penalty=3.0, personal_lr=0.1, personal_steps=4)
    sent = a_model()
    returned, _ = users.round(1, sent)
    for position in USERS:
        w = theta = sent
        for batch in users.batches(position, 1):
            theta = w
            for _ in range(4):
                theta = theta - 0.1 * (hand.gradient(position, theta, batch) + 3.0 * (theta - w))
            w = w - LR * 3.0 * (w - theta)
        close(returned[position], w)
        close(users.kept(position)["x"], theta)


def test_pfedmes_theta_is_the_prox_where_the_steps_suffice() -> None:
    """grad f_i(theta) + lambda (theta - w) = 0, which `ConvexProblem.argmin` solves."""
    users, _ = driven("pfedme", penalty=4.0, personal_lr=0.1, personal_steps=400, batch_size=None, epochs=1)
    sent = a_model()
    users.round(1, sent)
    prox = users.problem.argmin(np.tile(4.0 * sent, (3, 1)), 4.0)
    close([users.kept(position)["x"] for position in USERS], prox)


def test_ifca_trains_the_model_that_fits_all_rows_best() -> None:
    users, hand = driven("ifca", clusters=3)
    models = np.array([a_model(seed, scale=1.0) for seed in (1, 2, 3)])
    said = users.answers(1, shared(models.reshape(-1), (0, 1, 2)))
    wanted = [int(np.argmin([hand.value(position, model) for model in models])) for position in USERS]
    assert said[Chosen].model.tolist() == wanted
    for position, choice in enumerate(wanted):
        close(said[Updated].weights[position], hand.steps(position, 1, models[choice]))


def test_the_first_model_is_zero_and_further_ones_are_drawn() -> None:
    users, _ = driven("ifca", clusters=3)
    start: Start = users.answers(0, {AskStart: AskStart(users=np.array([0]))})[Start]
    first, *others = start.weights[0].reshape(3, D)
    assert not first.any()
    for number, model in enumerate(others, 1):
        np.testing.assert_array_equal(model, 0.01 * normal(stream(SEED, "model", number), D))


def test_full_batches_are_one_step_an_epoch_along_the_users_gradient() -> None:
    users, hand = driven("fedavg", batch_size=None, epochs=3)
    sent = a_model()
    returned, _ = users.round(1, sent)
    for position in USERS:
        x = sent
        for _ in range(3):
            x = x - LR * hand.gradient(position, x)
        close(returned[position], x)


def test_users_judge_by_means_whatever_they_minimise() -> None:
    summed, mean = (ConvexUsers({"name": "fedavg", **PLAIN}, reduction=reduction).judged(1, a_model()) for reduction in ("sum", "mean"))
    close(summed.loss, mean.loss)
    np.testing.assert_array_equal(summed.metric, mean.metric)


def test_users_judge_without_the_penalty_and_fine_tune_all_of_the_model() -> None:
    """Of a convex model all is head."""
    users, hand = driven("fedavg", fine_tune_epochs=1)
    sent = a_model()
    scores, tuned = users.judged(1, sent), [users.judged(1, sent, mode) for mode in (HEAD_TUNED, ALL_TUNED)]
    for position, user in enumerate(users.users):
        x = sent
        miss = user.test_features @ x[:-1] - x[-1] - user.test_target
        close([scores.loss[position, 0], scores.metric[position, 0]], [np.mean(miss**2) / 2, np.mean(miss**2)])
        for batch in users.batches(position, 1, epochs=1, purpose="fine-tuning of stage"):
            x = x - LR * hand.gradient(position, x, batch)
        miss = user.test_features @ x[:-1] - x[-1] - user.test_target
        for found in tuned:
            close(found.loss[position, 0], np.mean(miss**2) / 2)
