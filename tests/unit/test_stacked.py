"""Users whose networks train in stacks (`model.training: stacked`): the loop's steps up to rounding, in bits that no neighbour changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.errors import ConfigError, RunError
from coterie_client.families import partial
from coterie_client.interface.local_update import Context
from coterie_client.learning import Draw, Fitted, Phase, Rows
from coterie_client.nets import TorchNetwork, stack
from coterie_client.nets.by_rows import has_few_rows
from tests.local_updates import PLAIN, Users, a_model
from tests.networks import CLASSES, WIDTH, network_experiment

MLP = {"name": "mlp", "hidden": [6, 4], "classes": CLASSES}
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAM = {"name": "adam", "lr": 0.02, "weight_decay": 0.01}
TOGETHER = ("fedavg", "fedper", "fedrep", "lg_fedavg", "local_network", "fedprox", "ditto")
TOLERANCE = 3e-6  # what float32 may lose over an update


def network(model: Mapping[str, Any], shape: tuple[int, ...], loss: str = "cross_entropy", training: str = "stacked") -> TorchNetwork:
    content = {"model": {**model, "training": training}, "problem": {"loss": loss}}
    found = network_experiment(Path("users.npz"), {"name": "fedavg"}, **content).model
    assert found is not None
    return TorchNetwork(found, loss, 3, shape)


def phase(part: Any = "all", **changes: Any) -> Phase:
    usual = {"part": part, "epochs": 3, "updates": None, "batch_size": 4, "lr": 0.05, "momentum": 0.5, "weight_decay": 1e-2}
    return Phase(**{**usual, **changes})


class Group:
    """Users with rows and models of their own."""

    def __init__(self, net: TorchNetwork, shape: tuple[int, ...], counts: Sequence[int], classes: int = 3) -> None:
        rng = np.random.default_rng(7)
        self.net, self.counts = net, np.array(counts)
        self.rows = [Rows(rng.standard_normal((m, *shape)), rng.integers(0, classes, m).astype(float), f"u{m}") for m in counts]
        self.names = [f"user {i}" for i in range(len(counts))]
        self.models = [
            {name: a + 0.1 * rng.standard_normal(a.shape).astype(np.float32) for name, a in net.initial().items()} for _ in counts
        ]

    def together(self, users: Sequence[int], phases: Sequence[Phase]) -> dict[int, Fitted]:
        """The results of these users, by number; those of different shapes are in stacks of their own."""
        found = {}
        for places in self.net.stacks(self.counts[list(users)], phases):
            own = [users[place] for place in places.tolist()]
            tensors = {name: np.stack([self.models[i][name] for i in own]) for name in self.models[0]}
            mine = [self._sliced(phase, own) for phase in phases]
            fitted = self.net.fit_together(tensors, [self.rows[i] for i in own], mine, self.draw(tuple(self.names[i] for i in own)))
            for place, i in enumerate(own):
                found[i] = Fitted({name: array[place] for name, array in fitted.tensors.items()}, fitted.loss[place], 0)
        return found

    def alone(self, user: int, phases: Sequence[Phase]) -> Fitted:
        mine = [self._sliced(phase, [user]).of_user(0) for phase in phases]
        return self.net.fit(self.models[user], self.rows[user], mine, self.draw(self.names[user]))

    def draw(self, user: Any) -> Draw:
        return Draw(5, user, 2, "training")

    @staticmethod
    def _sliced(phase: Phase, users: Sequence[int]) -> Phase:
        """The arrays of these users, of phases with those of all."""

        def of(named: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name: array[list(users)] for name, array in named.items()}

        pull = None if phase.pull is None else (phase.pull[0], of(phase.pull[1]))
        return Phase(**{**vars(phase), "pull": pull, "shift": None if phase.shift is None else of(phase.shift)})

    def assert_as_the_loop(self, phases: Sequence[Phase], tolerance: float = TOLERANCE) -> None:
        everyone = range(len(self.counts))
        found = self.together(everyone, phases)
        for user in everyone:
            wanted = self.alone(user, phases)
            assert found[user].loss == pytest.approx(wanted.loss, abs=tolerance)
            for name, array in wanted.tensors.items():
                assert found[user].tensors[name].dtype == array.dtype
                np.testing.assert_allclose(found[user].tensors[name], array, rtol=0, atol=tolerance, err_msg=f"{user} {name}")
            is_moved = any(not np.array_equal(found[user].tensors[name], start) for name, start in self.models[user].items())
            assert is_moved, "the phases train something"

    def assert_alone_in_bits(self, phases: Sequence[Phase]) -> None:
        n = len(self.counts)
        wanted = self.together(range(n), phases)
        rng = np.random.default_rng(1)
        for users in [[i] for i in range(n)] + [rng.permutation(n)[: 2 + k].tolist() for k in range(n - 2)]:
            for user, found in self.together(users, phases).items():
                assert found.loss == wanted[user].loss
                assert {name: a.tobytes() for name, a in found.tensors.items()} == {
                    name: a.tobytes() for name, a in wanted[user].tensors.items()
                }


COUNTS = (14, 9, 2, 21, 9, 13, 40, 4)  # some last batches are merged, some users have one batch alone
KINDS: dict[str, list[Phase]] = {
    "all": [phase()],
    "head then representation": [phase("head", epochs=5), phase("representation", epochs=2)],
    "without momentum and decay": [phase(momentum=0.0, weight_decay=0.0)],
    "adam": [phase(optimizer="adam", lr=0.01)],
    "updates": [phase(epochs=None, updates=7)],
    "batches of one": [phase(batch_size=1, epochs=1, lr=0.01)],
    "whole users": [phase(batch_size=None, epochs=4)],
    "nothing in the end": [phase(), phase("head", epochs=0)],
}


@pytest.fixture(scope="module")
def group() -> Group:
    return Group(network(MLP, (WIDTH,)), (WIDTH,), COUNTS)


@pytest.mark.parametrize("kind", KINDS)
def test_users_in_stacks_take_the_steps_of_the_loop(kind: str, group: Group) -> None:
    group.assert_as_the_loop(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_no_neighbour_changes_a_bit_of_a_user(kind: str, group: Group) -> None:
    group.assert_alone_in_bits(KINDS[kind])


def test_small_parts_of_a_stack_give_the_bits_of_large_ones(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["head then representation"]
    wanted = group.together(range(len(COUNTS)), kind)
    for limit in ("_MAX_WEIGHTS", "_MAX_GATHERED", "_MAX_STACK"):
        monkeypatch.setattr(stack, limit, 200)
    found = group.together(range(len(COUNTS)), kind)
    for user, fitted in wanted.items():
        assert {name: a.tobytes() for name, a in found[user].tensors.items()} == {name: a.tobytes() for name, a in fitted.tensors.items()}


WIDE = (150,)


@pytest.fixture(scope="module")
def wide() -> Group:
    return Group(network({**MLP, "hidden": [64, 8]}, WIDE), WIDE, (14, 9, 30, 21, 9, 33))


def with_arrays(group: Group, what: str, names: Sequence[str] | None = None) -> Phase:
    rng = np.random.default_rng(2)
    arrays = {name: np.stack([0.2 * rng.standard_normal(model[name].shape).astype(np.float32) for model in group.models]) for name in
              (group.models[0] if names is None else names)}  # fmt: skip
    return phase(**{"pull": {"pull": (0.7, arrays)}, "shift": {"shift": arrays}}[what])


@pytest.mark.parametrize("kind", [*KINDS, "pull", "shift", "pull of weights alone"])
def test_wide_layers_of_users_with_few_rows_are_trained_by_rows(kind: str, wide: Group) -> None:
    assert has_few_rows(14, phase(), 151)
    assert not has_few_rows(33, phase(), 151)
    assert not has_few_rows(14, phase(epochs=1), 151)
    weights = [name for name in wide.models[0] if name.endswith("weight")]
    phases = KINDS.get(kind) or [with_arrays(wide, kind.partition(" ")[0], weights if "alone" in kind else None)]
    wide.assert_as_the_loop(phases, 2e-5)
    wide.assert_alone_in_bits(phases)


def test_anchors_and_shifts_are_those_of_the_loop(group: Group) -> None:
    group.assert_as_the_loop([with_arrays(group, "pull", ["representation.1.weight", "head.bias"])])
    group.assert_as_the_loop([with_arrays(group, "shift")])


@pytest.mark.parametrize(
    ("model", "shape", "loss"),
    [
        ({"name": "linear", "classes": CLASSES}, (2, 3), "cross_entropy"),
        ({"name": "mlp", "hidden": [5], "classes": CLASSES, "pool": 2, "input_mean": [0.3]}, (1, 4, 4), "cross_entropy"),
        ({"name": "mlp", "hidden": [5], "classes": 1}, (4,), "least_squares"),
        ({"build": "tests.fixture_nets:in_a_row", "head": ["4"]}, (4,), "cross_entropy"),
    ],
)
def test_other_models_of_connected_layers_stack_too(model: Mapping[str, Any], shape: tuple[int, ...], loss: str) -> None:
    found = Group(network(model, shape, loss), shape, (7, 12, 7))
    found.assert_as_the_loop([phase("head", epochs=2), phase()])
    found.assert_alone_in_bits([phase("head", epochs=2), phase()])


def in_a_row(between: str, **options: Any) -> dict[str, Any]:
    return {"build": "tests.fixture_nets:in_a_row", "options": {"between": between, **options}, "head": ["4"]}


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        ({"name": "cnn", "classes": 3}, (3, 16, 16), "the model has a Conv2d named 'representation.0'"),
        ({"name": "lstm", "symbols": 5, "classes": 3}, (4,), "the model has a LastOutput named 'representation'"),
        ({"build": "tests.fixture_nets:normed", "options": {"width": 4}}, (4,), "the model has a Parts: want layers Linear and ReLU"),
        (in_a_row("Dropout", p=0.5), (4,), "the model has a Dropout named '3'"),
        (in_a_row("BatchNorm1d", num_features=5), (4,), "the model has a BatchNorm1d named '3'"),
    ],
)
def test_a_layer_that_cannot_be_stacked_is_named(model: Mapping[str, Any], shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model.training is stacked, but {said}.*, or training: alone$"):
        network(model, shape)


def test_a_loss_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model.training is stacked, but the loss is 'tests.fixture_nets:SMOOTHED': want cross_entropy"):
        network(MLP, (4,), "tests.fixture_nets:SMOOTHED")


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", TOGETHER)
def test_methods_give_what_they_give_user_by_user(name: str, optimizer: Mapping[str, Any]) -> None:
    method = {"name": name, "batch_size": 4, "optimizer": optimizer}
    found = {training: Users(method, model={**MLP, "training": training}) for training in ("alone", "stacked")}
    for number, asked in ((1, (0, 1, 2)), (2, (0, 2))):
        returned = {training: users.round(number, a_model(users, seed=number), asked) for training, users in found.items()}
        for alone, stacked in zip(returned["alone"], returned["stacked"], strict=True):
            np.testing.assert_allclose(stacked, alone, rtol=0, atol=2e-5)
    one, other = found["alone"].state, found["stacked"].state
    np.testing.assert_allclose(other.private, one.private, rtol=0, atol=2e-5)
    assert one.kept.keys() == other.kept.keys()
    for key, array in one.kept.items():
        np.testing.assert_allclose(other.kept[key], array, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", [{"name": "pfedme"}, {"name": "apfl", "adaptive": True}], ids=["pfedme", "apfl"])
def test_updates_with_rules_go_user_by_user_with_the_bits_of_the_loop(method: Mapping[str, Any]) -> None:
    found = [Users({**PLAIN, **method}, model={**MLP, "training": training}) for training in ("alone", "stacked")]
    least = min(len(user.target) for user in found[0].users)
    for users in found:  # all of them in one group
        equal = [replace(user, features=user.features[:least], target=user.target[:least]) for user in users.users]
        users.local = replace(users.local, users=equal)
    for number in (1, 2):
        one, other = (users.round(number, a_model(users)) for users in found)
        assert one[0].tobytes() == other[0].tobytes()
        assert one[1].tobytes() == other[1].tobytes()
    assert {name: array.tobytes() for name, array in found[0].state.kept.items()} == {
        name: array.tobytes() for name, array in found[1].state.kept.items()
    }


def test_phases_train_all_users_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Context] = []
    found = partial._context
    monkeypatch.setattr(partial, "_context", lambda *given: (calls.append(made := found(*given)), made)[1])
    users = Users({"name": "fedrep", "batch_size": 4}, model={**MLP, "training": "stacked"})
    users.round(1, a_model(users))
    (context,) = calls
    assert context.target.shape == (3, max(len(user.target) for user in users.users))
    assert np.isnan(context.target).sum() == sum(max(len(u.target) for u in users.users) - len(user.target) for user in users.users)


def test_fine_tuned_models_are_judged_as_user_by_user() -> None:
    method = {"name": "fedrep", "batch_size": 4, "fine_tune": ["head", "all"]}
    found = [Users(method, model={**MLP, "training": training}) for training in ("alone", "stacked")]
    for mode in (0, 1, 2):
        one, other = (users.judged(1, a_model(users), mode) for users in found)
        np.testing.assert_allclose(other.loss, one.loss, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(other.metric, one.metric)


def test_inputs_beyond_what_a_host_keeps_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, found = KINDS["all"], []
    for limit in (1 << 24, 14 * WIDTH):  # all, and those of the first user
        monkeypatch.setattr("coterie_client.nets.network._MAX_KEPT", limit)
        users = Group(network(MLP, (WIDTH,)), (WIDTH,), COUNTS)
        rounds = [users.together(range(len(COUNTS)), kind) for _ in range(2)]
        found += [[fitted.tensors["head.bias"].tobytes() for _, fitted in sorted(each.items())] for each in rounds]
        assert len(users.net._kept) == (len(COUNTS) if limit > 1000 else 1)
    assert found[1:] == found[:1] * 3


def test_a_stack_of_nobody_is_none(group: Group) -> None:
    assert list(group.net.stacks(np.zeros(0, np.int64), [phase()])) == []


def test_the_user_whose_model_diverges_is_named() -> None:
    method = {"name": "fedavg", "batch_size": 4, "epochs": 50, "optimizer": {"lr": 1e12, "momentum": 0.0}}
    users = Users(method, model={**MLP, "training": "stacked"})
    with pytest.raises(RunError, match=r"^user 'u\d' in round 1: tensor '.*' has (nan|inf) after training"):
        users.round(1, a_model(users))


def test_an_experiment_without_the_key_trains_user_by_user(tmp_path: Path) -> None:
    model = network_experiment(tmp_path / "users.npz", {"name": "fedrep"}).model
    assert model is not None
    assert model.training == "alone"
    assert not TorchNetwork(model, "cross_entropy", 1, (WIDTH,)).is_stacked


@pytest.mark.parametrize("loss", ["cross_entropy", "least_squares"])
def test_models_judged_together_get_the_bits_of_each_alone(loss: str) -> None:
    net = network({**MLP, "classes": 3} if loss == "cross_entropy" else {**MLP, "classes": 1}, (WIDTH,), loss)
    users = Group(net, (WIDTH,), (120, 3, 1, 40), classes=3)
    models = {name: np.stack([model[name] for model in users.models]) for name in users.models[0]}
    first = next(iter(models))
    models[first] = np.broadcast_to(users.models[0][first], models[first].shape)  # a tensor that all users share
    losses, metrics = net.judge_together(models, users.rows)
    for i, rows in enumerate(users.rows):
        assert (losses[i], metrics[i]) == net.judge({name: array[i] for name, array in models.items()}, rows)
