"""Users with convex losses that train together get the bits that they get one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.draws.streams import orders, philox, stream
from coterie.errors import RunError
from coterie.experiment.config import Experiment
from coterie.families.partial import ALL_TUNED, AS_IS, AskScores, Scores, Shared, Trial
from coterie.methods.l2gd import Coins
from coterie.methods.scaffold import Variate
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_client.data import UserData
from coterie_client.families import partial
from coterie_client.families.partial import CLIENT, State
from coterie_client.interface.half import Inbox, Local
from coterie_client.interface.local_update import LocalUpdate, local_update
from coterie_client.problems import build_problem
from coterie_client.problems.convex import ConvexProblem
from coterie_client.problems.rows import joined
from tests.convex import LEAST_SQUARES, METHODS, convex_experiment

COUNTS = (4, 1, 9, 4, 4, 3, 20, 9, 4, 12, 1, 4)  # rows of users: some alone, some with others
N = len(COUNTS)
P = 6
TOGETHER = sorted(name for name in METHODS if local_update(name).together)
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def rows_of(loss: str) -> list[UserData]:
    rng = np.random.default_rng(4)
    users = []
    for i, m in enumerate(COUNTS):
        s = rng.normal(size=m)
        y = {"poisson": np.round(np.abs(s)) + (np.arange(m) == 0), "least_squares": s, "huber": s}.get(loss, np.where(s > 0, 1.0, -1.0))
        n_test = min(i, 5, m)
        users.append(UserData(f"user {i}", None, rng.normal(size=(m, P)), y, rng.normal(size=(n_test, P)), y[:n_test]))
    return users


class Host:
    """The client half of all users, for two rounds in which some of them are asked, and all judge their models."""

    def __init__(self, method: Mapping[str, Any], **problem: Any) -> None:
        config = {**LEAST_SQUARES, **problem}
        self.experiment: Experiment = convex_experiment(Path("users.npz"), method, problem=config)
        users = rows_of(config["loss"])
        names = tuple(user.name for user in users)
        losses = build_problem(self.experiment.problem, names, [user.features for user in users], [user.target for user in users])
        self.local = Local(5, names, np.arange(N), N, Precision.of("float64", is_convex=True), users, losses=losses)

    def rounds(self) -> dict[str, bytes]:
        """What users send and keep, to the bit."""
        found = {}
        state: State = CLIENT.init(self.experiment.method.client_options(), self.local, None)
        for number, asked in ((1, np.arange(N)), (2, np.array([0, 2, 3, 5, 8, 11]))):
            n_models = self.experiment.method.client_options().get("n_models", 1)  # type: ignore[attr-defined]
            x = 0.3 * np.random.default_rng(number).standard_normal(n_models * self.local.problem.d)
            messages: list[Message] = [Shared(x, np.zeros(0, np.int64), users=asked)]
            if self.experiment.method.name == "scaffold":
                messages.append(Variate(0.1 * x[::-1].copy(), users=asked))
            if self.experiment.method.name == "l2gd":
                messages.append(Coins(np.array([2, 1]), users=asked))
            state, replies = CLIENT.step(state, Inbox("stage", number, {type(message): message for message in messages}), self.local)
            for reply in replies:
                found |= {f"{number} {reply.kind}.{name}": getattr(reply, name).tobytes() for name, _ in reply.specs}
            found |= {f"{number} kept {name}": rows.tobytes() for name, rows in state.kept.items()}
            found[f"{number} private"] = state.private.tobytes()
            trial = {Trial: Trial(-x, np.zeros(0, np.int64), users=np.arange(N)), AskScores: AskScores(np.array([AS_IS, ALL_TUNED]))}
            _, (scores,) = CLIENT.step(state, Inbox("stage", number, trial), self.local)
            assert isinstance(scores, Scores)
            assert np.isfinite(scores.metric[1:]).all()
            found |= {f"{number} scores loss": scores.loss.tobytes(), f"{number} scores metric": scores.metric.tobytes()}
        return found


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users train one after another from now on."""
    found = partial._update
    monkeypatch.setattr(partial, "_update", lambda options: replace(found(options), together=False))


def both(monkeypatch: pytest.MonkeyPatch, method: Mapping[str, Any], **problem: Any) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What users leave together and one by one."""
    together = Host(method, **problem).rounds()
    one_by_one(monkeypatch)
    return together, Host(method, **problem).rounds()


def assert_same(together: dict[str, bytes], alone: dict[str, bytes]) -> None:
    assert together.keys() == alone.keys()
    assert [name for name, found in together.items() if found != alone[name]] == []


def test_every_method_of_ours_trains_users_together() -> None:
    assert sorted(METHODS) == TOGETHER


@pytest.mark.parametrize("name", [name for name in TOGETHER if name != "ifca"])  # which compares models by losses of all rows
def test_local_steps_make_no_padded_copy_of_the_rows(name: str) -> None:
    host = Host(METHODS[name])
    host.rounds()
    assert host.local.losses is not None
    assert "stacks" not in vars(host.local.losses)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_rows_that_lie_in_one_piece_are_not_copied_and_others_are(order: list[int]) -> None:
    block = np.random.default_rng(0).normal(size=(9, 2))
    pieces = np.split(block, [4, 5])
    users = [pieces[i] for i in order]
    together, starts = joined(users)
    apart, starts_apart = joined([users[0], users[1].copy(), users[2]])
    assert np.shares_memory(together, block)
    assert not np.shares_memory(apart, block)
    for rows, at, at_apart in zip(users, starts, starts_apart, strict=True):
        assert np.array_equal(together[at : at + len(rows)], rows)
        assert np.array_equal(apart[at_apart : at_apart + len(rows)], rows)


@pytest.mark.parametrize("batch_size", [None, 3, 1])
@pytest.mark.parametrize("name", TOGETHER)
def test_every_method_gives_the_bits_of_the_loop(name: str, batch_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    method = {**METHODS[name], "batch_size": batch_size}
    assert_same(*both(monkeypatch, method))


@pytest.mark.parametrize("loss", ["least_squares", "logistic", "squared_hinge", "huber", "poisson", "squared_distance", "huber_distance"])
@pytest.mark.parametrize(("reduction", "l2", "intercept"), [("mean", 0.0, True), ("sum", 0.1, True), ("mean", 0.3, False)])
def test_every_loss_gives_the_bits_of_the_loop(
    loss: str, reduction: str, l2: float, *, intercept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "fedavg", "batch_size": 4, "epochs": 2, "optimizer": {"lr": 0.01, "momentum": 0.0}}
    assert_same(*both(monkeypatch, method, loss=loss, reduction=reduction, l2=l2, intercept=intercept))


@pytest.mark.parametrize("optimizer", [SGD, {"name": "adam", "lr": 0.05, "weight_decay": 0.01}])
@pytest.mark.parametrize("work", [{"epochs": 3}, {"updates": 5}])
def test_every_optimizer_gives_the_bits_of_the_loop(
    optimizer: Mapping[str, Any], work: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(*both(monkeypatch, {"name": "fedprox", "mu": 0.5, "batch_size": 3, "optimizer": optimizer, **work}))


def test_small_groups_give_the_bits_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    method = {**METHODS["ditto"], "batch_size": 3}
    wanted = Host(method).rounds()
    monkeypatch.setattr("coterie_client.problems.convex._MAX_ALIKE", 60)
    sizes = [rows.size for rows in Host(method).local.problem.alike(np.arange(N))]
    assert sorted(sizes) != sorted(rows.size for rows in _unlimited(Host(method).local.problem, monkeypatch))
    assert_same(Host(method).rounds(), wanted)


def _unlimited(problem: ConvexProblem, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr("coterie_client.problems.convex._MAX_ALIKE", 1 << 20)
        return list(problem.alike(np.arange(N)))


def test_users_are_not_trained_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(update: LocalUpdate) -> LocalUpdate:
        return replace(update, update=lambda context: (calls.append(len(context.target)), update.update(context))[1])

    found = partial._update
    monkeypatch.setattr(partial, "_update", lambda options: counted(found(options)))
    Host(METHODS["fedavg"]).rounds()
    assert sum(calls) == N + 6
    assert len(calls) == len(set(COUNTS)) + len({COUNTS[i] for i in (0, 2, 3, 5, 8, 11)})


def test_the_user_whose_model_diverges_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    method = {"name": "fedavg", "epochs": 200, "optimizer": {"lr": 1e6, "momentum": 0.0}}
    said = []
    for _ in range(2):
        with pytest.raises(RunError, match=r"^user 'user \d+' in round 1: tensor 'x' has (nan|inf) after training") as caught:
            Host(method).rounds()
        said.append(str(caught.value).partition(":")[2])
        one_by_one(monkeypatch)
    assert said[0] == said[1]


@pytest.mark.parametrize("n_owners", [4, 30])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 63, 64, 65])
def test_orders_of_many_are_those_of_each(n: int, n_owners: int) -> None:
    owners = ["u1", "u2", 'a "ü"', *(f"v{number}" for number in range(3, n_owners))]
    found = orders(7, "training, batch 1", owners, [(4, 0, 12)] * n_owners, np.full(n_owners, n))
    np.testing.assert_array_equal(found, [stream(7, "training, batch 1", owner, 4, 0, 12).order(n) for owner in owners])


def test_a_stream_is_that_of_its_key() -> None:
    digest = hashlib.sha256(b'[7, "training", "u1", 4]').digest()
    wanted = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    np.testing.assert_array_equal(philox(7, "training", "u1", 4).random_raw(9), wanted.random_raw(9))


@pytest.mark.parametrize("counts", [(3, 1, 60, 4), (3, 1, 100, 65)])
def test_orders_of_unequal_lengths_are_those_of_each(counts: tuple[int, ...]) -> None:
    owners, counts = [f"u{number}" for number in range(28)], counts * 7
    for owner, n, found in zip(owners, counts, orders(7, "training", owners, [(4, 0, 12)] * len(owners), np.array(counts)), strict=True):
        np.testing.assert_array_equal(found, stream(7, "training", owner, 4, 0, 12).order(n))
