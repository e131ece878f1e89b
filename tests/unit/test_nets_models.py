"""The networks of a model section: what is built, how rows enter them, and what is refused with which sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from coterie.errors import ConfigError
from coterie.experiment.model import ModelConfig, TensorInfo
from coterie_client.data import UserData
from coterie_client.learning import Draw, Phase, Rows
from coterie_client.nets import TorchNetwork
from coterie_client.nets.rows import Reader

SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "linear": ((4,), {"name": "linear", "classes": 3}),
    "mlp": ((4,), {"name": "mlp", "hidden": [6, 5], "classes": 3}),
    "mlp on images": ((1, 9, 8), {"name": "mlp", "hidden": [5], "classes": 3, "pool": 4}),
    "cnn": ((3, 32, 32), {"name": "cnn", "classes": 10}),
    "lstm": ((5,), {"name": "lstm", "symbols": 7, "hidden": 6, "classes": 3}),
    "custom": ((4,), {"build": "tests.fixture_nets:normed"}),
}


def network(shape: tuple[int, ...] = (4,), loss: str = "cross_entropy", seed: int = 1, **model: Any) -> TorchNetwork:
    config: ModelConfig = TypeAdapter(ModelConfig).validate_python(model or SHAPES["mlp"][1])
    return TorchNetwork(config, loss, seed, shape)


def own(name: str, **settings: Any) -> TorchNetwork:
    return network(build=f"tests.fixture_nets:{name}", **settings)


def user(features: Any, target: Any, name: str = "u3", test: tuple[Any, Any] | None = None) -> UserData:
    features = np.asarray(features)
    test_features, test_target = test if test is not None else (features[:0], np.zeros(0))
    return UserData(name, None, features, np.asarray(target, float), np.asarray(test_features), np.asarray(test_target, float))


def shown(tensors: tuple[TensorInfo, ...]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(tensor.name, tensor.shape, tensor.part) for tensor in tensors]


# ---- what is built


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_values_are_the_seeds(name: str) -> None:
    shape, model = SHAPES[name]
    first = network(shape, **model).initial()
    torch.manual_seed(12345)
    again, other = network(shape, **model).initial(), network(shape, seed=2, **model).initial()
    assert {key: array.tobytes() for key, array in first.items()} == {key: array.tobytes() for key, array in again.items()}
    assert any(not np.array_equal(first[key], other[key]) for key in first)
    assert list(first) == [tensor.name for tensor in network(shape, **model).tensors]
    assert {array.dtype.name for array in first.values()} <= {"float32", "int64"}


def test_the_cnn_is_the_papers() -> None:
    """Two convolutions of 64 channels, fully connected layers of 120 and 64, ten classes."""
    shape, model = SHAPES["cnn"]
    tensors = network(shape, **model).tensors
    sizes = [size for _, size, _ in shown(tensors) if len(size) > 1]
    assert sizes == [(64, 3, 5, 5), (64, 64, 5, 5), (120, 64 * 5 * 5), (64, 120), (10, 64)]
    assert {tensor.name for tensor in tensors if tensor.part == "head"} == {"head.weight", "head.bias"}


def test_an_mlp_pools_images_first() -> None:
    shape, model = SHAPES["mlp on images"]
    built = network(shape, **model)
    assert shown(built.tensors)[0][1] == (5, 2 * 2)
    ones = np.full((2, 1, 9, 8), 255, np.uint8)
    ones[:, :, 8] = 0  # the last line of nine is left out by squares of four
    same = np.full((2, 1, 9, 8), 255, np.uint8)
    assert np.array_equal(built.outputs(built.initial(), ones), built.outputs(built.initial(), same))


def test_all_of_a_linear_model_is_its_head() -> None:
    assert {part for _, _, part in shown(network(**SHAPES["linear"][1]).tensors)} == {"head"}


def test_statistics_and_counts_are_told_apart() -> None:
    tensors = {tensor.name: tensor for tensor in own("normed").tensors}
    assert tensors["head.0.num_batches_tracked"] == TensorInfo("head.0.num_batches_tracked", (), True, "head", True, "BatchNorm1d")
    assert tensors["head.0.running_mean"] == TensorInfo("head.0.running_mean", (5,), False, "head", True, "BatchNorm1d")
    assert tensors["representation.1.weight"] == TensorInfo("representation.1.weight", (5,), False, "representation", False, "BatchNorm1d")


def test_the_kind_of_a_layer_is_the_nearest_class_of_torch() -> None:
    tensors = {tensor.name: tensor.layer for tensor in own("own_normed").tensors}
    assert tensors["representation.0.weight"] == tensors["head.inner.bias"] == "Linear"
    assert {kind for name, kind in tensors.items() if name.startswith("representation.1")} == {"BatchNorm1d"}
    assert tensors["head.temperature"] == "Module"


def test_options_reach_the_users_own_function() -> None:
    built = own("plain", options={"width": 4, "classes": 9})
    assert ("head.weight", (9, 5), "head") in shown(built.tensors)


# ---- how rows enter


def test_bytes_are_scaled_and_channels_centred() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 2, 4, 4), dtype=np.uint8)
    model: dict[str, Any] = {"name": "linear", "classes": 3}
    scaled = network((2, 4, 4), input_mean=[0.2, 0.4], input_std=[0.5, 0.25], **model)
    mean, std = (np.array(values, np.float32).reshape(2, 1, 1) for values in ([0.2, 0.4], [0.5, 0.25]))
    by_hand = (images.astype(np.float32) / np.float32(255) - mean) / std
    plain = network((2, 4, 4), **model)
    assert np.array_equal(scaled.outputs(scaled.initial(), images), plain.outputs(plain.initial(), by_hand))


def test_symbols_enter_as_they_are() -> None:
    built = own("symbols", input_mean=[5.0], input_std=[3.0])
    rows = np.random.default_rng(0).integers(0, 6, (4, 3))
    wide, narrow = (built.outputs(built.initial(), rows.astype(dtype)) for dtype in (np.int64, np.int32))
    assert np.array_equal(wide, narrow)
    assert not np.array_equal(wide[0], wide[1])


@pytest.mark.parametrize("model", [{"name": "linear", "classes": 3}, {"name": "cnn", "classes": 3}])
def test_rows_lie_where_torch_aligns_them(model: dict[str, Any]) -> None:
    """numpy aligns arrays to 16 bytes, and products of matrices may have other bits from other places."""
    config: ModelConfig = TypeAdapter(ModelConfig).validate_python(model)
    reader = Reader(config, True, (1, 16, 17), torch.device("cpu"))
    kept = [reader.inputs(np.zeros((n, 1, 16, 17), np.uint8)) for n in range(1, 40)]
    assert {tensor.data_ptr() % 64 for tensor in kept} == {0}


def test_rows_are_judged_in_chunks_of_one_size() -> None:
    built = network()
    features = np.random.default_rng(0).standard_normal((1001, 4))
    whole = built.outputs(built.initial(), features)
    pieces = [built.outputs(built.initial(), features[start : start + 100]) for start in range(0, 1001, 100)]
    assert whole.tobytes() == np.concatenate(pieces).tobytes()
    target = np.arange(1001) % 3
    loss, accuracy = built.judge(built.initial(), Rows(features, target))
    scores = whole.astype(float)
    wanted = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(1001), target]
    assert loss == pytest.approx(wanted.mean(), rel=1e-5)
    assert accuracy == (whole.argmax(axis=1) == target).mean()


def test_judging_uses_the_statistics_and_moves_none() -> None:
    built = own("normed")
    start = built.initial()
    start["representation.1.running_mean"][:] = 0.5
    features, target = np.random.default_rng(0).standard_normal((6, 4)), np.arange(6) % 3
    assert built.judge(start, Rows(features, target)) == built.judge(start, Rows(features, target))
    assert built.judge(start, Rows(features, target)) != built.judge(built.initial(), Rows(features, target))


# ---- what is refused


GOOD = np.zeros((3, 4)), [0, 1, 2]


def test_good_users_pass() -> None:
    network().check_users([user(*GOOD), user(*GOOD, name="u4", test=(np.ones((1, 4)), [2]))])
    shape, model = SHAPES["lstm"]
    network(shape, **model).check_users([user(np.full((2, 5), 6), [0, 2])])


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (user(np.zeros((1, 4)), [0]), "user 'u3' has 1 training row, want at least 2"),
        (user(np.zeros((0, 4)), []), "user 'u3' has 0 training rows, want at least 2"),
        (user(np.zeros((2, 5)), [0, 1]), r"user 'u3' has rows of shape \[5\], want \[4\], as the host's first user has"),
        (user(*GOOD, test=(np.zeros((1, 2, 2)), [0])), r"user 'u3' has rows of shape \[2, 2\], want \[4\]"),
        (user(np.zeros((2, 4)), [0, 3]), "user 'u3' has the label 3, want whole numbers from 0 to 2, which the model has"),
        (user(np.zeros((2, 4)), [0, -1]), "user 'u3' has the label -1, want whole numbers from 0"),
        (user(np.zeros((2, 4)), [0, 0.5]), "user 'u3' has the label 0.5, want whole numbers from 0"),
        (user(np.zeros((2, 4)), [0, np.nan]), "user 'u3' has the label nan, want whole numbers from 0"),
        (user(*GOOD, test=(np.zeros((1, 4)), [7])), "user 'u3' has the label 7, want whole numbers from 0 to 2"),
    ],
)
def test_users_that_cannot_be_trained_are_named(bad: UserData, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        network().check_users([user(*GOOD, name="u1"), bad])


@pytest.mark.parametrize("rows", [[[0] * 4 + [7]] * 2, [[-1] * 5] * 2, [[0.5] * 5] * 2])
def test_symbols_that_there_are_not_are_named(rows: Any) -> None:
    shape, model = SHAPES["lstm"]
    with pytest.raises(ConfigError, match=rf"user 'u3' has the symbol {rows[0][-1]}, want whole numbers from 0 to 6"):
        network(shape, **model).check_users([user(rows, [0, 1])])


@pytest.mark.parametrize(
    ("shape", "model", "sentence"),
    [
        ((3, 15, 32), {"name": "cnn", "classes": 2}, r"'cnn' reads images of at least 16x16, but a row has shape \[3, 15, 32\]"),
        ((4,), {"name": "cnn", "classes": 2}, r"'cnn' reads images of at least 16x16, but a row has shape \[4\]"),
        ((4,), {"name": "mlp", "classes": 2, "pool": 2}, r"model.pool is 2, but a row has shape \[4\]: want images"),
        ((4, 2), {"name": "lstm", "symbols": 3, "classes": 2}, r"'lstm' reads sequences of symbols, but a row has shape \[4, 2\]"),
        ((3, 8, 8), {"name": "linear", "classes": 2, "input_mean": [0, 0]}, "model.input_mean has 2 numbers, want 1, or one for each of 3"),
        ((3, 8, 8), {"name": "linear", "classes": 2, "input_std": [1, 1]}, "model.input_std has 2 numbers, want 1, or one for each of 3"),
        ((4,), {"name": "linear", "classes": 2, "device": "warp"}, "model.device is 'warp', want cpu or cuda"),
        ((4,), {"name": "linear", "classes": 2, "device": "meta"}, "model.device is 'meta', want cpu or cuda"),
    ],
)
def test_models_that_do_not_fit_the_rows_are_refused(shape: tuple[int, ...], model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        network(shape, **model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.device is 'cuda', but torch finds no such device here: want cpu"):
        network(name="linear", classes=2, device="cuda")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tests.no_such_module:build", "model 'tests.no_such_module:build' cannot be imported: ModuleNotFoundError: No module named"),
        ("tests.fixture_nets:absent", "does not exist: module 'tests.fixture_nets' has no 'absent'"),
        ("tests.fixture_nets:failing", "cannot be built with {}: ValueError: no weights here"),
        ("tests.fixture_nets:NOT_A_FUNCTION", "cannot be built with {}: TypeError: 'int' object is not callable"),
        ("tests.fixture_nets:nothing", "has built a NoneType, want a torch.nn.Module"),
        ("tests.fixture_nets:empty", "the model has no tensors, want parameters to train"),
        ("tests.fixture_nets:tied", "tensors 'representation.weight' and 'head.weight' of the model are one and the same"),
        ("tests.fixture_nets:lazy", "tensor 'representation.weight' of the model has no shape before its first rows"),
        ("tests.fixture_nets:doubles", "tensor 'representation.0.weight' of the model is torch.float64, want torch.float32"),
        ("tests.fixture_nets:stateful", "'head._extra_state' in the state of the model is a dict, want tensors alone"),
        ("tests.fixture_nets:unseeded", "tensor 'head.bias' of the model is another each time it is built, want no random numbers but"),
    ],
)
def test_models_of_the_users_own_are_refused_with_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        network(build=name)
    assert "\n" not in str(caught.value)


def test_options_that_a_function_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot be built with {'depth': 3}: TypeError: .*unexpected keyword argument 'depth'"):
        own("plain", options={"depth": 3})


def test_a_head_prefix_that_names_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"head prefix 'fc9' names no layer of the model, want one or more of 0, 3, 5$"):
        own("two_layers", head=["5", "fc9"])
    with pytest.raises(
        ConfigError, match=r"head prefix 'hea' names no layer of the model, want one or more of .*head"
    ):  # whole parts of a name count
        own("plain", head=["hea"])


@pytest.mark.parametrize(
    ("built", "rows", "sentence"),
    [
        (
            lambda: own("plain", options={"width": 6}),
            GOOD,
            r"the model cannot take rows of shape \[4\]: RuntimeError: mat1 and mat2 shapes",
        ),
        (lambda: own("flat_scores"), GOOD, r"the model gives \[2\] for 2 rows, want scores of shape \[2, classes\]"),
        (lambda: own("plain", loss="least_squares"), GOOD, "the model has 3 outputs, want 1 for the loss least_squares"),
    ],
)
def test_models_that_cannot_take_the_rows_are_refused(built: Any, rows: tuple[NDArray[Any], list[int]], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        built().check_users([user(*rows)])


def test_checking_users_changes_nothing() -> None:
    built = own("normed")
    before = {name: array.tobytes() for name, array in built.initial().items()}
    built.check_users([user(*GOOD)])
    draw, step = Draw(0, "a", 1, "t"), Phase("head", 0, None, 2, 0.1)
    after = built.fit(built.initial(), Rows(np.zeros((3, 4)), np.arange(3)), [step], draw)
    assert {name: array.tobytes() for name, array in after.tensors.items()} == before
