"""Local updates of networks: steps against their formulas, what moves and what does not, and the same bits whatever came before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from coterie.draws.streams import stream
from coterie.errors import RunError
from coterie.experiment.model import LinearModel, LstmModel, MlpModel, ModelConfig
from coterie_client.learning import Draw, Fitted, Phase, Rows, epochs
from coterie_client.nets import TorchNetwork
from tests import fixture_nets

Tensors = Mapping[str, NDArray[Any]]

DRAW = Draw(seed=7, user="u3", round=4, purpose="training")
N_ROWS = 23


def custom(name: str, head: Sequence[str] = ("head",), loss: str = "cross_entropy", **options: Any) -> TorchNetwork:
    config: ModelConfig = TypeAdapter(ModelConfig).validate_python(
        {"build": f"tests.fixture_nets:{name}", "head": list(head), "options": options}
    )
    return TorchNetwork(config, loss, 1, (4,))


def rows(n_rows: int = N_ROWS, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    features, target = rng.standard_normal((n_rows, 4)), rng.integers(0, 3, n_rows).astype(float)
    features.flags.writeable = target.flags.writeable = False
    return Rows(features, target)


def phase(part: Any, **changes: Any) -> Phase:
    return Phase(**{"part": part, "epochs": 3, "updates": None, "batch_size": 5, "lr": 0.1, **changes})


def fit(network: TorchNetwork, *phases: Phase, of: Rows | None = None, draw: Draw = DRAW, tensors: Tensors | None = None) -> Fitted:
    return network.fit(network.initial() if tensors is None else tensors, rows() if of is None else of, phases, draw)


def moved(network: TorchNetwork, fitted: Fitted) -> set[str]:
    start = network.initial()
    return {name for name, array in fitted.tensors.items() if not np.array_equal(array, start[name])}


def assert_same_bits(found: Tensors, wanted: Tensors) -> None:
    assert {name: array.tobytes() for name, array in found.items()} == {name: array.tobytes() for name, array in wanted.items()}


def assert_close(found: Fitted, wanted: Fitted, tolerance: float) -> None:
    for name, array in wanted.tensors.items():
        np.testing.assert_allclose(found.tensors[name], array, rtol=0, atol=tolerance, err_msg=name)
    assert found.loss == pytest.approx(wanted.loss, abs=tolerance)


# ---- steps


@pytest.mark.parametrize("cache", [True, False])
def test_the_first_step_is_the_one_computed_by_hand(cache: bool) -> None:
    """W = 0 gives both classes 1/2. Rows (1, 2) of class 0 and (3, -1) of class 1: the gradient of W_0 is
    (-(1, 2) + (3, -1)) / 4 = (1/2, -3/4), that of W_1 its negative, that of the biases 0; the loss is log 2."""
    network = TorchNetwork(LinearModel(name="linear", classes=2), "cross_entropy", 0, (2,))
    zeros = {name: np.zeros_like(array) for name, array in network.initial().items()}
    two = Rows(np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([0.0, 1.0]))
    one_step = phase("head", epochs=None, updates=1, batch_size=2, lr=0.5, cache=cache)
    fitted = fit(network, one_step, of=two, tensors=zeros)
    np.testing.assert_allclose(fitted.tensors["head.weight"], [[-0.25, 0.375], [0.25, -0.375]], rtol=1e-6)
    np.testing.assert_allclose(fitted.tensors["head.bias"], [0.0, 0.0], atol=1e-7)
    assert fitted.loss == pytest.approx(np.log(2), rel=1e-6)


def by_formula(start: Tensors, of: Rows, step: Phase, draw: Draw) -> tuple[NDArray[Any], NDArray[Any], float]:
    """Softmax regression by SGD in float64: v <- momentum v + g + decay w + mu (w - anchor) + shift, w <- w - lr v."""
    weight, bias = (start[name].astype(float) for name in ("head.weight", "head.bias"))
    theta = np.concatenate([weight, bias[:, None]], axis=1)
    x, y = np.c_[of.features, np.ones(len(of.target))], np.eye(len(theta))[of.target.astype(int)]

    def joined(named: Tensors) -> NDArray[Any]:
        return np.concatenate([named["head.weight"], named["head.bias"][:, None]], axis=1).astype(float)

    velocity, losses = np.zeros_like(theta), []
    for epoch in range(step.epochs or 0):
        order = stream(draw.seed, draw.purpose, draw.user, draw.round, 0, epoch).order(len(x))
        for batch in np.split(order, range(step.batch_size, len(x), step.batch_size)):
            scores = x[batch] @ theta.T
            likely = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            losses.append(-np.log((likely * y[batch]).sum(axis=1)).mean())
            gradient = (likely - y[batch]).T @ x[batch] / len(batch) + step.weight_decay * theta
            if step.pull is not None:
                gradient += step.pull[0] * (theta - joined(step.pull[1]))
            if step.shift is not None:
                gradient += joined(step.shift)
            velocity = step.momentum * velocity + gradient
            theta = theta - step.lr * velocity
    return theta[:, :-1], theta[:, -1], float(np.mean(losses))


ANCHOR = {"head.weight": np.full((3, 4), 0.3, np.float32), "head.bias": np.array([1, 2, 3], np.float32)}


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"pull": (0.7, ANCHOR), "momentum": 0.5},
        {"shift": ANCHOR},
        {"pull": (0.7, ANCHOR), "shift": ANCHOR, "weight_decay": 0.1},
    ],
    ids=["plain", "momentum", "decay", "both", "pull", "shift", "all"],
)
def test_sgd_follows_its_formula(changes: dict[str, Any], cache: bool) -> None:
    network = TorchNetwork(LinearModel(name="linear", classes=3), "cross_entropy", 0, (4,))
    step = phase("head", cache=cache, **changes)
    fitted = fit(network, step)
    weight, bias, loss = by_formula(network.initial(), rows(), step, DRAW)
    np.testing.assert_allclose(fitted.tensors["head.weight"], weight, atol=1e-6)
    np.testing.assert_allclose(fitted.tensors["head.bias"], bias, atol=1e-6)
    assert fitted.loss == pytest.approx(loss, abs=1e-6)


def by_torch(network: TorchNetwork, step: Phase) -> dict[str, NDArray[Any]]:
    """All of a model of `two_layers` trained by torch's own optimizer classes."""
    net = fixture_nets.two_layers()
    net.load_state_dict({name: torch.tensor(array) for name, array in network.initial().items()})
    if step.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=step.lr, weight_decay=step.weight_decay, foreach=False)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=step.lr, momentum=step.momentum, weight_decay=step.weight_decay, foreach=False)
    x, y = torch.tensor(rows().features, dtype=torch.float32), torch.tensor(rows().target, dtype=torch.int64)
    for epoch in range(step.epochs or 0):
        order = torch.from_numpy(stream(DRAW.seed, DRAW.purpose, DRAW.user, DRAW.round, 0, epoch).order(N_ROWS))
        for batch in torch.split(order, step.batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(net(x[batch]), y[batch]))
            optimizer.step()
    return {name: tensor.numpy() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.5, "weight_decay": 1e-2},
        {"momentum": 0.0},
        {"optimizer": "adam", "lr": 0.01},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 1e-2},
    ],
    ids=["sgd", "sgd without momentum", "adam", "adam with decay"],
)
def test_optimizers_have_the_bits_of_those_of_torch(changes: dict[str, Any]) -> None:
    network = custom("two_layers", head=["5"])
    step = phase("all", **changes)
    assert_same_bits(fit(network, step).tensors, by_torch(network, step))


def test_least_squares_steps_halve_the_squares() -> None:
    """f = 1/(2m) sum (y - w'x)^2: from w = b = 0 with lr 1, w = mean(y x) and b = mean(y)."""
    network = TorchNetwork(LinearModel(name="linear", classes=1), "least_squares", 0, (2,))
    zeros = {name: np.zeros_like(array) for name, array in network.initial().items()}
    two = Rows(np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([2.0, 1.0]))
    fitted = fit(network, phase("head", epochs=1, batch_size=2, lr=1.0), of=two, tensors=zeros)
    np.testing.assert_allclose(fitted.tensors["head.weight"], [[2.5, 1.5]], rtol=1e-6)
    np.testing.assert_allclose(fitted.tensors["head.bias"], [1.5], rtol=1e-6)
    assert fitted.loss == pytest.approx((4 + 1) / 4)
    assert network.judge(zeros, two) == pytest.approx((1.25, 2.5))


# ---- batches


def sizes(n_rows: int, **changes: Any) -> list[list[int]]:
    return [epoch.sizes for epoch in epochs(n_rows, phase("all", **changes), DRAW, 0)]


def test_a_last_batch_of_one_row_joins_the_one_before() -> None:
    assert sizes(20, epochs=1, batch_size=10) == [[10, 10]]
    assert sizes(21, epochs=1, batch_size=10) == [[10, 11]]
    assert sizes(22, epochs=1, batch_size=10) == [[10, 10, 2]]
    assert sizes(2, epochs=1, batch_size=10) == [[2]]
    assert sizes(11, epochs=1, batch_size=10) == [[11]]
    assert sizes(11, epochs=1, batch_size=None) == [[11]]
    assert sizes(3, epochs=1, batch_size=1) == [[1, 1, 1]]


def test_updates_count_steps_over_as_many_epochs_as_they_need() -> None:
    assert sizes(20, epochs=None, updates=5, batch_size=10) == [[10, 10], [10, 10], [10]]
    assert sizes(20, epochs=None, updates=1, batch_size=10) == [[10]]
    assert sizes(20, epochs=0) == []


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    first, second = (epoch.order.tolist() for epoch in epochs(N_ROWS, phase("all", epochs=2), DRAW, 1))
    assert sorted(first) == sorted(second) == list(range(N_ROWS))
    assert first != second
    assert first == stream(7, "training", "u3", 4, 1, 0).order(N_ROWS).tolist()


# ---- cached features


CACHED = ["plain", "without_bias", "scaled", "normed", "dropping"]
NOT_CACHED = ["ending", "named", "mixing"]


@pytest.mark.parametrize("name", [*CACHED, *NOT_CACHED])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_cached_features_train_the_same_head(name: str, optimizer: str) -> None:
    network = custom(name)
    settings = {"optimizer": optimizer, "lr": 0.02, "momentum": 0.5, "weight_decay": 1e-3, "epochs": 5}
    cached, direct = (fit(network, phase("head", cache=cache, **settings)) for cache in (True, False))
    assert_close(cached, direct, 1e-5)


@pytest.mark.parametrize("name", [*CACHED, *NOT_CACHED])
def test_features_are_computed_once_where_they_are_constant(name: str) -> None:
    """Where a model does something after its head, or its features depend on the batch, the head is trained through all of it."""
    network = custom(name)
    fixture_nets.CALLS.clear()
    fit(network, phase("head", epochs=4))
    n_steps = 4 * 5  # of 23 rows, in batches of 5
    assert (len(fixture_nets.CALLS) < n_steps) == (name in CACHED)


def test_a_head_of_several_layers_is_told_by_prefixes() -> None:
    network = custom("two_layers", head=["3", "5"])
    assert moved(network, fit(network, phase("head"))) == {"3.weight", "3.bias", "5.weight", "5.bias"}
    assert moved(network, fit(network, phase("representation"))) == {"0.weight", "0.bias"}
    only_last = custom("two_layers", head=["5."])
    assert_close(fit(only_last, phase("head")), fit(only_last, phase("head", cache=False)), 1e-5)


def test_cached_features_keep_what_a_method_adds() -> None:
    network = custom("scaled")
    start = network.initial()
    added = {"pull": (0.5, start), "shift": {name: np.full_like(array, 0.01) for name, array in start.items()}}
    cached, direct = (fit(network, phase("head", cache=cache, **added)) for cache in (True, False))
    assert_close(cached, direct, 1e-5)
    assert np.abs(cached.tensors["head.temperature"] - fit(network, phase("head")).tensors["head.temperature"]) > 1e-4


def test_images_and_convolutions_are_cached_alike() -> None:
    config: ModelConfig = TypeAdapter(ModelConfig).validate_python(
        {"name": "cnn", "channels": [3, 4], "hidden": [6, 5], "classes": 3, "input_mean": [0.4, 0.5], "input_std": [0.2, 0.3]}
    )
    network = TorchNetwork(config, "cross_entropy", 0, (2, 16, 17))
    images = Rows(np.random.default_rng(0).integers(0, 256, (12, 2, 16, 17), dtype=np.uint8), np.arange(12) % 3)
    cached, direct = (fit(network, phase("head", cache=cache), of=images) for cache in (True, False))
    assert_close(cached, direct, 1e-5)
    assert moved(network, cached) == {"head.weight", "head.bias"}
    trained = fit(network, phase("all", epochs=30), of=images)
    assert trained.loss < network.judge(network.initial(), images)[0]
    assert all(array.flags.c_contiguous for array in trained.tensors.values())


# ---- what moves


@pytest.mark.parametrize("name", ["plain", "normed", "dropping"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_part_that_is_fixed_keeps_its_bits(name: str, optimizer: str) -> None:
    """Its batch-norm statistics too: they do not see the rows that pass."""
    network = custom(name)
    by_part = {part: {tensor.name for tensor in network.tensors if tensor.part == part} for part in ("head", "representation")}
    for part, names in by_part.items():
        for cache in (True, False):
            assert moved(network, fit(network, phase(part, optimizer=optimizer, cache=cache))) == names
    assert moved(network, fit(network, phase("all", optimizer=optimizer))) == by_part["head"] | by_part["representation"]


def test_phases_follow_one_another() -> None:
    network = custom("normed")
    head, representation = phase("head"), phase("representation", epochs=1)
    both = fit(network, head, representation)
    first = fit(network, head)
    assert_same_bits(
        {name: array for name, array in both.tensors.items() if name.startswith("head")},
        {name: array for name, array in first.tensors.items() if name.startswith("head")},
    )
    assert moved(network, both) == {tensor.name for tensor in network.tensors}


def test_the_loss_is_that_of_the_last_phase() -> None:
    network = custom("plain")
    phases = [phase("head", epochs=5), phase("representation", epochs=1)]
    direct = [phase("head", epochs=5, cache=False), phases[1]]
    assert fit(network, *phases).loss == pytest.approx(fit(network, *direct).loss, abs=1e-5)
    assert fit(network, *phases).loss != pytest.approx(fit(network, phases[0]).loss, abs=1e-5)
    assert fit(network, phase("head", epochs=0)).loss == pytest.approx(network.judge(network.initial(), rows())[0])


def test_a_network_that_is_all_head_has_no_representation_to_train() -> None:
    network = TorchNetwork(LinearModel(name="linear", classes=3), "cross_entropy", 0, (4,))
    assert moved(network, fit(network, phase("representation"))) == set()
    assert fit(network, phase("head"), phase("representation")).loss == fit(network, phase("head")).loss


def test_counts_and_single_numbers_survive() -> None:
    network = custom("normed")
    start = network.initial()
    name = "representation.1.num_batches_tracked"
    assert start[name].dtype == np.int64
    assert start[name].shape == ()
    start[name] = np.array(2**40 + 1)
    fitted = fit(network, phase("representation", epochs=2, batch_size=5), tensors=start)
    assert fitted.tensors[name] == 2**40 + 1 + 2 * 5
    assert fitted.tensors[name].dtype == np.int64
    assert fitted.tensors[name].shape == ()
    assert fitted.tensors["head.0.num_batches_tracked"] == 0
    assert custom("scaled").initial()["head.temperature"].shape == ()


def test_parameters_that_a_model_freezes_stay() -> None:
    network = custom("frozen")
    assert moved(network, fit(network, phase("all"))) == {"head.weight", "head.bias"}
    assert moved(network, fit(network, phase("head"))) == {"head.weight", "head.bias"}


def test_only_the_part_that_is_trained_drops_out() -> None:
    network = custom("dropping")
    representation = fit(network, phase("representation"))
    assert not np.array_equal(
        representation.tensors["representation.0.weight"],
        fit(network, phase("representation"), draw=Draw(7, "u3", 4, "other")).tensors["representation.0.weight"],
    )
    one = Draw(7, "u3", 4, "training")
    assert_same_bits(fit(network, phase("all"), draw=one).tensors, fit(network, phase("all")).tensors)


# ---- bits


@pytest.mark.parametrize("name", ["plain", "normed", "dropping", "remembering"])
def test_a_user_is_trained_to_the_same_bits_whatever_was_trained_before(name: str) -> None:
    phases = [phase("head"), phase("representation", momentum=0.5), phase("all", optimizer="adam", epochs=1)]
    torch.manual_seed(1)
    alone = fit(custom(name), *phases)
    network = custom(name)
    fit(network, phase("all", lr=0.5, momentum=0.9), of=rows(14, seed=9), draw=Draw(7, "another", 4, "training"))
    torch.manual_seed(99)
    after = fit(network, *phases)
    assert_same_bits(after.tensors, alone.tensors)
    assert after.loss == alone.loss
    assert network.judge(after.tensors, rows()) == custom(name).judge(alone.tensors, rows())


def test_results_are_fresh_and_arguments_stay() -> None:
    network = custom("normed")
    start = network.initial()
    before = {name: array.copy() for name, array in start.items()}
    for array in start.values():
        array.flags.writeable = False
    first = fit(network, phase("all"), tensors=start)
    kept = {name: array.copy() for name, array in first.tensors.items()}
    fit(network, phase("all"), of=rows(14, seed=9), tensors=first.tensors)
    network.judge(start, rows())
    assert_same_bits(first.tensors, kept)
    assert_same_bits(start, before)
    assert_same_bits(network.initial(), before)
    network.initial()["head.1.bias"][:] = 9
    assert_same_bits(network.initial(), before)


def test_no_tensor_of_one_user_reaches_another() -> None:
    network = custom("plain")
    ours, theirs = fit(network, phase("all")), fit(network, phase("all"), of=rows(14, seed=9))
    again = fit(network, phase("representation"), tensors=ours.tensors)
    for name in ("head.weight", "head.bias"):
        assert np.array_equal(again.tensors[name], ours.tensors[name])
        assert not np.array_equal(theirs.tensors[name], ours.tensors[name])


def test_the_global_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    before, numpys = torch.get_rng_state(), str(np.random.get_state())
    network = custom("dropping")
    fit(network, phase("all"))
    network.judge(network.initial(), rows())
    assert torch.equal(torch.get_rng_state(), before)
    assert str(np.random.get_state()) == numpys


def test_the_place_of_rows_in_memory_changes_nothing() -> None:
    network = TorchNetwork(MlpModel(name="mlp", hidden=(33, 17), classes=3), "cross_entropy", 0, (37,))
    rng = np.random.default_rng(0)
    features, target = rng.standard_normal((29, 37)).astype(np.float32), rng.integers(0, 3, 29).astype(float)
    wanted = network.outputs(network.initial(), features)
    for offset in (4, 8, 20, 36):
        memory = bytearray(features.nbytes + offset)
        memory[offset:] = features.tobytes()
        shifted = np.frombuffer(memory, np.float32, offset=offset).reshape(features.shape)
        assert network.outputs(network.initial(), shifted).tobytes() == wanted.tobytes()
        found = fit(network, phase("head"), phase("all"), of=Rows(shifted, target))
        assert_same_bits(found.tensors, fit(network, phase("head"), phase("all"), of=Rows(features, target)).tensors)


def test_streams_are_named_by_user_round_and_purpose() -> None:
    network = custom("plain")
    found = {
        fit(network, phase("all"), draw=draw).tensors["head.bias"].tobytes()
        for draw in (DRAW, Draw(8, "u3", 4, "training"), Draw(7, "u4", 4, "training"), Draw(7, "u3", 5, "training"), Draw(7, "u3", 4, "x"))
    }
    assert len(found) == 5


def test_sequences_are_learnt() -> None:
    """The next symbol of a cycle of four, from the last three."""
    network = TorchNetwork(LstmModel(name="lstm", symbols=4, embedding=3, hidden=8, classes=4), "cross_entropy", 0, (3,))
    cycle = np.arange(40)
    text = Rows(np.stack([cycle, cycle + 1, cycle + 2], axis=1) % 4, (cycle + 3) % 4)
    fitted = fit(network, phase("all", epochs=15, optimizer="adam", lr=0.05), of=text)
    assert network.judge(fitted.tensors, text)[1] == 1.0
    assert_close(fit(network, phase("head"), of=text), fit(network, phase("head", cache=False), of=text), 1e-5)
    assert_same_bits(fit(network, phase("all"), of=text).tensors, fit(network, phase("all"), of=text).tensors)


# ---- what can go wrong


@pytest.mark.parametrize("cache", [True, False])
def test_numbers_that_are_not_finite_name_user_round_and_tensor(cache: bool) -> None:
    far = Rows(rows().features * 1e20, rows().target)
    network = TorchNetwork(MlpModel(name="mlp", hidden=(5,), classes=3), "cross_entropy", 0, (4,))
    with pytest.raises(RunError, match=r"user 'u3' in round 4: tensor 'representation.1.weight' has (nan|inf) after training, want finite"):
        fit(network, phase("all", lr=1e20), of=far)
    linear = TorchNetwork(LinearModel(name="linear", classes=3), "cross_entropy", 0, (4,))
    with pytest.raises(RunError, match=r"user 'u3' in round 4: tensor 'head.weight' has (nan|inf) after training, want finite numbers"):
        fit(linear, phase("head", lr=1e20, cache=cache), of=far)


def test_a_loss_that_is_not_finite_names_user_and_round() -> None:
    network = TorchNetwork(LinearModel(name="linear", classes=1), "least_squares", 0, (1,))
    far = Rows(np.ones((2, 1)), np.full(2, 1e30))
    with pytest.raises(RunError, match=r"user 'u3' in round 4: the loss has inf after training"):
        fit(network, phase("head", lr=1e-30, epochs=1, batch_size=2), of=far)


def test_what_a_custom_model_raises_is_one_sentence() -> None:
    network = custom("symbols")
    with pytest.raises(RunError, match=r"user 'u3' in round 4: model 'tests.fixture_nets:symbols' has failed: IndexError: index out of"):
        fit(network, phase("all"), of=Rows(np.full((3, 3), 6), np.zeros(3)))
    batches_of_one = phase("all", batch_size=1)
    with pytest.raises(RunError, match="has failed: ValueError: Expected more than 1 value per channel"):
        fit(custom("normed"), batches_of_one)


@pytest.mark.slow
def test_training_starts_without_the_compiler_of_torch() -> None:
    """It is what torch's optimizer classes bring: a second and 70 MB for each client."""
    code = (
        "import sys\nfrom tests.unit.test_nets_training import custom, fit, phase\n"
        "fit(custom('dropping'), phase('head'), phase('all'), phase('all', optimizer='adam'))\n"
        "print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == ["True", "False"]
