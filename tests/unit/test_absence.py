"""What a method makes of users that are left out, against a computation by hand of what its docstring says; and which methods refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.config import StopRule, experiment_from
from coterie.experiment.model import TensorInfo
from coterie.families import pdmm_messages
from coterie.families.partial import AskStart, Shared, Start, TrainingLoss, Updated
from coterie.methods import fedavg, fedrep_linear, pdmm
from coterie.methods.fedrep_linear import FinalRepresentation, Representation, Scores, UpdatedRepresentation
from coterie.registry import methods
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.families import partial as partial_room
from coterie_server.interface.half import Facts, Members, Replies, Setting
from coterie_server.interface.stages import Stage
from coterie_server.methods import fedrep_linear as linear_room
from coterie_server.methods.pdmm import half as pdmm_room
from coterie_server.run.plan import check_absence, stages_of, why_everyone

NOBODY: Indices = np.zeros(0, dtype=np.int64)


class Federation:
    """Users who answer from formulas, except those that are away."""

    def __init__(self, n: int) -> None:
        self.n, self.away = n, NOBODY

    def answer(self, messages: Sequence[Message], users: Indices) -> Sequence[Message]:
        """What these users send."""
        raise NotImplementedError

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Any = ()) -> Replies:
        """As a hub does it that leaves out those who are away: they are sent nothing."""
        asked = np.arange(self.n) if to is None else to
        present = np.setdiff1d(asked, self.away)
        answers = self.answer(messages, present) if present.size else ()
        whole = {type(message): message for message in answers if not isinstance(message, Start | Updated)}
        single = {type(m): _one_by_one(m) for m in answers if isinstance(m, Start | Updated)}
        return Replies(whole, present if self.away.size else None, single, self.away)


def _one_by_one(message: Start | Updated) -> list[Any]:
    assert message.users is not None
    return [
        type(message)(message.weights[i : i + 1], message.counts[i : i + 1], users=message.users[i : i + 1])
        for i in range(message.users.size)
    ]


def setting(n: int, **more: Any) -> Setting:
    facts = Facts(np.arange(1, n + 1) * 10, 1, np.ones(n), np.ones(n), n_test=np.zeros(n, dtype=np.int64))
    return Setting(3, "stage", Members(tuple(f"u{i}" for i in range(n)), ("",) * n), Precision.of("float64"), facts, **more)


# ---- pdmm


class Points(Federation):
    """f_i(x) = (x - a_i)^2 / 2, so (16) is x_i = (a_i + v_i) / (1 + q)."""

    def __init__(self, a: Sequence[float], steps: pdmm.Constants) -> None:
        super().__init__(len(a))
        self.a, self.steps = np.array(a), steps

    def answer(self, messages: Sequence[Message], users: Indices) -> Sequence[Message]:
        [task] = [message for message in messages if isinstance(message, pdmm_messages.Aggregates)]
        listed = np.arange(self.n) if task.users is None else task.users
        v = task.v[np.isin(listed, users), 0]
        [rho] = [message.rho[0] for message in messages if isinstance(message, pdmm_messages.Weight)] or [self.steps.rho]
        q = rho * (self.n - 1) + self.steps.at(rho).eta
        return [pdmm_messages.UpdatedModels(((self.a[users] + v) / (1 + q))[:, None], users=users)]


def points(a: Sequence[float], **settings: Any) -> tuple[pdmm_room.Pdmm, Points]:
    config = pdmm.Config(penalty=0.3, start="zero", evaluate_every=0, **settings)
    method = pdmm_room.set_up(config, setting(len(a)))
    return method, Points(a, method.steps)


def by_hand(method: pdmm_room.Pdmm, a: Sequence[float], away: Sequence[Sequence[int]]) -> Array:
    """Algorithm 1 pair by pair for scalars, jacobi, in rounds in which some x_i stay where they are."""
    n, s, lam = len(a), method.steps, method.lam
    x, z, mu, muhat = np.zeros(n), np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    for absent in away:
        new, z_new, mu_new, muhat_new = x.copy(), z.copy(), mu.copy(), muhat.copy()
        for i in range(n):
            others = [j for j in range(n) if j != i]
            v = sum(s.rho * (x[j] + z[i, j]) - muhat[i, j] for j in others) + s.eta * x[i]
            if i not in absent:
                new[i] = (a[i] + v) / (1 + s.rho * (n - 1) + s.eta)
        for i in range(n):
            for j in (j for j in range(n) if j != i):
                w = x[i] - x[j] + muhat[i, j] / s.rho
                z_new[i, j] = np.sign(w) * max(0.0, abs(w) - lam / s.rho)
                residual = new[i] - new[j] - z_new[i, j]
                mu_new[i, j] = mu[i, j] + s.tau * s.rho * residual
                muhat_new[i, j] = mu_new[i, j] - s.nu * s.rho * residual
        x, z, mu, muhat = new, z_new, mu_new, muhat_new
    return x


async def rounds(method: Any, federation: Federation, state: Any, first: int, last: int) -> Any:
    for number in range(first, last + 1):
        state, _ = await method.round(state, federation, number)
    return state


def test_pdmm_leaves_the_model_of_a_lost_user_where_it_is_and_goes_on_with_its_pairs() -> None:
    a = [0.0, 1.0, 3.0, -2.0]
    away = [[], [], [1], [1, 3], [], []]

    async def run() -> Array:
        method, federation = points(a, order="jacobi", balance_rounds=0)
        state = await method.init(federation)
        for number, absent in enumerate(away, 1):
            federation.away = np.array(absent, dtype=np.int64)
            before = state.x
            state, figures = await method.round(state, federation, number)
            np.testing.assert_array_equal(state.x[absent], before[absent])
            assert figures.get("absent", 0.0) == figures.get("unasked", 0.0) == len(absent)
        np.testing.assert_allclose(state.x[:, 0], by_hand(method, a, away), atol=1e-12)
        return state.x

    asyncio.run(run())


@pytest.mark.parametrize("acceleration", ["none", "anderson"])
def test_pdmm_tends_to_the_optimum_with_the_lost_model_held_and_then_to_that_of_everyone(acceleration: str) -> None:
    """Users 0 and 1 join at y, and (2y - a_0 - a_1 + 2 LAM sign(y - h)) = 0 where they do not also join the held h of user 2."""
    a = [0.0, 0.2, 2.0]

    async def run() -> None:
        method, federation = points(a, acceleration=acceleration)
        state = await rounds(method, federation, await method.init(federation), 1, 1)
        federation.away = np.array([2])
        held = float(state.x[2, 0])
        state = await rounds(method, federation, state, 2, 3000)
        assert state.x[2, 0] == held
        y = float(np.clip(held, 0.1 - 0.3, 0.1 + 0.3))
        assert abs(y - 0.4) > 0.03, "or nothing could be told from the optimum of everyone"
        np.testing.assert_allclose(state.x[:2, 0], [y, y], atol=1e-6)
        federation.away = NOBODY
        state = await rounds(method, federation, state, 3001, 6000)
        np.testing.assert_allclose(state.x[:, 0], [0.4, 0.4, 2.0 - 0.6], atol=1e-6)

    asyncio.run(run())


def test_pdmm_remembers_how_far_a_drawn_but_lost_user_went_last() -> None:
    """Otherwise the residuals of a sampled run would say that it rests."""

    async def run() -> None:
        method, federation = points([0.0, 1.0, 3.0, -2.0], sampling="paired", primal_fraction=0.9)
        state = await rounds(method, federation, await method.init(federation), 1, 3)
        federation.away = np.array([0, 1])
        after = await rounds(method, federation, state, 4, 8)
        np.testing.assert_array_equal(after.x_moved[:2], state.x_moved[:2])

    asyncio.run(run())


# ---- fedrep_linear


class Representations(Federation):
    """B_i of user i is the number of the user, everywhere."""

    def answer(self, messages: Sequence[Message], users: Indices) -> Sequence[Message]:
        if any(isinstance(message, FinalRepresentation) for message in messages):
            return [Scores(users * 1.0, users * 1.0, np.ones(users.size, dtype=np.int64), users=users)]
        assert isinstance(messages[0], Representation)
        return [UpdatedRepresentation(np.broadcast_to(users[:, None, None] * 1.0, (users.size, 1, 3)).copy(), users=users)]


def test_fedrep_linear_averages_the_representations_of_those_who_answer() -> None:
    async def run() -> None:
        config = fedrep_linear.Config(k=1, participation=1.0, start="random")
        method = linear_room.FedRepLinear(config, 3, "stage", 4, 3, None, None)
        federation = Representations(4)
        start = await method.init(federation)
        federation.away = np.array([1])
        state, figures = await method.round(start, federation, 1)
        np.testing.assert_allclose(state.b, np.full((3, 1), (0 + 2 + 3) / 3))
        assert (figures["users"], figures["unasked"]) == (3.0, 1.0)
        expected = method.expected_vectors([figures])
        assert expected["representation", "down"] == expected["representation", "up"] == 3.0
        outcome = await method.finish(state, federation)
        np.testing.assert_array_equal(outcome.by_user["heldout_metric"], [0.0, np.nan, 2.0, 3.0])
        federation.away = np.arange(4)
        rest, figures = await method.round(state, federation, 2)
        np.testing.assert_array_equal(rest.b, state.b)
        assert figures["users"] == 0.0

    asyncio.run(run())


# ---- networks


class Networks(Federation):
    """phi_i of user i is (i, 10 i)."""

    def answer(self, messages: Sequence[Message], users: Indices) -> Sequence[Message]:
        weights = (users[:, None] * np.array([[1.0, 10.0]])).astype(np.float32)
        counts = np.zeros((users.size, 0), dtype=np.int64)
        if isinstance(messages[0], AskStart):
            return [Start(weights, counts, users=users)]
        assert isinstance(messages[0], Shared)
        return [Updated(weights, counts, users=users), TrainingLoss(users * 1.0, users=users)]


@pytest.mark.parametrize(("average", "shares"), [("rows", [10, 30, 40]), ("plain", [1, 1, 1])])
def test_fedavg_averages_those_who_answer_with_weights_that_sum_to_one(average: str, shares: list[float]) -> None:
    async def run() -> None:
        config = fedavg.Config(participation=1.0, average=average)
        tensors = (TensorInfo("w", (2,), False, "body"),)
        of = setting(4, rounds=5, tensors=tensors)
        method = partial_room.PartialSharing(config, of, tensors, of.facts.n_rows, of.facts.n_test, are_personal=False)  # type: ignore[union-attr]
        federation = Networks(4)
        federation.away = np.array([0])
        start = await method.init(federation)
        np.testing.assert_array_equal(start.weights, [1.0, 10.0])  # of the first user that is there
        federation.away = np.array([1])
        state, figures = await method.round(start, federation, 1)
        mean = (0 * shares[0] + 2 * shares[1] + 3 * shares[2]) / sum(shares)
        np.testing.assert_allclose(state.weights, [mean, 10 * mean], rtol=1e-6)
        assert figures["loss"] == pytest.approx((2 * 30 + 3 * 40) / (10 + 30 + 40))
        assert (figures["users"], figures["unasked"]) == (3.0, 1.0)
        federation.away = np.arange(4)
        rest, figures = await method.round(state, federation, 2)
        np.testing.assert_array_equal(rest.weights, state.weights)
        assert "loss" not in figures

    asyncio.run(run())


# ---- who refuses


@pytest.mark.parametrize("name", methods())
def test_every_method_says_whether_it_needs_everyone(name: str) -> None:
    tolerant = {"pdmm", "fedrep_linear", *methods("network")} - {"adapt"}
    stage = Stage(name, name, SimpleNamespace(placement="lean", sampling="full", forecast=None), StopRule())
    assert (why_everyone(stage) == "") == (name in tolerant)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"name": "pdmm", "penalty": 0.1, "placement": "paper"}, "method 'pdmm' needs every user: in placement 'paper' users keep"),
        ({"name": "pdmm", "penalty": 0.1, "refit": True}, "stage 'refit' after method 'pdmm' needs every user: without some losses"),
        ({"name": "pdmm", "penalty": 0.1, "forecast": 0.1}, "method 'pdmm' needs every user: with 'forecast' a stage ends by the answers"),
        ({"name": "squared", "penalty": 0.1}, "method 'squared' needs every user: without some losses the sums are those of another"),
        ({"name": "async_l2gd", "iterations": 5, "gamma": 1.0, "alpha": 0.5}, "method 'async_l2gd' needs every user: an average"),
    ],
)
def test_skipping_lost_hosts_is_refused_where_it_has_no_meaning(method: dict[str, Any], sentence: str) -> None:
    content = {"name": "refused", "data": {"source": "ellipses"}, "problem": {"loss": "squared_hinge", "l2": 1e-3}, "method": method}
    for on_loss in ("stop", "wait"):
        experiment = experiment_from({**content, "federation": {"on_loss": on_loss}})
        check_absence(experiment, stages_of(experiment))
    experiment = experiment_from({**content, "federation": {"on_loss": "skip"}})
    with pytest.raises(ConfigError, match=f"^federation.on_loss is 'skip', but {sentence}.*; want on_loss 'wait' or 'stop'$"):
        check_absence(experiment, stages_of(experiment))


def test_skipping_lost_hosts_is_allowed_where_only_what_comes_before_needs_everyone() -> None:
    method = {"name": "pdmm", "path": [0.2, 0.1]}
    content = {"name": "path", "data": {"source": "ellipses"}, "problem": {"loss": "squared_hinge", "l2": 1e-3}, "method": method}
    experiment = experiment_from({**content, "references": ["oracle"], "federation": {"on_loss": "skip"}})
    check_absence(experiment, stages_of(experiment))


def test_two_tiers_have_nobody_to_skip() -> None:
    content = {"name": "tiers", "data": {"source": "ellipses"}, "problem": {"loss": "squared_hinge"}, "method": {"name": "local"}}
    with pytest.raises(ConfigError, match="on_loss 'skip', min_hosts and late 'skip' are for 'flat'"):
        experiment_from({**content, "federation": {"topology": "clusters", "on_loss": "skip"}})
    assert experiment_from({**content, "federation": {"topology": "clusters", "on_loss": "wait"}}).federation.on_loss == "wait"
